// Products of rows with a packed weight: y = x W^T.
//
// A packed weight [N, K] consists of blocks of 16 outputs. A block has K units. In float32 a unit is one k of 16 outputs. In
// bfloat16 it is two adjacent k of 16 outputs, side by side. N is padded with zeros to a multiple of 16, and K to a multiple
// of 32. 16 bfloat16 units are a tile of B for AMX, and one unit is an operand of vdpbf16ps.
#pragma once

#include <algorithm>

#include "amx.h"

namespace trioserve {

constexpr int PANEL_BLOCKS = 2;                   // blocks in a piece of work
constexpr int PANEL = PANEL_BLOCKS * LANES;       // outputs in a piece of work
constexpr int TILE_ROWS = 8;                      // 16 sums. More rows need more address registers than there are.
#if defined(__AMX_BF16__)
constexpr int64_t CHUNK_NUMBERS = 512 * 768;      // numbers of x in a piece of work, which stay in the L2 cache
#else
constexpr int64_t CHUNK_NUMBERS = 512 * 576;
#endif
constexpr int64_t ROWS_TOGETHER = 32;             // two AMX tiles. All pieces but the last end at multiples of this.
constexpr int64_t OWN_ROWS_MIN = 128;             // with fewer rows, threads share rows instead of weights
constexpr int SUM_ROWS = 128;                     // rows whose sums are finished at a time
constexpr int64_t MANY_NUMBERS_MIN = 1 << 19;     // numbers of a weight per thread
constexpr int PIECES_OF_THREAD = 4;               // at least, so that a late thread delays little work
constexpr int64_t DEPTH = 384;                    // part of K that tiles use in turn: the panel stays in the L1 cache

inline int64_t rounded_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
inline int64_t padded_depth(int64_t k) { return rounded_up(k, 32); }
inline int64_t block_count(int64_t n) { return (n + LANES - 1) / LANES; }

// The rows of a product, padded with zeros to `depth` numbers. They are contiguous, or AMX tiles of 16 rows of 32 numbers.
// After the tiles of some rows come the tiles with their next numbers.
template <class T>
struct Rows {
    T* numbers;
    int64_t depth;
    bool are_tiles;

    operator Rows<const T>() const { return {numbers, depth, are_tiles}; }
    // Address of 16 adjacent numbers, for k a multiple of 16.
    T* at(int64_t row, int64_t k) const {
        if (!are_tiles) return numbers + row * depth + k;
        return numbers + (row & -16) * depth + (k & -32) * 16 + (row & 15) * 32 + (k & 31);
    }
    // Writes zeros after a row's first k numbers. k is a multiple of 16.
    void pad(int64_t row, int64_t k) const {
        for (; k < depth; k += LANES) store(at(row, k), zero());
    }
};

#if defined(__AMX_BF16__)
constexpr int64_t AMX_ROWS_MIN = 5;  // with fewer rows, other code reads weights at the speed of memory

// is_invariant: a row's sums are added in the same order for any number of rows.
template <class T>
constexpr bool uses_amx(int64_t rows, bool is_invariant) {
    return sizeof(T) == sizeof(bf16) && (is_invariant || rows >= AMX_ROWS_MIN);
}
#else
template <class T>
constexpr bool uses_amx(int64_t, bool) {
    return false;
}
#endif

template <class T>
struct Unit;

template <>
struct Unit<float> {
    static constexpr int DEPTH = 1;
    using Weight = Lanes;
    using Value = Lanes;
    static Weight weight(const float* from) { return load(from); }
    static Value value(const float* from) { return set(*from); }
    static Lanes add_product(Lanes sum, Weight w, Value x) { return fma(w, x, sum); }
};

#if defined(__AVX512BF16__)
template <>
struct Unit<bf16> {
    static constexpr int DEPTH = 2;
    using Weight = __m512bh;
    using Value = __m512bh;
    static Weight weight(const bf16* from) { return (__m512bh)_mm512_loadu_si512(from); }
    static Value value(const bf16* from) {
        int32_t pair;
        std::memcpy(&pair, from, sizeof pair);
        return (__m512bh)_mm512_set1_epi32(pair);
    }
    static Lanes add_product(Lanes sum, Weight w, Value x) { return _mm512_dpbf16_ps(sum, w, x); }
};
#else
struct Pair {
    Lanes even, odd;
};
template <>
struct Unit<bf16> {
    static constexpr int DEPTH = 2;
    using Weight = Pair;
    using Value = Pair;
#if defined(__AVX512F__)
    static Weight weight(const bf16* from) {
        const __m512i raw = _mm512_loadu_si512(from);
        return {_mm512_castsi512_ps(_mm512_slli_epi32(raw, 16)),
                _mm512_castsi512_ps(_mm512_and_si512(raw, _mm512_set1_epi32(int(0xffff0000u))))};
    }
#else
    static __m256 even(__m256i raw) { return _mm256_castsi256_ps(_mm256_slli_epi32(raw, 16)); }
    static __m256 odd(__m256i raw) {
        return _mm256_castsi256_ps(_mm256_and_si256(raw, _mm256_set1_epi32(int(0xffff0000u))));
    }
    static Weight weight(const bf16* from) {
        const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + LANES));
        return {{even(low), even(high)}, {odd(low), odd(high)}};
    }
