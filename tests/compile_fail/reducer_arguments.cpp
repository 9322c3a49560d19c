// SPDX-License-Identifier: BSL-1.0
// expect 1: gradsync: pass one bucket policy: two of these arguments are bucket policies
// expect 2: gradsync: pass one exchange or compressor: two of these arguments are exchanges
// expect 3: gradsync: pass the options once: two of these arguments are options
// expect 4: gradsync: this constructor takes its options and policies last, in any order, and one of these arguments is neither: its type is the T in
// expect 4: is_option_or_policy<int>
// expect 5: gradsync: this argument is not of the type that the template arguments name
// expect 6: gradsync: this argument is not of the type that the template arguments name
// expect 7: gradsync: this policy has no default: pass the constructor one
// expect 8: gradsync: give this bucket policy a member std::string describe\(\) const
// expect 9: gradsync: the backend comes first: Reducer.comm, parameters
// expect 10: gradsync: the backend comes first: Reducer.comm, parameters
// errors: 2
#include <type_traits>
#include <vector>

#include <gradsync/bucket/any_buckets.hpp>
#include <gradsync/compress/power_sgd.hpp>
#include <gradsync/gradsync.hpp>
#include <gradsync/overlap/any_overlap.hpp>
#include <gradsync/overlap/overlap_forward.hpp>

#ifndef GRADSYNC_EXPECT_FAILURE
#define GRADSYNC_EXPECT_FAILURE 0
#endif

using namespace gradsync;

struct OneEach {
    BucketPlan plan(std::span<const ParameterInfo> parameters, std::span<const std::size_t> order) const {
        return PerParameter{}.plan(parameters, order);
    }
#if GRADSYNC_EXPECT_FAILURE != 8
    std::string describe() const { return "OneEach"; }
#endif
};

void f(ThreadBackend comm, std::vector<std::vector<float>>& model) {
#if GRADSYNC_EXPECT_FAILURE == 1
    Reducer sync(comm, model, Flat{}, OverlapForward{}, PerParameter{});
#elif GRADSYNC_EXPECT_FAILURE == 2
    Reducer sync(comm, model, {}, PowerSgd{}, AllReduce{});
#elif GRADSYNC_EXPECT_FAILURE == 3
    Reducer sync(comm, model, {.averaging = Averaging::sum}, Flat{}, ReducerOptions{});
#elif GRADSYNC_EXPECT_FAILURE == 4
    Reducer sync(comm, model, 25 << 20);
#elif GRADSYNC_EXPECT_FAILURE == 5
    Reducer<ThreadBackend, Flat> sync(comm, model, PerParameter{});
#elif GRADSYNC_EXPECT_FAILURE == 6
    Reducer<ThreadBackend, Flat, OverlapBackward> sync(comm, model, OverlapForward{});  // which is an OverlapBackward in C++
#elif GRADSYNC_EXPECT_FAILURE == 7
    Reducer<ThreadBackend, AnyBuckets> sync(comm, model);
#elif GRADSYNC_EXPECT_FAILURE == 8
    Reducer sync(comm, model, OneEach{});
#elif GRADSYNC_EXPECT_FAILURE == 9
    Reducer sync(model, comm, Flat{});
#elif GRADSYNC_EXPECT_FAILURE == 10
    Reducer<ThreadBackend> sync({parameter("w", model[0], model[1])}, comm);
#else
    Reducer any_order(comm, model, OverlapForward{}, Flat{}, ReducerOptions{});
    static_assert(std::is_same_v<decltype(any_order), Reducer<ThreadBackend, Flat, OverlapForward>>);
    Reducer options_first(comm, model, {.averaging = Averaging::sum}, PowerSgd{.rank = 2}, NoOverlap{});
    static_assert(std::is_same_v<decltype(options_first), Reducer<ThreadBackend, SizeCappedBuckets, NoOverlap, PowerSgd>>);
    Reducer one_of_ones_own(comm, model, OneEach{});
    static_assert(std::is_same_v<decltype(one_of_ones_own), Reducer<ThreadBackend, OneEach>>);
    Reducer<ThreadBackend, AnyBuckets, AnyOverlap> named(comm, model, NoOverlap{}, Flat{});
    Reducer<ThreadBackend, Flat> some_named(comm, model, ReducerOptions{});
#endif
}
