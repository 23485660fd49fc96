// Attention of a step's rows over the pages of one layer. A page is one KV block, [page tokens][2][K heads][D], keys before
// values. A sequence's block table names its pages. In 8 bits, each head is followed by its scale. In latent attention
// (latent_attention.h) a page is [page tokens][D]: one key for all heads, whose first numbers are also its value.
#pragma once

#include <atomic>
#include <cmath>
#include <limits>

#include "attention_weights.h"
#include "buffer.h"
#include "kv_format.h"
#include "product.h"

namespace trioserve {

struct AttentionShape {
    int heads, kv_heads, head_dim, page_tokens;
    float score_cap = 0;  // see ScoreCap
    const float* sinks = nullptr;  // one per head, padded to a multiple of LANES, or null
    int latent_dim = 0;            // numbers of a key that are also its value. 0: values follow the keys
    int32_t kv_format = KV_PLAIN;  // always plain for latents
    int own_value_dim = 0;         // numbers of a value, if they are fewer than head_dim. 0: head_dim. Not for latents
    // One per head, or null. Times the distance to a token, it is subtracted from the score before the score is divided by
    // sqrt(head_dim) (ALiBi, arXiv 2108.12409).
    const float* slopes = nullptr;
    int64_t group() const { return heads / kv_heads; }
    int64_t query_stride() const { return padded_depth(head_dim); }
    bool is_coded() const { return kv_format != KV_PLAIN; }
    int64_t record_bytes() const { return head_dim + KV_SCALE_BYTES; }  // bytes of a head in 8 bits
    int64_t plain_stride() const { return (latent_dim > 0 ? 1 : int64_t(2) * kv_heads) * head_dim; }
    // Distance from a token to the next one in a page: numbers, or bytes in 8 bits.
    int64_t token_stride() const { return is_coded() ? 2 * kv_heads * record_bytes() : plain_stride(); }
    int64_t value_dim() const { return latent_dim > 0 ? latent_dim : own_value_dim > 0 ? own_value_dim : head_dim; }
    // Offset of a kv head's value within a token's numbers.
    int64_t value_at(int64_t kv_head) const { return latent_dim > 0 ? 0 : (kv_heads + kv_head) * int64_t(head_dim); }
};

// Rows of all heads. The heads of a row are side by side, or the rows of each head follow those of the previous head, to be
// the rows of separate products.
template <class T>
struct HeadRows {
    Rows<T> rows;       // rows of the first head, or of all heads
    int64_t dim;        // numbers of a head
    int64_t apart = 0;  // distance from a head's rows to the next head's. 0: heads are side by side

    operator HeadRows<const T>() const { return {rows, dim, apart}; }
    Rows<T> of(int64_t head) const { return {rows.numbers + head * apart, rows.depth, rows.are_tiles}; }
    T* at(int64_t row, int64_t head, int64_t d) const {
        return apart > 0 ? of(head).at(row, d) : rows.at(row, head * dim + d);
    }
};

// Consecutive tokens of one sequence: rows first_row to first_row + count - 1 have the positions from start on.
struct Chunk {
    int64_t first_row, count, start;
    const int32_t* table;
    const int32_t* ends = nullptr;  // [count], position after the last token that a row sees. Null: its own token.

