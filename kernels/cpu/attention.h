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

constexpr int SPAN = 64;  // context tokens that rows meet at a time
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

// The positions that a row sees.
struct Seen {
    int64_t begin, end;
};

// --- a decode's row: every head over a part of the context, keys and values read where they lie ---------------------------

// What a piece of a row's context leaves: for each head the largest score, the sum of weights, and the weighted values.
inline int64_t partial_count(const AttentionShape& shape) {
    return int64_t(shape.heads) * (shape.head_dim + 2);
}

// Brings a thread's next tokens into the second cache, in the order in which they lie in their pages: so memory gives
// them fastest. It is called often, for a few lines each time, since memory takes only so many at once.
class Fetch {
public:
    // pages, token_bytes: of the layer. after: what is read behind the last token, or null.
    Fetch(const AttentionShape& shape, const void* pages, int64_t token_bytes, const void* after)
        : page_tokens_(shape.page_tokens), token_bytes_(token_bytes), pages_(static_cast<const char*>(pages)),
          after_(static_cast<const char*>(after)) {}

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
        const int64_t steps = (tokens + TOKENS_AHEAD - ahead_) * token_bytes_ / BYTES;
        wanted_ = std::max<int64_t>(steps, 0) * BYTES;
        steps_of_call_ = int((steps + calls - 1) / calls);
        stop_ = at_;
        ahead_ -= tokens;
    }

    // Stands where sums fill the registers: what is rare in it must be a call, and nothing else may be one.
    __attribute__((always_inline)) inline void some() {
        const int steps = steps_of_call_;
        for (int step = 0; step < steps; step++) {
            if (at_ >= stop_ && !go_on()) return;
            for (int64_t byte = 0; byte < BYTES; byte += 64) _mm_prefetch(at_ + byte, _MM_HINT_T1);
            at_ += BYTES;
        }
    }

private:
    static constexpr int64_t TOKENS_AHEAD = 64, BYTES_AFTER = 32768;
#if defined(__AMX_BF16__)
    static constexpr int64_t BYTES = 256;
#else
    static constexpr int64_t BYTES = 64;  // more than some dozen lines at once are not fetched at all
#endif

    struct Range {
        const int32_t* table = nullptr;
        int64_t from = 0, to = 0;
    };

    // Up to stop_ all was fetched. False: nothing more is wanted in this span.
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
    const char *at_ = nullptr, *end_ = nullptr, *stop_ = nullptr;  // end_: of the page; stop_: how far to go without a look
    int64_t wanted_ = 0;  // bytes in this span, behind stop_
    int steps_of_call_ = 0;
    int64_t ahead_ = 0;  // tokens that were begun to be fetched, less those that were read
    Range now_, then_;
};

// The dot products of one query with 16 keys, which lie `key` behind the tokens' beginnings.
template <class T>
inline Lanes score_tokens(const T* query, const T* const* tokens, int64_t key, int64_t dim, Fetch& fetch) {
    Lanes sums[LANES];
    for (int token = 0; token < LANES; token++) sums[token] = zero();
    for (int64_t d = 0; d < dim; d += LANES) {
        const Lanes part = load(query + d);
        for (int token = 0; token < LANES; token++) {
            sums[token] = fma(part, load(tokens[token] + key + d), sums[token]);
            if (token % 8 == 7) fetch.some();
        }
    }
    return sums_of(sums);
}

#if defined(__AVX512BF16__)
// What every fourth of the tokens has at `at`, `count` numbers each, 32 at most, becomes four vectors with 8 numbers of each.
inline void quarters_side_by_side(const bf16* const* tokens, int64_t at, int64_t count, __m512bh* parts) {
    const __mmask32 are_there = count < 32 ? (1u << count) - 1 : ~0u;
    const auto numbers = [=](int token) { return _mm512_maskz_loadu_epi16(are_there, tokens[token] + at); };
    const __m512i a = numbers(0), b = numbers(4), c = numbers(8), d = numbers(12);
    const __m512i ab_low = _mm512_shuffle_i32x4(a, b, 0x44), ab_high = _mm512_shuffle_i32x4(a, b, 0xee);
    const __m512i cd_low = _mm512_shuffle_i32x4(c, d, 0x44), cd_high = _mm512_shuffle_i32x4(c, d, 0xee);
    parts[0] = (__m512bh)_mm512_shuffle_i32x4(ab_low, cd_low, 0x88);
    parts[1] = (__m512bh)_mm512_shuffle_i32x4(ab_low, cd_low, 0xdd);
    parts[2] = (__m512bh)_mm512_shuffle_i32x4(ab_high, cd_high, 0x88);
    parts[3] = (__m512bh)_mm512_shuffle_i32x4(ab_high, cd_high, 0xdd);
}

