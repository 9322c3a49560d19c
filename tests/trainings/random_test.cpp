// SPDX-License-Identifier: BSL-1.0
// Whole trainings that are drawn from a seed, against one that a single process computes: the same bits.
//
//   GRADSYNC_TRAININGS_SEED=7 GRADSYNC_TRAININGS_RUNS=1 trainings_random_test
#include <doctest/doctest.h>

#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <string>

#include <gradsync/backend/tcp.hpp>

#include "run.hpp"
#include "support/rank_threads.hpp"
#include "support/temporary_directory.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

constexpr auto limit = std::chrono::seconds(20);  // of each wait

std::uint64_t number_from(const char* variable, std::uint64_t otherwise) {
    const char* const text = std::getenv(variable);
    return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}

/// The training that runs, for a program that crashes, or hangs where no time limit of the library ends it.
std::string running;
extern "C" void on_signal(int signal) {
    running += signal == SIGALRM ? ": it hangs\n" : ": it crashes\n";
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, running.data(), running.size());
    ::_exit(1);
}

/// Runs a leg of the training on all ranks.
std::vector<Trained> run(const DrawnTraining& t, const Leg& leg) {
    std::vector<Trained> ranks(static_cast<std::size_t>(t.ranks));
    const auto train = [&](auto comm) {
        const auto rank = static_cast<std::size_t>(comm.rank());
        ranks[rank] = run_rank(std::move(comm), t, leg);
    };
    const auto connect = [&](auto& rendezvous) {
        return TcpBackend(rendezvous, {.timeout = limit, .shared_memory = t.shared_memory, .domain = rendezvous.rank() / t.per_host});
    };
    if (t.tcp) run_rank_threads(t.ranks, connect, train);
    else
        run_threads(
            t.ranks, [&](ThreadBackend comm) { train(std::move(comm)); }, ThreadOptions{.timeout = limit});
    return ranks;
}

/// Runs the training and describes its first fault; returns "" if there is none.
std::string run(const DrawnTraining& t) {
    running = describe(t);
    running.reserve(running.size() + 20);  // the handler allocates nothing
    for (const int signal : {SIGALRM, SIGSEGV, SIGBUS, SIGABRT})
        if (!slow_build || signal == SIGALRM) std::signal(signal, on_signal);  // sanitizers say more
    ::alarm(static_cast<unsigned>(4 * limit.count()));
    try {
        if (t.saved_after == 0) return difference(t, run(t, {0, t.steps}));
        const TemporaryDirectory saved, moved;
        const std::vector<Trained> before = run(t, {0, t.saved_after, {}, saved.path()});
        (void)run(t.between(), {t.saved_after, t.saved_after, saved.path(), moved.path()});
        std::vector<Trained> after = run(t.resumed(), {t.saved_after, t.steps, moved.path(), {}});
        for (std::size_t r = 0; r < after.size(); ++r)
            after[r].norms.insert(after[r].norms.begin(), before[r].norms.begin(), before[r].norms.end());
        return difference(t, after);
    } catch (const std::exception& error) {
        return error.what();
    }
}

}  // namespace

TEST_CASE("trainings drawn at random have the bits of a training in one process") {
    const std::uint64_t first = number_from("GRADSYNC_TRAININGS_SEED", 1),
                        runs = number_from("GRADSYNC_TRAININGS_RUNS", number_of_cases(100));
    for (std::uint64_t seed = first; seed < first + runs; ++seed) {
        const DrawnTraining t(seed);
        const std::string wrong = run(t);
        CHECK_MESSAGE(wrong.empty(), describe(t), ": ", wrong);
    }
}
