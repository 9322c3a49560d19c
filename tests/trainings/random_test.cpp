// SPDX-License-Identifier: BSL-1.0
// ctest: LIBRARIES gradsync_trainings_on_host gradsync_trainings
// Whole trainings that are drawn from a seed, against one that a single process computes: the same bits.
//
//   GRADSYNC_TRAININGS_SEED=7 GRADSYNC_TRAININGS_RUNS=1 trainings_random_test
#include <gradsync/backend/tcp.hpp>

#include "run.hpp"
#include "seeds.hpp"
#include "support/rank_threads.hpp"

using namespace gradsync;
using namespace gradsync_test;

// In files of their own, as they take long to compile.
extern template Trained gradsync_test::run_rank(ThreadBackend, const DrawnTraining&, const Leg&);
extern template Trained gradsync_test::run_rank(TcpBackend, const DrawnTraining&, const Leg&);

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

}  // namespace

// Hybrid sharding: two ranks wait in gather(), and two of other groups in acquire_gradient(), for averages across groups that the
// former have to start. It waited until the time limit.
TEST_CASE("a training in which ranks of two groups wait for one another") {
    const DrawnTraining t(912102);
    CHECK_MESSAGE(run_legs(t, run) == "", describe(t));
}

TEST_CASE("trainings drawn at random have the bits of a training in one process") {
    check_trainings(number_of_cases(100), [](const DrawnTraining& t) { return run_legs(t, run); });
}
