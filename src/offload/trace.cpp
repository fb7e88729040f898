#include "offload/trace.h"

#include <algorithm>

#include "core/json.h"

namespace offload {

TraceBuffer::TraceBuffer(std::vector<Lane> lanes, int64_t events_max, int64_t origin_ns)
    : lanes_(std::move(lanes)), events_max_(events_max), origin_ns_(origin_ns) {
  OFL_ASSERT(events_max >= 0);
  events_.reserve(static_cast<size_t>(events_max));
}

bool TraceBuffer::take_room() {
  if (events() < events_max_) return true;
  ++dropped_;
  return false;
}

void TraceBuffer::complete(int32_t lane, std::string_view name, int64_t begin_ns, int64_t end_ns,
                           const TraceSubject& subject) {
  OFL_ASSERT(lane >= 0 && static_cast<size_t>(lane) < lanes_.size() && begin_ns <= end_ns);
  if (take_room()) events_.push_back({name, begin_ns, end_ns, subject, lane, Kind::complete});
}

TraceBuffer::Event* TraceBuffer::open(int32_t lane) {
  OFL_ASSERT(lane >= 0 && static_cast<size_t>(lane) < lanes_.size());
  if (!take_room()) return nullptr;
  events_.push_back({{}, 0, kOpen, {}, lane, Kind::complete});  // within the capacity, so that no event moves
  return &events_.back();
}

void TraceBuffer::counter(int32_t lane, std::string_view name, int64_t at_ns, int64_t value) {
  OFL_ASSERT(lane >= 0 && static_cast<size_t>(lane) < lanes_.size());
  if (take_room()) events_.push_back({name, at_ns, value, {}, lane, Kind::counter});
}

void TraceBuffer::clear() {
  events_.clear();
  dropped_ = 0;
}

namespace {

std::string json_string(std::string_view text) {
  return Json(text).dump(-1, ' ', true, Json::error_handler_t::replace);
}

// The format counts in microseconds; three digits keep the nanoseconds.
std::string microseconds(int64_t ns) {
  const uint64_t magnitude = ns < 0 ? 0 - static_cast<uint64_t>(ns) : static_cast<uint64_t>(ns);
  return fmt::format("{}{}.{:03}", ns < 0 ? "-" : "", magnitude / 1000, magnitude % 1000);
}

void append_subject(std::string& out, const TraceSubject& subject) {
  const char* comma = "";
  out += ",\"args\":{";
  const auto field = [&](const char* key, int64_t value) {
    if (value < 0) return;
    out += fmt::format("{}\"{}\":{}", comma, key, value);
    comma = ",";
  };
  field("layer", subject.layer);
  field("expert", subject.expert);
  field("rows", subject.rows);
  field("bytes", subject.bytes);
  out += "}";
}

}  // namespace

std::string trace_json(std::span<const TraceBuffer* const> buffers) {
  std::string out = "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[";
  const char* comma = "\n";
  int64_t dropped = 0, tid = 0;
  std::vector<std::string> processes;
  for (const TraceBuffer* buffer : buffers) {
    dropped += buffer->dropped();
    std::vector<int64_t> pids;
    const int64_t first_tid = tid;
    for (const TraceBuffer::Lane& lane : buffer->lanes_) {
      auto found = std::find(processes.begin(), processes.end(), lane.process);
      if (found == processes.end()) {
        found = processes.insert(found, lane.process);
        out += fmt::format("{}{{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":{},\"args\":{{\"name\":{}}}}}", comma,
                           processes.size() - 1, json_string(lane.process));
        comma = ",\n";
      }
      pids.push_back(found - processes.begin());
      out += fmt::format(",\n{{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":{},\"tid\":{},\"args\":{{\"name\":{}}}}}",
                         pids.back(), tid++, json_string(lane.name));
    }
    std::vector<const TraceBuffer::Event*> order;
    for (const TraceBuffer::Event& event : buffer->events_)
      if (event.kind == TraceBuffer::Kind::counter || event.end_ns != TraceBuffer::kOpen) order.push_back(&event);
    std::stable_sort(order.begin(), order.end(), [](const TraceBuffer::Event* a, const TraceBuffer::Event* b) {
      if (a->lane != b->lane) return a->lane < b->lane;
      if (a->begin_ns != b->begin_ns) return a->begin_ns < b->begin_ns;
      if (a->kind != b->kind) return a->kind < b->kind;
      return a->kind == TraceBuffer::Kind::complete && a->end_ns > b->end_ns;
    });
    for (const TraceBuffer::Event* event : order) {
      const int64_t pid = pids[static_cast<size_t>(event->lane)];
      out += fmt::format("{}{{\"name\":{},\"pid\":{},\"tid\":{},\"ts\":{}", comma, json_string(event->name), pid,
                         first_tid + event->lane, microseconds(event->begin_ns - buffer->origin_ns_));
      if (event->kind == TraceBuffer::Kind::complete) {
        out += fmt::format(",\"ph\":\"X\",\"dur\":{}", microseconds(event->end_ns - event->begin_ns));
        append_subject(out, event->subject);
      } else {
        out += fmt::format(",\"ph\":\"C\",\"args\":{{\"value\":{}}}", event->end_ns);
      }
      out += "}";
    }
  }
  return out + fmt::format("\n],\"otherData\":{{\"dropped_events\":{}}}}}\n", dropped);
}

}  // namespace offload
