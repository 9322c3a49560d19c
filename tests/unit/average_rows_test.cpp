// SPDX-License-Identifier: BSL-1.0
// Rows of a gradient that few batches touch, against a dense sum.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <gradsync/average_rows.hpp>
#include <gradsync/gradsync.hpp>

#include "support/random.hpp"
#include "support/ranks.hpp"
#include "support/recording_backend.hpp"

namespace gs = gradsync;
using namespace gradsync_test;

namespace {

struct Contribution {
    std::vector<int> rows;
    std::vector<float> values;
};

template <class T>
struct Pointers {
    T *first, *last;

    T* begin() const { return first; }
    T* end() const { return last; }
};

/// Whole numbers: their sums are exact in any order, and so are means over 1, 2 and 4 ranks.
Contribution contribution(int rank, std::size_t count, std::size_t height, std::size_t width) {
    Contribution c;
    for (std::size_t k = 0; k < count; ++k) {
        c.rows.push_back(static_cast<int>((k * k * 5 + static_cast<std::size_t>(rank) * 3) % height));
        for (std::size_t j = 0; j < width; ++j)
            c.values.push_back(static_cast<float>((k + j * 3 + static_cast<std::size_t>(rank)) % 16) - 4);
    }
    return c;
}

/// Does the gradient hold what dense matrices would have given? `share(r)`: the number of rows of rank r.
template <class Share>
void check_against_dense(int ranks, std::size_t height, std::size_t width, bool mean, Share share) {
    CAPTURE(ranks);
    CAPTURE(height);
    CHECK(findings(ranks, [&](gs::ThreadBackend comm, Finding& finding) {
              std::vector<float> gradient(height * width, 2), expected = gradient;
              for (int r = 0; r < ranks; ++r) {
                  const Contribution c = contribution(r, share(r), height, width);
                  for (std::size_t k = 0; k < c.rows.size(); ++k)
                      for (std::size_t j = 0; j < width; ++j)
                          expected[static_cast<std::size_t>(c.rows[k]) * width + j] +=
                              c.values[k * width + j] / static_cast<float>(mean ? ranks : 1);
              }
              const Contribution own = contribution(comm.rank(), share(comm.rank()), height, width);
              if (mean) gs::average_rows(comm, gradient, width, own.rows, own.values);
              else gs::sum_rows(comm, gradient, width, own.rows, own.values);
              double error = 0;
              for (std::size_t k = 0; k < gradient.size(); ++k)
                  error = std::fmax(error, std::fabs(static_cast<double>(gradient[k]) - static_cast<double>(expected[k])));
              finding.check(ranks == 3 && mean ? error < 1e-4 : error == 0, std::to_string(error));
          }) == "");
}

}  // namespace

TEST_CASE("average_rows gives the rows of a dense sum: few, many, different numbers of them, and none") {
    for (const int ranks : {1, 2, 3, 4})
        for (const bool mean : {true, false}) {
            check_against_dense(ranks, 1000, 5, mean, [](int r) { return std::size_t{10} + static_cast<std::size_t>(r); });
            check_against_dense(ranks, 1000, 5, mean, [](int r) { return std::size_t(r == 0 ? 0 : 17); });
            check_against_dense(ranks, 7, 64, mean, [](int r) { return std::size_t{20} * static_cast<std::size_t>(r + 1); });
            check_against_dense(ranks, 7, 3, mean, [](int) { return std::size_t{0}; });
        }
}

TEST_CASE("gradient, rows and values may be contiguous ranges without a member data()") {
    CHECK(findings(2, [](gs::ThreadBackend comm, Finding& finding) {
              float gradient[6] = {}, values[2] = {1, 2};
              const std::int64_t rows[1] = {comm.rank()};
              Pointers<float> all{gradient, gradient + 6};
              gs::sum_rows(comm, all, 2, Pointers<const std::int64_t>{rows, rows + 1}, Pointers<const float>{values, values + 2});
              const float expected[6] = {1, 2, 1, 2, 0, 0};
              finding.check(std::equal(gradient, gradient + 6, expected), "a wrong sum");
          }) == "");
}

TEST_CASE("few rows travel as rows, many as one matrix") {
    gs::run_threads(2, [](gs::ThreadBackend threads) {
        RecordingBackend comm(threads);
        std::vector<double> gradient(1000 * 4);
        const std::array<std::int64_t, 3> rows{999, 0, 999};
        const std::vector<double> values(12, 1.0);
        gs::average_rows(comm, gradient, 4, rows, values);
        CHECK(gradient[999 * 4] == 2);
        CHECK(gradient[0] == 1);
        CHECK(gradient[4] == 0);
        CHECK(comm.take_counts().empty());
        std::vector<double> small(4);
        gs::average_rows(comm, small, 4, std::vector<int>{0}, std::vector<double>(4, 1.0));
        CHECK(small[3] == 1);
        CHECK(comm.take_counts() == std::vector<std::size_t>{4});
    });
}

