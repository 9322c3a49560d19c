// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <gradsync/backend/thread_backend.hpp>
#include <gradsync/bucket/size_capped.hpp>
#include <gradsync/compress/compressor.hpp>
#include <gradsync/compress/gathered.hpp>
#include <gradsync/overlap/no_overlap.hpp>
#include <gradsync/overlap/overlap_backward.hpp>
#include <gradsync/reducer.hpp>

#include "conformance/settings.hpp"
#include "support/ranks.hpp"
#include "support/tensor.hpp"

/// What every compressor promises. A new one needs one file:
///
///     TEST_CASE("MyCompressor is a compressor") {
///         gradsync_test::check_compressor(gradsync::MyCompressor{.start_step = 0}, gradsync::MyCompressor{.start_step = 2},
///                                         {gradsync::MyCompressor{.bits = 0}});
///     }
///
/// The first two differ only in when they start to compress. The list holds bad settings, if there are any.

namespace gradsync_test {

/// How ranks train: what a step is made of, and what the mean is to be. Everything follows from rank, step and parameter.
struct Script {
    gradsync::ReducerOptions options = {};
    bool uneven = false;       ///< in each step another rank has no batch
    bool some_unused = false;  ///< in each step every third parameter is used by nobody
    int micro_batches = 1;
    int weightless = -1;       ///< in this step weights are 0:
    int weightless_rank = -1;  ///< this rank's, or all

    bool is_weighted() const {
        return options.averaging == gradsync::Averaging::weighted_mean || options.averaging == gradsync::Averaging::mean_over_count;
    }
    bool has_batch(int rank, int ranks, int step) const { return !uneven || ranks == 1 || (rank + step) % ranks != 0; }
    bool uses(std::size_t i, int step) const { return !some_unused || i % 3 != static_cast<std::size_t>(step) % 3; }
    double weight(int rank, int step) const {
        return step == weightless && (weightless_rank < 0 || rank == weightless_rank) ? 0 : std::pow(8, (2 * rank + step) % 3);
    }

    /// The factor of a rank's gradients in the sum, and its part in what that is divided by.
    gradsync::Contribution contribution(int rank, int ranks, int step) const {
        const double has = has_batch(rank, ranks, step) ? 1 : 0, own = has * weight(rank, step);
        switch (options.averaging) {
            case gradsync::Averaging::sum: return {has, rank == 0 ? 1.0 : 0.0};
            case gradsync::Averaging::weighted_mean: return {own, own};
            case gradsync::Averaging::mean_over_count: return {has, own};
            default: return {has, has};
        }
    }
};

/// Matrices, vectors and others, in several buckets, of types that are compressed and of two that are not; one parameter is frozen. The
/// integers, which have no mean, are trained where `sums`.
inline std::vector<Tensor> compressible_model(bool sums = false) {
    using enum gradsync::DType;
    std::vector<Tensor> model;
    const auto add = [&](gradsync::DType dtype, std::vector<std::size_t> shape) {
        model.emplace_back("p" + std::to_string(model.size()), dtype, std::move(shape));
    };
    for (const gradsync::DType dtype : {f32, bf16, f16}) {
        add(dtype, {24, 21});
        add(dtype, {33});
        add(dtype, {18, 5, 7});
    }
    add(f64, {7, 9});
    add(i32, {11});
    model.back().requires_grad = sums;
    add(f32, {10, 10});
    model.back().requires_grad = false;
    add(f32, {0});
    add(f32, {1});
    add(f32, {31, 20});
    return model;
}

inline bool is_compressed(const Tensor& t) { return t.requires_grad && t.dtype != gradsync::DType::f64 && t.dtype != gradsync::DType::i32; }

/// What one rank has seen.
struct Trace {
    std::vector<std::vector<Bytes>> results;    ///< by step and parameter; empty where nobody used it
    std::vector<std::vector<Bytes>> residuals;  ///< by step and parameter, after it; none where nothing is compressed

    friend bool operator==(const Trace&, const Trace&) = default;
};

/// A rank.
template <class Overlap, class Exchange>
class Trainee {
public:
    Trainee(gradsync::ThreadBackend comm, const Script& script, const Exchange& exchange, Overlap overlap = {})
        : rank_(comm.rank()),
          ranks_(comm.size()),
          script_(script),
          model(compressible_model(script.options.averaging == gradsync::Averaging::sum)),
          sync(comm, model, script.options, gradsync::SizeCappedBuckets(4000), std::move(overlap), exchange) {}

