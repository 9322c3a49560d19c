// SPDX-License-Identifier: BSL-1.0
#include <doctest/doctest.h>

#include <memory>
#include <string>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

#include "sharded_training.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

/// Matrices in bf16 and norms in f32, of which each rank has gradients in f32, or in the type of their values.
struct MixedModel {
    std::vector<Tensor> values;
    std::vector<std::vector<float>> gradients;
    std::vector<ParameterView> views;

    explicit MixedModel(bool f32_gradients) {
        for (const std::size_t count : {600u, 16u, 3000u, 16u, 0u, 5u, 1025u, 1u}) {
            const std::size_t i = values.size();
            Tensor& p =
                values.emplace_back("p" + std::to_string(i), i % 2 == 0 ? DType::bf16 : DType::f32, std::vector{std::size_t{count}});
            p.value = random_gradient(p, 77, 0, i);
            gradients.emplace_back(count);
        }
        for (std::size_t i = 0; i < values.size(); ++i) {
            views.push_back(parameter_view(values[i]));
            if (f32_gradients) views[i].gradient = buffer(gradients[i]);
        }
    }
};

/// The weights after some steps of what `make(backend, views)` returns a pointer to; `norms` are those of all steps.
template <class Make>
std::vector<Bytes> mixed_weights(int size, bool f32_gradients, Make&& make, std::vector<double>& norms) {
    std::vector<Bytes> result;
    norms.clear();
    run_threads(
        size,
        [&](ThreadBackend comm) {
            MixedModel model(f32_gradients);
            const auto sharded = make(comm, model.views);
            sharded->broadcast_parameters();
            for (int s = 0; s < 4; ++s) {
                sharded_backward(*sharded, s);
                sharded->finish();
                const double norm = sharded->gradient_norm();
                if (comm.rank() == 0) norms.push_back(norm);
                sharded->step(gradsync::clip_factor(norm, 1.5));
            }
            const auto mine = weights(*sharded);
            if (comm.rank() == 0) result = mine;
        },
        patient);
    return result;
}

}  // namespace

TEST_CASE("bf16 matrices and f32 norms with f32 gradients share buckets and units as far as they can, and train to the same bits") {
    for (const int size : rank_counts(1, 3)) {
        CAPTURE(size);
        std::vector<double> expected_norms, norms;
        const auto optimizer = [](auto stage, const AnyBuckets& buckets, ParameterStorage storage) {
            return [=](ThreadBackend comm, const std::vector<ParameterView>& views) {
                return std::make_unique<ShardedOptimizer<ThreadBackend, AdamW, decltype(stage), AnyBuckets>>(
                    comm, views, AdamW{}, ShardingOptions{.parameters = storage}, buckets);
            };
        };
        const auto expected = mixed_weights(size, true, optimizer(Zero1{}, PerParameter{}, ParameterStorage::borrowed), expected_norms);
        const auto check = [&](auto&& make, const std::string& what) {
            CAPTURE(what);
            CHECK(first_difference(expected, mixed_weights(size, true, make, norms)) == "");
            CHECK(norms == expected_norms);
        };
        const auto check_optimizers = [&](auto stage, ParameterStorage storage) {
            CAPTURE(static_cast<int>(storage));
            check(optimizer(stage, PerParameter{}, storage), "PerParameter");
            check(optimizer(stage, SizeCappedBuckets{}, storage), "the default");
            check(optimizer(stage, SizeCappedBuckets(3000), storage), "small buckets");
            check(optimizer(stage, Flat{}, storage), "Flat");
        };
        for (const ParameterStorage storage : {ParameterStorage::borrowed, ParameterStorage::in_buckets}) {
            check_optimizers(Zero1{}, storage);
            check_optimizers(Zero2{}, storage);
        }
        const auto parameters = [](const Units& units, ShardedParametersOptions options) {
            return [=](ThreadBackend comm, const std::vector<ParameterView>& views) {
                return std::make_unique<ShardedParameters<ThreadBackend, AdamW>>(comm, views, AdamW{}, units, options);
            };
        };
        check(parameters(Units({0, 1, 2, 3, 4, 5, 6, 7}), {}), "a unit for each parameter");
        for (const bool shards : {true, false}) {
            check(parameters(Units({0, 0, 0, 0, 1, 1, 2, 2}), {.shard_gradients = shards}), "units of both types");
            check(parameters(Units({0, 0, 0, 0, 1, 1, 2, 2}), {.shard_gradients = shards, .reshard_after_forward = false}),
                  "units that stay");
            check(parameters(Units(std::vector<std::size_t>(8)), {.shard_gradients = shards, .replicate_below = 100}), "one unit of all");
        }
    }
}

TEST_CASE("bf16 matrices and f32 norms whose gradients travel in f32 share buckets as far as they can, and train to the same bits") {
    for (const int size : rank_counts(1, 3)) {
        CAPTURE(size);
        std::vector<double> expected_norms, norms;
        const auto optimizer = [](const AnyBuckets& buckets, ParameterStorage storage) {
            return [=](ThreadBackend comm, const std::vector<ParameterView>& views) {
                return std::make_unique<ShardedOptimizer<ThreadBackend, AdamW, Zero1, AnyBuckets>>(
                    comm, views, AdamW{}, ShardingOptions{.reducer = {.reduce_dtype = DType::f32}, .parameters = storage}, buckets);
            };
        };
        const auto expected = mixed_weights(size, false, optimizer(PerParameter{}, ParameterStorage::borrowed), expected_norms);
        for (const ParameterStorage storage : {ParameterStorage::borrowed, ParameterStorage::in_buckets}) {
            const auto check = [&](const AnyBuckets& buckets) {
                CAPTURE(buckets.describe());
                CHECK(first_difference(expected, mixed_weights(size, false, optimizer(buckets, storage), norms)) == "");
                CHECK(norms == expected_norms);
            };
            check(PerParameter{});
            check(SizeCappedBuckets{});
            check(SizeCappedBuckets(3000));
            check(Flat{});
        }
    }
}