    int64_t end_of(int64_t position) const { return ends == nullptr ? position + 1 : ends[position - start]; }
};

constexpr int PIECE_TOKENS_MIN = 32;
constexpr int DIRECT_TOKENS_MAX = 3;  // chunks up to this length read keys and values in place
constexpr int SHARERS_MIN = 2;        // for fewer rows, packing shared tokens costs more than reading them again

// One piece of a step's attention. PROMPT: a kv head and some tokens of a prompt. SHARED: a kv head, some rows, and a part of
// the context that they share. DIRECT: one row, and a part of its own context.
struct AttentionPiece {
    enum Kind { PROMPT, SHARED, DIRECT } kind;
    int32_t chunk, token, tokens;         // unused if SHARED
    int32_t kv_head;                      // unused if DIRECT
    int32_t from, to;                     // positions: borders of parts, or of the range that a row sees. Unused if PROMPT
    int32_t sharers_first, sharer_count;  // used if SHARED
};

inline int64_t first_seen(int64_t position, int64_t window) {
    return window > 0 && position >= window ? position - window + 1 : 0;
}

// Returns the index of a token among the tokens of all pages.
inline int64_t token_of(const Chunk& chunk, int64_t position, int64_t page_tokens) {
    return chunk.table[position / page_tokens] * page_tokens + position % page_tokens;
}

// Finds the tokens at positions from .. from + count - 1, page by page, because a division per token would take longer than
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

// Decodes a kv head's keys and values from 8 bits to numbers, [count][2][D].
template <class T>
inline void decode_tokens(const AttentionShape& shape, const uint8_t* const* tokens, int64_t count, int64_t kv_head,
                          T* decoded) {
    const int64_t key = kv_head * shape.record_bytes(), value = key + shape.kv_heads * shape.record_bytes();
    for (int64_t index = 0; index < count; index++, decoded += 2 * shape.head_dim) {
        decode_head(shape.kv_format, tokens[index] + key, shape.head_dim, decoded);
        decode_head(shape.kv_format, tokens[index] + value, shape.head_dim, decoded + shape.head_dim);
    }
}

// Offsets of a kv head's keys and values within a token's numbers.
struct HeadPlace {
    int64_t key, value;
};

inline HeadPlace place_of_head(const AttentionShape& shape, int64_t kv_head) {
    if (shape.is_coded()) return {0, shape.head_dim};  // offsets in the result of decode_tokens
    return {kv_head * shape.head_dim, shape.value_at(kv_head)};
}

// The range of positions that a row sees.
struct Seen {
    int64_t begin, end;
};

// --- a decode's row: all heads over a part of the context, with keys and values read in place -----------------------------

// Result of a part of a row's context: for each head the largest score, the sum of weights, and the weighted sum of values.
inline int64_t partial_count(const AttentionShape& shape) {
    return int64_t(shape.heads) * (shape.value_dim() + 2);
}

// Prefetches a thread's next tokens into the L2 cache, in their order in the pages, in which memory is fastest. It is called
// often for a few lines each, because memory accepts only a limited number of requests at once.
class Fetch {
public:
    // pages, token_bytes: of the layer. after: address that is read after the last token, or null.
    Fetch(const AttentionShape& shape, const void* pages, int64_t token_bytes, const void* after)
        : page_tokens_(shape.page_tokens), token_bytes_(token_bytes), pages_(static_cast<const char*>(pages)),
          after_(static_cast<const char*>(after)) {}

    // Begins a piece. `next` is the piece after it, or null.
    void begin_piece(const Chunk& chunk, const AttentionPiece& piece, const Chunk* next_chunk,
                     const AttentionPiece* next) {
        if (ahead_ <= 0) {
            now_ = {chunk.table, piece.from, piece.to};
            at_ = end_;
            ahead_ = 0;
        }
        then_ = next == nullptr ? Range{} : Range{next_chunk->table, next->from, next->to};
    }

    // Announces that `tokens` tokens will be read, and that some() will be called `calls` times during this.
    void begin_span(int64_t tokens, int64_t calls) {
        const int64_t steps = (tokens + TOKENS_AHEAD - ahead_) * token_bytes_ / BYTES;
        wanted_ = std::max<int64_t>(steps, 0) * BYTES;
        steps_of_call_ = int((steps + calls - 1) / calls);
        stop_ = at_;
        ahead_ -= tokens;
    }

    // Called where sums fill the registers. So rare work must be a call, and frequent work must not be one.
    __attribute__((always_inline)) inline void some() {
        const int steps = steps_of_call_;
        for (int step = 0; step < steps; step++) {
            if (at_ >= stop_ && !go_on()) return;
            for (int64_t byte = 0; byte < BYTES; byte += 64) _mm_prefetch(at_ + byte, _MM_HINT_T1);
            at_ += BYTES;
        }
    }

private:
    static constexpr int64_t BYTES_AFTER = 32768;
#if defined(__AMX_BF16__)
    static constexpr int64_t TOKENS_AHEAD = 64, BYTES = 256;
#else
    static constexpr int64_t TOKENS_AHEAD = 96;
    static constexpr int64_t BYTES = 64;  // the CPU drops prefetches beyond some dozen lines at once
#endif

    struct Range {
        const int32_t* table = nullptr;
        int64_t from = 0, to = 0;
    };

    // Called when everything up to stop_ was prefetched. Returns false if this span needs no more prefetches.
    __attribute__((noinline, cold)) bool go_on() {
        if (wanted_ > 0 && (at_ < end_ || begin_page())) {
            const int64_t bytes = std::min<int64_t>(rounded_up(end_ - at_, BYTES), wanted_);
            stop_ = at_ + bytes;
            wanted_ -= bytes;
            return true;
        }
        steps_of_call_ = 0;
        return false;
    }

