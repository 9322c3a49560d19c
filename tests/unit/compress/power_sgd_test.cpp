// SPDX-License-Identifier: BSL-1.0
// What all compressors promise is in conformance/compressor.hpp.
#include <gradsync/compress/power_sgd.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/overlap/no_overlap.hpp>

#include "support/averaging_oracle.hpp"
#include "support/random.hpp"
#include "support/ranks.hpp"
#include "support/slow_build.hpp"
#include "support/tensor.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

using PowerSgdOfRanks = ExchangeOver<PowerSgd, ThreadBackend>;
using PowerSgdReducer = Reducer<ThreadBackend, SizeCappedBuckets, OverlapBackward, PowerSgd>;

/// Numbers of [-1, 1), rounded to what all types hold nearly.
std::vector<double> some_numbers(std::size_t count, std::uint64_t seed) {
    Random random(seed);
    std::vector<double> result(count);
    for (double& x : result) x = static_cast<double>(random() % 257) / 128 - 1;
    return result;
}

/// A matrix that is the sum of `terms` products of a column and a row. The rows are the same on all ranks, or the mean would have a
/// higher rank.
std::vector<double> product(std::size_t rows, std::size_t columns, std::size_t terms, int rank) {
    std::vector<double> matrix(rows * columns);
    for (std::size_t t = 0; t < terms; ++t) {
        const auto column = some_numbers(rows, 1000 * t + static_cast<std::uint64_t>(rank)), row = some_numbers(columns, 1000 * t + 999);
        for (std::size_t i = 0; i < rows; ++i)
            for (std::size_t j = 0; j < columns; ++j) matrix[i * columns + j] += column[i] * row[j];
    }
    return matrix;
}

Bytes as(DType dtype, const std::vector<double>& values) {
    return with_type(dtype, [&]<class T>(T*) {
        std::vector<T> result;
        for (const double x : values) result.push_back(element_of<T>(x));
        return bytes_of(const_buffer(result));
    });
}

double largest_difference(const std::vector<double>& a, const std::vector<double>& b) {
    double largest = 0;
    for (std::size_t e = 0; e < a.size(); ++e) largest = std::max(largest, std::abs(a[e] - b[e]));
    return largest;
}

/// What rank 0 sends in the first step of gradients of this type and shape.
StepStatistics traffic_of(const PowerSgd& options, DType dtype, const std::vector<std::vector<std::size_t>>& shapes) {
    StepStatistics result;
    run_threads(
        2,
        [&](ThreadBackend comm) {
            std::vector<Tensor> model;
            for (const auto& shape : shapes) model.emplace_back("p" + std::to_string(model.size()), dtype, shape);
            const int rank = comm.rank();
            PowerSgdReducer sync(comm, model, options);
            backward(sync, model, rank, 0);
            sync.finish();
            if (rank == 0) result = sync.statistics().last;
        },
        patient);
    return result;
}

}  // namespace

TEST_CASE("PowerSgd: a mean that is of its rank travels exactly, but for rounding, and nothing is left of the sum") {
    for (const int ranks : {2, 3, 4})
        for (const std::size_t terms : {1u, 2u, 4u})
            for (const DType dtype : {DType::f32, DType::bf16}) {
                CAPTURE(ranks);
                CAPTURE(terms);
                CAPTURE(name_of(dtype));
                std::vector<std::vector<double>> kept(static_cast<std::size_t>(ranks));
                CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                          std::vector<Tensor> model;
                          model.emplace_back("matrix", dtype, std::vector<std::size_t>{40, 31});
                          model.emplace_back("other", dtype, std::vector<std::size_t>{25, 3, 2, 5});  // 25 rows
                          const int rank = comm.rank();
                          PowerSgdReducer sync(comm, model, {.gradients = GradientStorage::in_buckets},
                                               PowerSgd{.rank = terms, .start_step = 0, .min_compression_rate = 1});
                          const std::size_t shapes[2][2] = {{40, 31}, {25, 30}};
                          std::vector<double> means[2];
                          for (std::size_t i = 0; i < 2; ++i) {
                              std::vector<double>& mean = means[i];
                              mean.resize(model[i].count());
                              for (int r = 0; r < ranks; ++r) {
                                  const Bytes gradient = as(dtype, product(shapes[i][0], shapes[i][1], terms, r));
                                  const auto rounded = numbers({gradient.data(), mean.size(), dtype});
                                  for (std::size_t e = 0; e < mean.size(); ++e) mean[e] += rounded[e] / ranks;
                                  if (r == rank) write(sync.gradient_view(i), gradient);
                              }
                          }
                          sync.mark_ready(1);
                          sync.mark_ready(0);
                          sync.finish();
                          for (std::size_t i = 0; i < 2; ++i) {
                              const double difference = largest_difference(numbers(sync.gradient_view(i)), means[i]);
                              finding.check(difference < (dtype == DType::f32 ? 1e-5 : 0.2),
                                            model[i].name + " is wrong by " + std::to_string(difference));
                          }
                          finding.check(sync.statistics().last.collectives == 2, "collectives");
                          kept[static_cast<std::size_t>(rank)] = numbers(sync.exchange().residual(0));
                      }) == "");
                std::vector<double> sum(40 * 31);
                for (const auto& own : kept)
                    for (std::size_t e = 0; e < sum.size(); ++e) sum[e] += own[e];
                CHECK(largest_difference(sum, std::vector<double>(sum.size())) < (dtype == DType::f32 ? 1e-4 : 0.5));
            }
}

