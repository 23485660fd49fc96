// Attention of a decode's row with AMX, in bfloat16. Keys and values are tiles in place in their pages.
//
// 32 numbers of each of 16 keys are a tile A. With the queries as B it gives their scores. 32 numbers of each of 16 values are
// a tile B. AMX sums pairs of adjacent numbers, which belong to one value here. So a head has two rows in A: one with a weight
// and a 0 for each token, which sums the even numbers, and one with a 0 and a weight. Half of the products are wasted, but no
// number has to be moved.
#pragma once

#include "attention.h"

namespace trioserve {

#if defined(__AMX_BF16__)

constexpr int TILE_HEADS = 4;         // heads of one kv head, two rows each
constexpr int BLOCKS = SPAN / LANES;  // blocks of 16 tokens
constexpr int64_t NARROW_TILE = 16 * TILE_HEADS, FLAT_TILE = 2 * TILE_HEADS * LANES;  // 32-bit numbers in a tile

// Tiles 0 to 2 are narrow: scores, [token][head], and queries. Tiles 3 and 4 are keys or values. Tiles 5 to 7 are flat:
// weights and sums.
inline void configure_row_tiles() {
    alignas(64) static constexpr TileConfiguration CONFIGURATION{
        1, 0, {}, {16, 16, 16, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 8, 8, 8}};
    _tile_loadconfig(&CONFIGURATION);
}

inline int64_t units_of_group(const AttentionShape& shape) { return (shape.group() + TILE_HEADS - 1) / TILE_HEADS; }

// Memory of one thread for a row. A unit is a kv head with up to TILE_HEADS of its heads.
struct TileScratch {
    float* queries;  // [units][D / 32] narrow tiles
    float* scores;   // [2][BLOCKS] narrow tiles
    float* weights;  // [BLOCKS] flat tiles
    float* sums;     // [units][D / 32] flat tiles: even numbers of a head, then odd ones
    float* totals;   // [units][TILE_HEADS][LANES], still to be summed
    float* best;     // [units][TILE_HEADS]
    bf16* tokens;    // [2][SPAN] tokens, copied from blocks that are only partly visible

    static int64_t float_count(const AttentionShape& shape) {
        const int64_t units = shape.kv_heads * units_of_group(shape), tiles = units * (shape.head_dim / 32);
        return tiles * (NARROW_TILE + FLAT_TILE) + BLOCKS * (2 * NARROW_TILE + FLAT_TILE) +
               SPAN * shape.plain_stride() + units * TILE_HEADS * (LANES + 1);
    }
    TileScratch(const AttentionShape& shape, float* memory) {
        const int64_t units = shape.kv_heads * units_of_group(shape), tiles = units * (shape.head_dim / 32);
        queries = memory;
        scores = queries + tiles * NARROW_TILE;
        weights = scores + 2 * BLOCKS * NARROW_TILE;
        sums = weights + BLOCKS * FLAT_TILE;
        tokens = reinterpret_cast<bf16*>(sums + tiles * FLAT_TILE);
        totals = reinterpret_cast<float*>(tokens + 2 * SPAN * shape.plain_stride());
        best = totals + units * TILE_HEADS * LANES;
    }
};

// Position of a number after transpose_quarters of a narrow tile, and before: quarter and index in it are exchanged.
inline __m512i exchanged_places() { return _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15); }

// Builds a narrow tile from four queries.
inline void pack_queries(const bf16* queries, int64_t stride, float* tile) {
    Lanes columns[4];
    for (int head = 0; head < 4; head++) {
        const Lanes query = load(reinterpret_cast<const float*>(queries + head * stride));
        columns[head] = _mm512_permutexvar_ps(exchanged_places(), query);
    }
    transpose_quarters(columns);
    for (int row = 0; row < 4; row++) store(tile + row * LANES, columns[row]);
}