    bool begin_page() {
        if (now_.from == now_.to) {
            if (then_.from == then_.to) return begin_after();
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

    bool begin_after() {
        if (after_ == nullptr) return false;
        at_ = after_;
        end_ = after_ + BYTES_AFTER;
        after_ = nullptr;
        return true;
    }

    int64_t page_tokens_, token_bytes_;
    const char *pages_, *after_;
    const char *at_ = nullptr, *end_ = nullptr, *stop_ = nullptr;  // end_: of the page. stop_: next check
    int64_t wanted_ = 0;  // bytes of this span after stop_
    int steps_of_call_ = 0;
    int64_t ahead_ = 0;  // prefetched tokens minus read tokens
    Range now_, then_;
};

// Transposes numbers at `at` of sixteen rows, one float32 or a pair of bfloat16 each, to 16 rows of columns.
template <class T>
inline void transpose_rows(const T* const* rows, int64_t at, Lanes* columns) {
    for (int row = 0; row < LANES; row++) columns[row] = load(reinterpret_cast<const float*>(rows[row] + at));
    transpose(columns);
}

// Transposes one vector's numbers of tokens: columns[i] gets number `at + i` of 16 tokens, or of 32 in bfloat16.
inline void transpose_tokens(const float* const* tokens, int64_t at, Lanes* columns) {
    transpose_rows(tokens, at, columns);
}
inline void transpose_tokens(const bf16* const* tokens, int64_t at, Lanes* columns) {
    for (int pair = 0; pair < LANES; pair++) columns[pair] = load_in_turn(tokens[2 * pair] + at, tokens[2 * pair + 1] + at);
    transpose(columns);
}

// Tokens begin .. end - 1 of a span that a decode's row sees. Other tokens use the address of a neighbour.
struct RowSpan {
    int begin, end;
    int first_block() const { return begin / LANES; }
    int end_block() const { return (end + LANES - 1) / LANES; }
};

constexpr int UNITS_TOGETHER = 4;  // float32 numbers or pairs of bfloat16 of a key

// Packs keys as a weight with 16 tokens per block, so that a score is summed in the same order as in a prompt.
template <class T>
inline void pack_keys(const T* const* tokens, const RowSpan& span, int64_t key, int64_t dim, int64_t stride, T* packed,
                      Fetch& fetch) {
    for (int block = span.first_block(); block < span.end_block(); block++) {
        const auto at = [&](int token, int64_t d) {
            return reinterpret_cast<const float*>(tokens[block * LANES + token] + key + d);
        };
        for (int64_t d = 0; d < dim; d += UNITS_TOGETHER * Unit<T>::DEPTH) {
            Lanes columns[4];
            for (int token = 0; token < 4; token++)
                columns[token] = load_quarters(at(token, d), at(token + 4, d), at(token + 8, d), at(token + 12, d));
            transpose_quarters(columns);
            float* to = reinterpret_cast<float*>(packed + (block * stride + d) * LANES);
            for (int index = 0; index < 4; index++) store(to + index * LANES, columns[index]);
            if (d % (2 * UNITS_TOGETHER * Unit<T>::DEPTH) == 0) fetch.some();
        }
    }
}

// Dot products of each head's query with 16 * BLOCKS packed keys.
template <int HEADS, int BLOCKS, class T>
inline void score_blocks(const T* queries, int64_t stride, const T* keys, int64_t dim, float* scores, Fetch& fetch) {
    using U = Unit<T>;
    Lanes sums[HEADS][BLOCKS];
    for (int head = 0; head < HEADS; head++)
        for (int block = 0; block < BLOCKS; block++) sums[head][block] = zero();
    for (int64_t d = 0; d < dim; d += U::DEPTH, keys += U::DEPTH * LANES) {
        typename U::Weight weight[BLOCKS];
        for (int block = 0; block < BLOCKS; block++) weight[block] = U::weight(keys + block * stride * LANES);
        for (int head = 0; head < HEADS; head++) {
            const typename U::Value value = U::value(queries + head * stride + d);
            for (int block = 0; block < BLOCKS; block++)
                sums[head][block] = U::add_product(sums[head][block], weight[block], value);
        }
        if (d % 4 == 0) fetch.some();
    }
    for (int head = 0; head < HEADS; head++)
        for (int block = 0; block < BLOCKS; block++) store(scores + head * SPAN + block * LANES, sums[head][block]);
}

// Weights of a span's tokens, in the format in which they multiply values.
template <class T>
struct SpanOfWeights {
    float numbers[SPAN];
    void set(int block, Lanes weights) { store(numbers + block * LANES, weights); }
};
#if defined(__AVX512BF16__)
template <>
struct SpanOfWeights<bf16> {
    bf16 numbers[SPAN];
    void set(int block, Lanes weights) { store(numbers + block * LANES, weights); }  // exact, because they are rounded already
};

// Interleaves sixteen numbers of two tokens, from 32 of each.
inline void in_turn(const bf16* even, const bf16* odd, __m512bh* pairs) {
    const __m512i places = _mm512_or_si512(
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), _mm512_set1_epi32(32 << 16));
    const __m512i first = _mm512_add_epi32(places, _mm512_slli_epi32(places, 16));
    const __m512i a = _mm512_loadu_si512(even), b = _mm512_loadu_si512(odd);
    pairs[0] = (__m512bh)_mm512_permutex2var_epi16(a, first, b);
    pairs[1] = (__m512bh)_mm512_permutex2var_epi16(a, _mm512_add_epi16(first, _mm512_set1_epi16(16)), b);
}
#endif

// sums[head] += weights of the tokens times 16 * VECTORS numbers at offset `value_at` of the tokens. The order is that of a
// prompt's product: pairs of tokens in bfloat16 if the CPU sums pairs.
template <class T, int HEADS, int VECTORS>
inline void add_values(const SpanOfWeights<T>* weights, const T* const* tokens, int64_t value_at, const RowSpan& span,
                       float* sums, int64_t sums_stride, Fetch& fetch) {
    Lanes sum[HEADS][VECTORS];
    for (int head = 0; head < HEADS; head++)
        for (int vector = 0; vector < VECTORS; vector++)
            sum[head][vector] = load(sums + head * sums_stride + vector * LANES);
#if defined(__AVX512BF16__)
    if constexpr (sizeof(T) == sizeof(bf16)) {
        for (int token = span.begin & ~1; token < span.end; token += 2) {
            const bf16 *even = tokens[token] + value_at, *odd = tokens[token + 1] + value_at;
            __m512bh value[VECTORS];
            if constexpr (VECTORS % 2 == 0)
                for (int vector = 0; vector < VECTORS; vector += 2)
                    in_turn(even + vector * LANES, odd + vector * LANES, value + vector);
            else
                for (int vector = 0; vector < VECTORS; vector++)
                    value[vector] = (__m512bh)load_in_turn(even + vector * LANES, odd + vector * LANES);
            fetch.some();
            for (int head = 0; head < HEADS; head++) {
                const auto weight = Unit<bf16>::value(weights[head].numbers + token);
                for (int vector = 0; vector < VECTORS; vector++)
                    sum[head][vector] = _mm512_dpbf16_ps(sum[head][vector], weight, value[vector]);
            }
        }
    } else
#endif
    for (int token = span.begin; token < span.end; token++) {
        Lanes value[VECTORS];
        for (int vector = 0; vector < VECTORS; vector++) value[vector] = load(tokens[token] + value_at + vector * LANES);
        for (int head = 0; head < HEADS; head++) {
            const Lanes weight = set(weights[head].numbers[token]);
            for (int vector = 0; vector < VECTORS; vector++)
                sum[head][vector] = fma(weight, value[vector], sum[head][vector]);
        }
        fetch.some();
    }
    for (int head = 0; head < HEADS; head++)
        for (int vector = 0; vector < VECTORS; vector++)
            store(sums + head * sums_stride + vector * LANES, sum[head][vector]);
}

// Lower bounds of calls of fetch.some() while the keys of a kv head are packed, and while some heads use them.
template <class T>
inline int64_t fetches_of_keys(const RowSpan& span, int64_t dim) {
    return (span.end_block() - span.first_block()) * (dim / (2 * UNITS_TOGETHER * Unit<T>::DEPTH));
}
inline int64_t fetches_of_heads(const RowSpan& span, int64_t dim) {
    return (span.end - span.begin) / 2 * (dim / (4 * LANES) + dim % (4 * LANES) / LANES) + dim / 4 + 4;
}

// Adds a span to the softmax of some heads of one kv head. value: offset of its values within a token. slopes: [HEADS], or
// null. ahead: position of the span's first token minus that of the row. best, totals: [HEADS]. sums: [HEADS][value dim].
template <class T, int HEADS>
void attend_heads(const AttentionShape& shape, const T* query, const T* const* tokens_at, int64_t value, const RowSpan& span,
                  const T* keys, const float* slopes, int64_t ahead, float* best, float* totals, float* sums, Fetch& fetch) {
    constexpr float INFINITE = std::numeric_limits<float>::infinity();
#if defined(__AVX512F__)
    constexpr int TOGETHER = HEADS < 4 ? 4 : 2;  // blocks of keys at a time
#else
    constexpr int TOGETHER = 1;
#endif
    const int64_t dim = shape.head_dim, value_dim = shape.value_dim(), stride = shape.query_stride();
    const Lanes scale = set(1.0f / std::sqrt(float(dim)));
    alignas(64) float scores[HEADS][SPAN];
    for (int block = span.first_block(); block < span.end_block();) {
        const T* from = keys + block * stride * LANES;
        if (block + TOGETHER <= span.end_block()) {
            score_blocks<HEADS, TOGETHER>(query, stride, from, dim, scores[0] + block * LANES, fetch);
            block += TOGETHER;
        } else {
            score_blocks<HEADS, 1>(query, stride, from, dim, scores[0] + block * LANES, fetch);
            block++;
        }
    }
    const ScoreCap cap(shape.score_cap, first_lane(scale));
    alignas(64) SpanOfWeights<T> weights[HEADS];
    for (int head = 0; head < HEADS; head++) {
        for (int block = span.first_block(); cap.is_there() && block < span.end_block(); block++)
            store(scores[head] + block * LANES, cap.of(load(scores[head] + block * LANES)));
        for (int block = span.first_block(); slopes != nullptr && block < span.end_block(); block++) {
            float* own = scores[head] + block * LANES;
            store(own, sloped(load(own), set(slopes[head]), add(set(float(ahead + block * LANES)), counted())));
        }
        for (int token = span.first_block() * LANES; token < span.begin; token++) scores[head][token] = -INFINITE;
        for (int token = span.end; token < span.end_block() * LANES; token++) scores[head][token] = -INFINITE;
        Lanes largest = set(-INFINITE);
        for (int block = span.first_block(); block < span.end_block(); block++)
            largest = max(load(scores[head] + block * LANES), largest);  // this order of arguments ignores NaN
        // SpanWeights defines this arithmetic. Here it runs for sixteen rows of a prompt.
        const Lanes before = set(best[head]), most = Weighing<T>::base(mul(set(max_of(largest)), scale));
        const Lanes limit = add(before, set(GROWTH_MAX)), now = where_at_least(most, limit, most, before);
        best[head] = first_lane(now);
        if (best[head] != first_lane(before)) {
            const Lanes kept = Weighing<T>::kept(sub(now, before));
            totals[head] = first_lane(mul(set(totals[head]), kept));
            for (int64_t d = 0; d < value_dim; d += LANES)
                store(sums + head * value_dim + d, mul(load(sums + head * value_dim + d), kept));
        }
        const Weighing<T> weighing(scale, now);
        Lanes parts[SPAN / LANES];
        for (int block = 0; block < SPAN / LANES; block++) {
            const bool is_there = block >= span.first_block() && block < span.end_block();
            parts[block] = is_there ? weighing.weight(load(scores[head] + block * LANES)) : zero();
            weights[head].set(block, parts[block]);
            fetch.some();
        }
        totals[head] += sum_of_span(parts);
    }
    for (int64_t d = 0; d < value_dim;) {
        if (d + 4 * LANES <= value_dim) {
            add_values<T, HEADS, 4>(weights, tokens_at, value + d, span, sums + d, value_dim, fetch);
            d += 4 * LANES;
        } else {
            add_values<T, HEADS, 1>(weights, tokens_at, value + d, span, sums + d, value_dim, fetch);
            d += LANES;
        }
    }
}

// Attention of one row over a part of its context. partial: best [H], total [H], sums [H][value dim]. keys: memory for the
// keys of a span, [SPAN, query stride], and for its decoded tokens, [SPAN][2][D].
template <class T>
void attend_direct(const AttentionShape& shape, const Chunk& chunk, const AttentionPiece& piece, const T* queries,
                   int64_t rows, const T* pages, float* partial, Fetch& fetch, T* keys) {
    constexpr int64_t HEADS_MAX = 4;
    const int64_t dim = shape.head_dim, value_dim = shape.value_dim(), group = shape.group(), stride = shape.query_stride();
    const int64_t row = chunk.first_row + piece.token, sets = (group + HEADS_MAX - 1) / HEADS_MAX;
    const int64_t position = chunk.start + piece.token;
    float* best = partial;
    float* totals = best + shape.heads;
    float* sums = totals + shape.heads;
    std::fill(best, best + shape.heads, NOTHING_SEEN);
    std::fill(totals, totals + shape.heads * (1 + value_dim), 0.0f);
    const T* tokens_at[SPAN];
    for (int64_t from = piece.from / SPAN * SPAN; from < piece.to; from += SPAN) {
        const RowSpan span{int(std::max<int64_t>(piece.from - from, 0)), int(std::min<int64_t>(piece.to - from, SPAN))};
        fetch.begin_span(span.end - span.begin,
                         shape.kv_heads * (fetches_of_keys<T>(span, dim) + sets * fetches_of_heads(span, dim)));
        const uint8_t* coded[SPAN];
        T* decoded = keys + SPAN * stride;
        if (shape.is_coded()) {
            find_tokens(reinterpret_cast<const uint8_t*>(pages), shape, chunk, from + span.begin, span.end - span.begin, coded);
            for (int index = span.begin; index < span.end; index++)
                tokens_at[index] = decoded + (index - span.begin) * 2 * dim;
        } else {
            find_tokens(pages, shape, chunk, from + span.begin, span.end - span.begin, tokens_at + span.begin);
        }
        // Tokens that the row does not see get a score that is overwritten, and a weight of 0.
        for (int index = 0; index < span.begin; index++) tokens_at[index] = tokens_at[span.begin];
        for (int index = span.end; index < SPAN; index++) tokens_at[index] = tokens_at[span.end - 1];
        for (int64_t kv_head = 0; kv_head < shape.kv_heads; kv_head++) {
            if (shape.is_coded()) decode_tokens(shape, coded, span.end - span.begin, kv_head, decoded);
            const HeadPlace place = place_of_head(shape, kv_head);
            pack_keys(tokens_at, span, place.key, dim, stride, keys, fetch);
            for (int64_t in_group = 0; in_group < group; in_group += HEADS_MAX) {
                const int64_t head = kv_head * group + in_group;
                const T* query = queries + ((kv_head * rows + row) * group + in_group) * stride;
                const auto attend = [&](auto run) {
                    run(shape, query, tokens_at, place.value, span, keys,
                        shape.slopes == nullptr ? nullptr : shape.slopes + head, from - position, best + head, totals + head,
                        sums + head * value_dim, fetch);
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

// Joins the parts of a row's context in order. The largest scores and totals of a part are replaced by the factors of the
// earlier parts and of this part.
template <class T>
void join_parts(const AttentionShape& shape, float* partials, int parts, const HeadRows<T>& attended, int64_t row) {
    const int64_t dim = shape.value_dim(), stride = partial_count(shape);
    for (int64_t first = 0; first < shape.heads; first += LANES) {
        // Unused lanes of the last heads' vector have undefined content, and are not stored.
        const size_t bytes = sizeof(float) * std::min<int64_t>(LANES, shape.heads - first);
        alignas(64) float lanes[LANES];
        const auto keep = [&](float* to, Lanes numbers) {
            store(lanes, numbers);
            std::memcpy(to, lanes, bytes);
        };
        Lanes best = load(partials + first), total = load(partials + shape.heads + first);
        for (int part = 1; part < parts; part++) {
            float *bests = partials + part * stride + first, *totals = bests + shape.heads;
            const Joint<T> joint(best, load(bests));
            best = joint.best;
            total = joint.of(total, load(totals));
            keep(bests, joint.first);
            keep(totals, joint.second);
        }
        if (shape.sinks != nullptr) total = add(total, weight_of_sink(load(shape.sinks + first), best));
        keep(partials + first, div(set(1.0f), total));
    }
    for (int head = 0; head < shape.heads; head++)
        for (int64_t d = 0; d < dim; d += LANES) {
            const float* sums = partials + 2 * shape.heads + head * dim + d;
            Lanes sum = load(sums);
            for (int part = 1; part < parts; part++) {
                const float* shares = partials + part * stride + head;
                sum = fma(load(sums + part * stride), set(shares[shape.heads]), mul(sum, set(shares[0])));
            }
            store(attended.at(row, head, d), mul(sum, set(partials[head])));
        }
}

}  // namespace trioserve
