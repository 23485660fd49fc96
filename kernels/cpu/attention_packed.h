// Attention with keys and values that are packed for many rows: rows of a prompt, and decodes that share blocks. With AMX, also
// for decodes that must have the same bits as rows of a prompt.
#pragma once

#include <cmath>
#include <limits>

#include "attention.h"

namespace trioserve {

// (token, head) rows of a prompt's piece, which all use the same packed keys and values
#if defined(__AMX_BF16__)
constexpr int PACKED_ROWS = 1536;
#else
constexpr int PACKED_ROWS = 768;
#endif

inline int64_t piece_tokens_max(const AttentionShape& shape) {
    return std::max<int64_t>(1, PACKED_ROWS / shape.group());
}

// --- a prompt's rows: two products with a softmax between them ---------------------------------------------------------

// Keys are the rows of the first product, and queries are its weight. So 16 queries are side by side in vectors, and a softmax
// over tokens needs no sums across lanes. Its weights are the weight of the second product, and values are its rows.

#if defined(__AMX_BF16__)
template <class T>
constexpr bool IN_TILES = sizeof(T) == sizeof(bf16);
#else
template <class T>
constexpr bool IN_TILES = false;
#endif

// Memory of one thread for the (token, head) rows that use packed keys: PACKED_ROWS, or one group. They are computed in
// strips, whose rows are side by side.
template <class T>
struct PackedScratch {
    static constexpr int STRIP = IN_TILES<T> ? LANES : PANEL_BLOCKS * LANES;
    static constexpr int TOKENS = IN_TILES<T> ? PART_TOKENS : SPAN;  // largest number of tokens packed at a time

    // Number of tokens for this many rows. Few rows use tokens that are still in the L1 cache.
    static int64_t tokens_for(int64_t rows) { return rows < 96 ? SPAN : TOKENS; }

    T *keys, *values;      // [TOKENS, query stride], and [value dim, tokens] per 32 tokens or per span
    T *queries, *weights;  // packed [width, query stride] and [STRIP, TOKENS]
    T* nothing;            // zeros for a missing token or query
    T* decoded;            // [TOKENS][2][D], for keys and values in 8 bits
    float* scores;         // [2][SPAN, STRIP]
    float* sums;           // [value dim, STRIP] of each strip, for the current part
    float* totals;         // [width], sums of weights
    float* best;           // [width], approximate largest score so far
    float *joined_sums, *joined_totals, *joined_best;  // of earlier parts
    float *first, *last;   // [width], the range that a row sees
    float *slopes, *positions;  // [width], of a row's head, and of the row. Unused without slopes

    static int64_t width_max(const AttentionShape& shape) {
        return rounded_up(piece_tokens_max(shape) * shape.group(), STRIP);
    }
    // Sizes in elements of T and of float.
    static int64_t packed_count(const AttentionShape& shape) {
        return (TOKENS + 1) * shape.query_stride() + TOKENS * (shape.value_dim() + STRIP) +
               width_max(shape) * shape.query_stride() + (shape.is_coded() ? TOKENS * 2 * shape.head_dim : 0);
    }
    static int64_t float_count(const AttentionShape& shape) {
        return 2 * STRIP * SPAN + width_max(shape) * (2 * shape.value_dim() + 8);
    }

    PackedScratch(const AttentionShape& shape, T* packed, float* floats) {
        keys = packed;
        values = keys + TOKENS * shape.query_stride();
        queries = values + TOKENS * shape.value_dim();
        weights = queries + width_max(shape) * shape.query_stride();
        nothing = weights + STRIP * TOKENS;
        decoded = nothing + shape.query_stride();
        scores = floats;
        sums = scores + 2 * STRIP * SPAN;
        totals = sums + width_max(shape) * shape.value_dim();
        best = totals + width_max(shape);
        joined_sums = best + width_max(shape);
        joined_totals = joined_sums + width_max(shape) * shape.value_dim();
        joined_best = joined_totals + width_max(shape);
        first = joined_best + width_max(shape);
        last = first + width_max(shape);
        slopes = last + width_max(shape);
        positions = slopes + width_max(shape);
    }

