// AMX in plain C++, to test the kernels' use of it on a CPU without AMX. Included before a source file, it makes that
// file compile its AMX code.
#pragma once

#include <immintrin.h>
#include <sys/syscall.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#define __AMX_BF16__ 1
// The request for permission to use AMX becomes a call that always succeeds.
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

// The CPU refuses shapes that do not match.
inline void emulated_check(int sums, int a, int b) {
    if (emulated_rows(sums) != emulated_rows(a) || emulated_row_bytes(sums) != emulated_row_bytes(b) ||
        emulated_row_bytes(a) != 4 * emulated_rows(b))
        std::abort();
}

inline __m512 emulated_even(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline __m512 emulated_odd(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(int(0xffff0000u))));
}

// Order of sums by Intel's description (Software Developer's Manual, TDPBF16PS): the first numbers of all pairs are
// summed from 0 with fused operations, and so are the second numbers. Then both sums are added, and the result is added
// to the tile. Numbers below 2 ** -126 are flushed to 0 before and after every operation.
inline void emulated_multiply(int sums, int a, int b) {
    emulated_check(sums, a, b);
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | _MM_FLUSH_ZERO_ON | 0x40);  // inputs below 2 ** -126 are 0
    for (int row = 0; row < emulated_rows(sums); row++) {
        __m512 even = _mm512_setzero_ps(), odd = even;
        for (int k = 0; k < emulated_rows(b); k++) {
            int pair;
            std::memcpy(&pair, emulated_tiles[a][row] + 4 * k, 4);
            const __m512i rows = _mm512_set1_epi32(pair), columns = _mm512_loadu_si512(emulated_tiles[b][k]);
            even = _mm512_fmadd_ps(emulated_even(rows), emulated_even(columns), even);
            odd = _mm512_fmadd_ps(emulated_odd(rows), emulated_odd(columns), odd);
        }
        const __mmask16 are_there = (1u << emulated_row_bytes(b) / 4) - 1;
        const __m512 sum = _mm512_loadu_ps(emulated_tiles[sums][row]);
        _mm512_mask_storeu_ps(emulated_tiles[sums][row], are_there, _mm512_add_ps(sum, _mm512_add_ps(even, odd)));
    }
    _mm_setcsr(before);
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
