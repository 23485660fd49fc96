// Quantized weights: how they lie, and how they are made of numbers or of a file's blocks.
//
// A packed weight lies in panels of 32 outputs. A panel has a record for each 32 of K: the scales of its outputs, their
// mins, and the values. A weight is scale * value + min. Values lie in units of 64 bytes, 4 neighbouring k of 16 outputs,
// the two blocks of the panel in turn; of 4 bits, unit 2i is in the low halves and unit 2i + 1 in the high ones.
#pragma once

#include <cmath>
#include <type_traits>

#include "product.h"

namespace trioserve {

constexpr int64_t RECORD_DEPTH = 32;

// 8 bits stand for -128 to 127; 4 bits for 0 to 15 with a min and for -8 to 7 without.
enum WeightFormat : int32_t { DENSE = 0, Q8 = 1, Q4 = 2, Q4_MIN = 3, Q4_WIDE = 4, Q8_FINE = 5, Q8_WIDE = 6 };

// ggml's numbers, and two of our own: a float32 scale and a float32 min of 32 numbers, which are stored as in Q4_0 and Q8_0.
enum StorageType : int32_t {
    Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, Q4_F32 = 1000, Q8_F32 = 1001
};

struct f16 {
    uint16_t bits;
};

inline float to_float(f16 value) { return _cvtsh_ss(value.bits); }
inline void store(f16* to, float value) { to->bits = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }

#if defined(__AVX512F__)
inline Lanes load(const f16* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline void store(int8_t* to, Lanes whole) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(whole)));
}
#else
inline Lanes load(const f16* from) {
    const __m128i* halves = reinterpret_cast<const __m128i*>(from);
    return {_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
}
inline void store(int8_t* to, Lanes whole) {
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(whole.low), _mm256_cvtps_epi32(whole.high));
    const __m256i ordered = _mm256_permute4x64_epi64(words, 0xd8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), bytes);
}
#endif

template <int BITS_, class Scale_, int GROUP, bool HAS_MIN_>
struct Format {
    using Scale = Scale_;
    static constexpr int BITS = BITS_;
    static constexpr bool HAS_MIN = HAS_MIN_;
    static constexpr int OFFSET = BITS == 8 ? 128 : HAS_MIN ? 0 : 8;  // of what is stored
    static constexpr int PARTS = int(RECORD_DEPTH) / GROUP;           // with a scale of their own
    static constexpr int64_t MINS = PARTS * PANEL * int64_t(sizeof(Scale));
    static constexpr int64_t VALUES = HAS_MIN ? 2 * MINS : MINS;
    static constexpr int64_t BYTES = VALUES + PANEL * RECORD_DEPTH * BITS / 8;
};

// use(Format<...>()) for a quantized format.
template <class Use>
inline auto with_format(int32_t format, const Use& use) {
    switch (format) {
        case Q8: return use(Format<8, f16, 32, false>());
        case Q4: return use(Format<4, f16, 32, false>());
        case Q4_MIN: return use(Format<4, f16, 32, true>());
        case Q4_WIDE: return use(Format<4, float, 32, true>());
        case Q8_FINE: return use(Format<8, float, 16, false>());
        default: return use(Format<8, float, 32, true>());
    }
}

inline int64_t record_count(int64_t k) { return padded_depth(k) / RECORD_DEPTH; }

inline int64_t quantized_bytes(int32_t format, int64_t n, int64_t k) {
    return with_format(format, [=](auto f) { return panel_count(block_count(n)) * record_count(k) * decltype(f)::BYTES; });
}

// --- one row's 32 numbers of K ---------------------------------------------------------------------------------------

// values: as they are stored, before two of 4 bits share a byte. Of scales and mins the second is for the upper 16.
struct Group {
    uint8_t values[RECORD_DEPTH];
    float scales[2], mins[2];
};

