// Passes over a row of numbers, and the selection that filters use.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "simd.h"

namespace trioserve {

constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

inline float largest_of(const float* values, int64_t count) {
    Lanes largest = set(MINUS_INFINITY);
    int64_t index = 0;
    for (; index + LANES <= count; index += LANES) largest = max(largest, load(values + index));
    float best = max_of(largest);
    for (; index < count; index++) best = std::max(best, values[index]);
    return best;
}

inline int32_t first_of(const float* values, float value) {
    int32_t index = 0;
    while (values[index] != value) index++;
    return index;
}

// exp((score - best) / temperature), padded with zeros to a multiple of LANES. A score of minus infinity gives 0.
inline void weigh(const float* scores, int64_t count, float temperature, float best, float* weights) {
    const Lanes divisor = set(temperature), highest = set(best / temperature);
    int64_t index = 0;
    for (; index + LANES <= count; index += LANES)
        store(weights + index, exp(sub(div(load(scores + index), divisor), highest)));
    if (index == count) return;
    alignas(64) float rest[LANES];
    for (int lane = 0; lane < LANES; lane++) rest[lane] = index + lane < count ? scores[index + lane] : MINUS_INFINITY;
    store(weights + index, exp(sub(div(load(rest), divisor), highest)));
}

// Sum and number of the values that are at least `limit`.
inline double sum_at_least(const float* values, int64_t count, float limit) {
    alignas(64) double lanes[LANES] = {};
    WideLanes sums = load(lanes);
    int64_t index = 0;
    for (; index + LANES <= count; index += LANES) sums = add(sums, cut_below(load(values + index), set(limit)));
    store(lanes, sums);
    double sum = 0;
    for (; index < count; index++) sum += values[index] >= limit ? values[index] : 0.0f;
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    return sum;
}

inline double count_at_least(const float* values, int64_t count, float limit) {
    int32_t found = 0;
    for (int64_t index = 0; index < count; index++) found += values[index] >= limit;
    return found;
}

// Copies the values that are at least `limit`, or with IS_UPPER false the values below it. `kept` may be `values`. Returns
// the number of copied values.
template <bool IS_UPPER>
inline int64_t keep(const float* values, int64_t count, float limit, float* kept) {
    int64_t kept_count = 0, index = 0;
    for (; index + LANES <= count; index += LANES)
        kept_count += store_kept<IS_UPPER>(kept + kept_count, load(values + index), set(limit));
    for (; index < count; index++) {
        const float value = values[index];
        kept[kept_count] = value;
        kept_count += (value >= limit) == IS_UPPER;
    }
    return kept_count;
}

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// Returns the smallest of the values for which all larger values together measure less than `wanted`. With count_at_least it
// is the wanted-th largest value, with sum_at_least the smallest value of a nucleus. values: 0 to 1, at least one. They are
// changed.
//
// Radix selection (Knuth, The Art of Computer Programming 3, 5.2.2) with one bit per digit, highest first. Floats from 0 on
// have the order of their bits. Values that a bit rules out are not read again, so all bits together cost a few passes.
inline float select(float* values, int64_t count, double wanted, double (*measure)(const float*, int64_t, float)) {
    constexpr int HIGHEST_BIT = 29;  // highest bit of 1.0
    uint32_t prefix = 0;
    double above = 0;
    for (int bit = HIGHEST_BIT; bit >= 0 && count > 1; bit--) {
        const uint32_t with_bit = prefix | uint32_t(1) << bit;
        const float middle = float_of(with_bit);
        const int64_t upper_count = int64_t(count_at_least(values, count, middle));
        if (upper_count == 0) continue;
        const double upper = upper_count == count ? 0 : measure(values, count, middle);
        if (upper_count == count) {
            prefix = with_bit;
        } else if (above + upper >= wanted) {
            prefix = with_bit;
            count = keep<true>(values, count, middle, values);
        } else {
            above += upper;
            count = keep<false>(values, count, middle, values);
        }
    }
    return values[0];
}

}  // namespace trioserve
