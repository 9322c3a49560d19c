// SPDX-License-Identifier: BSL-1.0
// The global norm, and clipping.
#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include <gradsync/gradsync.hpp>

#include "support/averaging_oracle.hpp"
#include "support/ranks.hpp"
#include "support/tensor.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

const std::vector<std::size_t> clipped_sizes{10, 40'000, 1, 0, 16'384, 999};

/// Every rank brings rank 0's gradient: the same mean at 1, 2 and 4 ranks.
template <class R>
void same_backward(R& sync, const std::vector<Tensor>& model) {
    for (std::size_t i = model.size(); i-- > 0;) {
        if (!model[i].requires_grad) continue;
        write(sync.gradient_view(i), random_gradient(model[i], 0, 0, i));
        sync.mark_ready(i);
    }
    sync.finish();
}

long double norm_of(const std::vector<Tensor>& model) {
    long double sum = 0;
    for (std::size_t i = 0; i < model.size(); ++i) {
        if (!model[i].requires_grad) continue;
        Bytes gradient = random_gradient(model[i], 0, 0, i);
        for (const double x : numbers({gradient.data(), model[i].count(), model[i].dtype, MemorySpace::host}))
            sum += static_cast<long double>(x) * x;
    }
    return std::sqrt(sum);
}

template <class Buckets, class Overlap>
std::set<std::uint64_t> norms(const std::vector<Tensor>& shape, int ranks, GradientStorage storage, Overlap overlap = {}) {
    std::set<std::uint64_t> bits;
    for (const double norm : run_threads(ranks, [&](ThreadBackend comm) {
             auto model = shape;
             Reducer<ThreadBackend, Buckets, Overlap> sync(comm, model, {.gradients = storage}, overlap);
             same_backward(sync, model);
             return sync.gradient_norm();
         }))
        bits.insert(std::bit_cast<std::uint64_t>(norm));
    return bits;
}

}  // namespace

TEST_CASE("gradient_norm has the same bits for every rank, policy and world size, and the right ones") {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f64}) {
        auto shape = tensors(clipped_sizes, dtype);
        shape.emplace_back("frozen", dtype, std::vector<std::size_t>{100});
        shape.back().requires_grad = false;
        std::set<std::uint64_t> bits;
        for (const int ranks : {1, 2, 4})
            for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets}) {
                bits.merge(norms<PerParameter, NoOverlap>(shape, ranks, storage));
                bits.merge(norms<Flat, OverlapBackward>(shape, ranks, storage));
                bits.merge(norms<SizeCappedBuckets>(shape, ranks, storage, OverlapBackward(Progress::thread)));
            }
        REQUIRE(bits.size() == 1);
        const auto norm = static_cast<long double>(std::bit_cast<double>(*bits.begin()));
        CHECK(std::abs(norm - norm_of(shape)) <= 1e-12L * norm_of(shape));
    }
}

TEST_CASE("gradient_norm at 3 ranks is the same on all, and within 1e-12 of an oracle") {
    const auto results = run_threads(3, [&](ThreadBackend comm) {
        auto model = tensors(clipped_sizes);
        const int rank = comm.rank();
        Reducer sync(comm, model);
        backward(sync, model, rank, 0);
        sync.finish();
        return sync.gradient_norm();
    });
    long double sum = 0;
    const auto shape = tensors(clipped_sizes);
    for (std::size_t i = 0; i < shape.size(); ++i) {
        Bytes mean = expected_mean(shape[i], 3, 0, i);
        for (const double x : numbers({mean.data(), shape[i].count(), DType::f32, MemorySpace::host}))
            sum += static_cast<long double>(x) * x;
    }
    for (const double norm : results) {
        CHECK(std::bit_cast<std::uint64_t>(norm) == std::bit_cast<std::uint64_t>(results[0]));
        CHECK(std::abs(static_cast<long double>(norm) - std::sqrt(sum)) <= 1e-12L * std::sqrt(sum));
    }
}

TEST_CASE("clip_gradients_by_norm scales what is too long, and leaves the rest alone") {
    for (const int ranks : rank_counts())
        for (const DType dtype : {DType::f32, DType::bf16, DType::f64})
            for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets}) {
                CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                          auto model = tensors({10, 400, 0}, dtype);
                          model.emplace_back("frozen", dtype, std::vector<std::size_t>{5});
                          model.back().requires_grad = false;
                          model.back().gradient = random_gradient(model.back(), 0, 3, 3);
                          const int rank = comm.rank();
                          Reducer<ThreadBackend, SizeCappedBuckets> sync(comm, model, {.gradients = storage}, SizeCappedBuckets(100));
                          backward(sync, model, rank, 0);
                          sync.finish();
                          const double norm = sync.gradient_norm();
                          finding.check(sync.clip_gradients_by_norm(norm) == norm, "another norm");
                          finding.check(wrong_mean(sync, model, ranks, 0).empty(),
                                        "clipped at its own norm: " + wrong_mean(sync, model, ranks, 0));
                          finding.check(sync.clip_gradients_by_norm(norm / 3) == norm, "not the norm before");
                          for (std::size_t i = 0; i < 3; ++i) {
                              const Bytes mean = expected_mean(model[i], ranks, 0, i);
                              const Bytes scaled = with_type(dtype, [&]<class T>(T*) {
                                  using A = kernel::accumulator_t<T>;
                                  std::vector<T> x(model[i].count());
                                  if (!mean.empty()) std::memcpy(x.data(), mean.data(), mean.size());
                                  for (T& e : x)
                                      e = static_cast<T>(static_cast<A>(e) * static_cast<A>(gradsync::clip_factor(norm, norm / 3)));
                                  return bytes_of(const_buffer(x));
                              });
                              finding.check(holds(sync.gradient_view(i), scaled), "gradient " + std::to_string(i) + " is not scaled once");
                          }
                          finding.check(model[3].gradient == random_gradient(model[3], 0, 3, 3), "a frozen gradient was clipped");
                          const double left = sync.gradient_norm();
                          finding.check(std::abs(left - norm / 3) <= 0.01 * norm, "the norm is not what was asked for");
                      }) == "");
            }
}

