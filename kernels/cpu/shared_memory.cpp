#include "shared_memory.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>

#include "quantized.h"
#include "simd.h"

namespace trioserve {
namespace {

inline void store(f16* to, Lanes a) {
#if defined(__AVX512F__)
    const __m256i halves = _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT);
    std::memcpy(to, &halves, sizeof halves);
#else
    const __m128i halves[2] = {_mm256_cvtps_ph(a.low, _MM_FROUND_TO_NEAREST_INT),
                               _mm256_cvtps_ph(a.high, _MM_FROUND_TO_NEAREST_INT)};
    std::memcpy(to, halves, sizeof halves);
#endif
}

// Adds the time between its construction and destruction to a total.
class Stopwatch {
public:
    explicit Stopwatch(double& seconds) : seconds_(seconds) {}
    ~Stopwatch() { seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - begun_at_).count(); }

private:
    double& seconds_;
    const std::chrono::steady_clock::time_point begun_at_ = std::chrono::steady_clock::now();
};

std::vector<int> allowed_cpus() {
    std::vector<int> cpus;
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return cpus;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
        if (CPU_ISSET(cpu, &allowed)) cpus.push_back(cpu);
    return cpus;
}

// Moves the calling thread. Returns false if the system refuses.
bool run_on(const int* cpus, size_t count) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (size_t index = 0; index < count; index++) CPU_SET(cpus[index], &set);
    return sched_setaffinity(0, sizeof set, &set) == 0;
}

}  // namespace

SharedMemory::SharedMemory(void* memory, int32_t rank, int32_t size)
    : arrivals_(static_cast<Arrivals*>(memory)),
      slots_(static_cast<char*>(memory) + size * sizeof(Arrivals)),
      rank_(rank),
      size_(size),
      collectives_{this, rank, size,
                   [](void* context, int64_t count) {
                       return static_cast<float*>(static_cast<SharedMemory*>(context)->room(count * sizeof(float)));
                   },
                   [](void* context, const float* own, int64_t count, int32_t is_abandoned, float* total) -> int32_t {
                       return static_cast<SharedMemory*>(context)->sum(SUM_FLOAT32, own, count, is_abandoned != 0, total);
                   },
                   [](void* context, const void* own, int64_t bytes, void* all) {
                       static_cast<SharedMemory*>(context)->gather(own, bytes, all);
                   }},
      cpus_(allowed_cpus()) {
    if (int32_t(cpus_.size()) < size) cpus_.clear();
}

// Moves this rank from a CPU that a lower rank also uses to a CPU that no rank uses.
void SharedMemory::move_apart() {
    const auto is_taken = [&](int cpu, int32_t count) {
        return std::any_of(arrivals_, arrivals_ + count, [=](const Arrivals& other) { return other.cpu == cpu; });
    };
    if (cpus_.empty() || !is_taken(arrivals_[rank_].cpu, rank_)) return;
    const auto free = std::find_if(cpus_.begin(), cpus_.end(), [&](int cpu) { return !is_taken(cpu, size_); });
    if (free == cpus_.end()) return;
    if (!run_on(&*free, 1) || !run_on(cpus_.data(), cpus_.size())) cpus_.clear();
}

// Waits until all ranks have written their slots of this turn. Returns true if one of them reported is_abandoned.
bool SharedMemory::meet(bool is_abandoned) {
    Arrivals& own = arrivals_[rank_];
    own.votes[turn()] = is_abandoned;
    own.cpu = sched_getcpu();
    change<Among::PROCESSES>(own.arrived, meetings_ + 1, own.asleep);
    for (int32_t rank = 0; rank < size_; rank++) {
        Arrivals& other = arrivals_[rank];
        // No rank is more than one meeting ahead of another.
        if (rank != rank_) wait_while<Among::PROCESSES>(other.arrived, meetings_, other.asleep, patience_);
        is_abandoned |= other.votes[turn()] != 0;
    }
    move_apart();
    return is_abandoned;
}

// Sums the slots of this turn.
template <class T>
void SharedMemory::add_up(int64_t count, T* total) const {
    const auto sum_at = [&](int64_t n) {
        const auto of = [&](int32_t rank) { return load(reinterpret_cast<const T*>(slot_of(rank)) + n); };
        Lanes sum = of(0);
        for (int32_t rank = 1; rank < size_; rank++) sum = add(sum, of(rank));
        return sum;
    };
    int64_t n = 0;
    for (; n + LANES <= count; n += LANES) store(total + n, sum_at(n));
    if (n == count) return;
    T last[LANES];
    store(last, sum_at(n));
    std::memcpy(total + n, last, sizeof(T) * (count - n));
}

template <class T>
bool SharedMemory::sum_of(const T* own, int64_t count, bool is_abandoned, T* total) {
    const bool is_there = static_cast<const void*>(own) == slot_of(rank_);
    const int64_t piece = is_there ? count : PIECE_BYTES / int64_t(sizeof(T));
    bool is_anywhere = false;
    for (int64_t first = 0; first == 0 || first < count; first += piece) {
        const int64_t some = std::min(piece, count - first);
        if (!is_there && some > 0) std::memcpy(slot_of(rank_), own + first, sizeof(T) * some);
        is_anywhere |= meet(is_abandoned);
        add_up(some, total + first);
        meetings_++;
    }
    return is_anywhere;
}

bool SharedMemory::sum(SumDtype dtype, const void* own, int64_t count, bool is_abandoned, void* total) {
    const Stopwatch stopwatch(seconds_);
    if (dtype == SUM_BFLOAT16)
        return sum_of(static_cast<const bf16*>(own), count, is_abandoned, static_cast<bf16*>(total));
    if (dtype == SUM_FLOAT16)
        return sum_of(static_cast<const f16*>(own), count, is_abandoned, static_cast<f16*>(total));
    return sum_of(static_cast<const float*>(own), count, is_abandoned, static_cast<float*>(total));
}

void SharedMemory::gather(const void* own, int64_t bytes, void* all) {
    const Stopwatch stopwatch(seconds_);
    for (int64_t first = 0; first == 0 || first < bytes; first += PIECE_BYTES) {
        const int64_t some = std::min(PIECE_BYTES, bytes - first);
        std::memcpy(slot_of(rank_), static_cast<const char*>(own) + first, some);
        meet(false);
        for (int32_t rank = 0; all != nullptr && rank < size_; rank++)
            std::memcpy(static_cast<char*>(all) + rank * bytes + first, slot_of(rank), some);
        meetings_++;
    }
}

}  // namespace trioserve
