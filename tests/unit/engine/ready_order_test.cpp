// SPDX-License-Identifier: BSL-1.0
// Buckets planned anew from the times at which gradients became ready.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/planning/calibrate.hpp>
#include <gradsync/planning/optimal_buckets.hpp>
#include <gradsync/planning/simulated_backend.hpp>

#include "support/averaging_oracle.hpp"
#include "support/plans.hpp"
#include "support/ranks.hpp"
#include "support/tensor.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

constexpr plan::Cluster cluster{.ranks = 3, .between = {2e-5, 1e-9}};

std::vector<ParameterView> parameters_of(const std::vector<std::size_t>& counts) {
    std::vector<ParameterView> parameters;
    for (const std::size_t n : counts)
        parameters.push_back({.name = std::to_string(parameters.size()), .gradient = {nullptr, n, DType::f32, MemorySpace::host}});
    return parameters;
}

const std::vector<std::size_t> counts{50'000, 200, 80'000, 100, 100'000, 20'000, 60'000, 5};
/// Seconds of compute before each gradient, the last parameter first.
const std::vector<double> compute{1e-4, 3e-4, 1e-5, 2e-4, 2e-4, 0, 1e-4, 3e-4};

using Sync = Reducer<SimulatedBackend, OptimalBuckets>;

void backward(SimulatedBackend& comm, Sync& sync) {
    for (std::size_t k = 0; k < counts.size(); ++k) {
        comm.compute(compute[k]);
        sync.mark_ready(counts.size() - 1 - k);
    }
}

/// By parameter, counted from the first; a rank may be slower.
std::vector<double> expected_times(double factor = 1) {
    std::vector<double> times(counts.size());
    double sum = 0;
    for (std::size_t k = 1; k < counts.size(); ++k) times[counts.size() - 1 - k] = sum += factor * compute[k];
    return times;
}

bool close(std::span<const double> a, const std::vector<double>& b) {
    return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), [](double x, double y) { return std::abs(x - y) <= 1e-12; });
}

}  // namespace

TEST_CASE("rebuild_buckets plans the optimum for the times that the ranks saw, the latest of them") {
    const plan::CallCost cost = plan::collective_cost(plan::Collective::all_reduce, plan::Algorithm::ring, cluster);
    std::vector<double> steps;
    Finding finding;
    run_simulated({.cluster = cluster, .stragglers = {{1, 1.5}}, .moves_buckets = false}, [&](SimulatedBackend comm) {
        Sync sync(comm, parameters_of(counts), {.gradients = GradientStorage::in_buckets}, OptimalBuckets(cost));
        finding.check(sync.plan() == SizeCappedBuckets().plan(floats(counts), reversed(counts.size())),
                      "another plan before there are times");
        const auto step = [&] {
            comm.barrier().wait();
            const double begin = comm.now();
            backward(comm, sync);
            sync.finish();
            comm.barrier().wait();
            if (comm.rank() == 0) steps.push_back(comm.now() - begin);
        };
        step();
        finding.check(sync.statistics().ready_seconds.empty(), "times before they were asked for");
        finding.check(sync.rebuild_buckets(), "the plan did not change");
        finding.check(close(sync.statistics().ready_seconds, expected_times(1.5)), "other times");
        finding.check(sync.plan() == OptimalBuckets(cost, expected_times(1.5)).plan(floats(counts), reversed(counts.size())),
                      "not the optimum");
        finding.check(sync.plan().size() > 1, "too simple a case");
        step();
        finding.check(!sync.rebuild_buckets(), "the same times, another plan");
    });
    CHECK(finding.text() == "");
    REQUIRE(steps.size() == 2);
    CHECK(steps[1] < 0.9 * steps[0]);
}

TEST_CASE("record_order(n): the mean of n steps, first of all those after it") {
    const plan::CallCost cost{1e-5, 1e-9};
    Finding finding;
    run_simulated({.cluster = cluster, .moves_buckets = false}, [&](SimulatedBackend comm) {
        Sync sync(comm, parameters_of(counts), {.gradients = GradientStorage::in_buckets}, OptimalBuckets(cost));
        const auto step = [&](double late) {
            comm.compute(late);  // before the first gradient: of no account
            backward(comm, sync);
            sync.finish();
        };
        const auto slow_step = [&] {
            for (std::size_t k = 0; k < counts.size(); ++k) {
                comm.compute(3 * compute[k]);
                sync.mark_ready(counts.size() - 1 - k);
            }
            sync.finish();
        };
        slow_step();
        sync.record_order(2);
        step(0);
        slow_step();
        step(1);  // not recorded
        (void)sync.rebuild_buckets();
        finding.check(close(sync.statistics().ready_seconds, expected_times(2)), "not the mean");
        step(0);
        sync.record_order();
        step(2);
        (void)sync.rebuild_buckets();
        finding.check(close(sync.statistics().ready_seconds, expected_times(1)), "earlier times were not forgotten");
    });
    CHECK(finding.text() == "");
}

