// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gradsync/bucket/per_parameter.hpp>
#include <gradsync/core/exchange.hpp>
#include <gradsync/core/requirements.hpp>
#include <gradsync/overlap/no_overlap.hpp>

#include "support/averaging_oracle.hpp"
#include "support/bare_engine.hpp"
#include "support/ranks.hpp"
#include "support/recording_backend.hpp"
#include "support/tensor.hpp"

/// The promises of every exchange whose results are exact. A new exchange needs one file:
///
///     TEST_CASE("MyExchange is an exchange") {
///         gradsync_test::check_exchange([](gradsync_test::RecordingBackend world) { return gradsync_test::over(world, MyExchange{}); },
///                                       [](gradsync_test::RecordingBackend) { return MyExchange{.other = true}; });
///     }
///
/// The first function makes the exchange of all ranks of `world`, and the communicator that it is given to. The second one makes an exchange
/// that must not be mixed with it. Both are collective. `compressor.hpp` is the suite for exchanges that approximate.

namespace gradsync_test {

/// A policy, its exchange, and the communicator whose Reducer it goes with: the world, or a group of its ranks.
template <class X>
struct Exchanging {
    explicit Exchanging(RecordingBackend backend_, X policy_) : backend(std::move(backend_)), policy(std::move(policy_)) {}

    RecordingBackend backend;
    X policy;
    gradsync::ExchangeOver<X, RecordingBackend> exchange{policy};
};
template <class X>
Exchanging<X> over(RecordingBackend backend, X policy) {
    return Exchanging<X>(std::move(backend), std::move(policy));
}

/// One bucket of one rank.
struct Exchanged {
    gradsync::DType dtype;
    std::size_t count;
    gradsync::ReduceOp op;
    std::vector<gradsync::Contribution> by;  ///< of all ranks
    Bytes bytes = {};