    // Address of 16 numbers of a key, or of 32 in bfloat16.
    T* key_at(const AttentionShape& shape, int64_t token, int64_t d) const {
        if constexpr (IN_TILES<T>)
            return keys + token / 32 * 32 * shape.query_stride() + d / 32 * 32 * 32 + token % 32 * 32 + d % 32;
        return keys + token * shape.query_stride() + d;
    }
    // Address of number d of 16 tokens' values, or of 32 in bfloat16.
    T* values_at(const AttentionShape& shape, int64_t token, int64_t d) const {
        if constexpr (IN_TILES<T>) return values + (token / 32 * shape.value_dim() + d) * 32;
        return values + d * SPAN + token;
    }
    float* sums_of(const AttentionShape& shape, int64_t row) const {
        return sums + row / STRIP * STRIP * shape.value_dim() + row % STRIP;
    }

    // Prepares `count` rows. Row i has head i % group of the kv head. query_of(row) returns the address of a query,
    // seen_of(row) the range that it sees, and position_of(row) its position.
    template <class QueryOf, class SeenOf, class PositionOf>
    void begin(const AttentionShape& shape, int64_t kv_head, int64_t count, const QueryOf& query_of, const SeenOf& seen_of,
               const PositionOf& position_of) const {
        constexpr int64_t DEPTH = Unit<T>::DEPTH;
        const int64_t width = rounded_up(count, STRIP), stride = shape.query_stride();
        for (int64_t row = 0; row < width; row++) {
            const Seen seen = seen_of(std::min(row, count - 1));
            first[row] = float(seen.begin);
            last[row] = float(seen.end - 1);
            if (shape.slopes == nullptr) continue;
            slopes[row] = shape.slopes[kv_head * shape.group() + row % shape.group()];
            positions[row] = float(position_of(std::min(row, count - 1)));
        }
        // The padding of one model stays valid. Here, earlier calls may have had other shapes.
        std::memset(nothing, 0, sizeof(T) * stride);
        if (stride > shape.head_dim) std::memset(keys, 0, sizeof(T) * TOKENS * stride);
        for (int64_t row = 0; row < width; row += LANES) {
            const T* rows[LANES];
            for (int lane = 0; lane < LANES; lane++) rows[lane] = row + lane < count ? query_of(row + lane) : nothing;
            for (int64_t d = 0; d < stride; d += LANES * DEPTH) {
                Lanes columns[LANES];
                transpose_rows(rows, d, columns);
                float* to = reinterpret_cast<float*>(queries + row * stride + d * LANES);
                for (int index = 0; index < LANES; index++) store(to + index * LANES, columns[index]);
            }
        }
    }

    void begin_part(int64_t count) const {
        const int64_t width = rounded_up(count, STRIP);
        std::fill(best, best + width, NOTHING_SEEN);
        std::fill(totals, totals + width, 0.0f);
    }
    // Returns true if sixteen rows see nothing between these positions.
    bool is_blind(int64_t row, int64_t from, int64_t to) const {
        return int64_t(last[row + LANES - 1]) < from || int64_t(first[row]) >= to;
    }
    // Sets the first part's sums for rows that see nothing of it.
    void clear_blind(const AttentionShape& shape, int64_t count, int64_t from, int64_t to) const {
        for (int64_t row = 0; row < count; row += LANES)
            for (int64_t d = 0; is_blind(row, from, to) && d < shape.value_dim(); d++)
                store(sums_of(shape, row) + d * STRIP, zero());
    }
    // Ends the part at positions from .. to - 1, and joins it with earlier parts.
    void join(const AttentionShape& shape, int64_t count, int64_t from, int64_t to) const {
        for (int64_t row = 0; row < count; row += LANES) {
            if (is_blind(row, from, to)) continue;
            const Joint<T> joint(load(joined_best + row), load(best + row));
            store(joined_best + row, joint.best);
            store(joined_totals + row, joint.of(load(joined_totals + row), load(totals + row)));
            const float* part = sums_of(shape, row);
            float* joined = joined_sums + (part - sums);
            for (int64_t d = 0; d < shape.value_dim(); d++)
                store(joined + d * STRIP, joint.of(load(joined + d * STRIP), load(part + d * STRIP)));
        }
    }

