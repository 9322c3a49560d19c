// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
// The threads of a simulation take turns.
#include <gradsync/planning/simulated_backend.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <gradsync/bucket/any_buckets.hpp>
#include <gradsync/bucket/flat.hpp>
#include <gradsync/bucket/per_parameter.hpp>
#include <gradsync/overlap/any_overlap.hpp>
#include <gradsync/overlap/no_overlap.hpp>
#include <gradsync/planning/calibrate.hpp>
#include <gradsync/planning/optimal_buckets.hpp>
#include <gradsync/planning/scaling.hpp>
#include <gradsync/reducer.hpp>

#include "support/plans.hpp"
#include "support/ranks.hpp"

using namespace gradsync;
using doctest::Approx;

namespace {

constexpr plan::Link slow_link{1e-5, 1e-9}, fast_link{1e-6, 1e-11};
constexpr plan::Cluster four{.ranks = 4, .between = slow_link};

double all_reduce_seconds(const plan::Cluster& cluster, double bytes, plan::Algorithm algorithm = plan::Algorithm::ring) {
    return plan::collective_cost(plan::Collective::all_reduce, algorithm, cluster).seconds(bytes);
}

/// Gradients of one step, in the order in which the backward delivers them: the last parameter first.
struct Backward {
    std::vector<ParameterView> parameters;
    std::vector<double> compute;  // by place in that order

