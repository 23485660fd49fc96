// The tokens that a row may sample, as bits: token i if bit i % 32 of word i / 32 is set. Loops read whole words where that is
// enough.
#pragma once

#include <immintrin.h>
#include <sched.h>
#include <time.h>

#include <cstdint>

#include "simd.h"

namespace trioserve {

constexpr int MASK_BITS = 32;

// Returns word `index` of the mask, without bits beyond the vocabulary.
inline uint32_t mask_word(const uint32_t* mask, int64_t index, int64_t vocab) {
    const int64_t left = vocab - index * MASK_BITS;
    return left >= MASK_BITS ? mask[index] : mask[index] & ((uint32_t(1) << left) - 1);
}

inline bool is_allowed(const uint32_t* mask, int64_t id) { return mask[id / MASK_BITS] >> (id % MASK_BITS) & 1; }

inline int64_t allowed_count(const uint32_t* mask, int64_t vocab) {
    const int64_t whole = vocab / MASK_BITS;
    int64_t count = 0;
    for (int64_t index = 0; index < whole; index++) count += __builtin_popcount(mask[index]);
    return whole * MASK_BITS == vocab ? count : count + __builtin_popcount(mask_word(mask, whole, vocab));
}

// Writes the allowed tokens, lowest first.
inline void write_allowed(const uint32_t* mask, int64_t vocab, int32_t* ids) {
    for (int64_t index = 0; index * MASK_BITS < vocab; index++)
        for (uint32_t word = mask_word(mask, index, vocab); word != 0; word &= word - 1)
            *ids++ = int32_t(index * MASK_BITS) + __builtin_ctz(word);
}

// scores[i] if i is allowed, and `other` if not. `to` may be `scores`.
inline void keep_allowed(const uint32_t* mask, const float* scores, int64_t vocab, float other, float* to) {
    static_assert(MASK_BITS == 2 * LANES, "two vectors to a word");
    const Lanes others = set(other);
    int64_t first = 0;
    for (; first + MASK_BITS <= vocab; first += MASK_BITS) {
        const uint32_t word = mask[first / MASK_BITS];
        store(to + first, where_bits(word & 0xFFFF, load(scores + first), others));
        store(to + first + LANES, where_bits(word >> LANES, load(scores + first + LANES), others));
    }
    for (; first < vocab; first++) to[first] = is_allowed(mask, first) ? scores[first] : other;
}

// Waits until *filled is not 0. Returns false if *waited_for became 0 earlier. The thread that fills the masks may need this
// core. So after a short spin, this thread yields to threads that are ready, and then sleeps briefly.
inline bool wait_for_masks(const int32_t* filled, const int32_t* waited_for) {
    constexpr int SPINS = 200, YIELDS = 50;  // each phase takes some microseconds
    for (int64_t turn = 0;; turn++) {
        if (__atomic_load_n(filled, __ATOMIC_ACQUIRE) != 0) return true;
        if (waited_for != nullptr && __atomic_load_n(waited_for, __ATOMIC_RELAXED) == 0) return false;
        if (turn < SPINS) {
            _mm_pause();
        } else if (turn < SPINS + YIELDS) {
            sched_yield();
        } else {
            const timespec moment{0, 20'000};
            nanosleep(&moment, nullptr);
        }
    }
}

}  // namespace trioserve
