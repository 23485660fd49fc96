// Collective operations of the ranks of a group during a step. native.py mirrors the struct field by field.
#pragma once

#include <cstdint>

namespace trioserve {

// A rank's access to the others. All ranks make the same calls in the same order, with equal numbers of values.
//
// sum: sets `total` to the sum of the values in `own` of all ranks, with the same bits in each rank. `own` may be `total`. A
// sum without values only shares is_abandoned. Returns nonzero if a rank reported is_abandoned.
// room: returns memory for the values of the next sum, or null if there is no space. Passing it as `own` saves a copy.
// gather: sets `all` to the bytes of all ranks, in the order of the ranks. A rank with a null `all` only contributes its bytes.
struct Collectives {
    void* context;
    int32_t rank, size;
    float* (*room)(void* context, int64_t count);
    int32_t (*sum)(void* context, const float* own, int64_t count, int32_t is_abandoned, float* total);
    void (*gather)(void* context, const void* own, int64_t bytes, void* all);
};

}  // namespace trioserve
