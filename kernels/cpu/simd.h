// Sixteen float32 lanes and their operations, in AVX-512 or as two halves in AVX2. All other files use these functions. The
// compiler flags of this library decide which instructions they become.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace trioserve {

constexpr int LANES = 16;

struct bf16 {
    uint16_t bits;
};

inline float to_float(float value) { return value; }

inline float to_float(bf16 value) {
    const uint32_t bits = uint32_t(value.bits) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof result);
    return result;
}

#if defined(__AVX512F__)

using Lanes = __m512;

inline Lanes zero() { return _mm512_setzero_ps(); }
inline Lanes set(float value) { return _mm512_set1_ps(value); }
inline Lanes load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Lanes a) { _mm512_storeu_ps(to, a); }
inline Lanes add(Lanes a, Lanes b) { return _mm512_add_ps(a, b); }
inline Lanes sub(Lanes a, Lanes b) { return _mm512_sub_ps(a, b); }
inline Lanes mul(Lanes a, Lanes b) { return _mm512_mul_ps(a, b); }
inline Lanes div(Lanes a, Lanes b) { return _mm512_div_ps(a, b); }
inline Lanes fma(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }
// a / b, with a relative error of 7e-5.
inline Lanes div_roughly(Lanes a, Lanes b) { return mul(a, _mm512_rcp14_ps(b)); }
inline Lanes max(Lanes a, Lanes b) { return _mm512_max_ps(a, b); }
inline Lanes min(Lanes a, Lanes b) { return _mm512_min_ps(a, b); }
inline float first_lane(Lanes a) { return _mm512_cvtss_f32(a); }
inline float sum_of(Lanes a) { return _mm512_reduce_add_ps(a); }
inline float max_of(Lanes a) { return _mm512_reduce_max_ps(a); }

inline Lanes load(const bf16* from) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}

inline void store(bf16* to, Lanes a) {
#if defined(__AVX512BF16__)
    const __m256bh rounded = _mm512_cvtneps_pbh(a);
    std::memcpy(to, &rounded, sizeof rounded);
#else
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    const __m512i chosen = _mm512_mask_blend_epi32(nan, rounded, quiet);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(_mm512_srli_epi32(chosen, 16)));
#endif
}

// Transposes rows and columns. Lanes are moved without interpreting their bits.
inline void transpose(Lanes* rows) {
    __m512 pairs[LANES];
    for (int row = 0; row < LANES; row += 2) {
        pairs[row] = _mm512_unpacklo_ps(rows[row], rows[row + 1]);
        pairs[row + 1] = _mm512_unpackhi_ps(rows[row], rows[row + 1]);
    }
    __m512 quads[LANES];  // quarter k of quads[4 * i + c] has column 4 * k + c of rows 4 * i to 4 * i + 3
    for (int row = 0; row < LANES; row += 4) {
        for (int half = 0; half < 2; half++) {
            const __m512d a = _mm512_castps_pd(pairs[row + half]), b = _mm512_castps_pd(pairs[row + half + 2]);
            quads[row + 2 * half] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            quads[row + 2 * half + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    }
    for (int column = 0; column < 4; column++) {
        const __m512* q = quads + column;
        const __m512 even_first = _mm512_shuffle_f32x4(q[0], q[4], 0x88), odd_first = _mm512_shuffle_f32x4(q[0], q[4], 0xdd);
        const __m512 even_last = _mm512_shuffle_f32x4(q[8], q[12], 0x88), odd_last = _mm512_shuffle_f32x4(q[8], q[12], 0xdd);
        rows[column] = _mm512_shuffle_f32x4(even_first, even_last, 0x88);
        rows[column + 4] = _mm512_shuffle_f32x4(odd_first, odd_last, 0x88);
        rows[column + 8] = _mm512_shuffle_f32x4(even_first, even_last, 0xdd);
        rows[column + 12] = _mm512_shuffle_f32x4(odd_first, odd_last, 0xdd);
    }
}

// Transposes rows and columns in each quarter of four vectors.
inline void transpose_quarters(Lanes* rows) {
    const __m512d low_first = _mm512_castps_pd(_mm512_unpacklo_ps(rows[0], rows[1]));
    const __m512d low_last = _mm512_castps_pd(_mm512_unpacklo_ps(rows[2], rows[3]));
    const __m512d high_first = _mm512_castps_pd(_mm512_unpackhi_ps(rows[0], rows[1]));
    const __m512d high_last = _mm512_castps_pd(_mm512_unpackhi_ps(rows[2], rows[3]));
    rows[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(low_first, low_last));
    rows[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(low_first, low_last));
    rows[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(high_first, high_last));
    rows[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(high_first, high_last));
}
template <int QUARTER>
inline __m128 quarter(Lanes a) {
    return _mm512_extractf32x4_ps(a, QUARTER);
}
// Loads four numbers from each address. A masked load needs no shuffle.
inline Lanes load_quarters(const float* a, const float* b, const float* c, const float* d) {
    Lanes quarters = _mm512_castps128_ps512(_mm_loadu_ps(a));
    quarters = _mm512_mask_broadcast_f32x4(quarters, 0x00f0, _mm_loadu_ps(b));
    quarters = _mm512_mask_broadcast_f32x4(quarters, 0x0f00, _mm_loadu_ps(c));
    return _mm512_mask_broadcast_f32x4(quarters, 0xf000, _mm_loadu_ps(d));
}

// Interleaves sixteen of `even` and sixteen of `odd`. A pair is a lane.
inline Lanes load_in_turn(const bf16* even, const bf16* odd) {
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(even)));
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(odd)));
    return _mm512_castsi512_ps(_mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

// Sets lanes below `limit` to 0.
inline Lanes cut_below(Lanes a, Lanes limit) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(a, limit, _CMP_GE_OQ), a);
}

