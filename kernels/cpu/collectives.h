// What the ranks of a group do together in a step. The struct is that of native.py, field by field.
#pragma once

#include <cstdint>

namespace trioserve {

// One rank's door to the others: every rank calls the same in the same order, with as many numbers.
//
// sum: total becomes the sum of what all ranks have as their own, and has the same bits in each; not 0: one of them said
// is_abandoned. own may be total. There may be no numbers: that is a vote. room: where the numbers of the sum that is called
// next may be written, and then given as own, which spares a copy; null: there is no room for as many. gather: all becomes
// what each rank gave, `bytes` of each, in the order of the ranks; null: this rank gives alone.
struct Collectives {
    void* context;
    int32_t rank, size;
    float* (*room)(void* context, int64_t count);
    int32_t (*sum)(void* context, const float* own, int64_t count, int32_t is_abandoned, float* total);
    void (*gather)(void* context, const void* own, int64_t bytes, void* all);
};

}  // namespace trioserve