// Returns the largest lane of each of four vectors.
inline __m128 largest_of(const Lanes* rows) {
    Lanes four[4] = {rows[0], rows[1], rows[2], rows[3]};
    transpose_quarters(four);
    const Lanes quarters = max(max(four[0], four[1]), max(four[2], four[3]));
    const __m256 halves = _mm256_max_ps(_mm512_castps512_ps256(quarters), _mm512_extractf32x8_ps(quarters, 1));
    return _mm_max_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

// The blocks of 16 tokens of a span.
struct TileSpan {
    const bf16* blocks[BLOCKS];  // after the last one, it is repeated
    int count;
    Seen seen;
};

// base: a multiple of 16. Tokens outside of from .. to - 1 are invisible. They may hold NaN, for which a weight of 0 would not
// help. So they are zeros in a copy, and 8-bit tokens are decoded to a copy. copies: [SPAN] tokens.
inline TileSpan find_span(const AttentionShape& shape, const bf16* pages, const Chunk& chunk, int64_t base, int64_t from,
                          int64_t to, bf16* copies) {
    const int64_t stride = shape.plain_stride();
    TileSpan span;
    span.seen = {std::max<int64_t>(from - base, 0), std::min<int64_t>(to - base, SPAN)};
    span.count = int((span.seen.end + LANES - 1) / LANES);
    for (int block = 0; block < BLOCKS; block++) {
        if (block >= span.count) {
            span.blocks[block] = span.blocks[block - 1];
            continue;
        }
        const int64_t begin = base + block * LANES, end = begin + LANES;
        if (begin >= from && end <= to && shape.page_tokens % LANES == 0 && !shape.is_coded()) {
            span.blocks[block] = pages + token_of(chunk, begin, shape.page_tokens) * shape.token_stride();
            continue;
        }
        const bf16* tokens_at[LANES];
        const int64_t first = std::max(begin, from), last = std::min(end, to);
        bf16* copy = copies + block * LANES * stride;
        span.blocks[block] = copy;
        std::memset(copy, 0, sizeof(bf16) * LANES * stride);
        if (shape.is_coded()) {
            const uint8_t* coded[LANES];
            find_tokens(reinterpret_cast<const uint8_t*>(pages), shape, chunk, first, last - first, coded);
            for (int64_t token = first; token < last; token++)
                for (int64_t head = 0; head < 2 * shape.kv_heads; head++)
                    decode_head(shape.kv_format, coded[token - first] + head * shape.record_bytes(), shape.head_dim,
                                copy + (token - begin) * stride + head * shape.head_dim);
            continue;
        }
        find_tokens(pages, shape, chunk, first, last - first, tokens_at);
        for (int64_t token = first; token < last; token++)
            std::memcpy(copy + (token - begin) * stride, tokens_at[token - first], sizeof(bf16) * stride);
    }
    return span;
}

// queries: tiles of one unit. key: offset of keys within a token.
inline void score_blocks(const float* queries, const TileSpan& span, int64_t stride, int64_t key, int64_t dim,
                         float* scores, Fetch& fetch) {
    const int64_t bytes = stride * 2;
    for (int block = 0; block < BLOCKS; block += 2) {
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t d = 0; d < dim; d += 32) {
            _tile_loadd(2, queries + d / 32 * NARROW_TILE, 16);
            fetch.some();
            _tile_stream_loadd(3, span.blocks[block] + key + d, bytes);
            _tile_stream_loadd(4, span.blocks[block + 1] + key + d, bytes);
            _tile_dpbf16ps(0, 3, 2);
            fetch.some();
            _tile_dpbf16ps(1, 4, 2);
        }
        _tile_stored(0, scores + block * NARROW_TILE, 16);
        _tile_stored(1, scores + (block + 1) * NARROW_TILE, 16);
    }
}

