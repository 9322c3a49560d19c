// SPDX-License-Identifier: BSL-1.0
// ReducerOptions::check_writes: gradients that are written after their mark; and parameters that nobody filled in.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdlib>
#include <string>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/overlap/no_overlap.hpp>
#include <gradsync/overlap/overlap_forward.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>

#include "support/optimizers.hpp"
#include "support/ranks.hpp"
#include "support/standard_error.hpp"
#include "support/tensor.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

/// Asks for the checks while it lives.
struct Asked {
    explicit Asked(const char* value) { ::setenv("GRADSYNC_CHECKS", value, 1); }
    ~Asked() { ::unsetenv("GRADSYNC_CHECKS"); }
};

constexpr std::size_t nobody = 99;
/// A backward. Element `at` of gradient `late` changes after its mark: before the next mark, or after the last one.
template <class Sync>
void marks(Sync& sync, std::vector<Tensor>& model, int rank, int batch, std::size_t late = nobody, std::size_t at = 0,
           bool after_all = false) {
    const auto change = [&] { sync.gradient_view(late).template as<float>()[at] += 1; };
    for (std::size_t i = model.size(); i-- > 0;) {
        write(sync.gradient_view(i), random_gradient(model[i], rank, batch, i));
        sync.mark_ready(i);
        if (i == late && !after_all) change();
    }
    if (late != nobody && after_all) change();
}

const std::string written_late = "the gradient of 'p1' was written after its mark; mark it when its last contribution is in";

}  // namespace

TEST_CASE("a gradient that is written after its mark is named on every rank, wherever it lives and whatever travels") {
    const auto check = [](auto overlap, GradientStorage storage, AnyBuckets buckets, int ranks, std::size_t at, bool after_all) {
        const auto seen = outcomes(ranks, [&](ThreadBackend comm) {
            auto model = tensors({10, 2001, 30});
            Reducer sync(comm, model, {.gradients = storage, .check_writes = true}, buckets, overlap);
            marks(sync, model, comm.rank(), 0);
            if constexpr (requires { sync.finish().wait(); }) sync.finish().wait();
            else sync.finish();
            marks(sync, model, comm.rank(), 1, comm.rank() == ranks - 1 ? 1 : nobody, at, after_all);
            (void)sync.finish();
        });
        for (const Outcome& outcome : seen) CHECK_MESSAGE(outcome.says(written_late), outcome.text);
        CHECK(seen.back().is(Errc::invalid_argument));
        CHECK(seen.back().error.value().context().parameter == "p1");
        return seen.back().text;
    };
    for (const int ranks : rank_counts(1, 3))
        for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets})
            for (const bool after_all : {false, true})
                for (const std::size_t at : {0u, 2000u}) {
                    for (const AnyBuckets& buckets : {AnyBuckets(Flat{}), AnyBuckets(PerParameter{})}) {
                        check(NoOverlap{}, storage, buckets, ranks, at, after_all);
                        check(OverlapBackward{}, storage, buckets, ranks, at, after_all);
                        check(OverlapBackward{Progress::thread}, storage, buckets, ranks, at, after_all);
                        check(OverlapForward{}, storage, buckets, ranks, at, after_all);
                    }
                    // A full bucket is looked at as soon as it is full.
                    const std::string text = check(OverlapBackward{}, storage, Flat{}, ranks, at, after_all);
                    CHECK(text.starts_with(after_all || ranks == 1 ? "finish on rank " : "mark_ready on rank "));
                }
}

TEST_CASE("the environment asks for the checks, too, and only with GRADSYNC_CHECKS=1") {
    for (const std::string value : {"1", "0", "", "true", "2"}) {
        const Asked asked(value.c_str());
        std::vector<Outcome> seen;
        const std::string said = written_by([&] {
            seen = outcomes(2, [&](ThreadBackend comm) {
                auto model = tensors({10, 20, 30});
                Reducer sync(comm, model, PerParameter{}, ReducerOptions{.unused = UnusedParameters::find_unused});  // copied
                marks(sync, model, comm.rank(), 0, static_cast<std::size_t>(comm.rank()), 0, true);
                sync.finish();
            });
        });
        const bool wrong = value == "true" || value == "2";
        CHECK((said.find("GRADSYNC_CHECKS=" + value + " is neither 1 nor 0; set it to 1") != std::string::npos) == wrong);
        CHECK(seen[1].says(written_late) == (value == "1"));
        CHECK(seen[1].text.empty() == (value != "1"));
    }
}

