// SPDX-License-Identifier: BSL-1.0
#pragma once
// The training of one rank.

#include <gradsync/observe/timeline.hpp>

#include "job.hpp"
#include "ops_cpu.hpp"
#include "report.hpp"
#include "synchroniser.hpp"

namespace gradsync_train {

/// Which part of every batch is this rank's. (Independent ranks are alone in their communicator, but not here.)
struct Shard {
    int rank;
    int size;
};

/// All that the flags ask for, but the report. All ranks call it together; `make` says how they stay together. `timeline`:
/// to keep the parts of a step in, or null. (The loop is in train_loop.hpp, and compiled once for each kind of operations.)
Results train(CpuOps ops, const Job& job, Shard shard, gs::Timeline* timeline, const MakeSynchroniser& make);

}  // namespace gradsync_train
