// What the ranks of a group do together in a step. The struct is that of native.py, field by field.
#pragma once

#include <cstdint>

namespace trioserve {

// One rank's door to the others: every rank calls the same in the same order, with as many numbers. sum: values becomes
// the sum of all ranks' values, which has the same bits in each; not 0: one of them said is_abandoned. It may have no
// values, and is a vote then. gather: all becomes what each rank gave, `bytes` of each, in the order of the ranks.
struct Collectives {
    void* context;
    int32_t rank, size;
    int32_t (*sum)(void* context, float* values, int64_t count, int32_t is_abandoned);
    void (*gather)(void* context, const void* own, int64_t bytes, void* all);
};

}  // namespace trioserve
