// SPDX-License-Identifier: BSL-1.0
// Whole trainings that are drawn from a seed, against one that a single process computes: the same bits.
//
//   GRADSYNC_TRAININGS_SEED=7 GRADSYNC_TRAININGS_RUNS=1 trainings_random_test
#include <gradsync/backend/tcp.hpp>

#include "run.hpp"
#include "seeds.hpp"
#include "support/rank_threads.hpp"
#include "support/temporary_directory.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

/// Runs a leg of the training on all ranks.
std::vector<Trained> run(const DrawnTraining& t, const Leg& leg) {
    std::vector<Trained> ranks(static_cast<std::size_t>(t.ranks));
    const auto train = [&](auto comm) {
        const auto rank = static_cast<std::size_t>(comm.rank());
        ranks[rank] = run_rank(std::move(comm), t, leg);
    };
    const auto connect = [&](auto& rendezvous) {
        return TcpBackend(rendezvous, {.timeout = time_limit, .shared_memory = t.shared_memory, .domain = rendezvous.rank() / t.per_host});
    };
    if (t.tcp) run_rank_threads(t.ranks, connect, train);
    else
        run_threads(
            t.ranks, [&](ThreadBackend comm) { train(std::move(comm)); }, ThreadOptions{.timeout = time_limit});
    return ranks;
}

/// Runs the training and describes its first fault; returns "" if there is none.
std::string run(const DrawnTraining& t) {
    if (t.saved_after == 0) return difference(t, run(t, {0, t.steps}));
    const TemporaryDirectory saved, moved;
    const std::vector<Trained> before = run(t, {0, t.saved_after, {}, saved.path()});
    (void)run(t.between(), {t.saved_after, t.saved_after, saved.path(), moved.path()});
    std::vector<Trained> after = run(t.resumed(), {t.saved_after, t.steps, moved.path(), {}});
    for (std::size_t r = 0; r < after.size(); ++r)
        after[r].norms.insert(after[r].norms.begin(), before[r].norms.begin(), before[r].norms.end());
    return difference(t, after);
}

}  // namespace

TEST_CASE("trainings drawn at random have the bits of a training in one process") {
    check_trainings(number_of_cases(100), [](const DrawnTraining& t) { return run(t); });
}
