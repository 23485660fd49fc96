// The threads that compute a step together, and how they wait for each other. The caller is thread 0 of the team.
//
// If there are as many threads as usable CPUs, each starts a step on its own CPU. When other programs run, the system wakes
// a thread on the CPU of the thread that wakes it. Two threads that share a CPU and wait for each other stay there for
// milliseconds, even if other CPUs are idle. Threads are not pinned, because a pinned thread waits for any other program on
// its CPU.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace trioserve {

class Team {
public:
    explicit Team(int thread_count);
    ~Team();  // ends the threads
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int thread_count() const { return thread_count_; }

    // Runs work(thread) once in every thread, and returns when all have returned.
    void run(const std::function<void(int)>& work);

    // For use inside work: waits until every thread has called it. Then take() starts again at 0.
    void meet();

    // Returns the next piece of work since the last meet(): 0, 1, 2, ... Each number goes to one thread. So a thread that
    // lost its core to another program delays one piece, not its whole share.
    int64_t take() { return next_.fetch_add(1, std::memory_order_relaxed); }

    // Returns where a thread's own part of `count` pieces begins. The part of the previous thread ends there.
    int64_t share_of(int thread, int64_t count) const { return count * thread / thread_count_; }

    // Like take(), for pieces 0 to count - 1 in the order of rows. Returns -1 if none is left. A thread first takes the pieces
    // of its own part of the rows. That part does not depend on count, so what the thread wrote earlier is still in its
    // caches. Then it helps the others.
    int64_t take_share(int thread, int64_t count) {
        for (int helped = 0; helped < thread_count_; helped++) {
            const int owner = (thread + helped) % thread_count_;
            const int64_t first = share_of(owner, count), end = share_of(owner + 1, count);
            std::atomic<int64_t>& taken = shares_[owner].taken;
            if (first + taken.load(std::memory_order_relaxed) >= end) continue;
            const int64_t piece = first + taken.fetch_add(1, std::memory_order_relaxed);
            if (piece < end) return piece;
        }
        return -1;
    }

private:
    struct Share {
        alignas(64) std::atomic<int64_t> taken{0};
    };

    void serve(int thread);
    void renew();
    void place();

    const int thread_count_;
    std::vector<std::thread> threads_;
    std::vector<int> cpus_;                       // usable CPUs, if they are as many as the threads
    std::unique_ptr<std::atomic<int>[]> cpu_of_;  // CPU on which each thread ended its last step
    bool is_placing_ = false;                     // true until the system refuses
    const std::function<void(int)>* work_ = nullptr;
    alignas(64) std::atomic<uint32_t> job_{0};       // counts calls of run
    alignas(64) std::atomic<uint32_t> meeting_{0};   // counts finished meetings
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> asleep_{0};
    alignas(64) std::atomic<int64_t> next_{0};
    std::unique_ptr<Share[]> shares_;
    bool is_ending_ = false;
};

}  // namespace trioserve
