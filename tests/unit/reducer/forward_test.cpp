// ctest: PROCESSORS 2
// OverlapForward: reduce-scatters in the backward, all-gathers under the next forward.
#include <doctest/doctest.h>

#include <string>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/overlap/overlap_forward.hpp>

#include "support/averaging_oracle.hpp"
#include "support/ranks.hpp"
#include "support/tensor.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

template <class Buckets>
using ForwardReducer = Reducer<ThreadBackend, Buckets, OverlapForward>;

}  // namespace

TEST_CASE("gradients are waited for one by one, in the forward's order, and are the oracle's") {
    for (int size = 1; size <= 4; ++size)
        for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets}) {
            CAPTURE(size);
            CHECK(findings(size, [&](ThreadBackend comm, Finding& finding) {
                      auto model = tensors({700, 1, 3000, 0, 5, 1025});
                      ForwardReducer<SizeCappedBuckets> sync(comm, model, {.gradients = storage}, SizeCappedBuckets(4096));
                      for (int step = 0; step < 5; ++step) {
                          for (std::size_t i = 0; i < model.size(); ++i) sync.wait_gradient(i);
                          if (step > 0)
                              finding.check(wrong_mean(sync, model, size, step - 1).empty(), wrong_mean(sync, model, size, step - 1));
                          for (std::size_t i = model.size(); i-- > 0;) {
                              write(sync.gradient_view(i), random_gradient(model[i], comm.rank(), step, i));
                              sync.mark_ready(i);
                          }
                          sync.finish();
                      }
                      sync.flush();
                      finding.check(wrong_mean(sync, model, size, 4).empty(), wrong_mean(sync, model, size, 4));
                  }) == "");
        }
}

TEST_CASE("the norm between the two halves has the bits that whole gradients give") {
    for (int size = 1; size <= 4; ++size)
        for (const DType dtype : {DType::f32, DType::f64, DType::bf16, DType::f16, DType::f8e4m3}) {
            CAPTURE(size);
            CAPTURE(name_of(dtype));
            // Blocks of the sum that shards cut, cut several times, and do not cut.
            for (const std::vector<std::size_t>& counts : {std::vector<std::size_t>{5000, 3, 1024, 0, 7}, {1}, {2, 2}, {40000, 1023, 1025}})
                CHECK(findings(size, [&](ThreadBackend comm, Finding& finding) {
                          const auto norms = [&](auto& sync, std::vector<Tensor>& model) {
                              for (std::size_t i = model.size(); i-- > 0;) {
                                  write(sync.gradient_view(i), random_gradient(model[i], comm.rank(), 1, i));
                                  sync.mark_ready(i);
                              }
                              sync.finish();
                              return sync.gradient_norm();
                          };
                          auto a = tensors(counts, dtype), b = tensors(counts, dtype), c = tensors(counts, dtype);
                          Reducer whole(comm, a);
                          ForwardReducer<SizeCappedBuckets> halves(comm, b, {}, SizeCappedBuckets(9000));
                          ForwardReducer<Flat> flat(comm, c, {.gradients = GradientStorage::in_buckets});
                          const double expected = norms(whole, a);
                          finding.check(norms(halves, b) == expected, "capped buckets give another norm");
                          finding.check(norms(flat, c) == expected, "one flat bucket gives another norm");
                      }) == "");
        }
}

TEST_CASE("clipping waits for the gradients") {
    CHECK(findings(3, [&](ThreadBackend comm, Finding& finding) {
              auto a = tensors({500, 2000}), b = tensors({500, 2000});
              const auto clipped = [&](auto& sync, std::vector<Tensor>& model) {
                  for (std::size_t i = 2; i-- > 0;) {
                      write(sync.gradient_view(i), random_gradient(model[i], comm.rank(), 1, i));
                      sync.mark_ready(i);
                  }
                  sync.finish();
                  sync.clip_gradients_by_norm(0.5);
              };
              Reducer whole(comm, a);
              ForwardReducer<PerParameter> halves(comm, b);
              clipped(whole, a);
              clipped(halves, b);
              finding.check(whole.gradient_norm() == halves.gradient_norm(), "the norm after clipping is not that of what is there");
              for (std::size_t i = 0; i < 2; ++i) finding.check(a[i].gradient == b[i].gradient, a[i].name + " differs");
          }) == "");
}

TEST_CASE("agreed use: what nobody used is left untouched") {
    CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
              for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets}) {
                  auto model = tensors({100, 200, 300});
                  ForwardReducer<Flat> sync(comm, model, {.gradients = storage, .unused = UnusedParameters::agree});
                  write(sync.gradient_view(1), constant_bytes(DType::f32, 200, 7));
                  for (const std::size_t i : {2u, 0u}) {
                      write(sync.gradient_view(i), constant_bytes(DType::f32, model[i].count(), comm.rank()));
                      sync.mark_ready(i);
                  }
                  sync.finish();
                  sync.flush();
                  finding.check(holds(sync.gradient_view(1), constant_bytes(DType::f32, 200, 7)), "p1 was touched");
                  finding.check(holds(sync.gradient_view(2), constant_bytes(DType::f32, 300, 0.5)), "p2 is not the mean");
              }
          }) == "");
}

TEST_CASE("a step whose gradients were not waited for is told, on every rank") {
    const auto seen = outcomes(2, [](ThreadBackend comm) {
        auto model = tensors({100, 200});
        ForwardReducer<PerParameter> sync(comm, model);
        for (int step = 0; step < 2; ++step) {
            for (std::size_t i = 2; i-- > 0;) sync.mark_ready(i);
            sync.finish();
        }
    });
    for (const Outcome& outcome : seen) CHECK(outcome.says("the average of the last step was not waited for; call wait_gradient(i)"));
}

TEST_CASE("buckets are planned anew between steps") {
    CHECK(findings(3, [&](ThreadBackend comm, Finding& finding) {
              auto model = tensors({100, 200, 300, 400, 50});
              ForwardReducer<SizeCappedBuckets> sync(comm, model, {}, SizeCappedBuckets(1000));
              for (int step = 0; step < 4; ++step) {
                  for (const std::size_t i : shuffled(model.size(), 5)) {
                      write(sync.gradient_view(i), random_gradient(model[i], comm.rank(), step, i));
                      sync.mark_ready(i);
                  }
                  sync.finish();
                  if (step == 1) finding.check(sync.rebuild_buckets(), "the plan has not changed");
                  else sync.flush();
                  finding.check(wrong_mean(sync, model, 3, step).empty(), wrong_mean(sync, model, 3, step));
              }
          }) == "");
}
