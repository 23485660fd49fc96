// Quantized weights: their layout, and how they are made from numbers or from the blocks of a file.
//
// A packed weight consists of panels of 32 outputs. A panel has a record for each 32 numbers of K: the scales of its outputs,
// their mins, and the values. A weight is scale * value + min. Values are in units of 64 bytes, 4 adjacent k of 16 outputs,
// and the units of the panel's two blocks alternate. With 4 bits, unit 2i is in the low halves of the bytes and unit 2i + 1
// in the high halves. With 2 bits, four units share their bytes in this way. With 3 bits, the lower two bits are stored in
// this way, followed by 64 bytes in which bit i is the third bit of unit i. Scales of scales and of mins, in float16, come
// before each 8 records.
#pragma once

#include <cmath>
#include <type_traits>

#include "product.h"

namespace trioserve {

constexpr int64_t RECORD_DEPTH = 32;

// 8 bits mean -128 to 127. 4 bits mean 0 to 15 with a min, -8 to 7 without, or one of a table's 16 numbers. 3 bits mean -4 to
// 3. 2 bits mean 0 to 3.
enum WeightFormat : int32_t {
    DENSE = 0, Q8 = 1, Q4 = 2, Q4_MIN = 3, Q4_WIDE = 4, Q8_FINE = 5, Q8_WIDE = 6, Q2_FINE = 7, Q3_FINE = 8, Q4_CURVE = 9,
    Q4_CURVE_WIDE = 10, Q4_FLOAT = 11
};

// ggml's numbers, and two types of our own: 32 values with a float32 scale and min, stored as in Q4_0 and Q8_0.
enum StorageType : int32_t {
    Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14, IQ4_NL = 20,
    IQ4_XS = 23, MXFP4 = 39, Q4_F32 = 1000, Q8_F32 = 1001
};

struct f16 {
    uint16_t bits;
};

inline float to_float(f16 value) { return _cvtsh_ss(value.bits); }
inline void store(f16* to, float value) { to->bits = _cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT); }

#if defined(__AVX512F__)
inline Lanes lanes_of(__m128i bytes, bool are_signed) {
    return _mm512_cvtepi32_ps(are_signed ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes));
}
inline Lanes load(const f16* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline void store(int8_t* to, Lanes whole) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(whole)));
}
#else
inline Lanes lanes_of(__m128i bytes, bool are_signed) {
    const __m128i upper = _mm_srli_si128(bytes, 8);
    return {_mm256_cvtepi32_ps(are_signed ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes)),
            _mm256_cvtepi32_ps(are_signed ? _mm256_cvtepi8_epi32(upper) : _mm256_cvtepu8_epi32(upper))};
}
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

// Tables of 4-bit values that are not consecutive whole numbers. Entries are increased by 128.
struct NoTable {};
struct Iq4Table {  // for IQ4_NL and IQ4_XS
    static constexpr uint8_t NUMBERS[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
};
struct Fp4Table {  // for MXFP4: twice the numbers of FP4
    static constexpr uint8_t NUMBERS[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};
};

// Scale: type of stored scales. An 8-bit scale is multiplied by a scale for 8 records. If unsigned, its upper half is the min.
template <int BITS_, class Scale_, int GROUP, bool HAS_MIN_, class Table_ = NoTable>
struct Format {
    using Scale = Scale_;
    using Table = Table_;
    static constexpr int BITS = BITS_;
    static constexpr bool HAS_MIN = HAS_MIN_, HAS_TABLE = !std::is_same_v<Table, NoTable>;
    static constexpr bool IS_NESTED = sizeof(Scale) == 1;
    static constexpr bool HAS_BYTES = BITS == 8 || HAS_TABLE;  // True if products use one byte per value
    static constexpr int OFFSET = HAS_BYTES ? 128 : HAS_MIN ? 0 : 1 << (BITS - 1);
    static constexpr int PARTS = int(RECORD_DEPTH) / GROUP;  // parts of a record with their own scales
    static constexpr int64_t MINS = PARTS * PANEL * int64_t(sizeof(Scale));
    static constexpr int64_t VALUES = HAS_MIN && !IS_NESTED ? 2 * MINS : MINS;
    static constexpr int64_t THIRD_BITS = VALUES + PANEL * RECORD_DEPTH / 4;
    static constexpr int64_t BYTES = VALUES + PANEL * RECORD_DEPTH * BITS / 8;
    static constexpr int64_t OUTER = IS_NESTED ? (HAS_MIN ? 2 : 1) * PANEL * int64_t(sizeof(f16)) : 0;
    static constexpr int64_t OUTER_RECORDS = 8;

