// SPDX-License-Identifier: BSL-1.0
// The training loop over the operations on the CPU.

#include "ops_cpu.hpp"
#include "train_loop.hpp"

namespace gradsync_train {

Results train(CpuOps ops, const Job& job, Shard shard, gs::Timeline* timeline, const MakeSynchroniser& make) {
    return train_detail::train_chosen(ops, job, shard, timeline, make);
}

}  // namespace gradsync_train
