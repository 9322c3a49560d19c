// SPDX-License-Identifier: BSL-1.0
// What all compressors promise is in conformance/compressor.hpp.
#include <gradsync/compress/top_k.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include <gradsync/gradsync.hpp>

#include "support/averaging_oracle.hpp"
#include "support/ranks.hpp"
#include "support/tensor.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

using TopKOfRanks = ExchangeOver<TopK, ThreadBackend>;
using TopKReducer = Reducer<ThreadBackend, SizeCappedBuckets, OverlapBackward, TopK>;

/// The k elements of largest magnitude of u, which become 0 there; 0 everywhere else.
std::vector<double> largest_of(std::vector<double>& u, std::size_t k) {
    std::vector<double> taken(u.size());
    for (; k > 0; --k) {
        const auto largest = std::max_element(u.begin(), u.end(), [](double a, double b) { return std::abs(a) < std::abs(b); });
        std::swap(*largest, taken[static_cast<std::size_t>(largest - u.begin())]);
    }
    return taken;
}

}  // namespace

TEST_CASE("TopK: the k largest of what is there travel, and the rest is kept exactly") {
    for (const int ranks : {2, 3}) {
        CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                  auto model = tensors({300});
                  const int rank = comm.rank();
                  TopKReducer sync(comm, model, {.averaging = Averaging::sum}, TopK{.density = 0.05});
                  std::vector<std::vector<double>> kept(static_cast<std::size_t>(ranks), std::vector<double>(300));  // of all ranks
                  for (int step = 0; step < 10; ++step) {
                      std::vector<double> expected(300);
                      for (int r = 0; r < ranks; ++r) {
                          // Multiples of 1/8, whose sums are exact, of different magnitudes, so that it is clear which are largest.
                          const auto gradient_of = [&](std::size_t e) {
                              return static_cast<double>((e * 37 + static_cast<std::size_t>(step + r)) % 1024) / 8 - 50;
                          };
                          std::vector<double>& u = kept[static_cast<std::size_t>(r)];
                          std::vector<float> gradient(300);
                          for (std::size_t e = 0; e < 300; ++e) {
                              u[e] += gradient_of(e);
                              gradient[e] = static_cast<float>(gradient_of(e));
                          }
                          if (r == rank) write(sync.gradient_view(0), bytes_of(const_buffer(gradient)));
                          const std::vector<double> taken = largest_of(u, 15);
                          for (std::size_t e = 0; e < 300; ++e) expected[e] += taken[e];
                      }
                      sync.mark_ready(0);
                      sync.finish();
                      finding.check(numbers(sync.gradient_view(0)) == expected, "the sum is wrong in step " + std::to_string(step));
                      finding.check(numbers(sync.exchange().residual(0)) == kept[static_cast<std::size_t>(rank)],
                                    "what is kept is wrong in step " + std::to_string(step));
                  }
              }) == "");
    }
}

TEST_CASE("TopK: what waited until its type of low precision cannot hold it is late, not lost") {
    for (const auto& [dtype, value, averaging] :
         {std::tuple(DType::f8e4m3, 64.0, Averaging::mean), std::tuple(DType::f8e4m3, 64.0, Averaging::sum),
          std::tuple(DType::f8e5m2, 4096.0, Averaging::mean), std::tuple(DType::f16, 4096.0, Averaging::weighted_mean)})
        for (const int ranks : {2, 3})
            CHECK(findings(ranks, [&, dtype = dtype, value = value, averaging = averaging](ThreadBackend comm, Finding& finding) {
                      auto model = tensors({1000}, dtype);
                      TopKReducer sync(comm, model, {.averaging = averaging}, TopK{.density = 0.005});
                      constexpr std::size_t used = 200;  // they wait for 40 steps
                      std::vector<double> gradient(1000);
                      std::fill_n(gradient.begin(), used, value);
                      const bool weighted = averaging == Averaging::weighted_mean, sums = averaging == Averaging::sum;
                      double given = 0, sent = 0;
                      for (int step = 0; step < 60; ++step) {
                          if (weighted) sync.set_weight(1 + comm.rank());
                          kernel::copy(const_buffer(gradient), sync.gradient_view(0));
                          sync.mark_ready(0);
                          sync.finish();
                          given += static_cast<double>(used) * value * (sums ? ranks : 1);
                          for (const double x : numbers(sync.gradient_view(0))) sent += x;
                      }
                      std::vector<double> held(1);  // which counts by the ranks' weights
                      for (const double x : numbers(sync.exchange().residual(0))) held[0] += x;
                      held[0] *= weighted ? 2.0 * (1 + comm.rank()) / (ranks * (ranks + 1)) : sums ? 1 : 1.0 / ranks;
                      comm.all_reduce(buffer(held), ReduceOp::sum).wait();
                      finding.check(
                          std::abs(given - sent - held[0]) < 1e-4 * given,
                          std::to_string(given) + " given, " + std::to_string(sent) + " sent, " + std::to_string(held[0]) + " held");
                  }) == "");
}