    // Bytes before a record, from the start of its panel, or from another record that is preceded by outer scales.
    static constexpr int64_t start(int64_t record) {
        return record * BYTES + (IS_NESTED ? (record / OUTER_RECORDS + 1) * OUTER : 0);
    }
    static constexpr int64_t outer_start(int64_t record) { return start(record / OUTER_RECORDS * OUTER_RECORDS) - OUTER; }
    static constexpr int64_t panel_bytes(int64_t records) {
        return records * BYTES + (IS_NESTED ? rounded_up(records, OUTER_RECORDS) / OUTER_RECORDS * OUTER : 0);
    }

    // For the 16 outputs of a block.
    static Lanes scale(const uint8_t* record, [[maybe_unused]] const uint8_t* outer, int part, int block) {
        const int64_t place = part * PANEL + block * LANES;
        if constexpr (!IS_NESTED) return load(reinterpret_cast<const Scale*>(record) + place);
        else return mul(lanes_of(inner(record + place, 0), !HAS_MIN), load(reinterpret_cast<const f16*>(outer) + block * LANES));
    }
    static Lanes min(const uint8_t* record, [[maybe_unused]] const uint8_t* outer, int part, int block) {
        const int64_t place = part * PANEL + block * LANES;
        if constexpr (!IS_NESTED) return load(reinterpret_cast<const Scale*>(record + MINS) + block * LANES);
        else return mul(lanes_of(inner(record + place, 4), false), load(reinterpret_cast<const f16*>(outer) + PANEL + block * LANES));
    }

private:
    static __m128i inner(const uint8_t* at, int shift) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
        return HAS_MIN ? _mm_and_si128(_mm_srli_epi16(bytes, shift), _mm_set1_epi8(15)) : bytes;
    }
};

// Calls use(Format<...>()) for a quantized format.
template <class Use>
inline auto with_format(int32_t format, const Use& use) {
    switch (format) {
        case Q8: return use(Format<8, f16, 32, false>());
        case Q4: return use(Format<4, f16, 32, false>());
        case Q4_MIN: return use(Format<4, f16, 32, true>());
        case Q4_WIDE: return use(Format<4, float, 32, true>());
        case Q8_FINE: return use(Format<8, float, 16, false>());
        case Q2_FINE: return use(Format<2, uint8_t, 16, true>());
        case Q3_FINE: return use(Format<3, int8_t, 16, false>());
        case Q4_CURVE: return use(Format<4, f16, 32, false, Iq4Table>());
        case Q4_CURVE_WIDE: return use(Format<4, float, 32, false, Iq4Table>());
        case Q4_FLOAT: return use(Format<4, bf16, 32, false, Fp4Table>());  // bfloat16 holds every power of 2
        default: return use(Format<8, float, 32, true>());
    }
}

inline int64_t record_count(int64_t k) { return padded_depth(k) / RECORD_DEPTH; }

inline int64_t quantized_bytes(int32_t format, int64_t n, int64_t k) {
    return with_format(format, [=](auto f) {
        return panel_count(block_count(n)) * decltype(f)::panel_bytes(record_count(k));
    });
}

// --- one row's 32 numbers of K ---------------------------------------------------------------------------------------

// One row's 32 numbers of K, with values as stored, before several values share a byte. The second scale and min belong to the
// upper 16 values. In formats whose scales have scales, `inner` and `outer` replace `scales`. The second `outer` is for mins.
struct Group {
    uint8_t values[RECORD_DEPTH];
    float scales[2], mins[2];
    uint8_t inner[2];
    f16 outer[2];
};