TEST_CASE("PowerSgd: vectors, small matrices and what has no shape travel exactly, beside what is compressed") {
    for (const int ranks : {2, 3, 4})
        for (const DType dtype : {DType::f32, DType::bf16, DType::f16}) {
            CAPTURE(ranks);
            CAPTURE(name_of(dtype));
            CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                      std::vector<Tensor> model;
                      for (const auto& shape :
                           std::vector<std::vector<std::size_t>>{{100, 80}, {33}, {3, 4}, {1, 500}, {500, 1}, {30, 30}, {0, 5}})
                          model.emplace_back("p" + std::to_string(model.size()), dtype, shape);
                      std::vector<ParameterView> views;
                      for (Tensor& t : model) views.push_back(parameter_view(t));
                      views[5].shape.clear();
                      const int rank = comm.rank();
                      PowerSgdReducer sync(comm, views, PowerSgd{.start_step = 0});
                      for (int step = 0; step < 3; ++step) {
                          backward(sync, model, rank, step);
                          sync.finish();
                          for (std::size_t i = 0; i < model.size(); ++i) {
                              const bool exact = holds(sync.gradient_view(i), expected_mean(model[i], ranks, step, i));
                              const bool keeps = dtype != DType::f32;  // what the type cannot hold, for the next step
                              if (i == 0 || step == 0 || !keeps)
                                  finding.check(exact == (i != 0), model[i].name + (exact ? " is exact" : " is not exact"));
                              if (i == 0) continue;
                              for (const double x : numbers(sync.exchange().residual(i)))
                                  finding.check(keeps || x == 0, "something is kept of " + model[i].name);
                              finding.check(sync.exchange().shared(i).count == 0, "something is shared of " + model[i].name);
                          }
                          finding.check(sync.exchange().shared(0).count == 80, "the factor is not of a row's length");
                      }
                  }) == "");
        }
}

namespace {

/// Collectives may be started by the thread that made it alone, as with MPI_THREAD_FUNNELED.
struct OneThreadsBackend : ThreadBackend {
    explicit OneThreadsBackend(ThreadBackend comm) : ThreadBackend(std::move(comm)) {}

    WorkType all_reduce(BufferView buffer, ReduceOp op, Contribution contribution = {}) {
        if (std::this_thread::get_id() != owner) {
            ++*refused;
            throw std::runtime_error("this thread may not communicate");
        }
        return ThreadBackend::all_reduce(buffer, op, contribution);
    }
    OneThreadsBackend split(int color, int key) { return with(ThreadBackend::split(color, key)); }
    OneThreadsBackend duplicate() { return with(ThreadBackend::duplicate()); }

    std::thread::id owner = std::this_thread::get_id();
    std::shared_ptr<std::atomic<int>> refused = std::make_shared<std::atomic<int>>(0);

private:
    OneThreadsBackend with(ThreadBackend comm) const {
        OneThreadsBackend other(std::move(comm));
        other.owner = owner, other.refused = refused;
        return other;
    }
};

}  // namespace

