// SPDX-License-Identifier: BSL-1.0
// What all compressors promise is in conformance/compressor.hpp.
#include <gradsync/compress/quantizer.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/overlap/no_overlap.hpp>

#include "support/averaging_oracle.hpp"
#include "support/ranks.hpp"
#include "support/tensor.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

using QuantizerOfRanks = ExchangeOver<Quantizer, ThreadBackend>;
template <class Buckets = SizeCappedBuckets, class Overlap = OverlapBackward>
using QuantizerReducer = Reducer<ThreadBackend, Buckets, Overlap, Quantizer>;

float gradient_of(int rank, int step, std::size_t i, std::size_t e) {
    return static_cast<float>((e * 37 + i * 11 + static_cast<std::size_t>(step * 5 + rank * 3)) % 201) / 16 - 6;
}

}  // namespace

TEST_CASE("Quantizer averages what the ranks say, with what they held back") {
    const std::vector<std::size_t> counts{300, 5, 1024};
    for (const unsigned bits : {8u, 4u, 1u})
        for (const int ranks : {2, 3}) {
            CAPTURE(bits);
            CAPTURE(ranks);
            CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                      auto model = tensors(counts);
                      const int rank = comm.rank();
                      QuantizerReducer<> sync(comm, model, Quantizer{.bits = bits});
                      std::vector<std::vector<std::vector<float>>> held(static_cast<std::size_t>(ranks));  // by rank and parameter
                      for (auto& of_rank : held)
                          for (const std::size_t count : counts) of_rank.emplace_back(count);
                      for (int step = 0; step < 5; ++step) {
                          std::vector<std::vector<float>> expected;
                          for (std::size_t i = 0; i < counts.size(); ++i) {
                              const std::size_t words = kernel::quantized_words(counts[i], bits);
                              std::vector<std::uint32_t> messages(words * static_cast<std::size_t>(ranks));
                              for (int r = 0; r < ranks; ++r) {
                                  std::vector<float>& own = held[static_cast<std::size_t>(r)][i];
                                  std::vector<float> gradient(counts[i]);
                                  for (std::size_t e = 0; e < counts[i]; ++e) own[e] += gradient[e] = gradient_of(r, step, i, e);
                                  if (r == rank) write(sync.gradient_view(i), bytes_of(const_buffer(gradient)));
                                  kernel::quantize(own.data(), own.size(), bits, messages.data() + words * static_cast<std::size_t>(r));
                              }
                              expected.emplace_back(counts[i]);
                              kernel::sum_quantized(messages.data(), words, static_cast<std::size_t>(ranks), counts[i], bits,
                                                    1 / static_cast<float>(ranks), expected[i].data());
                          }
                          for (std::size_t i = counts.size(); i-- > 0;) sync.mark_ready(i);
                          sync.finish();
                          for (std::size_t i = 0; i < counts.size(); ++i) {
                              finding.check(holds(sync.gradient_view(i), bytes_of(const_buffer(expected[i]))),
                                            "another mean in step " + std::to_string(step));
                              finding.check(
                                  holds(sync.exchange().residual(i), bytes_of(const_buffer(held[static_cast<std::size_t>(rank)][i]))),
                                  "something else is held back in step " + std::to_string(step));
                          }
                      }
                  }) == "");
        }
}

TEST_CASE("Quantizer: the bits depend on neither buckets nor overlap") {
    const auto results = [&](auto buckets, auto overlap) {
        std::vector<Bytes> of_rank_0;
        CHECK(findings(3, [&](ThreadBackend comm, Finding&) {
                  auto model = tensors({300, 50, 1024, 70});
                  QuantizerReducer<decltype(buckets), decltype(overlap)> sync(comm, model, {}, buckets, overlap, Quantizer{.bits = 1});
                  for (int step = 0; step < 3; ++step) {
                      backward(sync, model, comm.rank(), step);
                      sync.finish();
                  }
                  if (comm.rank() == 0)
                      for (std::size_t i = 0; i < model.size(); ++i) of_rank_0.push_back(bytes_of(sync.gradient_view(i)));
              }) == "");
        return of_rank_0;
    };
    const auto flat = results(Flat(), NoOverlap());
    CHECK(flat.size() == 4);
    CHECK(flat == results(PerParameter(), OverlapBackward()));
    CHECK(flat == results(SizeCappedBuckets(2000), OverlapBackward()));
}

TEST_CASE("Quantizer sends as many bytes as its bits say, and no more than the gradients have") {
    struct Case {
        DType dtype;
        unsigned bits;
        int ranks;
        std::size_t bytes;
    };
    constexpr std::size_t count = 4096, blocks = count / 256, weight = 2;
    for (const Case& c : {Case{DType::f32, 8, 2, 2 * 4 * (weight + blocks * 65)},
                          {DType::f32, 4, 3, 3 * 4 * (weight + blocks * 33)},
                          {DType::bf16, 1, 4, 4 * 4 * (weight + blocks * 9)},
                          {DType::bf16, 8, 4, 2 * count},
                          {DType::f64, 1, 2, 8 * count}}) {  // the last two whole: more than an all-reduce, and not compressible
        CAPTURE(c.bits);
        CAPTURE(c.ranks);
        CHECK(findings(c.ranks, [&](ThreadBackend comm, Finding& finding) {
                  auto model = tensors({count}, c.dtype);
                  QuantizerReducer<> sync(comm, model, Quantizer{.bits = c.bits});
                  backward(sync, model, comm.rank(), 0);
                  sync.finish();
                  finding.check(sync.statistics().last.bytes == c.bytes,
                                std::to_string(sync.statistics().last.bytes) + " bytes instead of " + std::to_string(c.bytes));
              }) == "");
    }
}

TEST_CASE("Quantizer: an infinity of one rank makes its block NaN on all, in that step only") {
    CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
              auto model = tensors({1000});
              QuantizerReducer<> sync(comm, model, Quantizer{.bits = 4});
              for (int step = 0; step < 2; ++step) {
                  std::vector<float> gradient(1000, 2);
                  if (step == 0 && comm.rank() == 1) gradient[300] = std::numeric_limits<float>::infinity();
                  write(sync.gradient_view(0), bytes_of(const_buffer(gradient)));
                  sync.mark_ready(0);
                  sync.finish();
                  const std::vector<double> mean = numbers(sync.gradient_view(0));
                  std::size_t wrong = 0;
                  for (std::size_t e = 0; e < 1000; ++e)
                      wrong += step == 0 && e / 256 == 1 ? !(mean[e] != mean[e]) : !(mean[e] > 1.99 && mean[e] < 2.01);
                  finding.check(wrong == 0, std::to_string(wrong) + " wrong in step " + std::to_string(step));
              }
          }) == "");
}

TEST_CASE("Quantizer refuses unsupported numbers of bits") {
    for (const unsigned bits : {0u, 2u, 16u}) {
        try {
            QuantizerOfRanks compressor(Quantizer{.bits = bits});
            FAIL("nothing was thrown");
        } catch (const Error& error) {
            CHECK(error.errc() == Errc::invalid_argument);
            CHECK(std::string(error.what()) == "Quantizer: an element has 8, 4 or 1 bits, not " + std::to_string(bits));
        }
    }
}
