// Quantized weights: how they lie, how they are made of numbers or of a GGUF file's blocks, and products with them.
//
// A packed weight lies in panels of 32 outputs. A panel has a record for each 32 of K: the scales of its outputs, their
// mins, and the values. A weight is scale * value + min. Values lie in units of 64 bytes, 4 neighbouring k of 16 outputs,
// the two blocks of the panel in turn; of 4 bits, unit 2i is in the low halves and unit 2i + 1 in the high ones.
//
// A product's rows are quantized to 8 bits, with a scale for each 32 numbers. Sums over 32 of K are whole numbers and
// exact; they are added up in float32, always in the same order: a row's results do not depend on the rows beside it.
#pragma once

#include <cmath>
#include <limits>

#include "product.h"

namespace trioserve {

constexpr int64_t RECORD_DEPTH = 32;

// 8 bits without min stand for -128 to 127, those with min, too; 4 bits for -8 to 7 without min and 0 to 15 with.
enum WeightFormat : int32_t { DENSE = 0, Q8 = 1, Q4 = 2, Q4_MIN = 3, Q4_WIDE = 4, Q8_FINE = 5, Q8_WIDE = 6 };

// ggml's numbers.
enum StorageType : int32_t { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 };

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
inline int64_t panel_count(int64_t blocks) { return (blocks + PANEL_BLOCKS - 1) / PANEL_BLOCKS; }

inline int64_t quantized_bytes(int32_t format, int64_t n, int64_t k) {
    return with_format(format, [=](auto f) { return panel_count(block_count(n)) * record_count(k) * decltype(f)::BYTES; });
}

// --- one row's 32 numbers of K ---------------------------------------------------------------------------------------

// values: as they are stored, before two of 4 bits share a byte. Of scales and mins the second is for the upper 16.
struct Group {
    uint8_t values[RECORD_DEPTH];
    float scales[2], mins[2];
};

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
        default: return k / 256 * 210;
    }
}

// The format that holds a type's blocks without loss.
inline int32_t format_of(int32_t storage) {
    switch (storage) {
        case Q4_0: return Q4;
        case Q4_1: return Q4_MIN;
        case Q4_K: return Q4_WIDE;
        case Q5_0: case Q8_0: return Q8;
        case Q6_K: return Q8_FINE;
        default: return Q8_WIDE;
    }
}

// As in ggml's dequantize_row_*; row: a row's blocks.
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

// blocks: a GGUF file's [n, k], whose k is a whole number of blocks; `to` gets them in format_of(storage).
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

// --- quantized rows --------------------------------------------------------------------------------------------------

// What 32 numbers of a row are multiplied with, and sums of their whole numbers.
struct RowGroup {
    float scale, scaled_sum;
    int32_t starts[2];  // -128 times the sum of the lower 16 and of the upper 16
};

// [rows, padded k] and [rows, padded k / 32].
struct QuantizedRows {
    const int8_t* values;
    const RowGroup* groups;
};

inline int64_t quantized_rows_bytes(int64_t rows, int64_t k) {
    return rows * (padded_depth(k) + record_count(k) * int64_t(sizeof(RowGroup)));
}

inline QuantizedRows rows_at(const int8_t* memory, int64_t rows, int64_t k) {
    return {memory, reinterpret_cast<const RowGroup*>(memory + rows * padded_depth(k))};
}

// x: [rows, padded k].
template <class T>
inline void quantize_row(const T* x, int64_t k, int64_t row, const QuantizedRows& to) {
    constexpr float TINY = 1e-30f;  // below, 127 / most is no number, and nothing is lost
    const int64_t records = record_count(k);
    const T* from = x + row * padded_depth(k);
    int8_t* values = const_cast<int8_t*>(to.values) + row * padded_depth(k);
    RowGroup* groups = const_cast<RowGroup*>(to.groups) + row * records;
    for (int64_t record = 0; record < records; record++, from += RECORD_DEPTH, values += RECORD_DEPTH) {
        Lanes low = load(from), high = load(from + LANES);
        const float most = max_of(max(max(low, sub(zero(), low)), max(high, sub(zero(), high))));
        const float doubt = sum_of(mul(add(low, high), zero()));  // nothing but a NaN or an infinity times 0 is a NaN
        if (doubt != doubt) {
            std::memset(values, 0, RECORD_DEPTH);
            groups[record] = {doubt, doubt, {0, 0}};
            continue;
        }
        const Lanes inverse = set(most > TINY ? 127.0f / most : 0.0f);
        low = round_whole(mul(low, inverse));
        high = round_whole(mul(high, inverse));
        store(values, low);
        store(values + LANES, high);
        const float scale = most > TINY ? most / 127.0f : 0.0f, low_sum = sum_of(low), high_sum = sum_of(high);
        groups[record] = {scale, scale * (low_sum + high_sum), {int32_t(-128.0f * low_sum), int32_t(-128.0f * high_sum)}};
    }
}

