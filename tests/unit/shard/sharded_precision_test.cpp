// SPDX-License-Identifier: BSL-1.0
// Sharded gradients that travel in another type than their own: the type on the wire, of the shards and of the gradient.
#include <doctest/doctest.h>

#include <cstddef>
#include <string>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

#include "support/averaging_oracle.hpp"
#include "support/sharding.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

const std::vector<std::size_t> precise_counts = {50, 3, 0, 700, 1000, 17};
constexpr std::size_t precise_elements = 1770;

/// A backward of random gradients, which ends with `finish()`.
template <class Sharded>
void reduce(Sharded& sharded, const std::vector<Tensor>& model, int batch) {
    for (std::size_t i = model.size(); i-- > 0;) {
        write(sharded.acquire_gradient(i), random_gradient(model[i], sharded.backend().rank(), batch, i));
        sharded.mark_ready(i);
    }
    sharded.finish();
}

std::vector<float> as_f32(const Bytes& from, DType type) {
    std::vector<float> to(from.size() / size_of(type));
    kernel::convert(from.data(), type, to.data(), DType::f32, to.size());
    return to;
}

/// The mean over the ranks of gradients that are rounded to `wire` before they leave, and again once they are added up.
std::vector<float> mean_over(DType wire, const Tensor& t, int ranks, int batch, std::size_t i) {
    std::vector<Bytes> sent;
    for (const Bytes& gradient : gradients_of_all(t, ranks, batch, i)) {
        sent.emplace_back(t.count() * size_of(wire));
        kernel::convert(gradient.data(), t.dtype, sent.back().data(), wire, t.count());
    }
    return as_f32(mean_of(wire, sent), wire);
}

/// Two micro-batches a step: their means add up in f32.
template <class Sharded>
void check_shards(Sharded& sharded, const std::vector<Tensor>& model, DType wire, Finding& finding) {
    const int ranks = sharded.backend().size();
    for (int step = 0; step < 2; ++step) {
        reduce(sharded, model, 2 * step);
        reduce(sharded, model, 2 * step + 1);
        sharded.for_each_gradient([&](const auto& slice) {
            const Tensor& t = model[slice.parameter];
            const auto first = mean_over(wire, t, ranks, 2 * step, slice.parameter);
            const auto second = mean_over(wire, t, ranks, 2 * step + 1, slice.parameter);
            for (std::size_t k = 0; k < slice.gradient.size(); ++k)
                finding.check(static_cast<float>(slice.gradient[k]) == first[slice.first + k] + second[slice.first + k],
                              t.name + " of step " + std::to_string(step));
        });
        sharded.step();
    }
}

/// The weights after some steps of one micro-batch.
template <class Stage>
std::vector<Bytes> trained(int ranks, DType wire) {
    std::vector<Bytes> result;
    run_threads(
        ranks,
        [&](ThreadBackend comm) {
            auto model = initial_tensors(precise_counts, DType::f32);
            ShardedOptimizer<ThreadBackend, AdamW, Stage> sharded(
                comm, model, AdamW{}, {.reducer = {.reduce_dtype = wire}, .parameters = ParameterStorage::in_buckets},
                SizeCappedBuckets(2000));
            for (int step = 0; step < 3; ++step) {
                reduce(sharded, model, step);
                sharded.step();
            }
            if (comm.rank() == 0) result = weights(sharded);
        },
        patient);
    return result;
}

}  // namespace

TEST_CASE("PyTorch parity: sharded gradients travel in reduce_dtype, and add up in f32") {
    for (const DType own : {DType::f32, DType::bf16})
        for (const DType wire : {DType::bf16, DType::f16, DType::f32})
            for (const int ranks : rank_counts(1, 3)) {
                CAPTURE(name_of(own));
                CAPTURE(name_of(wire));
                CAPTURE(ranks);
                CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                          auto model = initial_tensors(precise_counts, own);
                          ShardedOptimizer<ThreadBackend, Sgd, Zero2> two(comm, model, Sgd{}, {.reducer = {.reduce_dtype = wire}},
                                                                          SizeCappedBuckets(500));
                          check_shards(two, model, wire, finding);
                          const std::size_t sent = two.statistics().last.bytes,
                                            least = precise_elements * (2 * size_of(wire) + size_of(own));
                          finding.check(ranks == 1 || (least <= sent && sent < least + 1500), "not the bytes of the wire's type");
                          ShardedParameters<ThreadBackend, Sgd> three(comm, model, Sgd{}, Units({0, 0, 1, 1, 2, 2}),
                                                                      {.reducer = {.reduce_dtype = wire}});
                          check_shards(three, model, wire, finding);
                      }) == "");
            }
}

TEST_CASE("with reduce_dtype every stage steps the same averages") {
    for (const int ranks : rank_counts(1, 3)) {
        CAPTURE(ranks);
        const auto expected = trained<Zero1>(ranks, DType::bf16);
        CHECK(first_difference(expected, trained<Zero1>(ranks, DType::f32)) != "");
        CHECK(first_difference(expected, trained<Zero2>(ranks, DType::bf16)) == "");
        CHECK(first_difference(expected, trained<StepInside>(ranks, DType::bf16)) == "");
    }
}
