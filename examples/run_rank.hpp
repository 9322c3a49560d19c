// SPDX-License-Identifier: BSL-1.0
#pragma once
// What every rank does, whichever backend the ranks use.

#include <chrono>
#include <cstdio>
#include <exception>
#include <optional>
#include <string>

#include <gradsync/observe/timeline.hpp>
#include <gradsync/planning/summary.hpp>
#include <gradsync/planning/trace.hpp>

#include "job.hpp"
#include "make_synchroniser.hpp"
#include "train.hpp"

namespace gradsync_train {

inline std::chrono::nanoseconds time_limit(const Options& o) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(o.timeout));
}

/// What a rank that has failed, or has lost another, was doing: in a file of its own, as the ranks cannot be gathered any more. Never
/// throws: the failure is what has to be reported.
inline void keep_trace(const gs::Timeline& timeline, int rank, const std::string& path) {
    try {
        gs::write_trace(timeline, rank, path + ".rank" + std::to_string(rank));
    } catch (const std::exception& error) {
        std::fprintf(stderr, "gradsync_train: rank %d: %s\n", rank, error.what());
    }
}

/// The whole training of one rank, which all ranks of `comm` call together.
template <class Ops, class Backend>
Results run_rank(Ops ops, Backend comm, const Job& job) {
    const Options& o = job.options;
    // Or every rank in a world of its own.
    Backend together = o.independent ? comm.split(comm.rank(), 0) : comm;
    std::optional<gs::Timeline> timeline;
    if (!o.trace.empty()) timeline.emplace();
    gs::Timeline* const observer = timeline ? &*timeline : nullptr;
    Results results;
    try {
        results = train(ops, job, {comm.rank(), comm.size()}, observer, [&](Parameters& parameters, const Units& units) {
            return make_synchroniser(together, o, parameters, units, observer, ops);
        });
    } catch (...) {
        if (timeline) keep_trace(*timeline, comm.rank(), o.trace);
        throw;
    }
    if (results.changes) return results;
    if (o.independent) {
        comm.set_timeout(std::chrono::hours(24));  // and at a pace of its own
        results.ranks = gather(comm, results.ranks[0]);
    }
    results.transport = comm.describe();
    if (timeline) {
        try {
            gs::write_trace(host_of(comm), *timeline, o.trace);
        } catch (const gs::Error& error) {
            if (error.errc() != gs::Errc::storage) throw;  // what was trained is there all the same
            std::fprintf(stderr, "gradsync_train: %s\n", error.what());
        }
        results.timeline = gs::describe(gs::summarise(*timeline));
    }
    return results;
}

}  // namespace gradsync_train