    void step(int k) {
        const bool has_batch = script_.has_batch(rank_, ranks_, k);
        if (script_.uneven) (void)sync.begin_step(has_batch);
        if (script_.is_weighted()) sync.set_weight(script_.weight(rank_, k));
        if (has_batch) {
            for (int m = 0; m + 1 < script_.micro_batches; ++m) {
                const auto guard = sync.no_sync();
                backward(k, m);
            }
            backward(k, script_.micro_batches - 1);
        } else {
            for (const std::size_t i : trainable()) fill(i, std::numeric_limits<double>::quiet_NaN());  // it must not matter
        }
        const auto used = [&](std::size_t i) { return script_.uses(i, k) && model[i].requires_grad; };
        std::vector<Bytes> before, results;
        for (std::size_t i = 0; i < model.size(); ++i) before.push_back(used(i) ? Bytes{} : bytes_of(sync.gradient_view(i)));
        sync.finish();
        for (std::size_t i = 0; i < model.size(); ++i) {
            if (!used(i) && !holds(sync.gradient_view(i), before[i])) keeps_unused_ = false;
            results.push_back(used(i) ? bytes_of(sync.gradient_view(i)) : Bytes{});
        }
        trace_.results.push_back(std::move(results));
        if constexpr (gradsync::Compressor<Exchange, gradsync::ThreadBackend>) {
            trace_.residuals.emplace_back();
            for (std::size_t i = 0; i < model.size(); ++i) trace_.residuals.back().push_back(bytes_of(sync.exchange().residual(i)));
        }
    }

    Trace trace() { return trace_; }

    /// Was no gradient touched that nobody used?
    bool keeps_unused() const { return keeps_unused_; }

    void fill(std::size_t i, double x) {
        const gradsync::BufferView view = sync.gradient_view(i);
        write(view, constant_bytes(view.dtype, view.count, gradsync::is_floating(view.dtype) ? x : 0));
    }
    std::vector<std::size_t> trainable() const {
        std::vector<std::size_t> result;
        for (std::size_t i = 0; i < model.size(); ++i)
            if (model[i].requires_grad) result.push_back(i);
        return result;
    }

    /// Are all bytes of the buckets zero that belong to no parameter? For gradients that live there.
    bool gaps_are_zero() {
        for (std::size_t b = 0; b < sync.plan().size(); ++b) {
            const auto members = sync.plan().bucket(b);
            for (std::size_t k = 0; k + 1 < members.size(); ++k) {
                const gradsync::BufferView view = sync.gradient_view(members[k]);
                const auto* const end = static_cast<const std::byte*>(view.data) + view.bytes();
                const auto* const next = static_cast<const std::byte*>(sync.gradient_view(members[k + 1]).data);
                if (!std::all_of(end, next, [](std::byte x) { return x == std::byte{0}; })) return false;
            }
        }
        return true;
    }

private:
    void backward(int step, int micro_batch) {
        const int batch = step * script_.micro_batches + micro_batch;
        for (const std::size_t i : shuffled(model.size(), static_cast<std::uint32_t>(rank_ * 1000 + batch))) {
            if (!model[i].requires_grad || !script_.uses(i, step)) continue;
            write(sync.gradient_view(i), random_gradient(model[i], rank_, batch, i));
            sync.mark_ready(i);
        }
    }