TEST_CASE("clip_gradients_by_value clamps, and a NaN stays") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              std::vector<float> gradient{
                  -3, -0.5f, 0, 0.25f, 7, std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()};
              const std::vector<ParameterView> views{{.name = "w", .gradient = buffer(gradient)}};
              Reducer sync(comm, views);
              sync.mark_ready(0);
              sync.finish();
              sync.clip_gradients_by_value(0.5);
              const float expected[] = {-0.5f, -0.5f, 0, 0.25f, 0.5f, 0.5f};
              for (std::size_t i = 0; i < 6; ++i) finding.check(gradient[i] == expected[i], "element " + std::to_string(i));
              finding.check(std::isnan(gradient[6]), "a NaN became a number");
          }) == "");
}

TEST_CASE("gradient_norm passes on what is not finite, and norms and clipping leave integers out") {
    CHECK(
        findings(2, [](ThreadBackend comm, Finding& finding) {
            std::vector<float> gradient{1, 2};
            std::vector<std::int32_t> counts{3, 4};
            const std::vector<ParameterView> views{{.name = "w", .gradient = buffer(gradient)}, {.name = "n", .gradient = buffer(counts)}};
            Reducer sync(comm, views, {.averaging = Averaging::sum});
            const auto step = [&](float first) {
                gradient = {first, 2};
                counts = {3, 4};
                sync.mark_ready(1);
                sync.mark_ready(0);
                sync.finish();
                return sync.gradient_norm();
            };
            finding.check(step(1) == std::sqrt(4.0 + 16.0), "integers have no norm");
            sync.clip_gradients_by_norm(0.5);
            sync.clip_gradients_by_value(0.1);
            finding.check(counts == std::vector<std::int32_t>{6, 8}, "integers were clipped");
            finding.check(std::isnan(step(std::numeric_limits<float>::quiet_NaN())), "a NaN got lost");
            finding.check(std::isinf(step(std::numeric_limits<float>::infinity())), "an infinity got lost");
        }) == "");
    CHECK(gradsync::clip_factor(2, 1) == 0.5);
    CHECK(gradsync::clip_factor(1, 2) == 1);
    CHECK(gradsync::clip_factor(0, 0) == 1);
    for (const double limit : {-1.0, std::numeric_limits<double>::quiet_NaN()})
        CHECK(outcome_of([&] { (void)gradsync::clip_factor(4, limit); }).says("clip_factor: a limit must be 0 or more, not "));
    // One bad element must not spoil all others.
    CHECK(gradsync::clip_factor(std::numeric_limits<double>::quiet_NaN(), 1) == 1);
    CHECK(gradsync::clip_factor(std::numeric_limits<double>::infinity(), 1) == 1);
}

TEST_CASE("clipping refuses an invalid limit") {
    CHECK(findings(1, [](ThreadBackend comm, Finding& finding) {
              auto model = tensors({3});
              Reducer sync(comm, model);
              same_backward(sync, model);
              for (const double limit : {-1.0, std::numeric_limits<double>::quiet_NaN()})
                  for (const Outcome& outcome :
                       {outcome_of([&] { sync.clip_gradients_by_norm(limit); }), outcome_of([&] { sync.clip_gradients_by_value(limit); })})
                      finding.check(outcome.is(Errc::invalid_argument) && outcome.says("a limit must be 0 or more"), outcome.text);
          }) == "");
}

TEST_CASE("a norm of gradients that are not averaged, and clipping them, are refused, and the training goes on") {
    for (const int ranks : rank_counts())
        CHECK(findings(ranks, [](ThreadBackend comm, Finding& finding) {
                  auto model = tensors({30, 400});
                  Reducer sync(comm, model);
                  const auto refuses = [&] {
                      for (const Outcome& outcome :
                           {outcome_of([&] { sync.gradient_norm(); }), outcome_of([&] { sync.clip_gradients_by_norm(1); }),
                            outcome_of([&] { sync.clip_gradients_by_norm(1, 2); }), outcome_of([&] { sync.clip_gradients_by_value(1); })})
                          finding.check(
                              outcome.is(Errc::invalid_argument) && outcome.says("gradients are not averaged yet; call finish() first"),
                              outcome.text);
                  };
                  refuses();
                  same_backward(sync, model);
                  const double norm = sync.gradient_norm();
                  {
                      const auto guard = sync.no_sync();
                      finding.check(sync.gradient_norm() == norm, "another norm before the marks");
                      for (std::size_t i = 0; i < 2; ++i) sync.mark_ready(i);
                      refuses();
                  }
                  refuses();
                  same_backward(sync, model);
                  finding.check(sync.gradient_norm() == norm, "another norm after micro-batches");
                  const auto guard = sync.no_sync();
                  same_backward(sync, model);
                  finding.check(sync.clip_gradients_by_norm(1) == norm, "another norm while a guard lives");
              }) == "");
}
