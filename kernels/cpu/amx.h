// AMX: tiles of 16 rows of 64 bytes, and products of them.
#pragma once

#include <atomic>

#include "simd.h"

namespace trioserve {

#if defined(__AMX_BF16__)
// The compiler does not know that a tile is loaded from memory, so it must not move writes before the load.
inline void finish_writes() { std::atomic_signal_fence(std::memory_order_seq_cst); }

// Layout that the CPU reads. Constant, because the compiler does not know that the CPU reads it.
struct TileConfiguration {
    uint8_t palette, start_row, nothing[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

// One tile configuration for all products: 16 rows of 64 bytes. oneDNN changes it, so every thread sets it at the start of a
// step.
inline void configure_tiles() {
    alignas(64) static constexpr TileConfiguration CONFIGURATION{
        1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&CONFIGURATION);
}

// ONCE: data is read from the L2 cache once, and should bypass the L1 cache. AGAIN: data should stay in the L1 cache.
enum class Reading { ONCE, AGAIN };

// A macro, because the number of a tile is part of the instruction's text.
#define TRIOSERVE_LOAD_TILE(tile, reading, from, bytes) \
    if constexpr (reading == Reading::ONCE)             \
        _tile_stream_loadd(tile, from, bytes);          \
    else                                                \
        _tile_loadd(tile, from, bytes)

// Number of prefetches for every 32 numbers of K. Rows that read a weight once wait for memory, and more requests at a time
// make memory faster. If several rows share the weight, tiles wait for each other, not for memory.
constexpr int fetches(Reading weights) { return weights == Reading::ONCE ? 4 : 1; }

// Like add_products. x must be readable, and sums writable, up to the next multiple of 16 rows. ARE_TILES: x consists of tiles,
// see Rows. For every 32 numbers of K, the function calls meanwhile() once, and fetch() fetches(WEIGHTS) times.
template <bool ARE_TILES, Reading ROWS, Reading WEIGHTS, class Fetch, class Meanwhile>
inline void add_products_amx(const bf16* x, int64_t x_stride, int rows, const bf16* w, int64_t block_stride, int blocks,
                             int64_t depth, float* sums, int64_t sums_stride, bool is_first, const Fetch& fetch,
                             const Meanwhile& meanwhile) {
    constexpr int FETCHES = fetches(WEIGHTS);
    const int64_t x_step = ARE_TILES ? 16 : 1, x_bytes = ARE_TILES ? 64 : x_stride * 2, sums_bytes = sums_stride * 4;
    finish_writes();
    for (int row = 0; row < rows; row += 32) {
        const bool is_tall = rows - row > 16;
        for (int block = 0; block < blocks; block += 2) {
            const bool is_wide = blocks - block > 1;
            float* to = sums + row * sums_stride + block * LANES;
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            if (!is_first) {
                _tile_loadd(0, to, sums_bytes);
                if (is_wide) _tile_loadd(1, to + LANES, sums_bytes);
                if (is_tall) _tile_loadd(2, to + 16 * sums_stride, sums_bytes);
                if (is_tall && is_wide) _tile_loadd(3, to + 16 * sums_stride + LANES, sums_bytes);
            }
            const bf16* values = x + row * x_stride;
            const bf16* weights = w + block * block_stride;
            for (int64_t k = 0; k < depth; k += 32) {
                fetch();
                meanwhile();
                TRIOSERVE_LOAD_TILE(4, ROWS, values + k * x_step, x_bytes);
                TRIOSERVE_LOAD_TILE(6, WEIGHTS, weights + k * LANES, 64);
                if constexpr (FETCHES > 1) fetch();
                _tile_dpbf16ps(0, 4, 6);
                if constexpr (FETCHES > 1) fetch();
                if (is_wide) {
                    TRIOSERVE_LOAD_TILE(7, WEIGHTS, weights + block_stride + k * LANES, 64);
                    _tile_dpbf16ps(1, 4, 7);
                }
                if constexpr (FETCHES > 1) fetch();
                if (is_tall) {
                    TRIOSERVE_LOAD_TILE(5, ROWS, values + 16 * x_stride + k * x_step, x_bytes);
                    _tile_dpbf16ps(2, 5, 6);
                    if (is_wide) _tile_dpbf16ps(3, 5, 7);
                }
            }
            _tile_stored(0, to, sums_bytes);
            if (is_wide) _tile_stored(1, to + LANES, sums_bytes);
            if (is_tall) _tile_stored(2, to + 16 * sums_stride, sums_bytes);
            if (is_tall && is_wide) _tile_stored(3, to + 16 * sums_stride + LANES, sums_bytes);
        }
    }
}
#else
inline void configure_tiles() {}
#endif

}  // namespace trioserve
