// The interactive conversation of offload-run: a question typed, an answer streamed, with history.
//
// The sequence's state is kept across turns; each turn computes only what the rendered conversation adds to it. Ctrl-C
// ends the answer that is being written, and at the prompt the program. Ctrl-D ends the program.
#ifndef OFFLOAD_TOOLS_CHAT_H_
#define OFFLOAD_TOOLS_CHAT_H_

#include <string_view>

#include "offload/generation.h"
#include "prompt.h"

namespace offload::tools {

struct ChatOptions {
  GenerationOptions generation;
  bool verbose = false;  // a line of figures after each answer
};

// Returns when the input ends. Throws Error{interrupted} for a Ctrl-C at the prompt.
void chat(std::string_view program, Session& session, const TextModel& model, Conversation conversation,
          const ChatOptions& options);

}  // namespace offload::tools

#endif  // OFFLOAD_TOOLS_CHAT_H_
