#pragma once
// What every rank does, whichever backend the ranks use.

#include <chrono>

#include "job.hpp"
#include "make_synchroniser.hpp"
#include "train.hpp"

namespace gradsync_train {

inline std::chrono::nanoseconds time_limit(const Options& o) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(o.timeout));
}

/// The whole training of one rank, which all ranks of `comm` call together.
template <class Ops, class Backend>
Results run_rank(Ops ops, Backend comm, const Job& job) {
    const Options& o = job.options;
    // Or every rank in a world of its own.
    Backend together = o.independent ? comm.split(comm.rank(), 0) : comm;
    Results results = train(
        ops, job, {comm.rank(), comm.size()},
        [&](Parameters& parameters, const Units& units) { return make_synchroniser(together, o, parameters, units, ops); });
    if (o.independent) {
        comm.set_timeout(std::chrono::hours(24));  // and at a pace of its own
        results.ranks = gather(comm, results.ranks[0]);
    }
    results.transport = comm.describe();
    return results;
}

}  // namespace gradsync_train
