// SPDX-License-Identifier: BSL-1.0
// expect 1: gradsync: OverlapForward splits AllReduce in two halves
// expect 2: gradsync: OverlapForward splits AllReduce in two halves
// expect 3: gradsync: PowerSgd and Quantizer compress in host memory
// expect 4: gradsync: PowerSgd and Quantizer compress in host memory
// expect 5: gradsync: sharded training needs an exchange that scatters
#include <vector>

#include <gradsync/compress/power_sgd.hpp>
#include <gradsync/compress/quantizer.hpp>
#include <gradsync/gradsync.hpp>
#include <gradsync/overlap/overlap_forward.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>

#ifndef GRADSYNC_EXPECT_FAILURE
#define GRADSYNC_EXPECT_FAILURE 0
#endif

namespace gs = gradsync;

struct DeviceBackend : gs::ThreadBackend {
    static constexpr auto memory_space = gs::MemorySpace::device;
    static constexpr auto abilities = [] {
        gs::BackendAbilities all = gs::ThreadBackend::abilities;
        all.device_passes = true;
        return all;
    }();
    DeviceBackend split(int color, int key);
    DeviceBackend duplicate();
    gs::detail::HostPasses passes();
    int stream();
    gs::ThreadBackend& host();
};
static_assert(gs::require_backend<DeviceBackend>());

struct Sgd {
    std::size_t state_count() const { return 0; }
    void begin_step() {}
    void step(const gs::OptimizerSlice<float>&) {}
};

void f([[maybe_unused]] DeviceBackend device, gs::ThreadBackend comm, std::vector<std::vector<float>>& gradients) {
#if GRADSYNC_EXPECT_FAILURE == 1
    gs::Reducer sync(comm, gradients, gs::PowerSgd{.rank = 2}, gs::OverlapForward{});
#elif GRADSYNC_EXPECT_FAILURE == 2
    gs::Reducer<gs::ThreadBackend, gs::SizeCappedBuckets, gs::OverlapForward, gs::Quantizer> sync(comm, gradients);
#elif GRADSYNC_EXPECT_FAILURE == 3
    gs::Reducer sync(device, std::vector<gs::ParameterView>(), gs::PowerSgd{});
#elif GRADSYNC_EXPECT_FAILURE == 4
    gs::Reducer sync(device, std::vector<gs::ParameterView>(), gs::Quantizer{});
#elif GRADSYNC_EXPECT_FAILURE == 5
    gs::ShardedOptimizer sync(comm, gradients, Sgd{}, gs::PowerSgd{});
#else
    gs::Reducer one(comm, gradients, gs::PowerSgd{.rank = 2}, gs::OverlapBackward{});
    gs::Reducer<gs::ThreadBackend, gs::SizeCappedBuckets, gs::OverlapBackward, gs::Quantizer> other(comm, gradients);
    gs::ShardedOptimizer sharded(comm, gradients, Sgd{}, gs::ReduceScatter{});
#endif
}
