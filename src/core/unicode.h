// UTF-8 and the few Unicode facts that tokenizing needs: validity, NFC, White_Space, word characters.
//
// Properties and NFC come from utf8proc, so their Unicode version is that of the installed library. Refuses to be a
// general text library: no case mapping, no segmentation. Thread-safe: no shared state.
#ifndef OFFLOAD_CORE_UNICODE_H_
#define OFFLOAD_CORE_UNICODE_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace offload {

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";  // U+FFFD

// What lies at the front of some bytes. `length` is the size of the sequence, of the maximal invalid subpart (Unicode
// 15.0, section 3.9, table 3-8), or of the incomplete tail.
enum class Utf8State { valid, invalid, incomplete };
struct Utf8Step {
  Utf8State state;
  int length;
};
// REQUIRES: bytes is not empty.
Utf8Step utf8_step(std::string_view bytes);

bool is_valid_utf8(std::string_view bytes);

struct CodePoint {
  uint32_t value;
  int length;  // bytes
};
// First code point of `text`. REQUIRES: text is not empty and valid UTF-8.
CodePoint first_code_point(std::string_view text);
// Last code point of `text`. REQUIRES: as above.
CodePoint last_code_point(std::string_view text);
void append_utf8(uint32_t code_point, std::string& out);

// Repairs a byte stream: emits complete sequences at once, holds back a tail that more bytes may complete (at most 3
// bytes), and emits one U+FFFD per maximal invalid subpart.
class Utf8Stream {
 public:
  void append(std::string_view bytes, std::string& out);
  void finish(std::string& out);

 private:
  std::string pending_;
};

// `text` with one U+FFFD per maximal invalid subpart.
std::string repair_utf8(std::string_view text);

// Unicode White_Space.
bool is_white_space(uint32_t code_point);
// What `\w` means to the reference: letters, marks, decimal and letter numbers, connectors and the two joiners.
bool is_word_character(uint32_t code_point);

// True for code points that are starters, equal their own NFC and never combine with what stands before them. A cheap
// subset of those that are: text made of them alone is in NFC.
bool is_nfc_inert(uint32_t code_point);
// Returns the NFC of `text`: `text` itself when it's in NFC by the quick test, else a view of `buffer`. REQUIRES: text
// is valid UTF-8.
std::string_view nfc(std::string_view text, std::string& buffer);

}  // namespace offload

#endif  // OFFLOAD_CORE_UNICODE_H_
