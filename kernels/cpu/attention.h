// Attention of a step's rows over the pages of one layer. A page is one KV block, [page tokens][2][K heads][D], keys
// before values; a sequence's pages are named by its block table.
#pragma once

#include <atomic>
#include <cmath>
#include <limits>

#include "product.h"

namespace trioserve {

struct AttentionShape {
    int heads, kv_heads, head_dim, page_tokens;
    int64_t group() const { return heads / kv_heads; }
    int64_t query_stride() const { return padded_depth(head_dim); }
    int64_t token_stride() const { return int64_t(2) * kv_heads * head_dim; }
};

// Consecutive tokens of one sequence: rows first_row .. first_row + count - 1 are its positions start .. and so on.
struct Chunk {
    int64_t first_row, count, start;
    const int32_t* table;
};

constexpr int SPAN = 64;           // context tokens that a prompt's rows meet at a time
constexpr int QUERY_ROWS = 96;     // (token, head) rows of a prompt's piece; the packed keys serve them all
constexpr int DIRECT_TOKENS_MAX = 3;  // chunks up to this length read keys and values where they lie
constexpr int SPLIT_TOKENS_MIN = 64;

// One piece of a step's attention: of a decode, a part of its context; of a prompt, a kv head and some of its tokens.
struct AttentionPiece {
    int32_t chunk, token, tokens, kv_head;
    int32_t split, splits;  // splits is 0 for a prompt's piece
};

inline int64_t first_seen(int64_t position, int64_t window) {
    return window > 0 && position >= window ? position - window + 1 : 0;
}

inline int64_t prompt_piece_tokens(const AttentionShape& shape) {
    return std::max<int64_t>(1, QUERY_ROWS / shape.group());
}

template <class T>
inline const T* token_of(const T* pages, const AttentionShape& shape, const Chunk& chunk, int64_t position) {
    const int64_t page = chunk.table[position / shape.page_tokens];
    return pages + (page * shape.page_tokens + position % shape.page_tokens) * shape.token_stride();
}

// Where the tokens at positions from .. from + count - 1 lie, page by page: a division for each would take longer than
// some of the computing.
template <class T>
inline void find_tokens(const T* pages, const AttentionShape& shape, const Chunk& chunk, int64_t from, int64_t count,
                        const T** tokens) {
    int64_t page = from / shape.page_tokens, offset = from % shape.page_tokens;
    for (int64_t index = 0; index < count; page++, offset = 0) {
        const T* first = pages + int64_t(chunk.table[page]) * shape.page_tokens * shape.token_stride();
        for (; offset < shape.page_tokens && index < count; offset++, index++)
            tokens[index] = first + offset * shape.token_stride();
    }
}

// --- a prompt's rows: two products with a softmax between them ---------------------------------------------------------

// Keys of SPAN tokens as a packed weight [SPAN, D], values as one of [D, SPAN]; absent tokens are zeros.
inline void pack_key(const float* key, int64_t dim, int64_t index, float* to) {
    for (int64_t d = 0; d < dim; d++) to[d * LANES + index] = key[d];
}
inline void pack_key(const bf16* key, int64_t dim, int64_t index, bf16* to) {
    const uint32_t* pairs = reinterpret_cast<const uint32_t*>(key);
    uint32_t* packed = reinterpret_cast<uint32_t*>(to);
    for (int64_t d = 0; d < dim / 2; d++) packed[d * LANES + index] = pairs[d];
}
inline void pack_value(const float* value, int64_t dim, int64_t token, float* to) {
    for (int64_t d = 0; d < dim; d += LANES) store(to + d * SPAN + token * LANES, load(value + d));
}
inline void pack_value(const bf16* value, int64_t dim, int64_t token, bf16* to) {
    for (int64_t d = 0; d < dim; d += LANES) {
        bf16* unit = to + d * SPAN + token / 2 * 2 * LANES + token % 2;
        for (int lane = 0; lane < LANES; lane++) unit[2 * lane] = value[d + lane];
    }
}

template <class T>
struct PromptScratch {
    // In elements of T and of float.
    static int64_t packed_count(const AttentionShape& shape) {
        return SPAN * (shape.query_stride() + shape.head_dim) + (QUERY_MAX(shape) + 16) * SPAN;
    }
    static int64_t QUERY_MAX(const AttentionShape& shape) { return prompt_piece_tokens(shape) * shape.group(); }
    static int64_t float_count(const AttentionShape& shape) {
        return (QUERY_MAX(shape) + 16) * (SPAN + shape.head_dim) + 2 * (QUERY_MAX(shape) + 16);
    }
};

// queries: [K][rows][G][query_stride], turned. attended: [rows][attended_stride].
template <class T>
void attend_prompt(const AttentionShape& shape, const Chunk& chunk, const AttentionPiece& piece, int64_t window,
                   const T* queries, int64_t rows, const T* pages, T* attended, int64_t attended_stride, T* packed,
                   float* scratch) {
    const int64_t group = shape.group(), dim = shape.head_dim, stride = shape.query_stride();
    const int64_t count = piece.tokens * group;
    const int64_t first = chunk.start + piece.token, last = first + piece.tokens - 1;
    const int64_t row_max = PromptScratch<T>::QUERY_MAX(shape) + 16;
    T* keys = packed;
    T* values = keys + SPAN * stride;
    T* weights = values + SPAN * dim;
    float* scores = scratch;
    float* sums = scores + row_max * SPAN;
    float* best = sums + row_max * dim;
    float* total = best + row_max;
    const T* query = queries + ((piece.kv_head * rows + chunk.first_row + piece.token) * group) * stride;
    const float scale = 1.0f / std::sqrt(float(dim));
    std::fill(best, best + count, -std::numeric_limits<float>::infinity());
    std::fill(total, total + count, 0.0f);
    std::memset(keys, 0, sizeof(T) * SPAN * stride);
    bool is_first = true;
    for (int64_t from = first_seen(first, window) / SPAN * SPAN; from <= last; from += SPAN) {
        const int64_t present = std::min<int64_t>(SPAN, last + 1 - from);
        if (present < SPAN) {
            std::memset(keys, 0, sizeof(T) * SPAN * stride);
            std::memset(values, 0, sizeof(T) * SPAN * dim);
        }
        const T* tokens_at[SPAN];
        find_tokens(pages, shape, chunk, from, present, tokens_at);
        for (int64_t index = 0; index < present; index++) {
            // Behind a window lie pages that may be somebody else's by now.
            if (window > 0 && from + index < first_seen(first, window)) {
                for (int64_t d = 0; d < stride; d++)
                    keys[index / LANES * LANES * stride + d / Unit<T>::DEPTH * LANES * Unit<T>::DEPTH +
                         index % LANES * Unit<T>::DEPTH + d % Unit<T>::DEPTH] = T{};
                for (int64_t d = 0; d < dim; d++)
                    values[d / LANES * LANES * SPAN + index / Unit<T>::DEPTH * LANES * Unit<T>::DEPTH +
                           d % LANES * Unit<T>::DEPTH + index % Unit<T>::DEPTH] = T{};
                continue;
            }
            const T* token = tokens_at[index] + piece.kv_head * dim;
            pack_key(token, dim, index % LANES, keys + index / LANES * LANES * stride);
            pack_value(token + shape.kv_heads * dim, dim, index, values);
        }
        add_products(query, stride, int(count), static_cast<const T*>(keys), LANES * stride, SPAN / LANES, stride, scores, SPAN, true, static_cast<const T*>(keys));
        for (int64_t row = 0; row < count; row++) {
            const int64_t position = first + row / group;
            const int64_t begin = std::max<int64_t>(first_seen(position, window) - from, 0);
            const int64_t end = std::min<int64_t>(position + 1 - from, SPAN);
            float* score = scores + row * SPAN;
            T* weight = weights + row * SPAN;
            if (begin >= end) {
                for (int64_t index = 0; index < SPAN; index += LANES) store(weight + index, zero());
                continue;
            }
            for (int64_t index = 0; index < begin; index++) score[index] = -std::numeric_limits<float>::infinity();
            for (int64_t index = end; index < SPAN; index++) score[index] = -std::numeric_limits<float>::infinity();
            Lanes largest = load(score);
            for (int64_t index = LANES; index < SPAN; index += LANES) largest = max(largest, load(score + index));
            const float new_best = std::max(best[row], max_of(largest) * scale);
            Lanes sum = zero();
            for (int64_t index = 0; index < SPAN; index += LANES) {
                const Lanes part = exp(fma(load(score + index), set(scale), set(-new_best)));
                sum = add(sum, part);
                store(weight + index, part);
            }
            const float kept = is_first ? 0.0f : std::exp(best[row] - new_best);
            total[row] = total[row] * kept + sum_of(sum);
            best[row] = new_best;
            if (!is_first && kept != 1.0f)
                for (int64_t d = 0; d < dim; d += LANES)
                    store(sums + row * dim + d, mul(load(sums + row * dim + d), set(kept)));
        }
        add_products(static_cast<const T*>(weights), SPAN, int(count), static_cast<const T*>(values), LANES * SPAN, int(dim / LANES), SPAN, sums, dim, is_first,
                     static_cast<const T*>(values));
        is_first = false;
    }
    for (int64_t row = 0; row < count; row++) {
        T* to = attended + (chunk.first_row + piece.token + row / group) * attended_stride +
                (piece.kv_head * group + row % group) * dim;
        const Lanes share = set(1.0f / total[row]);
        for (int64_t d = 0; d < dim; d += LANES) store(to + d, mul(load(sums + row * dim + d), share));
    }
}

// --- a decode's row: every head over a part of the context, keys and values read where they lie ---------------------------

// The dot products of one query with 16 keys, which lie `key` behind the tokens' beginnings.
template <class T>
inline Lanes score_tokens(const T* query, const T* const* tokens, int64_t key, int64_t dim) {
    Lanes sums[LANES];
    for (int token = 0; token < LANES; token++) sums[token] = zero();
    int64_t d = 0;
#if defined(__AVX512BF16__)
    if constexpr (sizeof(T) == 2) {
        for (; d + 32 <= dim; d += 32) {
            const __m512bh part = (__m512bh)_mm512_loadu_si512(query + d);
            for (int token = 0; token < LANES; token++)
                sums[token] = _mm512_dpbf16_ps(sums[token], part, (__m512bh)_mm512_loadu_si512(tokens[token] + key + d));
        }
    }
#endif
    for (; d < dim; d += LANES) {
        const Lanes part = load(query + d);
        for (int token = 0; token < LANES; token++) sums[token] = fma(part, load(tokens[token] + key + d), sums[token]);
    }
    return sums_of(sums);
}

// sums[head] += weights of the tokens times 16 * VECTORS numbers that lie `value_at` behind the tokens' beginnings.
template <class T, int HEADS, int VECTORS>
inline void add_values(const float* weights, int64_t weight_stride, const T* const* tokens, int64_t value_at,
                       int count, float* sums, int64_t sums_stride) {
    Lanes sum[HEADS][VECTORS];
    for (int head = 0; head < HEADS; head++)
        for (int vector = 0; vector < VECTORS; vector++)
            sum[head][vector] = load(sums + head * sums_stride + vector * LANES);
    for (int token = 0; token < count; token++) {
        Lanes value[VECTORS];
        for (int vector = 0; vector < VECTORS; vector++) value[vector] = load(tokens[token] + value_at + vector * LANES);
        for (int head = 0; head < HEADS; head++) {
            const Lanes weight = set(weights[head * weight_stride + token]);
            for (int vector = 0; vector < VECTORS; vector++)
                sum[head][vector] = fma(weight, value[vector], sum[head][vector]);
        }
    }
    for (int head = 0; head < HEADS; head++)
        for (int vector = 0; vector < VECTORS; vector++)
            store(sums + head * sums_stride + vector * LANES, sum[head][vector]);
}

// What a decode's piece leaves: for each head the largest score, the sum of weights, and the weighted values.
inline int64_t partial_count(const AttentionShape& shape) {
    return int64_t(shape.heads) * (shape.head_dim + 2);
}

// Tokens that will be read soon, and which of their bytes to bring into the caches meanwhile.
template <class T>
struct Fetch {
    const T* tokens[SPAN];
    int count;
    int64_t from, to;

