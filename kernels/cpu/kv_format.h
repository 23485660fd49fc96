// Keys and values in 8 bits: encoding and decoding of a head's numbers. The head's scale follows its numbers, in bfloat16. It
// is about the largest number divided by 127 (INT8) or 448 (FP8, e4m3: https://arxiv.org/abs/2209.05433). The encoding of a
// head depends only on its own numbers.
#pragma once

#include "quantized.h"

namespace trioserve {

enum KvFormat : int32_t { KV_PLAIN = 0, KV_INT8 = 1, KV_FP8 = 2 };

constexpr int64_t KV_SCALE_BYTES = 2;

// The bits of e4m3, shifted by one place, are a float16 that is 2 ** -8 of the number, also for subnormal numbers.
inline Lanes lanes_of_e4m3(__m128i bytes) {
    const __m256i wide = _mm256_cvtepu8_epi16(bytes);
    const __m256i sizes = _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x7f)), 7);
    const __m256i halves = _mm256_or_si256(sizes, _mm256_slli_epi16(_mm256_and_si256(wide, _mm256_set1_epi16(0x80)), 8));
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(halves);
#else
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))};
#endif
}

// record: D numbers of a head, and their scale.
template <class T>
inline void decode_head(int32_t format, const uint8_t* record, int64_t dim, T* to) {
    bf16 stored;
    std::memcpy(&stored, record + dim, sizeof stored);
    const bool is_int8 = format == KV_INT8;
    const Lanes scale = set(is_int8 ? to_float(stored) : to_float(stored) * 256.0f);
    for (int64_t d = 0; d < dim; d += LANES) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(record + d));
        store(to + d, mul(is_int8 ? lanes_of(bytes, true) : lanes_of_e4m3(bytes), scale));
    }
}

// Rounds to the nearest, ties to even, and clamps to -448 .. 448.
inline uint8_t e4m3_of(float value) {
    uint32_t bits, small_bits;
    std::memcpy(&bits, &value, sizeof bits);
    const uint32_t sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
    const uint32_t normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
    const float small = std::fabs(value) + 16384.0f;  // its last bit has the value of the smallest number
    std::memcpy(&small_bits, &small, sizeof small_bits);
    return uint8_t(sign | (size < 0x3c800000 ? small_bits - 0x46800000 : normal));
}

// values: D numbers. NaN or infinity gives a scale of NaN.
inline void encode_head(int32_t format, const float* values, int64_t dim, uint8_t* record) {
    constexpr float TINY = 1e-30f;
    Lanes most_lanes = zero(), doubt_lanes = zero();
    for (int64_t d = 0; d < dim; d += LANES) {
        const Lanes value = load(values + d);
        most_lanes = max(most_lanes, max(value, sub(zero(), value)));
        doubt_lanes = fma(value, zero(), doubt_lanes);
    }
    const float most = max_of(most_lanes), doubt = sum_of(doubt_lanes);
    uint32_t bits = 0;
    if (doubt != doubt) {
        bits = 0x7fc00000;
    } else if (most > TINY) {
        const float exact = most / (format == KV_INT8 ? 127.0f : 448.0f);
        std::memcpy(&bits, &exact, sizeof bits);
        bits = (bits + 0xffff) & 0xffff0000;  // rounds up, so that the largest number does not overflow
    }
    const bf16 stored{uint16_t(bits >> 16)};
    std::memcpy(record + dim, &stored, sizeof stored);
    if (doubt != doubt || bits == 0) {
        std::memset(record, 0, dim);
        return;
    }
    const Lanes scale = set(to_float(stored));
    alignas(64) float shares[LANES];
    for (int64_t d = 0; d < dim; d += LANES) {
        const Lanes share = div(load(values + d), scale);
        if (format == KV_INT8) {
            store(reinterpret_cast<int8_t*>(record + d), round_whole(share));
            continue;
        }
        store(shares, share);
        for (int lane = 0; lane < LANES; lane++) record[d + lane] = e4m3_of(shares[lane]);
    }
}

}  // namespace trioserve
