// The op-level traps of the qwen4_exp specification (section 8), each as a check on any backend.
//
// Numbers are those of the specification; expected values are literal.
#ifndef OFFLOAD_TESTS_OP_TRAPS_H_
#define OFFLOAD_TESTS_OP_TRAPS_H_

#include "op_values.h"

#define OFL_FOR_EACH_OP_TRAP(X)                                  \
  X(trap_17_the_division_by_the_stream_count_is_inside_the_gate) \
  X(trap_18_the_mix_is_a_mean_over_streams)                      \
  X(trap_19_a_zero_update_leaves_the_stack_bits_alone)           \
  X(trap_20_each_stream_has_its_own_statistic_and_weights)       \
  X(trap_21_the_injection_is_one_at_zero_and_between_0_and_2)    \
  X(trap_22_streams_are_stream_major)                            \
  X(trap_24_value_heads_share_key_heads_in_consecutive_groups)   \
  X(trap_25_the_l2_epsilon_is_added_to_the_sum_of_squares)       \
  X(trap_26_queries_are_scaled_after_normalisation)              \
  X(trap_27_the_output_is_read_after_the_update)                 \
  X(trap_29_chunks_with_tails_equal_the_recurrence)              \
  X(trap_30_the_convolution_caches_its_inputs)                   \
  X(trap_32_strong_decay_gives_no_infinity)                      \
  X(trap_34_a_zero_output_gate_halves)                           \
  X(trap_36_relu_comes_before_the_sum_over_heads)                \
  X(trap_38_the_last_complete_block_competes)                    \
  X(trap_39_the_visible_count_includes_the_query)                \
  X(trap_48_router_weights_are_a_renormalised_softmax_over_all)  \
  X(trap_49_equal_logits_pick_the_lower_id)                      \
  X(trap_51_router_weights_follow_their_ids)                     \
  X(trap_52_the_shared_gate_scales_the_shared_expert_only)       \
  X(trap_56_dilated_taps_are_three_rows_apart)                   \
  X(trap_57_a_zero_convolution_leaves_the_direct_branch)         \
  X(trap_58_a_zero_query_gives_half_the_value)

namespace offload {

#define OFL_DECLARE_OP_TRAP(name) void name(OpValues& v);
OFL_FOR_EACH_OP_TRAP(OFL_DECLARE_OP_TRAP)
#undef OFL_DECLARE_OP_TRAP

}  // namespace offload

#endif  // OFFLOAD_TESTS_OP_TRAPS_H_