    // A view for the first part of a context, which has no earlier part to join.
    PackedScratch first_part() const {
        PackedScratch first = *this;
        first.sums = joined_sums;
        first.totals = joined_totals;
        first.best = joined_best;
        return first;
    }

    // Adds sinks to the totals of rows after their last part. Row i has head i % group.
    void add_sinks(const AttentionShape& shape, int64_t kv_head, int64_t count) const {
        const float* sinks = shape.sinks + kv_head * shape.group();
        for (int64_t row = 0; row < count; row += LANES) {
            alignas(64) float lanes[LANES];
            for (int lane = 0; lane < LANES; lane++) lanes[lane] = sinks[(row + lane) % shape.group()];
            store(totals + row, add(load(totals + row), weight_of_sink(load(lanes), load(best + row))));
        }
    }

    // Calls finish(row, d, Lanes) with the sums of numbers d .. d + 15 of each row. is_share: divides by the row's total.
    template <class Finish>
    void end(const AttentionShape& shape, int64_t count, bool is_share, const Finish& finish) const {
        for (int64_t first = 0; first < count; first += LANES) {
            const float* from = sums_of(shape, first);
            const Lanes share = is_share ? div(set(1.0f), load(totals + first)) : set(1.0f);
            for (int64_t d = 0; d < shape.value_dim(); d += LANES) {
                Lanes rows[LANES];
                for (int index = 0; index < LANES; index++) rows[index] = mul(load(from + (d + index) * STRIP), share);
                transpose(rows);
                for (int64_t row = first; row < std::min(first + LANES, count); row++) finish(row, d, rows[row - first]);
            }
        }
    }
};

// Packs tokens first .. end - 1. Keys of other tokens are undefined, and their values are zeros wherever a product may read
// them.
template <class T>
inline void pack_tokens(const AttentionShape& shape, const T* const* tokens_at, const HeadPlace& place, int64_t first,
                        int64_t end, const PackedScratch<T>& scratch) {
    constexpr int64_t STEP = LANES * Unit<T>::DEPTH;
    const int64_t dim = shape.head_dim, key = place.key, value = place.value;
    for (int64_t index = first; index < end; index++)
        for (int64_t d = 0; d < dim; d += LANES)
            std::memcpy(scratch.key_at(shape, index, d), tokens_at[index] + key + d, sizeof(T) * LANES);
    for (int64_t token = first / 32 * 32; token < rounded_up(end, 32); token += STEP) {
        const T* values_at[STEP];
        for (int64_t index = 0; index < STEP; index++) {
            const bool is_there = token + index >= first && token + index < end;
            values_at[index] = is_there ? tokens_at[token + index] + value : scratch.nothing;
        }
        for (int64_t d = 0; d < shape.value_dim(); d += LANES) {
            Lanes columns[LANES];
            transpose_tokens(values_at, d, columns);
            for (int index = 0; index < LANES; index++)
                store(reinterpret_cast<float*>(scratch.values_at(shape, token, d + index)), columns[index]);
        }
    }
}

// Tokens of a span's packed tokens that one strip uses: from .. end - 1, both multiples of 32.
struct Met {
    int64_t from, end;
};

// Turns sixteen rows' scores of a span into weights. Only the constructor and end() call grow(), before sums are rescaled. It
// returns whether there are any sums.
template <class T, class Grow>
class SpanWeights {
public:
    // from: position of the span's first token.
    SpanWeights(const AttentionShape& shape, int64_t row, int64_t from, int64_t present, const Met& met,
                const PackedScratch<T>& scratch, float* scores, T* weights, const Grow& grow)
        : shape_(shape), scratch_(scratch), row_(row), from_(from), met_(met),
          end_(std::min(rounded_up(present, 4), met.end)), scores_(scores), weights_(weights), grow_(grow),
          scale_(set(1.0f / std::sqrt(float(shape.head_dim)))), weighing_(scale_, load(scratch.best + row)), at_(met.from) {
        const ScoreCap cap(shape.score_cap, first_lane(scale_));
        for (int64_t token = met.from; cap.is_there() && token < end_; token++)
            store(scores_ + token * STRIP, cap.of(load(scores_ + token * STRIP)));
        for (int64_t token = met.from; shape.slopes != nullptr && token < end_; token++) {
            const Lanes ahead = sub(set(float(from + token)), load(scratch.positions + row));
            store(scores_ + token * STRIP, sloped(load(scores_ + token * STRIP), load(scratch.slopes + row), ahead));
        }
        const bool all_see_all = first_of_all() <= met.from && last_of_all() + 1 >= end_;
        if (!all_see_all || scratch.best[row] == NOTHING_SEEN || Weighing<T>::NEEDS_BEST) find_best();
    }

