// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "memory.hpp"

namespace gradsync::inline v0_2::detail {

/// The settings of an NCCL communicator.
struct NcclSettings {
    cudaStream_t compute = nullptr;  ///< the stream that buffers are written and read on
    int max_ctas = 0;                ///< of an NCCL kernel; 0: NCCL decides
    NcclMemoryChoice memory = {};    ///< the kind of memory from `allocate`
    std::size_t group_bytes = 0;     ///< the most bytes of a Reducer's buckets that are launched together
    std::string no_float8 = {};      ///< why the ranks cannot add up 8-bit floats; "" if they can
};

/// Agrees on `settings`. Throws Error(parameter_mismatch), the same on all ranks, if their requests differ. Afterwards `memory` and
/// `no_float8` say what all ranks can have. Collective.
inline void agree(message_passing::MessageEngine& control, NcclSettings& settings) {
    struct Wish {
        std::uint64_t group_bytes;
        std::int32_t memory, version;  ///< the lower of the NCCL versions compiled for and found
        std::int32_t capability;       ///< of the current device
    };
    const auto all = control.exchange(Wish{settings.group_bytes, static_cast<std::int32_t>(settings.memory.kind),
                                           smaller(nccl_version(), NCCL_VERSION_CODE), cuda::compute_capability()});
    const auto has = [&](std::size_t r) {
        return text("rank ", control.world_rank(static_cast<int>(r)), " has ", static_cast<NcclMemory>(all[r].memory), " and group_bytes ",
                    all[r].group_bytes);
    };
    for (std::size_t r = 0; r < all.size(); ++r) {
        const int rank = control.world_rank(static_cast<int>(r));
        if (all[r].memory != all[0].memory || all[r].group_bytes != all[0].group_bytes)
            raise(Errc::parameter_mismatch, text("the NcclOptions differ: ", has(0), ", ", has(r), "; they must be the same on all ranks"),
                  {.operation = "NcclBackend", .rank = control.own_world_rank(), .peer = rank});
        const std::string old = text("rank ", rank, " has, or was compiled for, NCCL ", nccl_version_text(all[r].version));
        if (settings.no_float8.empty() && all[r].version < nccl_with_float8) settings.no_float8 = old;
        else if (settings.no_float8.empty() && all[r].capability < capability_with_float8)
            settings.no_float8 =
                text("rank ", rank, " has a device of compute capability ", all[r].capability / 10, ".", all[r].capability % 10);
        if (const NcclMemory best = best_nccl_memory(all[r].version); best < settings.memory.kind) settings.memory = {best, old};
    }
}

}  // namespace gradsync::inline v0_2::detail
