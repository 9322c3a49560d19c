// SPDX-License-Identifier: BSL-1.0
#include <stdexcept>
#include <string>

#include <gradsync/bucket/per_parameter.hpp>
#include <gradsync/cuda/optimizers.hpp>
#include <gradsync/shard/hybrid.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

#include "support/device_sharding.hpp"

namespace gradsync_test {

void check_that_sharding_keeps_no_host(gradsync::NcclBackend& comm, cudaStream_t stream,
                                       const std::function<void(const char*, const std::function<void()>&)>& held) {
    using namespace gradsync;
    std::vector<Numbers<NcclBackend>> weights;
    for (std::size_t i = 0; i < 6; ++i) weights.emplace_back(1000 * i + 1, 1.0f);
    std::vector<ParameterView> views;
    for (auto& w : weights) {
        views.push_back({.name = "p" + std::to_string(views.size()), .value = w.view(), .gradient = w.view()});
        views.back().gradient.data = nullptr;
    }
    const auto check = [&](const char* what, auto& sharded, auto&& use) {
        const auto step = [&] {
            for (std::size_t i = 0; i < views.size(); ++i) use(i, [](ConstBufferView) {});
            for (std::size_t i = views.size(); i-- > 0;)
                use(i, [&](ConstBufferView value) {
                    detail::passes_of(comm).copy(value, sharded.acquire_gradient(i));
                    sharded.mark_ready(i);
                });
            sharded.finish();
            sharded.step();
        };
        sharded.broadcast_parameters();
        step();  // connects the ranks, and takes memory
        cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
        held(what, [&] {
            step();
            step();
        });
        use(5, [&](ConstBufferView value) {
            if (!(read(comm, value)[4000] < 1.0f)) throw std::logic_error(std::string(what) + ", and weights do not shrink");
        });
    };
    const auto by_parameter = [&](auto& sharded) { return [&](std::size_t i, auto&& f) { f(sharded.parameter_value(i)); }; };
    const cuda::Sgd sgd({.learning_rate = 0.01, .momentum = 0});
    const ShardingOptions options{.parameters = ParameterStorage::in_buckets};
    const PerParameter buckets;  // two or three have memory at a time in stage 2
    ShardedOptimizer one(comm, views, sgd, ShardingOptions{.reducer = {.gradients = GradientStorage::in_buckets}}, buckets);
    check("stage 1 waited", one, by_parameter(one));
    ShardedOptimizer two(comm, views, sgd, options, Zero2{}, buckets);
    check("stage 2 waited", two, by_parameter(two));
    ShardedParameters three(comm, views, sgd, Units({0, 0, 1, 1, 2, 2}));
    check("stage 3 waited", three, [&](std::size_t i, auto&& f) {
        const auto in_use = three.gather(three.unit_of(i));
        f(three.parameter_value(i));
    });
    // Both stages of hybrid sharding are put on streams by the mark.
    auto [group, replicas] = hybrid_groups(comm, 1);
    ShardedOptimizer hybrid(group, views, sgd, options, Zero2{}, buckets, HybridReduceScatter<NcclBackend>(replicas));
    check("hybrid sharding waited", hybrid, by_parameter(hybrid));
}

}  // namespace gradsync_test