#endif
    static Value value(const bf16* from) { return {set(to_float(from[0])), set(to_float(from[1]))}; }
    static Lanes add_product(Lanes sum, Weight w, Value x) { return fma(w.odd, x.odd, fma(w.even, x.even, sum)); }
};
#endif

// Computes or adds sums[row][16 * block ...] = rows of x times `BLOCKS` blocks of w, over `depth` numbers of K. is_first: the
// sums start at 0. fetch: two addresses. From each, as many bytes as one block of w has are prefetched.
template <class T, int ROWS, int BLOCKS>
inline void tile(const T* x, int64_t x_stride, const T* w, int64_t block_stride, int64_t depth, float* sums,
                 int64_t sums_stride, bool is_first, const T* const* fetch) {
    using U = Unit<T>;
    Lanes sum[ROWS][BLOCKS];
    for (int row = 0; row < ROWS; row++)
        for (int block = 0; block < BLOCKS; block++)
            sum[row][block] = is_first ? zero() : load(sums + row * sums_stride + block * LANES);
    constexpr int STEP = U::DEPTH * LANES;
    const char* fetch_first = reinterpret_cast<const char*>(fetch[0]);
    const char* fetch_second = reinterpret_cast<const char*>(fetch[1]);
    for (int64_t k = 0; k < depth; k += U::DEPTH, w += STEP, fetch_first += 64, fetch_second += 64) {
        _mm_prefetch(fetch_first, _MM_HINT_T1);
        _mm_prefetch(fetch_second, _MM_HINT_T1);
        typename U::Weight weight[BLOCKS];
        for (int block = 0; block < BLOCKS; block++) weight[block] = U::weight(w + block * block_stride);
        for (int row = 0; row < ROWS; row++) {
            const typename U::Value value = U::value(x + row * x_stride + k);
            for (int block = 0; block < BLOCKS; block++)
                sum[row][block] = U::add_product(sum[row][block], weight[block], value);
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int block = 0; block < BLOCKS; block++) store(sums + row * sums_stride + block * LANES, sum[row][block]);
}

template <class T>
using Tile = void (*)(const T*, int64_t, const T*, int64_t, int64_t, float*, int64_t, bool, const T* const*);

    // No table: loaders merge tables of equal names, and the library of another level, if loaded, has other tiles.
template <class T, int BLOCKS, int ROWS = TILE_ROWS>
inline Tile<T> tile_of(int rows) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return tile_of<T, BLOCKS, ROWS - 1>(rows);
    }
    return tile<T, ROWS, BLOCKS>;
}

