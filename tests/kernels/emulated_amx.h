// AMX in plain C++, so that the kernels' use of it can be tested where the CPU has none: put before a source file, it
// makes that file believe in AMX.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#define __AMX_BF16__ 1
// Asking for permission: any call that succeeds.
#undef SYS_arch_prctl
#define SYS_arch_prctl SYS_sched_yield

inline thread_local unsigned char emulated_tiles[8][16][64];
inline thread_local unsigned char emulated_configuration[64];

inline int emulated_rows(int tile) { return emulated_configuration[48 + tile]; }
inline int emulated_row_bytes(int tile) { return emulated_configuration[16 + 2 * tile]; }

inline void emulated_configure(const void* from) {
    std::memcpy(emulated_configuration, from, 64);
    std::memset(emulated_tiles, 0, sizeof emulated_tiles);
}

inline void emulated_load(int tile, const void* from, long stride) {
    std::memset(emulated_tiles[tile], 0, sizeof emulated_tiles[tile]);
    for (int row = 0; row < emulated_rows(tile); row++)
        std::memcpy(emulated_tiles[tile][row], static_cast<const char*>(from) + row * stride, emulated_row_bytes(tile));
}

inline void emulated_store(int tile, void* to, long stride) {
    for (int row = 0; row < emulated_rows(tile); row++)
        std::memcpy(static_cast<char*>(to) + row * stride, emulated_tiles[tile][row], emulated_row_bytes(tile));
}

// The CPU refuses shapes that do not fit each other.
inline void emulated_check(int sums, int a, int b) {
    if (emulated_rows(sums) != emulated_rows(a) || emulated_row_bytes(sums) != emulated_row_bytes(b) ||
        emulated_row_bytes(a) != 4 * emulated_rows(b))
        std::abort();
}

inline float emulated_bf16(const unsigned char* from) {
    uint16_t bits;
    std::memcpy(&bits, from, 2);
    const uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
}

inline void emulated_multiply(int sums, int a, int b) {
    emulated_check(sums, a, b);
    for (int row = 0; row < emulated_rows(sums); row++) {
        for (int column = 0; column < emulated_row_bytes(sums) / 4; column++) {
            float sum;
            std::memcpy(&sum, emulated_tiles[sums][row] + 4 * column, 4);
            for (int k = 0; k < emulated_row_bytes(a) / 2; k++)
                sum += emulated_bf16(emulated_tiles[a][row] + 2 * k) *
                       emulated_bf16(emulated_tiles[b][k / 2] + 4 * column + 2 * (k % 2));
            std::memcpy(emulated_tiles[sums][row] + 4 * column, &sum, 4);
        }
    }
}

#undef _tile_loadconfig
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) emulated_configure(config)
#define _tile_zero(tile) std::memset(emulated_tiles[tile], 0, sizeof emulated_tiles[tile])
#define _tile_loadd(tile, from, stride) emulated_load(tile, from, stride)
#define _tile_stream_loadd(tile, from, stride) emulated_load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated_store(tile, to, stride)
#define _tile_dpbf16ps(sums, a, b) emulated_multiply(sums, a, b)
