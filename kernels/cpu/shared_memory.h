// Collectives of ranks on one host, through memory that all ranks have mapped.
//
// Each rank has a counter of its arrivals, and two slots, used in turn. A rank writes a slot, arrives, and waits until all
// others have arrived as often. Then it reads their slots. A rank that arrives once more has read the previous slots. So the
// slot before the last one can be overwritten, and one meeting is enough for each piece that fits a slot. Copies are made in
// small pieces, which are read while they are in the caches. Values that were written directly into the slot are one piece.
//
// The system wakes a rank on the CPU of the rank that wakes it. Two ranks that share a CPU and wait for each other stay there,
// even if other CPUs are idle. A rank that notices this moves, and may then run on any CPU again.
#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "collectives.h"
#include "waiting.h"

namespace trioserve {

enum SumDtype : int32_t { SUM_FLOAT32 = 0, SUM_BFLOAT16 = 1, SUM_FLOAT16 = 2 };

// Zeros at first. Other processes read `arrived` to find the rank that is missing.
struct Arrivals {
    alignas(64) std::atomic<uint32_t> arrived;
    int32_t votes[2];  // for each slot, nonzero if the step is abandoned
    int32_t cpu;       // CPU of the rank at its arrival
    alignas(64) std::atomic<int> asleep;  // number of sleepers that wait for this rank
};
static_assert(sizeof(Arrivals) == 128, "as in shared_memory.py");

class SharedMemory {
public:
    static constexpr int64_t SLOT_BYTES = 1 << 22, PIECE_BYTES = 1 << 18;
    static int64_t byte_count(int32_t size) { return size * (int64_t(sizeof(Arrivals)) + 2 * SLOT_BYTES); }

    // memory: byte_count(size) bytes, the same for all ranks. The caller keeps ownership.
    SharedMemory(void* memory, int32_t rank, int32_t size);
    SharedMemory(const SharedMemory&) = delete;
    SharedMemory& operator=(const SharedMemory&) = delete;

    // Returns null if the bytes do not fit.
    void* room(int64_t bytes) const { return bytes <= SLOT_BYTES ? slot_of(rank_) : nullptr; }
    // Sums in float32, in the order of the ranks, and rounds once.
    bool sum(SumDtype dtype, const void* own, int64_t count, bool is_abandoned, void* total);
    void gather(const void* own, int64_t bytes, void* all);

    const Collectives& collectives() const { return collectives_; }
    // Seconds that sums and gathers have taken so far, including waiting.
    double seconds() const { return seconds_; }

private:
    // Parts of a layer differ in size. Sleeping for the difference would cost as much again.
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
    uint32_t meetings_ = 0;  // number of finished meetings
    double seconds_ = 0;
    Patience patience_{SPINS_MAX};
    const Collectives collectives_;
    std::vector<int> cpus_;  // usable CPUs, if there is one for each rank
};

}  // namespace trioserve
