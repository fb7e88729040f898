// Runs one op case on a backend and on the reference, and compares what each left in memory.
//
// Every tensor lies between guard words. Outputs start as a NaN pattern that no arithmetic produces, and elements that
// the reference does not write must keep it. Inputs, stride padding and guards must be unchanged.
#ifndef OFFLOAD_TESTS_OP_SUITE_H_
#define OFFLOAD_TESTS_OP_SUITE_H_

#include <cstddef>
#include <string>
#include <vector>

#include "core/ops.h"
#include "op_cases.h"

namespace offload {

// Where a backend's tensors live. allocate() aligns to Arena::kAlignment; all memory is released by the destructor.
class Mirror {
 public:
  virtual ~Mirror() = default;
  virtual void* allocate(int64_t bytes) = 0;
  virtual void release_all() = 0;
  virtual void upload(void* device, const void* host, int64_t bytes) = 0;
  // Waits for the ops that were enqueued before.
  virtual void download(void* host, const void* device, int64_t bytes) = 0;
};

class HostMirror final : public Mirror {
 public:
  HostMirror() = default;
  ~HostMirror() override { release_all(); }
  HostMirror(const HostMirror&) = delete;
  HostMirror& operator=(const HostMirror&) = delete;
  void* allocate(int64_t bytes) override;
  void release_all() override;
  void upload(void* device, const void* host, int64_t bytes) override;
  void download(void* host, const void* device, int64_t bytes) override;

 private:
  std::vector<void*> blocks_;
};

struct CaseResult {
  std::string failure;          // empty when passed; else tensor, element, expected, found, bound
  double error_over_bound = 0;  // largest |actual - expected| / bound over the outputs; 0 for exact results
  uint64_t output_hash = 0;     // of the candidate's outputs, bit for bit
  bool passed() const { return failure.empty(); }
};

// A case with its initial content and what the reference makes of it, computed once for any number of candidates.
class PreparedCase {
 public:
  explicit PreparedCase(const OpCase& test);

  const OpCase& test() const { return test_; }
  // Plans the case on the candidate, gives it scratch of the planned size from the mirror, and runs it.
  CaseResult run(Ops& candidate, Mirror& mirror) const;

 private:
  OpCase test_;
  std::vector<std::vector<std::byte>> before_, expected_;  // by tensor, guards included
  std::string reference_failure_;
};

CaseResult run_case(const OpCase& test, Ops& candidate, Mirror& mirror);

// A case's tensors with their initial content, in a mirror's memory, without guards: for benchmarks and for tests that
// look at the values themselves.
std::vector<Tensor> upload_case(const OpCase& test, Mirror& mirror);

}  // namespace offload

#endif  // OFFLOAD_TESTS_OP_SUITE_H_
