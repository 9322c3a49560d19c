// SPDX-License-Identifier: BSL-1.0
// ctest: SANITIZED LIBRARIES gradsync_device_support gradsync_fake_nccl gradsync_fake_passes
// Sharded training in device memory, over the fakes of support/fake, in which ranks leave out layers or have no batch.
#include <gradsync/backend/nccl.hpp>
#include <gradsync/backend/staging.hpp>
#include <gradsync/backend/thread_backend.hpp>
#include <gradsync/bucket/per_parameter.hpp>
#include <gradsync/cuda/optimizers.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

#include <doctest/doctest.h>

#include <iterator>
#include <string>
#include <vector>

#include "device_sharding_fakes.hpp"
#include "support/device_training.hpp"
#include "support/slow_build.hpp"

using namespace gradsync;
using gradsync_test::on_nccl_ranks;
using gradsync_test::StagedThreads;
using gradsync_test::views_of;

namespace {

/// Which ranks do not compute a gradient in a step: those whose batch does not use the layer, or one that has no batch.
enum class Gaps { unused, no_batch };

bool computes(Gaps gaps, std::size_t step, int rank, std::size_t i, int size) {
    const std::size_t r = static_cast<std::size_t>(rank);
    return gaps == Gaps::unused ? (step * 5 + r * 3 + i * 7) % 4 != 0 : size == 1 || r != step % static_cast<std::size_t>(size);
}

const std::size_t gap_sizes[] = {5, 300, 5000, 20000, 7, 900};
constexpr std::size_t gap_steps = 5;

/// Weights of 1, after steps with gradients of 1 where there are no gaps.
template <class B>
std::vector<float> with_gaps(B comm, Gaps gaps, int stage) {
    std::vector<gradsync_test::Numbers<B>> weights, ones;
    std::vector<std::size_t> units;
    for (const std::size_t n : gap_sizes) {
        weights.emplace_back(n, 1.0f), ones.emplace_back(n, 1.0f);
        units.push_back(units.size());
    }
    const ReducerOptions options{.unused = gaps == Gaps::unused ? UnusedParameters::find_unused : UnusedParameters::error};
    const cuda::Sgd sgd({.learning_rate = 0.5, .momentum = 0});
    std::vector<float> all;
    const auto train = [&](auto& sharded, auto&& use) {
        sharded.broadcast_parameters();
        for (std::size_t step = 0; step < gap_steps; ++step) {
            if (gaps == Gaps::no_batch && !sharded.begin_step(computes(gaps, step, comm.rank(), 0, comm.size()))) break;
            for (std::size_t i = units.size(); i-- > 0;) {
                [[maybe_unused]] const auto in_use = use(i);
                if (!computes(gaps, step, comm.rank(), i, comm.size())) continue;
                detail::passes_of(comm).copy(ones[i].view(), sharded.acquire_gradient(i));
                sharded.mark_ready(i);
            }
            sharded.finish();
            sharded.step();
        }
        for (const std::size_t i : units) {
            [[maybe_unused]] const auto in_use = use(i);
            const std::vector<float> values = gradsync_test::read(comm, sharded.parameter_value(i));
            all.insert(all.end(), values.begin(), values.end());
        }
    };
    if (stage == 3) {
        ShardedParameters sharded(comm, views_of(weights), sgd, Units(units), ShardedParametersOptions{.reducer = options});
        train(sharded, [&](std::size_t i) { return sharded.gather(i); });
    } else {
        ShardedOptimizer sharded(comm, views_of(weights), sgd, ShardingOptions{.reducer = options}, PerParameter{}, Zero2{});
        train(sharded, [](std::size_t) { return 0; });
    }
    return all;
}

/// The same by a loop.
std::vector<float> with_gaps(Gaps gaps, int size) {
    std::vector<float> all;
    for (std::size_t i = 0; i < std::size(gap_sizes); ++i) {
        float weight = 1;
        for (std::size_t step = 0; step < gap_steps; ++step) {
            int computed = 0;
            for (int r = 0; r < size; ++r) computed += computes(gaps, step, r, i, size) ? 1 : 0;
            weight -= 0.5f * (gaps == Gaps::unused ? static_cast<float>(computed) / static_cast<float>(size) : 1.0f);
        }
        all.insert(all.end(), gap_sizes[i], weight);
    }
    return all;
}

/// Two steps with many units. In one of them the last rank has no batch, or does not use the first bucket: it joins that in `finish()`.
template <class B>
std::vector<float> with_many_units(B comm, Gaps gaps, bool shard_gradients) {
    constexpr std::size_t units = 300;
    gradsync_test::Numbers<B> all(16 * units, 1.0f);
    std::vector<ParameterView> views;
    std::vector<std::size_t> unit_of;
    for (std::size_t u = 0; u < units; ++u) {
        BufferView part = all.view().subview(16 * u, 16), gradient = part;
        gradient.data = nullptr;
        views.push_back({.name = "p" + std::to_string(u), .value = part, .gradient = gradient});
        unit_of.push_back(u);
    }
    const ReducerOptions options{.unused = gaps == Gaps::unused ? UnusedParameters::find_unused : UnusedParameters::error};
    ShardedParameters sharded(comm, views, cuda::Sgd({.learning_rate = 0.5, .momentum = 0}), Units(unit_of),
                              ShardedParametersOptions{.reducer = options, .shard_gradients = shard_gradients});
    sharded.broadcast_parameters();
    for (int step = 0; step < 2; ++step) {
        const bool all_compute = step == 0 || comm.rank() + 1 != comm.size();
        if (gaps == Gaps::no_batch) (void)sharded.begin_step(all_compute);
        for (std::size_t u = units; u-- > 0;) {
            const auto use = sharded.gather(u);
            if (!all_compute && (gaps == Gaps::no_batch || u + 1 == units)) continue;
            detail::passes_of(comm).copy(sharded.parameter_value(u), sharded.acquire_gradient(u));
            sharded.mark_ready(u);
        }
        sharded.finish();
        sharded.step();
    }
    std::vector<float> values;
    for (std::size_t u = 0; u < units; ++u) {
        const auto use = sharded.gather(u);
        values.push_back(gradsync_test::read(comm, sharded.parameter_value(u))[15]);
    }
    return values;
}

}  // namespace