    gradsync::BufferView view() { return {bytes.data(), count, dtype, gradsync::MemorySpace::host}; }
};

/// The buckets of a step: odd counts, empty shards and empty buckets, of several types, with all contributions that the exchange accepts.
inline std::vector<Exchanged> buckets_to_exchange(int ranks, bool means_only) {
    using enum gradsync::DType;
    using gradsync::Contribution;
    const auto n = static_cast<std::size_t>(ranks);
    std::vector<std::vector<Contribution>> contributions{std::vector<Contribution>(n)};
    if (!means_only) {
        std::vector<Contribution> weighted, counted, sum(n, {1, 0}), one_without(n), all_without(n, {0, 0}), in_divisor_only(n);
        for (std::size_t r = 0; r < n; ++r) {
            weighted.push_back({static_cast<double>(r + 2), static_cast<double>(r + 2)});
            counted.push_back({1, static_cast<double>(3 * r + 1)});
        }
        sum.front().weight = 1;
        one_without.back() = {0, 0};
        in_divisor_only.back() = {0, 1};
        for (auto* const by : {&weighted, &counted, &sum, &one_without, &all_without, &in_divisor_only}) contributions.push_back(*by);
    }
    std::vector<Exchanged> buckets;
    for (const std::size_t count : {0u, 1u, 2u, 3u, 5u, 33u, 4099u}) {
        for (const auto& by : contributions)
            for (const gradsync::DType dtype : {f32, bf16, f64, f16}) buckets.push_back({dtype, count, gradsync::ReduceOp::mean, by});
        buckets.push_back({i32, count, gradsync::ReduceOp::sum, contributions.front()});
    }
    return buckets;
}

/// The input of one rank. Whole numbers are summed exactly in every order, as is needed of an exchange in several stages.
inline Bytes bucket_input(const Exchanged& bucket, int rank, std::size_t b, bool whole_numbers) {
    if (bucket.by[static_cast<std::size_t>(rank)].scale == 0)  // not read
        return constant_bytes(bucket.dtype, bucket.count, std::numeric_limits<double>::quiet_NaN());
    if (!whole_numbers) return random_gradient(bucket.dtype, bucket.count, rank, 0, b);
    return with_type(bucket.dtype, [&]<class T>(T*) {
        std::vector<T> result(bucket.count);
        for (std::size_t k = 0; k < result.size(); ++k)
            result[k] = element_of<T>(static_cast<double>((k * 7 + b * 3 + static_cast<std::size_t>(rank) * 5) % 16));
        return bytes_of(gradsync::const_buffer(result));
    });
}

inline Bytes bucket_result(const Exchanged& bucket, int ranks, std::size_t b, bool whole_numbers) {
    std::vector<Bytes> by_rank;
    for (int r = 0; r < ranks; ++r) by_rank.push_back(bucket_input(bucket, r, b, whole_numbers));
    return bucket.op == gradsync::ReduceOp::sum ? sum_of(bucket.dtype, by_rank) : combined(bucket.dtype, by_rank, bucket.by);
}

/// Tells the exchange what lies in the buckets, two parameters in each, as a Reducer does.
template <class X>
void adopt(Exchanging<X>& own, const std::vector<Exchanged>& buckets) {
    if constexpr (gradsync::ExchangeOver<X, RecordingBackend>::traits.adopts_plan) {
        std::vector<gradsync::BucketContents> contents;
        for (const Exchanged& bucket : buckets) {
            const std::size_t b = contents.size(), half = bucket.count / 2;
            contents.push_back({bucket.count, bucket.dtype, {{2 * b, 0, half, {}}, {2 * b + 1, half, bucket.count - half, {}}}});
        }
        if (!own.exchange.is_single_rank(own.backend)) own.exchange.adopt_plan(own.backend, contents);
    }
}

template <class X>
auto start(Exchanging<X>& own, std::size_t b, Exchanged& bucket, int rank) {
    return own.exchange.start(own.backend, b, bucket.view(), bucket.op, bucket.by[static_cast<std::size_t>(rank)]);
}

/// The engine below all faces, with this exchange and a bucket for each parameter: a Reducer takes no exchange that scatters.
template <class X>
auto engine_of(const RecordingBackend& backend, std::vector<Tensor>& model, const X& exchange) {
    using namespace gradsync;
    return BareEngine<RecordingBackend>(backend, model, {.gradients = GradientStorage::in_buckets},
                                        detail::make_policies<RecordingBackend>(PerParameter{}, NoOverlap{}, exchange));
}

/// Completes a bucket in one of the ways in which an engine may.
template <class W>
void complete(W& work, int way) {
    if (way % 3 == 0) return work.wait();
    while (!(way % 3 == 1 ? work.test() : gradsync::detail::poll_work(work))) std::this_thread::yield();
}

/// Elements of all collectives that were started for the exchange since the last call, those among replicas last.
template <class X>
std::vector<std::size_t> take_counts(Exchanging<X>& own) {
    std::vector<std::size_t> counts = own.backend.take_counts();
    if constexpr (gradsync::ScatteringExchange<X, RecordingBackend>)
        own.exchange.with_replicas([&](RecordingBackend& replicas) {
            for (const std::size_t count : replicas.take_counts()) counts.push_back(count);
        });
    return counts;
}

template <class X>
std::string wrong_result(Exchanging<X>& own, Exchanged& bucket, int ranks, std::size_t b) {
    constexpr gradsync::ExchangeTraits traits = gradsync::ExchangeOver<X, RecordingBackend>::traits;
    const Bytes expected = bucket_result(bucket, ranks, b, traits.means_only);
    gradsync::ElementRange part{0, bucket.count};
    if (traits.scatters) part = gradsync::shard_range(bucket.count, own.backend.size(), own.backend.rank());
    const auto at = [&](std::size_t k) { return expected.begin() + static_cast<std::ptrdiff_t>(k * size_of(bucket.dtype)); };
    if (holds(bucket.view().subview(part.first, part.size()), Bytes(at(part.first), at(part.last)))) return {};
    return "bucket " + std::to_string(b) + " of " + std::to_string(bucket.count) + " " + std::string(name_of(bucket.dtype)) +
           " has a wrong result";
}

/// Runs `f(exchanging, finding)` on all ranks.
template <class Make, class F>
std::string on_ranks(int ranks, const Make& make, F&& f) {
    return findings(ranks, [&](gradsync::ThreadBackend world, Finding& finding) {
        auto own = make(RecordingBackend(world));
        f(world, own, finding);
    });
}

/// Every rank other than `guilty` was told who it was.
inline std::string not_told(const std::vector<Outcome>& outcomes, int guilty) {
    for (std::size_t r = 0; r < outcomes.size(); ++r) {
        if (r == static_cast<std::size_t>(guilty)) continue;
        const bool failed = outcomes[r].is(gradsync::Errc::peer_failed) || outcomes[r].is(gradsync::Errc::abandoned);
        if (!failed || outcomes[r].error->context().peer != guilty)
            return "rank " + std::to_string(r) + ", with rank " + std::to_string(guilty) + " guilty: '" + outcomes[r].text + "'";
    }
    return {};
}

template <class Make, class MakeOther>
void check_exchange(const Make& make, const MakeOther& make_other) {
    using namespace gradsync;
    using Policy = decltype(make(std::declval<RecordingBackend>()).policy);
    using X = ExchangeOver<Policy, RecordingBackend>;
    static_assert(require_exchange<Policy, RecordingBackend>());
    if constexpr (X::traits.scatters) static_assert(require_scattering_exchange<Policy, RecordingBackend>());

    SUBCASE("several buckets in flight, completed in order, have the results that `scatters` promises; in every step") {
        for (const int ranks : rank_counts()) {
            CAPTURE(ranks);
            CHECK(on_ranks(ranks, make, [&](ThreadBackend& world, auto& own, Finding& finding) {
                      const int rank = world.rank();
                      std::vector<Exchanged> buckets = buckets_to_exchange(ranks, X::traits.means_only);
                      adopt(own, buckets);
                      for (int step = 0; step < 3; ++step) {
                          std::vector<typename X::template WorkType<RecordingBackend>> works;
                          for (std::size_t b = 0; b < buckets.size(); ++b) {
                              buckets[b].bytes = bucket_input(buckets[b], rank, b, X::traits.means_only);
                              works.push_back(start(own, b, buckets[b], rank));
                          }
                          for (std::size_t b = 0; b < buckets.size(); ++b) {
                              complete(works[b], rank + step);
                              const std::string wrong = wrong_result(own, buckets[b], ranks, b);
                              finding.check(wrong.empty(), wrong);
                              finding.check(works[b].test(), "a complete bucket does not stay complete");
                          }
                      }
                  }) == "");
        }
    }
    SUBCASE("an engine leaves the means, or this rank's shards of them") {
        for (const int ranks : rank_counts()) {
            CAPTURE(ranks);
            CHECK(on_ranks(ranks, make, [&](ThreadBackend& world, auto& own, Finding& finding) {
                      auto model = tensors({700, 1, 0, 5, 1025, 2});
                      auto sync = engine_of(own.backend, model, own.policy);
                      for (int step = 0; step < 3; ++step) {
                          std::vector<Exchanged> buckets;
                          for (std::size_t b = 0; b < sync.plan().size(); ++b) {
                              const std::size_t i = sync.plan().bucket(b).front();
                              buckets.push_back(
                                  {DType::f32, model[i].count(), ReduceOp::mean, std::vector<Contribution>(std::size_t(ranks))});
                              write(sync.gradient_view(i), bucket_input(buckets[b], world.rank(), b, X::traits.means_only));
                              sync.mark_ready(i);
                          }
                          sync.finish();
                          for (std::size_t b = 0; b < buckets.size(); ++b) {
                              buckets[b].bytes = bytes_of(sync.gradient_view(sync.plan().bucket(b).front()));
                              const std::string wrong = wrong_result(own, buckets[b], ranks, b);
                              finding.check(wrong.empty(), wrong);
                          }
                      }
                  }) == "");
        }
    }
    SUBCASE("is_single_rank says whether the world has one rank; the exchange of a copied policy says the same") {
        for (const int ranks : rank_counts())
            CHECK(on_ranks(ranks, make, [&](ThreadBackend&, auto& own, Finding& finding) {
                      const Policy copied(own.policy);
                      const X copy(copied);
                      finding.check(own.exchange.is_single_rank(own.backend) == (ranks == 1), "is_single_rank is wrong");
                      finding.check(copy.is_single_rank(own.backend) == (ranks == 1), "is_single_rank of a copy is wrong");
                      finding.check(!std::string(copy.describe()).empty(), "it has no name");
                      finding.check(std::string(copy.describe()) == std::string(own.exchange.describe()), "a copy has another name");
                      typename X::template WorkType<RecordingBackend> nothing;
                      finding.check(nothing.test(), "a default-constructed WorkType is not complete");
                      nothing.wait();
                  }) == "");
    }
    SUBCASE("traffic is the bytes that collectives are started with, and their number") {
        for (const int ranks : rank_counts(2))
            CHECK(on_ranks(ranks, make, [&](ThreadBackend& world, auto& own, Finding& finding) {
                      std::vector<Exchanged> buckets = buckets_to_exchange(ranks, X::traits.means_only);
                      adopt(own, buckets);
                      take_counts(own);
                      for (std::size_t b = 0; b < buckets.size(); ++b) {
                          buckets[b].bytes = bucket_input(buckets[b], world.rank(), b, X::traits.means_only);
                          start(own, b, buckets[b], world.rank()).wait();
                          Traffic expected{0, 0}, said{buckets[b].view().bytes(), 1};
                          for (const std::size_t count : take_counts(own)) {
                              expected.bytes += count * size_of(buckets[b].dtype);
                              ++expected.collectives;
                          }
                          if constexpr (X::traits.reports_traffic) said = own.exchange.traffic(own.backend, b, buckets[b].view());
                          finding.check(said.bytes == expected.bytes && said.collectives == expected.collectives,
                                        std::to_string(expected.bytes) + " bytes in " + std::to_string(expected.collectives) +
                                            " collectives; it says " + std::to_string(said.bytes) + " in " +
                                            std::to_string(said.collectives));
                      }
                  }) == "");
    }
    SUBCASE("with_replicas visits the communicator of those with equal shards, if there are any") {
        if constexpr (ScatteringExchange<Policy, RecordingBackend>)
            for (const int ranks : rank_counts())
                CHECK(on_ranks(ranks, make, [&](ThreadBackend& world, auto& own, Finding& finding) {
                          int visits = 0, copies = 1;
                          std::as_const(own.exchange).with_replicas([&](RecordingBackend& replicas) {
                              ++visits;
                              copies = replicas.size();
                              std::vector<std::int32_t> numbers{own.backend.rank(), -own.backend.rank()};
                              replicas.all_reduce(buffer(numbers), ReduceOp::max).wait();
                              finding.check(numbers[0] == own.backend.rank() && numbers[1] == -own.backend.rank(),
                                            "replicas have other shards");
                          });
                          finding.check(visits <= 1, "there is more than one communicator of replicas");
                          finding.check(copies * own.backend.size() == world.size(), "shards times replicas are not the world");
                      }) == "");
    }
    SUBCASE("contributions that it does not accept are refused, and do no harm") {
        if constexpr (X::traits.means_only)
            for (const int ranks : {2, 4})
                CHECK(on_ranks(ranks, make, [&](ThreadBackend& world, auto& own, Finding& finding) {
                          std::vector<Exchanged> buckets{{DType::f32, 5, ReduceOp::mean, std::vector<Contribution>(std::size_t(ranks))}};
                          Exchanged& bucket = buckets.front();
                          adopt(own, buckets);
                          bucket.bytes = bucket_input(bucket, world.rank(), 0, true);
                          for (const Contribution other : {Contribution{0, 0}, Contribution{2, 2}, Contribution{1, 0}}) {
                              const Outcome outcome =
                                  outcome_of([&] { own.exchange.start(own.backend, 0, bucket.view(), ReduceOp::mean, other).wait(); });
                              finding.check(outcome.is(Errc::invalid_argument), "another contribution: '" + outcome.text + "'");
                          }
                          start(own, 0, bucket, world.rank()).wait();
                          finding.check(wrong_result(own, bucket, ranks, 0).empty(), "the next exchange is wrong");
                      }) == "");
    }
    SUBCASE("exchanges that must not be mixed are told apart at construction, on every rank") {
        const auto result = outcomes(2, [&](ThreadBackend world) {
            auto own = make(RecordingBackend(world));
            auto other = make_other(RecordingBackend(world));
            if (own.backend.size() == 1) throw Error(Errc::parameter_mismatch, own.exchange.describe() + other.describe());
            auto model = tensors({3});
            const auto make_reducer = [&](auto policy) { engine_of(own.backend, model, policy); };
            world.rank() == 0 ? make_reducer(own.policy) : make_reducer(other);
        });
        CHECK(result[0].text == result[1].text);
        for (const Outcome& outcome : result) {
            INFO(outcome.text);
            CHECK(outcome.is(Errc::parameter_mismatch));
        }
    }
    SUBCASE("a rank that throws between two buckets: the others are told who it was") {
        for (const int ranks : rank_counts(2))
            for (int guilty = 0; guilty < ranks; ++guilty)
                CHECK(not_told(outcomes(ranks,
                                        [&](ThreadBackend world) {
                                            auto own = make(RecordingBackend(world));
                                            std::vector<Exchanged> buckets = buckets_to_exchange(ranks, true);
                                            adopt(own, buckets);
                                            std::vector<typename X::template WorkType<RecordingBackend>> works;
                                            for (std::size_t b = 0; b < buckets.size(); ++b) {
                                                buckets[b].bytes = bucket_input(buckets[b], world.rank(), b, true);
                                                if (b == 4 && world.rank() == guilty) throw std::runtime_error("out of cheese");
                                                works.push_back(start(own, b, buckets[b], world.rank()));
                                            }
                                            for (auto& work : works) complete(work, world.rank());
                                        }),
                               guilty) == "");
    }
    SUBCASE("a bucket that is dropped before it is complete fails the communicator, in whichever stage") {
        enum class Drop { at_once, after_first_stage, in_second_stage };
        for (const int ranks : rank_counts(2))
            for (const Drop when : {Drop::at_once, Drop::after_first_stage, Drop::in_second_stage})
                for (int guilty = 0; guilty < ranks; ++guilty) {
                    CAPTURE(when);
                    std::atomic<bool> dropped{false};
                    const auto result = outcomes(ranks, [&](ThreadBackend world) {
                        auto own = make(RecordingBackend(world));
                        std::vector<Exchanged> buckets{{DType::f32, 33, ReduceOp::mean, std::vector<Contribution>(std::size_t(ranks))}};
                        adopt(own, buckets);
                        buckets[0].bytes = bucket_input(buckets[0], world.rank(), 0, true);
                        // Only a group of the ranks has stages: the first one completes without the other groups, which are late.
                        std::vector<std::int32_t> early{when != Drop::at_once && world.rank() == guilty && own.backend.size() < ranks};
                        own.backend.all_reduce(buffer(early), ReduceOp::max).wait();
                        while (world.rank() != guilty && early[0] == 0 && !dropped) std::this_thread::yield();
                        auto work = start(own, 0, buckets[0], world.rank());
                        if (early[0] != 0) own.backend.barrier().wait();
                        if (world.rank() != guilty) return work.wait();
                        for (int k = 0; k < 1000 && early[0] != 0 && when == Drop::in_second_stage; ++k) {
                            if (work.test()) throw std::logic_error("it is complete without the other groups");
                            std::this_thread::yield();
                        }
                        { const auto gone = std::move(work); }
                        dropped = true;
                    });
                    CHECK(!result[static_cast<std::size_t>(guilty)].says("complete without"));
                    CHECK(not_told(result, guilty) == "");
                }
    }
}

}  // namespace gradsync_test
