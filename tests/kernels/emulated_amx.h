// AMX in plain C++, so that the kernels' use of it can be tested where the CPU has none: put before a source file, it
// makes that file believe in AMX. Tiles have 16 rows of 64 bytes, as the kernels configure them.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>

#include <cstdint>
#include <cstring>

#define __AMX_BF16__ 1
// Asking for permission: any call that succeeds.
#undef SYS_arch_prctl
#define SYS_arch_prctl SYS_sched_yield

inline thread_local unsigned char emulated_tiles[8][16][64];

inline void emulated_load(int tile, const void* from, long stride) {
    for (int row = 0; row < 16; row++)
        std::memcpy(emulated_tiles[tile][row], static_cast<const char*>(from) + row * stride, 64);
}

inline void emulated_store(int tile, void* to, long stride) {
    for (int row = 0; row < 16; row++)
        std::memcpy(static_cast<char*>(to) + row * stride, emulated_tiles[tile][row], 64);
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
    for (int row = 0; row < 16; row++) {
        for (int column = 0; column < 16; column++) {
            float sum;
            std::memcpy(&sum, emulated_tiles[sums][row] + 4 * column, 4);
            for (int k = 0; k < 32; k++)
                sum += emulated_bf16(emulated_tiles[a][row] + 2 * k) *
                       emulated_bf16(emulated_tiles[b][k / 2] + 4 * column + 2 * (k % 2));
            std::memcpy(emulated_tiles[sums][row] + 4 * column, &sum, 4);
        }
    }
}

#undef _tile_loadconfig
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(config) static_cast<void>(config)
#define _tile_zero(tile) std::memset(emulated_tiles[tile], 0, sizeof emulated_tiles[tile])
#define _tile_loadd(tile, from, stride) emulated_load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated_store(tile, to, stride)
#define _tile_dpbf16ps(sums, a, b) emulated_multiply(sums, a, b)
