// SPDX-License-Identifier: BSL-1.0
// ctest: ALONE LIBRARIES gradsync_trainings_on_fakes gradsync_trainings gradsync_fake_nccl gradsync_fake_passes COST 30
// The trainings of random_test.cpp in device memory, over the fakes of support/fake, as far as devices have their options. NCCL adds up in
// an order of its own, so the weights are compared with a tolerance.
//
//   GRADSYNC_TRAININGS_SEED=7 GRADSYNC_TRAININGS_RUNS=1 trainings_random_nccl_fake_test
#include <gradsync/backend/nccl.hpp>
#include <gradsync/backend/staging.hpp>
#include <gradsync/backend/thread_backend.hpp>

#include <stdexcept>

#include "fake_kernels.hpp"
#include "run.hpp"
#include "seeds.hpp"
#include "support/fake/fake.hpp"
#include "support/rank_threads.hpp"

using namespace gradsync;
using namespace gradsync_test;

// In files of their own, as they take long to compile.
extern template Trained gradsync_test::run_rank<FakeKernels>(NcclBackend, const DrawnTraining&, const Leg&);
extern template Trained gradsync_test::run_rank<FakeKernels>(StagingBackend<ThreadBackend>, const DrawnTraining&, const Leg&);

namespace {

std::vector<Trained> over_nccl(const DrawnTraining& t, const Leg& leg) {
    std::vector<Trained> ranks(static_cast<std::size_t>(t.ranks));
    const NcclOptions options{.timeout = time_limit, .memory = NcclMemory(t.draw(3, 33, 0)), .group_bytes = t.draw(3, 34, 0) * 4096};
    run_rank_threads(
        t.ranks, [&](auto& rendezvous) { return NcclBackend(rendezvous, options); },
        [&](NcclBackend comm) { ranks[static_cast<std::size_t>(comm.rank())] = run_rank<FakeKernels>(comm, t, leg); });
    if (gradsync_fake::misuses() != 0) throw std::logic_error("a misuse of NCCL");
    return ranks;
}

std::vector<Trained> staged(const DrawnTraining& t, const Leg& leg) {
    std::vector<Trained> ranks(static_cast<std::size_t>(t.ranks));
    const auto train = [&](ThreadBackend host) {
        const StagingOptions options{.piece_bytes = std::size_t{64} << t.draw(12, 35, 0)};
        ranks[static_cast<std::size_t>(host.rank())] = run_rank<FakeKernels>(StagingBackend<ThreadBackend>(host, options), t, leg);
    };
    run_threads(t.ranks, train, ThreadOptions{.timeout = time_limit});
    return ranks;
}

}  // namespace

TEST_CASE("trainings drawn at random over NCCL are those in one process") {
    const auto run = [](const DrawnTraining& t, const Leg& leg) { return leg.first == leg.last ? staged(t, leg) : over_nccl(t, leg); };
    check_trainings(
        number_of_cases(100), [&](const DrawnTraining& t) { return run_legs<LinearOptimizer>(t, run); }, true);
}
TEST_CASE("trainings drawn at random, staged through the host, are those in one process") {
    const auto run = [](const DrawnTraining& t, const Leg& leg) { return leg.first == leg.last ? over_nccl(t, leg) : staged(t, leg); };
    check_trainings(
        number_of_cases(100), [&](const DrawnTraining& t) { return run_legs<LinearOptimizer>(t, run); }, true);
}
