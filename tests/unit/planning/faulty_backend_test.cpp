// SPDX-License-Identifier: BSL-1.0
// What goes wrong on a backend of faults is what would go wrong without it: each failure has its name on every rank, and ranks that are
// merely late change nothing.
#include <gradsync/planning/faulty_backend.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gradsync/compress/power_sgd.hpp>
#include <gradsync/gradsync.hpp>
#include <gradsync/overlap/no_overlap.hpp>
#include <gradsync/overlap/overlap_forward.hpp>

#include "support/averaging_oracle.hpp"
#include "support/ranks.hpp"
#include "support/tensor.hpp"

using namespace gradsync;
using namespace gradsync_test;
using namespace std::chrono_literals;

namespace {

using FaultyThreads = FaultyBackend<ThreadBackend>;
using Fault = FaultyThreads::Fault;

/// Evenly from 0 to `most`, by who is asked for what.
std::chrono::microseconds some_time(const FaultPoint& at, unsigned seed, int most) {
    std::uint64_t z = (at.number * 31 + static_cast<std::uint64_t>(at.rank)) * 0x9e3779b97f4a7c15u + seed;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    return std::chrono::microseconds(static_cast<int>((z ^ z >> 31) % static_cast<unsigned>(most)));
}

/// The gradients after some steps, of rank 0.
template <class Buckets, class Overlap>
std::vector<Bytes> results(int ranks, const Fault& fault, Buckets buckets = {}, Overlap overlap = {}) {
    std::vector<Bytes> found;
    CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
              auto model = tensors({300, 5, 1024, 70});
              Reducer<FaultyThreads, Buckets, Overlap> sync(FaultyThreads(comm, fault), model, {}, buckets, overlap);
              for (int step = 0; step < 5; ++step) {
                  backward(sync, model, comm.rank(), step);
                  (void)sync.finish();
                  finding.check(wrong_mean(sync, model, ranks, step).empty(), wrong_mean(sync, model, ranks, step));
              }
              if (comm.rank() == 0)
                  for (std::size_t i = 0; i < model.size(); ++i) found.push_back(bytes_of(sync.gradient_view(i)));
          }) == "");
    return found;
}

/// What each rank's training threw.
std::vector<Outcome> training(int ranks, const Fault& fault, ThreadOptions options = patient) {
    return outcomes(
        ranks,
        [&](ThreadBackend comm) {
            auto model = tensors({300, 5, 1024, 70});
            Reducer<FaultyThreads, PerParameter> sync(FaultyThreads(comm, fault), model);
            for (int step = 0; step < 20; ++step) {
                backward(sync, model, comm.rank(), step);
                sync.finish();
            }
        },
        options);
}

}  // namespace

TEST_CASE("FaultyBackend: ranks that are late, now and then, change no bit, under any policy") {
    for (const int ranks : {2, 3}) {
        CAPTURE(ranks);
        const auto expected = results<Flat, NoOverlap>(ranks, [](const FaultPoint&) {});
        CHECK(expected.size() == 4);
        for (const unsigned seed : {1u, 2u, 3u}) {
            const Fault late = [=](const FaultPoint& at) { std::this_thread::sleep_for(some_time(at, seed, 300)); };
            CHECK(results<Flat, NoOverlap>(ranks, late) == expected);
            CHECK(results<PerParameter, OverlapBackward>(ranks, late) == expected);
            CHECK(results(ranks, late, PerParameter(), OverlapBackward(Progress::thread)) == expected);
            CHECK(results<SizeCappedBuckets, OverlapForward>(ranks, late, SizeCappedBuckets(2000)) == expected);
        }
    }
}