    // A few at a time, between two computations: memory takes only so many at once.
    void some(int token) const {
        for (int index = token; index < std::min(token + LANES, count); index++)
            for (int64_t byte = from; byte < to; byte += 64) _mm_prefetch(reinterpret_cast<const char*>(tokens[index]) + byte, _MM_HINT_T1);
    }
};

template <class T, int HEADS>
void attend_heads(const AttentionShape& shape, const T* query, const T* const* tokens_at, int64_t key, int tokens,
                  float* best, float* total, float* sums, const Fetch<T>& fetch) {
    const int64_t dim = shape.head_dim;
    const float scale = 1.0f / std::sqrt(float(dim));
    alignas(64) float weights[HEADS][SPAN];
    for (int token = 0; token < tokens; token += LANES) {
        fetch.some(token);
        for (int index = token; index < token + LANES; index++)
            for (int64_t d = 0; d < dim; d += 64 / int64_t(sizeof(T)))
                _mm_prefetch(reinterpret_cast<const char*>(tokens_at[index] + key + shape.kv_heads * dim + d), _MM_HINT_T0);
        for (int head = 0; head < HEADS; head++) {
            const Lanes scores = score_tokens(query + head * shape.query_stride(), tokens_at + token, key, dim);
            store(weights[head] + token, mul(scores, set(scale)));
        }
    }
    const int padded = int(rounded_up(tokens, LANES));
    for (int head = 0; head < HEADS; head++) {
        for (int token = tokens; token < padded; token++) weights[head][token] = -std::numeric_limits<float>::infinity();
        Lanes largest = load(weights[head]);
        for (int token = LANES; token < padded; token += LANES) largest = max(largest, load(weights[head] + token));
        const float new_best = std::max(best[head], max_of(largest));
        Lanes sum = zero();
        for (int token = 0; token < padded; token += LANES) {
            const Lanes part = exp(sub(load(weights[head] + token), set(new_best)));
            sum = add(sum, part);
            store(weights[head] + token, part);
        }
        const float kept = std::exp(best[head] - new_best);
        total[head] = total[head] * kept + sum_of(sum);
        best[head] = new_best;
        if (kept != 1.0f)
            for (int64_t d = 0; d < dim; d += LANES)
                store(sums + head * dim + d, mul(load(sums + head * dim + d), set(kept)));
    }
    const int64_t value = key + shape.kv_heads * dim;
    for (int64_t d = 0; d < dim;) {
        if (d + 4 * LANES <= dim) {
            add_values<T, HEADS, 4>(weights[0], SPAN, tokens_at, value + d, tokens, sums + d, dim);
            d += 4 * LANES;
        } else {
            add_values<T, HEADS, 1>(weights[0], SPAN, tokens_at, value + d, tokens, sums + d, dim);
            d += LANES;
        }
    }
}

// Positions from .. to - 1 of the context are a decode's piece. Parts end at multiples of 16 tokens.
struct Part {
    int64_t from, to;
    Part(const Chunk& chunk, const AttentionPiece& piece, int64_t window) {
        const int64_t position = chunk.start + piece.token;
        const int64_t seen = first_seen(position, window), length = position + 1 - seen;
        from = seen + length * piece.split / piece.splits / LANES * LANES;
        to = piece.split + 1 == piece.splits ? position + 1
                                             : seen + length * (piece.split + 1) / piece.splits / LANES * LANES;
    }
};

// partial: best [H], total [H], sums [H][D]. next_chunk, next_piece: what this thread will probably do then, or null.
template <class T>
void attend_direct(const AttentionShape& shape, const Chunk& chunk, const AttentionPiece& piece, int64_t window,
                   const T* queries, int64_t rows, const T* pages, float* partial, const Chunk* next_chunk,
                   const AttentionPiece* next_piece) {
    const int64_t dim = shape.head_dim, group = shape.group(), stride = shape.query_stride();
    const int64_t row = chunk.first_row + piece.token;
    const Part part(chunk, piece, window);
    const int64_t from = part.from, to = part.to;
    float* best = partial;
    float* total = best + shape.heads;
    float* sums = total + shape.heads;
    std::fill(best, best + shape.heads, -std::numeric_limits<float>::infinity());
    std::fill(total, total + shape.heads * (1 + dim), 0.0f);
    const T* tokens_at[SPAN];
    Fetch<T> fetch;
    const Fetch<T> nothing{{}, 0, 0, 0};
    for (int64_t begin = from; begin < to; begin += SPAN) {
        fetch.count = int(std::min<int64_t>(SPAN, to - begin - SPAN));
        if (fetch.count > 0) {
            find_tokens(pages, shape, chunk, begin + SPAN, fetch.count, fetch.tokens);
        } else if (next_piece != nullptr) {
            const Part next(*next_chunk, *next_piece, window);
            fetch.count = int(std::min<int64_t>(SPAN, next.to - next.from));
            find_tokens(pages, shape, *next_chunk, next.from, fetch.count, fetch.tokens);
        }
        const int count = int(std::min<int64_t>(SPAN, to - begin));
        find_tokens(pages, shape, chunk, begin, count, tokens_at);
        // The lanes of the last 16 that have no token read the last one's key; their scores are overwritten.
        for (int index = count; index < SPAN; index++) tokens_at[index] = tokens_at[count - 1];
        const int64_t token_bytes = shape.token_stride() * int64_t(sizeof(T));
        for (int kv_head = 0; kv_head < shape.kv_heads; kv_head++) {
            // Each head's computing hides a share of the fetching.
            fetch.from = token_bytes * kv_head / shape.kv_heads / 64 * 64;
            fetch.to = token_bytes * (kv_head + 1) / shape.kv_heads / 64 * 64;
            for (int64_t in_group = 0; in_group < group;) {
                const int64_t head = kv_head * group + in_group;
                const T* query = queries + ((kv_head * rows + row) * group + in_group) * stride;
                float* head_sums = sums + head * dim;
                const Fetch<T>& now = in_group == 0 ? fetch : nothing;
                switch (std::min<int64_t>(group - in_group, 4)) {
                    case 4:
                        attend_heads<T, 4>(shape, query, tokens_at, kv_head * dim, count, best + head, total + head, head_sums, now);
                        break;
                    case 3:
                        attend_heads<T, 3>(shape, query, tokens_at, kv_head * dim, count, best + head, total + head, head_sums, now);
                        break;
                    case 2:
                        attend_heads<T, 2>(shape, query, tokens_at, kv_head * dim, count, best + head, total + head, head_sums, now);
                        break;
                    default:
                        attend_heads<T, 1>(shape, query, tokens_at, kv_head * dim, count, best + head, total + head, head_sums, now);
                }
                in_group += std::min<int64_t>(group - in_group, 4);
            }
        }
    }
}

// Joins the parts of a row's context; attended: [H * D].
template <class T>
void join_parts(const AttentionShape& shape, const float* partials, int splits, T* attended) {
    const int64_t dim = shape.head_dim, stride = partial_count(shape);
    for (int head = 0; head < shape.heads; head++) {
        float best = partials[head];
        for (int split = 1; split < splits; split++) best = std::max(best, partials[split * stride + head]);
        float total = 0;
        for (int split = 0; split < splits; split++) {
            const float* partial = partials + split * stride;
            total += partial[shape.heads + head] * std::exp(partial[head] - best);
        }
        for (int64_t d = 0; d < dim; d += LANES) {
            Lanes sum = zero();
            for (int split = 0; split < splits; split++) {
                const float* partial = partials + split * stride;
                const float share = std::exp(partial[head] - best) / total;
                sum = fma(load(partial + 2 * shape.heads + head * dim + d), set(share), sum);
            }
            store(attended + head * dim + d, sum);
        }
    }
}

}  // namespace trioserve