inline float single_at(const uint8_t* from) {
    float value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline float half_at(const uint8_t* from) {
    f16 value;
    std::memcpy(&value, from, sizeof value);
    return to_float(value);
}

// Q4_K and Q5_K: the scale and the min of one of 8 groups have 6 bits each, in 12 bytes.
inline void read_six_bits(const uint8_t* from, int64_t group, float& scale, float& min) {
    if (group < 4) {
        scale = float(from[group] & 63);
        min = float(from[group + 4] & 63);
    } else {
        scale = float((from[group + 4] & 15) | (from[group - 4] >> 6 << 4));
        min = float((from[group + 4] >> 4) | (from[group] >> 6 << 4));
    }
}

inline int64_t storage_row_bytes(int32_t storage, int64_t k) {
    switch (storage) {
        case Q4_0: return k / 32 * 18;
        case Q4_1: return k / 32 * 20;
        case Q5_0: return k / 32 * 22;
        case Q5_1: return k / 32 * 24;
        case Q8_0: return k / 32 * 34;
        case Q4_K: return k / 256 * 144;
        case Q5_K: return k / 256 * 176;
        case Q4_F32: return k / 32 * 24;
        case Q8_F32: return k / 32 * 40;
        default: return k / 256 * 210;
    }
}

// The format that holds a type's blocks without loss.
inline int32_t format_of(int32_t storage) {
    switch (storage) {
        case Q4_0: return Q4;
        case Q4_1: return Q4_MIN;
        case Q4_K: case Q4_F32: return Q4_WIDE;
        case Q5_0: case Q8_0: return Q8;
        case Q6_K: return Q8_FINE;
        default: return Q8_WIDE;
    }
}

// Of ggml's types as in its dequantize_row_*; row: a row's blocks.
template <int STORAGE>
inline void read_group(const uint8_t* row, int64_t group, Group& to) {
    if constexpr (STORAGE == Q8_0) {
        const uint8_t* block = row + group * 34;
        to.scales[0] = half_at(block);
        for (int n = 0; n < 32; n++) to.values[n] = block[2 + n] ^ 0x80;
    } else if constexpr (STORAGE == Q4_0 || STORAGE == Q4_1) {
        constexpr int START = STORAGE == Q4_0 ? 2 : 4;
        const uint8_t* block = row + group * (START + 16);
        to.scales[0] = half_at(block);
        to.mins[0] = STORAGE == Q4_1 ? half_at(block + 2) : 0.0f;
        for (int n = 0; n < 16; n++) {
            to.values[n] = block[START + n] & 15;
            to.values[16 + n] = block[START + n] >> 4;
        }
    } else if constexpr (STORAGE == Q4_F32 || STORAGE == Q8_F32) {
        const uint8_t* block = row + group * (STORAGE == Q4_F32 ? 24 : 40);
        to.scales[0] = single_at(block);
        to.mins[0] = single_at(block + 4);
        for (int n = 0; n < 32; n++)
            to.values[n] = STORAGE == Q8_F32 ? block[8 + n] ^ 0x80 : block[8 + n % 16] >> (n / 16 * 4) & 15;
    } else if constexpr (STORAGE == Q5_0 || STORAGE == Q5_1) {
        constexpr int START = STORAGE == Q5_0 ? 2 : 4, ZERO = STORAGE == Q5_0 ? 128 - 16 : 128;
        const uint8_t* block = row + group * (START + 20);
        to.scales[0] = half_at(block);
        to.mins[0] = STORAGE == Q5_1 ? half_at(block + 2) : 0.0f;
        uint32_t fifth;
        std::memcpy(&fifth, block + START, sizeof fifth);
        for (int n = 0; n < 16; n++) {
            const uint8_t both = block[START + 4 + n];
            to.values[n] = uint8_t(((both & 15) | ((fifth >> n & 1) << 4)) + ZERO);
            to.values[16 + n] = uint8_t(((both >> 4) | ((fifth >> (16 + n) & 1) << 4)) + ZERO);
        }
    } else if constexpr (STORAGE == Q4_K || STORAGE == Q5_K) {
        const uint8_t* block = row + group / 8 * (STORAGE == Q4_K ? 144 : 176);
        group %= 8;
        read_six_bits(block + 4, group, to.scales[0], to.mins[0]);
        to.scales[0] *= half_at(block);
        to.mins[0] *= -half_at(block + 2);
        const uint8_t* fifth = block + 16;
        const uint8_t* fours = block + (STORAGE == Q4_K ? 16 : 48) + group / 2 * 32;
        for (int n = 0; n < 32; n++) {
            const int four = fours[n] >> (group % 2 * 4) & 15;
            to.values[n] = uint8_t(STORAGE == Q4_K ? four : (four | (fifth[n] >> group & 1) << 4) + 128);
        }
    } else {
        const uint8_t* block = row + group / 8 * 210;
        group %= 8;
        const int64_t half = group / 4, quarter = group % 4;
        const uint8_t* fours = block + half * 64 + quarter % 2 * 32;
        const uint8_t* twos = block + 128 + half * 32;
        const int8_t* scales = reinterpret_cast<const int8_t*>(block + 192) + 2 * group;
        const float scale = half_at(block + 208);
        for (int part = 0; part < 2; part++) to.scales[part] = scale * scales[part];
        for (int n = 0; n < 32; n++)
            to.values[n] = uint8_t(((fours[n] >> (quarter / 2 * 4) & 15) | (twos[n] >> (quarter * 2) & 3) << 4) + 128 - 32);
    }
}

inline float rounded_to_half(float value) {
    f16 half;
    store(&half, value);
    return to_float(half);
}

// 32 numbers rounded to 8 bits, or with a min to 4. What is not finite gives a scale that is not.
template <class F>
inline void quantize_group(const float* from, int64_t count, Group& to) {
    float low = from[0], high = from[0], doubt = 0.0f;
    for (int64_t n = 0; n < count; n++) {
        low = std::min(low, from[n]);
        high = std::max(high, from[n]);
        doubt += from[n] * 0.0f;
    }
    constexpr float MOST = F::HAS_MIN ? 15.0f : 127.0f, LEAST = F::HAS_MIN ? 0.0f : -127.0f;
    const float start = F::HAS_MIN ? rounded_to_half(low) : 0.0f;
    const float scale = rounded_to_half(F::HAS_MIN ? (high - start) / MOST : std::max(high, -low) / MOST);
    const float inverse = scale > 0.0f && doubt == 0.0f ? 1.0f / scale : 0.0f;
    for (int64_t n = 0; n < RECORD_DEPTH; n++) {
        const float value = n < count && inverse > 0.0f ? std::nearbyint((from[n] - start) * inverse) : 0.0f;
        to.values[n] = uint8_t(std::max(LEAST, std::min(MOST, value)) + F::OFFSET);
    }
    to.scales[0] = scale + doubt;
    to.mins[0] = start;
}

// Where the record of one of a matrix's outputs begins; place: which of the panel's 32 outputs it is.
template <class F, class Byte>
inline Byte* record_of(Byte* packed, int64_t block, int64_t records, int64_t record) {
    return packed + (block / PANEL_BLOCKS * records + record) * F::BYTES;
}

template <class F>
inline void write_group(const Group& from, uint8_t* record, int64_t place) {
    using Scale = typename F::Scale;
    for (int part = 0; part < F::PARTS; part++) {
        store(reinterpret_cast<Scale*>(record) + part * PANEL + place, from.scales[part]);
        if constexpr (F::HAS_MIN) store(reinterpret_cast<Scale*>(record + F::MINS) + place, from.mins[0]);
    }
    uint8_t* to = record + F::VALUES + place * 4;  // a block's unit is 16 outputs of 4 bytes, and the next one's follows
    if constexpr (F::BITS == 8) {
        for (int unit = 0; unit < 8; unit++) std::memcpy(to + unit * PANEL * 4, from.values + unit * 4, 4);
    } else {
        for (int pair = 0; pair < 4; pair++)
            for (int n = 0; n < 4; n++)
                to[pair * PANEL * 4 + n] = uint8_t(from.values[pair * 8 + n] | from.values[pair * 8 + 4 + n] << 4);
    }
}

// fill(row, record, group) gives what is written to blocks first_block, first_block + block_step, ... of `to`.
template <class F, class Fill>
inline void pack_groups(int64_t n, int64_t k, uint8_t* to, int64_t first_block, int64_t block_step, const Fill& fill) {
    const int64_t records = record_count(k);
    Group group = {};
    for (int64_t row = 0; row < n; row++) {
        const int64_t block = first_block + row / LANES * block_step;
        const int64_t place = block % PANEL_BLOCKS * LANES + row % LANES;
        for (int64_t record = 0; record < records; record++) {
            fill(row, record, group);
            write_group<F>(group, record_of<F>(to, block, records, record), place);
        }
    }
}

// blocks: [n, k] of a storage type, whose k is a whole number of blocks; `to` gets them in format_of(storage).
inline void pack_blocks(int32_t storage, const uint8_t* blocks, int64_t n, int64_t k, uint8_t* to, int64_t first_block,
                        int64_t block_step) {
    const int64_t row_bytes = storage_row_bytes(storage, k);
    with_format(format_of(storage), [&](auto f) {
        const auto pack = [&](auto of) {
            pack_groups<decltype(f)>(n, k, to, first_block, block_step, [&](int64_t row, int64_t record, Group& group) {
                read_group<decltype(of)::value>(blocks + row * row_bytes, record, group);
            });
        };
        switch (storage) {
            case Q4_0: return pack(std::integral_constant<int, Q4_0>());
            case Q4_1: return pack(std::integral_constant<int, Q4_1>());
            case Q5_0: return pack(std::integral_constant<int, Q5_0>());
            case Q5_1: return pack(std::integral_constant<int, Q5_1>());
            case Q8_0: return pack(std::integral_constant<int, Q8_0>());
            case Q4_K: return pack(std::integral_constant<int, Q4_K>());
            case Q5_K: return pack(std::integral_constant<int, Q5_K>());
            case Q4_F32: return pack(std::integral_constant<int, Q4_F32>());
            case Q8_F32: return pack(std::integral_constant<int, Q8_F32>());
            default: return pack(std::integral_constant<int, Q6_K>());
        }
    });
}

// values: float32 [n, k]; format: Q8 or Q4_MIN.
inline void pack_values(int32_t format, const float* values, int64_t n, int64_t k, uint8_t* to, int64_t first_block,
                        int64_t block_step) {
    with_format(format, [&](auto f) {
        pack_groups<decltype(f)>(n, k, to, first_block, block_step, [&](int64_t row, int64_t record, Group& group) {
            const int64_t start = record * RECORD_DEPTH;
            quantize_group<decltype(f)>(values + row * k + start, std::min(RECORD_DEPTH, k - start), group);
        });
    });
}

// One output's k weights as numbers.
inline void dequantize_row(int32_t format, const uint8_t* packed, int64_t output, int64_t k, float* to) {
    with_format(format, [=](auto f) {
        using F = decltype(f);
        using Scale = typename F::Scale;
        const int64_t block = output / LANES, place = output % PANEL;
        for (int64_t record = 0; record < record_count(k); record++) {
            const uint8_t* from = record_of<F>(packed, block, record_count(k), record);
            const Scale* scales = reinterpret_cast<const Scale*>(from) + place;
            const float min = F::HAS_MIN ? to_float(reinterpret_cast<const Scale*>(from + F::MINS)[place]) : 0.0f;
            const int64_t count = std::min(RECORD_DEPTH, k - record * RECORD_DEPTH);
            for (int64_t n = 0; n < count; n++) {
                const uint8_t* unit = from + F::VALUES + (F::BITS == 8 ? n / 4 : n / 8) * PANEL * 4 + place * 4;
                const int value = F::BITS == 8 ? unit[n % 4] : unit[n % 4] >> (n / 4 % 2 * 4) & 15;
                const float scale = to_float(scales[n * F::PARTS / RECORD_DEPTH * PANEL]);
                to[record * RECORD_DEPTH + n] = scale * float(value - F::OFFSET) + min;
            }
        }
    });
}

}  // namespace trioserve
