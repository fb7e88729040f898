#include "chat.h"

#include "run_report.h"
#include "terminal.h"

namespace offload::tools {
namespace {

GenerationResult answer(Session& session, const TextModel& model, const Conversation& conversation,
                        const GenerationOptions& options) {
  GenerationCallbacks callbacks;
  callbacks.on_text = [](std::string_view delta) { write_output(delta); };
  callbacks.should_stop = interrupted;
  GenerationResult result = generate(session, model.encode(conversation), options, model.tokenizer(), callbacks);
  write_output("\n");
  return result;
}

}  // namespace

void chat(std::string_view program, Session& session, const TextModel& model, Conversation conversation,
          const ChatOptions& options) {
  say(program, "type a message and press Enter; Ctrl-C ends an answer, Ctrl-D the conversation");
  LineReader reader;
  std::string line;
  while (true) {
    write_error("> ");
    const LineReader::Outcome outcome = reader.read(line);
    if (outcome != LineReader::Outcome::line) write_error("\n");
    if (outcome == LineReader::Outcome::end) return;
    stop_if_interrupted();
    if (line.empty()) continue;
    Conversation next = conversation;
    add_message(next, "user", line);
    try {
      const GenerationResult result = answer(session, model, next, options.generation);
      const bool was_cut_before_it_began = result.finish_reason == FinishReason::interrupted && result.text.empty();
      if (!was_cut_before_it_began) {
        add_message(next, "assistant", result.text);
        conversation = std::move(next);
      }
      if (options.verbose) say(program, run_summary(result));
    } catch (const Error& error) {
      // A message that the template or the context refuses costs that message, not the conversation.
      if (error.code() != ErrorCode::usage && error.code() != ErrorCode::input) throw;
      say(program, fmt::format("error: {}", error.message()));
    }
    if (interrupted()) clear_interrupt();
  }
}

}  // namespace offload::tools
