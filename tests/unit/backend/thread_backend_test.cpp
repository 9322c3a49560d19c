// SPDX-License-Identifier: BSL-1.0
#include <gradsync/backend/thread_backend.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <gradsync/core/buffer_view.hpp>

namespace gs = gradsync;

// What ThreadBackend promises beyond the concept; the rest is in tests/conformance/backend_thread_test.cpp.

TEST_CASE("run_threads returns the ranks' results, by rank") {
    const std::vector<std::string> names =
        gs::run_threads(3, [](gs::ThreadBackend comm) { return std::to_string(comm.rank()) + " of " + std::to_string(comm.size()); });
    CHECK(names == std::vector<std::string>{"0 of 3", "1 of 3", "2 of 3"});
}

TEST_CASE("run_threads refuses 0 ranks") {
    for (const int size : {0, -1}) {
        try {
            gs::run_threads(size, [](gs::ThreadBackend) {});
            FAIL("not refused");
        } catch (const gs::Error& error) {
            CHECK(error.errc() == gs::Errc::invalid_argument);
        }
    }
}

TEST_CASE("run_threads gives the ranks the caller's time limit") {
    const auto limits = gs::run_threads(2, [](gs::ThreadBackend comm) { return comm.timeout(); }, {.timeout = std::chrono::seconds(7)});
    CHECK(limits == std::vector<std::chrono::nanoseconds>(2, std::chrono::seconds(7)));
}

TEST_CASE("ThreadBackend::make gives handles for threads that the user runs") {
    std::vector<gs::ThreadBackend> handles = gs::ThreadBackend::make(2);
    std::vector<float> one{1, 2, 3}, two{10, 20, 30};
    std::thread other([comm = std::move(handles[1]), &two]() mutable { comm.all_reduce(gs::buffer(two), gs::ReduceOp::sum).wait(); });
    handles[0].all_reduce(gs::buffer(one), gs::ReduceOp::sum).wait();
    other.join();
    CHECK(one == std::vector<float>{11, 22, 33});
    CHECK(two == one);
}

TEST_CASE("ThreadBackend: a handle may be used from several threads of its rank") {
    // One thread starts and waits, another makes progress, a third uses a communicator of its own.
    std::atomic<int> wrong{0};
    gs::run_threads(2, [&](gs::ThreadBackend comm) {
        gs::ThreadBackend twin = comm.duplicate();
        std::atomic<bool> done{false};
        std::thread polling([&, copy = comm]() mutable {
            while (!done.load()) {
                copy.progress();
                std::this_thread::yield();
            }
        });
        const auto sums = [&wrong](gs::ThreadBackend& on, int rounds) {
            std::vector<float> values(3000);
            for (int i = 0; i < rounds; ++i) {
                values.assign(values.size(), 1.0f);
                on.all_reduce(gs::buffer(values), gs::ReduceOp::sum).wait();
                for (const float value : values) wrong += value != 2.0f;
            }
        };
        std::thread summing([&] { sums(twin, 200); });
        sums(comm, 200);
        summing.join();
        done = true;
        polling.join();
    });
    CHECK(wrong == 0);
}

TEST_CASE("ThreadBackend: works can be waited for on another thread than the one that started them") {
    std::atomic<int> wrong{0};
    gs::run_threads(2, [&](gs::ThreadBackend comm) {
        std::vector<std::vector<float>> values(50, std::vector<float>(500, 1.0f));
        std::vector<gs::ThreadWork> works;
        for (auto& v : values) works.push_back(comm.all_reduce(gs::buffer(v), gs::ReduceOp::sum));
        std::thread waiting([&] {
            for (std::size_t i = 0; i < works.size(); i += 2) works[i].wait();
        });
        for (std::size_t i = 1; i < works.size(); i += 2) works[i].wait();
        waiting.join();
        for (const auto& v : values)
            for (const float value : v) wrong += value != 2.0f;
    });
    CHECK(wrong == 0);
}

TEST_CASE("ThreadBackend: what a rank has seen complete when it fails is complete for all ranks") {
    std::atomic<int> wrong{0};
    for (int repeat = 0; repeat < 300; ++repeat)
        gs::run_threads(3, [&](gs::ThreadBackend comm) {
            try {
                gs::ThreadWork work = comm.barrier();
                for (int polls = 1; repeat % 4 != 0 && !work.test(); ++polls)
                    if (polls % 1000 == 0) std::this_thread::yield();
                work.wait();
            } catch (const gs::Error&) {
                ++wrong;
            }
            comm.fail("the disk is full");
        });
    CHECK(wrong.load() == 0);
}

TEST_CASE("a dtype that is written into a view brings no loops: every rank is told so before anything starts") {
    const auto registered = gs::kernel::detail::tables[static_cast<std::size_t>(gs::DType::f8e5m2)].exchange(nullptr);
    const auto texts = gs::run_threads(2, [](gs::ThreadBackend comm) -> std::string {
        std::uint8_t element = 1;
        gs::BufferView view = gs::buffer(std::span(&element, 1));
        view.dtype = gs::DType::f8e5m2;
        try {
            comm.all_reduce(view, gs::ReduceOp::sum).wait();
        } catch (const gs::Error& error) {
            comm.barrier().wait();
            return error.what();
        }
        return "";
    });
    for (const std::string& text : texts) CHECK(text.find("no code for elements of f8e5m2 is in this program") == 0);
    gs::kernel::detail::tables[static_cast<std::size_t>(gs::DType::f8e5m2)] = registered;
}

TEST_CASE("ThreadBackend: a start that waits for a slot names the rank that holds it, at the time limit") {
    constexpr std::size_t slots = gs::shared_memory::Board::slots;
    std::string said;
    std::atomic<bool> started{false};
    try {
        gs::run_threads(2, [&](gs::ThreadBackend comm) {
            std::vector<gs::ThreadWork> works;
            for (std::size_t i = 0; i < slots; ++i) works.push_back(comm.barrier());
            if (comm.rank() == 1) {
                started = true;
                while (!comm.failed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));  // it works on none
                return;
            }
            while (!started && !comm.failed()) std::this_thread::yield();
            comm.set_timeout(std::chrono::milliseconds(300));
            try {
                works.push_back(comm.barrier());
            } catch (const gs::Error& error) {
                said = std::to_string(error.context().peer) + ": " + error.what();
            }
        });
    } catch (const gs::Error&) {
    }
    CAPTURE(said);
    CHECK(said.starts_with("1: "));
    CHECK(said.find("collective #0: rank 1 started it like all others, but made no progress while rank 0 waited") != std::string::npos);
}

TEST_CASE("ThreadBackend: a time limit is positive") {
    for (const auto limit : {std::chrono::seconds(0), std::chrono::seconds(-1)})
        CHECK_THROWS_WITH_AS(gs::run_threads(2, [](gs::ThreadBackend comm) { comm.barrier().wait(); }, {.timeout = limit}),
                             "the time limit of a backend must be positive", gs::Error);
}