TEST_CASE("PowerSgd: the part of a mean that a type of low precision cannot hold arrives in later steps, also of what travels whole") {
    constexpr int steps = 40;
    for (const int ranks : {2, 3, 4})
        for (const DType dtype : {DType::bf16, DType::f16, DType::f8e4m3}) {
            CAPTURE(ranks);
            CAPTURE(name_of(dtype));
            CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                      const double ulp = dtype == DType::bf16 ? 0x1p-7 : dtype == DType::f16 ? 0x1p-10 : 0x1p-3;  // of 1
                      std::vector<Tensor> model;
                      model.emplace_back("matrix", dtype, std::vector<std::size_t>{100, 80});
                      model.emplace_back("vector", dtype, std::vector<std::size_t>{33});
                      const int rank = comm.rank();
                      PowerSgdReducer sync(comm, model, PowerSgd{.start_step = 0});
                      double sum = 0;
                      for (int step = 0; step < steps; ++step) {
                          write(sync.gradient_view(0), random_gradient(model[0], rank, step, 0));
                          write(sync.gradient_view(1), as(dtype, std::vector<double>(33, rank == 0 ? 1 : 1 + ulp)));
                          sync.mark_ready(1);
                          sync.mark_ready(0);
                          sync.finish();
                          sum += numbers(sync.gradient_view(1))[32];
                      }
                      const double difference = std::abs(sum - steps * (1 + ulp * (ranks - 1) / ranks)) / ulp;
                      finding.check(difference < 1.1, "the sum is wrong by " + std::to_string(difference) + " ulps");
                  }) == "");
        }
}

TEST_CASE("PowerSgd: a thread that may not communicate finds P complete, and the one that may goes on: nothing is lost, or done twice") {
    const auto results = [](auto overlap, bool polls_from_a_thread) {
        std::vector<Bytes> found(4);
        CHECK(findings(2, [&](ThreadBackend threads, Finding& finding) {
                  const auto rank = static_cast<std::size_t>(threads.rank());
                  const OneThreadsBackend comm(threads);
                  std::vector<Tensor> model;
                  model.emplace_back("matrix", DType::f32, std::vector<std::size_t>{40, 31});
                  Reducer sync(comm, model, PerParameter(), overlap, PowerSgd{.start_step = 0});
                  for (int step = 0; step < 3; ++step) {
                      const int before = *comm.refused;
                      backward(sync, model, comm.rank(), step);
                      const bool is_refused = polls_from_a_thread && step == 0;  // it leaves polls to the marks then
                      for (int ms = 0; is_refused && *comm.refused == before && ms < 5000; ++ms)
                          std::this_thread::sleep_for(std::chrono::milliseconds(1));
                      finding.check(*comm.refused > before || !is_refused, "refused " + std::to_string(*comm.refused - before) + " times");
                      finding.check(*comm.refused == 0 || polls_from_a_thread, "refused, though no thread polls");
                      sync.finish();
                  }
                  found[rank] = bytes_of(sync.gradient_view(0));
                  found[2 + rank] = bytes_of(sync.exchange().residual(0));
              }) == "");
        return found;
    };
    CHECK(results(OverlapBackward(Progress::thread), true) == results(NoOverlap(), false));
}

TEST_CASE("PowerSgd sends as many bytes as shape, rank and min_compression_rate say") {
    const auto bytes = [](PowerSgd options, std::vector<std::vector<std::size_t>> shapes) {
        options.start_step = 0;
        return traffic_of(options, DType::f32, shapes).bytes;
    };
    CHECK(bytes({}, {{50, 40}}) == 90 * 4);
    CHECK(bytes({.rank = 3}, {{50, 40}}) == 270 * 4);
    CHECK(bytes({}, {{50, 8, 5}}) == 90 * 4);
    CHECK(bytes({}, {{50, 40}, {16}}) == 107 * 4);
    CHECK(bytes({.rank = 1000, .min_compression_rate = 0.1}, {{50, 40}}) == 50 * 40 * 4);  // no more than whole
    // 10 x 10 in 20 numbers: a fifth.
    CHECK(bytes({.min_compression_rate = 4.9}, {{10, 10}}) == 20 * 4);
    CHECK(bytes({.min_compression_rate = 5}, {{10, 10}}) == 100 * 4);
    CHECK(traffic_of({.start_step = 0}, DType::f32, {{50, 40}}).collectives == 2);
    CHECK(traffic_of({.start_step = 0}, DType::f32, {{50}}).collectives == 1);
    CHECK(traffic_of({}, DType::f32, {{50, 40}}).bytes == 2000 * 4);  // the first thousand steps
}

TEST_CASE("PowerSgd: a vector beside a matrix of 16 bits does not make more bytes than there were") {
    CHECK(traffic_of({.start_step = 0}, DType::bf16, {{20, 20}, {2000}}).bytes == traffic_of({}, DType::bf16, {{20, 20}, {2000}}).bytes);
}

