// Collectives of ranks on one host, through memory that all of them have mapped.
//
// For each rank there is a counter of how often it has arrived, and two slots, used in turn. A rank writes a slot, arrives, and
// waits until all others have arrived as often; then it reads theirs. Who arrives once more has read what came before:
// so the slot before the last one can be written again, and one meeting is enough for each piece that fits a slot. Copied
// are small pieces, which are read while they are in the caches; what was written into the slot at once is one piece.
//
// The system wakes a rank where the one that wakes it runs, and two that share a CPU and wait for each other stay there,
// however idle the others are: a rank that finds itself so moves, and may then run everywhere again.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "collectives.h"
#include "waiting.h"

namespace trioserve {

enum SumDtype : int32_t { SUM_FLOAT32 = 0, SUM_BFLOAT16 = 1, SUM_FLOAT16 = 2 };

// Zeros at first. Others read arrived from outside, to tell which rank is missing.
struct Arrivals {
    alignas(64) std::atomic<uint32_t> arrived;
    int32_t votes[2];  // by slot; not 0: the step is abandoned
    int32_t cpu;       // on which the rank was then
    alignas(64) std::atomic<int> asleep;  // who wait for this rank
};
static_assert(sizeof(Arrivals) == 128, "as in shared_memory.py");

class SharedMemory {
public:
    static constexpr int64_t SLOT_BYTES = 1 << 22, PIECE_BYTES = 1 << 18;
    static int64_t byte_count(int32_t size) { return size * (int64_t(sizeof(Arrivals)) + 2 * SLOT_BYTES); }

    // memory: byte_count(size), the same for all ranks. It stays the caller's.
    SharedMemory(void* memory, int32_t rank, int32_t size);
    SharedMemory(const SharedMemory&) = delete;
    SharedMemory& operator=(const SharedMemory&) = delete;

    // Null if so many bytes do not fit.
    void* room(int64_t bytes) const { return bytes <= SLOT_BYTES ? slot_of(rank_) : nullptr; }
    // Added in float32, in the order of the ranks, and rounded once.
    bool sum(SumDtype dtype, const void* own, int64_t count, bool is_abandoned, void* total);
    void gather(const void* own, int64_t bytes, void* all);

    const Collectives& collectives() const { return collectives_; }
    // That sums and gatherings took so far, waiting included.
    double seconds() const { return seconds_; }

private:
    // Parts of a layer are not equally large, and to sleep for the difference costs as much again.
    static constexpr int SPINS_MAX = 5000;

    template <class T>
    bool sum_of(const T* own, int64_t count, bool is_abandoned, T* total);
    template <class T>
    void add_up(int64_t count, T* total) const;
    bool meet(bool is_abandoned);
    void move_apart();
    char* slot_of(int32_t rank) const { return slots_ + (2 * rank + turn()) * SLOT_BYTES; }
    uint32_t turn() const { return meetings_ % 2; }

    Arrivals* const arrivals_;
    char* const slots_;
    const int32_t rank_, size_;
    uint32_t meetings_ = 0;  // that are over
    double seconds_ = 0;
    Patience patience_{SPINS_MAX};
    const Collectives collectives_;
    std::vector<int> cpus_;  // that we may use, if each rank can have one
};

}  // namespace trioserve
