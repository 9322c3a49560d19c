// SPDX-License-Identifier: BSL-1.0
#pragma once
// What the trainer's programs need of the training on devices.

#include "../train.hpp"
#include "ops_cuda.hpp"

namespace gradsync_train {

/// As for the CPU.
Results train(CudaOps ops, const Job& job, Shard shard, gs::Timeline* timeline, const MakeSynchroniser& make);

}  // namespace gradsync_train
