// Any bytes as a template, rendered on a fixed conversation: only an Error may come out.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/chat_template.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* bytes, size_t size) {
  using offload::OrderedJson;
  static const OrderedJson messages = OrderedJson::parse(
      R"([{"role":"system","content":"s é"},{"role":"user","content":"hi <|x|>"},
          {"role":"assistant","content":null,"tool_calls":[{"function":{"name":"f",
           "arguments":"{\"a\":[1,2.5]}"}}]}])");
  try {
    const offload::ChatTemplate chat(std::string_view(reinterpret_cast<const char*>(bytes), size), "fuzz");
    offload::RenderOptions options;
    options.tools = OrderedJson::array({{{"name", "f"}}});
    chat.render(messages, options);
  } catch (const offload::Error&) {
  }
  return 0;
}
