// SPDX-License-Identifier: BSL-1.0
// ctest: ALONE LIBRARIES gradsync_fake_nccl gradsync_fake_passes COST 11
// Sharded training in device memory, over the fakes of support/fake: streams that change, sizes at the edge, what is refused.
#include <gradsync/backend/nccl.hpp>
#include <gradsync/backend/staging.hpp>
#include <gradsync/backend/thread_backend.hpp>
#include <gradsync/bucket/per_parameter.hpp>
#include <gradsync/cuda/optimizers.hpp>
#include <gradsync/shard/hybrid.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iterator>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/device_training.hpp"
#include "support/fake/fake.hpp"
#include "support/rank_threads.hpp"
#include "support/slow_build.hpp"

using namespace gradsync;

namespace {

using StagedThreads = StagingBackend<ThreadBackend>;

template <class F>
void on_nccl_ranks(int size, F&& f) {
    gradsync_test::run_rank_threads(
        size, [](auto& rendezvous) { return NcclBackend(rendezvous, {.timeout = std::chrono::seconds(60)}); }, f);
}

template <class B>
std::vector<ParameterView> views_of(std::vector<gradsync_test::Numbers<B>>& weights) {
    std::vector<ParameterView> views;
    for (auto& w : weights) {
        views.push_back({.name = "p" + std::to_string(views.size()), .value = w.view(), .gradient = w.view(), .may_be_empty = true});
        views.back().gradient.data = nullptr;
    }
    return views;
}

/// A step of stage 3 with one parameter a unit.
template <class B, class Sharded>
void step_with_weights_as_gradients(B& comm, Sharded& sharded, std::size_t units) {
    for (std::size_t u = units; u-- > 0;) {
        const auto use = sharded.gather(u);
        detail::passes_of(comm).copy(sharded.parameter_value(u), sharded.acquire_gradient(u));
        sharded.mark_ready(u);
    }
    sharded.finish();
    sharded.step();
}

/// Weights of 1, after two steps that halve them on a stream that is set after construction, and is late.
template <class B>
std::vector<float> halved_twice_on_another_stream(B comm, cudaStream_t stream) {
    std::vector<gradsync_test::Numbers<B>> weights;
    for (int i = 0; i < 3; ++i) weights.emplace_back(1000, 1.0f);
    ShardedParameters sharded(comm, views_of(weights), cuda::Sgd({.learning_rate = 0.5, .momentum = 0}), Units({0, 1, 2}));
    sharded.broadcast_parameters();
    comm.set_stream(stream);
    for (int step = 0; step < 2; ++step) {
        gradsync_fake::enqueue(stream, [] { std::this_thread::sleep_for(std::chrono::milliseconds(50)); });
        step_with_weights_as_gradients(comm, sharded, 3);
    }
    std::vector<float> all;
    for (std::size_t u = 0; u < 3; ++u) {
        const auto use = sharded.gather(u);
        const std::vector<float> values = gradsync_test::read(comm, sharded.parameter_value(u));
        all.insert(all.end(), values.begin(), values.end());
    }
    return all;
}

/// A step, and an end: the stream of the step is gone by then, and a gather of the step is in flight.
template <class B>
void end_after_a_stream(B comm) {
    std::vector<gradsync_test::Numbers<B>> weights;
    for (int i = 0; i < 2; ++i) weights.emplace_back(1000, 1.0f);
    const cuda::Stream last = cuda::make_stream();
    {
        cuda::Stream first = cuda::make_stream();
        comm.set_stream(first.get());
        ShardedParameters sharded(comm, views_of(weights), cuda::Sgd(), Units({0, 1}));
        sharded.broadcast_parameters();
        step_with_weights_as_gradients(comm, sharded, 2);
        cuda::order(first.get(), last.get(), cuda::make_event());
        comm.set_stream(last.get());
        first = {};
    }
    comm.set_stream(nullptr);
}

/// Weights of 1, after three steps with themselves as gradients.
template <class B>
std::vector<float> shrunk(B comm, const std::vector<std::size_t>& sizes, int stage) {
    std::vector<gradsync_test::Numbers<B>> weights;
    for (const std::size_t n : sizes) weights.emplace_back(n, 1.0f);
    const cuda::Sgd sgd({.learning_rate = 0.25, .momentum = 0.5});
    std::vector<float> all;
    const auto train = [&](auto& sharded, auto&& use) {
        sharded.broadcast_parameters();
        for (int step = 0; step < 3; ++step) {
            for (std::size_t i = sizes.size(); i-- > 0;) {
                [[maybe_unused]] const auto in_use = use(i);
                detail::passes_of(comm).copy(sharded.parameter_value(i), sharded.acquire_gradient(i));
                sharded.mark_ready(i);
            }
            sharded.finish();
            all.push_back(static_cast<float>(sharded.gradient_norm()));
            sharded.step();
        }
        for (std::size_t i = 0; i < sizes.size(); ++i) {
            [[maybe_unused]] const auto in_use = use(i);
            const std::vector<float> values = gradsync_test::read(comm, sharded.parameter_value(i));
            all.insert(all.end(), values.begin(), values.end());
        }
        sharded.collect_everywhere([&](std::size_t, std::size_t, std::size_t, ConstBufferView piece) {
            const auto* const floats = static_cast<const float*>(piece.data);
            all.insert(all.end(), floats, floats + piece.count);
        });
    };
    if (stage == 3) {
        std::vector<std::size_t> unit_of;
        for (std::size_t i = 0; i < sizes.size(); ++i) unit_of.push_back(i);
        ShardedParameters sharded(comm, views_of(weights), sgd, Units(unit_of));
        train(sharded, [&](std::size_t i) { return sharded.gather(i); });
    } else if (stage == 2) {
        ShardedOptimizer sharded(comm, views_of(weights), sgd, ShardingOptions{}, Zero2{});
        train(sharded, [](std::size_t) { return 0; });
    } else {
        ShardedOptimizer sharded(comm, views_of(weights), sgd, ShardingOptions{.reducer = {.gradients = GradientStorage::in_buckets}});
        train(sharded, [](std::size_t) { return 0; });
    }
    return all;
}

/// The same by a loop.
std::vector<float> shrunk(const std::vector<std::size_t>& sizes) {
    std::size_t count = 0;
    for (const std::size_t n : sizes) count += n;
    float weight = 1, momentum = 0;
    std::vector<float> all;
    for (int step = 0; step < 3; ++step) {
        all.push_back(std::sqrt(static_cast<float>(count)) * weight);
        momentum = 0.5f * momentum + weight;
        weight -= 0.25f * momentum;
    }
    all.resize(3 + 2 * count, weight);  // and masters
    all.resize(3 + 3 * count, momentum);
    std::sort(all.begin() + 3, all.end());
    return all;
}

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

TEST_CASE("sharding on devices: more units than a communicator takes at once, and a rank that joins their buckets at the end") {
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

TEST_CASE("sharding on devices: fewer elements than ranks, empty parameters, and none") {
    for (const std::vector<std::size_t>& sizes : {std::vector<std::size_t>{}, {0}, {1}, {0, 1, 0}, {2, 0, 1, 3, 17}})
        for (int stage = 1; stage <= 3; ++stage)
            for (const int size : gradsync_test::rank_counts()) {
                CAPTURE(sizes.size());
                CAPTURE(stage);
                CAPTURE(size);
                const std::vector<float> expected = shrunk(sizes);
                gradsync_test::Findings findings;
                const auto check = [&](const char* how, std::vector<float> result) {
                    std::sort(result.begin() + 3, result.end());  // pieces come in the order of the buckets
                    findings.check(result.size() == expected.size() && gradsync_test::distance(result, expected) < 1e-6f, how);
                };
                on_nccl_ranks(size, [&](NcclBackend comm) { check("over NCCL", shrunk(comm, sizes, stage)); });
                run_threads(size, [&](ThreadBackend host) { check("staged", shrunk(StagedThreads(host), sizes, stage)); });
            }
}

TEST_CASE("sharding on devices: gathers follow a stream that is set after construction") {
    const std::vector<float> expected(3000, 0.25f);
    gradsync_test::Findings findings;
    on_nccl_ranks(2, [&](NcclBackend comm) {
        const cuda::Stream stream = cuda::make_stream();
        findings.check(halved_twice_on_another_stream(comm, stream.get()) == expected, "over NCCL");
        comm.set_stream(nullptr);
    });
    run_threads(2, [&](ThreadBackend host) {
        const cuda::Stream stream = cuda::make_stream();
        findings.check(halved_twice_on_another_stream(StagedThreads(host), stream.get()) == expected, "staged");
    });
}

TEST_CASE("sharding on devices: nothing goes to a stream that is gone after another one was set") {
    for (const NcclMemory memory : {NcclMemory::plain, NcclMemory::registered})
        gradsync_test::run_rank_threads(
            2, [&](auto& rendezvous) { return NcclBackend(rendezvous, {.timeout = std::chrono::seconds(60), .memory = memory}); },
            [](NcclBackend comm) { end_after_a_stream(comm); });
    run_threads(2, [](ThreadBackend host) { end_after_a_stream(StagedThreads(host)); });
}

TEST_CASE("sharding on devices: a rank that throws in the middle of a step keeps nobody waiting, though its device waits") {
    std::string told;  // to rank 1
    const auto train = [&](NcclBackend comm) {
        std::vector<gradsync_test::Numbers<NcclBackend>> weights;
        for (int i = 0; i < 2; ++i) weights.emplace_back(10, 1.0f);
        ShardedParameters sharded(comm, views_of(weights), cuda::Sgd(), Units({0, 1}),
                                  ShardedParametersOptions{.reducer = {.unused = UnusedParameters::find_unused}});
        const auto use = sharded.gather(1);
        comm.host().barrier().wait();  // so that rank 1 is told at its next call, not in gather()
        if (comm.rank() == 1) {
            try {
                comm.host().barrier().wait();
            } catch (const Error& error) {
                told = error.what();
            }
            return;
        }
        detail::passes_of(comm).copy(sharded.parameter_value(1), sharded.acquire_gradient(1));
        sharded.mark_ready(1);  // rank 1 does not use it, and would join its bucket in finish()
        throw std::runtime_error("rank 0 gives up");
    };
    CHECK_THROWS_WITH_AS(on_nccl_ranks(2, train), "rank 0 gives up", std::runtime_error);
    CHECK_MESSAGE(told.find("an exception ended its step") != std::string::npos, told);  // and not that it waited for the time limit
}

TEST_CASE("sharding on devices: small parameters that fill a bucket all the time leave the large slot to the large unit") {
    gradsync_test::Findings findings;
    const auto train = [&]<class B>(B comm, auto&& make_busy) {
        std::vector<gradsync_test::Numbers<B>> weights;
        for (const std::size_t n : {4u, 1500u, 7u, 1200u, 900u}) weights.emplace_back(n, 1.0f);
        const cuda::Stream stream = cuda::make_stream();
        comm.set_stream(stream.get());
        {
            ShardedParameters sharded(comm, views_of(weights), cuda::Sgd({.learning_rate = 0.5, .momentum = 0}), Units({0, 0, 0, 1, 2}),
                                      ShardedParametersOptions{.replicate_below = 10});
            {
                [[maybe_unused]] const auto busy = make_busy(stream.get());  // so that units 1 and 2 still have their slots
                for (std::size_t i = 5; i-- > 0;) {
                    const auto use = sharded.gather(sharded.unit_of(i));
                    detail::passes_of(comm).copy(sharded.parameter_value(i), sharded.acquire_gradient(i));
                    sharded.mark_ready(i);
                }
            }
            sharded.finish();
            sharded.step();
            const auto use = sharded.gather(0);
            for (std::size_t i = 0; i < 3; ++i)
                findings.check(gradsync_test::read(comm, sharded.parameter_value(i)).back() == 0.5f, "wrong weights");
        }
        comm.set_stream(nullptr);
    };
    on_nccl_ranks(2, [&](NcclBackend comm) { train(comm, [](cudaStream_t stream) { return gradsync_fake::Busy(stream); }); });
    run_threads(2, [&](ThreadBackend host) { train(StagedThreads(host), [](cudaStream_t) { return 0; }); });
}

TEST_CASE("sharding on devices: gradients are seen with their scale") {
    on_nccl_ranks(1, [&](NcclBackend comm) {
        std::vector<gradsync_test::Numbers<NcclBackend>> weights;
        weights.emplace_back(100, 3.0f);
        ShardedOptimizer sharded(comm, views_of(weights), cuda::Sgd(), Zero2{});
        for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
            detail::passes_of(comm).copy(sharded.parameter_value(0), sharded.acquire_gradient(0));
            sharded.mark_ready(0);
            sharded.finish();
        }
        float gradient = 0;
        sharded.for_each_gradient([&](const DeviceSlice& slice, double scale) {
            gradient = gradsync_test::read(comm, BufferView{const_cast<void*>(slice.gradient.data), slice.gradient.count,
                                                            slice.gradient.dtype, MemorySpace::device})[99] *
                       static_cast<float>(scale);
        });
        CHECK(gradient == 3.0f);  // the mean of two
        sharded.discard();
    });
}

TEST_CASE("sharding on devices: gradients in another order than the plan's are refused, with what to do") {
    on_nccl_ranks(1, [&](NcclBackend comm) {
        std::vector<gradsync_test::Numbers<NcclBackend>> weights;
        for (int i = 0; i < 4; ++i) weights.emplace_back(10, 1.0f);
        ShardedParameters sharded(comm, views_of(weights), cuda::Sgd(), Units({0, 1, 2, 3}));
        (void)sharded.acquire_gradient(0);
        (void)sharded.acquire_gradient(1);
        CHECK_THROWS_WITH_AS((void)sharded.acquire_gradient(2), doctest::Contains("reverse order of registration"), Error);
    });
}

TEST_CASE("sharding on devices: what the library's optimizers do not take is refused at construction") {
    on_nccl_ranks(1, [&](NcclBackend comm) {
        std::vector<gradsync_test::Numbers<NcclBackend>> weights;
        weights.emplace_back(10, 1.0f, DType::f64);
        CHECK_THROWS_WITH_AS(ShardedOptimizer(comm, views_of(weights), cuda::AdamW()),
                             doctest::Contains("parameter 'p0' has weights or gradients in f64, which the optimizer does not take"), Error);
    });
}

TEST_CASE("sharding on devices: a communicator made from one with a stream of its own follows the trainer's") {
    on_nccl_ranks(1, [&](NcclBackend comm) {
        const cuda::Stream stream = cuda::make_stream();
        comm.set_stream(stream.get());
        NcclBackend replicas = comm.duplicate();
        replicas.use_own_stream();
        CHECK(replicas.stream() != stream.get());
        CHECK(replicas.duplicate().stream() == stream.get());
        comm.set_stream(nullptr);
    });
}

TEST_CASE("sharding on devices: the replicas of staged groups follow the group") {
    gradsync_test::Findings findings;
    run_threads(2, [&](ThreadBackend host) {
        const cuda::Stream stream = cuda::make_stream();
        auto [group, replicas] = hybrid_groups(StagedThreads(host), 1);
        group.set_stream(stream.get());
        std::vector<gradsync_test::Numbers<StagedThreads>> weights;
        weights.emplace_back(100, 1.0f);
        ShardedOptimizer sharded(group, views_of(weights), cuda::Sgd(), Zero2{}, HybridReduceScatter<StagedThreads>(replicas));
        detail::passes_of(group).copy(sharded.parameter_value(0), sharded.acquire_gradient(0));
        sharded.mark_ready(0);
        sharded.finish();
        sharded.step();
        findings.check(replicas.stream() == stream.get(), "the replicas kept their stream");
    });
}

TEST_CASE("sharding on devices: the replicas of staged groups follow the group to a stream that is set before finish()") {
    gradsync_test::Findings findings;
    gradsync_fake::upload_slowly(std::chrono::milliseconds(20));
    run_threads(4, [&](ThreadBackend host) {
        const cuda::Stream first = cuda::make_stream(), second = cuda::make_stream();
        auto [group, replicas] = hybrid_groups(StagedThreads(host), 2);
        group.set_stream(first.get());
        std::vector<gradsync_test::Numbers<StagedThreads>> weights;
        weights.emplace_back(100, 8.0f);
        gradsync_test::Numbers<StagedThreads> gradient(100, static_cast<float>(host.rank()));
        ShardedOptimizer sharded(group, views_of(weights), cuda::Sgd({.learning_rate = 1, .momentum = 0}), Zero2{},
                                 HybridReduceScatter<StagedThreads>(replicas));
        detail::passes_of(group).copy(gradient.view(), sharded.acquire_gradient(0));
        sharded.mark_ready(0);
        cuda::order(first.get(), second.get(), cuda::make_event());
        group.set_stream(second.get());
        sharded.finish();
        sharded.step();
        findings.check(gradsync_test::read(group, weights[0].view()) == std::vector<float>(100, 6.5f), "not the mean of all ranks");
    });
    gradsync_fake::upload_slowly(std::chrono::milliseconds(0));
}

TEST_CASE("sharding on devices: replicas get the weights of the first group, whatever their stream") {
    gradsync_test::Findings findings;
    gradsync_fake::upload_slowly(std::chrono::milliseconds(20));
    run_threads(4, [&](ThreadBackend host) {
        const cuda::Stream stream = cuda::make_stream();
        auto [group, replicas] = hybrid_groups(StagedThreads(host), 2);
        group.set_stream(stream.get());
        std::vector<gradsync_test::Numbers<StagedThreads>> weights;
        weights.emplace_back(100, host.rank() == 0 ? 8.0f : 9.0f);
        ShardedOptimizer sharded(group, views_of(weights), cuda::Sgd(), Zero2{}, HybridReduceScatter<StagedThreads>(replicas));
        sharded.broadcast_parameters();
        findings.check(gradsync_test::read(group, weights[0].view()) == std::vector<float>(100, 8.0f), "not rank 0's weights");
    });
    gradsync_fake::upload_slowly(std::chrono::milliseconds(0));
}