// Passes the sums of a product on: finish(first row, row count, first output block, block count, sums) gets them in parts,
// with stride PANEL. While new sums are computed, earlier ones wait. They are finished a few rows at a time between AMX
// tiles, when the vector units are idle.
template <class Finish>
class Finishing {
public:
    explicit Finishing(const Finish& finish) : finish_(finish) {}

    // Memory for the next sums: [SUM_ROWS and the next multiple of 16, PANEL].
    float* sums() { return sums_[next_]; }
    // Marks the sums as complete.
    void add(int64_t first_row, int count, int64_t first_block, int blocks) {
        end();
        first_row_ = first_row;
        count_ = count;
        first_block_ = first_block;
        blocks_ = blocks;
        done_ = 0;
        next_ = 1 - next_;
    }
    // Announces how often some() will be called.
    void share_out(int64_t calls) {
        const int parts = (count_ - done_ + ROWS_OF_PART - 1) / ROWS_OF_PART;
        calls_of_part_ = parts > 0 ? std::max(int(calls) / parts, 1) : int(calls) + 1;
        calls_left_ = calls_of_part_;
    }
    void some() {
        if (--calls_left_ > 0) return;
        calls_left_ = calls_of_part_;
        finish(ROWS_OF_PART);
    }
    void end() { finish(SUM_ROWS); }

private:
    static constexpr int ROWS_OF_PART = 4;

    void finish(int rows_max) {
        const int rows = std::min(rows_max, count_ - done_);
        if (rows == 0) return;
        finish_(first_row_ + done_, rows, first_block_, blocks_, sums_[1 - next_] + done_ * PANEL);
        done_ += rows;
    }

    const Finish& finish_;
    int64_t first_row_ = 0, first_block_ = 0;
    int count_ = 0, blocks_ = 0, done_ = 0, calls_of_part_ = 0, calls_left_ = 0, next_ = 0;
    alignas(64) float sums_[2][(SUM_ROWS + 16) * PANEL];
};

#if defined(__AMX_BF16__)
// Prefetches during a product. Each call fetches `lines` lines of 64 bytes at each of `places` addresses, `apart` bytes apart.
// Memory is fastest for one sequential stream, but only after some hundred KB, and only if it is not asked faster than it
// responds. Otherwise four streams are faster.
struct WeightFetch {
    const char* next;
    int64_t apart;
    int places, lines;

    // Prefetches `bytes` at `from`, evenly spread over `calls` calls.
    static WeightFetch over(const void* from, int64_t bytes, int places, int64_t calls) {
        const int64_t lines = bytes / 64 / places;
        return {static_cast<const char*>(from), bytes / places, places, int((lines + calls - 1) / calls)};
    }
    void some() {
        if (places == 1) {
            for (int line = 0; line < lines; line++, next = known_later(next + 64)) _mm_prefetch(next, _MM_HINT_T1);
            return;
        }
        for (int line = 0; line < lines; line++, next += 64)
            for (int place = 0; place < places; place++) _mm_prefetch(next + place * apart, _MM_HINT_T1);
    }

private:
    // Returns the same address, but the CPU knows it only some cycles later.
    static const char* known_later(const char* address) {
        asm volatile("imul $1, %0, %0\n\timul $1, %0, %0" : "+r"(address));
        return address;
    }
};

    // Part of K at a time, so that repeated reads hit the L1 cache: for up to 128 rows per panel, and for more rows.
constexpr int64_t AMX_DEPTH = 320, AMX_DEPTH_OF_MANY = 576;
constexpr int64_t AMX_SUM_ROWS = SUM_ROWS;  // rows whose sums are kept while K is computed in parts
#endif

