// Turning scores into weights, and joining parts of a context. A decode's row and a prompt's row use the same arithmetic in
// the same order, so a row has the same bits in both.
//
// A context is split into parts at multiples of PART_TOKENS, each with its own softmax. A part is computed span by span with
// an online softmax (Milakov, Gimelshein: Online normalizer calculation, arXiv 1805.02867): sums are rescaled when a score
// has grown by GROWTH_MAX. Weights are summed in groups of four. The results are summed in groups of sixteen, and the results
// of these groups one by one.
#pragma once

#include <limits>

#include "simd.h"

namespace trioserve {

constexpr int SPAN = 64;  // context tokens that are computed at a time
#if defined(__AMX_BF16__)
constexpr int PART_TOKENS = 256;  // a multiple of SPAN. At the end of a part, a prompt's tiles are summed
#else
constexpr int PART_TOKENS = 128;
#endif

constexpr float LOG2_E = 1.44269504f;
constexpr float NOTHING_SEEN = -1e30f;  // largest score before any token. Not infinite: infinity - infinity is NaN
constexpr float GROWTH_MAX = 5.0f;      // growth of a score from which on sums are rescaled

// Prepares scores so that the scaling that follows gives cap * tanh(score * scale / cap).
class ScoreCap {
public:
    // cap: 0 does not change scores.
    ScoreCap(float cap, float scale) : is_there_(cap > 0), factor_(set(2 * scale / cap)), cap_(set(cap / scale)) {}
    bool is_there() const { return is_there_; }
    Lanes of(Lanes score) const {
        const Lanes power = exp(mul(score, factor_));
        return mul(cap_, sub(set(1.0f), div(set(2.0f), add(set(1.0f), power))));  // keeps NaN
    }

private:
    bool is_there_;
    Lanes factor_, cap_;
};

// Subtracts a slope times a distance from a score. ahead: position of the token minus position of the row.
inline Lanes sloped(Lanes score, Lanes slope, Lanes ahead) { return fma(slope, ahead, score); }

// Weights are 2 ** ((score * scale - best) * LOG2_E), with the precision of their type T.
template <class T>
class Weighing {
public:
    static constexpr bool NEEDS_BEST = true;          // if false, are_good() checks that `best` was suitable
    static Lanes base(Lanes score) { return score; }  // returns a valid `best` close to this score
    static Lanes kept(Lanes growth) { return exp(sub(zero(), growth)); }  // factor for earlier weights when `best` grows by this amount

    Weighing(Lanes scale, Lanes best) : step_(mul(scale, set(LOG2_E))), start_(mul(best, set(-LOG2_E))) {}
    Lanes weight(Lanes score) const {
        score = fma(score, step_, start_);
        if constexpr (sizeof(T) == sizeof(float)) return power_of_two(score);
        return cut(power_of_two_to_cut(score));
    }
    // Computes the weights of four tokens for sixteen rows: one token after the other, or two side by side. Returns their sum.
    Lanes write(T* to, Lanes a, Lanes b, Lanes c, Lanes d) {
        a = weight(a), b = weight(b), c = weight(c), d = weight(d);
        if constexpr (sizeof(T) == sizeof(float)) {
            store(to, a);
            store(to + LANES, b);
            store(to + 2 * LANES, c);
            store(to + 3 * LANES, d);
        } else {
            store_cut_in_turn(to, a, b);
            store_cut_in_turn(to + 2 * LANES, c, d);
        }
        return add(add(a, b), add(c, d));
    }
    // total: sum of all weights so far. It is NaN if a score was not finite.
    Lanes checked(Lanes total) const { return total; }
    bool are_good(Lanes) const { return true; }

private:
    Lanes step_, start_;
};

#if defined(__AVX512VBMI__) && defined(__AVX512BF16__)
// A fixed-point logarithm with 7 fractional bits has almost the same bits as the bfloat16 of its power. They differ by how much
// 2 ** a - 1 is less than a between whole numbers, which a table contains in units of 1 / 128. (Like N. Schraudolph, A fast,
// compact approximation of the exponential function, Neural Computation 11, 1999, which has no table.) It needs a third of
// the floating-point multiplications and comparisons, of which AMX leaves one per cycle. The error of a weight is 0.24 %,
// compared with 0.16 % by rounding.
template <>
class Weighing<bf16> {
public:
    static constexpr bool NEEDS_BEST = false;
    // Returns the logarithm of a power of 2, so the significands of weights and sums do not depend on the subtracted number.
    static Lanes base(Lanes score) { return mul(round_whole(mul(score, set(LOG2_E))), set(1.0f / LOG2_E)); }
    static Lanes kept(Lanes growth) { return scale_by_power(set(1.0f), round_whole(mul(growth, set(-LOG2_E)))); }

