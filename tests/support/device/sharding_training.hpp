// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cmath>
#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <gradsync/cuda/optimizers.hpp>
#include <gradsync/shard/checkpoint.hpp>
#include <gradsync/shard/hybrid.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

#include "support/device_sharding.hpp"

/// The definition of `sharded_training`, for the files that instantiate it.

namespace gradsync_test {

/// The arithmetic of gs::cuda::AdamW in host memory.
struct HostAdamW : gradsync::cuda::AdamW {
    using AdamW::AdamW;
    void step(const gradsync::OptimizerSlice<float>& s) const {
        const gradsync::cuda::AdamWRule r = rule(s.parameter, s.gradient_scale);
        for (std::size_t k = 0; k < s.value.size(); ++k) {
            const float g = s.gradient[k] * r.gradient_scale;
            float &m = s.state[0][k], &v = s.state[1][k];
            m = r.beta1 * m + (1 - r.beta1) * g;
            v = r.beta2 * v + (1 - r.beta2) * (g * g);
            s.value[k] = r.shrink * s.value[k] - r.step_size * m / (std::sqrt(v * r.second_correction) + r.epsilon);
        }
    }
};

/// What `sharded_training` does; `run()` returns its result.
template <gradsync::Backend B>
class ShardedTraining {
public:
    ShardedTraining(B world, const ShardedCase& what, std::filesystem::path saves, std::filesystem::path loads)
        : world_(world), what_(what), saves_(std::move(saves)), loads_(std::move(loads)) {
        for (std::size_t i = 0; i < parameters; ++i) {
            weights_.push_back(std::make_unique<Numbers<B>>(i * i * 400 + 7, world.rank() == 0 ? 0.5f : 77.0f, what.dtype));
            gradients_.push_back(std::make_unique<Numbers<B>>(weights_.back()->size(), 0.0f, what.dtype));
            gradsync::BufferView gradient = gradients_.back()->view();
            if (what.stage != 1 || what.in_buckets) gradient.data = nullptr;
            views_.push_back({.name = "p" + std::to_string(i), .value = weights_.back()->view(), .gradient = gradient});
        }
    }

    std::vector<float> run() {
        if (what_.per_group == 0) return with_exchange(world_, gradsync::ReduceScatter());
        auto [group, replicas] = gradsync::hybrid_groups(world_, what_.per_group);
        return with_exchange(group, gradsync::HybridReduceScatter<B>(replicas));
    }

private:
    static constexpr std::size_t parameters = 9;
    static constexpr bool on_device = B::memory_space == gradsync::MemorySpace::device;

    template <class Exchange>
    std::vector<float> with_exchange(B comm, Exchange exchange) {
        using namespace gradsync;
        List<cuda::AdamWOptions> groups(2);
        groups[0].learning_rate = groups[1].learning_rate = 0.01;
        groups[1].weight_decay = 0.1;
        List<std::size_t> group_of(parameters);
        for (std::size_t i = 0; i < parameters; ++i) group_of[i] = i % 2;
        const std::conditional_t<on_device, cuda::AdamW, HostAdamW> optimizer(groups, group_of);
        ReducerOptions reducer{.reduce_dtype = what_.reduce_dtype};
        if (what_.skips) reducer.unused = UnusedParameters::find_unused;
        if (what_.stage == 3) {
            ShardedParametersOptions options{.reducer = reducer, .reshard_after_forward = what_.reshards, .replicate_below = 100};
            ShardedParameters sharded(comm, views_, optimizer, Units({0, 0, 1, 1, 2, 2, 3, 3, 4}), options, exchange);
            return train(sharded);
        }
        const SizeCappedBuckets buckets(60'000, 2'000);
        if (what_.stage == 1 && what_.in_buckets) reducer.gradients = GradientStorage::in_buckets;
        const ShardingOptions options{.reducer = reducer,
                                      .parameters = what_.in_buckets ? ParameterStorage::in_buckets : ParameterStorage::borrowed};
        if constexpr (std::same_as<Exchange, ReduceScatter>) {  // fewer types to compile
            if (what_.stage == 2) {
                ShardedOptimizer sharded(comm, views_, optimizer, options, Zero2{}, buckets);
                return train(sharded);
            }
            if (what_.forward) {
                ShardedOptimizer sharded(comm, views_, optimizer, options, buckets, OverlapForward{});
                return train(sharded);
            }
        }
        ShardedOptimizer sharded(comm, views_, optimizer, options, buckets, exchange);
        return train(sharded);
    }

