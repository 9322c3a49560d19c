// SPDX-License-Identifier: BSL-1.0
// expect 1: gradsync: the first template argument of Reducer is a backend
// expect 2: gradsync: the backend comes first
// expect 3: gradsync: the second template argument of Reducer is a bucket policy, the third an overlap policy: swap them
// expect 4: gradsync: pass a std::span.pointer, count. of its gradient, .* or specialise gradsync::parameter_traits for this type, with a public static function gradient
// expect 5: gradsync: pass a mutable range: the library writes the result into it
// expect 6: gradsync: pass a mutable range: the library writes the result into it
// expect 7: gradsync: use float, double, Float16, BFloat16, Float8E4M3, Float8E5M2, or an integer of 1, 4 or 8 bytes
// expect 8: gradsync: choose a backend for the memory that these tensors lie in, or stage them through the host
// expect 9: gradsync: choose a backend for the memory that these tensors lie in, or stage them through the host
#include <span>
#include <vector>

#include <gradsync/gradsync.hpp>

#ifndef GRADSYNC_EXPECT_FAILURE
#define GRADSYNC_EXPECT_FAILURE 0
#endif

using gradsync::Flat, gradsync::OverlapBackward, gradsync::Reducer, gradsync::ThreadBackend;

struct DeviceBackend : ThreadBackend {
    static constexpr auto memory_space = gradsync::MemorySpace::device;
    static constexpr auto abilities = [] {
        gradsync::BackendAbilities all = ThreadBackend::abilities;
        all.device_passes = true;
        return all;
    }();
    DeviceBackend split(int color, int key);
    DeviceBackend duplicate();
    gradsync::detail::HostPasses passes();
    int stream();
    ThreadBackend& host();
};
static_assert(gradsync::require_backend<DeviceBackend>());

struct Layer {
    std::vector<float> weights, gradients;
};

#if GRADSYNC_EXPECT_FAILURE == 1
void f(std::vector<std::vector<float>>& gradients) { Reducer<int> sync(0, gradients); }
#elif GRADSYNC_EXPECT_FAILURE == 2
void f(std::vector<std::vector<float>>& gradients) { Reducer sync(Flat{}, gradients); }
#elif GRADSYNC_EXPECT_FAILURE == 3
void f(ThreadBackend comm, std::vector<std::vector<float>>& gradients) { Reducer<ThreadBackend, OverlapBackward, Flat> sync(comm, gradients); }
#elif GRADSYNC_EXPECT_FAILURE == 4
void f(ThreadBackend comm, std::vector<Layer>& layers) { Reducer sync(comm, layers); }
#elif GRADSYNC_EXPECT_FAILURE == 5
void f(ThreadBackend comm, std::vector<std::span<const float>>& gradients) { Reducer sync(comm, gradients); }
#elif GRADSYNC_EXPECT_FAILURE == 6
void f(ThreadBackend comm, const std::vector<std::vector<float>>& gradients) { Reducer sync(comm, gradients); }
#elif GRADSYNC_EXPECT_FAILURE == 7
void f(ThreadBackend comm, std::vector<std::vector<long double>>& gradients) { Reducer sync(comm, gradients); }
#elif GRADSYNC_EXPECT_FAILURE == 8
void f(DeviceBackend comm, std::vector<std::vector<float>>& gradients) { Reducer sync(comm, gradients); }
#elif GRADSYNC_EXPECT_FAILURE == 9
void f(DeviceBackend comm, std::vector<std::vector<float>*>& gradients) { Reducer sync(comm, gradients); }
#else
template <>
struct gradsync::parameter_traits<Layer> {
    static std::vector<float>& gradient(Layer& layer) { return layer.gradients; }
};
void f(ThreadBackend comm, std::vector<Layer>& layers, const std::vector<std::span<float>>& gradients) {
    Reducer<ThreadBackend, Flat, OverlapBackward> one(comm, layers);
    Reducer<ThreadBackend, Flat, OverlapBackward> other(comm, gradients);
}
#endif