TEST_CASE("values of 16 bits are added up in f32, and rounded once for each rank") {
    gs::run_threads(2, [](gs::ThreadBackend comm) {
        std::vector<gs::BFloat16> gradient(100 * 2, gs::BFloat16(0.0f));
        // 256 + 1 is not a number of bf16: a sum in bf16 would stay at 256.
        const std::vector<gs::BFloat16> values{gs::BFloat16(256.0f), gs::BFloat16(0.0f), gs::BFloat16(1.0f),
                                               gs::BFloat16(0.0f),   gs::BFloat16(1.0f), gs::BFloat16(0.0f)};
        gs::sum_rows(comm, gradient, 2, std::vector<std::uint16_t>{5, 5, 5},
                     comm.rank() == 0 ? values : std::vector(6, gs::BFloat16(0.0f)));
        CHECK(static_cast<float>(gradient[10]) == 258);
    });
}

TEST_CASE("the rows come to what a Reducer has averaged, and its norm sees them") {
    gs::run_threads(2, [](gs::ThreadBackend comm) {
        std::vector<float> weights(64 * 2), head(64 * 2, static_cast<float>(comm.rank()));
        gs::Reducer sync(comm, {gs::ParameterView{.name = "embedding", .value = gs::buffer(weights), .gradient = gs::buffer(head)}});
        sync.broadcast_parameters();
        sync.mark_ready(0);
        sync.finish();
        gs::average_rows(comm, head, 2, std::vector<int>{3}, std::vector<float>{10, 20});
        CHECK(head[6] == 10.5f);
        CHECK(head[7] == 20.5f);
        CHECK(head[8] == 0.5f);
        CHECK(sync.gradient_norm() == doctest::Approx(std::sqrt(126 * 0.25 + 10.5 * 10.5 + 20.5 * 20.5)));
    });
}

TEST_CASE("wrong shapes, types and rows are refused, and the communicator still works") {
    CHECK(findings(2, [](gs::ThreadBackend comm, Finding& finding) {
              std::vector<float> gradient(10 * 4);
              const std::vector<float> values(4, 1.0f);
              const auto refused = [&](std::size_t width, std::vector<int> rows, const auto& what) {
                  const Outcome o = outcome_of([&] { gs::average_rows(comm, gradient, width, rows, what); });
                  return o.is(gs::Errc::invalid_argument) ? o.text : "not refused: " + o.text;
              };
              const auto expect = [&](const std::string& text, const std::string& words) {
                  finding.check(text == "average_rows: " + words, text);
              };
              expect(refused(0, {1}, values), "a gradient of 40 elements has no rows of 0");
              expect(refused(3, {1}, values), "a gradient of 40 elements has no rows of 3");
              expect(refused(4, {1, 2}, values), "2 rows of 4 are 8 values, not 4");
              expect(refused(4, {1}, std::vector<double>(4)),
                     "the gradient and the values must have the same floating type, not f32 and f64");
              expect(refused(4, {10}, values), "there is no row 10; the gradient has 10");
              expect(refused(4, {-1}, values), "there is no row -1; the gradient has 10");
              gs::average_rows(comm, gradient, 4, std::vector<int>{9}, values);  // the communicator still works
              finding.check(gradient[39] == 1, "another mean");
          }) == "");
}

TEST_CASE("a rank that gives a wrong row is named to the others at once") {
    const auto seen = outcomes(2, [](gs::ThreadBackend comm) {
        std::vector<float> gradient(10 * 4);
        gs::average_rows(comm, gradient, 4, std::vector<int>{comm.rank() == 0 ? 10 : 1}, std::vector<float>(4));
    });
    CHECK(seen[0].is(gs::Errc::invalid_argument));
    CHECK(seen[1].is(gs::Errc::invalid_argument));
    CHECK(seen[1].text == "average_rows: rank 0 passed invalid rows; its own error says which");
}

TEST_CASE("average_rows throws on every rank if shapes, types or functions differ between ranks") {
    const auto seen_by = [](auto&& call) {
        const auto seen = outcomes(2, [&](gs::ThreadBackend comm) { call(comm, comm.rank()); });
        for (const Outcome& o : seen) {
            CHECK(o.is(gs::Errc::invalid_argument));
            CHECK_MESSAGE(
                o.says(": rank 1 has a gradient of another shape or type than the first rank, or one of the two calls average_rows"),
                o.text);
        }
    };
    const std::vector<int> first{0};
    for (const std::size_t height : {4u, 400u}) {  // as one matrix, as rows
        const auto rows = [&](gs::ThreadBackend& comm, auto number, std::size_t elements, std::size_t width) {
            std::vector<decltype(number)> gradient(elements), values(width);
            gs::average_rows(comm, gradient, width, first, values);
        };
        seen_by([&](gs::ThreadBackend& comm, int rank) { rows(comm, 1.0f, 6 * height, rank == 0 ? 3 : 2); });
        seen_by([&](gs::ThreadBackend& comm, int rank) { rows(comm, 1.0f, (rank == 0 ? 3 : 6) * height, 3); });
        seen_by([&](gs::ThreadBackend& comm, int rank) {
            if (rank == 0) rows(comm, 1.0f, 3 * height, 3);
            else rows(comm, gs::BFloat16(), 3 * height, 3);
        });
        seen_by([&](gs::ThreadBackend& comm, int rank) {
            std::vector<float> gradient(3 * height), values(3);
            if (rank == 0) gs::average_rows(comm, gradient, 3, first, values);
            else gs::sum_rows(comm, gradient, 3, first, values);
        });
    }
}
