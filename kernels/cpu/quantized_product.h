// Products of few or many rows with a quantized weight.
//
// Rows are quantized to 8 bits, with a scale for each 32 numbers. Sums over 32 numbers of K are exact whole numbers. They are
// summed in float32, always in the same order, so a row's results do not depend on the other rows.
//
// With AMX, several bfloat16 rows are not quantized. Instead, weights are rounded to bfloat16, 32 numbers of K at a time,
// while earlier ones are multiplied.
#pragma once

#include "quantized.h"

namespace trioserve {

// Scale of 32 numbers of a row, and sums of their whole numbers.
struct RowGroup {
    float scale, scaled_sum;
    int32_t starts[2];  // -128 times the sum of the lower 16 numbers, and of the upper 16
};

// Quantized rows: [rows, padded k] and [rows, padded k / 32].
struct QuantizedRows {
    const int8_t* values;
    const RowGroup* groups;
};

// Readable up to the next multiple of 16 rows.
inline int64_t quantized_rows_bytes(int64_t rows, int64_t k) {
    return rounded_up(rows, 16) * (padded_depth(k) + record_count(k) * int64_t(sizeof(RowGroup)));
}

inline QuantizedRows rows_at(const int8_t* memory, int64_t rows, int64_t k) {
    return {memory, reinterpret_cast<const RowGroup*>(memory + rounded_up(rows, 16) * padded_depth(k))};
}

template <class T>
inline void quantize_row(const Rows<const T>& x, int64_t k, int64_t row, const QuantizedRows& to) {
    constexpr float TINY = 1e-30f;  // below it, 127 / most would be infinite, and zeros are exact enough
    const int64_t records = record_count(k);
    const T* from = x.at(row, 0);
    int8_t* values = const_cast<int8_t*>(to.values) + row * padded_depth(k);
    RowGroup* groups = const_cast<RowGroup*>(to.groups) + row * records;
    for (int64_t record = 0; record < records; record++, from += RECORD_DEPTH, values += RECORD_DEPTH) {
        Lanes low = load(from), high = load(from + LANES);
        const float most = max_of(max(max(low, sub(zero(), low)), max(high, sub(zero(), high))));
        const float doubt = sum_of(mul(add(low, high), zero()));  // only NaN or infinity times 0 is NaN
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
template <int BITS>
inline Bytes low_bits(Bytes a) { return _mm512_and_si512(a, _mm512_set1_epi8((1 << BITS) - 1)); }
template <int BITS>
inline Bytes behind(Bytes a) { return _mm512_srli_epi16(a, BITS); }
inline Bytes with_third_bits(Bytes a, Bytes bits) {
    return _mm512_or_si512(a, _mm512_and_si512(_mm512_slli_epi16(bits, 2), _mm512_set1_epi8(4)));
}
inline Bytes looked_up(const uint8_t* table, Bytes places) {
    const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(numbers), places);
}

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
        if (F::OFFSET == 4) sum = _mm512_srai_epi32(sum, 5);
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
template <int BITS>
inline Bytes low_bits(Bytes a) {
    const __m256i ones = _mm256_set1_epi8((1 << BITS) - 1);
    return {_mm256_and_si256(a.low, ones), _mm256_and_si256(a.high, ones)};
}
template <int BITS>
inline Bytes behind(Bytes a) { return {_mm256_srli_epi16(a.low, BITS), _mm256_srli_epi16(a.high, BITS)}; }
inline Bytes with_third_bits(Bytes a, Bytes bits) {
    const __m256i four = _mm256_set1_epi8(4);
    return {_mm256_or_si256(a.low, _mm256_and_si256(_mm256_slli_epi16(bits.low, 2), four)),
            _mm256_or_si256(a.high, _mm256_and_si256(_mm256_slli_epi16(bits.high, 2), four))};
}
inline Bytes looked_up(const uint8_t* table, Bytes places) {
    const __m256i numbers = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    return {_mm256_shuffle_epi8(numbers, places.low), _mm256_shuffle_epi8(numbers, places.high)};
}

template <class F>
struct Dot {
    // For values of few bits in 16-bit lanes: 32 products of at most 15 * 127 fit two lanes.
    __m256i low, high;
    int part_;

    static __m256i pairs(__m256i a) { return _mm256_madd_epi16(a, _mm256_set1_epi16(1)); }
    static __m256i product(__m256i weights, __m256i values) {
        if constexpr (!F::HAS_BYTES) return _mm256_maddubs_epi16(weights, values);
        // For signed weights, the sign moves to the row's values: 2 * 128 * 127 fits 16 bits, 2 * 255 * 127 does not.
        const __m256i signed_ = _mm256_xor_si256(weights, _mm256_set1_epi8(char(0x80)));
        return pairs(_mm256_maddubs_epi16(_mm256_abs_epi8(signed_), _mm256_sign_epi8(values, signed_)));
    }
    static __m256i sum(__m256i a, __m256i b) {
        return F::HAS_BYTES ? _mm256_add_epi32(a, b) : _mm256_add_epi16(a, b);
    }

    void start(const RowGroup&, int part) {
        low = high = _mm256_setzero_si256();
        part_ = part;
    }
    void add(Bytes weights, int32_t values) {
        const __m256i same = _mm256_set1_epi32(values);
        low = sum(low, product(weights.low, same));
        high = sum(high, product(weights.high, same));
    }
    Lanes value(const RowGroup& group) const {
        __m256i a = low, b = high;
        if constexpr (!F::HAS_BYTES) {
            const int32_t starts = group.starts[part_] + (F::PARTS == 1 ? group.starts[1] : 0);
            const __m256i offset = _mm256_set1_epi32(F::OFFSET == 0 ? 0 : starts / 128 * F::OFFSET);
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

// The units of a block's record in order.
template <class F>
struct Units {
    static constexpr int LOW_BITS = F::BITS == 3 ? 2 : F::BITS, SHARERS = 8 / LOW_BITS;
    Bytes shared, third;

    Bytes next(const uint8_t* record, unsigned unit, int block) {
        if (unit % SHARERS == 0) shared = load_bytes(record + F::VALUES + (unit / SHARERS * PANEL_BLOCKS + block) * 64);
        if constexpr (F::BITS == 8) return shared;
        Bytes values = low_bits<LOW_BITS>(shared);
        shared = behind<LOW_BITS>(shared);
        if constexpr (F::BITS == 3) {
            if (unit == 0) third = load_bytes(record + F::THIRD_BITS + block * 64);
            values = with_third_bits(values, third);
            third = behind<1>(third);
        }
        if constexpr (F::HAS_TABLE) values = looked_up(F::Table::NUMBERS, values);
        return values;
    }
};

// sums [ROWS, 32] = rows times one panel. fetch: address from which as many bytes are prefetched as are read.
template <class F, int ROWS>
inline void quantized_tile(const int8_t* x, const RowGroup* groups, int64_t records, const uint8_t* panel, float* sums,
                           const uint8_t* fetch) {
    constexpr int UNITS = 8 / F::PARTS;
    const int64_t stride = records * RECORD_DEPTH;
    Lanes sum[ROWS][PANEL_BLOCKS];
    for (int row = 0; row < ROWS; row++)
        for (int block = 0; block < PANEL_BLOCKS; block++) sum[row][block] = zero();
    [[maybe_unused]] const uint8_t* outer = panel;
    for (int64_t record = 0; record < records; record++, panel += F::BYTES) {
        if (F::IS_NESTED && record % F::OUTER_RECORDS == 0) {
            outer = panel;
            panel += F::OUTER;
            for (int64_t byte = 0; byte < F::OUTER; byte += 64, fetch += 64)
                _mm_prefetch(reinterpret_cast<const char*>(fetch), _MM_HINT_T0);
        }
        Units<F> units[PANEL_BLOCKS];
        for (int64_t byte = 0; byte < F::BYTES; byte += 64, fetch += 64)
            _mm_prefetch(reinterpret_cast<const char*>(fetch), _MM_HINT_T0);
        for (int part = 0; part < F::PARTS; part++) {
            Dot<F> dot[ROWS][PANEL_BLOCKS];
            for (int row = 0; row < ROWS; row++)
                for (int block = 0; block < PANEL_BLOCKS; block++)
                    dot[row][block].start(groups[row * records + record], part);
// Without this pragma, compilers keep the sums of tiles with many rows in memory instead of registers.
#pragma GCC unroll 8
            for (int index = 0; index < UNITS; index++) {
                const int unit = part * UNITS + index;
                Bytes weights[PANEL_BLOCKS];
                for (int block = 0; block < PANEL_BLOCKS; block++) weights[block] = units[block].next(panel, unit, block);
                for (int row = 0; row < ROWS; row++) {
                    int32_t values;
                    std::memcpy(&values, x + row * stride + record * RECORD_DEPTH + unit * 4, sizeof values);
                    for (int block = 0; block < PANEL_BLOCKS; block++) dot[row][block].add(weights[block], values);
                }
            }
            for (int block = 0; block < PANEL_BLOCKS; block++) {
                const Lanes scale = F::scale(panel, outer, part, block);
                for (int row = 0; row < ROWS; row++) {
                    const RowGroup& group = groups[row * records + record];
                    const Lanes both = mul(scale, set(group.scale));
                    sum[row][block] = fma(dot[row][block].value(group), both, sum[row][block]);
                }
                if constexpr (F::HAS_MIN) {
                    const Lanes min = F::min(panel, outer, part, block);
                    for (int row = 0; row < ROWS; row++) {
                        const RowGroup& group = groups[row * records + record];
                        const float of_part = group.scale * (float(group.starts[part]) * (-1.0f / 128.0f));
                        sum[row][block] = fma(min, set(F::PARTS == 1 ? group.scaled_sum : of_part), sum[row][block]);
                    }
                }
            }
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int block = 0; block < PANEL_BLOCKS; block++) store(sums + row * PANEL + block * LANES, sum[row][block]);
}

// Computes `rows` rows, at most QUANTIZED_TILE_ROWS.
template <class F, int ROWS = QUANTIZED_TILE_ROWS>
inline void run_quantized_tile(int rows, const int8_t* x, const RowGroup* groups, int64_t records, const uint8_t* panel,
                               float* sums, const uint8_t* fetch) {
    if constexpr (ROWS > 1) {
        if (rows < ROWS) return run_quantized_tile<F, ROWS - 1>(rows, x, groups, records, panel, sums, fetch);
    }
    quantized_tile<F, ROWS>(x, groups, records, panel, sums, fetch);
}

#if defined(__AMX_BF16__)
// A record's weights in bfloat16, in the order of packed weights. It is inlined, so constants stay in registers.
template <class F>
__attribute__((always_inline)) inline void dequantize_record(const uint8_t* record, const uint8_t* outer, bf16* to, int64_t block_stride) {
    // A stored value is shuffled to the bits of a power of two. Then a lane has the sum of both.
    constexpr int BYTE = F::HAS_BYTES ? 1 : 2;
    constexpr float POWER = F::HAS_BYTES ? 32768.0f : 128.0f;
    constexpr __mmask64 VALUE_BYTES = 0x1111111111111111u << BYTE, LOW_WORDS = 0x3333333333333333u;
    const __m512i power = _mm512_castps_si512(set(POWER));
    const __m512i firsts = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 4, 8, 12));
    const __m512i high_words = _mm512_broadcast_i32x4(_mm_setr_epi32(0x0302, 0x0706, 0x0b0a, 0x0f0e));
    // The lower half of a float32 is truncated. Before that, all weights are enlarged by 0.35 to 0.7 of the last remaining
    // bit, by half of it on average. Numbers that bfloat16 holds exactly stay unchanged.
    const Lanes raised = set(1.0f + 0.6931472f / 256.0f);
    const __m512i fifteen_bits = _mm512_set1_epi32(int(0xfffffe00u));  // so that a weight of 0 stays 0
    Units<F> units;
    for (int index = 0; index < PANEL_BLOCKS * F::PARTS; index++) {
        const int block = index / F::PARTS, part = index % F::PARTS;
        const __m512i exact = _mm512_castps_si512(mul(F::scale(record, outer, part, block), raised));
        const Lanes scale = _mm512_castsi512_ps(_mm512_and_si512(exact, fifteen_bits));
        const Lanes min = F::HAS_MIN ? mul(F::min(record, outer, part, block), raised) : zero();
        const Lanes start = fma(scale, set(-POWER - F::OFFSET), min);
        const auto number = [&](__m512i bytes, int n) {
            const __m512i places = _mm512_slli_epi32(_mm512_add_epi32(firsts, _mm512_set1_epi32(n)), 8 * BYTE);
            const __m512i value = _mm512_mask_shuffle_epi8(power, VALUE_BYTES, bytes, places);
            return _mm512_castps_si512(fma(_mm512_castsi512_ps(value), scale, start));
        };
        bf16* pair = to + block * block_stride + part * (RECORD_DEPTH / F::PARTS) * LANES;
        const auto store_unit = [&](__m512i bytes) {
            for (int n = 0; n < 4; n += 2, pair += 2 * LANES)
                _mm512_storeu_si512(
                    pair, _mm512_mask_shuffle_epi8(number(bytes, n + 1), LOW_WORDS, number(bytes, n), high_words));
        };
        constexpr int UNITS = 8 / F::PARTS;
#pragma GCC unroll 8
        for (int n = 0; n < UNITS; n++) store_unit(units.next(record, part * UNITS + n, block));
    }
}

// Computes or adds sums [rows, 32] = at most 32 rows (tiles with `depth` numbers per row) times some records. While one record
// is multiplied, the next one is dequantized. is_kept: all stay in `numbers`. Otherwise the start of `numbers` is overwritten
// again and again, and stays in the L1 cache. fetch: address from which as many bytes are prefetched as are read.
template <class F>
inline void dequantize_and_multiply(const bf16* x, int64_t depth, int rows, const uint8_t* from, int64_t records,
                                    bf16* numbers, int64_t block_stride, bool is_kept, float* sums, bool is_first,
                                    const uint8_t* fetch) {
    constexpr int64_t SUMS_BYTES = PANEL * sizeof(float);
    const bool is_tall = rows > 16;
    if (is_first) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, SUMS_BYTES);
        _tile_loadd(1, sums + LANES, SUMS_BYTES);
        if (is_tall) _tile_loadd(2, sums + 16 * PANEL, SUMS_BYTES);
        if (is_tall) _tile_loadd(3, sums + 16 * PANEL + LANES, SUMS_BYTES);
    }
    const auto numbers_of = [=](int64_t record) {
        return numbers + (is_kept ? record : record % 4) * RECORD_DEPTH * LANES;
    };
    for (int64_t record = 0; record <= records; record++) {
        if (record < records) {
            const int64_t bytes = F::start(record + 1) - F::start(record);
            for (int64_t byte = 0; byte < bytes; byte += 64, fetch += 64)
                _mm_prefetch(reinterpret_cast<const char*>(fetch), _MM_HINT_T1);
            dequantize_record<F>(from + F::start(record), from + F::outer_start(record), numbers_of(record), block_stride);
        }
        if (record == 0) continue;
        finish_writes();
        const bf16* values = x + (record - 1) * RECORD_DEPTH * 16;
        const bf16* weights = numbers_of(record - 1);
        _tile_loadd(4, values, 64);
        _tile_loadd(6, weights, 64);
        _tile_loadd(7, weights + block_stride, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (is_tall) {
            _tile_loadd(5, values + 16 * depth, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums, SUMS_BYTES);
    _tile_stored(1, sums + LANES, SUMS_BYTES);
    if (is_tall) _tile_stored(2, sums + 16 * PANEL, SUMS_BYTES);
    if (is_tall) _tile_stored(3, sums + 16 * PANEL + LANES, SUMS_BYTES);
}

inline int64_t panel_numbers(int64_t k) { return padded_depth(k) * PANEL; }

// compute_piece for a quantized weight and bfloat16 rows. The first 32 rows are multiplied with records as they are
// dequantized, the others with the records that this leaves in memory.
template <class F, class Finish>
inline void compute_dequantized_piece(const Piece& piece, const Rows<const bf16>& x, const uint8_t* w, int64_t all_blocks,
                                      bf16* numbers, int64_t outputs, const uint8_t* next,
                                      Finishing<Finish>& finishing) {
    const int64_t depth = x.depth, records = depth / RECORD_DEPTH, block_stride = depth * LANES;
    const int64_t first_block = piece.panel * PANEL_BLOCKS, first_row = piece.first_row, end_row = piece.end_row;
    const int blocks = int(std::min<int64_t>(PANEL_BLOCKS, all_blocks - first_block));
    const uint8_t* panel = w + piece.panel * F::panel_bytes(records);
    const bool is_kept = end_row - first_row > ROWS_TOGETHER;
    // If scales have scales, parts begin where the outer scales do.
    const int64_t depth_max = !is_kept ? depth : F::IS_NESTED ? F::OUTER_RECORDS * RECORD_DEPTH : AMX_DEPTH;
    const auto meanwhile = [&] { finishing.some(); };
    for (int64_t row = first_row; row < end_row; row += AMX_SUM_ROWS) {
        const int rows = int(std::min<int64_t>(AMX_SUM_ROWS, end_row - row));
        float* sums = finishing.sums();
        const int done = row == first_row ? std::min<int>(rows, ROWS_TOGETHER) : 0;
        finishing.share_out((rows - done + 31) / ROWS_TOGETHER * records);
        for (int64_t start = 0; start < depth; start += depth_max) {
            const int64_t part = std::min(depth_max, depth - start);
            const bf16* values = x.at(row, start);
            bf16* weights = numbers + (end_row - first_row > AMX_SUM_ROWS ? start * LANES : 0);
            if (done > 0) {
                const int64_t start_byte = F::start(start / RECORD_DEPTH) - F::OUTER;
                dequantize_and_multiply<F>(values, depth, done, panel + start_byte, part / RECORD_DEPTH, weights,
                                           block_stride, is_kept, sums, start == 0, next + start_byte);
            }
            if (done < rows)
                add_products_amx<true, Reading::ONCE, Reading::AGAIN>(values + done * depth, depth, rows - done, weights,
                                                                      block_stride, blocks, part, sums + done * PANEL,
                                                                      PANEL, start == 0, [] {}, meanwhile);
        }
        finishing.add(row, rows, outputs + first_block, blocks);
    }
}
#else
inline int64_t panel_numbers(int64_t) { return 0; }
#endif

// compute_piece for a quantized weight. quantized: the rows x, unless they are tiles. numbers: memory of panel_numbers.
template <class T, class Finish>
inline void compute_quantized_piece(const Piece& piece, const Rows<const T>& x, const QuantizedRows& quantized,
                                    int32_t format, const uint8_t* w, int64_t all_blocks, T* numbers, int64_t outputs,
                                    const uint8_t* next, Finishing<Finish>& finishing) {
#if defined(__AMX_BF16__)
    if constexpr (sizeof(T) == sizeof(bf16)) {
        if (x.are_tiles) {
            with_format(format, [&](auto f) {
                compute_dequantized_piece<decltype(f)>(piece, x, w, all_blocks, numbers, outputs, next, finishing);
            });
            return;
        }
    }
#endif
    const int64_t depth = x.depth, records = depth / RECORD_DEPTH, end_row = piece.end_row;
    const int64_t first_block = piece.panel * PANEL_BLOCKS;
    const int blocks = int(std::min<int64_t>(PANEL_BLOCKS, all_blocks - first_block));
    for (int64_t first = piece.first_row; first < end_row; first += SUM_ROWS) {
        const int rows = int(std::min<int64_t>(SUM_ROWS, end_row - first));
        float* sums = finishing.sums();
        with_format(format, [&](auto f) {
            using F = decltype(f);
            const uint8_t* panel = w + piece.panel * F::panel_bytes(records);
            const int tiles = (rows + QUANTIZED_TILE_ROWS - 1) / QUANTIZED_TILE_ROWS;
            for (int index = 0, row = 0; index < tiles; index++) {
                const int height = (rows - row + tiles - index - 1) / (tiles - index);
                const uint8_t* fetch = index == 0 ? next : panel;
                run_quantized_tile<F>(height, quantized.values + (first + row) * depth,
                                      quantized.groups + (first + row) * records, records, panel,
                                      sums + row * PANEL, fetch);
                row += height;
            }
        });
        finishing.add(first, rows, outputs + first_block, blocks);
        finishing.end();
    }
}

}  // namespace trioserve
