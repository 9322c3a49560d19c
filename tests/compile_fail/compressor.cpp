// SPDX-License-Identifier: BSL-1.0
// expect 1: gradsync: OverlapForward splits AllReduce in two halves
// expect 2: gradsync: OverlapForward splits AllReduce in two halves
// expect 3: gradsync: TopK, PowerSgd and Quantizer compress in host memory
// expect 4: gradsync: TopK, PowerSgd and Quantizer compress in host memory
#include <vector>

#include <gradsync/compress/power_sgd.hpp>
#include <gradsync/compress/top_k.hpp>
#include <gradsync/gradsync.hpp>
#include <gradsync/overlap/overlap_forward.hpp>

#ifndef GRADSYNC_EXPECT_FAILURE
#define GRADSYNC_EXPECT_FAILURE 0
#endif

using gradsync::PowerSgd, gradsync::Reducer, gradsync::SizeCappedBuckets, gradsync::ThreadBackend, gradsync::TopK;

struct DeviceBackend : ThreadBackend {
    static constexpr auto memory_space = gradsync::MemorySpace::device;
    DeviceBackend split(int color, int key);
    DeviceBackend duplicate();
};

#if GRADSYNC_EXPECT_FAILURE == 1 || GRADSYNC_EXPECT_FAILURE == 2
using Overlap = gradsync::OverlapForward;
#else
using Overlap = gradsync::OverlapBackward;
#endif

#if GRADSYNC_EXPECT_FAILURE == 0 || GRADSYNC_EXPECT_FAILURE == 1
void f(ThreadBackend comm, std::vector<std::vector<float>>& gradients) {
    Reducer<ThreadBackend, SizeCappedBuckets, Overlap, PowerSgd<ThreadBackend>> sync(comm, gradients);
}
#endif
#if GRADSYNC_EXPECT_FAILURE == 0 || GRADSYNC_EXPECT_FAILURE == 2
void g(ThreadBackend comm, std::vector<std::vector<float>>& gradients) {
    Reducer<ThreadBackend, SizeCappedBuckets, Overlap, TopK<ThreadBackend>> sync(comm, gradients);
}
#endif
#if GRADSYNC_EXPECT_FAILURE == 3
PowerSgd<DeviceBackend> compressor;
#elif GRADSYNC_EXPECT_FAILURE == 4
TopK<DeviceBackend> compressor;
#endif