    // Computes `fours` groups of four tokens.
    void some(int fours) {
        for (; fours > 0 && at_ < end_; fours--, at_ += 4) {
            const float* scores = scores_ + at_ * STRIP;
            sixteen_ = add(sixteen_, weighing_.write(weights_ + at_ * LANES, load(scores), load(scores + STRIP),
                                                     load(scores + 2 * STRIP), load(scores + 3 * STRIP)));
            if (at_ % LANES < LANES - 4) continue;
            total_ = add(total_, sixteen_);
            sixteen_ = zero();
        }
    }
    void end() {
        some(SPAN / 4);
        if (!has_best_ && !weighing_.are_good(add(total_, sixteen_))) {
            find_best();
            some(SPAN / 4);
        }
        if (at_ < met_.end) std::memset(weights_ + at_ * LANES, 0, sizeof(T) * LANES * (met_.end - at_));
        float* totals = scratch_.totals + row_;
        store(totals, add(load(totals), weighing_.checked(add(total_, sixteen_))));
    }

private:
    static constexpr int STRIP = PackedScratch<T>::STRIP;
    // Tokens of the span that all rows see.
    int64_t first_of_all() const { return int64_t(scratch_.first[row_ + LANES - 1]) - from_; }
    int64_t last_of_all() const { return int64_t(scratch_.last[row_]) - from_; }

    // Hides invisible tokens, and sets the number to subtract from scores.
    void find_best() {
        constexpr float INFINITE = std::numeric_limits<float>::infinity();
        const Lanes first_seen = load(scratch_.first + row_), last_seen = load(scratch_.last + row_);
        // The first argument of max() may be NaN, which is ignored. The row's weights become NaN later.
        Lanes largest[4] = {set(-INFINITE), set(-INFINITE), set(-INFINITE), set(-INFINITE)};
        const auto hide = [&](int64_t token, int64_t end) {
            for (; token < end; token++) {
                const Lanes position = set(float(from_ + token));
                Lanes score = load(scores_ + token * STRIP);
                score = where_at_least(position, first_seen, score, set(-INFINITE));
                score = where_at_least(last_seen, position, score, set(-INFINITE));
                store(scores_ + token * STRIP, score);
                largest[0] = max(score, largest[0]);
            }
        };
        int64_t token = met_.from;
        const int64_t hidden_end = std::min(first_of_all(), end_), plain_end = std::min(last_of_all() + 1, end_);
        hide(token, hidden_end);
        token = std::max(token, hidden_end);
        for (; token + 4 <= plain_end; token += 4)
            for (int index = 0; index < 4; index++)
                largest[index] = max(load(scores_ + (token + index) * STRIP), largest[index]);
        hide(token, end_);
        const Lanes all = max(max(largest[0], largest[1]), max(largest[2], largest[3]));
        Lanes best = load(scratch_.best + row_);
        const Lanes limit = add(best, set(GROWTH_MAX)), most = Weighing<T>::base(mul(all, scale_));
        // The difference of two infinite scores would be NaN, and hide the growth of other lanes.
        if (max_of(where_at_least(most, limit, set(1.0f), zero())) > 0.0f) {
            const Lanes new_best = where_at_least(most, limit, most, best), kept = Weighing<T>::kept(sub(new_best, best));
            best = new_best;
            store(scratch_.best + row_, best);
            float* totals = scratch_.totals + row_;
            store(totals, mul(load(totals), kept));
            if (grow_()) {
                float* sums = scratch_.sums_of(shape_, row_);
                for (int64_t d = 0; d < shape_.value_dim(); d++) store(sums + d * STRIP, mul(load(sums + d * STRIP), kept));
            }
        }
        has_best_ = true;
        at_ = met_.from;
        total_ = sixteen_ = zero();
        weighing_ = Weighing<T>(scale_, best);
    }

