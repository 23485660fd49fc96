// Samples the next token of a row of logits: the steps of trioserve/model/torch_step/sampler.py in the same order, one row at a time.
//
// There are two differences: weights are not divided by their sum, and `exp` has another implementation. So the last one or
// two bits of a weight may differ, which is about 1e-7 of the weight. The chosen token only differs if a weight is that close
// to a filter's limit, or if two clocks are that close. The random bits of the clocks are equal. Their logarithm comes from the
// C library, with an error of 1e-16.
#pragma once

#include "draws.h"
#include "row_passes.h"
#include "token_masks.h"

namespace trioserve {

// If a mask allows at most this many tokens, each is read individually, and the rest of the row is not read.
constexpr int64_t FEW_SHARE = 4;

// Sampling options of one row, mirrored in native.py. Step's sampling_ids contains the lists of a row in this order: tokens
// of logit_bias (with their biases in sampling_biases), hidden tokens, which must not be sampled, and the request's known
// tokens, output last, if penalties need them.
struct Sampling {
    uint64_t seed;
    double top_p;
    int64_t position;
    const uint32_t* mask;  // see token_masks.h. Null allows all tokens
    float temperature, min_p, repetition_penalty, presence_penalty, frequency_penalty;
    int32_t top_k;  // 0 is off
    int32_t ids_first, biases_first, bias_count, hidden_count, seen_count, output_count;
    int32_t top_count;       // number of most probable tokens, if wants_logprobs
    int32_t wants_logprobs;
    int32_t needs_logits;    // 0: only the largest logit, found while logits are computed
};

enum Flaw : int32_t { NO_FLAW = 0, NOT_FINITE = 1, NOTHING_LEFT = 2, NOTHING_ALLOWED = 3 };

// Returns the smallest weight that passes min_p, top_k and top_p. weights: padded with zeros, the largest is 1. work: memory of the same length.
inline float threshold_of(const Sampling& sampling, const float* weights, int64_t padded, int64_t vocab, float* work) {
    float threshold = sampling.min_p;
    if (sampling.top_k > 0 && sampling.top_k < vocab) {
        const int64_t count = keep<true>(weights, padded, std::max(threshold, std::numeric_limits<float>::min()), work);
        if (count > sampling.top_k)
            threshold = std::max(threshold, select(work, count, sampling.top_k, count_at_least));
    }
    if (sampling.top_p >= 1.0) return threshold;
    const double left = sum_at_least(weights, padded, threshold);
    // All weights below this one have less than 1 - top_p together, so the nucleus ends above it.
    const float least = float((1.0 - sampling.top_p) * left / double(vocab)) * 0.999f;
    const int64_t count = keep<true>(weights, padded, std::max(threshold, least), work);
    return std::max(threshold, select(work, count, sampling.top_p * left, sum_at_least));
}

// Memory of one thread for a row. marks are zeros between two rows.
struct SamplingScratch {
    float *scores, *weights, *work;
    int32_t *marks, *allowed;
};

inline bool is_adjusted(const Sampling& sampling) {
    return sampling.bias_count + sampling.hidden_count + sampling.seen_count > 0;
}

// Returns true if the token with the largest logit is the result, provided that it is allowed, and nothing else is needed.
inline bool is_largest_wanted(const Sampling& sampling) {
    return sampling.temperature == 0.0f && !is_adjusted(sampling) && !sampling.wants_logprobs;
}

// Applies biases, hidden tokens and penalties. Each float32 operation is rounded on its own. Ids outside of the vocabulary are
// ignored. Only scores of the listed ids are read and written. hides: false does not apply hidden tokens.
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
        // Computed in double, so that no multiplication is fused with an addition. The results are those of float32.
        const float frequency = float(double(sampling.frequency_penalty) * marks[id]);
        const float penalty = float(double(frequency) + double(sampling.presence_penalty));
        scores[id] = float(double(scores[id]) - double(penalty));
        marks[id] = 0;
    }
}

// Returns the number to subtract from finite logits to get log-probabilities.
inline float log_of_sum(const float* logits, int64_t vocab, float* weights) {
    const float best = largest_of(logits, vocab);
    weigh(logits, vocab, 1.0f, best, weights);
    return best + float(std::log(sum_at_least(weights, (vocab + LANES - 1) / LANES * LANES, 0.0f)));
}

// Finds the `count` largest logits, best first, the lowest id first among equals. Beyond the vocabulary nothing is written.
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

// logprobs: log probability of the token, then those of the top_count best tokens. top_ids: ids of the best tokens.
inline void write_logprobs(const float* logits, int64_t vocab, int32_t token, int32_t top_count, float* weights,
                           float* logprobs, int32_t* top_ids) {
    const float below = log_of_sum(logits, vocab, weights);
    find_largest(logits, vocab, top_count, logprobs + 1, top_ids);
    logprobs[0] = logits[token] - below;
    for (int64_t index = 1; index <= std::min<int64_t>(top_count, vocab); index++) logprobs[index] -= below;
}

// Samples from `count` scores, which may be in scratch.scores or scratch.work. ids: the ascending token ids of the scores. If
// null, the index of a score is its token id.
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

// Like sample_row, but reads only tokens that the row's mask allows. hides: true to apply hidden tokens.
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

// Samples the next token of finite logits, which are not changed. ids: the row's lists. Returns NOTHING_LEFT if no token may be
// sampled, and NOTHING_ALLOWED if the row's mask is empty. If the mask allows only hidden tokens, they are sampled: a complete
// response cannot continue just to reach min_tokens.
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
