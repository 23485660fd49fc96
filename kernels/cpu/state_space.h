// Layers with a state per sequence: convolutions over its last tokens, selective state spaces (Mamba-2, arXiv 2405.21060,
// and Mamba, arXiv 2312.00752), and the gated delta rule (arXiv 2412.06464; with a decay per row of a state, 2510.26692).
//
// A state is float32, in one slot of a layer's memory: [kernel - 1][channels], the last inputs of the convolution, oldest
// first. All but the first also have [heads][vectors][head_dim]. The rows of a chunk are computed in order, whatever else is in
// the step. So the bits of a row depend neither on the step nor on how its prompt was split into chunks. Chunks, channels and
// heads are independent pieces of work.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "product.h"
#include "simd.h"
#include "step.h"

namespace trioserve {

constexpr int64_t CONV_KERNEL_MAX = 64;
constexpr int64_t CONV_BLOCKS = 4;  // blocks of 16 channels in a piece of work

inline int64_t head_size(const Recurrent& layer) { return int64_t(layer.vectors) * layer.head_dim; }

inline int64_t conv_size(const Recurrent& layer) { return int64_t(layer.kernel - 1) * layer.channels; }

inline int64_t state_size(const Recurrent& layer) { return conv_size(layer) + layer.heads * head_size(layer); }

// Distance from a row's projections to the next row's.
inline int64_t projected_stride(const Recurrent& layer) { return (int64_t(layer.projected) + LANES - 1) / LANES * LANES; }

// Numbers per row that the layer's last projection reads.
inline int64_t inner_size(const Recurrent& layer) {
    return layer.heads > 0 ? int64_t(layer.heads) * layer.head_dim : layer.channels;
}

inline Lanes silu_of(Lanes x) { return div(x, add(set(1.0f), exp(sub(zero(), x)))); }
inline Lanes sigmoid_of(Lanes x) { return div(set(1.0f), add(set(1.0f), exp(sub(zero(), x)))); }

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// softplus with log(1 + e) as the series of 2 * atanh(e / (2 + e)).
inline Lanes softplus(Lanes x) {
    const Lanes power = exp(min(x, sub(zero(), x))), share = div(power, add(set(2.0f), power)), square = mul(share, share);
    Lanes sum = set(1.0f / 13);
    for (const float divisor : {11.0f, 9.0f, 7.0f, 5.0f, 3.0f, 1.0f}) sum = fma(sum, square, set(1.0f / divisor));
    return fma(add(share, share), sum, max(zero(), x));  // this order of arguments keeps NaN
}

// Copies `size` numbers at `offset` of the state before a span to the slot of the state after it. Returns their address there,
// where they are updated.
inline float* begun_state(const Recurrent& layer, float* memory, const StateSpan& span, int64_t offset, int64_t size) {
    const int64_t stride = state_size(layer);
    float* to = memory + span.writes * stride + offset;
    if (span.reads < 0)
        std::memset(to, 0, sizeof(float) * size);
    else if (span.reads != span.writes)
        std::memcpy(to, memory + span.reads * stride + offset, sizeof(float) * size);
    return to;
}

// Convolves 16 channels of a chunk's rows, from `channel` on. input(row): these channels of a row. output(row, sum).
template <class Input, class Output>
void convolve(const Recurrent& layer, float* memory, const StateSpan* spans, int32_t span_count, int64_t channel,
              const Input& input, const Output& output) {
    const int64_t kept = layer.kernel - 1, channels = layer.channels;
    alignas(64) float before[CONV_KERNEL_MAX * LANES];
    for (const StateSpan* span = spans; span < spans + span_count; span++) {
        const float* from = memory + int64_t(span->reads) * state_size(layer) + channel;
        for (int64_t index = 0; index < kept; index++)
            store(before + index * LANES, span->reads < 0 ? zero() : load(from + index * channels));
        for (int64_t row = span->first_row; row < span->first_row + span->count; row++) {
            const Lanes own = input(row);
            Lanes sum = layer.conv_bias == nullptr ? zero() : load(layer.conv_bias + channel);
            for (int64_t index = 0; index < kept; index++)
                sum = fma(load(before + index * LANES), load(layer.conv_weights + index * channels + channel), sum);
            output(row, fma(own, load(layer.conv_weights + kept * channels + channel), sum));
            for (int64_t index = 0; index + 1 < kept; index++)
                store(before + index * LANES, load(before + (index + 1) * LANES));
            if (kept > 0) store(before + (kept - 1) * LANES, own);
        }
        float* to = memory + int64_t(span->writes) * state_size(layer) + channel;
        for (int64_t index = 0; index < kept; index++) store(to + index * channels, load(before + index * LANES));
    }
}

// Updates BLOCKS * 16 numbers of a head, from `first` on, with one row. state: [vectors][head_dim].
template <int BLOCKS>
inline void scan_row(const Recurrent& layer, float* state, int64_t first, float decay, float time_step, float skip,
                     const float* x, const float* b, const float* c, float* to) {
    Lanes scaled[BLOCKS], sums[BLOCKS];
    for (int block = 0; block < BLOCKS; block++) {
        const Lanes own = load(x + first + block * LANES);
        scaled[block] = mul(own, set(time_step));
        sums[block] = mul(own, set(skip));
    }
    const Lanes decays = set(decay);
    for (int64_t vector = 0; vector < layer.vectors; vector++) {
        float* place = state + vector * layer.head_dim + first;
        const Lanes into = set(b[vector]), out = set(c[vector]);
        for (int block = 0; block < BLOCKS; block++) {
            const Lanes value = fma(scaled[block], into, mul(load(place + block * LANES), decays));
            store(place + block * LANES, value);
            sums[block] = fma(value, out, sums[block]);
        }
    }
    for (int block = 0; block < BLOCKS; block++) store(to + first + block * LANES, sums[block]);
}

// Computes one head of a chunk's rows. convolved: [rows][channels], x, b and c. projected: first projections of the rows.
inline void scan(const Recurrent& layer, float* memory, const StateSpan* spans, int32_t span_count, int64_t head,
                 const float* projected, const float* convolved, float* scanned) {
    const int64_t dim = layer.head_dim, inner = layer.heads * dim, group = head / (layer.heads / layer.groups);
    const float* time_steps = projected + inner + layer.channels + head;
    for (const StateSpan* span = spans; span < spans + span_count; span++) {
        float* state = begun_state(layer, memory, *span, conv_size(layer) + head * head_size(layer), head_size(layer));
        for (int64_t row = span->first_row; row < span->first_row + span->count; row++) {
            float time_step = softplus(time_steps[row * projected_stride(layer)] + layer.time_step_bias[head]);
            time_step = std::fmin(std::fmax(time_step, layer.time_step_min), layer.time_step_max);
            const float decay = std::exp(time_step * layer.rates[head]), skip = layer.skips[head];
            const float* x = convolved + row * layer.channels + head * dim;
            const float* b = convolved + row * layer.channels + inner + group * layer.vectors;
            const float* c = b + layer.groups * layer.vectors;
            float* to = scanned + row * inner + head * dim;
            int64_t first = 0;
            for (; first + 4 * LANES <= dim; first += 4 * LANES)
                scan_row<4>(layer, state, first, decay, time_step, skip, x, b, c, to);
            for (; first < dim; first += LANES)
                scan_row<1>(layer, state, first, decay, time_step, skip, x, b, c, to);
        }
    }
}

// Computes 16 channels of a chunk's rows in a selective scan, from `channel` on. convolved, time_steps: [rows][channels].
// selected: [rows][rank + 2 * vectors], with b and c. Time steps are complete: the bias and softplus are applied.
inline void scan_selected(const Recurrent& layer, float* memory, const StateSpan* spans, int32_t span_count, int64_t channel,
                          const float* convolved, const float* time_steps, const float* selected, float* scanned) {
    const int64_t channels = layer.channels, stride = state_size(layer), first = conv_size(layer) + channel;
    const Lanes skips = load(layer.skips + channel);
    for (const StateSpan* span = spans; span < spans + span_count; span++) {
        const float* before = memory + int64_t(span->reads) * stride + first;
        float* state = memory + int64_t(span->writes) * stride + first;
        for (int64_t vector = 0; vector < layer.vectors; vector++)
            store(state + vector * channels, span->reads < 0 ? zero() : load(before + vector * channels));
        for (int64_t row = span->first_row; row < span->first_row + span->count; row++) {
            const float *b = selected + row * (layer.rank + 2 * layer.vectors) + layer.rank, *c = b + layer.vectors;
            const Lanes x = load(convolved + row * channels + channel), step = load(time_steps + row * channels + channel);
            const Lanes scaled = mul(x, step);
            Lanes sum = mul(x, skips);
            for (int64_t vector = 0; vector < layer.vectors; vector++) {
                float* place = state + vector * channels;
                const Lanes decay = exp(mul(step, load(layer.rates + vector * channels + channel)));
                const Lanes value = fma(scaled, set(b[vector]), mul(load(place), decay));
                store(place, value);
                sum = fma(value, set(c[vector]), sum);
            }
            store(scanned + row * channels + channel, sum);
        }
    }
}

// The vectors with which one row updates a head's state, [key size] each. The caller has normalized query and key. decays
// multiply the rows of the state, and faded is key times decays. share is the step size of the correction.
struct DeltaRow {
    float *query, *key, *decays, *faded;
    float share;
};

// Updates BLOCKS * 16 numbers of a head's state, from `first` on: moves the state's value for the key towards the row's value.
template <int BLOCKS>
inline void correct_row(const Recurrent& layer, float* state, int64_t first, const DeltaRow& with, const float* value,
                        float* to) {
    Lanes said[BLOCKS], sums[BLOCKS];
    for (int block = 0; block < BLOCKS; block++) said[block] = sums[block] = zero();
    for (int64_t vector = 0; vector < layer.vectors; vector++) {
        const float* place = state + vector * layer.head_dim + first;
        const Lanes own = set(with.faded[vector]);
        for (int block = 0; block < BLOCKS; block++) said[block] = fma(load(place + block * LANES), own, said[block]);
    }
    for (int block = 0; block < BLOCKS; block++)
        said[block] = mul(sub(load(value + first + block * LANES), said[block]), set(with.share));
    for (int64_t vector = 0; vector < layer.vectors; vector++) {
        float* place = state + vector * layer.head_dim + first;
        const Lanes own = set(with.key[vector]), out = set(with.query[vector]), decay = set(with.decays[vector]);
        for (int block = 0; block < BLOCKS; block++) {
            const Lanes number = fma(said[block], own, mul(load(place + block * LANES), decay));
            store(place + block * LANES, number);
            sums[block] = fma(number, out, sums[block]);
        }
    }
    for (int block = 0; block < BLOCKS; block++) store(to + first + block * LANES, sums[block]);
}

// Scales values to this length.
inline void with_length(const float* values, int64_t size, float length, float* to) {
    float square = 1e-6f;
    for (int64_t n = 0; n < size; n++) square += values[n] * values[n];
    const float factor = length / std::sqrt(square);
    for (int64_t n = 0; n < size; n++) to[n] = values[n] * factor;
}

// Like scan, for the delta rule. convolved: q, k and v. raised: [rows][heads][vectors], the projections of the latents to
// decays, or null without latents. vectors_at: memory for four vectors.
inline void scan_delta(const Recurrent& layer, float* memory, const StateSpan* spans, int32_t span_count, int64_t head,
                       const float* projected, const float* convolved, const float* raised, float* scanned,
                       float* vectors_at) {
    const int64_t dim = layer.head_dim, inner = layer.heads * dim, vectors = layer.vectors;
    const int64_t group = layer.in_turn ? head % layer.groups : head / (layer.heads / layer.groups);
    const float* decays = projected + (raised == nullptr ? inner : layer.latent) + layer.channels;
    const float* shares = decays + (raised == nullptr ? layer.heads : layer.latent) + head;
    DeltaRow with{vectors_at, vectors_at + vectors, vectors_at + 2 * vectors, vectors_at + 3 * vectors, 0.0f};
    const auto decay_of = [&](float projection, int64_t bias) {
        return std::exp(layer.rates[head] * softplus(projection + layer.time_step_bias[bias]));
    };
    for (const StateSpan* span = spans; span < spans + span_count; span++) {
        float* state = begun_state(layer, memory, *span, conv_size(layer) + head * head_size(layer), head_size(layer));
        for (int64_t row = span->first_row; row < span->first_row + span->count; row++) {
            const int64_t place = row * projected_stride(layer);
            if (raised == nullptr) std::fill(with.decays, with.decays + vectors, decay_of(decays[place + head], head));
            for (int64_t n = head * vectors; raised != nullptr && n < (head + 1) * vectors; n++)
                with.decays[n - head * vectors] = decay_of(raised[row * layer.heads * vectors + n], n);
            with.share = layer.share_scale / (1.0f + std::exp(-shares[place]));
            const float* own = convolved + row * layer.channels;
            with_length(own + group * vectors, vectors, 1.0f / std::sqrt(float(vectors)), with.query);
            with_length(own + (layer.groups + group) * vectors, vectors, 1.0f, with.key);
            for (int64_t n = 0; n < vectors; n++) with.faded[n] = with.key[n] * with.decays[n];
            const float* value = own + 2 * layer.groups * vectors + head * dim;
            float* to = scanned + row * inner + head * dim;
            int64_t first = 0;
            for (; first + 4 * LANES <= dim; first += 4 * LANES)
                correct_row<4>(layer, state, first, with, value, to);
            for (; first < dim; first += LANES) correct_row<1>(layer, state, first, with, value, to);
        }
    }
}

// Divides the numbers of each group by the root of their mean square, and multiplies by weights.
inline void norm_group(float* numbers, const float* weights, int64_t size, float eps) {
    Lanes squares = zero();
    for (int64_t n = 0; n < size; n += LANES) squares = fma(load(numbers + n), load(numbers + n), squares);
    const Lanes share = set(1.0f / std::sqrt(sum_of(squares) / float(size) + eps));
    for (int64_t n = 0; n < size; n += LANES) store(numbers + n, mul(mul(load(numbers + n), share), load(weights + n)));
}

// Applies the gate to a row's result of the scan, and the norm by groups if the layer has one. numbers: [inner], changed in
// place.
template <class T>
void gate_and_norm(const Recurrent& layer, float eps, const float* gate, float* numbers, const Rows<T>& to, int64_t row) {
    const int64_t inner = int64_t(layer.heads) * layer.head_dim, size = inner / layer.norm_groups;
    for (int64_t first = 0; first < inner; first += size) {
        if (layer.norm == NORM_BEFORE_GATE) norm_group(numbers + first, layer.gate_norm + first, size, eps);
        for (int64_t n = first; n < first + size; n += LANES)
            store(numbers + n, mul(load(numbers + n), layer.latent > 0 ? sigmoid_of(load(gate + n)) : silu_of(load(gate + n))));
        if (layer.norm == NORM_OF_GATED) norm_group(numbers + first, layer.gate_norm + first, size, eps);
        for (int64_t n = first; n < first + size; n += LANES) store(to.at(row, n), load(numbers + n));
    }
    to.pad(row, inner);
}

}  // namespace trioserve
