// Norms of rows.
#pragma once

#include <cmath>

#include "simd.h"
#include "step.h"

namespace trioserve {

struct Norm {
    int32_t kind;
    float eps;
};

// to(n): destination of numbers n .. n + 15. A null weight copies.
template <class To>
inline void norm_row(const float* from, const float* weight, int64_t size, const Norm& norm, const To& to) {
    if (weight == nullptr) {
        for (int64_t n = 0; n < size; n += LANES) store(to(n), load(from + n));
        return;
    }
    Lanes mean = zero(), squares = zero();
    if (norm.kind != RMS_NORM) {
        for (int64_t n = 0; n < size; n += LANES) mean = add(mean, load(from + n));
        mean = set(sum_of(mean) / float(size));
    }
    for (int64_t n = 0; n < size; n += LANES) {
        const Lanes part = sub(load(from + n), mean);
        squares = fma(part, part, squares);
    }
    const Lanes share = set(1.0f / std::sqrt(sum_of(squares) / float(size) + norm.eps));
    for (int64_t n = 0; n < size; n += LANES) {
        const Lanes normed = mul(mul(sub(load(from + n), mean), share), load(weight + n));
        store(to(n), norm.kind == BIASED_LAYER_NORM ? add(normed, load(weight + size + n)) : normed);
    }
}

}  // namespace trioserve
