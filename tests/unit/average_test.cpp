// SPDX-License-Identifier: BSL-1.0
// One all-reduce of several tensors, without a Reducer.
#include <doctest/doctest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include <gradsync/gradsync.hpp>

#include "support/ranks.hpp"
#include "support/recording_backend.hpp"

namespace gs = gradsync;
using namespace gradsync_test;

namespace {

struct Matrix {
    std::vector<float> elements;
};

/// Element k of tensor t on a rank: sums of a few of them are exact.
double element(int rank, std::size_t t, std::size_t k) {
    return static_cast<double>((static_cast<std::size_t>(rank + 1) * (k % 61 + 7 * t + 1)) % 64);
}

template <class R>
void fill(R& range, int rank, std::size_t t) {
    for (std::size_t k = 0; k < std::size(range); ++k)
        std::data(range)[k] = static_cast<gs::detail::range_element_t<R>>(element(rank, t, k));
}

template <class R>
bool holds_sum(const R& range, int ranks, std::size_t t, double factor) {
    for (std::size_t k = 0; k < std::size(range); ++k) {
        double sum = 0;
        for (int r = 0; r < ranks; ++r) sum += element(r, t, k);
        if (std::data(range)[k] != static_cast<std::remove_cvref_t<decltype(std::data(range)[k])>>(sum * factor)) return false;
    }
    return true;
}

}  // namespace

template <>
struct gradsync::buffer_traits<Matrix> {
    static BufferView view(Matrix& m) { return buffer(m.elements); }
};

TEST_CASE("average and sum work in place on ranges, spans, views, tensors with traits and numbers") {
    for (const int ranks : {1, 2, 4})
        for (const bool mean : {true, false})
            CHECK(findings(ranks, [&](gs::ThreadBackend comm, Finding& finding) {
                      std::vector<float> big(10000), small(7), empty;
                      std::array<double, 5> wide{};
                      float bare[3];
                      Matrix matrix{std::vector<float>(11)};
                      const int rank = comm.rank();
                      for (int step = 0; step < 2; ++step) {
                          fill(big, rank, 0), fill(small, rank, 1), fill(wide, rank, 2), fill(bare, rank, 3),
                              fill(matrix.elements, rank, 4);
                          auto loss = static_cast<float>(element(rank, 5, 0));
                          if (mean) gs::average(comm, small, big, empty, wide, std::span(bare), matrix, loss);
                          else gs::sum(comm, small, big, empty, wide, gs::BufferView(bare), matrix, loss);
                          const double factor = mean ? 1.0 / ranks : 1;
                          finding.check(holds_sum(big, ranks, 0, factor), "big");
                          finding.check(holds_sum(small, ranks, 1, factor), "small");
                          finding.check(holds_sum(wide, ranks, 2, factor), "wide");
                          finding.check(holds_sum(bare, ranks, 3, factor), "bare");
                          finding.check(holds_sum(matrix.elements, ranks, 4, factor), "matrix");
                          finding.check(holds_sum(std::span(&loss, 1), ranks, 5, factor), "loss");
                      }
                  }) == "");
}

TEST_CASE("sum adds up integers, average refuses them before anything is sent") {
    CHECK(findings(2, [](gs::ThreadBackend comm, Finding& finding) {
              std::int64_t count = comm.rank() + 1;
              float loss = 1;
              const auto refused = outcome_of([&] { gs::average(comm, loss, count); });
              finding.check(refused.is(gs::Errc::invalid_argument) && refused.says("use sum() and divide"), refused.text);
              gs::sum(comm, count, loss);  // the communicator still works
              finding.check(count == 3 && loss == 2, "another sum");
          }) == "");
}

