// SPDX-License-Identifier: BSL-1.0
// Exchanges that sharded training does not take, or a Reducer does not. The twin has every member that the concepts name and no other, and
// all of every face that takes it compiles with it.
// expect 1: gradsync: sharded training needs an exchange that scatters
// expect 2: gradsync: sharded training needs an exchange that scatters
// expect 3: gradsync: sharded training needs one more member of this exchange: void with_replicas\(auto&& use\) const
// expect 4: gradsync: sharded training needs one more member of this exchange: void with_replicas\(auto&& use\) const
// expect 5: gradsync: a Reducer's averages are whole, and this exchange leaves each rank its shard
#include <string>

#include <gradsync/gradsync.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

using namespace gradsync;

#ifndef GRADSYNC_EXPECT_FAILURE
#define GRADSYNC_EXPECT_FAILURE 0
#endif

struct Sgd {
    std::size_t state_count() const { return 0; }
    void begin_step() {}
    void step(const OptimizerSlice<float>&) {}
};

struct Scattering {
    static constexpr ExchangeTraits traits{.scatters = GRADSYNC_EXPECT_FAILURE != 2};
    template <class B>
    using WorkType = typename B::WorkType;
    template <class B>
    WorkType<B> start(B& backend, std::size_t b, BufferView bucket, ReduceOp op, Contribution own) {
        return ReduceScatter{}.start(backend, b, bucket, op, own);
    }
    template <class B>
    bool is_single_rank(const B& backend) const {
        return backend.size() == 1;
    }
    std::string describe() const { return "Scattering"; }
#if GRADSYNC_EXPECT_FAILURE == 4
    template <class Use>
    void with_replicas(Use&&) {}  // not const
#elif GRADSYNC_EXPECT_FAILURE != 3
    template <class Use>
    void with_replicas(Use&&) const {}
#endif
};
#if GRADSYNC_EXPECT_FAILURE == 1
using Exchange = AllReduce;
#else
using Exchange = Scattering;
#endif
static_assert(require_exchange<Exchange, ThreadBackend>());

#if GRADSYNC_EXPECT_FAILURE < 4
template class gradsync::ShardedOptimizer<ThreadBackend, Sgd, Zero2, SizeCappedBuckets, OverlapBackward, Exchange>;
#endif
#if GRADSYNC_EXPECT_FAILURE == 0 || GRADSYNC_EXPECT_FAILURE == 4
template class gradsync::ShardedParameters<ThreadBackend, Sgd, OverlapBackward, Exchange>;
#endif
#if GRADSYNC_EXPECT_FAILURE == 5
template class gradsync::Reducer<ThreadBackend, SizeCappedBuckets, OverlapBackward, Exchange>;
#endif