    const AttentionShape& shape_;
    const PackedScratch<T>& scratch_;
    const int64_t row_, from_;
    const Met met_;
    const int64_t end_;
    float* const scores_;
    T* const weights_;
    const Grow& grow_;
    const Lanes scale_;
    Weighing<T> weighing_;
    Lanes total_ = zero(), sixteen_ = zero();
    int64_t at_;
    bool has_best_ = false;
};

#if defined(__AMX_BF16__)
// Scores of 16 * BLOCKS keys and 16 queries: [keys, 16]. Calls meanwhile() after every product of tiles.
template <int BLOCKS, class Meanwhile>
inline void score_tiles(const bf16* keys, const bf16* queries, int64_t stride, float* scores, const Meanwhile& meanwhile) {
    _tile_zero(0);
    _tile_zero(1);
    if (BLOCKS == 4) _tile_zero(2);
    if (BLOCKS == 4) _tile_zero(3);
    for (int64_t d = 0; d < stride; d += 32, queries += 32 * LANES, keys += 32 * 32) {
        _tile_loadd(6, queries, 64);
        _tile_stream_loadd(4, keys, 64);
        _tile_dpbf16ps(0, 4, 6);
        meanwhile();
        _tile_stream_loadd(5, keys + 16 * 32, 64);
        _tile_dpbf16ps(1, 5, 6);
        meanwhile();
        if (BLOCKS == 4) {
            _tile_stream_loadd(4, keys + 32 * stride, 64);
            _tile_dpbf16ps(2, 4, 6);
            meanwhile();
            _tile_stream_loadd(5, keys + 32 * stride + 16 * 32, 64);
            _tile_dpbf16ps(3, 5, 6);
            meanwhile();
        }
    }
    _tile_stored(0, scores, 64);
    _tile_stored(1, scores + 16 * LANES, 64);
    if (BLOCKS == 4) _tile_stored(2, scores + 32 * LANES, 64);
    if (BLOCKS == 4) _tile_stored(3, scores + 48 * LANES, 64);
}

// Computes or adds sums [16 * TILES, 16] = 16 * TILES numbers of the values of 32 * steps tokens, times weights. value_step:
// distance from 32 tokens' values to the next 32 tokens'.
template <int TILES>
inline void add_value_tiles(const bf16* values, int64_t value_step, const bf16* weights, int64_t steps, float* sums,
                            bool is_first) {
    if (is_first) {
        _tile_zero(0);
        if (TILES > 1) _tile_zero(1);
        if (TILES > 2) _tile_zero(2);
        if (TILES > 3) _tile_zero(3);
    } else {
        _tile_loadd(0, sums, 64);
        if (TILES > 1) _tile_loadd(1, sums + 16 * LANES, 64);
        if (TILES > 2) _tile_loadd(2, sums + 32 * LANES, 64);
        if (TILES > 3) _tile_loadd(3, sums + 48 * LANES, 64);
    }
    for (; steps > 0; steps--, values += value_step, weights += 32 * LANES) {
        _tile_loadd(6, weights, 64);
        _tile_stream_loadd(4, values, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (TILES > 1) {
            _tile_stream_loadd(5, values + 16 * 32, 64);
            _tile_dpbf16ps(1, 5, 6);
        }
        if (TILES > 2) {
            _tile_stream_loadd(4, values + 32 * 32, 64);
            _tile_dpbf16ps(2, 4, 6);
        }
        if (TILES > 3) {
            _tile_stream_loadd(5, values + 48 * 32, 64);
            _tile_dpbf16ps(3, 5, 6);
        }
    }
    _tile_stored(0, sums, 64);
    if (TILES > 1) _tile_stored(1, sums + 16 * LANES, 64);
    if (TILES > 2) _tile_stored(2, sums + 32 * LANES, 64);
    if (TILES > 3) _tile_stored(3, sums + 48 * LANES, 64);
}

// Computes a strip of 16 rows over the packed tokens: scores and weights span by span, then the values of all tokens, whose
// sums stay in tiles.
inline void meet_strip(const AttentionShape& shape, int64_t row, int64_t from, int64_t present,
                       const PackedScratch<bf16>& scratch) {
    const int64_t stride = shape.query_stride();
    const int64_t first = int64_t(scratch.first[row]) - from;
    const int64_t end = std::min(int64_t(scratch.last[row + LANES - 1]) + 1 - from, present);
    if (first >= end || end <= 0) return;
    const int64_t begin = std::max<int64_t>(first, 0) / 32 * 32;
    bool is_first = first >= 0 || from % PART_TOKENS == 0;
    int64_t met_from = begin;  // weights from here on are not yet multiplied by their values
    const auto add_values = [&](int64_t met_end) {
        const int64_t steps = (met_end - met_from) / 32;
        if (steps == 0) return;
        finish_writes();
        for (int64_t d = 0; d < shape.value_dim(); d += 4 * LANES) {
            const auto add = [&](auto run) {
                run(scratch.values_at(shape, met_from, d), 32 * shape.value_dim(), scratch.weights + met_from * LANES, steps,
                    scratch.sums_of(shape, row) + d * LANES, is_first);
            };
            switch (std::min<int64_t>((shape.value_dim() - d) / LANES, 4)) {
                case 4: add(add_value_tiles<4>); break;
                case 3: add(add_value_tiles<3>); break;
                case 2: add(add_value_tiles<2>); break;
                default: add(add_value_tiles<1>);
            }
        }
        finish_writes();
        is_first = false;
        met_from = met_end;
    };
    const auto met_of = [&](int64_t span) {
        return Met{std::max<int64_t>(begin - span, 0), std::min<int64_t>(rounded_up(end - span, 32), SPAN)};
    };
    const auto scores_of = [&](int64_t span) { return scratch.scores + span / SPAN % 2 * SPAN * LANES; };
    const auto score = [&](int64_t span, const auto& meanwhile) {
        const Met met = met_of(span);
        const bf16* keys = scratch.keys + (span + met.from) * stride;
        float* scores = scores_of(span) + met.from * LANES;
        finish_writes();
        if (met.end - met.from == SPAN)
            score_tiles<4>(keys, scratch.queries + row * stride, stride, scores, meanwhile);
        else
            score_tiles<2>(keys, scratch.queries + row * stride, stride, scores, meanwhile);
        finish_writes();
    };
    // While a span's scores are computed, the previous span's scores become weights.
    const int fours = int(std::max<int64_t>(SPAN / 4 / (SPAN / LANES * (stride / 32)), 1));
    const int64_t first_span = begin / SPAN * SPAN;
    score(first_span, [] {});
    for (int64_t span = first_span; span < end; span += SPAN) {
        const Met met = met_of(span);
        const auto grow = [&] {
            add_values(span + met.from);
            return !is_first;
        };
        SpanWeights<bf16, decltype(grow)> weights(shape, row, from + span, end - span, met, scratch, scores_of(span),
                                                  scratch.weights + span * LANES, grow);
        if (span + SPAN < end) score(span + SPAN, [&] { weights.some(fours); });
        weights.end();
    }
    add_values(rounded_up(end, 32));
}
#endif

// Computes the `count` rows of the scratch over packed tokens, from .. from + present - 1.
template <class T>
inline void meet_tokens(const AttentionShape& shape, int64_t count, int64_t from, int64_t present,
                        const PackedScratch<T>& scratch) {
    constexpr int STRIP = PackedScratch<T>::STRIP;
    const int64_t stride = shape.query_stride();
    for (int64_t row = 0; row < count; row += STRIP) {
#if defined(__AMX_BF16__)
        if constexpr (IN_TILES<T>) {
            meet_strip(shape, row, from, present, scratch);
            continue;
        }
#endif
        // Later rows see at least as far at the end, and not further at the start.
        const int64_t first = int64_t(scratch.first[row]) - from;
        const int64_t end = std::min(int64_t(scratch.last[row + STRIP - 1]) + 1 - from, present);
        if (first >= SPAN || end <= 0) continue;
        const bool is_first = first >= 0 || from % PART_TOKENS == 0;
        const auto grow = [=] { return !is_first; };
        const Met met{std::max<int64_t>(first, 0) / 32 * 32, rounded_up(end, 32)};
        add_products<T>(scratch.keys + met.from * stride, stride, int(met.end - met.from), scratch.queries + row * stride,
                        LANES * stride, PANEL_BLOCKS, stride, scratch.scores + met.from * STRIP, STRIP, true, nullptr);
        for (int64_t block = 0; block < STRIP; block += LANES)
            SpanWeights<T, decltype(grow)>(shape, row + block, from, end, met, scratch, scratch.scores + block,
                                           scratch.weights + block * SPAN, grow)
                .end();
        add_products<T>(scratch.values + met.from, SPAN, int(shape.value_dim()), scratch.weights + met.from * LANES,
                        LANES * SPAN, PANEL_BLOCKS, met.end - met.from, scratch.sums_of(shape, row), STRIP, is_first,
                        nullptr);
    }
}

// Computes `count` rows of the scratch over positions from .. to - 1 of a kv head, part by part. Calls end_part(part, scratch)
// after each part, when the scratch has its sums.
template <class T, class EndPart>
inline void meet_parts(const AttentionShape& shape, const Chunk& chunk, int64_t kv_head, int64_t count, int64_t from,
                       int64_t to, const T* pages, const PackedScratch<T>& scratch, const EndPart& end_part) {
    const int64_t together = PackedScratch<T>::tokens_for(count);
    for (int64_t part = from / PART_TOKENS; part * PART_TOKENS < to; part++) {
        const bool is_first = part == from / PART_TOKENS;
        const PackedScratch<T> of_part = is_first ? scratch.first_part() : scratch;
        const int64_t end = std::min<int64_t>((part + 1) * PART_TOKENS, to);
        of_part.begin_part(count);
        for (int64_t at = std::max(part * PART_TOKENS, from / together * together); at < end; at += together) {
            const int64_t present = std::min(together, end - at);
            // Pages before a window may already belong to another sequence.
            const int64_t hidden = std::max<int64_t>(from - at, 0);
            const T* tokens_at[PackedScratch<T>::TOKENS];
            if (shape.is_coded()) {
                const uint8_t* coded[PackedScratch<T>::TOKENS];
                find_tokens(reinterpret_cast<const uint8_t*>(pages), shape, chunk, at + hidden, present - hidden, coded);
                decode_tokens(shape, coded, present - hidden, kv_head, scratch.decoded);
                for (int64_t index = hidden; index < present; index++)
                    tokens_at[index] = scratch.decoded + (index - hidden) * 2 * shape.head_dim;
            } else {
                find_tokens(pages, shape, chunk, at + hidden, present - hidden, tokens_at + hidden);
            }
            pack_tokens(shape, tokens_at, place_of_head(shape, kv_head), hidden, present, of_part);
            meet_tokens(shape, count, at, present, of_part);
        }
        end_part(part, of_part, is_first);
    }
}

// queries: [K][rows][G][query_stride], rotated.
template <class T>
void attend_prompt(const AttentionShape& shape, const Chunk& chunk, const AttentionPiece& piece, int64_t window,
                   const T* queries, int64_t rows, const T* pages, const HeadRows<T>& attended,
                   const PackedScratch<T>& scratch) {
    const int64_t group = shape.group();
    const int64_t count = piece.tokens * group;
    const int64_t first = chunk.start + piece.token, last = first + piece.tokens - 1;
    const T* query = queries + ((piece.kv_head * rows + chunk.first_row + piece.token) * group) * shape.query_stride();
    const auto position_of = [&](int64_t row) { return first + row / group; };
    scratch.begin(
        shape, piece.kv_head, count, [&](int64_t row) { return query + row * shape.query_stride(); },
        [&](int64_t row) { return Seen{first_seen(position_of(row), window), chunk.end_of(position_of(row))}; }, position_of);
    meet_parts(shape, chunk, piece.kv_head, count, first_seen(first, window), chunk.end_of(last), pages, scratch,
               [&](int64_t part, const PackedScratch<T>& of_part, bool is_first) {
                   const int64_t from = part * PART_TOKENS, to = from + PART_TOKENS;
                   if (is_first)
                       of_part.clear_blind(shape, count, from, to);
                   else
                       of_part.join(shape, count, from, to);
               });
    if (shape.sinks != nullptr) scratch.first_part().add_sinks(shape, piece.kv_head, count);
    scratch.first_part().end(shape, count, true, [&](int64_t row, int64_t d, Lanes part) {
        store(attended.at(chunk.first_row + piece.token + row / group, piece.kv_head * group + row % group, d), part);
    });
}

// --- decodes that share the start of their contexts: each span is packed once for all of them ------------------------------

// Blocks are those of `chunk`, the first sharer. partial_of(sharer, part) returns the destination of its part, and
// position_of(sharer) its position.
template <class T, class PartialOf, class PositionOf>
void attend_shared(const AttentionShape& shape, const Chunk& chunk, const AttentionPiece& piece, const int32_t* sharers,
                   const T* queries, int64_t rows, const T* pages, const PackedScratch<T>& scratch,
                   const PartialOf& partial_of, const PositionOf& position_of) {
    const int64_t group = shape.group();
    const int64_t count = piece.sharer_count * group;
    scratch.begin(
        shape, piece.kv_head, count,
        [&](int64_t row) {
            const int64_t sharer = sharers[row / group];
            return queries + ((piece.kv_head * rows + sharer) * group + row % group) * shape.query_stride();
        },
        [&](int64_t) { return Seen{piece.from, piece.to}; },
        [&](int64_t row) { return position_of(sharers[row / group]); });
    meet_parts(shape, chunk, piece.kv_head, count, piece.from, piece.to, pages, scratch,
               [&](int64_t index, const PackedScratch<T>& of_part, bool) {
                   const auto partial_at = [&](int64_t row) { return partial_of(sharers[row / group], index); };
                   for (int64_t row = 0; row < count; row++) {
                       float* partial = partial_at(row) + piece.kv_head * group + row % group;
                       partial[0] = of_part.best[row];
                       partial[shape.heads] = of_part.totals[row];
                   }
                   of_part.end(shape, count, false, [&](int64_t row, int64_t d, Lanes sums) {
                       const int64_t head = piece.kv_head * group + row % group;
                       store(partial_at(row) + 2 * shape.heads + head * shape.value_dim() + d, sums);
                   });
               });
}

}  // namespace trioserve
