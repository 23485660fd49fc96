// Waiting until a word of memory changes: the thread spins for a moment, then sleeps.
#pragma once

#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>

namespace trioserve {

// Only threads of this process share the word (THREADS), or other processes too (PROCESSES).
enum class Among { THREADS, PROCESSES };

// How long to spin, which one thread learns from experience. Between two pieces of a step, the other threads arrive within
// microseconds, and waking a sleeping thread costs about ten. Longer spinning takes the core from the event loop. If
// another program computes on one of our cores, the awaited thread often cannot run before we sleep. Then spinning stops
// soon, and is tried again from time to time.
class Patience {
public:
    explicit Patience(int spins_max = 1000) : spins_max_(spins_max) {}

    int spins() { return ++waits_ % WAITS_OF_TRIAL == 0 ? spins_max_ : spins_; }
    void was_enough(int spins) {
        if (spins > SPINS_MIN) spins_ = spins_max_;
    }
    void was_in_vain() { spins_ = std::max(spins_ / 2, SPINS_MIN); }

private:
    static constexpr int SPINS_MIN = 20, WAITS_OF_TRIAL = 32;
    const int spins_max_;
    int spins_ = spins_max_, waits_ = 0;
};

template <Among AMONG>
constexpr int futex_operation(int operation) {
    return AMONG == Among::THREADS ? operation | FUTEX_PRIVATE_FLAG : operation;
}

// asleep: number of threads that sleep until the word changes.
template <Among AMONG>
void wait_while(std::atomic<uint32_t>& word, uint32_t value, std::atomic<int>& asleep, Patience& patience) {
    const int limit = patience.spins();
    for (int spin = 0; spin < limit; spin++) {
        if (word.load(std::memory_order_acquire) != value) return patience.was_enough(spin);
        _mm_pause();
    }
    patience.was_in_vain();
    // This thread counts itself before it checks the word again. The thread that changes the word reads the count afterwards.
    asleep.fetch_add(1);
    while (word.load() == value)
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), futex_operation<AMONG>(FUTEX_WAIT), value, nullptr, nullptr, 0);
    asleep.fetch_sub(1);
}

template <Among AMONG>
void change(std::atomic<uint32_t>& word, uint32_t value, std::atomic<int>& asleep) {
    word.store(value);
    if (asleep.load() > 0)
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), futex_operation<AMONG>(FUTEX_WAKE), INT_MAX, nullptr, nullptr, 0);
}

}  // namespace trioserve