// Lanes of `a` where `at` is at least `limit`, and of `other` elsewhere.
inline Lanes where_at_least(Lanes at, Lanes limit, Lanes a, Lanes other) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(at, limit, _CMP_GE_OQ), other, a);
}

// Lane i of `a` where bit i of the lowest sixteen bits is set, and of `other` elsewhere.
inline Lanes where_bits(uint32_t bits, Lanes a, Lanes other) { return _mm512_mask_blend_ps(__mmask16(bits), other, a); }

// Sixteen sums in float64.
struct WideLanes {
    __m512d low, high;
};
inline WideLanes load(const double* from) { return {_mm512_loadu_pd(from), _mm512_loadu_pd(from + 8)}; }
inline void store(double* to, WideLanes a) {
    _mm512_storeu_pd(to, a.low);
    _mm512_storeu_pd(to + 8, a.high);
}
inline WideLanes add(WideLanes a, Lanes b) {
    return {_mm512_add_pd(a.low, _mm512_cvtps_pd(_mm512_castps512_ps256(b))),
            _mm512_add_pd(a.high, _mm512_cvtps_pd(_mm512_extractf32x8_ps(b, 1)))};
}

// Stores the lanes that are at least `limit`, or with IS_UPPER false those below, without gaps. The rest of the sixteen
// places gets undefined numbers. Returns the number of stored lanes.
template <bool IS_UPPER>
inline int store_kept(float* to, Lanes a, Lanes limit) {
    const __mmask16 kept = _mm512_cmp_ps_mask(a, limit, IS_UPPER ? _CMP_GE_OQ : _CMP_LT_OQ);
    store(to, _mm512_maskz_compress_ps(kept, a));
    return __builtin_popcount(kept);
}

// 2 ** whole * a. `whole` contains whole numbers.
inline Lanes scale_by_power(Lanes a, Lanes whole) { return _mm512_scalef_ps(a, whole); }
inline Lanes round_whole(Lanes a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

// above_floor returns a minus the next lower whole number. scale_by_floor returns p times 2 to that whole number. Below -126
// the result may be inexact.
inline Lanes above_floor(Lanes a) { return _mm512_reduce_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
inline Lanes scale_by_floor(Lanes p, Lanes a) { return _mm512_scalef_ps(p, a); }

// Rounds to bfloat16, towards 0.
inline Lanes cut(Lanes a) {
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(int(0xffff0000u))));
}

// Interleaves the upper halves of `even` and of `odd`.
inline void store_cut_in_turn(bf16* to, Lanes even, Lanes odd) {
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(even), 16);
    _mm512_storeu_si512(to, _mm512_mask_blend_epi16(0xaaaaaaaa, low, _mm512_castps_si512(odd)));
}

#else

struct Lanes {
    __m256 low, high;
};

inline Lanes zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Lanes set(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline Lanes load(const float* from) { return {_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
inline void store(float* to, Lanes a) {
    _mm256_storeu_ps(to, a.low);
    _mm256_storeu_ps(to + 8, a.high);
}
inline Lanes add(Lanes a, Lanes b) { return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)}; }
inline Lanes sub(Lanes a, Lanes b) { return {_mm256_sub_ps(a.low, b.low), _mm256_sub_ps(a.high, b.high)}; }
inline Lanes mul(Lanes a, Lanes b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
inline Lanes div(Lanes a, Lanes b) { return {_mm256_div_ps(a.low, b.low), _mm256_div_ps(a.high, b.high)}; }
inline Lanes div_roughly(Lanes a, Lanes b) { return div(a, b); }
inline Lanes fma(Lanes a, Lanes b, Lanes c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}
inline Lanes max(Lanes a, Lanes b) { return {_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)}; }
inline Lanes min(Lanes a, Lanes b) { return {_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)}; }