// Computes or adds sums [rows, 16 * blocks] = x [rows, depth] times blocks of w. Rows of x and of sums must be accessible up
// to the next multiple of 16. next: weights of the same size that this thread needs afterwards, or null.
template <class T>
inline void add_products(const T* x, int64_t x_stride, int rows, const T* w, int64_t block_stride, int blocks,
                         int64_t depth, float* sums, int64_t sums_stride, bool is_first, const T* next) {
#if defined(__AMX_BF16__)
    if constexpr (sizeof(T) == 2) {
        if (rows >= AMX_ROWS_MIN && depth % 32 == 0) {
            add_products_amx<false, Reading::AGAIN, Reading::AGAIN>(x, x_stride, rows, w, block_stride, blocks, depth, sums,
                                                                    sums_stride, is_first, [] {}, [] {});
            return;
        }
    }
#endif
    const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int index = 0, row = 0; index < tiles; index++) {
        const int height = (rows - row + tiles - index - 1) / (tiles - index);
        for (int block = 0; block < blocks; block += PANEL_BLOCKS) {
            const bool is_whole = blocks - block >= PANEL_BLOCKS;
            const Tile<T> run = is_whole ? tile_of<T, PANEL_BLOCKS>(height) : tile_of<T, 1>(height);
            const T* weights = w + block * block_stride;
            // A single group of rows reads its weights once, at the speed of memory. Several groups each fetch a part.
            const T* fetch[2] = {weights, weights};
            if (next != nullptr && tiles == 1) {
                fetch[0] = next;
                fetch[1] = next + block_stride;
            } else if (next != nullptr && index < 2) {
                fetch[index] = next + index * block_stride;
            }
            run(x + row * x_stride, x_stride, weights, block_stride, depth,
                sums + row * sums_stride + block * LANES, sums_stride, is_first, fetch);
        }
        row += height;
    }
}

// A piece of a product: some rows times one panel. is_of_many: its thread reads much of this weight.
struct Piece {
    int64_t first_row, end_row, panel;
    bool is_of_many;
};

inline int64_t panel_count(int64_t blocks) { return (blocks + PANEL_BLOCKS - 1) / PANEL_BLOCKS; }

// Divides a product of m rows into pieces, first by panels, then by rows. Adjacent pieces share their rows. Many rows are
// divided so that each thread has its own rows (see Team::take_share).
struct Pieces {
    int64_t m, panels, chunks;

    Pieces(int64_t m, int64_t panels, int64_t k, int threads) : m(m), panels(panels) {
        const int64_t chunk_rows = std::max<int64_t>(CHUNK_NUMBERS / padded_depth(k), SUM_ROWS);
        const int64_t wanted = std::min<int64_t>((m + SUM_ROWS - 1) / SUM_ROWS, threads * PIECES_OF_THREAD / panels);
        chunks = std::max((m + chunk_rows - 1) / chunk_rows, wanted);
        if (m >= threads * OWN_ROWS_MIN) chunks = rounded_up(chunks, threads);
        are_many = panels * PANEL * padded_depth(k) >= threads * MANY_NUMBERS_MIN;
    }
    int64_t count() const { return panels * chunks; }
    Piece at(int64_t index) const {
        const int64_t chunk = index / panels;
        return {row_of(chunk), chunk + 1 == chunks ? m : row_of(chunk + 1), index % panels, are_many};
    }

private:
    bool are_many;

    int64_t row_of(int64_t chunk) const { return m * chunk / chunks / ROWS_TOGETHER * ROWS_TOGETHER; }
};

