// SPDX-License-Identifier: BSL-1.0
// The dtype on the wire, of the accumulation and of the gradient.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <gradsync/gradsync.hpp>

#include "support/averaging_oracle.hpp"
#include "support/ranks.hpp"
#include "support/tensor.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

Bytes converted(const Bytes& from, DType from_type, DType to_type) {
    const std::size_t count = from.size() / size_of(from_type);
    Bytes to(count * size_of(to_type));
    kernel::convert(from.data(), from_type, to.data(), to_type, count);
    return to;
}

const std::vector<DType> wire_types{DType::f16, DType::bf16, DType::f32, DType::f64, DType::f8e4m3, DType::f8e5m2};

}  // namespace

TEST_CASE("PyTorch parity: low precision on the wire, a hook there: gradients are added up and travel in another type") {
    for (const DType own : wire_types)
        for (const DType wire : wire_types)
            for (const int ranks : rank_counts(1, 3)) {
                CAPTURE(name_of(own));
                CAPTURE(name_of(wire));
                CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                          auto model = tensors({50, 3, 0, 700}, own);
                          const int rank = comm.rank();
                          Reducer<ThreadBackend, SizeCappedBuckets> sync(comm, model, {.reduce_dtype = wire}, SizeCappedBuckets(500));
                          for (int step = 0; step < 2; ++step) {
                              backward(sync, model, rank, step);
                              sync.finish();
                              for (std::size_t i = 0; i < model.size(); ++i) {
                                  std::vector<Bytes> sent;
                                  for (const Bytes& gradient : gradients_of_all(model[i], ranks, step, i))
                                      sent.push_back(converted(gradient, own, wire));
                                  finding.check(model[i].gradient == converted(mean_of(wire, sent), wire, own),
                                                "gradient " + std::to_string(i));
                              }
                              if (ranks > 1)
                                  finding.check(sync.statistics().last.bytes >= 753 * size_of(wire) &&
                                                    sync.statistics().last.bytes < 753 * size_of(wire) + 256,
                                                "not the bytes of the wire's type");
                          }
                      }) == "");
            }
}

TEST_CASE("reduce_dtype brings parameters of several dtypes into one bucket, and leaves integers alone") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              std::vector<Tensor> model;
              for (const DType dtype : {DType::f32, DType::bf16, DType::i32, DType::f64})
                  model.emplace_back("p" + std::to_string(model.size()), dtype, std::vector<std::size_t>{9});
              const int rank = comm.rank();
              Reducer<ThreadBackend, Flat> sync(comm, model, {.averaging = Averaging::sum, .reduce_dtype = DType::f32});
              finding.check(sync.plan().size() == 2, "not one bucket for f32, one for i32");
              backward(sync, model, rank, 0);
              sync.finish();
              finding.check(model[2].gradient == sum_of(DType::i32, gradients_of_all(model[2], 2, 0, 2)), "integers");
              finding.check(model[0].gradient == sum_of(DType::f32, gradients_of_all(model[0], 2, 0, 0)), "f32");
          }) == "");
}

TEST_CASE("low precision is summed in f32 and rounded once") {
    // 256 + 1 + 1 is 258 in f32, but 256 in steps of bf16.
    CHECK(findings(3, [](ThreadBackend comm, Finding& finding) {
              auto model = tensors({5}, DType::bf16);
              Reducer sync(comm, model, {.averaging = Averaging::sum});
              write(sync.gradient_view(0), constant_bytes(DType::bf16, 5, comm.rank() == 0 ? 256 : 1));
              sync.mark_ready(0);
              sync.finish();
              finding.check(numbers(sync.gradient_view(0)) == std::vector<double>(5, 258), "rounded on the way");
          }) == "");
    CHECK(findings(3, [](ThreadBackend comm, Finding& finding) {  // 16 + 1 + 1, in steps of 2
              auto model = tensors({5}, DType::f8e4m3);
              Reducer sync(comm, model, {.averaging = Averaging::sum});
              write(sync.gradient_view(0), constant_bytes(DType::f8e4m3, 5, comm.rank() == 0 ? 16 : 1));
              sync.mark_ready(0);
              sync.finish();
              finding.check(numbers(sync.gradient_view(0)) == std::vector<double>(5, 18), "rounded on the way");
          }) == "");
    // The same over micro-batches.
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              auto model = tensors({5}, DType::bf16);
              Reducer sync(comm, model, {.averaging = Averaging::mean, .accumulation = Accumulation::in_buckets});
              for (int m = 0; m < 4; ++m) {
                  write(sync.gradient_view(0), constant_bytes(DType::bf16, 5, m == 0 ? 256 : 1));
                  if (m == 3) {
                      sync.mark_ready(0);
                      break;
                  }
                  const auto guard = sync.no_sync();
                  sync.mark_ready(0);
              }
              sync.finish();
              finding.check(numbers(sync.gradient_view(0)) == std::vector<double>(5, 260), "rounded on the way");  // 259 rounds to even
          }) == "");
}