// Turns one unit's scores into weights, in one softmax over all spans so far.
inline void weigh_blocks(const float* scores, const TileSpan& span, int heads, int64_t dim, float score_cap,
                         bool is_first, float* weights, float* best, float* totals, float* sums, Fetch& fetch) {
    constexpr float INFINITE = std::numeric_limits<float>::infinity();
    const float scale = 1.0f / std::sqrt(float(dim));
    const ScoreCap cap(score_cap, scale);
    const __m512i places = exchanged_places();
    Lanes columns[BLOCKS][4];  // for each head. The order of tokens is exchanged, see above.
    for (int block = 0; block < BLOCKS; block++) {
        for (int row = 0; row < 4; row++) columns[block][row] = load(scores + block * NARROW_TILE + row * LANES);
        transpose_quarters(columns[block]);
        for (int head = 0; cap.is_there() && head < 4; head++) columns[block][head] = cap.of(columns[block][head]);
        const int begin = int(span.seen.begin) - block * LANES, end = int(span.seen.end) - block * LANES;
        if (begin <= 0 && end >= LANES) continue;
        const __mmask16 is_seen = _mm512_cmpge_epi32_mask(places, _mm512_set1_epi32(begin)) &
                                  _mm512_cmplt_epi32_mask(places, _mm512_set1_epi32(end));
        for (int head = 0; head < 4; head++)
            columns[block][head] = _mm512_mask_mov_ps(set(-INFINITE), is_seen, columns[block][head]);
    }
    Lanes largest[4];
    for (int head = 0; head < 4; head++)
        largest[head] = max(max(columns[0][head], columns[1][head]), max(columns[2][head], columns[3][head]));
    const __m128 old_best = _mm_load_ps(best);
    // Rounded like the largest score of a part, so that parts can be joined.
    const Lanes rough = Weighing<bf16>::base(mul(_mm512_castps128_ps512(largest_of(largest)), set(scale)));
    const __m128 new_best = _mm_max_ps(_mm512_castps512_ps128(rough), old_best);
    alignas(64) float starts[LANES], kept[LANES];
    store(starts, mul(_mm512_castps128_ps512(new_best), set(-LOG2_E)));
    // 1 for heads whose largest score has not grown.
    store(kept, Weighing<bf16>::kept(_mm512_castps128_ps512(_mm_sub_ps(new_best, old_best))));
    _mm_store_ps(best, new_best);
    for (int head = 0; head < heads; head++) {
        const Lanes start = set(starts[head]);
        Lanes total = is_first ? zero() : mul(load(totals + head * LANES), set(kept[head]));
        for (int block = 0; block < BLOCKS; block++) {
            fetch.some();
            const Lanes weight = power_of_two(fma(columns[block][head], set(scale * LOG2_E), start));
            total = add(total, weight);
            const __m512i bits = _mm512_castps_si512(_mm512_permutexvar_ps(places, weight));
            const __m512i odd = _mm512_and_si512(_mm512_add_epi32(bits, _mm512_set1_epi32(0x8000)),
                                                 _mm512_set1_epi32(int(0xffff0000u)));
            float* to = weights + block * FLAT_TILE + 2 * head * LANES;
            _mm512_store_si512(to, _mm512_srli_epi32(odd, 16));
            _mm512_store_si512(to + LANES, odd);
        }
        store(totals + head * LANES, total);
        // In most spans, no largest score grows.
        if (is_first || kept[head] == 1.0f) continue;
        for (int64_t d = 0; d < dim; d += 32) {
            float* even = sums + d / 32 * FLAT_TILE + 2 * head * LANES;
            store(even, mul(load(even), set(kept[head])));
            store(even + LANES, mul(load(even + LANES), set(kept[head])));
        }
    }
}

// sums += weights times values, for one unit.
inline void add_blocks(const float* weights, const TileSpan& span, int64_t stride, int64_t value, int64_t dim,
                       bool is_first, float* sums, Fetch& fetch) {
    const int64_t bytes = stride * 2;
    for (int64_t d = 0; d < dim; d += 64, sums += 2 * FLAT_TILE) {
        const bool is_wide = d + 32 < dim;
        if (is_first) {
            _tile_zero(6);
            _tile_zero(7);
        } else {
            _tile_loadd(6, sums, 64);
            if (is_wide) _tile_loadd(7, sums + FLAT_TILE, 64);
        }
        for (int block = 0; block < span.count; block++) {
            const bf16* values = span.blocks[block] + value + d;
            _tile_loadd(5, weights + block * FLAT_TILE, 64);
            fetch.some();
            _tile_stream_loadd(3, values, bytes);
            if (is_wide) _tile_stream_loadd(4, values + 32, bytes);
            _tile_dpbf16ps(6, 5, 3);
            if (is_wide) {
                fetch.some();
                _tile_dpbf16ps(7, 5, 4);
            }
        }
        _tile_stored(6, sums, 64);
        if (is_wide) _tile_stored(7, sums + FLAT_TILE, 64);
    }
}

