// SPDX-License-Identifier: BSL-1.0
// Reducers whose sums, or whose steps, do not fit to ranks that come and go.
// expect 1: gradsync: ElasticJob::restore takes a Reducer<TcpBackend, \.\.\.> with the exchange AllReduce
// expect 2: gradsync: ElasticJob::restore takes a Reducer<TcpBackend, \.\.\.> with the exchange AllReduce and without OverlapForward
// expect 3: gradsync: ElasticJob::restore takes .* exchange ReduceScatter and without StepInside
#include <vector>

#include <gradsync/compress/quantizer.hpp>
#include <gradsync/elastic/elastic_job.hpp>
#include <gradsync/overlap/overlap_forward.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>

using namespace gradsync;

#ifndef GRADSYNC_EXPECT_FAILURE
#define GRADSYNC_EXPECT_FAILURE 0
#endif

struct Sgd {
    std::size_t state_count() const { return 0; }
    void begin_step() {}
    void step(const OptimizerSlice<float>&) {}
};

void train(ElasticJob& job, TcpBackend& comm, [[maybe_unused]] std::vector<ParameterView>& parameters,
           std::vector<BufferView>& state) {
#if GRADSYNC_EXPECT_FAILURE == 1
    Reducer sync(comm, parameters, Quantizer{});
#elif GRADSYNC_EXPECT_FAILURE == 2
    Reducer sync(comm, parameters, OverlapForward{});
#elif GRADSYNC_EXPECT_FAILURE == 3
    ShardedOptimizer sync(comm, parameters, Sgd{}, StepInside{});
#else
    ShardedOptimizer sharded(comm, parameters, Sgd{}, Zero2{}, OverlapForward{});
    job.restore(sharded);
    Reducer sync(comm, parameters);
#endif
    job.restore(sync, state);
}