    Backward(std::uint64_t seed, std::size_t count) {
        std::mt19937_64 random(seed);
        for (std::size_t i = 0; i < count; ++i) {
            parameters.push_back({.name = std::to_string(i), .gradient = {nullptr, 1 + random() % 50'000, DType::f32, MemorySpace::host}});
            compute.push_back(1e-5 * static_cast<double>(random() % 30));
        }
    }
    /// By parameter.
    std::vector<plan::ReadyGradient> gradients() const {
        std::vector<plan::ReadyGradient> result(parameters.size());
        double ready = 0;
        for (std::size_t k = 0; k < parameters.size(); ++k) {
            const std::size_t i = parameters.size() - 1 - k;
            result[i] = {ready += compute[k], parameters[i].gradient.bytes()};
        }
        return result;
    }
    std::vector<double> ready() const {
        std::vector<double> result;
        for (const plan::ReadyGradient& g : gradients()) result.push_back(g.ready);
        return result;
    }
    template <class Sync>
    void run(SimulatedBackend& comm, Sync& sync) const {
        for (std::size_t k = 0; k < parameters.size(); ++k) {
            comm.compute(compute[k]);
            sync.mark_ready(parameters.size() - 1 - k);
        }
        sync.finish();
    }
    /// The duration of one step of a Reducer with these policies.
    double step(const SimulatedCluster& cluster, const AnyBuckets& buckets, const AnyOverlap& overlap = OverlapBackward{}) const {
        double begin = 0;
        const SimulatedRun run = run_simulated(cluster, [&](SimulatedBackend comm) {
            Reducer sync(comm, parameters, {.gradients = GradientStorage::in_buckets}, buckets, overlap);
            comm.barrier().wait();
            begin = comm.now();
            this->run(comm, sync);
        });
        return run.seconds() - begin;
    }
};

}  // namespace

TEST_CASE("a collective begins with its last rank and takes the time of the cost model") {
    std::vector<double> ends(4);
    const SimulatedRun run = run_simulated({.cluster = four}, [&](SimulatedBackend comm) {
        std::vector<float> data(1000, static_cast<float>(comm.rank()));
        comm.compute(1e-3 * comm.rank());
        auto work = comm.all_reduce(buffer(data), ReduceOp::sum);
        work.wait();
        ends[static_cast<std::size_t>(comm.rank())] = comm.now();
        if (data[999] != 6) throw data[999];
    });
    const double expected = 3e-3 + all_reduce_seconds(four, 4000);
    for (const double end : ends) CHECK(end == Approx(expected));
    REQUIRE(run.collectives.size() == 1);
    CHECK(run.collectives[0].first == 0);
    CHECK(run.collectives[0].ready == Approx(3e-3));
    CHECK(run.collectives[0].start == Approx(3e-3));
    CHECK(run.collectives[0].end == Approx(expected));
    CHECK(run.collectives[0].bytes == 4000);
    CHECK(run.seconds() == Approx(expected));
}

TEST_CASE("compute goes on beside a collective; test() says by this rank's clock whether it is through") {
    const double needed = all_reduce_seconds(four, 4e6);
    const auto finding = gradsync_test::outcome_of([&] {
        run_simulated({.cluster = four}, [&](SimulatedBackend comm) {
            std::vector<float> data(1'000'000);
            auto work = comm.all_reduce(buffer(data), ReduceOp::sum);
            comm.compute(0.5 * needed);
            if (work.test()) throw std::runtime_error("through too early");
            comm.compute(0.49 * needed);
            if (work.test()) throw std::runtime_error("through a little too early");
            comm.compute(0.02 * needed);
            if (!work.test()) throw std::runtime_error("not through in time");
            if (comm.now() > 1.02 * needed) throw std::runtime_error("compute and collective did not overlap");
        });
    });
    CHECK(finding.text == "");
}

TEST_CASE("a link carries one collective at a time; nodes have links of their own") {
    const plan::Cluster cluster{.ranks = 4, .ranks_per_node = 2, .between = slow_link, .within = fast_link};
    const SimulatedRun run = run_simulated({.cluster = cluster}, [&](SimulatedBackend comm) {
        SimulatedBackend node = comm.split(comm.rank() / 2, comm.rank());
        SimulatedBackend pair = comm.split(comm.rank() % 2, comm.rank());
        comm.barrier().wait();
        std::vector<float> data(100'000);
        auto a = node.all_reduce(buffer(data), ReduceOp::sum);
        a.wait();
        comm.barrier().wait();
        a = pair.all_reduce(buffer(data), ReduceOp::sum);
        a.wait();
    });
    std::vector<simulation::CollectiveRecord> large;
    for (const auto& record : run.collectives)
        if (record.bytes == 400'000) large.push_back(record);
    REQUIRE(large.size() == 4);
    const double within = all_reduce_seconds({.ranks = 2, .ranks_per_node = 2, .within = fast_link}, 4e5);
    const double between = all_reduce_seconds({.ranks = 2, .between = slow_link}, 4e5);
    CHECK(large[0].start == large[1].start);  // the two nodes at once
    CHECK(large[1].end - large[1].start == Approx(within));
    CHECK(large[2].ready == large[3].ready);  // two groups over the same links
    CHECK(large[3].start == Approx(large[2].end));
    CHECK(large[3].end - large[3].start == Approx(between));
}

TEST_CASE("a step of a real Reducer takes what the forecast says, for every policy") {
    for (const std::uint64_t seed : {1u, 2u, 3u}) {
        const Backward backward(seed, 60);
        const auto gradients = backward.gradients();
        const plan::StepTimes compute{.backward = gradients.front().ready};
        const SimulatedCluster cluster{.cluster = {.ranks = 6, .ranks_per_node = 2, .between = slow_link, .within = fast_link},
                                       .algorithm = plan::Algorithm::hierarchical,
                                       .moves_buckets = false};
        const plan::CallCost cost = plan::collective_cost(plan::Collective::all_reduce, cluster.algorithm, cluster.cluster);
        std::vector<ParameterInfo> infos;
        for (const ParameterView& p : backward.parameters) infos.push_back({.count = p.gradient.count});
        double best = 1e9, optimal = 0;
        const auto check = [&](const AnyBuckets& policy) {
            const auto buckets = plan::buckets_of(gradients, policy.plan(infos, gradsync_test::reversed(infos.size())));
            // Buckets are a little larger than their gradients, which begin at multiples of 64 bytes.
            const double overlapped = backward.step(cluster, policy);
            CHECK(overlapped == Approx(plan::forecast_step(compute, buckets, cost, true).step).epsilon(2e-3));
            CHECK(backward.step(cluster, policy, NoOverlap{}) ==
                  Approx(plan::forecast_step(compute, buckets, cost, false).step).epsilon(2e-3));
            best = std::min(best, overlapped);
            optimal = overlapped;
        };
        check(PerParameter{});
        check(Flat{});
        for (const std::size_t cap : {50'000u, 200'000u, 500'000u, 1'000'000u, 3'000'000u}) check(SizeCappedBuckets(cap, cap));
        check(OptimalBuckets(cost, backward.ready()));
        CHECK(optimal == Approx(best).epsilon(2e-3));
    }
}

TEST_CASE("a simulation with the same seed repeats exactly, with stragglers and jitter too; another seed gives another run") {
    const Backward backward(7, 40);
    const auto run = [&](std::uint64_t seed) {
        SimulatedCluster cluster{.cluster = {.ranks = 16, .ranks_per_node = 4, .between = slow_link, .within = fast_link},
                                 .stragglers = {{3, 1.5}},
                                 .jitter = 0.2,
                                 .seed = seed,
                                 .moves_buckets = false};
        return run_simulated(cluster, [&](SimulatedBackend comm) {
            Reducer sync(comm, backward.parameters, {.gradients = GradientStorage::in_buckets}, SizeCappedBuckets(1 << 20));
            for (int step = 0; step < 3; ++step) backward.run(comm, sync);
        });
    };
    const SimulatedRun first = run(1), again = run(1), other = run(2);
    CHECK(first.rank_seconds == again.rank_seconds);
    REQUIRE(first.collectives.size() == again.collectives.size());
    for (std::size_t i = 0; i < first.collectives.size(); ++i) {
        CHECK(first.collectives[i].start == again.collectives[i].start);
        CHECK(first.collectives[i].end == again.collectives[i].end);
    }
    CHECK(first.seconds() != other.seconds());
}

TEST_CASE("a straggler delays every rank") {
    const Backward backward(8, 40);
    const plan::Cluster cluster{.ranks = 8, .between = fast_link};
    const double even = backward.step({.cluster = cluster, .moves_buckets = false}, Flat{});
    const double held_up = backward.step({.cluster = cluster, .stragglers = {{5, 2}}, .moves_buckets = false}, Flat{});
    CHECK(held_up - even == Approx(backward.gradients().front().ready).epsilon(1e-6));
}

TEST_CASE("a simulation that moves buckets gives the values of threads") {
    const Backward backward(9, 10);
    const auto train = [&](auto comm, std::vector<std::vector<float>>& results) {
        Reducer<decltype(comm)> sync(comm, backward.parameters, {.gradients = GradientStorage::in_buckets});
        for (std::size_t i = backward.parameters.size(); i-- > 0;) {
            const auto gradient = sync.gradient_view(i).template as<float>();
            for (std::size_t k = 0; k < gradient.size(); ++k)
                gradient[k] = 0.1f * static_cast<float>(comm.rank()) + 1.0f / static_cast<float>(1 + k + i);
            sync.mark_ready(i);
        }
        sync.finish();
        if (comm.rank() != 0) return;
        for (std::size_t i = 0; i < sync.parameters().size(); ++i)
            results.emplace_back(sync.gradient_view(i).template as<float>().begin(), sync.gradient_view(i).template as<float>().end());
    };
    std::vector<std::vector<float>> threads, simulated;
    run_threads(3, [&](ThreadBackend comm) { train(comm, threads); });
    run_simulated({.cluster = {.ranks = 3, .between = slow_link}}, [&](SimulatedBackend comm) { train(comm, simulated); });
    CHECK(threads == simulated);
}

TEST_CASE("calibrate finds the cost model again") {
    const plan::Cluster cluster{.ranks = 8, .ranks_per_node = 4, .between = slow_link, .within = fast_link, .call_overhead = 3e-6};
    const SimulatedCluster options{.cluster = cluster, .algorithm = plan::Algorithm::hierarchical, .moves_buckets = false};
    const plan::CallCost truth = plan::collective_cost(plan::Collective::all_reduce, options.algorithm, cluster);
    run_simulated(options, [&](SimulatedBackend comm) {
        const plan::Fit fit = plan::calibrate(comm);
        if (comm.rank() != 0) return;
        CHECK(fit.cost.fixed == Approx(truth.fixed).epsilon(1e-6));
        CHECK(fit.cost.per_byte == Approx(truth.per_byte).epsilon(1e-6));
        CHECK(fit.worst_residual < 1e-6);
    });
}

TEST_CASE("SimulatedBackend runs a real Reducer on each of a thousand ranks") {
    const Backward backward(10, 30);
    const SimulatedCluster cluster{.cluster = {.ranks = 1024, .ranks_per_node = 8, .between = slow_link, .within = fast_link},
                                   .algorithm = plan::Algorithm::hierarchical,
                                   .moves_buckets = false};
    CHECK(backward.step(cluster, SizeCappedBuckets(1 << 20)) > backward.gradients().front().ready);
}

TEST_CASE("waits are limited in virtual time") {
    using gradsync_test::outcome_of;
    const auto late = outcome_of([] {
        run_simulated({.cluster = four, .timeout = std::chrono::seconds(2)}, [](SimulatedBackend comm) {
            if (comm.rank() == 2) comm.compute(3);
            comm.barrier().wait();
        });
    });
    CHECK(late.is(Errc::timeout));
    CHECK_MESSAGE(late.says("rank 2 did not start it"), late.text);
    const auto long_call = outcome_of([] {
        run_simulated({.cluster = {.ranks = 4, .between = {1, 0}}, .timeout = std::chrono::seconds(2)}, [](SimulatedBackend comm) {
            std::vector<float> data(10);
            comm.all_reduce(buffer(data), ReduceOp::sum).wait();
        });
    });
    CHECK(long_call.is(Errc::timeout));
    CHECK_MESSAGE(long_call.says("though every rank started it"), long_call.text);
    const auto deadlock = outcome_of([] {
        run_simulated({.cluster = {.ranks = 2, .between = slow_link}}, [](SimulatedBackend comm) {
            SimulatedBackend twin = comm.duplicate();
            (comm.rank() == 0 ? comm : twin).barrier().wait();
        });
    });
    CHECK(deadlock.is(Errc::timeout));
    CHECK_MESSAGE(deadlock.says("waited 300 s"), deadlock.text);
}

TEST_CASE("SimulatedBackend: a step does without the overlap policy's own thread") {
    const Backward backward(11, 20);
    const SimulatedCluster cluster{.cluster = four, .moves_buckets = false};
    CHECK(backward.step(cluster, SizeCappedBuckets(1 << 18), OverlapBackward(Progress::thread)) ==
          Approx(backward.step(cluster, SizeCappedBuckets(1 << 18))));
}

TEST_CASE("run_simulated refuses invalid clusters") {
    using gradsync_test::outcome_of;
    const auto refused = [](const char* words, SimulatedCluster options) {
        const auto outcome = outcome_of([&] { run_simulated(options, [](SimulatedBackend) {}); });
        CHECK(outcome.is(Errc::invalid_argument));
        CHECK_MESSAGE(outcome.says(words), outcome.text);
    };
    refused("at least 1 rank", {.cluster = {.ranks = 0}});
    refused("do not fill nodes", {.cluster = {.ranks = 9, .ranks_per_node = 4}});
    refused("straggler 4", {.cluster = four, .stragglers = {{4, 2}}});
    refused("factor", {.cluster = four, .stragglers = {{1, -2}}});
    refused("jitter", {.cluster = four, .jitter = -1});
    refused("time limit", {.cluster = four, .timeout = std::chrono::seconds(0)});
    const auto negative = outcome_of([] { run_simulated({.cluster = four}, [](SimulatedBackend comm) { comm.compute(-1); }); });
    CHECK(negative.text.ends_with("seconds must be a finite number of 0 or more, not -1.000000"));
    CHECK(negative.error->context().rank >= 0);
}