#if defined(__AMX_BF16__)
// Like compute_piece, but finishes earlier sums at the same time.
template <class Finish>
inline void compute_piece_amx(const Piece& piece, const Rows<const bf16>& x, const bf16* w, int64_t first_block, int blocks,
                              int64_t output_block, const void* next, Finishing<Finish>& finishing) {
    const int64_t rows = piece.end_row - piece.first_row, depth = x.depth;
    const int64_t block_stride = depth * LANES, panel = blocks * block_stride;
    const bool is_read_once = rows <= ROWS_TOGETHER;
    const int64_t depth_max = is_read_once ? depth : rows <= 128 ? AMX_DEPTH : AMX_DEPTH_OF_MANY;
    const int64_t parts = (depth + depth_max - 1) / depth_max;
    const bf16* weights = w + first_block * block_stride;
    const int64_t tiles = (rows + 31) / ROWS_TOGETHER * (depth / 32);
    WeightFetch fetch = WeightFetch::over(next, panel * 2, rows <= 16 && piece.is_of_many ? 1 : 4,
                                          tiles * fetches(is_read_once ? Reading::ONCE : Reading::AGAIN));
    const auto fetch_some = [&] { fetch.some(); };
    const auto finish_some = [&] { finishing.some(); };
    using FetchSome = decltype(fetch_some);
    using FinishSome = decltype(finish_some);
    const int64_t sum_rows = parts > 1 ? AMX_SUM_ROWS : ROWS_TOGETHER;
    for (int64_t row = piece.first_row; row < piece.end_row; row += sum_rows) {
        const int count = int(std::min(sum_rows, piece.end_row - row));
        finishing.share_out((count + 31) / ROWS_TOGETHER * (depth / 32));
        for (int64_t part = 0; part < parts; part++) {
            const int64_t start = depth * part / parts / 32 * 32, end = depth * (part + 1) / parts / 32 * 32;
            const auto add = [&](auto run) {
                run(x.at(row, start), depth, count, weights + start * LANES, block_stride, blocks, end - start,
                    finishing.sums(), PANEL, part == 0, fetch_some, finish_some);
            };
            if (is_read_once)
                add(add_products_amx<true, Reading::AGAIN, Reading::ONCE, FetchSome, FinishSome>);
            else
                add(add_products_amx<true, Reading::ONCE, Reading::AGAIN, FetchSome, FinishSome>);
        }
        finishing.add(row, count, output_block, blocks);
    }
}
#endif

// Computes one piece of y = x W^T. x: readable up to the next multiple of 16 rows. outputs: index of the first block of w
// for `finishing`. next: what this thread reads after this panel. As many bytes as the panel has are prefetched from it.
template <class T, class Finish>
inline void compute_piece(const Piece& piece, const Rows<const T>& x, const T* w, int64_t all_blocks, int64_t outputs,
                          const void* next, Finishing<Finish>& finishing) {
    const int64_t first_block = piece.panel * PANEL_BLOCKS;
    const int blocks = int(std::min<int64_t>(PANEL_BLOCKS, all_blocks - first_block));
#if defined(__AMX_BF16__)
    if constexpr (sizeof(T) == 2) {
        if (x.are_tiles) {
            compute_piece_amx(piece, x, w, first_block, blocks, outputs + first_block, next, finishing);
            return;
        }
    }
#endif
    const int64_t depth = x.depth, block_stride = depth * LANES;
    for (int64_t row = piece.first_row; row < piece.end_row; row += SUM_ROWS) {
        const int rows = int(std::min<int64_t>(SUM_ROWS, piece.end_row - row));
        const int64_t depth_max = rows <= TILE_ROWS ? depth : DEPTH;
        for (int64_t start = 0; start < depth; start += depth_max) {
            const T* weights = w + first_block * block_stride + start * LANES;
            // Few rows use weights at the speed of memory, so prefetched lines are read soon.
            const T* fetched = rows <= 4 ? weights + 32 * 64 / int64_t(sizeof(T))
                                         : static_cast<const T*>(next) + start * LANES;
            add_products(x.at(row, start), depth, rows, weights, block_stride, blocks, std::min(depth_max, depth - start),
                         finishing.sums(), PANEL, start == 0, row == piece.first_row ? fetched : nullptr);
        }
        finishing.add(row, rows, outputs + first_block, blocks);
        finishing.end();
    }
}

}  // namespace trioserve
