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
constexpr int SHARERS_MIN = 2;        // with fewer rows, packing what they share costs more than reading it again
constexpr int SHARED_TOKENS_MIN = 64;

// One piece of a step's attention: a kv head and some tokens of a prompt; a kv head, some rows and a part of the context
// that they share; of one row, a part of the context that it has for itself.
struct AttentionPiece {
    enum Kind { PROMPT, SHARED, DIRECT } kind;
    int32_t chunk, token, tokens;         // not SHARED
    int32_t kv_head;                      // not DIRECT
    int32_t from, to;                     // not PROMPT: positions
    int32_t part;                         // not PROMPT: which of the row's; in SHARED, added to that of each sharer
    int32_t sharers_first, sharer_count;  // SHARED
};

// A row whose context begins with blocks of other rows, too.
struct Sharer {
    int32_t row, part;
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
template <class T>
inline void pack_key(const T* key, int64_t dim, int64_t index, T* to) {
    constexpr int64_t DEPTH = Unit<T>::DEPTH;
    for (int64_t d = 0; d < dim; d += DEPTH) std::memcpy(to + d * LANES + index * DEPTH, key + d, DEPTH * sizeof(T));
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

// Sixteen tokens at once, whose keys lie `at` behind their beginnings.
template <class T>
inline void pack_keys(const T* const* tokens, int64_t at, int64_t dim, T* to) {
    constexpr int64_t DEPTH = Unit<T>::DEPTH;
    int64_t d = 0;
    for (; d + LANES * DEPTH <= dim; d += LANES * DEPTH) {
        Lanes rows[LANES];
        for (int token = 0; token < LANES; token++)
            rows[token] = load(reinterpret_cast<const float*>(tokens[token] + at + d));
        transpose(rows);
        for (int row = 0; row < LANES; row++) store(reinterpret_cast<float*>(to + (d + row * DEPTH) * LANES), rows[row]);
    }
    for (int token = 0; token < LANES && d < dim; token++)
        pack_key(tokens[token] + at + d, dim - d, token, to + d * LANES);
}
inline void pack_values(const float* const* tokens, int64_t at, int64_t dim, int64_t first, float* to) {
    for (int token = 0; token < LANES; token++) pack_value(tokens[token] + at, dim, first + token, to);
}
inline void pack_values(const bf16* const* tokens, int64_t at, int64_t dim, int64_t first, bf16* to) {
    for (int token = 0; token < LANES; token += 2)
        for (int64_t d = 0; d < dim; d += LANES)
            store_in_turn(to + d * SPAN + (first + token) * LANES, tokens[token] + at + d, tokens[token + 1] + at + d);
}

// One thread's memory for the rows that meet packed keys: up to QUERY_MAX (token, head) rows.
template <class T>
struct PackedScratch {
    T *keys, *values, *weights, *queries;
    float *scores, *sums, *best, *total;

    static int64_t query_max(const AttentionShape& shape) { return prompt_piece_tokens(shape) * shape.group(); }
    static int64_t row_count(const AttentionShape& shape) { return query_max(shape) + 16; }
    // In elements of T and of float.
    static int64_t packed_count(const AttentionShape& shape) {
        return SPAN * (shape.query_stride() + shape.head_dim) + row_count(shape) * (SPAN + shape.query_stride());
    }
    static int64_t float_count(const AttentionShape& shape) { return row_count(shape) * (SPAN + shape.head_dim + 2); }

    PackedScratch(const AttentionShape& shape, T* packed, float* floats) {
        keys = packed;
        values = keys + SPAN * shape.query_stride();
        weights = values + SPAN * shape.head_dim;
        queries = weights + row_count(shape) * SPAN;
        scores = floats;
        sums = scores + row_count(shape) * SPAN;
        best = sums + row_count(shape) * shape.head_dim;
        total = best + row_count(shape);
    }

    void begin(const AttentionShape& shape, int64_t count) const {
        std::fill(best, best + count, -std::numeric_limits<float>::infinity());
        std::fill(total, total + count, 0.0f);
        // One model's padding stays; here nobody knows what was computed before.
        std::memset(keys, 0, sizeof(T) * SPAN * shape.query_stride());
    }
};

// Packs tokens first .. end - 1 of a span; the others are zeros.
template <class T>
inline void pack_span(const AttentionShape& shape, const T* const* tokens_at, int64_t kv_head, int64_t first, int64_t end,
                      const PackedScratch<T>& scratch) {
    const int64_t dim = shape.head_dim, stride = shape.query_stride();
    if (end - first < SPAN) {
        std::memset(scratch.keys, 0, sizeof(T) * SPAN * stride);
        std::memset(scratch.values, 0, sizeof(T) * SPAN * dim);
    }
    const int64_t key = kv_head * dim, value = key + shape.kv_heads * dim;
    for (int64_t index = first; index < end; index++) {
        T* block = scratch.keys + index / LANES * LANES * stride;
        if (index % LANES == 0 && index + LANES <= end) {
            pack_keys(tokens_at + index, key, dim, block);
            pack_values(tokens_at + index, value, dim, index, scratch.values);
            index += LANES - 1;
            continue;
        }
        pack_key(tokens_at[index] + key, dim, index % LANES, block);
        pack_value(tokens_at[index] + value, dim, index, scratch.values);
    }
}

struct Seen {
    int64_t begin, end;
};

// What a new largest score leaves of the weights so far. Most spans bring none.
inline float kept_share(float best, float new_best) { return best == new_best ? 1.0f : std::exp(best - new_best); }

// `count` query rows meet a packed span; seen(row) tells which of its tokens a row sees. The weighted values are added
// up as one softmax over all spans (Milakov, Gimelshein: Online normalizer calculation, arXiv 1805.02867).
template <class T, class SeenBy>
inline void meet_span(const AttentionShape& shape, const T* query, int64_t count, bool is_first,
                      const PackedScratch<T>& scratch, const SeenBy& seen) {
    const int64_t dim = shape.head_dim, stride = shape.query_stride();
    const float scale = 1.0f / std::sqrt(float(dim));
    const T *keys = scratch.keys, *values = scratch.values;
    add_products(query, stride, int(count), keys, LANES * stride, SPAN / LANES, stride, scratch.scores, SPAN, true, keys);
    for (int64_t row = 0; row < count; row++) {
        const Seen bounds = seen(row);
        float* score = scratch.scores + row * SPAN;
        T* weight = scratch.weights + row * SPAN;
        if (bounds.begin >= bounds.end) {
            for (int64_t index = 0; index < SPAN; index += LANES) store(weight + index, zero());
            if (is_first)
                for (int64_t d = 0; d < dim; d += LANES) store(scratch.sums + row * dim + d, zero());
            continue;
        }
        for (int64_t index = 0; index < bounds.begin; index++) score[index] = -std::numeric_limits<float>::infinity();
        for (int64_t index = bounds.end; index < SPAN; index++) score[index] = -std::numeric_limits<float>::infinity();
        Lanes largest = load(score);
        for (int64_t index = LANES; index < SPAN; index += LANES) largest = max(largest, load(score + index));
        const float new_best = std::max(scratch.best[row], max_of(largest) * scale);
        Lanes sum = zero();
        for (int64_t index = 0; index < SPAN; index += LANES) {
            const Lanes part = exp(fma(load(score + index), set(scale), set(-new_best)));
            sum = add(sum, part);
            store(weight + index, part);
        }
        const float kept = is_first ? 0.0f : kept_share(scratch.best[row], new_best);
        scratch.total[row] = scratch.total[row] * kept + sum_of(sum);
        scratch.best[row] = new_best;
        if (!is_first && kept != 1.0f)
            for (int64_t d = 0; d < dim; d += LANES)
                store(scratch.sums + row * dim + d, mul(load(scratch.sums + row * dim + d), set(kept)));
    }
    add_products(static_cast<const T*>(scratch.weights), SPAN, int(count), values, LANES * SPAN, int(dim / LANES), SPAN,
                 scratch.sums, dim, is_first, values);
}

// queries: [K][rows][G][query_stride], turned. attended: [rows][attended_stride].
template <class T>
void attend_prompt(const AttentionShape& shape, const Chunk& chunk, const AttentionPiece& piece, int64_t window,
                   const T* queries, int64_t rows, const T* pages, T* attended, int64_t attended_stride,
                   const PackedScratch<T>& scratch) {
    const int64_t group = shape.group(), dim = shape.head_dim;
    const int64_t count = piece.tokens * group;
    const int64_t first = chunk.start + piece.token, last = first + piece.tokens - 1;
    const T* query = queries + ((piece.kv_head * rows + chunk.first_row + piece.token) * group) * shape.query_stride();
    scratch.begin(shape, count);
    bool is_first = true;
    for (int64_t from = first_seen(first, window) / SPAN * SPAN; from <= last; from += SPAN) {
        const int64_t present = std::min<int64_t>(SPAN, last + 1 - from);
        // Behind a window lie pages that may be somebody else's by now.
        const int64_t hidden = std::max<int64_t>(first_seen(first, window) - from, 0);
        const T* tokens_at[SPAN];
        find_tokens(pages, shape, chunk, from, present, tokens_at);
        pack_span(shape, tokens_at, piece.kv_head, hidden, present, scratch);
        meet_span(shape, query, count, is_first, scratch, [&](int64_t row) {
            const int64_t position = first + row / group;
            return Seen{std::max<int64_t>(first_seen(position, window) - from, 0),
                        std::min<int64_t>(position + 1 - from, SPAN)};
        });
        is_first = false;
    }
    for (int64_t row = 0; row < count; row++) {
        T* to = attended + (chunk.first_row + piece.token + row / group) * attended_stride +
                (piece.kv_head * group + row % group) * dim;
        const Lanes share = set(1.0f / scratch.total[row]);
        for (int64_t d = 0; d < dim; d += LANES) store(to + d, mul(load(scratch.sums + row * dim + d), share));
    }
}

// --- decodes that share the beginning of their contexts: each span is packed once for all of them -----------------------

// What a piece of a row's context leaves: for each head the largest score, the sum of weights, and the weighted values.
inline int64_t partial_count(const AttentionShape& shape) {
    return int64_t(shape.heads) * (shape.head_dim + 2);
}

// Blocks are found through `chunk`, the first sharer's. partial_of(sharer) is where its part goes.
template <class T, class PartialOf>
void attend_shared(const AttentionShape& shape, const Chunk& chunk, const AttentionPiece& piece, const Sharer* sharers,
                   const T* queries, int64_t rows, const T* pages, const PackedScratch<T>& scratch,
                   const PartialOf& partial_of) {
    const int64_t group = shape.group(), dim = shape.head_dim, size = group * shape.query_stride();
    const int64_t count = piece.sharer_count * group;
    for (int64_t index = 0; index < piece.sharer_count; index++)
        std::memcpy(scratch.queries + index * size, queries + (piece.kv_head * rows + sharers[index].row) * size,
                    sizeof(T) * size);
    scratch.begin(shape, count);
    for (int64_t from = piece.from; from < piece.to; from += SPAN) {
        const int64_t present = std::min<int64_t>(SPAN, piece.to - from);
        const T* tokens_at[SPAN];
        find_tokens(pages, shape, chunk, from, present, tokens_at);
        pack_span(shape, tokens_at, piece.kv_head, 0, present, scratch);
        meet_span(shape, static_cast<const T*>(scratch.queries), count, from == piece.from, scratch,
                  [=](int64_t) { return Seen{0, present}; });
    }
    for (int64_t row = 0; row < count; row++) {
        float* partial = partial_of(sharers[row / group]);
        const int64_t head = piece.kv_head * group + row % group;
        partial[head] = scratch.best[row];
        partial[shape.heads + head] = scratch.total[row];
        std::memcpy(partial + 2 * shape.heads + head * dim, scratch.sums + row * dim, sizeof(float) * dim);
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
        const float kept = kept_share(best[head], new_best);
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

// partial: best [H], total [H], sums [H][D]. next_chunk, next_piece: what this thread will probably do then, or null.
template <class T>
void attend_direct(const AttentionShape& shape, const Chunk& chunk, const AttentionPiece& piece, const T* queries, int64_t rows, const T* pages, float* partial, const Chunk* next_chunk,
                   const AttentionPiece* next_piece) {
    const int64_t dim = shape.head_dim, group = shape.group(), stride = shape.query_stride();
    const int64_t row = chunk.first_row + piece.token;
    const int64_t from = piece.from, to = piece.to;
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
            fetch.count = int(std::min<int64_t>(SPAN, next_piece->to - next_piece->from));
            find_tokens(pages, shape, *next_chunk, next_piece->from, fetch.count, fetch.tokens);
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