TEST_CASE("a tensor without memory is refused before anything is sent") {
    CHECK(findings(2, [](gs::ThreadBackend comm, Finding& finding) {
              std::vector<float> large(10'000, 1.0f);
              const Outcome outcome = outcome_of([&] { gs::average(comm, large, gs::BufferView{nullptr, 8, gs::DType::f32}); });
              finding.check(outcome.is(gs::Errc::invalid_argument) && outcome.says("a tensor has no memory"), outcome.text);
              gs::sum(comm, large);
              finding.check(large[0] == 2, "it was sent");
          }) == "");
}

TEST_CASE("small tensors of the first one's type share a collective, up to 16 KiB; one tensor travels where it is") {
    CHECK(findings(2, [](gs::ThreadBackend threads, Finding& finding) {
              RecordingBackend comm(threads);
              std::vector<float> a(4000), b(96), c(1), large(4097);
              std::vector<double> other(3);
              gs::average(comm, a, large, b, c, other);
              finding.check(comm.take_counts() == std::vector<std::size_t>{4097, 1, 3, 4096}, "other collectives");
              gs::average(comm, b);
              finding.check(comm.take_counts() == std::vector<std::size_t>{96}, "another collective of one");
          }) == "");
}

TEST_CASE("an empty tensor may have an address on one rank, and none on another") {
    CHECK(findings(2, [](gs::ThreadBackend comm, Finding& finding) {
              std::vector<float> a(10, 1.0f), empty;
              if (comm.rank() == 1) empty.reserve(4);
              gs::sum(comm, a, empty);
              finding.check(a == std::vector<float>(10, 2.0f), "another sum");
          }) == "");
}

TEST_CASE("average gives the bits of a Reducer") {
    CHECK(findings(3, [](gs::ThreadBackend comm, Finding& finding) {
              std::vector<float> alone(5000), together(50);
              for (std::size_t k = 0; k < alone.size(); ++k)
                  alone[k] = 1.0f / static_cast<float>(k + 3 * static_cast<std::size_t>(comm.rank()) + 1);
              for (std::size_t k = 0; k < together.size(); ++k) together[k] = alone[k + 1000];
              std::vector<std::vector<float>> same{alone, together};
              gs::Reducer sync(comm, same);
              sync.backward([](auto ready) { ready(1), ready(0); });
              gs::average(comm, alone, together);
              finding.check(alone == same[0] && together == same[1], "other bits");
          }) == "");
}

TEST_CASE("ranks whose tensors differ get an error, all of them, and no rank waits for the time limit") {
    const auto seen = outcomes(3, [](gs::ThreadBackend comm) {
        std::vector<float> a(10), b(comm.rank() == 1 ? 20 : 21), large(10000);
        gs::average(comm, a, large, b);
    });
    for (const Outcome& outcome : seen) {
        INFO(outcome.text);
        CHECK(outcome.is(gs::Errc::collective_mismatch));
    }
}

TEST_CASE("small tensors that share a collective must have the same counts each, not only together") {
    for (const int ranks : {2, 3, 4})
        for (const Outcome& outcome : outcomes(ranks, [](gs::ThreadBackend comm) {
                 const bool other = comm.rank() == 1;
                 std::vector<float> a(other ? 20 : 10), b(other ? 10 : 20);
                 gs::average(comm, a, b);
             })) {
            INFO(outcome.text);
            CHECK(outcome.is(gs::Errc::collective_mismatch));
            CHECK(outcome.says("for tensors whose counts have the digest "));
        }
}

TEST_CASE("broadcast: tensors and numbers of every type become the root's, bit by bit") {
    for (const int ranks : {1, 2, 3, 4})
        for (int root = 0; root < ranks; ++root)
            CHECK(findings(ranks, [&](gs::ThreadBackend comm, Finding& finding) {
                      std::vector<float> big(10000), small(7), empty;
                      std::array<double, 5> wide{};
                      std::vector<std::uint8_t> low(9);
                      Matrix matrix{std::vector<float>(11)};
                      const int rank = comm.rank();
                      for (int step = 0; step < 2; ++step) {
                          fill(big, rank, 0), fill(small, rank, 1), fill(wide, rank, 2), fill(low, rank, 3), fill(matrix.elements, rank, 4);
                          const auto special = [](int r) { return r % 2 == 0 ? -0.0f : std::numeric_limits<float>::signaling_NaN(); };
                          small[0] = special(rank);
                          std::uint64_t seed = ~std::uint64_t{0} - static_cast<std::uint64_t>(rank);
                          std::int32_t epoch = -1 - rank;
                          if (step == 0) gs::broadcast(comm, gs::Root{root}, small, seed, big, empty, wide, low, matrix, epoch);
                          else if (root == 0) gs::broadcast(comm, small, seed, big, empty, wide, low, matrix), gs::broadcast(comm, epoch);
                          else continue;
                          const auto holds_root = [&](auto& range, std::size_t t, std::size_t first = 0) {
                              auto expected = range;
                              fill(expected, root, t);
                              return std::memcmp(&range[first], &expected[first], (range.size() - first) * sizeof range[0]) == 0;
                          };
                          const float bits = special(root);
                          finding.check(std::memcmp(small.data(), &bits, sizeof bits) == 0, "other bits of a negative zero or a NaN");
                          finding.check(holds_root(big, 0) && holds_root(small, 1, 1) && holds_root(wide, 2) && holds_root(low, 3) &&
                                            holds_root(matrix.elements, 4),
                                        "another tensor");
                          finding.check(seed == ~std::uint64_t{0} - static_cast<std::uint64_t>(root) && epoch == -1 - root,
                                        "another number");
                      }
                  }) == "");
}

TEST_CASE("broadcast: small tensors of the first one's type share a collective") {
    CHECK(findings(2, [](gs::ThreadBackend threads, Finding& finding) {
              RecordingBackend comm(threads);
              std::vector<float> a(4000), b(96), large(4097);
              std::vector<double> other(3);
              gs::broadcast(comm, a, large, b, other);
              finding.check(comm.take_counts() == std::vector<std::size_t>{4096 * sizeof(float)}, "other collectives");
              gs::broadcast(comm, b);
              finding.check(comm.take_counts().empty(), "a sum for one tensor");
          }) == "");
}

TEST_CASE("broadcast: a root that is none is refused before anything is sent; ranks that disagree get an error, all of them") {
    CHECK(findings(2, [](gs::ThreadBackend comm, Finding& finding) {
              float x = static_cast<float>(comm.rank()), y = x;
              for (const int root : {-1, 2}) {
                  const auto refused = outcome_of([&] { gs::broadcast(comm, gs::Root{root}, x, y); });
                  finding.check(refused.is(gs::Errc::invalid_argument) && refused.says("there is no rank"), refused.text);
              }
              gs::broadcast(comm, gs::Root{1}, x, y);  // the communicator still works
              finding.check(x == 1 && y == 1, "another number");
          }) == "");
    const auto mismatch = [](const std::vector<Outcome>& seen) {
        for (const Outcome& outcome : seen) {
            INFO(outcome.text);
            CHECK(outcome.is(gs::Errc::collective_mismatch));
        }
    };
    mismatch(outcomes(3, [](gs::ThreadBackend comm) {
        float x = 0, y = 0;
        gs::broadcast(comm, gs::Root{comm.rank() == 2 ? 1 : 0}, x, y);
    }));
    mismatch(outcomes(3, [](gs::ThreadBackend comm) {
        const bool other = comm.rank() == 1;
        std::vector<float> a(other ? 20 : 10), b(other ? 10 : 20);
        gs::broadcast(comm, a, b);
    }));
    mismatch(outcomes(2, [](gs::ThreadBackend comm) {
        std::vector<float> a(2), b(2);
        if (comm.rank() == 0) gs::broadcast(comm, a, b);
        else gs::sum(comm, a, b);
    }));
}
