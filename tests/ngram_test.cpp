// Hashed n-gram rows against the published constants and row ids (specification of qwen4_exp, appendix A). Names carry
// the number of the trap (section 8) that they stand for.
#include "core/ngram.h"

#include <doctest/doctest.h>

namespace offload::ngram_test {

namespace {

using Ids = std::vector<int32_t>;
using Rows = std::vector<int64_t>;

constexpr int64_t kPublishedVocab = 248320;
constexpr int32_t kEndOfText = 248044, kImEnd = 248046;

NgramEmbeddingSpec published_spec() {
  NgramEmbeddingSpec spec;
  spec.width = 2560;
  spec.ngram_size = 3;
  spec.heads_per_ngram = 8;
  spec.vocab_base = 20000000;
  spec.row_divisor = 128;
  spec.seed = 1234;
  spec.conv_taps = 4;
  spec.eos_id = kEndOfText;
  return spec;
}

NgramEmbeddingSpec tiny_spec() {
  NgramEmbeddingSpec spec = published_spec();
  spec.width = 32;
  spec.heads_per_ngram = 2;
  spec.vocab_base = 257;
  spec.row_divisor = 16;
  spec.eos_id = 1000;
  return spec;
}

Rows vector_of(std::span<const int64_t> values) {
  return {values.begin(), values.end()};
}

// The rows of token `at` of a fresh sequence.
Rows rows_of(const NgramHash& hash, const NgramEmbeddingSpec& spec, const Ids& ids, size_t at) {
  const Ids previous(static_cast<size_t>(hash.context()), spec.eos_id);
  Rows rows(ids.size() * static_cast<size_t>(hash.heads()));
  hash.row_ids(previous, ids, rows);
  const auto begin = rows.begin() + static_cast<std::ptrdiff_t>(at) * hash.heads();
  return {begin, begin + hash.heads()};
}

Rows published_rows(const Ids& ids, size_t at) {
  return rows_of(NgramHash(published_spec(), kPublishedVocab), published_spec(), ids, at);
}

// splitmix(x) reduced as the multipliers are: vocabulary 1 makes the modulus 2^62 - 1, and the seed undoes the constant
// that is added before the mixing.
int64_t multiplier_of_splitmix(uint64_t x) {
  NgramEmbeddingSpec spec = published_spec();
  spec.seed = static_cast<int64_t>(x - 0x9E3779B97F4A7C15u);
  return NgramHash(spec, 1).multipliers()[0];
}

}  // namespace

TEST_CASE("published_constants_are_recomputed_exactly") {
  const NgramHash hash(published_spec(), kPublishedVocab);
  CHECK(vector_of(hash.multipliers()) == Rows{23703573157769, 20109073645365, 8052911324071});
  CHECK(vector_of(hash.primes()) == Rows{20000003, 20000023, 20000033, 20000047, 20000059, 20000063, 20000069, 20000077,
                                         20000081, 20000093, 20000107, 20000147, 20000153, 20000159, 20000161,
                                         20000171});
  CHECK(vector_of(hash.offsets()) == Rows{0, 20000003, 40000026, 60000059, 80000106, 100000165, 120000228, 140000297,
                                          160000374, 180000455, 200000548, 220000655, 240000802, 260000955, 280001114,
                                          300001275});
  CHECK(hash.offsets().back() + hash.primes().back() == 320001446);
  CHECK(hash.table_rows() == 320001536);
  CHECK(hash.table_rows() == 128 * 2500012);
  CHECK(hash.heads() == 16);
  CHECK(hash.context() == 2);
}

TEST_CASE("splitmix_gives_the_published_values") {
  constexpr uint64_t kModulus = (uint64_t{1} << 62) - 1;
  CHECK(multiplier_of_splitmix(0) == static_cast<int64_t>(2 * (0xE220A8397B1DCDAFu % kModulus) + 1));
  CHECK(multiplier_of_splitmix(1) == static_cast<int64_t>(2 * (0x910A2DEC89025CC1u % kModulus) + 1));
}

TEST_CASE("a_second_layer_has_other_multipliers_and_the_next_primes") {
  NgramEmbeddingSpec spec = published_spec();
  spec.ordinal = 1;
  const NgramHash second(spec, kPublishedVocab), first(published_spec(), kPublishedVocab);
  CHECK(vector_of(second.multipliers()) == Rows{3352040966061, 19752442147475, 10742103100073});
  CHECK(second.primes().front() == 20000213);
  CHECK(second.offsets().front() == 0);
  CHECK(second.primes().front() > first.primes().back());
}

TEST_CASE("trap_54_missing_predecessors_count_as_the_end_of_text_id") {
  const Rows expected{768795,    32189829,  51641306,  71063218,  85886852,  104959504, 134316676, 154856127,
                      173280301, 194832882, 202840854, 222492280, 256138797, 271010889, 296240796, 304432235};
  CHECK(published_rows({0}, 0) == expected);
  // The same as after an end of text; not as after id 0.
  CHECK(published_rows({kEndOfText, 0}, 1) == expected);
  CHECK(published_rows({0, 0}, 1) != expected);
}

TEST_CASE("a_chat_turn_hashes_to_the_published_rows") {
  CHECK(published_rows({248045, 846, 198}, 2) == Rows{4582007, 37691206, 44255274, 65455601, 89351473, 103985474,
                                                      135938409, 145212418, 163775156, 199680439, 200044921, 228961047,
                                                      240669798, 272736434, 296838250, 317942745});
}

TEST_CASE("trap_53_and_55_an_end_of_text_hides_itself_and_all_older_ids_but_keeps_its_own_context") {
  const Ids ids{9707, 11, 1879, kEndOfText, 5, 6, 7};
  CHECK(published_rows(ids, 2) == Rows{6380558, 26411572, 56460672, 78566983, 94693008, 106742196, 124822692, 148942556,
                                       164226950, 190352573, 210933682, 238908951, 242182004, 265475238, 299910982,
                                       312121804});
  CHECK(published_rows(ids, 3) == Rows{18827606, 27700912, 56521518, 65780303, 81132822, 100518937, 120474864,
                                       142052741, 163793416, 184135950, 219854666, 227756662, 248975183, 271245822,
                                       285569892, 318943450});
  CHECK(published_rows(ids, 4) == Rows{15389869, 39778609, 55713969, 62213332, 88817728, 118483999, 133731511,
                                       155458159, 179763390, 197956758, 205378969, 220499474, 242466248, 265658744,
                                       293662119, 315720898});
  // The half cut: one predecessor counts, the one before is the end of text.
  CHECK(published_rows(ids, 5) == Rows{15567690, 35687509, 55747620, 67831959, 83904455, 115928743, 123965091,
                                       148013673, 164414634, 193473829, 212527239, 232037623, 240342494, 269007074,
                                       298641997, 307414745});
  CHECK(published_rows(ids, 6) == Rows{9319853, 32980418, 54810932, 61373850, 95570932, 100303321, 137402047, 146866965,
                                       160487518, 192851935, 200610520, 228493582, 254676383, 260859079, 296253588,
                                       313224935});
  // What lay before the end of text does not count.
  CHECK(published_rows({1, 2, 3, kEndOfText, 5, 6, 7}, 4) == published_rows(ids, 4));
  CHECK(published_rows({1, 2, 3, kEndOfText, 5, 6, 7}, 5) == published_rows(ids, 5));
  CHECK(published_rows({kEndOfText, 5}, 1) == published_rows(ids, 4));
}

TEST_CASE("trap_53_the_id_that_ends_a_turn_is_an_ordinary_id") {
  const Rows after_turn = published_rows({9707, kImEnd, 5}, 2);
  CHECK(after_turn != published_rows({9707, kEndOfText, 5}, 2));
  CHECK(after_turn != published_rows({11, kImEnd, 5}, 2));  // the id before it still counts
}

TEST_CASE("the_tiny_configuration_hashes_to_its_published_rows") {
  const NgramHash hash(tiny_spec(), 1024);
  CHECK(vector_of(hash.multipliers()) == Rows{4295158889766209, 8433018892997163, 1270917961435699});
  CHECK(vector_of(hash.primes()) == Rows{257, 263, 269, 271});
  CHECK(vector_of(hash.offsets()) == Rows{0, 257, 520, 789});
  CHECK(hash.table_rows() == 1072);
  const Ids ids{5, 6, 7, 1000, 8, 9};
  const std::vector<Rows> expected{{15, 442, 702, 848},  {159, 289, 526, 964}, {18, 336, 634, 1022},
                                   {218, 373, 585, 972}, {94, 414, 645, 1050}, {222, 481, 639, 803}};
  for (size_t t = 0; t < ids.size(); ++t) CHECK(rows_of(hash, tiny_spec(), ids, t) == expected[t]);
}

TEST_CASE("trap_60_rows_do_not_depend_on_where_a_sequence_is_cut") {
  const NgramEmbeddingSpec spec = tiny_spec();
  const NgramHash hash(spec, 1024);
  const Ids ids{5, 6, 7, 1000, 8, 9, 1000, 1000, 1, 2, 3};
  Rows whole(ids.size() * 4);
  hash.row_ids(Ids(2, 1000), ids, whole);
  for (size_t cut = 0; cut <= ids.size(); ++cut) {
    Rows rows(ids.size() * 4);
    Ids history(2, 1000);
    history.insert(history.end(), ids.begin(), ids.begin() + static_cast<std::ptrdiff_t>(cut));
    hash.row_ids(Ids(2, 1000), std::span(ids).first(cut), std::span(rows).first(cut * 4));
    hash.row_ids(std::span(history).last(2), std::span(ids).subspan(cut), std::span(rows).subspan(cut * 4));
    CHECK(rows == whole);
  }
}

TEST_CASE("every_row_lies_in_the_range_of_its_head_even_for_the_largest_ids") {
  for (const NgramEmbeddingSpec& spec : {published_spec(), tiny_spec()}) {
    for (const int64_t vocab : {int64_t{1024}, kPublishedVocab, int64_t{1} << 24}) {
      const NgramHash hash(spec, vocab);
      const auto last = static_cast<int32_t>(vocab - 1);
      for (const Ids& ids : {Ids{last, last, last}, Ids{0, 0, 0}, Ids{last, 0, last}}) {
        const Rows rows = rows_of(hash, spec, ids, 2);
        for (size_t h = 0; h < rows.size(); ++h) {
          CHECK(rows[h] >= hash.offsets()[h]);
          CHECK(rows[h] < hash.offsets()[h] + hash.primes()[h]);
        }
      }
    }
  }
}

}  // namespace offload::ngram_test
