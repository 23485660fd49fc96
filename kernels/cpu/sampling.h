// The next token of a row of logits: what trioserve/model/sampler.py says, in the same order, for one row at a time.
//
// Where the two may differ: weights are not divided by their sum here and `exp` is another, so a weight's last bit or
// two (about 1e-7 of it) may, and with it a token whose weight lies as near to a filter's border, or whose clock rings
// as near to the first one's. The random bits of the clocks are the same; the logarithm is the C library's (1e-16).
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "simd.h"
#include "token_masks.h"

namespace trioserve {

constexpr int DRAW_TILES = 512;  // as in trioserve/model/gumbel.py
constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();
// Where a mask leaves one of so many tokens, or fewer, each is looked at by itself, and the rest of the row not at all.
constexpr int64_t FEW_SHARE = 8;

// Of one row. Fields are those of native.py. Its lists lie one behind the other in Step's sampling_ids: the tokens of
// logit_bias (their biases lie in sampling_biases), tokens that may not be sampled, and the request's known tokens, the
// output last, as far as penalties need them.
struct Sampling {
    uint64_t seed;
    double top_p;
    int64_t position;
    const uint32_t* mask;  // of token_masks.h; null: every token may be sampled
    float temperature, min_p, repetition_penalty, presence_penalty, frequency_penalty;
    int32_t top_k;  // 0: off
    int32_t ids_first, biases_first, bias_count, hidden_count, seen_count, output_count;
    int32_t top_count;       // of the most probable tokens, for wants_logprobs
    int32_t wants_logprobs;
    int32_t needs_logits;    // 0: the largest logit and nothing else, which is found while logits are computed
};

enum Flaw : int32_t { NO_FLAW = 0, NOT_FINITE = 1, NOTHING_LEFT = 2, NOTHING_ALLOWED = 3 };

// --- random numbers: gumbel.py says what they are ---------------------------------------------------------------------

constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15;

inline uint64_t mixed(uint64_t state) {
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9;
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB;
    return state ^ (state >> 31);
}

inline uint64_t draw_word(uint64_t seed, int64_t position) {
    return mixed(mixed(seed + GAMMA) + uint64_t(position + 1) * GAMMA);
}

inline double exponential(uint64_t word, int64_t index) {
    return -std::log((double(mixed(word + uint64_t(index + 1) * GAMMA) >> 12) + 0.5) / 4503599627370496.0);
}

// --- passes over a row ---------------------------------------------------------------------------------------------------

inline float largest_of(const float* values, int64_t count) {
    Lanes largest = set(MINUS_INFINITY);
    int64_t index = 0;
    for (; index + LANES <= count; index += LANES) largest = max(largest, load(values + index));
    float best = max_of(largest);
    for (; index < count; index++) best = std::max(best, values[index]);
    return best;
}

inline int32_t first_of(const float* values, float value) {
    int32_t index = 0;
    while (values[index] != value) index++;
    return index;
}

// exp((score - best) / temperature), padded with zeros to LANES. A score of minus infinity gives 0.
inline void weigh(const float* scores, int64_t count, float temperature, float best, float* weights) {
    const Lanes divisor = set(temperature), highest = set(best / temperature);
    int64_t index = 0;
    for (; index + LANES <= count; index += LANES)
        store(weights + index, exp(sub(div(load(scores + index), divisor), highest)));
    if (index == count) return;
    alignas(64) float rest[LANES];
    for (int lane = 0; lane < LANES; lane++) rest[lane] = index + lane < count ? scores[index + lane] : MINUS_INFINITY;
    store(weights + index, exp(sub(div(load(rest), divisor), highest)));
}

// Of values that are at least `limit`: their sum, and how many they are.
inline double sum_at_least(const float* values, int64_t count, float limit) {
    alignas(64) double lanes[LANES] = {};
    WideLanes sums = load(lanes);
    int64_t index = 0;
    for (; index + LANES <= count; index += LANES) sums = add(sums, cut_below(load(values + index), set(limit)));
    store(lanes, sums);
    double sum = 0;
    for (; index < count; index++) sum += values[index] >= limit ? values[index] : 0.0f;
    for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
    return sum;
}

inline double count_at_least(const float* values, int64_t count, float limit) {
    int32_t found = 0;
    for (int64_t index = 0; index < count; index++) found += values[index] >= limit;
    return found;
}

// Copies the values that are at least `limit`, or with IS_UPPER false those below; `kept` may be `values`. Returns how
// many they are.
template <bool IS_UPPER>
inline int64_t keep(const float* values, int64_t count, float limit, float* kept) {
    int64_t kept_count = 0, index = 0;
    for (; index + LANES <= count; index += LANES)
        kept_count += store_kept<IS_UPPER>(kept + kept_count, load(values + index), set(limit));
    for (; index < count; index++) {
        const float value = values[index];
        kept[kept_count] = value;
        kept_count += (value >= limit) == IS_UPPER;
    }
    return kept_count;
}

// --- filters ---------------------------------------------------------------------------------------------------------------

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

// The least of the values for which all larger ones together measure less than `wanted`: by count_at_least the wanted-th
// largest, by sum_at_least the least of a nucleus. values: 0 to 1, at least one; they are changed.
//
// Radix selection (Knuth, The Art of Computer Programming 3, 5.2.2) with a bit for a digit, the highest first: floats of
// 0 and more are in the order of their bits. What a bit has ruled out is not looked at again, so all bits together cost
// a few passes over the row.
inline float select(float* values, int64_t count, double wanted, double (*measure)(const float*, int64_t, float)) {
    constexpr int HIGHEST_BIT = 29;  // of 1.0
    uint32_t prefix = 0;
    double above = 0;
    for (int bit = HIGHEST_BIT; bit >= 0 && count > 1; bit--) {
        const uint32_t with_bit = prefix | uint32_t(1) << bit;
        const float middle = float_of(with_bit);
        const int64_t upper_count = int64_t(count_at_least(values, count, middle));
        if (upper_count == 0) continue;
        const double upper = upper_count == count ? 0 : measure(values, count, middle);
        if (upper_count == count) {
            prefix = with_bit;
        } else if (above + upper >= wanted) {
            prefix = with_bit;
            count = keep<true>(values, count, middle, values);
        } else {
            above += upper;
            count = keep<false>(values, count, middle, values);
        }
    }
    return values[0];
}

// What a weight must reach to pass min_p, top_k and top_p. weights: padded with zeros, the largest is 1. work: as long.
inline float threshold_of(const Sampling& sampling, const float* weights, int64_t padded, int64_t vocab, float* work) {
    float threshold = sampling.min_p;
    if (sampling.top_k > 0 && sampling.top_k < vocab) {
        const int64_t count = keep<true>(weights, padded, std::max(threshold, std::numeric_limits<float>::min()), work);
        if (count > sampling.top_k)
            threshold = std::max(threshold, select(work, count, sampling.top_k, count_at_least));
    }
    if (sampling.top_p >= 1.0) return threshold;
    const double left = sum_at_least(weights, padded, threshold);
    // All weights below this one together hold less than 1 - top_p: the nucleus ends above.
    const float least = float((1.0 - sampling.top_p) * left / double(vocab)) * 0.999f;
    const int64_t count = keep<true>(weights, padded, std::max(threshold, least), work);
    return std::max(threshold, select(work, count, sampling.top_p * left, sum_at_least));
}

// --- one row -----------------------------------------------------------------------------------------------------------------

// One thread's memory for a row. marks are zeros between two rows.
struct SamplingScratch {
    float *scores, *weights, *work;
    int32_t *marks, *allowed;
};

inline bool is_adjusted(const Sampling& sampling) {
    return sampling.bias_count + sampling.hidden_count + sampling.seen_count > 0;
}

// Whether the largest logit wins if its token is allowed, and nothing else is asked.
inline bool is_largest_wanted(const Sampling& sampling) {
    return sampling.temperature == 0.0f && !is_adjusted(sampling) && !sampling.wants_logprobs;
}

// Bias, hidden tokens, penalties; roundings are those of float32 operations one by one. Ids outside the vocabulary are
// nobody's. Only scores of the ids are read and written. hides: false leaves hidden tokens as they are.
inline void adjust(const Sampling& sampling, const int32_t* ids, const float* biases, int64_t vocab, bool hides,
                   float* scores, int32_t* marks) {
    const auto is_there = [=](int32_t id) { return id >= 0 && id < vocab; };
    for (int32_t index = 0; index < sampling.bias_count; index++)
        if (is_there(ids[index])) scores[ids[index]] += biases[index];
    ids += sampling.bias_count;
    if (hides)
        for (int32_t index = 0; index < sampling.hidden_count; index++)
            if (is_there(ids[index])) scores[ids[index]] = MINUS_INFINITY;
    ids += sampling.hidden_count;
    if (sampling.repetition_penalty != 1.0f) {
        for (int32_t index = 0; index < sampling.seen_count; index++) {
            const int32_t id = ids[index];
            if (!is_there(id) || marks[id] != 0) continue;
            marks[id] = 1;
            scores[id] = scores[id] > 0 ? scores[id] / sampling.repetition_penalty
                                        : scores[id] * sampling.repetition_penalty;
        }
        for (int32_t index = 0; index < sampling.seen_count; index++)
            if (is_there(ids[index])) marks[ids[index]] = 0;
    }
    if (sampling.presence_penalty == 0.0f && sampling.frequency_penalty == 0.0f) return;
    const int32_t* output = ids + sampling.seen_count - sampling.output_count;
    for (int32_t index = 0; index < sampling.output_count; index++)
        if (is_there(output[index])) marks[output[index]]++;
    for (int32_t index = 0; index < sampling.output_count; index++) {
        const int32_t id = output[index];
        if (!is_there(id) || marks[id] == 0) continue;
        // Through double, so that no multiplication is joined to an addition; the results are those of float32.
        const float frequency = float(double(sampling.frequency_penalty) * marks[id]);
        const float penalty = float(double(frequency) + double(sampling.presence_penalty));
        scores[id] = float(double(scores[id]) - double(penalty));
        marks[id] = 0;
    }
}

// The race of gumbel.py: between the tiles by their sums, then inside the one that won. weights: padded with zeros.
inline int32_t draw(const float* weights, int64_t vocab, float threshold, uint64_t word) {
    alignas(64) double tiles[DRAW_TILES] = {};
    for (int64_t first = 0; first < vocab; first += LANES) {
        double* sums = tiles + first % DRAW_TILES;
        store(sums, add(load(sums), cut_below(load(weights + first), set(threshold))));
    }
    int tile = 0;
    double best = -1;
    for (int index = 0; index < DRAW_TILES; index++) {
        if (tiles[index] == 0) continue;
        const double speed = tiles[index] / exponential(word, index);
        if (speed > best) {
            best = speed;
            tile = index;
        }
    }
    int64_t id = tile;
    best = -1;
    for (int64_t index = tile; index < vocab; index += DRAW_TILES) {
        if (weights[index] < threshold || weights[index] == 0) continue;
        const double speed = double(weights[index]) / exponential(word, DRAW_TILES + index);
        if (speed > best) {
            best = speed;
            id = index;
        }
    }
    return int32_t(id);
}

// The same race among `count` tokens, the lowest id first, with the weights of these alone: the same token wins.
inline int32_t draw_among(const float* weights, const int32_t* ids, int64_t count, float threshold, uint64_t word) {
    double tiles[DRAW_TILES] = {};
    for (int64_t index = 0; index < count; index++)
        if (weights[index] >= threshold) tiles[ids[index] % DRAW_TILES] += weights[index];
    int tile = 0;
    double best = -1;
    for (int index = 0; index < DRAW_TILES; index++) {
        if (tiles[index] == 0) continue;
        const double speed = tiles[index] / exponential(word, index);
        if (speed > best) {
            best = speed;
            tile = index;
        }
    }
    int32_t id = ids[0];
    best = -1;
    for (int64_t index = 0; index < count; index++) {
        if (ids[index] % DRAW_TILES != tile || weights[index] < threshold || weights[index] == 0) continue;
        const double speed = double(weights[index]) / exponential(word, DRAW_TILES + ids[index]);
        if (speed > best) {
            best = speed;
            id = ids[index];
        }
    }
    return id;
}

// Of finite logits: what the logarithms of probabilities are below them.
inline float log_of_sum(const float* logits, int64_t vocab, float* weights) {
    const float best = largest_of(logits, vocab);
    weigh(logits, vocab, 1.0f, best, weights);
    return best + float(std::log(sum_at_least(weights, (vocab + LANES - 1) / LANES * LANES, 0.0f)));
}

// The `count` largest logits, best first, of equals the lowest ids; beyond the vocabulary nothing is written.
inline void find_largest(const float* logits, int64_t vocab, int32_t count, float* values, int32_t* ids) {
    int32_t found = 0;
    const auto insert = [&](int64_t id) {
        int32_t place = found < count ? found++ : count - 1;
        for (; place > 0 && values[place - 1] < logits[id]; place--) {
            values[place] = values[place - 1];
            ids[place] = ids[place - 1];
        }
        values[place] = logits[id];
        ids[place] = int32_t(id);
    };
    if (count == 0) return;
    for (int64_t first = 0; first < vocab; first += LANES) {
        const int64_t end = std::min<int64_t>(first + LANES, vocab);
        if (found == count && end - first == LANES && max_of(load(logits + first)) <= values[count - 1]) continue;
        for (int64_t id = first; id < end; id++)
            if (found < count || logits[id] > values[count - 1]) insert(id);
    }
}

// logprobs: that of token, then those of the best top_count; top_ids: theirs.
inline void write_logprobs(const float* logits, int64_t vocab, int32_t token, int32_t top_count, float* weights,
                           float* logprobs, int32_t* top_ids) {
    const float below = log_of_sum(logits, vocab, weights);
    find_largest(logits, vocab, top_count, logprobs + 1, top_ids);
    logprobs[0] = logits[token] - below;
    for (int64_t index = 1; index <= std::min<int64_t>(top_count, vocab); index++) logprobs[index] -= below;
}

// The next token of `count` scores, which may lie in scratch.scores or scratch.work. ids: theirs, ascending; null: each
// one's place.
inline Flaw choose_token(const Sampling& sampling, const float* scores, const int32_t* ids, int64_t count,
                         const SamplingScratch& scratch, int32_t* token) {
    const float best = largest_of(scores, count);
    if (best == MINUS_INFINITY) return NOTHING_LEFT;
    if (sampling.temperature == 0.0f) {
        const int32_t place = first_of(scores, best);
        *token = ids == nullptr ? place : ids[place];
        return NO_FLAW;
    }
    weigh(scores, count, sampling.temperature, best, scratch.weights);
    const int64_t padded = (count + LANES - 1) / LANES * LANES;
    const float threshold = threshold_of(sampling, scratch.weights, padded, count, scratch.work);
    const uint64_t word = draw_word(sampling.seed, sampling.position);
    *token = ids == nullptr ? draw(scratch.weights, count, threshold, word)
                            : draw_among(scratch.weights, ids, count, threshold, word);
    return NO_FLAW;
}

// As sample_row, of the tokens that the row's mask allows, and of nothing else. hides: whether hidden tokens are hidden.
inline Flaw sample_allowed(const Sampling& sampling, const float* logits, int64_t vocab, const int32_t* ids,
                           const float* biases, bool hides, const SamplingScratch& scratch, int32_t* token) {
    const int64_t count = allowed_count(sampling.mask, vocab);
    if (count == 0) return NOTHING_ALLOWED;
    if (count * FEW_SHARE > vocab) {
        const float* scores = logits;
        if (is_adjusted(sampling)) {
            std::memcpy(scratch.scores, logits, sizeof(float) * vocab);
            adjust(sampling, ids, biases, vocab, hides, scratch.scores, scratch.marks);
            scores = scratch.scores;
        }
        keep_allowed(sampling.mask, scores, vocab, MINUS_INFINITY, scratch.scores);
        return choose_token(sampling, scratch.scores, nullptr, vocab, scratch, token);
    }
    write_allowed(sampling.mask, vocab, scratch.allowed);
    const float* scores = logits;
    if (is_adjusted(sampling)) {
        const int32_t adjusted_count = sampling.bias_count + sampling.hidden_count + sampling.seen_count;
        for (int32_t index = 0; index < adjusted_count; index++)
            if (ids[index] >= 0 && ids[index] < vocab) scratch.scores[ids[index]] = logits[ids[index]];
        for (int64_t index = 0; index < count; index++)
            scratch.scores[scratch.allowed[index]] = logits[scratch.allowed[index]];
        adjust(sampling, ids, biases, vocab, hides, scratch.scores, scratch.marks);
        scores = scratch.scores;
    }
    for (int64_t index = 0; index < count; index++) scratch.work[index] = scores[scratch.allowed[index]];
    return choose_token(sampling, scratch.work, scratch.allowed, count, scratch, token);
}

// The next token; logits are finite, and stay as they are. ids: the row's lists. NOTHING_LEFT: no token may be sampled.
// NOTHING_ALLOWED: the row's mask has none. Hidden tokens come if a mask leaves no other one: a response that is complete
// cannot go on for min_tokens' sake.
inline Flaw sample_row(const Sampling& sampling, const float* logits, int64_t vocab, const int32_t* ids,
                       const float* biases, const SamplingScratch& scratch, int32_t* token) {
    if (sampling.mask != nullptr) {
        const Flaw flaw = sample_allowed(sampling, logits, vocab, ids, biases, true, scratch, token);
        if (flaw != NOTHING_LEFT) return flaw;
        return sample_allowed(sampling, logits, vocab, ids, biases, false, scratch, token);
    }
    const float* scores = logits;
    if (is_adjusted(sampling)) {
        std::memcpy(scratch.scores, logits, sizeof(float) * vocab);
        adjust(sampling, ids, biases, vocab, true, scratch.scores, scratch.marks);
        scores = scratch.scores;
    }
    return choose_token(sampling, scores, nullptr, vocab, scratch, token);
}

}  // namespace trioserve