    int rank_, ranks_;
    Script script_;
    Trace trace_;
    bool keeps_unused_ = true;

public:
    std::vector<Tensor> model;
    gradsync::Reducer<gradsync::ThreadBackend, gradsync::SizeCappedBuckets, Overlap, Exchange> sync;
};

/// Trains on all ranks; `before(trainee, step)` comes before each step. What each rank has seen.
template <class Overlap = gradsync::OverlapBackward, class Exchange, class Before>
std::vector<Trace> train(int ranks, const Script& script, const Exchange& exchange, int steps, Before&& before, Overlap overlap = {}) {
    std::vector<Trace> traces(static_cast<std::size_t>(ranks));
    gradsync::run_threads(
        ranks,
        [&](gradsync::ThreadBackend comm) {
            const auto rank = static_cast<std::size_t>(comm.rank());
            Trainee<Overlap, Exchange> trainee(std::move(comm), script, exchange, overlap);
            for (int k = 0; k < steps; ++k) {
                before(trainee, k);
                trainee.step(k);
            }
            traces[rank] = trainee.trace();
        },
        patient);
    return traces;
}
template <class Overlap = gradsync::OverlapBackward, class Exchange>
std::vector<Trace> train(int ranks, const Script& script, const Exchange& exchange, int steps) {
    return train<Overlap>(ranks, script, exchange, steps, [](auto&, int) {});
}

/// Relative, of a result on its way out.
inline double rounding_of(gradsync::DType dtype) {
    return dtype == gradsync::DType::bf16 ? 0x1p-8 : dtype == gradsync::DType::f16 ? 0x1p-10 : 0x1p-22;
}

/// The last weight of a rank up to a step that was not 0.
inline double last_weight(const Script& script, int rank, int ranks, int step) {
    for (int k = step; k >= 0; --k)
        if (const double weight = script.contribution(rank, ranks, k).weight; weight != 0) return weight;
    return 0;
}

/// The parameter of which something is lost, or has come from nowhere, or "": in every step what all have got, times what it was divided
/// by, and what the ranks keep, is the sum of their gradients and what they had kept. What a rank keeps counts as much as its gradient does
/// in the mean, whatever the weights were when it was kept; a rank of no weight keeps all.
inline std::string lost(const std::vector<Trace>& traces, const Script& script) {
    const int ranks = static_cast<int>(traces.size()), steps = static_cast<int>(traces[0].results.size());
    const std::vector<Tensor> model = compressible_model();
    for (std::size_t i = 0; i < model.size(); ++i)
        for (int k = 0; is_compressed(model[i]) && k < steps; ++k) {
            if (!script.uses(i, k)) continue;
            struct Balance {
                std::vector<double> difference, allowed;

                explicit Balance(std::size_t count) : difference(count), allowed(count, 1e-5) {}
                void add(double factor, const Bytes& bytes, gradsync::DType dtype, double rounding) {
                    const std::vector<double> x = numbers({bytes.data(), bytes.size() / size_of(dtype), dtype});
                    for (std::size_t e = 0; e < x.size(); ++e) {
                        difference[e] += factor * x[e];
                        allowed[e] += std::abs(factor * x[e]) * rounding;
                    }
                }
                void add(const Balance& other) {
                    for (std::size_t e = 0; e < difference.size(); ++e)
                        difference[e] += other.difference[e], allowed[e] += other.allowed[e];
                }
                std::string text(const std::string& of) const {
                    for (std::size_t e = 0; e < difference.size(); ++e)
                        if (!(std::abs(difference[e]) <= allowed[e]))
                            return "element " + std::to_string(e) + " of " + of + " is wrong by " + std::to_string(difference[e]) +
                                   ", not " + std::to_string(allowed[e]);
                    return {};
                }
            };
            Balance all(model[i].count());
            const auto kept = [&](int r, int step) {
                return traces[static_cast<std::size_t>(r)].residuals[static_cast<std::size_t>(step)][i];
            };
            double divisor = 0;
            for (int r = 0; r < ranks; ++r) {
                const gradsync::Contribution own = script.contribution(r, ranks, k);
                divisor += own.weight;
                const double last = last_weight(script, r, ranks, k);
                const double unit = last != 0 ? last : own.scale;
                Balance brought(model[i].count());
                for (int m = 0; m < script.micro_batches; ++m)
                    brought.add(-own.scale, random_gradient(model[i], r, k * script.micro_batches + m, i), model[i].dtype, 0x1p-22);
                if (k != 0) brought.add(-unit, kept(r, k - 1), gradsync::DType::f32, 0x1p-20);
                brought.add(unit, kept(r, k), gradsync::DType::f32, 0x1p-20);
                if (own.weight == 0 && last != 0)
                    if (const std::string wrong = brought.text(model[i].name); !wrong.empty())
                        return "a rank of no weight brings something: " + wrong;
                if (own.weight == 0 && own.scale == 0 && k != 0 && kept(r, k) != kept(r, k - 1))
                    return "a rank that brings nothing keeps something else of " + model[i].name;
                all.add(brought);
            }
            all.add(divisor, traces[0].results[static_cast<std::size_t>(k)][i], model[i].dtype, rounding_of(model[i].dtype));
            if (const std::string wrong = all.text(model[i].name); !wrong.empty()) return wrong + ", in step " + std::to_string(k);
        }
    return {};
}

/// The first parameter of those that `chosen(tensor)` whose results differ, in steps before `steps`, or "".
template <class Chosen>
std::string different(const Trace& a, const Trace& b, std::size_t steps, Chosen&& chosen) {
    const std::vector<Tensor> model = compressible_model();
    for (std::size_t k = 0; k < steps; ++k)
        for (std::size_t i = 0; i < model.size(); ++i)
            if (chosen(model[i]) && a.results[k][i] != b.results[k][i]) return model[i].name + " in step " + std::to_string(k);
    return {};
}

/// The first result that is another one on some rank than on rank 0, or "".
inline std::string out_of_step(const std::vector<Trace>& traces) {
    for (std::size_t rank = 1; rank < traces.size(); ++rank)
        if (traces[rank].results.size() != traces[0].results.size()) return "another number of steps on rank " + std::to_string(rank);
        else if (std::string what = different(traces[0], traces[rank], traces[0].results.size(), [](const Tensor&) { return true; });
                 !what.empty())
            return what + ", rank " + std::to_string(rank);
    return {};
}

inline std::vector<Script> scripts() {
    using enum gradsync::Averaging;
    constexpr auto in_buckets = gradsync::GradientStorage::in_buckets;
    return {{.options = {}},
            {.options = {.gradients = in_buckets}},
            {.options = {.averaging = sum}, .uneven = true},
            {.options = {.gradients = in_buckets, .averaging = weighted_mean}},
            {.options = {.averaging = mean_over_count}, .uneven = true},
            {.options = {.gradients = in_buckets}, .uneven = true},
            {.options = {.averaging = weighted_mean, .accumulation = gradsync::Accumulation::in_buckets}, .micro_batches = 3},
            {.options = {.reduce_dtype = gradsync::DType::f32}, .uneven = true}};
}

/// A rank's residuals and shared state: of both compressed parameters and others.
template <class Exchange>
std::vector<Bytes> state_of(Exchange& exchange, std::size_t parameters) {
    std::vector<Bytes> state;
    for (std::size_t i = 0; i < parameters; ++i) {
        state.push_back(bytes_of(exchange.residual(i)));
        state.push_back(bytes_of(exchange.shared(i)));
    }
    return state;
}

/// `compressor` compresses from the first step on, `late` from step 2 on. `bad`: settings that a Reducer must refuse.
template <class X>
    requires gradsync::Compressor<X, gradsync::ThreadBackend>
void check_compressor(const X& compressor, const X& late, std::initializer_list<std::type_identity_t<X>> bad = {}) {
    using namespace gradsync;

    SUBCASE("it has a name that tells its options") {
        using Exchange = ExchangeOver<X, ThreadBackend>;
        CHECK(Exchange(compressor).describe() == Exchange(X(compressor)).describe());
        CHECK(Exchange(compressor).describe() != Exchange(late).describe());
        check_settings_are_told(compressor);
    }
    SUBCASE("bad settings throw when the Reducer is made") {
        for (const X& settings : bad) {
            CAPTURE(settings.describe());
            Errc code{};
            try {
                run_threads(
                    2, [&](ThreadBackend comm) { Trainee<NoOverlap, X>(comm, Script{}, settings); }, patient);
            } catch (const Error& error) {
                code = error.errc();
            }
            CHECK(code == Errc::invalid_argument);
        }
    }
    SUBCASE("nothing is lost, all ranks have the same bits, and what is not compressed is that of AllReduce") {
        for (const int ranks : rank_counts(2))
            for (const Script& script : scripts()) {
                CAPTURE(ranks);
                CAPTURE(describe(script.options));
                const auto traces = train(ranks, script, compressor, 6);
                CHECK(out_of_step(traces) == "");
                CHECK(lost(traces, script) == "");
                const auto exact = train(ranks, script, AllReduce{}, 6);
                // With a reduce_dtype of f32 so is what f64 travels as.
                const bool all = script.options.reduce_dtype.has_value();
                CHECK(different(traces[0], exact[0], 6,
                                [&](const Tensor& t) { return !is_compressed(t) && !(all && t.dtype == DType::f64); }) == "");
                CHECK(different(traces[0], exact[0], 6, is_compressed) != "");
            }
    }
    SUBCASE("the bits depend neither on the overlap policy nor on the run") {
        for (const int ranks : rank_counts(2))
            for (const Script& script : {scripts()[0], scripts()[3], scripts()[6]}) {
                CAPTURE(ranks);
                const auto traces = train(ranks, script, compressor, 4);
                CHECK(train(ranks, script, compressor, 4) == traces);
                CHECK(train<NoOverlap>(ranks, script, compressor, 4) == traces);
                CHECK(train(
                          ranks, script, compressor, 4, [](auto&, int) {}, OverlapBackward(Progress::thread)) == traces);
            }
    }
    if constexpr (requires { typename X::Codec; })
        SUBCASE("its codec keeps to its words and to the parameters of its bucket, and puts nothing back that is not finite") {
            gradsync::detail::GatheredBucket bucket{.parts = {{3, 300}, {310, 1}, {320, 256}}, .elements = 557, .count = 580};
            const typename X::Codec codec(compressor);
            bucket.words = codec.words(bucket);
            const auto is_gap = [&](std::size_t at) {
                return std::none_of(bucket.parts.begin(), bucket.parts.end(),
                                    [&](const auto& part) { return at >= part.first && at < part.first + part.count; });
            };
            std::vector<float> held(bucket.count);
            for (std::size_t at = 0; at < held.size(); ++at) held[at] = is_gap(at) ? 7.0f : std::sin(static_cast<float>(at));
            held[400] = std::numeric_limits<float>::infinity();
            std::vector<std::uint32_t> words(bucket.words + 16, 0xdeadbeef);
            codec.write(bucket, held.data(), words.data());
            CHECK(std::count(words.end() - 16, words.end(), 0xdeadbeef) == 16);
            codec.put_back(bucket, words.data(), held.data());
            for (std::size_t at = 0; at < held.size(); ++at) {
                CAPTURE(at);
                if (is_gap(at)) REQUIRE(held[at] == 7.0f);
                else REQUIRE(std::isfinite(held[at]));
            }
        }
    SUBCASE("gaps between parameters stay zero") {
        for (const int ranks : {2, 3}) {
            bool zero[3] = {true, true, true};
            train(ranks, {.options = {.gradients = GradientStorage::in_buckets}}, compressor, 4, [&](auto& trainee, int) {
                if (!trainee.gaps_are_zero()) zero[trainee.sync.backend().rank()] = false;
            });
            CHECK((zero[0] && zero[1] && zero[2]));
        }
    }
    SUBCASE("gaps between parameters stay zero after a step that was not finite, and the next ones are finite") {
        bool zero[2] = {true, true}, finite[2] = {true, true};
        train(2, {.options = {.gradients = GradientStorage::in_buckets}}, compressor, 1, [&](auto& trainee, int) {
            const auto rank = static_cast<std::size_t>(trainee.sync.backend().rank());
            for (int k = 0; k < 3; ++k) {
                for (const std::size_t i : trainee.trainable()) {
                    if (k == 0) trainee.fill(i, std::numeric_limits<double>::infinity());
                    else trainee.fill(i, 1);
                    trainee.sync.mark_ready(i);
                }
                trainee.sync.finish();
                if (!trainee.gaps_are_zero()) zero[rank] = false;
                for (const std::size_t i : trainee.trainable())
                    for (const double x : numbers(trainee.sync.gradient_view(i)))
                        if (k != 0 && !std::isfinite(x)) finite[rank] = false;
            }
        });
        CHECK((zero[0] && zero[1]));
        CHECK((finite[0] && finite[1]));
    }
    SUBCASE("PyTorch parity: before its first step it is AllReduce, to the bit") {
        for (const int ranks : {2, 3})
            for (const Script& script : scripts()) {
                CAPTURE(ranks);
                CAPTURE(describe(script.options));
                const auto traces = train(ranks, script, late, 4), exact = train(ranks, script, AllReduce{}, 4);
                CHECK(different(traces[0], exact[0], 2, [](const Tensor&) { return true; }) == "");
                CHECK(different(traces[0], exact[0], 4, is_compressed) != "");
                CHECK(out_of_step(traces) == "");
                CHECK(lost(traces, script) == "");
            }
    }
    SUBCASE("steps that were set count as seen") {
        const auto traces = train(2, {}, late, 2, [](auto& trainee, int k) {
            if (k == 0) trainee.sync.exchange().set_steps(2);
        });
        const auto at_once = train(2, {}, late, 2);
        CHECK(different(traces[0], at_once[0], 2, is_compressed) != "");
        std::vector<std::uint64_t> seen;
        train(2, {}, late, 4, [&](auto& trainee, int) {
            if (trainee.sync.backend().rank() == 0) seen.push_back(trainee.sync.exchange().steps());
        });
        CHECK(seen == std::vector<std::uint64_t>{0, 1, 2, 3});
    }
    SUBCASE("another plan keeps what there is of each parameter") {
        for (const int ranks : rank_counts(2))
            for (const Script& script : {scripts()[0], scripts()[1], scripts()[6]}) {
                CAPTURE(ranks);
                std::vector<std::string> wrong(static_cast<std::size_t>(ranks), "never rebuilt");
                const auto traces = train(ranks, script, compressor, 6, [&](auto& trainee, int k) {
                    if (k != 3) return;
                    auto& sync = trainee.sync;
                    std::string& text = wrong[static_cast<std::size_t>(sync.backend().rank())];
                    const auto before = state_of(sync.exchange(), sync.parameters().size());
                    text = sync.rebuild_buckets() ? "" : "the plan did not change";
                    if (state_of(sync.exchange(), sync.parameters().size()) != before) text = "state was lost";
                    if (sync.exchange().steps() != 3) text = "the steps were lost";
                });
                for (const std::string& text : wrong) CHECK(text == "");
                CHECK(out_of_step(traces) == "");
                CHECK(lost(traces, script) == "");
            }
    }
    SUBCASE("with its state a new one goes on as if nothing had happened") {
        for (const int ranks : rank_counts(2))
            for (const X* const one : {&compressor, &late}) {
                CAPTURE(ranks);
                const auto whole = train(ranks, {}, *one, 6);
                std::vector<Trace> rest(static_cast<std::size_t>(ranks));
                run_threads(
                    ranks,
                    [&](ThreadBackend comm) {
                        using Rank = Trainee<OverlapBackward, X>;
                        auto first = std::make_unique<Rank>(comm, Script{}, *one);
                        for (int k = 0; k < 3; ++k) first->step(k);
                        auto& old = first->sync.exchange();
                        const std::vector<Bytes> state = state_of(old, first->model.size());
                        const std::uint64_t steps = old.steps();
                        first.reset();
                        Rank second(comm, Script{}, *one);
                        auto& exchange = second.sync.exchange();
                        for (std::size_t i = 0; i < second.model.size(); ++i) {
                            write(exchange.residual(i), state[2 * i]);
                            write(exchange.shared(i), state[2 * i + 1]);
                        }
                        exchange.set_steps(steps);
                        for (int k = 3; k < 6; ++k) second.step(k);
                        rest[static_cast<std::size_t>(comm.rank())] = second.trace();
                    },
                    patient);
                for (std::size_t r = 0; r < rest.size(); ++r) {
                    CHECK(std::equal(rest[r].results.begin(), rest[r].results.end(), whole[r].results.begin() + 3));
                    CHECK(std::equal(rest[r].residuals.begin(), rest[r].residuals.end(), whole[r].residuals.begin() + 3));
                }
            }
    }
    SUBCASE("what is not finite reaches every rank at once, and is gone in the next step") {
        for (const int ranks : rank_counts(2))
            for (const double x : {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()})
                for (const bool everywhere : {false, true}) {  // in one element of each parameter, or in all
                    CAPTURE(ranks);
                    CAPTURE(x);
                    CAPTURE(everywhere);
                    std::string wrong;
                    run_threads(
                        ranks,
                        [&](ThreadBackend comm) {
                            const int rank = comm.rank();
                            Trainee<OverlapBackward, X> trainee(comm, Script{}, compressor);
                            auto& sync = trainee.sync;
                            for (int k = 0; k < 4; ++k) {
                                for (const std::size_t i : trainee.trainable()) {
                                    const BufferView view = sync.gradient_view(i);
                                    write(view, random_gradient(trainee.model[i], rank, k, i));
                                    const std::size_t count = everywhere || view.count == 0 ? view.count : 1;
                                    if (k == 1 && rank == 1 && is_floating(view.dtype))
                                        write(view.subview(view.count - count, count), constant_bytes(view.dtype, count, x));
                                    sync.mark_ready(i);
                                }
                                sync.finish();
                                for (const std::size_t i : trainee.trainable()) {
                                    const std::vector<double> result = numbers(sync.gradient_view(i));
                                    const bool finite =
                                        std::all_of(result.begin(), result.end(), [](double y) { return std::isfinite(y); });
                                    const bool expected = k != 1 || result.empty() || !is_floating(trainee.model[i].dtype);
                                    if (finite != expected && rank == 0)
                                        wrong = "step " + std::to_string(k) + ", " + trainee.model[i].name +
                                                (finite ? " is finite" : " is not finite");
                                    if (k == 1 && !expected && std::isfinite(result.back()) && rank == 0)
                                        wrong = "another element than that which was not finite";
                                }
                            }
                        },
                        patient);
                    CHECK(wrong == "");
                }
    }
    SUBCASE("what is not finite on a rank without weight reaches every rank in that step, and is gone in the next one") {
        std::string wrong;
        run_threads(
            2,
            [&](ThreadBackend comm) {
                Trainee<OverlapBackward, X> trainee(comm, {.options = {.averaging = Averaging::mean_over_count}}, compressor);
                auto& sync = trainee.sync;
                for (int k = 0; k < 4; ++k) {
                    const bool infinite = k == 2 && comm.rank() == 1;
                    sync.set_weight(infinite ? 0 : 1);
                    for (const std::size_t i : trainee.trainable()) {
                        trainee.fill(i, infinite ? std::numeric_limits<double>::infinity() : 1);
                        sync.mark_ready(i);
                    }
                    sync.finish();
                    for (const std::size_t i : trainee.trainable())
                        for (const double x : numbers(sync.gradient_view(i)))
                            if (comm.rank() == 0 && is_compressed(trainee.model[i]) && std::isfinite(x) != (k != 2))
                                wrong = "step " + std::to_string(k) + ", " + trainee.model[i].name;
                }
            },
            patient);
        CHECK(wrong == "");
    }
    SUBCASE("a step without weights is 0 and loses nothing, nor does a rank without weight, which brings nothing") {
        for (const Averaging averaging : {Averaging::weighted_mean, Averaging::mean_over_count})
            for (const int ranks : {2, 3})
                for (const int rank : {-1, 1})
                    for (const int step : {0, 2}) {  // in step 0 no rank has had a weight yet
                        CAPTURE(averaging);
                        CAPTURE(ranks);
                        CAPTURE(rank);
                        CAPTURE(step);
                        const Script script{.options = {.averaging = averaging}, .weightless = step, .weightless_rank = rank};
                        const auto traces = train(ranks, script, compressor, 5);
                        std::string wrong;
                        for (const Bytes& result : traces[0].results[static_cast<std::size_t>(step)])
                            if (rank < 0 && result != Bytes(result.size())) wrong = "something is not 0";
                        CHECK(wrong == "");
                        CHECK(lost(traces, script) == "");
                    }
    }
    SUBCASE("what was held back when weights were large is not worth more when they are small") {
        // Of gradients between -1 and 1: the backlog may be some times as much, but not as many times as there were tokens.
        for (const bool by_weight : {true, false}) {
            double largest = 0;
            run_threads(
                4,
                [&](ThreadBackend comm) {
                    const int rank = comm.rank();
                    Trainee<OverlapBackward, X> trainee(
                        comm, {.options = {.averaging = by_weight ? Averaging::weighted_mean : Averaging::mean}, .uneven = true},
                        compressor);
                    auto& sync = trainee.sync;
                    for (int k = 0; k < 12; ++k) {
                        const bool last = k == 11, has_batch = by_weight || !last || rank == 0;
                        (void)sync.begin_step(has_batch);
                        if (by_weight) sync.set_weight(last ? 8 : 2048);
                        for (const std::size_t i : trainee.trainable()) {
                            if (!has_batch) break;
                            const BufferView view = sync.gradient_view(i);
                            std::vector<float> gradient(view.count);
                            for (std::size_t e = 0; e < view.count; ++e)
                                gradient[e] = std::sin(static_cast<float>(e * 7 + i + static_cast<std::size_t>(rank)));
                            if (is_floating(view.dtype)) kernel::copy(const_buffer(gradient), view);
                            sync.mark_ready(i);
                        }
                        sync.finish();
                        for (const std::size_t i : trainee.trainable())
                            for (const double x : numbers(sync.gradient_view(i)))
                                if (rank == 0 && is_compressed(trainee.model[i])) largest = std::max(largest, std::abs(x));
                    }
                },
                patient);
            CAPTURE(by_weight);
            CHECK(largest < 12);
            CHECK(largest > 0.1);
        }
    }
    SUBCASE("a parameter that nobody uses keeps its gradient") {  // and loses what was held back of it and came in that step
        for (const int ranks : {2, 3})
            for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets}) {
                CAPTURE(ranks);
                bool kept[3] = {true, true, true};
                const Script script{.options = {.gradients = storage, .unused = UnusedParameters::find_unused}, .some_unused = true};
                const auto traces = train(ranks, script, compressor, 6,
                                          [&](auto& trainee, int) { kept[trainee.sync.backend().rank()] = trainee.keeps_unused(); });
                CHECK(out_of_step(traces) == "");
                CHECK((kept[0] && kept[1] && kept[2]));
            }
    }
    SUBCASE("a rank that throws in the middle of a step: the others are told who it was") {
        for (const int ranks : rank_counts(2))
            for (int guilty = 0; guilty < ranks; ++guilty) {
                const auto result = outcomes(ranks, [&](ThreadBackend comm) {
                    const int rank = comm.rank();
                    Trainee<OverlapBackward, X> trainee(comm, Script{}, compressor);
                    for (int k = 0; k < 50; ++k) {
                        if (k == 2 && rank == guilty) {
                            for (std::size_t i = trainee.model.size(); i-- > 3;)
                                if (trainee.model[i].requires_grad) trainee.sync.mark_ready(i);
                            throw std::runtime_error("out of cheese");
                        }
                        trainee.step(k);
                    }
                });
                for (int r = 0; r < ranks; ++r) {
                    const Outcome& outcome = result[static_cast<std::size_t>(r)];
                    INFO(outcome.text);
                    if (r == guilty) {
                        CHECK(outcome.says("out of cheese"));
                        continue;
                    }
                    REQUIRE(outcome.is(Errc::peer_failed));
                    CHECK(outcome.error->context().peer == guilty);
                }
            }
    }
    SUBCASE("ranks with different options are refused") {
        for (const int ranks : {2, 3}) {
            std::vector<Outcome> result(static_cast<std::size_t>(ranks));
            run_threads(
                ranks,
                [&](ThreadBackend comm) {
                    const int rank = comm.rank();
                    result[static_cast<std::size_t>(rank)] =
                        outcome_of([&] { Trainee<OverlapBackward, X>(comm, Script{}, rank == 1 ? late : compressor); });
                },
                patient);
            for (const Outcome& outcome : result) {
                INFO(outcome.text);
                CHECK(outcome.is(Errc::parameter_mismatch));
                CHECK(outcome.text == result[0].text);
                CHECK(outcome.says(compressor.describe()));
            }
        }
    }
    SUBCASE(
        "statistics tell what travels: less than an all-reduce moves, which is the gradients twice, in as many collectives as it says") {
        for (const int ranks : {2, 3}) {
            std::vector<std::string> wrong(static_cast<std::size_t>(ranks));
            train(ranks, {}, late, 5, [&](auto& trainee, int k) {
                if (k == 0) return;
                auto& sync = trainee.sync;
                Traffic promised{0, 0}, whole{0, 0};
                std::vector<gradsync::ParameterInfo> infos(sync.parameters().size());
                for (std::size_t i = 0; i < infos.size(); ++i)
                    infos[i] = {.count = sync.parameters()[i].gradient.count, .dtype = sync.parameters()[i].gradient.dtype};
                const gradsync::detail::BucketLayout layout(sync.plan(), infos);
                for (std::size_t b = 0; b < sync.plan().size(); ++b) {
                    const BufferView bucket{nullptr, layout.counts[b], infos[sync.plan().bucket(b).front()].dtype};
                    const Traffic traffic = sync.exchange().traffic(sync.backend(), b, bucket);
                    promised.bytes += traffic.bytes;
                    promised.collectives += traffic.collectives;
                    whole.bytes += bucket.bytes();
                    ++whole.collectives;
                }
                const StepStatistics& last = sync.statistics().last;
                std::string& text = wrong[static_cast<std::size_t>(sync.backend().rank())];
                if (last.bytes != promised.bytes || last.collectives != promised.collectives) text = "not as it said";
                if (k <= 2 && (last.bytes != whole.bytes || last.collectives != whole.collectives))
                    text = "not all has travelled before it started";
                if (k > 2 && last.bytes >= 2 * whole.bytes)
                    text = std::to_string(last.bytes) + " bytes instead of 2 * " + std::to_string(whole.bytes);
            });
            for (const std::string& text : wrong) CHECK(text == "");
        }
    }
    SUBCASE("one rank compresses nothing") {
        for (const Script& script : scripts()) {
            CAPTURE(describe(script.options));
            const auto traces = train(1, script, compressor, 4), exact = train(1, script, AllReduce{}, 4);
            CHECK(different(traces[0], exact[0], 4, [](const Tensor&) { return true; }) == "");
            for (const auto& after : traces[0].residuals)
                CHECK(std::all_of(after.begin(), after.end(), [](const Bytes& bytes) { return bytes.empty(); }));
        }
    }
}

}  // namespace gradsync_test
