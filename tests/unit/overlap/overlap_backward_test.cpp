// SPDX-License-Identifier: BSL-1.0
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>

#include <gradsync/overlap/overlap_backward.hpp>

using gradsync::OverlapBackward;
using gradsync::Progress;

namespace {

/// Has something in flight, always.
struct Engine final : gradsync::BucketLauncher {
    explicit Engine(bool wants_one = false) : threaded(wants_one) {}
    bool threaded;
    std::thread::id caller = std::this_thread::get_id();
    std::atomic<int> own_polls{0}, foreign_polls{0};

    void launch_full_buckets() override {}
    bool in_flight() const noexcept override { return true; }
    void poll() override { ++(std::this_thread::get_id() == caller ? own_polls : foreign_polls); }
    bool wants_thread() const noexcept override { return threaded; }
};

/// Does a thread poll, once a bucket was full?
bool thread_polls(Engine& engine, OverlapBackward policy) {
    policy.attach(engine);
    policy.bucket_full(engine);
    for (int k = 0; k < 10; ++k) policy.gradients_ready(engine);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    const bool expected = engine.own_polls == 0;
    while (expected && engine.foreign_polls == 0 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    policy.detach();
    return engine.foreign_polls > 0;
}

}  // namespace

TEST_CASE("OverlapBackward polls in marks, unless the backend asks for a thread") {
    Engine polled, threaded(true);
    CHECK(!thread_polls(polled, OverlapBackward()));
    CHECK(polled.own_polls == 10);
    CHECK(thread_polls(threaded, OverlapBackward()));
    CHECK(threaded.own_polls == 0);
}

TEST_CASE("OverlapBackward polls in marks if its thread may not communicate") {
    struct Shy final : gradsync::BucketLauncher {
        const std::thread::id caller = std::this_thread::get_id();
        std::atomic<int> own_polls{0}, refused{0};

        void launch_full_buckets() override {}
        bool in_flight() const noexcept override { return true; }
        void poll() override {
            if (std::this_thread::get_id() == caller) ++own_polls;
            else if (++refused; true) throw std::runtime_error("MPI was initialised for the main thread alone");
        }
        bool wants_thread() const noexcept override { return true; }
    };
    Shy shy;
    OverlapBackward policy;
    policy.attach(shy);
    policy.bucket_full(shy);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (shy.own_polls == 0 && std::chrono::steady_clock::now() < deadline) policy.gradients_ready(shy);
    policy.detach();
    CHECK(shy.own_polls > 0);
    CHECK(shy.refused == 1);
}

TEST_CASE("OverlapBackward lets the user say who polls") {
    Engine polled(true), threaded;
    CHECK(!thread_polls(polled, OverlapBackward(Progress::polls)));
    CHECK(polled.own_polls == 10);
    CHECK(thread_polls(threaded, OverlapBackward(Progress::thread)));
    CHECK(threaded.own_polls == 0);
}