// Like attend_direct, for D a multiple of 32.
inline void attend_tiles(const AttentionShape& shape, const Chunk& chunk, const AttentionPiece& piece,
                         const bf16* queries, int64_t rows, const bf16* pages, float* partial, Fetch& fetch,
                         const TileScratch& scratch) {
    const int64_t dim = shape.head_dim, group = shape.group(), stride = shape.plain_stride();
    const int64_t row = chunk.first_row + piece.token, tiles = dim / 32;
    const int64_t in_group = units_of_group(shape), units = shape.kv_heads * in_group;
    const auto first_head = [&](int64_t unit) { return unit / in_group * group + unit % in_group * TILE_HEADS; };
    const auto head_count = [&](int64_t unit) {
        return int(std::min<int64_t>(group - unit % in_group * TILE_HEADS, TILE_HEADS));
    };
    for (int64_t unit = 0; unit < units; unit++)
        for (int64_t d = 0; d < dim; d += 32) {
            // After the last head follow queries of other heads. Their scores are not used.
            const int64_t kv_head = unit / in_group, head = first_head(unit) - kv_head * group;
            const bf16* query = queries + ((kv_head * rows + row) * group + head) * shape.query_stride();
            pack_queries(query + d, shape.query_stride(),
                         scratch.queries + (unit * tiles + d / 32) * NARROW_TILE);
        }
    std::fill(scratch.best, scratch.best + units * TILE_HEADS, NOTHING_SEEN);
    // While one unit's scores become weights, the next unit's scores are computed.
    float *scores = scratch.scores, *next_scores = scores + BLOCKS * NARROW_TILE;
    bf16 *copies = scratch.tokens, *next_copies = copies + SPAN * stride;
    const auto score = [&](int64_t unit, const TileSpan& span, float* to) {
        finish_writes();
        score_blocks(scratch.queries + unit * tiles * NARROW_TILE, span, stride, unit / in_group * dim, dim, to, fetch);
    };
    const int64_t calls = units * 2 * BLOCKS * tiles + shape.heads * BLOCKS;
    int64_t base = piece.from / LANES * LANES;
    TileSpan span = find_span(shape, pages, chunk, base, piece.from, piece.to, copies), next{};
    fetch.begin_span(span.seen.end - span.seen.begin, calls);
    score(0, span, scores);
    for (bool is_first = true; base < piece.to; base += SPAN, is_first = false) {
        const bool is_last = base + SPAN >= piece.to;
        if (!is_first) fetch.begin_span(span.seen.end - span.seen.begin, calls);
        for (int64_t unit = 0; unit < units; unit++) {
            if (unit + 1 < units) {
                score(unit + 1, span, next_scores);
            } else if (!is_last) {
                next = find_span(shape, pages, chunk, base + SPAN, piece.from, piece.to, next_copies);
                score(0, next, next_scores);
            }
            float* sums = scratch.sums + unit * tiles * FLAT_TILE;
            weigh_blocks(scores, span, head_count(unit), dim, shape.score_cap, is_first, scratch.weights,
                         scratch.best + unit * TILE_HEADS, scratch.totals + unit * TILE_HEADS * LANES, sums, fetch);
            finish_writes();
            const int64_t value = (unit / in_group + shape.kv_heads) * dim;
            add_blocks(scratch.weights, span, stride, value, dim, is_first, sums, fetch);
            std::swap(scores, next_scores);
        }
        span = next;
        std::swap(copies, next_copies);
    }
    float *best = partial, *total = best + shape.heads, *sums = total + shape.heads;
    const __m512i first_pairs = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const __m512i last_pairs = _mm512_add_epi32(first_pairs, _mm512_set1_epi32(8));
    for (int64_t unit = 0; unit < units; unit++)
        for (int index = 0; index < head_count(unit); index++) {
            const int64_t head = first_head(unit) + index;
            best[head] = scratch.best[unit * TILE_HEADS + index];
            total[head] = sum_of(load(scratch.totals + (unit * TILE_HEADS + index) * LANES));
            for (int64_t d = 0; d < dim; d += 32) {
                const float* from = scratch.sums + (unit * tiles + d / 32) * FLAT_TILE + 2 * index * LANES;
                const Lanes even = load(from), odd = load(from + LANES);
                store(sums + head * dim + d, _mm512_permutex2var_ps(even, first_pairs, odd));
                store(sums + head * dim + d + LANES, _mm512_permutex2var_ps(even, last_pairs, odd));
            }
        }
}

#else
inline void configure_row_tiles() {}
#endif

// Like attend_direct, choosing the implementation by the shape. memory: the thread's memory for it.
template <class T>
void attend_part(const AttentionShape& shape, const Chunk& chunk, const AttentionPiece& piece, const T* queries,
                 int64_t rows, const T* pages, float* partial, Fetch& fetch, Buffer& memory) {
#if defined(__AMX_BF16__)
    if constexpr (sizeof(T) == 2) {
        if (shape.head_dim % 32 == 0 && shape.value_dim() == shape.head_dim && shape.slopes == nullptr) {
            const TileScratch scratch(shape, memory.of<float>(TileScratch::float_count(shape)));
            attend_tiles(shape, chunk, piece, queries, rows, pages, partial, fetch, scratch);
            return;
        }
    }
#endif
    const int64_t decoded = shape.is_coded() ? SPAN * 2 * shape.head_dim : 0;
    attend_direct(shape, chunk, piece, queries, rows, pages, partial, fetch,
                  memory.of<T>(SPAN * shape.query_stride() + decoded));
}

}  // namespace trioserve