TEST_CASE("sharded gradients are checked, too") {
    const Asked asked("1");
    const auto check = [](auto stage) {
        const auto seen = outcomes(2, [&](ThreadBackend comm) {
            auto model = tensors({10, 20, 30});
            ShardedOptimizer sharded(comm, model, AdamW{}, stage);
            for (const bool wrong : {false, true}) {
                for (std::size_t i = model.size(); i-- > 0;) {
                    const BufferView gradient = sharded.acquire_gradient(i);
                    write(gradient, random_gradient(model[i], comm.rank(), 0, i));
                    sharded.mark_ready(i);
                    if (wrong && i == 1) gradient.as<float>()[3] += 1;
                }
                sharded.finish();
                sharded.step();
            }
        });
        for (const Outcome& outcome : seen) CHECK_MESSAGE(outcome.says(written_late), outcome.text);
    };
    check(Zero1{});
    check(Zero2{});
}

TEST_CASE("a training that does nothing wrong has the same bits with the checks, on some ranks or on all") {
    struct Case {
        GradientStorage gradients;
        Accumulation accumulation;
        std::size_t micro_batches;
        UnusedParameters unused;
    };
    using enum GradientStorage;
    using enum UnusedParameters;
    const auto train = [](auto overlap, const Case& c, int checked) {
        std::vector<std::vector<Bytes>> all(3);
        CHECK(findings(3, [&](ThreadBackend comm, Finding&) {
                  auto model = tensors({10, 2000, 30, 1});
                  Reducer sync(comm, model,
                               {.gradients = c.gradients,
                                .accumulation = c.accumulation,
                                .micro_batches = c.micro_batches,
                                .unused = c.unused,
                                .check_writes = comm.rank() < checked},
                               SizeCappedBuckets(200), overlap);
                  const std::size_t own = c.micro_batches == 0 ? 2 : Deal{c.micro_batches, 3}.count(comm.rank());
                  for (int s = 0; s < 4; ++s) {
                      for (std::size_t b = 0; b + 1 < own; ++b) {
                          const auto guard = sync.no_sync();
                          marks(sync, model, comm.rank(), 10 * s + static_cast<int>(b));
                      }
                      for (std::size_t i = model.size(); i-- > 0;) {
                          if (c.unused == find_unused && i == static_cast<std::size_t>(s)) continue;
                          write(sync.gradient_view(i), random_gradient(model[i], comm.rank(), s, i));
                          sync.mark_ready(i);
                      }
                      (void)sync.finish();
                      for (std::size_t i = 0; i < model.size(); ++i)
                          all[static_cast<std::size_t>(comm.rank())].push_back(bytes_of(sync.gradient_view(i)));
                      if (s == 2) (void)sync.rebuild_buckets();
                  }
              }) == "");
        return all;
    };
    for (const Case& c :
         {Case{borrowed, Accumulation::in_gradients, 0, error}, Case{in_buckets, Accumulation::in_gradients, 0, error},
          Case{borrowed, Accumulation::in_gradients, 0, find_unused}, Case{in_buckets, Accumulation::in_gradients, 0, find_unused},
          Case{borrowed, Accumulation::in_buckets, 7, error}, Case{in_buckets, Accumulation::in_buckets, 7, error},
          Case{borrowed, Accumulation::in_buckets, 0, error}, Case{in_buckets, Accumulation::in_buckets, 12, error}}) {
        const auto expected = train(OverlapBackward{}, c, 0);
        for (const int checked : {1, 3}) CHECK(train(OverlapBackward{}, c, checked) == expected);
        CHECK(train(NoOverlap{}, c, 3) == expected);
    }
}

TEST_CASE("a ParameterView that nobody filled in is refused") {
    for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets})
        CHECK(
            findings(2, [&](ThreadBackend comm, Finding& finding) {
                std::vector<float> w(3), gradient(3);
                std::vector<ParameterView> all(1);
                all.push_back(parameter("w", w, gradient));
                const Outcome refused = outcome_of([&] { Reducer(comm, all, ReducerOptions{.gradients = storage}); });
                finding.check(
                    refused.is(Errc::invalid_argument) &&
                        refused.says("parameter '0' has no elements, no gradient and no value: a null pointer, or an empty ParameterView"),
                    refused.text);
                all.erase(all.begin());
                Reducer(comm, all, ReducerOptions{.gradients = storage});
            }) == "");
}