    Weighing(Lanes scale, Lanes best)
        : step_(mul(scale, set(UNITS))), start_(fma(best, set(-UNITS), set(ZERO + 127 * 128))) {}
    Lanes weight(Lanes score) const {
        const __m512i bits = _mm512_castps_si512(max(set(ZERO), fma(score, step_, start_)));
        const __m512i less = _mm512_maskz_permutexvar_epi8(0x1111111111111111, _mm512_srli_epi32(bits, 1),
                                                           _mm512_load_si512(LESS));
        const Lanes found = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_sub_epi32(bits, less), 16));
        return _mm512_mask_blend_ps(strange(bits), found, set(std::numeric_limits<float>::quiet_NaN()));
    }
    Lanes write(bf16* to, Lanes a, Lanes b, Lanes c, Lanes d) {
        const __m512i first = pair(a, b), last = pair(c, d);
        _mm512_storeu_si512(to, first);
        _mm512_storeu_si512(to + 2 * LANES, last);
        return add(sum_of_pairs(first), sum_of_pairs(last));
    }
    Lanes checked(Lanes total) const {
        return _mm512_mask_blend_ps(strange(bits_), total, set(std::numeric_limits<float>::quiet_NaN()));
    }
    bool are_good(Lanes total) const {
        return (strange(bits_) | _mm512_cmp_ps_mask(total, set(TOTAL_MAX), _CMP_NLE_UQ)) == 0;
    }

private:
    static constexpr float UNITS = 128 * LOG2_E;
    static constexpr float ZERO = 8388608.0f;  // 2 ** 23. A number added to it is in the lower bits, as a whole number
    static constexpr float TOTAL_MAX = 1e4f;   // far below the limits of float32 and of a weight's bits
    // Indexed by the upper 6 bits of the fraction.
    alignas(64) static constexpr uint8_t LESS[64] = {
        0, 1, 1, 2, 2, 3, 4, 4, 5, 5, 5, 6, 6, 7, 7, 8, 8, 8, 9, 9, 9, 9, 10, 10, 10, 10, 10, 11, 11, 11,
        11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 11, 10, 10, 10, 10, 10, 9, 9, 9, 8, 8, 8, 7, 7, 6, 6, 5, 5,
        4, 3, 3, 2, 1, 1};

    // Bits outside of ZERO and its 15 lower bits: a NaN score, or a score of 90 or more above `best`.
    static __mmask16 strange(__m512i bits) { return _mm512_test_epi32_mask(bits, _mm512_set1_epi32(~0x4b007fff)); }
    static Lanes sum_of_pairs(__m512i pairs) {
        return _mm512_dpbf16_ps(zero(), (__m512bh)pairs, (__m512bh)_mm512_set1_epi16(0x3f80));
    }
    __m512i pair(Lanes even, Lanes odd) {
        even = max(set(ZERO), fma(even, step_, start_));  // this order of arguments keeps NaN
        odd = max(set(ZERO), fma(odd, step_, start_));
        const __m512i even_bits = _mm512_castps_si512(even), odd_bits = _mm512_castps_si512(odd);
        bits_ = _mm512_ternarylogic_epi32(bits_, even_bits, odd_bits, 0xfe);  // or
        const __m512i to_upper_halves = _mm512_set4_epi32(0x0d0c'0000, 0x0908'0000, 0x0504'0000, 0x0100'0000);
        const __m512i logarithms = _mm512_mask_shuffle_epi8(even_bits, 0xcccccccccccccccc, odd_bits, to_upper_halves);
        const __m512i places = _mm512_multishift_epi64_epi8(_mm512_set1_epi64(0x0031'0021'0011'0001), logarithms);
        const __m512i less = _mm512_maskz_permutexvar_epi8(0x5555555555555555, places, _mm512_load_si512(LESS));
        return _mm512_sub_epi16(logarithms, less);
    }

    Lanes step_, start_;
    __m512i bits_ = _mm512_setzero_si512();
};
#endif

// Sums a span's weights, sixteen tokens per vector, in the order that is described above.
inline float sum_of_span(const Lanes* weights) {
    Lanes fours[4] = {weights[0], weights[1], weights[2], weights[3]};
    transpose_quarters(fours);
    const Lanes sums = add(add(fours[0], fours[1]), add(fours[2], fours[3]));
    alignas(16) float sixteens[4];
    _mm_store_ps(sixteens, _mm_add_ps(_mm_add_ps(_mm_add_ps(quarter<0>(sums), quarter<1>(sums)), quarter<2>(sums)),
                                      quarter<3>(sums)));
    return ((sixteens[0] + sixteens[1]) + sixteens[2]) + sixteens[3];
}

// The term that sinks add to the totals of all parts. If it is far above all scores, it is infinite, and the result is 0.
inline Lanes weight_of_sink(Lanes sink, Lanes best) { return exp(sub(sink, best)); }

// Joins two parts of a context: the factors on each part's weights and sums.
template <class T>
struct Joint {
    Lanes best, first, second;

    Joint(Lanes first_best, Lanes second_best)
        : best(max(first_best, second_best)), first(Weighing<T>::kept(sub(best, first_best))),
          second(Weighing<T>::kept(sub(best, second_best))) {}
    Lanes of(Lanes first_sum, Lanes second_sum) const { return fma(second_sum, second, mul(first_sum, first)); }
};

}  // namespace trioserve