inline float first_lane(Lanes a) { return _mm256_cvtss_f32(a.low); }

inline float sum_of(Lanes a) {
    const __m256 both = _mm256_add_ps(a.low, a.high);
    __m128 part = _mm_add_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
    part = _mm_add_ps(part, _mm_movehl_ps(part, part));
    return _mm_cvtss_f32(_mm_add_ss(part, _mm_movehdup_ps(part)));
}

inline float max_of(Lanes a) {
    const __m256 both = _mm256_max_ps(a.low, a.high);
    __m128 part = _mm_max_ps(_mm256_castps256_ps128(both), _mm256_extractf128_ps(both, 1));
    part = _mm_max_ps(part, _mm_movehl_ps(part, part));
    return _mm_cvtss_f32(_mm_max_ss(part, _mm_movehdup_ps(part)));
}

inline __m256 widened(const bf16* from) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(raw), 16));
}
inline Lanes load(const bf16* from) { return {widened(from), widened(from + 8)}; }

inline __m256i rounded(__m256 a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i near = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(near, quiet, nan), 16);
}
inline void store(bf16* to, Lanes a) {
    const __m256i mixed = _mm256_packus_epi32(rounded(a.low), rounded(a.high));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(mixed, 0xd8));
}

inline __m256 half_scaled(__m256 a, __m256 whole) {
    // Two factors, because 2 ** -149 is not a normal number. `whole` is -160 to 128.
    const __m256i power = _mm256_cvtps_epi32(whole);
    const __m256i first = _mm256_srai_epi32(power, 1);
    const __m256i second = _mm256_sub_epi32(power, first);
    const __m256i bias = _mm256_set1_epi32(127);
    a = _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(first, bias), 23)));
    return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(second, bias), 23)));
}
inline Lanes scale_by_power(Lanes a, Lanes whole) {
    return {half_scaled(a.low, whole.low), half_scaled(a.high, whole.high)};
}
inline Lanes round_whole(Lanes a) {
    constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(a.low, nearest), _mm256_round_ps(a.high, nearest)};
}

// Returns a with the lowest bits of `whole` added to its exponent.
inline __m256 half_raised(__m256 a, __m256 whole) {
    const __m256i exponents = _mm256_slli_epi32(_mm256_castps_si256(whole), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), exponents));
}
inline Lanes raise_exponent(Lanes a, Lanes whole) {
    return {half_raised(a.low, whole.low), half_raised(a.high, whole.high)};
}

inline Lanes floor_kept(Lanes a) {
    const __m256 least = _mm256_set1_ps(-126.0f);
    return {_mm256_floor_ps(_mm256_max_ps(least, a.low)), _mm256_floor_ps(_mm256_max_ps(least, a.high))};
}
inline Lanes above_floor(Lanes a) { return sub(max(set(-126.0f), a), floor_kept(a)); }
inline Lanes scale_by_floor(Lanes p, Lanes a) {
    return raise_exponent(p, add(floor_kept(a), set(12582912.0f)));  // 1.5 * 2 ** 23 puts the number into the lowest bits
}

inline Lanes cut(Lanes a) {
    const __m256 upper = _mm256_castsi256_ps(_mm256_set1_epi32(int(0xffff0000u)));
    return {_mm256_and_ps(a.low, upper), _mm256_and_ps(a.high, upper)};
}

inline void store_cut_in_turn(bf16* to, Lanes even, Lanes odd) {
    const __m256i upper = _mm256_set1_epi32(int(0xffff0000u));
    const auto half = [&](__m256 first, __m256 second) {
        return _mm256_castsi256_ps(_mm256_or_si256(_mm256_srli_epi32(_mm256_castps_si256(first), 16),
                                                   _mm256_and_si256(_mm256_castps_si256(second), upper)));
    };
    store(reinterpret_cast<float*>(to), {half(even.low, odd.low), half(even.high, odd.high)});
}

