// TraceBuffer: what ran when on which lane, kept in memory sized up front and written as a file that ui.perfetto.dev
// and chrome://tracing open.
//
// Owns its events. Recording allocates nothing: a full buffer drops what comes and counts it. Names are views of text
// that outlives the buffer (string literals). Confined to the thread that records, but the times of an open event may
// come from another thread, which must be done with them before trace_json() merges the buffers of several ranks. Does
// NOT read a clock: the caller states all times, of one clock.
#ifndef OFFLOAD_OFFLOAD_TRACE_H_
#define OFFLOAD_OFFLOAD_TRACE_H_

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/base.h"

namespace offload {

// What an event is about; fields below 0 are left out of the file.
struct TraceSubject {
  int32_t layer = -1, expert = -1, rows = -1;
  int64_t bytes = -1;
};

class TraceBuffer {
 public:
  // A lane is one thread of the viewer; `process` groups lanes ("rank 0", "host").
  struct Lane {
    std::string process, name;
  };

  enum class Kind : uint8_t { complete, counter };
  struct Event {
    std::string_view name;
    int64_t begin_ns, end_ns;  // counter: end_ns is the value
    TraceSubject subject;
    int32_t lane;
    Kind kind;
  };

  // The file counts time from `origin_ns`. REQUIRES: events_max >= 0.
  TraceBuffer(std::vector<Lane> lanes, int64_t events_max, int64_t origin_ns = 0);

  // Events of one lane may contain one another but not overlap otherwise. REQUIRES: begin_ns <= end_ns, a lane of this
  // buffer.
  void complete(int32_t lane, std::string_view name, int64_t begin_ns, int64_t end_ns,
                const TraceSubject& subject = {});
  // An event whose name, times and subject are stated later; it stays where it is until clear(). Null when there is no
  // room. Without an end it is left out of the file.
  Event* open(int32_t lane);
  // The value of `name` from `at_ns` on.
  void counter(int32_t lane, std::string_view name, int64_t at_ns, int64_t value);

  int64_t events() const { return static_cast<int64_t>(events_.size()); }
  int64_t dropped() const { return dropped_; }
  static int64_t bytes_of(int64_t events_max) { return events_max * static_cast<int64_t>(sizeof(Event)); }
  // Forgets the events, keeps the memory.
  void clear();

 private:
  friend std::string trace_json(std::span<const TraceBuffer* const> buffers);
  static constexpr int64_t kOpen = std::numeric_limits<int64_t>::min();  // the end of an event that has none yet

  bool take_room();

  std::vector<Lane> lanes_;
  std::vector<Event> events_;
  int64_t events_max_, origin_ns_, dropped_ = 0;
};

// One document in the trace event format: metadata, then events by lane and time, outer ones first. Lanes of equal
// process share a pid.
std::string trace_json(std::span<const TraceBuffer* const> buffers);

}  // namespace offload

#endif  // OFFLOAD_OFFLOAD_TRACE_H_
