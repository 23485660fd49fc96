// Exits with 0 if every piece of work is taken once, whichever threads take part, if a thread takes its own pieces first,
// and if every thread may run on every CPU while it works.
#include <sched.h>

#include <cstdio>
#include <cstdlib>

#include "team.h"

namespace {

void check(bool holds, const char* what, int threads, int64_t count) {
    if (holds) return;
    std::printf("%s: %d threads, %d pieces\n", what, threads, int(count));
    std::exit(1);
}

// alone: the only thread that takes pieces, or -1 for all threads.
void share_out(trioserve::Team& team, int alone, int64_t count) {
    const int threads = team.thread_count();
    std::vector<std::atomic<int>> taken(2 * count);
    team.run([&](int thread) {
        for (int round = 0; round < 2; round++) {
            int64_t first = -1;
            for (int64_t piece; alone < 0 || alone == thread;) {
                piece = team.take_share(thread, count);
                if (piece < 0) break;
                check(piece < count, "a piece that is not there", threads, count);
                if (first < 0) first = piece;
                taken[round * count + piece]++;
            }
            const int64_t own = count * thread / threads;
            const bool has_own = own < count * (thread + 1) / threads;
            if (alone == thread && has_own) check(first == own, "not its own piece first", threads, count);
            team.meet();
        }
    });
    for (const std::atomic<int>& times : taken) check(times == 1, "a piece is not taken once", threads, count);
}

// A team with one thread per CPU starts each thread on its own CPU, wherever the caller runs.
void stay_free() {
    cpu_set_t all;
    check(sched_getaffinity(0, sizeof all, &all) == 0, "no CPUs are told", 0, 0);
    const int threads = CPU_COUNT(&all);
    trioserve::Team team(threads);
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &all)) continue;
        cpu_set_t one;
        CPU_ZERO(&one);
        CPU_SET(cpu, &one);
        check(sched_setaffinity(0, sizeof one, &one) == 0, "the caller cannot move", threads, 0);
        std::vector<cpu_set_t> seen(threads);
        team.run([&](int thread) { sched_getaffinity(0, sizeof seen[thread], &seen[thread]); });
        for (int thread = 1; thread < threads; thread++)
            check(CPU_EQUAL(&seen[thread], &all), "a thread is pinned", threads, 0);
        sched_setaffinity(0, sizeof all, &all);
    }
}

}  // namespace

int main() {
    stay_free();
    for (int threads = 1; threads <= 5; threads++) {
        trioserve::Team team(threads);
        for (int64_t count : {0, 1, 2, 3, 7, 100})
            for (int alone = 0; alone < threads; alone++) share_out(team, alone, count);
        // Two threads that want the last piece at the same moment.
        for (int time = 0; time < 5000; time++) share_out(team, -1, 3);
    }
}