inline void transpose_quarter(const __m256* from, __m256* to) {
    __m256 pairs[8], quads[8];
    for (int row = 0; row < 8; row += 2) {
        pairs[row] = _mm256_unpacklo_ps(from[row], from[row + 1]);
        pairs[row + 1] = _mm256_unpackhi_ps(from[row], from[row + 1]);
    }
    for (int row = 0; row < 8; row += 4) {
        for (int half = 0; half < 2; half++) {
            quads[row + 2 * half] = _mm256_shuffle_ps(pairs[row + half], pairs[row + half + 2], 0x44);
            quads[row + 2 * half + 1] = _mm256_shuffle_ps(pairs[row + half], pairs[row + half + 2], 0xee);
        }
    }
    for (int column = 0; column < 4; column++) {
        to[column] = _mm256_permute2f128_ps(quads[column], quads[column + 4], 0x20);
        to[column + 4] = _mm256_permute2f128_ps(quads[column], quads[column + 4], 0x31);
    }
}
inline void transpose(Lanes* rows) {
    __m256 from[8], parts[2][2][8];  // indexed by half of the rows and half of the columns
    for (int half = 0; half < 2; half++) {
        for (int row = 0; row < 8; row++) from[row] = rows[8 * half + row].low;
        transpose_quarter(from, parts[half][0]);
        for (int row = 0; row < 8; row++) from[row] = rows[8 * half + row].high;
        transpose_quarter(from, parts[half][1]);
    }
    for (int row = 0; row < LANES; row++) rows[row] = {parts[0][row / 8][row % 8], parts[1][row / 8][row % 8]};
}

inline void transpose_quarters(Lanes* rows) {
    const auto half = [](__m256& a, __m256& b, __m256& c, __m256& d) {
        const __m256 low_first = _mm256_unpacklo_ps(a, b), low_last = _mm256_unpacklo_ps(c, d);
        const __m256 high_first = _mm256_unpackhi_ps(a, b), high_last = _mm256_unpackhi_ps(c, d);
        a = _mm256_shuffle_ps(low_first, low_last, 0x44);
        b = _mm256_shuffle_ps(low_first, low_last, 0xee);
        c = _mm256_shuffle_ps(high_first, high_last, 0x44);
        d = _mm256_shuffle_ps(high_first, high_last, 0xee);
    };
    half(rows[0].low, rows[1].low, rows[2].low, rows[3].low);
    half(rows[0].high, rows[1].high, rows[2].high, rows[3].high);
}
template <int QUARTER>
inline __m128 quarter(Lanes a) {
    return _mm256_extractf128_ps(QUARTER < 2 ? a.low : a.high, QUARTER % 2);
}
inline Lanes load_quarters(const float* a, const float* b, const float* c, const float* d) {
    return {_mm256_set_m128(_mm_loadu_ps(b), _mm_loadu_ps(a)), _mm256_set_m128(_mm_loadu_ps(d), _mm_loadu_ps(c))};
}

inline __m256 half_in_turn(const bf16* even, const bf16* odd) {
    const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(even));
    const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(odd));
    return _mm256_castsi256_ps(_mm256_set_m128i(_mm_unpackhi_epi16(low, high), _mm_unpacklo_epi16(low, high)));
}
inline Lanes load_in_turn(const bf16* even, const bf16* odd) {
    return {half_in_turn(even, odd), half_in_turn(even + 8, odd + 8)};
}

inline Lanes cut_below(Lanes a, Lanes limit) {
    return {_mm256_and_ps(a.low, _mm256_cmp_ps(a.low, limit.low, _CMP_GE_OQ)),
            _mm256_and_ps(a.high, _mm256_cmp_ps(a.high, limit.high, _CMP_GE_OQ))};
}

inline Lanes where_at_least(Lanes at, Lanes limit, Lanes a, Lanes other) {
    return {_mm256_blendv_ps(other.low, a.low, _mm256_cmp_ps(at.low, limit.low, _CMP_GE_OQ)),
            _mm256_blendv_ps(other.high, a.high, _mm256_cmp_ps(at.high, limit.high, _CMP_GE_OQ))};
}

inline __m256 half_where_bits(int bits, __m256 a, __m256 other) {
    const __m256i places = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i there = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(bits), places), places);
    return _mm256_blendv_ps(other, a, _mm256_castsi256_ps(there));
}
inline Lanes where_bits(uint32_t bits, Lanes a, Lanes other) {
    return {half_where_bits(bits & 0xFF, a.low, other.low), half_where_bits(bits >> 8 & 0xFF, a.high, other.high)};
}

