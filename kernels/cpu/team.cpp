#include "team.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>

#include "waiting.h"

namespace trioserve {
namespace {

void wait_for_change(std::atomic<uint32_t>& word, uint32_t value, std::atomic<int>& asleep) {
    static thread_local Patience patience;
    wait_while<Among::THREADS>(word, value, asleep, patience);
}

bool set_cpus(pthread_t thread, const int* cpus, size_t count) {
    cpu_set_t set;
    CPU_ZERO(&set);
    for (size_t index = 0; index < count; index++) CPU_SET(cpus[index], &set);
    return pthread_setaffinity_np(thread, sizeof set, &set) == 0;
}

}  // namespace

Team::Team(int thread_count)
    : thread_count_(thread_count), cpu_of_(new std::atomic<int>[thread_count]), shares_(new Share[thread_count]) {
    cpu_set_t allowed;
    if (thread_count > 1 && sched_getaffinity(0, sizeof allowed, &allowed) == 0 && CPU_COUNT(&allowed) == thread_count)
        for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
            if (CPU_ISSET(cpu, &allowed)) cpus_.push_back(cpu);
    is_placing_ = !cpus_.empty();
    for (int thread = 0; thread < thread_count; thread++) cpu_of_[thread] = -1;
    for (int thread = 1; thread < thread_count; thread++) threads_.emplace_back(&Team::serve, this, thread);
}

Team::~Team() {
    is_ending_ = true;
    change<Among::THREADS>(job_, job_.load() + 1, asleep_);
    for (std::thread& thread : threads_) thread.join();
}

void Team::renew() {
    next_.store(0);
    for (int thread = 0; thread < thread_count_; thread++) shares_[thread].taken.store(0, std::memory_order_relaxed);
}

// Assigns a CPU to every other thread before it wakes. A thread gets its last CPU, unless another thread has that CPU.
void Team::place() {
    std::vector<int> taken{sched_getcpu()};
    const auto is_free = [&](int cpu) { return std::find(taken.begin(), taken.end(), cpu) == taken.end(); };
    for (int thread = 1; thread < thread_count_ && is_placing_; thread++) {
        int cpu = cpu_of_[thread].load(std::memory_order_relaxed);
        if (cpu < 0 || !is_free(cpu)) cpu = *std::find_if(cpus_.begin(), cpus_.end(), is_free);
        taken.push_back(cpu);
        is_placing_ = set_cpus(threads_[thread - 1].native_handle(), &cpu, 1);
    }
}

void Team::run(const std::function<void(int)>& work) {
    work_ = &work;
    renew();
    place();
    change<Among::THREADS>(job_, job_.load() + 1, asleep_);
    work(0);
    meet();
}

void Team::serve(int thread) {
    for (uint32_t job = 0;; job++) {
        wait_for_change(job_, job, asleep_);
        if (is_ending_) return;
        if (!cpus_.empty()) set_cpus(pthread_self(), cpus_.data(), cpus_.size());
        (*work_)(thread);
        cpu_of_[thread].store(sched_getcpu(), std::memory_order_relaxed);
        meet();
    }
}

void Team::meet() {
    const uint32_t meeting = meeting_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1) + 1 == thread_count_) {
        arrived_.store(0);
        renew();
        change<Among::THREADS>(meeting_, meeting + 1, asleep_);
    } else {
        wait_for_change(meeting_, meeting, asleep_);
    }
}

}  // namespace trioserve