TEST_CASE("sharding on devices: ranks that leave out layers, or have no batch, do not wait for one another's gathers and buckets") {
    for (const Gaps gaps : {Gaps::unused, Gaps::no_batch})
        for (int stage = 2; stage <= 3; ++stage)
            for (const int size : gradsync_test::rank_counts()) {
                CAPTURE(static_cast<int>(gaps));
                CAPTURE(stage);
                CAPTURE(size);
                const std::vector<float> expected = with_gaps(gaps, size);
                gradsync_test::Findings findings;
                const auto check = [&](const char* how, const std::vector<float>& result) {
                    findings.check(result.size() == expected.size() && gradsync_test::distance(result, expected) < 1e-5f, how);
                };
                on_nccl_ranks(size, [&](NcclBackend comm) { check("over NCCL", with_gaps(comm, gaps, stage)); });
                run_threads(size, [&](ThreadBackend host) { check("staged", with_gaps(StagedThreads(host), gaps, stage)); });
            }
}

TEST_CASE("sharding on devices takes more units than a communicator does at once, and a rank may join their buckets at the end") {
    gradsync_test::Findings findings;
    for (const Gaps gaps : {Gaps::unused, Gaps::no_batch})
        for (const bool shard_gradients : {false, true}) {
            std::vector<float> expected(300, 0.25f);  // 1, halved twice
            if (gaps == Gaps::unused) expected.back() = 0.375f;
            on_nccl_ranks(2, [&](NcclBackend comm) {
                const std::string how = std::string(gaps == Gaps::unused ? "unused" : "no batch") + (shard_gradients ? ", sharded" : "");
                findings.check(with_many_units(comm, gaps, shard_gradients) == expected, how.c_str());
            });
        }
}
