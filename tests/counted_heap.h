// What the program takes from the heap by operator new: a program that links offload_counted_heap counts it, so that a
// test can say that a call allocates nothing, or bound what it takes. All threads together.
#ifndef OFFLOAD_TESTS_COUNTED_HEAP_H_
#define OFFLOAD_TESTS_COUNTED_HEAP_H_

#include <cstdint>

namespace offload {

int64_t heap_allocations();  // so far
int64_t heap_bytes();        // held now, as malloc rounds them up
// The most bytes held at once since the last call of restart_heap_peak().
int64_t heap_bytes_most();
void restart_heap_peak();

}  // namespace offload

#endif  // OFFLOAD_TESTS_COUNTED_HEAP_H_
