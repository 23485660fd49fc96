// Ends with 0 if every piece that a team shares out is taken once, whoever takes part, and its owner takes it first.
#include <cstdio>
#include <cstdlib>

#include "team.h"

namespace {

void check(bool holds, const char* what, int threads, int64_t count) {
    if (holds) return;
    std::printf("%s: %d threads, %d pieces\n", what, threads, int(count));
    std::exit(1);
}

// alone: the one thread that takes anything, or -1 for all.
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

}  // namespace

int main() {
    for (int threads = 1; threads <= 5; threads++) {
        trioserve::Team team(threads);
        for (int64_t count : {0, 1, 2, 3, 7, 100})
            for (int alone = 0; alone < threads; alone++) share_out(team, alone, count);
        // Two that want the last piece at the same moment.
        for (int time = 0; time < 5000; time++) share_out(team, -1, 3);
    }
}