// --- products --------------------------------------------------------------------------------------------------------

// Dot<F> sums the products of units of weights with 4 numbers of a row, in 16 lanes.
#if defined(__AVX512VNNI__)
constexpr int QUANTIZED_TILE_ROWS = 6;

using Bytes = __m512i;
inline Bytes load_bytes(const uint8_t* from) { return _mm512_loadu_si512(from); }
inline Bytes low_halves(Bytes a) { return _mm512_and_si512(a, _mm512_set1_epi8(15)); }
inline Bytes high_halves(Bytes a) { return low_halves(_mm512_srli_epi16(a, 4)); }

template <class F>
struct Dot {
    __m512i sum;

    void start(const RowGroup& group, int part) {
        if (F::OFFSET == 0) {
            sum = _mm512_setzero_si512();
            return;
        }
        sum = _mm512_set1_epi32(group.starts[part]);
        if (F::PARTS == 1) sum = _mm512_add_epi32(sum, _mm512_set1_epi32(group.starts[1]));
        if (F::OFFSET == 8) sum = _mm512_srai_epi32(sum, 4);
    }
    void add(Bytes weights, int32_t values) { sum = _mm512_dpbusd_epi32(sum, weights, _mm512_set1_epi32(values)); }
    Lanes value(const RowGroup&) const { return _mm512_cvtepi32_ps(sum); }
};
#else
constexpr int QUANTIZED_TILE_ROWS = 2;

struct Bytes {
    __m256i low, high;
};
inline Bytes load_bytes(const uint8_t* from) {
    const __m256i* halves = reinterpret_cast<const __m256i*>(from);
    return {_mm256_loadu_si256(halves), _mm256_loadu_si256(halves + 1)};
}
inline __m256i low_half(__m256i a) { return _mm256_and_si256(a, _mm256_set1_epi8(15)); }
inline Bytes low_halves(Bytes a) { return {low_half(a.low), low_half(a.high)}; }
inline Bytes high_halves(Bytes a) {
    return {low_half(_mm256_srli_epi16(a.low, 4)), low_half(_mm256_srli_epi16(a.high, 4))};
}

template <class F>
struct Dot {
    // Of 4 bits in 16 bit lanes: 32 products of at most 15 * 127 in two lanes fit.
    __m256i low, high;

    static __m256i pairs(__m256i a) { return _mm256_madd_epi16(a, _mm256_set1_epi16(1)); }
    static __m256i product(__m256i weights, __m256i values) {
        if constexpr (F::BITS == 4) return _mm256_maddubs_epi16(weights, values);
        // Of signed weights the sign goes to the values: 2 * 128 * 127 fits 16 bits, 2 * 255 * 127 does not.
        const __m256i signed_ = _mm256_xor_si256(weights, _mm256_set1_epi8(char(0x80)));
        return pairs(_mm256_maddubs_epi16(_mm256_abs_epi8(signed_), _mm256_sign_epi8(values, signed_)));
    }
    static __m256i sum(__m256i a, __m256i b) {
        return F::BITS == 4 ? _mm256_add_epi16(a, b) : _mm256_add_epi32(a, b);
    }

    void start(const RowGroup&, int) { low = high = _mm256_setzero_si256(); }
    void add(Bytes weights, int32_t values) {
        const __m256i same = _mm256_set1_epi32(values);
        low = sum(low, product(weights.low, same));
        high = sum(high, product(weights.high, same));
    }
    Lanes value(const RowGroup& group) const {
        __m256i a = low, b = high;
        if constexpr (F::BITS == 4) {
            const __m256i offset = _mm256_set1_epi32(F::OFFSET == 0 ? 0 : (group.starts[0] + group.starts[1]) / 16);
            a = _mm256_add_epi32(pairs(a), offset);
            b = _mm256_add_epi32(pairs(b), offset);
        }
#if defined(__AVX512F__)
        return _mm512_cvtepi32_ps(_mm512_inserti64x4(_mm512_castsi256_si512(a), b, 1));
#else
        return {_mm256_cvtepi32_ps(a), _mm256_cvtepi32_ps(b)};
#endif
    }
};
#endif