TEST_CASE("the sum may exceed the type's range as long as the mean does not") {
    for (const auto& [dtype, large] : {std::pair(DType::f16, 60000.0), {DType::f8e4m3, 448.0}, {DType::f8e5m2, 57344.0}})
        CHECK(findings(4, [&, dtype = dtype, large = large](ThreadBackend comm, Finding& finding) {
                  auto model = tensors({5}, dtype);
                  Reducer sync(comm, model);
                  write(sync.gradient_view(0), constant_bytes(dtype, 5, large));
                  sync.mark_ready(0);
                  sync.finish();
                  finding.check(numbers(sync.gradient_view(0)) == std::vector<double>(5, large), "overflow");
              }) == "");
}

TEST_CASE("micro-batches are added up in f32 and rounded once to what travels: as if the trainer did so in f32 gradients") {
    for (const DType own : {DType::f32, DType::bf16, DType::f16})
        for (const DType wire : {DType::bf16, DType::f16, DType::f8e4m3, DType::f8e5m2})
            for (const int ranks : rank_counts(1, 3)) {
                CAPTURE(name_of(own));
                CAPTURE(name_of(wire));
                CAPTURE(ranks);
                CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                          const int rank = comm.rank();
                          auto model = tensors({50, 3, 0, 700}, own);
                          auto wide = tensors({50, 3, 0, 700}, DType::f32);
                          Reducer<ThreadBackend, SizeCappedBuckets> sync(
                              comm, model, {.accumulation = Accumulation::in_buckets, .reduce_dtype = wire}, SizeCappedBuckets(500));
                          Reducer<ThreadBackend, SizeCappedBuckets> plain(comm, wide, {.reduce_dtype = wire}, SizeCappedBuckets(500));
                          struct Guards {
                              decltype(sync.no_sync()) one, other;
                          };
                          for (int step = 0; step < 2; ++step) {
                              constexpr int last = 2;
                              for (int micro = 0; micro <= last; ++micro) {
                                  const auto guard =
                                      micro == last ? nullptr : std::unique_ptr<Guards>(new Guards{sync.no_sync(), plain.no_sync()});
                                  for (std::size_t i = model.size(); i-- > 0;) {
                                      if (i == 1 && micro == last) continue;  // it gets none in the last one
                                      write(model[i].gradient_view(), random_gradient(model[i], rank, 10 * step + micro, i));
                                      const Bytes more = converted(model[i].gradient, own, DType::f32);
                                      const BufferView sum = wide[i].gradient_view();
                                      if (micro == 0) write(sum, more);
                                      else kernel::add(sum, {more.data(), sum.count, DType::f32});
                                      sync.mark_ready(i);
                                      plain.mark_ready(i);
                                  }
                                  if (micro == 0 && step == 1) (void)sync.rebuild_buckets();  // sums outlive it, also where nothing changes
                              }
                              sync.finish();
                              plain.finish();
                              for (std::size_t i = 0; i < model.size(); ++i)
                                  finding.check(model[i].gradient == converted(wide[i].gradient, DType::f32, own),
                                                "gradient " + std::to_string(i));
                          }
                      }) == "");
            }
}

TEST_CASE(
    "sums beside the buckets are right for a parameter that one rank used in an earlier micro-batch only, for an unused one, and for a tied one") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              const bool first = comm.rank() == 0;
              auto model = tensors({3, 2, 1});
              model[2].uses = 2;
              Reducer<ThreadBackend, Flat> sync(comm, model,
                                                {.averaging = Averaging::sum,
                                                 .accumulation = Accumulation::in_buckets,
                                                 .unused = UnusedParameters::find_unused,
                                                 .reduce_dtype = DType::bf16});
              const auto fill = [&](std::size_t i, float value) {
                  const std::vector<float> values(model[i].count(), value);
                  std::memcpy(model[i].gradient.data(), values.data(), model[i].gradient.size());
              };
              const auto check = [&](std::size_t i, float value) {
                  for (std::size_t k = 0; k < model[i].count(); ++k) {
                      float x;
                      std::memcpy(&x, model[i].gradient.data() + k * sizeof x, sizeof x);
                      finding.check(x == value, "gradient " + std::to_string(i) + " is " + std::to_string(x));
                  }
              };
              for (int step = 0; step < 2; ++step) {
                  fill(1, 77);
                  {
                      const auto guard = sync.no_sync();
                      for (int micro = 0; micro < 2; ++micro) {
                          fill(0, first ? 256.0f : -1.0f);
                          if (first) sync.mark_ready(0);
                          fill(2, micro == 0 ? 256.0f : 1.0f);
                          sync.mark_ready(2);
                          sync.mark_ready(2);
                      }
                  }
                  fill(2, 1);
                  sync.mark_ready(2);
                  if (first) sync.mark_ready(2);  // the other rank's second use does not come
                  sync.finish();
                  check(0, 512);
                  check(1, 77);
                  check(2, 516);  // twice 256 + 1 + 1, which in bf16 is 256
              }
          }) == "");
}