// The dot products of several queries, behind each of which lie zeros, with 16 keys. Eight numbers of each of four keys are
// brought side by side, once for all queries: so four sums are left to be added up in the end, rather than sixteen.
template <int HEADS>
inline void score_quarters(const bf16* queries, int64_t stride, const bf16* const* tokens, int64_t key, int64_t dim,
                            Lanes* scores, Fetch& fetch) {
    constexpr int TOGETHER = 2;  // fours of keys
    Lanes sums[HEADS][4];
    for (int first = 0; first < 4; first += TOGETHER) {
        Lanes sum[HEADS][TOGETHER];
        for (int head = 0; head < HEADS; head++)
            for (int four = 0; four < TOGETHER; four++) sum[head][four] = zero();
        for (int64_t d = 0; d < dim; d += 32) {
            __m512bh parts[TOGETHER][4];  // 8 numbers of each key
// Without it compilers keep the parts in memory.
#pragma GCC unroll 2
            for (int four = 0; four < TOGETHER; four++) {
                quarters_side_by_side(tokens + first + four, key + d, dim - d, parts[four]);
                fetch.some();
            }
#pragma GCC unroll 4
            for (int head = 0; head < HEADS; head++)
#pragma GCC unroll 4
                for (int part = 0; part < 4; part++) {
                    const bf16* from = queries + head * stride + d + 8 * part;
                    const auto query = (__m512bh)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)from));
                    for (int four = 0; four < TOGETHER; four++)
                        sum[head][four] = _mm512_dpbf16_ps(sum[head][four], query, parts[four][part]);
                }
        }
        for (int head = 0; head < HEADS; head++)
            for (int four = 0; four < TOGETHER; four++) sums[head][first + four] = sum[head][four];
    }
    for (int head = 0; head < HEADS; head++) scores[head] = sums_of_quarters(sums[head]);
}
#endif

// The dot products of each head's query with 16 keys. fetch.some() is called dim / 8 times at least.
template <int HEADS, class T>
inline void score_heads(const T* queries, int64_t stride, const T* const* tokens, int64_t key, int64_t dim, Lanes* scores,
                        Fetch& fetch) {
#if defined(__AVX512BF16__)
    if constexpr (sizeof(T) == sizeof(bf16)) {
        score_quarters<HEADS>(queries, stride, tokens, key, dim, scores, fetch);
        return;
    }
#endif
    for (int head = 0; head < HEADS; head++)
        scores[head] = score_tokens(queries + head * stride, tokens, key, dim, fetch);
}

// sums[head] += weights of the tokens times 16 * VECTORS numbers that lie `value_at` behind the tokens' beginnings.
template <class T, int HEADS, int VECTORS>
inline void add_values(const float* weights, int64_t weight_stride, const T* const* tokens, int64_t value_at,
                       int count, float* sums, int64_t sums_stride, Fetch& fetch) {
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
        fetch.some();
    }
    for (int head = 0; head < HEADS; head++)
        for (int vector = 0; vector < VECTORS; vector++)
            store(sums + head * sums_stride + vector * LANES, sum[head][vector]);
}

// What a new largest score leaves of the weights so far. Most spans bring none.
inline float kept_share(float best, float new_best) { return best == new_best ? 1.0f : std::exp(best - new_best); }

// How often fetch.some() is called, at least, while some heads meet so many tokens.
inline int64_t fetches_of_span(int64_t tokens, int64_t dim) {
    return (tokens + LANES - 1) / LANES * (dim / 8) + tokens * (dim / (4 * LANES) + dim % (4 * LANES) / LANES);
}

template <class T, int HEADS>
void attend_heads(const AttentionShape& shape, const T* query, const T* const* tokens_at, int64_t key, int tokens,
                  float* best, float* total, float* sums, Fetch& fetch) {
    const int64_t dim = shape.head_dim;
    const float scale = 1.0f / std::sqrt(float(dim));
    alignas(64) float weights[HEADS][SPAN];
    for (int token = 0; token < tokens; token += LANES) {
        for (int index = token; index < token + LANES; index++)
            for (int64_t d = 0; d < dim; d += 64 / int64_t(sizeof(T)))
                _mm_prefetch(reinterpret_cast<const char*>(tokens_at[index] + key + shape.kv_heads * dim + d), _MM_HINT_T0);
        Lanes scores[HEADS];
        score_heads<HEADS>(query, shape.query_stride(), tokens_at + token, key, dim, scores, fetch);
        for (int head = 0; head < HEADS; head++) store(weights[head] + token, mul(scores[head], set(scale)));
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
            add_values<T, HEADS, 4>(weights[0], SPAN, tokens_at, value + d, tokens, sums + d, dim, fetch);
            d += 4 * LANES;
        } else {
            add_values<T, HEADS, 1>(weights[0], SPAN, tokens_at, value + d, tokens, sums + d, dim, fetch);
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
        fetch.begin_span(count, shape.kv_heads * ((group + HEADS_MAX - 1) / HEADS_MAX) * fetches_of_span(count, dim));
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
