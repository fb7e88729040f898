// Numeric cases that reported bugs of other runtimes left behind (tests/data/ops/*.json), as checks on any backend.
//
// Attention sinks and sliding windows wait for an op that has them.
#ifndef OFFLOAD_TESTS_OP_HANDED_H_
#define OFFLOAD_TESTS_OP_HANDED_H_

#include "op_values.h"

#define OFL_FOR_EACH_HANDED_CASE(X)                       \
  X(gated_delta_lengths_leave_the_right_state)            \
  X(gated_delta_slots_start_from_zero_and_continue)       \
  X(rope_rotates_the_first_part_of_a_head_in_halves)      \
  X(attention_weights_are_a_softmax_over_what_is_visible) \
  X(results_beyond_the_fp16_range_stay_finite)            \
  X(equal_router_logits_pick_lower_ids)                   \
  X(as_many_experts_as_there_are_may_be_chosen)           \
  X(routing_of_128_experts_top_8_has_the_right_weights)   \
  X(all_tokens_may_go_to_one_expert)                      \
  X(experts_without_tokens_change_nothing)                \
  X(a_step_without_tokens_does_nothing)                   \
  X(the_shared_expert_is_gated_per_token)                 \
  X(router_weights_without_renormalising_take_a_scale)    \
  X(prefill_of_6554_tokens_top_10_equals_steps_of_512)    \
  X(prefill_of_8192_tokens_top_8_equals_steps_of_512)     \
  X(prefill_of_65536_tokens_top_1_equals_steps_of_512)

namespace offload {

#define OFL_DECLARE_HANDED_CASE(name) void name(OpValues& v);
OFL_FOR_EACH_HANDED_CASE(OFL_DECLARE_HANDED_CASE)
#undef OFL_DECLARE_HANDED_CASE

}  // namespace offload

#endif  // OFFLOAD_TESTS_OP_HANDED_H_
