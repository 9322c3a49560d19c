// SPDX-License-Identifier: BSL-1.0
#pragma once
// The trainer where ranks are processes that a launcher has started, each of which calls this.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

#include <gradsync/bootstrap/rendezvous.hpp>

#include "job.hpp"
#include "ops_cpu.hpp"
#include "run_rank.hpp"

namespace gradsync_train {

/// Runs what every rank does before the training. If it throws anywhere, the lowest rank where it does says why, and
/// all get the exit code; otherwise none.
template <gs::Rendezvous R, class F>
std::optional<int> end_together(R& ranks, F&& f) {
    std::optional<Ending> ending;
    try {
        f();
    } catch (...) {
        ending = ending_of_current_exception();
    }
    constexpr int goes_on = -1;
    const auto codes = gs::bootstrap::exchange(ranks, ending ? ending->code : goes_on);
    const auto speaker = std::find_if(codes.begin(), codes.end(), [](int code) { return code != goes_on; });
    if (speaker == codes.end()) return {};
    if (speaker - codes.begin() == ranks.rank()) ending->print();
    return *speaker;
}

/// Machines that share no disk may each have a checkpoint, or weights, of their own.
template <gs::Rendezvous R>
void expect_same_start(R& ranks, const Job& job) {
    const std::uint64_t digest = job.checkpoint ? job.checkpoint->digest() : job.weights ? job.weights->digest() : 0;
    const std::uint64_t first = gs::bootstrap::exchange(ranks, digest).front();
    if (first == digest) return;
    if (job.weights)
        throw UsageError("--load-weights: rank " + std::to_string(ranks.rank()) + " finds other weights in " +
                         job.options.load_weights.string() + " than rank 0; copy the same files to all machines");
    const std::string folder = " in " + job.options.checkpoint.string();
    throw UsageError("--resume: rank " + std::to_string(ranks.rank()) + " finds " +
                     (!job.checkpoint ? "no checkpoint" + folder + ", and rank 0 finds one"
                      : first == 0    ? "a checkpoint" + folder + ", and rank 0 finds none"
                                   : "another checkpoint (after step " + std::to_string(job.checkpoint->progress().steps) + ")" + folder +
                                         " than rank 0") +
                     "; copy one of them to all machines");
}

/// How long to wait for the other processes: as the flags say. If these are wrong, the processes say so together, once they have met.
inline std::chrono::nanoseconds meeting_limit(int argc, char** argv, int processes) {
    try {
        return time_limit(parse_options(argc, argv, processes));
    } catch (...) {
        return std::chrono::minutes(5);
    }
}

/// After the exception that is being handled.
template <class Process>
bool goes_on(Process& process) {
    try {
        throw;
    } catch (const gs::Error& error) {
        return process.goes_on(error);
    } catch (...) {
        return false;
    }
}

/// Runs this rank. Returns the exit code, or ends the process if it has failed or has lost another one. A Process has
///
///     int rank() const, size() const;        // as it was started
///     auto meet(limit);                      // a rendezvous
///     auto connect(rendezvous, options);     // the backend over it
///     MakeKeeper keeper(backend);            // or none
///     bool goes_on(const gs::Error&);        // whether the ranks that are left meet again
///     bool is_over() const;                  // whether all have ended
///     void end(backend);                     // waits for the others
template <class Process>
int run_process(Process&& process, int argc, char** argv) {
    const int rank = process.rank();
    const bool speaks = rank == 0;
    std::optional<Job> job;
    using Ranks = decltype(process.meet(std::chrono::nanoseconds()));
    std::optional<decltype(process.connect(std::declval<Ranks&>(), std::declval<const Options&>()))> comm;
    for (;;) try {
            Ranks ranks = process.meet(meeting_limit(argc, argv, process.size()));
            auto code = end_together(ranks, [&] { job = prepare(parse_options(argc, argv, ranks.size()), speaks); });
            if (code) return *code;
            code = end_together(ranks, [&] { expect_same_start(ranks, *job); });
            if (code) return *code;

            comm.emplace(process.connect(ranks, job->options));
            if (!job->options.independent) job->make_keeper = process.keeper(*comm);
            const Results results = run_rank(CpuOps{}, *comm, *job);
            // The others wait for what rank 0 alone does now, however long: here, where they notice if it dies.
            comm->set_timeout(std::chrono::hours(24));
            const int exit_code = speaks ? exit_code_of([&] { present(*job, results); }) : 0;
            process.end(*comm);
            return exit_code;
        } catch (...) {
            const Ending ending = ending_of_current_exception();
            const std::string name = "rank " + std::to_string(rank) + ": ";  // the library's errors have it already
            std::fprintf(stderr, "gradsync_train: %s%s\n", ending.text.starts_with(name) ? "" : name.c_str(), ending.text.c_str());
            if (goes_on(process)) {
                if (process.is_over()) return 0;
                job.reset();
                comm.reset();
                continue;
            }
            // MPI_Finalize would wait for the others forever.
            if (comm) comm->fail(ending.text);
            std::fflush(nullptr);
            std::_Exit(ending.code);
        }
}

}  // namespace gradsync_train