inline float single_at(const uint8_t* from) {
    float value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline f16 f16_at(const uint8_t* from) {
    f16 value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline float half_at(const uint8_t* from) { return to_float(f16_at(from)); }

// In Q4_K and Q5_K, scale and min of each of 8 groups have 6 bits, in 12 bytes.
inline void read_six_bits(const uint8_t* from, int64_t group, float& scale, float& min) {
    if (group < 4) {
        scale = float(from[group] & 63);
        min = float(from[group + 4] & 63);
    } else {
        scale = float((from[group + 4] & 15) | (from[group - 4] >> 6 << 4));
        min = float((from[group + 4] >> 4) | (from[group] >> 6 << 4));
    }
}

// In Q3_K, the scales of 16 groups have 6 bits each, in 12 bytes.
inline int signed_six_bits(const uint8_t* from, int64_t group) {
    return ((from[group % 8] >> (group / 8 * 4) & 15) | (from[8 + group % 4] >> (group / 4 * 2) & 3) << 4) - 32;
}

inline int64_t storage_row_bytes(int32_t storage, int64_t k) {
    switch (storage) {
        case Q4_0: case IQ4_NL: return k / 32 * 18;
        case MXFP4: return k / 32 * 17;
        case Q4_1: return k / 32 * 20;
        case Q5_0: return k / 32 * 22;
        case Q5_1: return k / 32 * 24;
        case Q8_0: return k / 32 * 34;
        case Q2_K: return k / 256 * 84;
        case Q3_K: return k / 256 * 110;
        case IQ4_XS: return k / 256 * 136;
        case Q4_K: return k / 256 * 144;
        case Q5_K: return k / 256 * 176;
        case Q4_F32: return k / 32 * 24;
        case Q8_F32: return k / 32 * 40;
        default: return k / 256 * 210;
    }
}

// Returns the format that stores a type's blocks without loss.
inline int32_t format_of(int32_t storage) {
    switch (storage) {
        case Q4_0: return Q4;
        case Q4_1: return Q4_MIN;
        case Q4_K: case Q4_F32: return Q4_WIDE;
        case Q5_0: case Q8_0: return Q8;
        case Q6_K: return Q8_FINE;
        case Q2_K: return Q2_FINE;
        case Q3_K: return Q3_FINE;
        case IQ4_NL: return Q4_CURVE;
        case IQ4_XS: return Q4_CURVE_WIDE;
        case MXFP4: return Q4_FLOAT;
        default: return Q8_WIDE;
    }
}

// Unpacks ggml's types as its dequantize_row_* functions do. row: the blocks of a row.
template <int STORAGE>
inline void read_group(const uint8_t* row, int64_t group, Group& to) {
    if constexpr (STORAGE == Q8_0) {
        const uint8_t* block = row + group * 34;
        to.scales[0] = half_at(block);
        for (int n = 0; n < 32; n++) to.values[n] = block[2 + n] ^ 0x80;
    } else if constexpr (STORAGE == Q2_K) {
        const uint8_t* block = row + group / 8 * 84;
        group %= 8;
        to.outer[0] = f16_at(block + 80);
        to.outer[1] = f16_at(block + 82);
        to.outer[1].bits ^= 0x8000;  // mins are subtracted
        for (int part = 0; part < 2; part++) to.inner[part] = block[2 * group + part];
        for (int n = 0; n < 32; n++) to.values[n] = block[16 + group / 4 * 32 + n] >> (group % 4 * 2) & 3;
    } else if constexpr (STORAGE == Q3_K) {
        const uint8_t* block = row + group / 8 * 110;
        group %= 8;
        to.outer[0] = f16_at(block + 108);
        for (int part = 0; part < 2; part++) to.inner[part] = uint8_t(signed_six_bits(block + 96, 2 * group + part));
        for (int n = 0; n < 32; n++) {
            const int low = block[32 + group / 4 * 32 + n] >> (group % 4 * 2) & 3;
            to.values[n] = uint8_t(low | (block[n] >> group & 1) << 2);
        }
    } else if constexpr (STORAGE == IQ4_XS) {
        const uint8_t* block = row + group / 8 * 136;
        group %= 8;
        const int high = (block[2] | block[3] << 8) >> (2 * group) & 3;
        to.scales[0] = half_at(block) * float(((block[4 + group / 2] >> (group % 2 * 4) & 15) | high << 4) - 32);
        for (int n = 0; n < 32; n++) to.values[n] = block[8 + group * 16 + n % 16] >> (n / 16 * 4) & 15;
    } else if constexpr (STORAGE == Q4_0 || STORAGE == Q4_1 || STORAGE == IQ4_NL) {
        constexpr int START = STORAGE == Q4_1 ? 4 : 2;
        const uint8_t* block = row + group * (START + 16);
        to.scales[0] = half_at(block);
        to.mins[0] = STORAGE == Q4_1 ? half_at(block + 2) : 0.0f;
        for (int n = 0; n < 16; n++) {
            to.values[n] = block[START + n] & 15;
            to.values[16 + n] = block[START + n] >> 4;
        }
    } else if constexpr (STORAGE == MXFP4) {
        const uint8_t* block = row + group * 17;
        to.scales[0] = std::ldexp(1.0f, std::min<int>(block[0], 254) - 128);
        for (int n = 0; n < 32; n++) to.values[n] = block[1 + n % 16] >> (n / 16 * 4) & 15;
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

// Quantizes 32 numbers to 8 bits, or to 4 bits with a min. NaN or infinity gives a scale that is not finite.
template <class F>
inline void quantize_group(const float* from, int64_t count, Group& to) {
    float low = from[0], high = from[0], doubt = 0.0f;
    for (int64_t n = 0; n < count; n++) {
        low = std::min(low, from[n]);
        high = std::max(high, from[n]);
        doubt += from[n] * 0.0f;
    }
    static_assert(!F::IS_NESTED && !F::HAS_TABLE);
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

// Returns the panel of one of a matrix's blocks of outputs.
template <class F, class Byte>
inline Byte* panel_of(Byte* packed, int64_t block, int64_t records) {
    return packed + block / PANEL_BLOCKS * F::panel_bytes(records);
}

// place: index of the output among the panel's 32.
template <class F>
inline void write_group(const Group& from, uint8_t* panel, int64_t index, int64_t place) {
    using Scale = typename F::Scale;
    uint8_t* record = panel + F::start(index);
    if constexpr (F::IS_NESTED) {
        f16* outer = reinterpret_cast<f16*>(panel + F::outer_start(index)) + place;
        for (int kind = 0; kind < (F::HAS_MIN ? 2 : 1); kind++) outer[kind * PANEL] = from.outer[kind];
        for (int part = 0; part < F::PARTS; part++) record[part * PANEL + place] = from.inner[part];
    } else {
        for (int part = 0; part < F::PARTS; part++)
            store(reinterpret_cast<Scale*>(record) + part * PANEL + place, from.scales[part]);
        if constexpr (F::HAS_MIN) store(reinterpret_cast<Scale*>(record + F::MINS) + place, from.mins[0]);
    }
    // Bytes 4 * place to 4 * place + 3 of each unit. A unit of a block is 16 outputs of 4 bytes, followed by the next unit.
    constexpr int LOW_BITS = F::BITS == 3 ? 2 : F::BITS, SHARERS = 8 / LOW_BITS;
    uint8_t* to = record + F::VALUES + place * 4;
    for (int unit = 0; unit < 8; unit += SHARERS)
        for (int n = 0; n < 4; n++) {
            int byte = 0;
            for (int sharer = 0; sharer < SHARERS; sharer++)
                byte |= (from.values[(unit + sharer) * 4 + n] & ((1 << LOW_BITS) - 1)) << (sharer * LOW_BITS);
            to[unit / SHARERS * PANEL * 4 + n] = uint8_t(byte);
        }
    if constexpr (F::BITS == 3)
        for (int n = 0; n < 4; n++) {
            int byte = 0;
            for (int unit = 0; unit < 8; unit++) byte |= from.values[unit * 4 + n] >> 2 << unit;
            record[F::THIRD_BITS + place * 4 + n] = uint8_t(byte);
        }
}

// Returns value n of an output's 32, as products use it.
template <class F>
inline int stored_value(const uint8_t* record, int64_t place, int64_t n) {
    constexpr int LOW_BITS = F::BITS == 3 ? 2 : F::BITS, SHARERS = 8 / LOW_BITS;
    const int64_t unit = n / 4, byte = place * 4 + n % 4;
    const int shared = record[F::VALUES + unit / SHARERS * PANEL * 4 + byte];
    int value = shared >> (unit % SHARERS * LOW_BITS) & ((1 << LOW_BITS) - 1);
    if constexpr (F::BITS == 3) value |= (record[F::THIRD_BITS + byte] >> unit & 1) << 2;
    if constexpr (F::HAS_TABLE) value = F::Table::NUMBERS[value];
    return value;
}

// Packs what fill(row, record, group) returns into blocks first_block, first_block + block_step, ... of `to`.
template <class F, class Fill>
inline void pack_groups(int64_t n, int64_t k, uint8_t* to, int64_t first_block, int64_t block_step, const Fill& fill) {
    const int64_t records = record_count(k);
    Group group = {};
    for (int64_t row = 0; row < n; row++) {
        const int64_t block = first_block + row / LANES * block_step;
        const int64_t place = block % PANEL_BLOCKS * LANES + row % LANES;
        for (int64_t record = 0; record < records; record++) {
            fill(row, record, group);
            write_group<F>(group, panel_of<F>(to, block, records), record, place);
        }
    }
}

// Packs blocks [n, k] of a storage type in format_of(storage). k is a multiple of the block's length.
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
            case Q2_K: return pack(std::integral_constant<int, Q2_K>());
            case Q3_K: return pack(std::integral_constant<int, Q3_K>());
            case IQ4_NL: return pack(std::integral_constant<int, IQ4_NL>());
            case IQ4_XS: return pack(std::integral_constant<int, IQ4_XS>());
            case MXFP4: return pack(std::integral_constant<int, MXFP4>());
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

// Quantizes and packs values, float32 [n, k]. format: Q8 or Q4_MIN.
inline void pack_values(int32_t format, const float* values, int64_t n, int64_t k, uint8_t* to, int64_t first_block,
                        int64_t block_step) {
    const auto pack = [&](auto f) {
        pack_groups<decltype(f)>(n, k, to, first_block, block_step, [&](int64_t row, int64_t record, Group& group) {
            const int64_t start = record * RECORD_DEPTH;
            quantize_group<decltype(f)>(values + row * k + start, std::min(RECORD_DEPTH, k - start), group);
        });
    };
    if (format == Q8)
        pack(Format<8, f16, 32, false>());
    else
        pack(Format<4, f16, 32, true>());
}

// Unpacks the k weights of one output.
inline void dequantize_row(int32_t format, const uint8_t* packed, int64_t output, int64_t k, float* to) {
    with_format(format, [=](auto f) {
        using F = decltype(f);
        const int64_t block = output / LANES, place = output % PANEL;
        const uint8_t* panel = panel_of<F>(packed, block, record_count(k));
        for (int64_t record = 0; record < record_count(k); record++) {
            const uint8_t *from = panel + F::start(record), *outer = panel + F::outer_start(record);
            const int64_t count = std::min(RECORD_DEPTH, k - record * RECORD_DEPTH);
            alignas(64) float scales[LANES], mins[LANES] = {};
            for (int part = 0; part < F::PARTS; part++) {
                store(scales, F::scale(from, outer, part, int(block % PANEL_BLOCKS)));
                if constexpr (F::HAS_MIN) store(mins, F::min(from, outer, part, int(block % PANEL_BLOCKS)));
                const float scale = scales[output % LANES], min = mins[output % LANES];
                const int64_t first = part * RECORD_DEPTH / F::PARTS, end = first + RECORD_DEPTH / F::PARTS;
                for (int64_t n = first; n < std::min(end, count); n++)
                    to[record * RECORD_DEPTH + n] = scale * float(stored_value<F>(from, place, n) - F::OFFSET) + min;
            }
        }
    });
}

}  // namespace trioserve