struct WideLanes {
    __m256d quarters[4];
};
inline WideLanes load(const double* from) {
    return {{_mm256_loadu_pd(from), _mm256_loadu_pd(from + 4), _mm256_loadu_pd(from + 8), _mm256_loadu_pd(from + 12)}};
}
inline void store(double* to, const WideLanes& a) {
    for (int quarter = 0; quarter < 4; quarter++) _mm256_storeu_pd(to + 4 * quarter, a.quarters[quarter]);
}
inline WideLanes add(const WideLanes& a, Lanes b) {
    return {{_mm256_add_pd(a.quarters[0], _mm256_cvtps_pd(_mm256_castps256_ps128(b.low))),
             _mm256_add_pd(a.quarters[1], _mm256_cvtps_pd(_mm256_extractf128_ps(b.low, 1))),
             _mm256_add_pd(a.quarters[2], _mm256_cvtps_pd(_mm256_castps256_ps128(b.high))),
             _mm256_add_pd(a.quarters[3], _mm256_cvtps_pd(_mm256_extractf128_ps(b.high, 1)))}};
}

template <bool IS_UPPER>
inline int store_kept(float* to, Lanes a, Lanes limit) {
    alignas(64) float values[LANES];
    store(values, a);
    const float least = _mm256_cvtss_f32(limit.low);
    int count = 0;
    for (int lane = 0; lane < LANES; lane++) {
        to[count] = values[lane];
        count += (values[lane] >= least) == IS_UPPER;
    }
    return count;
}

#endif

// Returns the index of each lane.
inline Lanes counted() {
    alignas(64) static constexpr float INDICES[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load(INDICES);
}

inline void store(bf16* to, float value) {
    alignas(64) bf16 lanes[LANES];
    store(lanes, set(value));
    *to = lanes[0];
}
inline void store(float* to, float value) { *to = value; }

// e ** a, with an error of about two units in the last place. 0 below -110, infinity above 89.
inline Lanes exp(Lanes a) {
    a = max(set(-110.0f), min(set(89.0f), a));  // this order of arguments keeps NaN
    const Lanes whole = round_whole(mul(a, set(1.44269504088896341f)));
    Lanes rest = fma(whole, set(-0.693359375f), a);
    rest = fma(whole, set(2.12194440e-4f), rest);
    // Polynomial of Cephes' expf.
    Lanes p = set(1.9875691500e-4f);
    p = fma(p, rest, set(1.3981999507e-3f));
    p = fma(p, rest, set(8.3334519073e-3f));
    p = fma(p, rest, set(4.1665795894e-2f));
    p = fma(p, rest, set(1.6666665459e-1f));
    p = fma(p, rest, set(5.0000001201e-1f));
    p = add(fma(mul(rest, rest), p, rest), set(1.0f));
    return scale_by_power(p, whole);
}

// 2 ** a with a relative error of 3e-7, for a from -126 to 127. Smaller a give 2 ** -126. Half as many operations as exp.
inline Lanes power_of_two(Lanes a) {
    const Lanes shift = set(12582912.0f);  // adding 1.5 * 2 ** 23 rounds to a whole number
    a = max(set(-126.0f), a);              // this order of arguments keeps NaN
    const Lanes whole = sub(add(a, shift), shift), rest = sub(a, whole);
    Lanes p = set(1.327647129e-03f);
    p = fma(p, rest, set(9.675540961e-03f));
    p = fma(p, rest, set(5.550713092e-02f));
    p = fma(p, rest, set(2.402212024e-01f));
    p = fma(p, rest, set(6.931469440e-01f));
    p = fma(p, rest, set(1.000000119e+00f));
    return scale_by_power(p, whole);
}

// 2 ** a with a relative error of 8e-5, for a up to 127. `more` is added to its significand. A quarter of exp's operations.
inline Lanes power_of_two_roughly(Lanes a, float more = 0.0f) {
    const Lanes rest = above_floor(a);
    Lanes p = set(7.802452e-02f);
    p = fma(p, rest, set(2.260672e-01f));
    p = fma(p, rest, set(6.958335e-01f));
    p = fma(p, rest, set(9.999252e-01f + more));
    return scale_by_floor(p, a);
}

// Adds half a unit of bfloat16's last place. Truncating the lower half afterwards rounds the number.
inline Lanes power_of_two_to_cut(Lanes a) { return power_of_two_roughly(a, 1.0f / 256); }

// While it exists, this thread's results below 2 ** -126 are zeros. Denormal numbers can take a hundred times as long.
class TinyAreZero {
public:
    TinyAreZero() { _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON); }
    ~TinyAreZero() { _mm_setcsr(before_); }
    TinyAreZero(const TinyAreZero&) = delete;
    TinyAreZero& operator=(const TinyAreZero&) = delete;

private:
    const unsigned before_ = _mm_getcsr();
};

}  // namespace trioserve
