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

constexpr int SPAN = 64;           // context tokens that rows meet at a time
constexpr int PACKED_ROWS = 768;   // (token, head) rows of a prompt's piece; the packed keys and values serve them all
constexpr int PIECE_TOKENS_MIN = 32;
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

inline int64_t piece_tokens_max(const AttentionShape& shape) {
    return std::max<int64_t>(1, PACKED_ROWS / shape.group());
}

// Where a token's numbers begin in a layer's pages.
inline int64_t slot_of(const AttentionShape& shape, const Chunk& chunk, int64_t position) {
    const int64_t page = chunk.table[position / shape.page_tokens];
    return (page * shape.page_tokens + position % shape.page_tokens) * shape.token_stride();
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

// Keys are the rows of the first product and queries its weight, so that 16 queries lie side by side in vectors: a softmax
// over tokens then has no sums across lanes. Its weights are the second product's weight, and the values' numbers its rows;
// one more row, of ones, gives the sums of the weights.

// What sixteen rows have at `at`, one number of float32 or a pair of bfloat16 each, becomes 16 rows of columns.
template <class T>
inline void transpose_rows(const T* const* rows, int64_t at, Lanes* columns) {
    for (int row = 0; row < LANES; row++) columns[row] = load(reinterpret_cast<const float*>(rows[row] + at));
    transpose(columns);
}

// The same for the numbers of the tokens of one vector: columns[i] has number `at + i` of 16 tokens, or of 32.
inline void transpose_tokens(const float* const* tokens, int64_t at, Lanes* columns) {
    transpose_rows(tokens, at, columns);
}
inline void transpose_tokens(const bf16* const* tokens, int64_t at, Lanes* columns) {
    for (int pair = 0; pair < LANES; pair++) columns[pair] = load_in_turn(tokens[2 * pair] + at, tokens[2 * pair + 1] + at);
    transpose(columns);
}

// 2 ** a as it becomes a weight of values, and two tokens' weights side by side.
template <class T>
struct Weights;

template <>
struct Weights<float> {
    static constexpr float ONE = 1.0f;
    static Lanes power(Lanes a) { return power_of_two(a); }
    static void store_pair(float* to, Lanes even, Lanes odd) {
        store(to, even);
        store(to + LANES, odd);
    }
};

template <>
struct Weights<bf16> {
    static constexpr bf16 ONE = {0x3f80};
    static Lanes power(Lanes a) { return power_of_two_to_cut(a); }
    static void store_pair(bf16* to, Lanes even, Lanes odd) { store_cut_in_turn(to, even, odd); }
};

// The positions that a row sees.
struct Seen {
    int64_t begin, end;
};

// One thread's memory for the (token, head) rows that meet packed keys, PACKED_ROWS or one group; they are computed in
// strips, side by side.
template <class T>
struct PackedScratch {
    static constexpr int STRIP = PANEL_BLOCKS * LANES;

    T *keys, *values;      // [SPAN, query stride] and [sum rows, SPAN]
    T *queries, *weights;  // packed, of [width, query stride] and of [STRIP, SPAN]
    T* nothing;            // a token that is absent, a query that is absent
    float* scores;         // [SPAN, STRIP]
    float* sums;           // a strip's [sum rows, STRIP], strip by strip
    float* best;           // [width], about the largest score so far
    float *first, *last;   // [width], what a row sees

    static int64_t width_max(const AttentionShape& shape) {
        return rounded_up(piece_tokens_max(shape) * shape.group(), STRIP);
    }
    static int64_t sum_rows(const AttentionShape& shape) { return shape.head_dim + LANES; }
    // In elements of T and of float.
    static int64_t packed_count(const AttentionShape& shape) {
        return (SPAN + 1) * shape.query_stride() + SPAN * (sum_rows(shape) + STRIP) +
               width_max(shape) * shape.query_stride();
    }
    static int64_t float_count(const AttentionShape& shape) {
        return STRIP * SPAN + width_max(shape) * (sum_rows(shape) + 3);
    }

    PackedScratch(const AttentionShape& shape, T* packed, float* floats) {
        keys = packed;
        values = keys + SPAN * shape.query_stride();
        queries = values + SPAN * sum_rows(shape);
        weights = queries + width_max(shape) * shape.query_stride();
        nothing = weights + STRIP * SPAN;
        scores = floats;
        sums = scores + STRIP * SPAN;
        best = sums + width_max(shape) * sum_rows(shape);
        first = best + width_max(shape);
        last = first + width_max(shape);
    }

    float* sums_of(const AttentionShape& shape, int64_t row) const {
        return sums + row / STRIP * STRIP * sum_rows(shape) + row % STRIP;
    }

    // For `count` rows; query_of(row) is where one's query lies, seen_of(row) what it sees.
    template <class QueryOf, class SeenOf>
    void begin(const AttentionShape& shape, int64_t count, const QueryOf& query_of, const SeenOf& seen_of) const {
        constexpr float NOTHING_SEEN = -1e30f;  // no infinity: two of them have no difference
        constexpr int64_t DEPTH = Unit<T>::DEPTH;
        const int64_t width = rounded_up(count, STRIP), stride = shape.query_stride();
        std::fill(best, best + width, NOTHING_SEEN);
        for (int64_t row = 0; row < width; row++) {
            const Seen seen = seen_of(std::min(row, count - 1));
            first[row] = float(seen.begin);
            last[row] = float(seen.end - 1);
        }
        // One model's padding stays; here nobody knows what was computed before.
        std::memset(nothing, 0, sizeof(T) * stride);
        if (stride > shape.head_dim) std::memset(keys, 0, sizeof(T) * SPAN * stride);
        T* ones = values + shape.head_dim * SPAN;
        std::fill(ones, ones + SPAN, Weights<T>::ONE);
        std::memset(ones + SPAN, 0, sizeof(T) * SPAN * (LANES - 1));
        for (int64_t row = 0; row < width; row += LANES) {
            const T* rows[LANES];
            for (int lane = 0; lane < LANES; lane++) rows[lane] = row + lane < count ? query_of(row + lane) : nothing;
            for (int64_t d = 0; d < stride; d += LANES * DEPTH) {
                Lanes columns[LANES];
                transpose_rows(rows, d, columns);
                float* to = reinterpret_cast<float*>(queries + row * stride + d * LANES);
                for (int index = 0; index < LANES; index++) store(to + index * LANES, columns[index]);
            }
        }
    }

    // finish(row, d, Lanes) gets the sums of each row's numbers d .. d + 15; is_share: divided by its total.
    template <class Finish>
    void end(const AttentionShape& shape, int64_t count, bool is_share, const Finish& finish) const {
        for (int64_t first = 0; first < count; first += LANES) {
            const float* from = sums_of(shape, first);
            const Lanes share = is_share ? div(set(1.0f), load(from + shape.head_dim * STRIP)) : set(1.0f);
            for (int64_t d = 0; d < shape.head_dim; d += LANES) {
                Lanes rows[LANES];
                for (int index = 0; index < LANES; index++) rows[index] = mul(load(from + (d + index) * STRIP), share);
                transpose(rows);
                for (int64_t row = first; row < std::min(first + LANES, count); row++) finish(row, d, rows[row - first]);
            }
        }
    }
};

// Brings tokens first .. end - 1 of a span to where they are multiplied. Other tokens' keys are anything, their values
// zeros as far as a product may reach.
template <class T>
inline void pack_span(const AttentionShape& shape, const T* const* tokens_at, int64_t kv_head, int64_t first, int64_t end,
                      const PackedScratch<T>& scratch) {
    constexpr int64_t STEP = LANES * Unit<T>::DEPTH;
    const int64_t dim = shape.head_dim, key = kv_head * dim, value = key + shape.kv_heads * dim;
    for (int64_t index = first; index < end; index++)
        std::memcpy(scratch.keys + index * shape.query_stride(), tokens_at[index] + key, sizeof(T) * dim);
    for (int64_t token = first / 32 * 32; token < rounded_up(end, 32); token += STEP) {
        const T* values_at[STEP];
        for (int64_t index = 0; index < STEP; index++) {
            const bool is_there = token + index >= first && token + index < end;
            values_at[index] = is_there ? tokens_at[token + index] + value : scratch.nothing;
        }
        for (int64_t d = 0; d < dim; d += LANES) {
            Lanes columns[LANES];
            transpose_tokens(values_at, d, columns);
            for (int index = 0; index < LANES; index++)
                store(reinterpret_cast<float*>(scratch.values + (d + index) * SPAN + token), columns[index]);
        }
    }
}

// Of a span's packed tokens, what one strip meets: from .. end - 1, both multiples of 32.
struct Met {
    int64_t from, end;
    bool is_first;
};

// Sixteen rows' scores become weights.
template <class T>
inline void weigh_block(const AttentionShape& shape, int64_t row, int64_t from, int64_t present, const Met& met,
                        const PackedScratch<T>& scratch) {
    constexpr float INFINITE = std::numeric_limits<float>::infinity(), LOG2_E = 1.44269504f;
    constexpr float GROWTH_MAX = 5.0f;  // of a score, before what was added up is scaled anew
    constexpr int STRIP = PackedScratch<T>::STRIP;
    float* scores = scratch.scores + row % STRIP;
    T* weights = scratch.weights + row % STRIP * SPAN;
    const Lanes scale = set(1.0f / std::sqrt(float(shape.head_dim)));
    const Lanes first_seen = load(scratch.first + row), last_seen = load(scratch.last + row);
    const int64_t first_max = int64_t(scratch.first[row + LANES - 1]) - from;
    const int64_t last_min = int64_t(scratch.last[row]) - from;
    const int64_t end = std::min(rounded_up(present, 2), met.end);
    // The first one of max() may be a NaN, and is left out; its row becomes one by its weights.
    Lanes largest[4] = {set(-INFINITE), set(-INFINITE), set(-INFINITE), set(-INFINITE)};
    const auto hide = [&](int64_t token, int64_t end) {
        for (; token < end; token++) {
            const Lanes position = set(float(from + token));
            Lanes score = load(scores + token * STRIP);
            score = where_at_least(position, first_seen, score, set(-INFINITE));
            score = where_at_least(last_seen, position, score, set(-INFINITE));
            store(scores + token * STRIP, score);
            largest[0] = max(score, largest[0]);
        }
    };
    int64_t token = met.from;
    const int64_t hidden_end = std::min(first_max, end), plain_end = std::min(last_min + 1, end);
    hide(token, hidden_end);
    token = std::max(token, hidden_end);
    for (; token + 4 <= plain_end; token += 4)
        for (int index = 0; index < 4; index++) largest[index] = max(load(scores + (token + index) * STRIP), largest[index]);
    hide(token, end);
    const Lanes most = mul(max(max(largest[0], largest[1]), max(largest[2], largest[3])), scale);
    const Lanes best = load(scratch.best + row);
    const Lanes new_best = where_at_least(most, add(best, set(GROWTH_MAX)), most, best);
    const Lanes step = mul(scale, set(LOG2_E)), start = mul(new_best, set(-LOG2_E));
    for (token = met.from; token < end; token += 2) {
        const Lanes even = Weights<T>::power(fma(load(scores + token * STRIP), step, start));
        const Lanes odd = Weights<T>::power(fma(load(scores + (token + 1) * STRIP), step, start));
        Weights<T>::store_pair(weights + token * LANES, even, odd);
    }
    for (; token < met.end; token += 2) Weights<T>::store_pair(weights + token * LANES, zero(), zero());
    // Of two infinite scores the difference would be a NaN, and hide what other lanes have.
    const Lanes has_grown = where_at_least(most, add(best, set(GROWTH_MAX)), set(1.0f), zero());
    if (max_of(has_grown) > 0.0f) {
        store(scratch.best + row, new_best);
        const Lanes kept = exp(sub(best, new_best));
        float* sums = scratch.sums_of(shape, row);
        if (!met.is_first)
            for (int64_t d = 0; d <= shape.head_dim; d++) store(sums + d * STRIP, mul(load(sums + d * STRIP), kept));
    }
}

// The scratch's `count` rows meet a packed span, tokens from .. from + present - 1. The weighted values are added up as one
// softmax over all spans (Milakov, Gimelshein: Online normalizer calculation, arXiv 1805.02867).
template <class T>
inline void meet_span(const AttentionShape& shape, int64_t count, int64_t from, int64_t present,
                      const PackedScratch<T>& scratch) {
    constexpr int STRIP = PackedScratch<T>::STRIP;
    const int64_t stride = shape.query_stride();
    for (int64_t row = 0; row < count; row += STRIP) {
        // Later rows see neither less at the end nor more at the beginning.
        const int64_t first = int64_t(scratch.first[row]) - from;
        const int64_t end = std::min(int64_t(scratch.last[row + STRIP - 1]) + 1 - from, present);
        if (first >= SPAN || end <= 0) continue;
        const Met met{std::max<int64_t>(first, 0) / 32 * 32, rounded_up(end, 32), first >= 0};
        add_products<T>(scratch.keys + met.from * stride, stride, int(met.end - met.from), scratch.queries + row * stride,
                        LANES * stride, PANEL_BLOCKS, stride, scratch.scores + met.from * STRIP, STRIP, true, nullptr);
        for (int64_t block = row; block < row + STRIP; block += LANES)
            weigh_block(shape, block, from, end, met, scratch);
        add_products<T>(scratch.values + met.from, SPAN, int(shape.head_dim + 1), scratch.weights + met.from * LANES,
                        LANES * SPAN, PANEL_BLOCKS, met.end - met.from, scratch.sums_of(shape, row), STRIP, met.is_first,
                        nullptr);
    }
}

// queries: [K][rows][G][query_stride], turned.
template <class T>
void attend_prompt(const AttentionShape& shape, const Chunk& chunk, const AttentionPiece& piece, int64_t window,
                   const T* queries, int64_t rows, const T* pages, const Rows<T>& attended,
                   const PackedScratch<T>& scratch) {
    const int64_t group = shape.group(), dim = shape.head_dim;
    const int64_t count = piece.tokens * group;
    const int64_t first = chunk.start + piece.token, last = first + piece.tokens - 1;
    const T* query = queries + ((piece.kv_head * rows + chunk.first_row + piece.token) * group) * shape.query_stride();
    scratch.begin(
        shape, count, [&](int64_t row) { return query + row * shape.query_stride(); },
        [&](int64_t row) {
            const int64_t position = first + row / group;
            return Seen{first_seen(position, window), position + 1};
        });
    for (int64_t from = first_seen(first, window) / SPAN * SPAN; from <= last; from += SPAN) {
        const int64_t present = std::min<int64_t>(SPAN, last + 1 - from);
        // Behind a window lie pages that may be somebody else's by now.
        const int64_t hidden = std::max<int64_t>(first_seen(first, window) - from, 0);
        const T* tokens_at[SPAN];
        find_tokens(pages, shape, chunk, from, present, tokens_at);
        pack_span(shape, tokens_at, piece.kv_head, hidden, present, scratch);
        meet_span(shape, count, from, present, scratch);
    }
    scratch.end(shape, count, true, [&](int64_t row, int64_t d, Lanes part) {
        store(attended.at(chunk.first_row + piece.token + row / group, (piece.kv_head * group + row % group) * dim + d), part);
    });
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
    const int64_t group = shape.group(), dim = shape.head_dim;
    const int64_t count = piece.sharer_count * group;
    scratch.begin(
        shape, count,
        [&](int64_t row) {
            const int64_t sharer = sharers[row / group].row;
            return queries + ((piece.kv_head * rows + sharer) * group + row % group) * shape.query_stride();
        },
        [&](int64_t) { return Seen{piece.from, piece.to}; });
    for (int64_t from = piece.from; from < piece.to; from += SPAN) {
        const int64_t present = std::min<int64_t>(SPAN, piece.to - from);
        const T* tokens_at[SPAN];
        find_tokens(pages, shape, chunk, from, present, tokens_at);
        pack_span(shape, tokens_at, piece.kv_head, 0, present, scratch);
        meet_span(shape, count, from, present, scratch);
    }
    for (int64_t row = 0; row < count; row++) {
        float* partial = partial_of(sharers[row / group]) + piece.kv_head * group + row % group;
        partial[0] = scratch.best[row];
        partial[shape.heads] = scratch.sums_of(shape, row)[dim * PackedScratch<T>::STRIP];
    }
    scratch.end(shape, count, false, [&](int64_t row, int64_t d, Lanes part) {
        const int64_t head = piece.kv_head * group + row % group;
        store(partial_of(sharers[row / group]) + 2 * shape.heads + head * dim + d, part);
    });
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

// What a new largest score leaves of the weights so far. Most spans bring none.
inline float kept_share(float best, float new_best) { return best == new_best ? 1.0f : std::exp(best - new_best); }

// Brings a thread's next tokens into the second cache, in the order in which they lie in their pages: so memory gives
// them fastest. It is called often, for a few lines each time, since memory takes only so many at once.
class Fetch {
public:
    // pages, token_bytes: of the layer.
    Fetch(const AttentionShape& shape, const void* pages, int64_t token_bytes)
        : page_tokens_(shape.page_tokens), token_bytes_(token_bytes), pages_(static_cast<const char*>(pages)) {}

    // A piece begins; behind it comes `next`, if it is not null.
    void begin_piece(const Chunk& chunk, const AttentionPiece& piece, const Chunk* next_chunk,
                     const AttentionPiece* next) {
        if (ahead_ <= 0) {
            now_ = {chunk.table, piece.from, piece.to};
            at_ = end_;
            ahead_ = 0;
        }
        then_ = next == nullptr ? Range{} : Range{next_chunk->table, next->from, next->to};
    }

    // `tokens` will be read, in which time some() is called `calls` times.
    void begin_span(int64_t tokens, int64_t calls) {
        wanted_ = (tokens + TOKENS_AHEAD - ahead_) * token_bytes_ / BYTES;
        steps_of_call_ = int((wanted_ + calls - 1) / calls);
        ahead_ -= tokens;
    }

    void some() {
        for (int step = 0; step < steps_of_call_ && wanted_ > 0; step++) {
            if (at_ >= end_ && !begin_page()) return;
            for (int64_t byte = 0; byte < BYTES; byte += 64) _mm_prefetch(at_ + byte, _MM_HINT_T1);
            at_ += BYTES;
            wanted_--;
        }
    }

private:
    static constexpr int64_t TOKENS_AHEAD = 64, BYTES = 256;

    struct Range {
        const int32_t* table = nullptr;
        int64_t from = 0, to = 0;
    };

    bool begin_page() {
        if (now_.from == now_.to) {
            if (then_.from == then_.to) return false;
            now_ = then_;
            then_ = {};
        }
        const int64_t offset = now_.from % page_tokens_;
        const int64_t tokens = std::min(page_tokens_ - offset, now_.to - now_.from);
        at_ = pages_ + (now_.table[now_.from / page_tokens_] * page_tokens_ + offset) * token_bytes_;
        end_ = at_ + tokens * token_bytes_;
        now_.from += tokens;
        ahead_ += tokens;
        return true;
    }

    int64_t page_tokens_, token_bytes_;
    const char* pages_;
    const char *at_ = nullptr, *end_ = nullptr;
    int64_t wanted_ = 0;
    int steps_of_call_ = 0;
    int64_t ahead_ = 0;  // tokens that were begun to be fetched, less those that were read
    Range now_, then_;
};

template <class T, int HEADS>
void attend_heads(const AttentionShape& shape, const T* query, const T* const* tokens_at, int64_t key, int tokens,
                  float* best, float* total, float* sums, Fetch& fetch) {
    const int64_t dim = shape.head_dim;
    const float scale = 1.0f / std::sqrt(float(dim));
    alignas(64) float weights[HEADS][SPAN];
    for (int token = 0; token < tokens; token += LANES) {
        fetch.some();
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

// partial: best [H], total [H], sums [H][D].
template <class T>
void attend_direct(const AttentionShape& shape, const Chunk& chunk, const AttentionPiece& piece, const T* queries,
                   int64_t rows, const T* pages, float* partial, Fetch& fetch) {
    constexpr int64_t HEADS_MAX = 4;
    const int64_t dim = shape.head_dim, group = shape.group(), stride = shape.query_stride();
    const int64_t row = chunk.first_row + piece.token;
    float* best = partial;
    float* total = best + shape.heads;
    float* sums = total + shape.heads;
    std::fill(best, best + shape.heads, -std::numeric_limits<float>::infinity());
    std::fill(total, total + shape.heads * (1 + dim), 0.0f);
    const T* tokens_at[SPAN];
    for (int64_t begin = piece.from; begin < piece.to; begin += SPAN) {
        const int count = int(std::min<int64_t>(SPAN, piece.to - begin));
        fetch.begin_span(count, shape.kv_heads * ((group + HEADS_MAX - 1) / HEADS_MAX) * ((count + LANES - 1) / LANES));
        find_tokens(pages, shape, chunk, begin, count, tokens_at);
        // The lanes of the last 16 that have no token read the last one's key; their scores are overwritten.
        for (int index = count; index < SPAN; index++) tokens_at[index] = tokens_at[count - 1];
        for (int64_t kv_head = 0; kv_head < shape.kv_heads; kv_head++) {
            for (int64_t in_group = 0; in_group < group; in_group += HEADS_MAX) {
                const int64_t head = kv_head * group + in_group, key = kv_head * dim;
                const T* query = queries + ((kv_head * rows + row) * group + in_group) * stride;
                const auto attend = [&](auto run) {
                    run(shape, query, tokens_at, key, count, best + head, total + head, sums + head * dim, fetch);
                };
                switch (std::min(group - in_group, HEADS_MAX)) {
                    case 4: attend(attend_heads<T, 4>); break;
                    case 3: attend(attend_heads<T, 3>); break;
                    case 2: attend(attend_heads<T, 2>); break;
                    default: attend(attend_heads<T, 1>);
                }
            }
        }
    }
}

// Joins the parts of a row's context. What a part has as its largest scores becomes its shares.
template <class T>
void join_parts(const AttentionShape& shape, float* partials, int splits, const Rows<T>& attended, int64_t row) {
    const int64_t dim = shape.head_dim, stride = partial_count(shape);
    for (int64_t first = 0; first < shape.heads; first += LANES) {
        // Lanes of the last heads' vector that have none hold something else, and are not stored.
        const int64_t heads = std::min<int64_t>(LANES, shape.heads - first);
        Lanes best = load(partials + first), total = zero();
        for (int split = 1; split < splits; split++) best = max(best, load(partials + split * stride + first));
        const auto weight_of = [&](const float* partial) { return exp(sub(load(partial + first), best)); };
        for (int split = 0; split < splits; split++) {
            const float* partial = partials + split * stride;
            total = fma(load(partial + shape.heads + first), weight_of(partial), total);
        }
        for (int split = 0; split < splits; split++) {
            float* partial = partials + split * stride;
            alignas(64) float shares[LANES];
            store(shares, div(weight_of(partial), total));
            std::memcpy(partial + first, shares, sizeof(float) * heads);
        }
    }
    for (int head = 0; head < shape.heads; head++)
        for (int64_t d = 0; d < dim; d += LANES) {
            Lanes sum = zero();
            for (int split = 0; split < splits; split++) {
                const float* partial = partials + split * stride;
                sum = fma(load(partial + 2 * shape.heads + head * dim + d), set(partial[head]), sum);
            }
            store(attended.at(row, head * dim + d), sum);
        }
}

}  // namespace trioserve