TEST_CASE("TopK: an element that the bucket does not have is refused, with the rank that sent it") {
    TopK::Codec codec(TopK{.density = 0.5});
    BucketContents contents{.count = 4, .dtype = DType::f32, .parts = {}};
    detail::GatheredBucket bucket{.elements = 4, .count = 4};
    bucket.words = codec.words(bucket, contents, 0, 0);
    REQUIRE(bucket.words == 4);
    std::uint32_t messages[] = {0, 3, 0, 0, 1, 4, 0, 0};
    float sums[4];
    const auto add_up = [&] {
        codec.add_up(bucket, {.first = messages, .stride = 4, .count = 2}, 1, buffer(std::span(sums)),
                     [](std::size_t, ConstBufferView, BufferView) {});
    };
    CHECK(outcome_of(add_up).says("TopK: rank 1 sent an element number 4 of a bucket of 4"));
    // What a rank puts back went through other ranks, too.
    float held[] = {5, 5, 5, 5, 5};
    codec.put_back(bucket, messages + 4, held);
    CHECK(std::vector<float>(held, held + 5) == std::vector<float>{5, 0, 5, 5, 5});
    messages[5] = 2;
    CHECK(outcome_of(add_up).text == "");
}

TEST_CASE("TopK: where what is gathered would be more than an all-reduce, the bits are those of AllReduce") {
    for (const int ranks : {2, 3, 4})
        for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
            CAPTURE(ranks);
            CAPTURE(name_of(dtype));
            CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                      auto model = tensors({300, 20, 1000}, dtype);
                      const int rank = comm.rank();
                      TopKReducer sync(comm, model, TopK{.density = 1});
                      for (int step = 0; step < 3; ++step) {
                          backward(sync, model, rank, step);
                          sync.finish();
                          finding.check(wrong_mean(sync, model, ranks, step).empty(), wrong_mean(sync, model, ranks, step));
                      }
                      finding.check(sync.statistics().last.collectives == sync.plan().size(), "collectives");
                      for (std::size_t i = 0; i < model.size(); ++i)
                          for (const double x : numbers(sync.exchange().residual(i))) finding.check(x == 0, "something is kept");
                  }) == "");
        }
}

TEST_CASE("TopK: a weight scales what travels whole without overflow, as in AllReduce") {
    CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
              auto model = tensors({300}, DType::f16);
              TopKReducer sync(comm, model, {.averaging = Averaging::weighted_mean}, TopK{.density = 1});
              sync.set_weight(4096);  // tokens
              write(sync.gradient_view(0), constant_bytes(DType::f16, 300, 32));
              sync.mark_ready(0);
              sync.finish();
              finding.check(numbers(sync.gradient_view(0)) == std::vector<double>(300, 32),
                            "the mean of 32 and 32 is " + std::to_string(numbers(sync.gradient_view(0))[0]));
          }) == "");
}

TEST_CASE("TopK: what was kept under a lower density does not stay behind under a higher one") {
    CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
              auto model = tensors({100});
              TopKReducer sync(comm, model, {.averaging = Averaging::sum}, TopK{.density = 1});
              write(sync.exchange().residual(0), constant_bytes(DType::f32, 100, 0.5));  // of a checkpoint
              write(sync.gradient_view(0), constant_bytes(DType::f32, 100, 0.25));
              sync.mark_ready(0);
              sync.finish();
              finding.check(numbers(sync.gradient_view(0)) == std::vector<double>(100, 1.5), "not all has travelled");
              finding.check(numbers(sync.exchange().residual(0)) == std::vector<double>(100), "something is kept");
          }) == "");
}

TEST_CASE("TopK: a parameter of one element travels") {
    CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
              auto model = tensors({1, 0});
              const int rank = comm.rank();
              TopKReducer sync(comm, model, TopK{});
              backward(sync, model, rank, 0);
              sync.finish();
              finding.check(wrong_mean(sync, model, 2, 0).empty(), wrong_mean(sync, model, 2, 0));
          }) == "");
}

TEST_CASE("TopK refuses an invalid density") {
    for (const double density : {0.0, -0.1, 1.1, std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
        const Outcome outcome = outcome_of([&] { TopKOfRanks compressor(TopK{.density = density}); });
        CHECK(outcome.is(Errc::invalid_argument));
        CHECK(outcome.says("the density must be more than 0 and 1 at most"));
    }
}

TEST_CASE("TopK: densities that differ by little have different names") {
    CHECK(TopK{.density = 0.001}.describe() != TopK{.density = 0.0010004}.describe());
}
