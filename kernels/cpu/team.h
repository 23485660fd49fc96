// The threads that compute a step together, and how they wait for each other. The caller is thread 0 of the team.
//
// Where they are as many as the CPUs that we may use, each begins a step on one of its own: beside other programs the
// system wakes a thread where the one that wakes it runs, and two that share a CPU and wait for each other stay there for
// milliseconds, however idle the others are. They are not pinned: that would keep a thread waiting behind somebody else.
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

    // Runs work(thread) once in every thread and returns when all have returned.
    void run(const std::function<void(int)>& work);

    // For use inside work: waits until every thread is here. Everything can be taken anew.
    void meet();

    // The next piece of work since the last meet(): 0, 1, 2, ... Each number goes to one thread, so that a thread that
    // lost its core to somebody else holds up one piece and not its whole share.
    int64_t take() { return next_.fetch_add(1, std::memory_order_relaxed); }

    // Where a thread's own part of `count` pieces begins, and that of the thread before it ends.
    int64_t share_of(int thread, int64_t count) const { return count * thread / thread_count_; }

    // As take, for pieces 0 .. count - 1 that lie in the order of rows; -1: none is left. A thread takes those of its own
    // part of the rows first, which is the same part whatever the count, so that what it wrote is still in its caches; then
    // it helps the others.
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
    std::vector<int> cpus_;                       // that we may use, if they are as many as the threads
    std::unique_ptr<std::atomic<int>[]> cpu_of_;  // where each thread ended its last step
    bool is_placing_ = false;                     // until the system does not let us
    const std::function<void(int)>* work_ = nullptr;
    alignas(64) std::atomic<uint32_t> job_{0};       // counts calls of run
    alignas(64) std::atomic<uint32_t> meeting_{0};   // counts meetings that are over
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> asleep_{0};
    alignas(64) std::atomic<int64_t> next_{0};
    std::unique_ptr<Share[]> shares_;
    bool is_ending_ = false;
};

}  // namespace trioserve