TEST_CASE("FaultyBackend: a rank that throws before a collective, whichever it is, is named by all others") {
    for (const int ranks : {2, 3})
        for (const std::uint64_t number : {0u, 1u, 2u, 5u, 30u}) {
            CAPTURE(ranks);
            CAPTURE(number);
            const int culprit = ranks - 1;
            const auto all = training(ranks, [=](const FaultPoint& at) {
                if (at.rank == culprit && at.number == number) throw std::runtime_error("the disk is full");
            });
            for (int r = 0; r < ranks; ++r) {
                const Outcome& outcome = all[static_cast<std::size_t>(r)];
                CAPTURE(outcome.text);
                CHECK(outcome.says("the disk is full"));
                if (r != culprit) {
                    CHECK(outcome.is(Errc::peer_failed));
                    CHECK(outcome.says("rank " + std::to_string(culprit)));
                }
            }
        }
}

TEST_CASE("FaultyBackend: what a thread for progress throws is not lost") {
    const auto all = outcomes(2, [&](ThreadBackend comm) {
        std::atomic<int> second_ones{0};
        const FaultyThreads faulty(comm, [&](const FaultPoint& at) {
            if (at.rank == 1 && at.bytes == 31 * sizeof(float) && ++second_ones == 3) throw std::runtime_error("the disk is full");
        });
        std::vector<Tensor> model;
        model.emplace_back("matrix", DType::f32, std::vector<std::size_t>{40, 31});
        Reducer sync(faulty, model, PerParameter(), OverlapBackward(Progress::thread), PowerSgd{.rank = 1, .start_step = 0});
        for (int step = 0; step < 5; ++step) {
            backward(sync, model, comm.rank(), step);
            std::this_thread::sleep_for(5ms);  // the thread finds the first one complete
            sync.finish();
        }
    });
    for (const Outcome& outcome : all) {
        CAPTURE(outcome.text);
        CHECK(outcome.says("the disk is full"));
    }
}

TEST_CASE("FaultyBackend: a rank that is later than the time limit is named by all others") {
    const Fault hangs = [](const FaultPoint& at) {
        if (at.rank == 1 && at.number == 7) std::this_thread::sleep_for(5s);
    };
    const auto all = training(3, hangs, ThreadOptions{.timeout = 2s});
    for (const int r : {0, 2}) {
        const Outcome& outcome = all[static_cast<std::size_t>(r)];
        CAPTURE(outcome.text);
        CHECK(outcome.is(Errc::timeout));
        CHECK(outcome.says("rank 1"));
    }
}

TEST_CASE("FaultyBackend: it says which collective a rank is about to start; copies count together, communicators apart") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              std::vector<std::string> seen;
              FaultyBackend faulty(comm, [&](const FaultPoint& at) {
                  seen.push_back(std::to_string(at.rank) + ":" + std::to_string(at.number) + ":" + std::string(at.operation) + ":" +
                                 std::to_string(at.bytes));
              });
              FaultyThreads copy = faulty;
              std::vector<float> values(8), half(4);
              faulty.all_reduce(buffer(values), ReduceOp::sum).wait();
              copy.reduce_scatter(const_buffer(values), buffer(half), ReduceOp::sum).wait();
              FaultyThreads other = faulty.split(0, -faulty.rank());
              other.all_gather(const_buffer(half), buffer(values)).wait();
              faulty.duplicate().barrier().wait();
              copy.broadcast(buffer(half), 1).wait();
              struct final : ShardStep {
                  void step(ElementRange, ConstBufferView, ListView<void* const>) override {}
              } step;
              const auto shared = faulty.allocate(16 * sizeof(float));
              auto* const memory = static_cast<float*>(shared.data());
              copy.reduce_step(ConstBufferView(memory, 8), BufferView(memory + 8, 8), ReduceOp::sum, {}, step).wait();
              comm.barrier().wait();  // the memory of others may not go before
              const std::string own = std::to_string(comm.rank()) + ":", turned = std::to_string(1 - comm.rank()) + ":";
              finding.check(
                  seen == std::vector<std::string>{own + "0:all_reduce:32", own + "1:reduce_scatter:32", turned + "0:all_gather:32",
                                                   own + "0:barrier:0", own + "2:broadcast:16", own + "3:reduce_step:32"},
                  "it saw something else");
          }) == "");
}
