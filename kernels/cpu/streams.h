// Operations on rows of a hidden state with several streams, of which a layer computes one (AltUp, arXiv 2301.13310).
#pragma once

#include <cmath>

#include "norms.h"
#include "simd.h"
#include "step.h"

namespace trioserve {

constexpr float LEAST_SQUARE = 1e-5f;  // lower bound of a stream's mean square, so that it can be scaled

inline float mean_square(const float* values, int64_t size) {
    Lanes squares = zero();
    for (int64_t n = 0; n < size; n += LANES) squares = fma(load(values + n), load(values + n), squares);
    return sum_of(squares) / float(size);
}

// Returns the factor that gives a stream the magnitude of another one with this mean square.
inline float share_for_magnitude(const float* values, int64_t size, float wanted) {
    return std::sqrt(wanted / std::max(mean_square(values, size), LEAST_SQUARE));
}

// Returns the router's values of a row, one per stream.
inline void route(const LayerStreams& layer, const float* values, int64_t size, int count, float eps, float* kinds) {
    Lanes squares = zero(), sums[STREAMS_MAX];
    for (int kind = 0; kind < count; kind++) sums[kind] = zero();
    for (int64_t n = 0; n < size; n += LANES) {
        const Lanes value = load(values + n), weighed = mul(value, load(layer.router_norm + n));
        squares = fma(value, value, squares);
        for (int kind = 0; kind < count; kind++)
            sums[kind] = fma(weighed, load(layer.router + kind * size + n), sums[kind]);
    }
    const float share = 1.0f / std::sqrt(sum_of(squares) / float(size) + eps) / float(size);
    for (int kind = 0; kind < count; kind++) kinds[kind] = std::tanh(sum_of(sums[kind]) * share);
}

inline void mix_kinds(const float* weights, const float* kinds, int outputs, int count, float* shares) {
    for (int output = 0; output < outputs; output++) {
        shares[output] = 0;
        for (int kind = 0; kind < count; kind++) shares[output] += weights[output * count + kind] * kinds[kind];
    }
}

// Replaces each stream by a mixture of all streams. to: receives the active one. at(stream): address of a stream's row.
template <class At>
inline void predict_row(const Streams& streams, const LayerStreams& layer, int64_t size, float eps, const At& at, float* to) {
    const int count = streams.count;
    float kinds[STREAMS_MAX], shares[STREAMS_MAX * STREAMS_MAX];
    route(layer, at(streams.active), size, count, eps, kinds);
    mix_kinds(layer.prediction, kinds, count * count, count, shares);
    for (int64_t n = 0; n < size; n += LANES) {
        Lanes old[STREAMS_MAX];
        for (int stream = 0; stream < count; stream++) old[stream] = load(at(stream) + n);
        for (int stream = 0; stream < count; stream++) {
            Lanes total = mul(old[0], set(shares[stream * count]));
            for (int other = 1; other < count; other++)
                total = fma(old[other], set(shares[stream * count + other]), total);
            store(at(stream) + n, add(total, old[stream]));
        }
        store(to + n, load(at(streams.active) + n));
    }
}

// Corrects each stream by the difference between the layer's result and the active stream. computed: the layer's result.
// It is replaced by the value that gates the layer's own inputs.
template <class At>
inline void correct_row(const Streams& streams, const LayerStreams& layer, int64_t size, float eps, const At& at,
                        float* computed) {
    const int count = streams.count;
    float kinds[STREAMS_MAX], shares[STREAMS_MAX];
    route(layer, computed, size, count, eps, kinds);
    mix_kinds(layer.correction, kinds, count, count, shares);
    for (int64_t n = 0; n < size; n += LANES) {
        const Lanes went = sub(load(computed + n), load(at(streams.active) + n));
        for (int stream = 0; stream < count; stream++)
            store(at(stream) + n, fma(went, set(shares[stream] + 1.0f), load(at(stream) + n)));
        const Lanes active = load(at(streams.active) + n);
        store(computed + n, layer.scale == nullptr ? active : mul(active, load(layer.scale + n)));
    }
}

}  // namespace trioserve
