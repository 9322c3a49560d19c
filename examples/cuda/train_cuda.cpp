// SPDX-License-Identifier: BSL-1.0
// The training loop over the operations on a device.

#include "train_cuda.hpp"

#include "../train_loop.hpp"

namespace gradsync_train {

Results train(CudaOps ops, const Job& job, Shard shard, gs::Timeline* timeline, const MakeSynchroniser& make) {
    return train_detail::train_chosen(ops, job, shard, timeline, make);
}

}  // namespace gradsync_train