// sums [ROWS, 32] = rows times one panel. fetch: an address from which as much is brought into the caches as is read.
template <class F, int ROWS>
inline void quantized_tile(const int8_t* x, const RowGroup* groups, int64_t records, const uint8_t* panel, float* sums,
                           const uint8_t* fetch) {
    using Scale = typename F::Scale;
    constexpr int UNITS = 8 / F::PARTS;
    const int64_t stride = records * RECORD_DEPTH;
    Lanes sum[ROWS][PANEL_BLOCKS];
    for (int row = 0; row < ROWS; row++)
        for (int block = 0; block < PANEL_BLOCKS; block++) sum[row][block] = zero();
    for (int64_t record = 0; record < records; record++, panel += F::BYTES) {
        if (fetch != nullptr)
            for (int64_t byte = 0; byte < F::BYTES; byte += 64, fetch += 64)
                _mm_prefetch(reinterpret_cast<const char*>(fetch), _MM_HINT_T0);
        for (int part = 0; part < F::PARTS; part++) {
            Dot<F> dot[ROWS][PANEL_BLOCKS];
            for (int row = 0; row < ROWS; row++)
                for (int block = 0; block < PANEL_BLOCKS; block++)
                    dot[row][block].start(groups[row * records + record], part);
// Without it compilers give up on tiles of many rows, and keep the sums in memory.
#pragma GCC unroll 8
            for (int index = 0; index < UNITS; index++) {
                const int unit = part * UNITS + index;
                Bytes weights[PANEL_BLOCKS];
                for (int block = 0; block < PANEL_BLOCKS; block++) {
                    const int at = (F::BITS == 8 ? unit : unit / 2) * PANEL_BLOCKS + block;
                    const Bytes raw = load_bytes(panel + F::VALUES + at * 64);
                    weights[block] = F::BITS == 8 ? raw : index % 2 == 0 ? low_halves(raw) : high_halves(raw);
                }
                for (int row = 0; row < ROWS; row++) {
                    int32_t values;
                    std::memcpy(&values, x + row * stride + record * RECORD_DEPTH + unit * 4, sizeof values);
                    for (int block = 0; block < PANEL_BLOCKS; block++) dot[row][block].add(weights[block], values);
                }
            }
            for (int block = 0; block < PANEL_BLOCKS; block++) {
                const int64_t place = block * LANES;
                const Lanes scale = load(reinterpret_cast<const Scale*>(panel) + part * PANEL + place);
                for (int row = 0; row < ROWS; row++) {
                    const RowGroup& group = groups[row * records + record];
                    const Lanes both = mul(scale, set(group.scale));
                    sum[row][block] = fma(dot[row][block].value(group), both, sum[row][block]);
                }
                if constexpr (F::HAS_MIN) {
                    const Lanes min = load(reinterpret_cast<const Scale*>(panel + F::MINS) + place);
                    for (int row = 0; row < ROWS; row++)
                        sum[row][block] = fma(min, set(groups[row * records + record].scaled_sum), sum[row][block]);
                }
            }
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int block = 0; block < PANEL_BLOCKS; block++) store(sums + row * PANEL + block * LANES, sum[row][block]);
}

// For `rows` of at most QUANTIZED_TILE_ROWS.
template <class F, int ROWS = QUANTIZED_TILE_ROWS>
inline void run_quantized_tile(int rows, const int8_t* x, const RowGroup* groups, int64_t records, const uint8_t* panel,
                               float* sums, const uint8_t* fetch) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return run_quantized_tile<F, ROWS - 1>(rows, x, groups, records, panel, sums, fetch);
    }
    quantized_tile<F, ROWS>(x, groups, records, panel, sums, fetch);
}

// compute_piece for a quantized weight.
template <class Finish>
inline void compute_quantized_piece(int64_t piece, int threads, const QuantizedRows& x, int64_t m, int32_t format,
                                    const uint8_t* w, int64_t n, int64_t k, const Finish& finish) {
    alignas(64) float sums[(CHUNK_ROWS + 16) * PANEL];
    const PieceRows rows = rows_of_piece(piece, m);
    const int64_t first_block = rows.panel * PANEL_BLOCKS, records = record_count(k), depth = padded_depth(k);
    with_format(format, [&](auto f) {
        using F = decltype(f);
        const uint8_t* panel = w + rows.panel * records * F::BYTES;
        const int tiles = (rows.count + QUANTIZED_TILE_ROWS - 1) / QUANTIZED_TILE_ROWS;
        for (int index = 0, row = 0; index < tiles; index++) {
            const int height = (rows.count - row + tiles - index - 1) / (tiles - index);
            const int64_t first = rows.first + row;
            const uint8_t* fetch = index == 0 ? panel + threads * records * F::BYTES : nullptr;
            run_quantized_tile<F>(height, x.values + first * depth, x.groups + first * records, records, panel,
                                  sums + row * PANEL, fetch);
            row += height;
        }
    });
    finish(rows.first, rows.count, first_block, int(std::min<int64_t>(PANEL_BLOCKS, block_count(n) - first_block)), sums);
}

}  // namespace trioserve
