// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gradsync/bucket/flat.hpp>
#include <gradsync/bucket/per_parameter.hpp>
#include <gradsync/bucket/size_capped.hpp>
#include <gradsync/core/overlap_policy.hpp>
#include <gradsync/reducer.hpp>

#include "support/averaging_oracle.hpp"
#include "support/ranks.hpp"
#include "support/recording_backend.hpp"
#include "support/tensor.hpp"

/// What every overlap policy promises. A new policy needs one file:
///
///     TEST_CASE("MyOverlap is an overlap policy") {
///         gradsync_test::check_overlap_policy<MyOverlap>();
///     }
///
/// `make` makes a policy, where it is not default-constructed.

namespace gradsync_test {

/// An engine without buckets, which counts what it is asked for, and throws if told to.
struct CountingEngine final : gradsync::BucketLauncher {
    mutable std::atomic<int> launches{0}, polls{0}, questions{0};
    std::atomic<bool> flying{false}, broken{false};
    bool threaded = false;

    void launch_full_buckets() override { ++launches; }
    bool in_flight() const noexcept override {
        ++questions;
        return flying;
    }
    void poll() override {
        ++polls;
        if (broken) throw std::runtime_error("the communicator failed");
    }
    bool wants_thread() const noexcept override { return threaded; }
    int calls() const { return launches + polls + questions; }
};

/// A backward of this rank's own order, by one thread or several.
template <class Reducer>
void backward_by(int thread_count, Reducer& sync, const std::vector<Tensor>& model, int rank, int batch) {
    if (thread_count == 1) return backward(sync, model, rank, batch);
    const auto order = shuffled(model.size(), static_cast<std::uint32_t>(rank * 31 + batch));
    std::atomic<std::size_t> next{0};
    std::vector<std::thread> threads;
    for (int t = 0; t < thread_count; ++t)
        threads.emplace_back([&] {
            for (std::size_t k; (k = next++) < order.size();) {
                write(sync.gradient_view(order[k]), random_gradient(model[order[k]], rank, batch, order[k]));
                sync.mark_ready(order[k]);
            }
        });
    for (std::thread& thread : threads) thread.join();
}

/// Steps whose marks come in another order on every rank: collectives start in the plan's order, each once, and every
/// rank has the oracle's bits, which know nothing of policies.
template <class Buckets, class Make>
std::string check_steps(Make&& make, const Buckets& buckets, int ranks, int thread_count) {
    return findings(ranks, [&](gradsync::ThreadBackend comm, Finding& finding) {
        std::vector<std::size_t> sizes;
        for (std::size_t i = 0; i < 24; ++i) sizes.push_back(16 * (i + 1) + i % 5);  // no two alike
        auto model = tensors(sizes);
        const int rank = comm.rank();
        RecordingBackend backend(std::move(comm));
        gradsync::Reducer sync(backend, model, gradsync::ReducerOptions{.gradients = gradsync::GradientStorage::in_buckets}, buckets,
                               make());
        std::vector<std::size_t> planned;
        for (std::size_t b = 0; ranks > 1 && b < sync.plan().size(); ++b) {
            const auto members = sync.plan().bucket(b);
            const auto* first = static_cast<const std::byte*>(sync.gradient_view(members.front()).data);
            const auto* last = static_cast<const std::byte*>(sync.gradient_view(members.back()).data);
            planned.push_back(static_cast<std::size_t>(last - first) / sizeof(float) + model[members.back()].count());
        }
        for (int step = 0; step < 6; ++step) {
            backward_by(thread_count, sync, model, rank, step);
            (void)sync.finish();  // waits for averages that arrive later, too
            finding.check(backend.take_counts() == planned, "collectives are not started once each, in the plan's order");
            finding.check(wrong_mean(sync, model, ranks, step).empty(), wrong_mean(sync, model, ranks, step));
        }
    });
}

template <gradsync::OverlapPolicy Policy, class Make>
void check_overlap_policy(Make&& make) {
    SUBCASE("it has a name, the same for all policies that behave alike") {
        CHECK(!std::string(make().describe()).empty());
        CHECK(std::string(make().describe()) == std::string(make().describe()));
        Policy policy = make();
        const std::string name = policy.describe();
        CHECK(std::string(Policy(policy).describe()) == name);
        CHECK(std::string(Policy(std::move(policy)).describe()) == name);
    }
    SUBCASE("launches in the plan's order, the same bits on every rank, whatever the order of marks") {
        for (const int ranks : rank_counts())
            for (const int thread_count : {1, 3}) {
                CAPTURE(ranks);
                CAPTURE(thread_count);
                CHECK(check_steps(make, gradsync::PerParameter{}, ranks, thread_count) == "");
                CHECK(check_steps(make, gradsync::SizeCappedBuckets(2000, 500), ranks, thread_count) == "");
                CHECK(check_steps(make, gradsync::Flat{}, ranks, thread_count) == "");
            }
    }
    SUBCASE("a Reducer that never takes a step, or goes in the middle of one") {
        CHECK(findings(3, [&](gradsync::ThreadBackend comm, Finding&) {
                  auto model = tensors({10, 20});
                  gradsync::Reducer sync(comm, model, gradsync::ReducerOptions{}, gradsync::PerParameter{}, make());
              }) == "");
        const auto result = outcomes(3, [&](gradsync::ThreadBackend comm) {
            auto model = tensors({1000, 2000});
            gradsync::Reducer sync(comm, model, gradsync::ReducerOptions{}, gradsync::PerParameter{}, make());
            sync.mark_ready(1);
            if (comm.rank() == 1) throw std::runtime_error("out of cheese");
            sync.mark_ready(0);
            (void)sync.finish();
        });
        for (std::size_t r = 0; r < result.size(); ++r) {
            INFO(result[r].text);
            if (r == 1) {
                CHECK(result[r].text == "not a gradsync::Error: out of cheese");
                continue;
            }
            REQUIRE(result[r].is(gradsync::Errc::peer_failed));
            CHECK(result[r].error->context().peer == 1);
        }
    }
    for (const bool threaded : {false, true}) {
        SUBCASE(threaded ? "nothing is asked of an engine that wants a thread before the first mark, or after detach"
                         : "nothing is asked of the engine before the first mark, or after detach") {
            CountingEngine engine;
            engine.threaded = threaded;
            Policy policy = make();
            policy.attach(engine);
            CHECK(engine.launches + engine.polls == 0);
            engine.flying = true;
            for (int k = 0; k < 100; ++k) {
                if (k % 10 == 0) policy.bucket_full(engine);
                policy.gradients_ready(engine);
            }
            policy.detach();
            const int calls = engine.calls();
            std::this_thread::sleep_for(std::chrono::milliseconds(5));
            CHECK(engine.calls() == calls);
            CHECK(engine.launches <= 100);
            policy.detach();  // a second time is no harm
        }
    }
    SUBCASE("an engine that throws reaches the caller, or nobody; later marks do no harm") {
        CountingEngine engine;
        engine.flying = engine.broken = true;
        Policy policy = make();
        policy.attach(engine);
        for (int k = 0; k < 20; ++k) {
            const Outcome outcome = outcome_of([&] {
                policy.bucket_full(engine);
                policy.gradients_ready(engine);
            });
            CHECK((outcome.text.empty() || outcome.says("the communicator failed")));
        }
        policy.detach();
    }
}

template <gradsync::OverlapPolicy Policy>
void check_overlap_policy() {
    check_overlap_policy<Policy>([] { return Policy{}; });
}

}  // namespace gradsync_test