TEST_CASE("calibrated and replanned over threads: every step has the mean, before and after") {
    for (const int ranks : {1, 2, 3})
        CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                  auto model = tensors({1000, 20'000, 30, 5, 0, 5000, 70'000});
                  const plan::CallCost cost =
                      ranks > 1 ? plan::calibrate(comm, {.max_bytes = 1 << 18, .warm_up = 0, .bursts = 1}).cost : plan::CallCost{};
                  Reducer<ThreadBackend, OptimalBuckets> sync(comm, model, {}, OptimalBuckets(cost));
                  for (int step = 0; step < 6; ++step) {
                      if (step == 2) sync.record_order(2);
                      if (step == 1 || step == 4) {
                          (void)sync.rebuild_buckets();
                          finding.check(sync.statistics().ready_seconds.size() == model.size(), "no times");
                      }
                      gradsync_test::backward(sync, model, comm.rank(), step);
                      sync.finish();
                      finding.check(wrong_mean(sync, model, ranks, step).empty(), wrong_mean(sync, model, ranks, step));
                  }
              }) == "");
}

TEST_CASE("ranks without a batch in the recorded step go by the others' times") {
    Finding finding;
    run_simulated({.cluster = cluster, .moves_buckets = false}, [&](SimulatedBackend comm) {
        Sync sync(comm, parameters_of(counts), {.gradients = GradientStorage::in_buckets}, OptimalBuckets({1e-5, 1e-9}));
        (void)sync.begin_step(comm.rank() != 0);
        if (comm.rank() != 0) backward(comm, sync);
        sync.finish();
        (void)sync.rebuild_buckets();
        finding.check(close(sync.statistics().ready_seconds, expected_times()), "other times");
    });
    CHECK(finding.text() == "");
}

TEST_CASE("a gradient that nobody used is expected no earlier than the last one") {
    Finding finding;
    run_simulated({.cluster = cluster, .moves_buckets = false}, [&](SimulatedBackend comm) {
        Sync sync(comm, parameters_of(counts), {.gradients = GradientStorage::in_buckets, .unused = UnusedParameters::find_unused},
                  OptimalBuckets({1e-5, 1e-9}));
        for (std::size_t k = 1; k < counts.size(); ++k) {  // not the first that is expected
            comm.compute(compute[k]);
            sync.mark_ready(counts.size() - 1 - k);
        }
        sync.finish();
        (void)sync.rebuild_buckets();
        const std::vector<double> times(sync.statistics().ready_seconds.begin(), sync.statistics().ready_seconds.end());
        finding.check(times.back() == *std::max_element(times.begin(), times.end()), "it is ready earlier");
    });
    CHECK(finding.text() == "");
}

TEST_CASE("times that the policy was given stay until a step has been recorded") {
    const plan::CallCost cost{1e-5, 1e-9};
    const auto optimum = [&](const std::vector<double>& times) {
        return OptimalBuckets(cost, times).plan(floats(counts), reversed(counts.size()));
    };
    const std::vector<double> given = expected_times(100);
    REQUIRE(optimum(given) != optimum(std::vector<double>(counts.size())));  // which "nothing was recorded" must not be taken for
    REQUIRE(optimum(given) != optimum(expected_times()));
    Finding finding;
    run_simulated({.cluster = cluster, .moves_buckets = false}, [&](SimulatedBackend comm) {
        Sync sync(comm, parameters_of(counts), {.gradients = GradientStorage::in_buckets}, OptimalBuckets(cost, given));
        const auto stays = [&](const std::vector<double>& times, const std::string& when) {
            finding.check(!sync.rebuild_buckets(), when + ": the plan has changed");
            finding.check(sync.plan() == optimum(times), when + ": not the plan of the times that it had");
        };
        finding.check(sync.plan() == optimum(given), "at first: not the plan of the given times");
        stays(given, "before a step");
        finding.check(sync.statistics().ready_seconds.empty(), "times that nobody has recorded");
        sync.record_order(3);
        stays(given, "after record_order(), before a step");
        finding.check(sync.statistics().ready_seconds.empty(), "times that nobody has recorded");
        backward(comm, sync);
        sync.finish();
        finding.check(sync.plan() == optimum(given), "a step alone has changed the plan");
        finding.check(sync.rebuild_buckets(), "a recorded step has changed nothing");
        finding.check(close(sync.statistics().ready_seconds, expected_times()), "other times than the step's");
        finding.check(sync.plan() == optimum(expected_times()), "not the plan of the recorded times");
        sync.record_order(3);  // forgets what was recorded, not what was planned by
        stays(expected_times(), "after another record_order()");
        finding.check(close(sync.statistics().ready_seconds, expected_times()), "the times are gone");
    });
    CHECK(finding.text() == "");
}

TEST_CASE("a rank that has recorded nothing goes by the others' times, not by those that it was given") {
    const plan::CallCost cost{1e-5, 1e-9};
    Finding finding;
    run_simulated({.cluster = cluster, .moves_buckets = false}, [&](SimulatedBackend comm) {
        Sync sync(comm, parameters_of(counts), {.gradients = GradientStorage::in_buckets}, OptimalBuckets(cost, expected_times(100)));
        (void)sync.begin_step(comm.rank() == 2);
        if (comm.rank() == 2) backward(comm, sync);
        sync.finish();
        finding.check(sync.rebuild_buckets(), "the plan did not change");
        finding.check(close(sync.statistics().ready_seconds, expected_times()), "other times");
        finding.check(sync.plan() == OptimalBuckets(cost, expected_times()).plan(floats(counts), reversed(counts.size())), "another plan");
    });
    CHECK(finding.text() == "");
}