    template <class Sharded>
    std::vector<float> train(Sharded& sharded) {
        sharded.broadcast_parameters();
        if (!loads_.empty()) sharded.optimizer().set_steps(std::stoull(gradsync::load_shards(loads_, sharded)));
        std::vector<float> norms;
        for (std::size_t step = sharded.optimizer().steps(); step < (saves_.empty() ? 4 : 2); ++step) {
            for (std::size_t i = 0; i < parameters; ++i) use(sharded, i, [](gradsync::ConstBufferView) {});  // the forward
            if (what_.accumulates) {
                if (what_.stage == 1) {
                    const auto guard = sharded.no_sync();
                    backward(sharded, step, 1);
                } else {
                    backward(sharded, step, 1);
                    sharded.finish();
                }
            }
            backward(sharded, step, 0);
            sharded.finish();
            if (what_.discards && step == 2) {
                sharded.discard();
                backward(sharded, step, 2);
                sharded.finish();
            }
            double scale = 1;
            if (what_.clips) {
                norms.push_back(static_cast<float>(sharded.gradient_norm()));
                scale = gradsync::clip_factor(norms.back(), 50);
            }
            sharded.step(scale);
            if constexpr (requires { sharded.rebuild_buckets(); })
                if (what_.rebuilds && step == 1) (void)sharded.rebuild_buckets();
        }
        sharded.flush();
        if (!saves_.empty() && sharded.replica() == 0) gradsync::save_shards(saves_, sharded, std::to_string(sharded.optimizer().steps()));
        std::vector<float> all = norms;
        sharded.collect_state([&](std::size_t, std::size_t, std::size_t, gradsync::ConstBufferView piece) {
            const auto* const floats = static_cast<const float*>(piece.data);
            all.insert(all.end(), floats, floats + piece.count);
        });
        for (std::size_t i = 0; i < parameters; ++i)
            use(sharded, i, [&](gradsync::ConstBufferView value) {
                const std::vector<float> values = read(world_, value);
                all.insert(all.end(), values.begin(), values.end());
            });
        return all;
    }

    /// Calls `f` with the weights of parameter i while they are there.
    template <class Sharded, class F>
    void use(Sharded& sharded, std::size_t i, F&& f) {
        if constexpr (requires { sharded.gather(i); }) {
            const auto in_use = sharded.gather(sharded.unit_of(i));
            f(sharded.parameter_value(i));
        } else {
            sharded.wait_parameter(i);
            f(sharded.parameter_value(i));
        }
    }

    template <class Sharded>
    void backward(Sharded& sharded, std::size_t step, std::size_t batch) {
        for (std::size_t i = parameters; i-- > 0;) {
            if (what_.skips && (i + step + static_cast<std::size_t>(world_.rank() % 2)) % 3 == 0) continue;
            use(sharded, i, [&](gradsync::ConstBufferView value) {
                std::vector<float> gradient = read(world_, value);
                const std::size_t seed = step * 7 + static_cast<std::size_t>(world_.rank()) * 101 + i + batch * 31;
                for (std::size_t k = 0; k < gradient.size(); ++k)
                    gradient[k] = (static_cast<float>((k * 13 + seed) % 997) * 0.01f - 4) * gradient[k];
                write(world_, sharded.acquire_gradient(i), gradient);
                sharded.mark_ready(i);
            });
        }
    }

    B world_;
    const ShardedCase what_;
    std::filesystem::path saves_, loads_;
    std::vector<std::unique_ptr<Numbers<B>>> weights_, gradients_;
    std::vector<gradsync::ParameterView> views_;
};

template <gradsync::Backend B>
std::vector<float> sharded_training(B world, const ShardedCase& what, std::filesystem::path saves, std::filesystem::path loads) {
    return ShardedTraining<B>(world, what, std::move(saves), std::move(loads)).run();
}

}  // namespace gradsync_test
