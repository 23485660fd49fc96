// Products of few or many rows with a quantized weight.
//
// Rows are quantized to 8 bits, with a scale for each 32 numbers. Sums over 32 of K are whole numbers and exact; they are
// added up in float32, always in the same order: a row's results do not depend on the rows beside it.
#pragma once

#include "quantized.h"

namespace trioserve {

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

// With rows to read up to the next 16.
inline int64_t quantized_rows_bytes(int64_t rows, int64_t k) {
    return rounded_up(rows, 16) * (padded_depth(k) + record_count(k) * int64_t(sizeof(RowGroup)));
}

inline QuantizedRows rows_at(const int8_t* memory, int64_t rows, int64_t k) {
    return {memory, reinterpret_cast<const RowGroup*>(memory + rounded_up(rows, 16) * padded_depth(k))};
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

#if defined(__AMX_INT8__)
// A tile of rows has the numbers of two records. A tile of weights has those of one record beside zeros, so that each
// record's whole sums come out alone. They are scaled in the order of quantized_tile, to the same bits.
constexpr int AMX_QUANTIZED_ROWS_MIN = 65;  // below, vpdpbusd is as fast, since scaling takes as long with both
constexpr int64_t AMX_RECORDS = 8;          // summed up before they are scaled: the whole sums stay in the first cache
constexpr int64_t UNIT_BYTES = 4 * LANES;

// Of a panel whose weights all have 8 bits: for each record and block a tile.
inline int64_t unpacked_bytes(int64_t records) { return rounded_up(records, 2) * PANEL_BLOCKS * 16 * UNIT_BYTES; }

// to: was all zeros; the other half of each tile stays so. fetch: an address from which as much is brought into the caches
// as is read.
template <class F>
inline void unpack_panel(const uint8_t* panel, int64_t records, uint8_t* to, const uint8_t* fetch) {
    for (int64_t record = 0; record < records; record++, panel += F::BYTES) {
        for (int64_t byte = 0; byte < F::BYTES; byte += 64, fetch += 64)
            _mm_prefetch(reinterpret_cast<const char*>(fetch), _MM_HINT_T1);
        for (int block = 0; block < PANEL_BLOCKS; block++, to += 16 * UNIT_BYTES) {
            const uint8_t* from = panel + F::VALUES + block * UNIT_BYTES;
            uint8_t* unit = to + record % 2 * 8 * UNIT_BYTES;
            for (int index = 0; index < F::BITS; index++, from += PANEL_BLOCKS * UNIT_BYTES, unit += UNIT_BYTES) {
                const Bytes raw = load_bytes(from);
                _mm512_storeu_si512(unit, F::BITS == 8 ? raw : low_halves(raw));
                if (F::BITS == 4) _mm512_storeu_si512(unit += UNIT_BYTES, high_halves(raw));
            }
        }
    }
}

// As quantized_tile, for 8 rows and the whole sums [records][2][16, 16] of some records; they are added to `sums`.
template <class F>
inline void scale_sums(const int32_t* whole, const RowGroup* groups, int64_t row_records, int64_t records,
                       const uint8_t* panel, float* sums, bool is_first) {
    using Scale = typename F::Scale;
    constexpr int ROWS = 8;
    for (int block = 0; block < PANEL_BLOCKS; block++) {
        Lanes sum[ROWS];
        for (int row = 0; row < ROWS; row++) sum[row] = is_first ? zero() : load(sums + row * PANEL + block * LANES);
        for (int64_t record = 0; record < records; record++) {
            const uint8_t* from = panel + record * F::BYTES;
            const Lanes scale = load(reinterpret_cast<const Scale*>(from) + block * LANES);
            const Lanes min = F::HAS_MIN ? load(reinterpret_cast<const Scale*>(from + F::MINS) + block * LANES) : zero();
            const int32_t* dots = whole + (record * PANEL_BLOCKS + block) * 16 * LANES;
            for (int row = 0; row < ROWS; row++) {
                const RowGroup& group = groups[row * row_records + record];
                Dot<F> dot;
                dot.start(group, 0);
                dot.sum = _mm512_add_epi32(dot.sum, _mm512_loadu_si512(dots + row * LANES));
                sum[row] = fma(dot.value(group), mul(scale, set(group.scale)), sum[row]);
                if (F::HAS_MIN) sum[row] = fma(min, set(group.scaled_sum), sum[row]);
            }
        }
        for (int row = 0; row < ROWS; row++) store(sums + row * PANEL + block * LANES, sum[row]);
    }
}

// sums [16, 32] = 16 rows times one panel, which is there in 8 bits, too.
template <class F>
inline void quantized_rows_amx(const int8_t* x, const RowGroup* groups, int64_t records, const uint8_t* panel,
                               const uint8_t* unpacked, float* sums) {
    alignas(64) int32_t whole[AMX_RECORDS * PANEL_BLOCKS * 16 * LANES];
    const int64_t x_bytes = records * RECORD_DEPTH;
    for (int64_t first = 0; first < records; first += AMX_RECORDS) {
        const int64_t count = std::min(AMX_RECORDS, records - first);
        for (int64_t record = 0; record < count; record += 2) {
            constexpr int64_t TILE = 16 * UNIT_BYTES;
            const uint8_t* weights = unpacked + (first + record) * PANEL_BLOCKS * TILE;
            int32_t* to = whole + record * PANEL_BLOCKS * 16 * LANES;
            _tile_loadd(4, x + (first + record) * RECORD_DEPTH, x_bytes);
            _tile_zero(0);
            _tile_loadd(5, weights, UNIT_BYTES);
            _tile_dpbsud(0, 4, 5);
            _tile_zero(1);
            _tile_loadd(6, weights + TILE, UNIT_BYTES);
            _tile_dpbsud(1, 4, 6);
            _tile_zero(2);
            _tile_loadd(7, weights + 2 * TILE, UNIT_BYTES);
            _tile_dpbsud(2, 4, 7);
            _tile_zero(3);
            _tile_loadd(5, weights + 3 * TILE, UNIT_BYTES);
            _tile_dpbsud(3, 4, 5);
            _tile_stored(0, to, UNIT_BYTES);
            _tile_stored(1, to + 16 * LANES, UNIT_BYTES);
            _tile_stored(2, to + 32 * LANES, UNIT_BYTES);
            _tile_stored(3, to + 48 * LANES, UNIT_BYTES);
        }
        for (int row = 0; row < 16; row += 8)
            scale_sums<F>(whole + row * LANES, groups + row * records + first, records, count, panel + first * F::BYTES,
                          sums + row * PANEL, first == 0);
    }
}
#else
inline int64_t unpacked_bytes(int64_t) { return 0; }
#endif

// compute_piece for a quantized weight. unpacked: unpacked_bytes of memory, zeros at first, for such pieces alone.
template <class Finish>
inline void compute_quantized_piece(const Piece& piece, const QuantizedRows& x, int32_t format, const uint8_t* w,
                                    int64_t all_blocks, int64_t k, uint8_t* unpacked, const Finish& finish) {
    alignas(64) float sums[(SUM_ROWS + 16) * PANEL];
    const int64_t records = record_count(k), depth = padded_depth(k), end_row = piece.end_row;
    const int64_t first_block = piece.panel * PANEL_BLOCKS;
    const int blocks = int(std::min<int64_t>(PANEL_BLOCKS, all_blocks - first_block));
    for (int64_t first = piece.first_row; first < end_row; first += SUM_ROWS) {
        const int rows = int(std::min<int64_t>(SUM_ROWS, end_row - first));
        with_format(format, [&](auto f) {
            using F = decltype(f);
            const uint8_t* panel = w + piece.panel * records * F::BYTES;
#if defined(__AMX_INT8__)
            if (F::PARTS == 1 && rows >= AMX_QUANTIZED_ROWS_MIN) {
                if (first == piece.first_row)
                    unpack_panel<F>(panel, records, unpacked, panel + records * F::BYTES);
                for (int row = 0; row < rows; row += 16)
                    quantized_rows_amx<F>(x.values + (first + row) * depth, x.groups + (first + row) * records, records,
                                          panel, unpacked, sums + row * PANEL);
                return;
            }
#endif
            const int tiles = (rows + QUANTIZED_TILE_ROWS - 1) / QUANTIZED_TILE_ROWS;
            for (int index = 0, row = 0; index < tiles; index++) {
                const int height = (rows - row + tiles - index - 1) / (tiles - index);
                const uint8_t* fetch = index == 0 ? panel + records * F::BYTES : panel;
                run_quantized_tile<F>(height, x.values + (first + row) * depth, x.groups + (first + row) * records, records,
                                      panel, sums + row * PANEL, fetch);
                row += height;
            }
        });
        finish(first, rows, first_block, blocks, sums);
    }
}

}  // namespace trioserve