TEST_CASE("PowerSgd: what a gradient of a higher rank leaves comes in the next steps") {
    std::vector<double> errors;
    CHECK(findings(2, [&](ThreadBackend comm, Finding&) {
              std::vector<Tensor> model;
              model.emplace_back("matrix", DType::f32, std::vector<std::size_t>{40, 31});
              const int rank = comm.rank();
              PowerSgdReducer sync(comm, model, PowerSgd{.rank = 2, .start_step = 0});
              std::vector<double> sum(40 * 31), target(40 * 31);
              for (int r = 0; r < 2; ++r)
                  for (std::size_t e = 0; e < target.size(); ++e) target[e] += product(40, 31, 8, r)[e] / 2;
              for (int step = 0; step < 30; ++step) {  // the same gradient each time: the mean of the results approaches it
                  write(sync.gradient_view(0), as(DType::f32, product(40, 31, 8, rank)));
                  sync.mark_ready(0);
                  sync.finish();
                  const auto result = numbers(sync.gradient_view(0));
                  for (std::size_t e = 0; e < sum.size(); ++e) sum[e] += result[e];
                  if (rank != 0) continue;
                  double error = 0;
                  for (std::size_t e = 0; e < sum.size(); ++e) error += std::pow(sum[e] / (step + 1) - target[e], 2);
                  errors.push_back(std::sqrt(error));
              }
          }) == "");
    CHECK(errors.back() < 0.2 * errors.front());
}

TEST_CASE("PowerSgd: the vectors that a first step guesses are different ones, however many there are") {
    CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
              constexpr std::size_t n = gradsync_test::slow_build ? 150 : 600, used = gradsync_test::slow_build ? 65 : 257;
              std::vector<Tensor> model;
              model.emplace_back("matrix", DType::f32, std::vector<std::size_t>{n, n});
              PowerSgdReducer sync(comm, model, PowerSgd{.rank = used, .start_step = 0, .min_compression_rate = 1});
              std::vector<double> gradient(n * n);
              for (std::size_t k = 0; k < used; ++k) gradient[k * n + k] = 1;
              write(sync.gradient_view(0), as(DType::f32, gradient));
              sync.mark_ready(0);
              sync.finish();
              const auto result = numbers(sync.gradient_view(0));
              double error = 0;
              for (std::size_t e = 0; e < result.size(); ++e) error = std::max(error, std::abs(result[e] - gradient[e]));
              finding.check(error < 1e-3, std::to_string(error));
          }) == "");
}

TEST_CASE("PowerSgd averages gradients that were zero for some steps") {
    CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
              std::vector<Tensor> model;
              model.emplace_back("matrix", DType::f32, std::vector<std::size_t>{40, 31});
              const int rank = comm.rank();
              PowerSgdReducer sync(comm, model, {.averaging = Averaging::sum}, PowerSgd{.rank = 2, .start_step = 0});
              for (int step = 0; step < 4; ++step) {
                  const bool zero = step < 3;
                  write(sync.gradient_view(0), as(DType::f32, zero ? std::vector<double>(40 * 31) : product(40, 31, 2, rank)));
                  sync.mark_ready(0);
                  sync.finish();
                  std::vector<double> expected(40 * 31);
                  for (int r = 0; r < 2 && !zero; ++r)
                      for (std::size_t e = 0; e < expected.size(); ++e) expected[e] += product(40, 31, 2, r)[e];
                  finding.check(largest_difference(numbers(sync.gradient_view(0)), expected) < 1e-4, "step " + std::to_string(step));
              }
          }) == "");
}

TEST_CASE("PyTorch parity: PowerSgd refuses invalid options") {
    CHECK(outcome_of([] { PowerSgdOfRanks compressor(PowerSgd{.rank = 0}); }).says("the rank must be 1 at least"));
    for (const double rate : {0.0, -1.0, std::numeric_limits<double>::quiet_NaN()}) {
        const Outcome outcome = outcome_of([&] { PowerSgdOfRanks compressor(PowerSgd{.min_compression_rate = rate}); });
        CHECK(outcome.is(Errc::invalid_argument));
        CHECK(outcome.says("min_compression_rate must be more than 0"));
    }
}

TEST_CASE("PowerSgd: each option is part of its name") {
    const std::string name = PowerSgd{}.describe();
    CHECK(PowerSgd{.rank = 2}.describe() != name);
    CHECK(PowerSgd{.start_step = 2}.describe() != name);
    CHECK(PowerSgd{.min_compression_rate = 2.5}.describe() != name);
    CHECK(PowerSgd{.seed = 1}.describe() != name);
}
