// SPDX-License-Identifier: BSL-1.0
// Every layout, overlap, storage and type, at 1 to 4 ranks: bit for bit the sum in the order of the tree, times 1/n.
#include <doctest/doctest.h>

#include <cstddef>
#include <string>
#include <vector>

#include <gradsync/compress/power_sgd.hpp>
#include <gradsync/gradsync.hpp>
#include <gradsync/overlap/overlap_forward.hpp>

#include "support/averaging_oracle.hpp"
#include "support/plans.hpp"
#include "support/ranks.hpp"
#include "support/tensor.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

const std::vector<std::size_t> odd_sizes{1, 7, 0, 64, 33, 300, 3, 17, 1500, 16, 2};

struct Case {
    DType dtype;
    GradientStorage storage;
    int ranks;
};

std::string name_of_case(const Case& c) {
    return std::string(name_of(c.dtype)) + (c.storage == GradientStorage::borrowed ? ", borrowed, " : ", in buckets, ") +
           std::to_string(c.ranks) + " ranks";
}

std::vector<Case> cases() {
    std::vector<Case> result;
    for (const DType dtype : {DType::f16, DType::bf16, DType::f32, DType::f64, DType::i32})
        for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets})
            for (const int ranks : rank_counts()) result.push_back({dtype, storage, ranks});
    return result;
}

template <class Buckets, class Overlap>
void check_layout(const Buckets& buckets, const Overlap& overlap) {
    for (const Case& c : cases()) {
        const bool sums = !is_floating(c.dtype);
        INFO(buckets.describe(), ", ", overlap.describe(), ", ", name_of_case(c));
        REQUIRE(findings(c.ranks, [&](ThreadBackend comm, Finding& finding) {
                    auto model = tensors(odd_sizes, c.dtype);
                    const int rank = comm.rank();
                    const ReducerOptions options{.gradients = c.storage, .averaging = sums ? Averaging::sum : Averaging::mean};
                    Reducer<ThreadBackend, Buckets, Overlap> sync(comm, model, options, buckets, overlap);
                    for (int step = 0; step < 3; ++step) {
                        backward(sync, model, rank, step);
                        sync.finish();
                        for (std::size_t i = 0; i < model.size(); ++i) {
                            const auto inputs = gradients_of_all(model[i], c.ranks, step, i);
                            finding.check(holds(sync.gradient_view(i), sums ? sum_of(c.dtype, inputs) : mean_of(c.dtype, inputs)),
                                          "parameter " + std::to_string(i) + ", step " + std::to_string(step));
                        }
                    }
                }) == "");
    }
}

template <class Buckets>
void check_layouts(const std::vector<Buckets>& layouts) {
    for (const Buckets& layout : layouts) {
        check_layout(layout, NoOverlap());
        check_layout(layout, OverlapBackward());
        check_layout(layout, OverlapBackward(Progress::thread));
    }
}

}  // namespace

TEST_CASE("PyTorch parity: every layout and dtype equals local: a bucket for each parameter") { check_layouts<PerParameter>({{}}); }
TEST_CASE("PyTorch parity: every layout and dtype equals local: one bucket") { check_layouts<Flat>({{}}); }
TEST_CASE("PyTorch parity: every layout and dtype equals local: every bucket size") {
    check_layouts<SizeCappedBuckets>({SizeCappedBuckets(1), SizeCappedBuckets(256), SizeCappedBuckets(5000, 100), SizeCappedBuckets()});
}

TEST_CASE("PyTorch parity: mixed dtypes travel in buckets of their own") {
    for (const int ranks : rank_counts())
        for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets}) {
            CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                      std::vector<Tensor> model;
                      for (const DType dtype : {DType::f32, DType::bf16, DType::f64, DType::f32, DType::f16, DType::bf16, DType::f64})
                          model.emplace_back("p" + std::to_string(model.size()), dtype, std::vector<std::size_t>{3, 5 + model.size()});
                      const int rank = comm.rank();
                      Reducer<ThreadBackend, SizeCappedBuckets> sync(comm, model, {.gradients = storage}, SizeCappedBuckets(200));
                      for (std::size_t b = 0; b < sync.plan().size(); ++b)
                          for (const std::size_t i : sync.plan().bucket(b))
                              finding.check(model[i].dtype == model[sync.plan().bucket(b)[0]].dtype, "a bucket of two dtypes");
                      for (int step = 0; step < 2; ++step) {
                          backward(sync, model, rank, step);
                          sync.finish();
                          finding.check(wrong_mean(sync, model, ranks, step).empty(), wrong_mean(sync, model, ranks, step));
                      }
                  }) == "");
        }
}

TEST_CASE("large borrowed gradients between threads travel where they are, one a bucket, with the same bits; small ones in buckets") {
    constexpr std::size_t large = ThreadBackend::cheaper_alone_from() / sizeof(float), line = 64;
    const std::vector<std::size_t> counts{3, large, 16, large - 1, 2 * large + 1, 5};
    for (const int ranks : rank_counts(2))
        CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                  auto model = tensors(counts);
                  const int rank = comm.rank();
                  Reducer sync(comm, model);
                  finding.check(buckets(sync.plan()) == Buckets{{4}, {1}, {5, 3, 2, 0}}, "another plan");
                  finding.check(sync.bytes() <= (5 + large - 1 + 16 + 3) * sizeof(float) + 4 * line, "memory for what is not copied");
                  for (int step = 0; step < 3; ++step) {
                      backward(sync, model, rank, step);
                      sync.finish();
                      finding.check(wrong_mean(sync, model, ranks, step).empty(), wrong_mean(sync, model, ranks, step));
                  }
              }) == "");
}

TEST_CASE("of more large gradients than travel apart the larger ones do") {
    constexpr std::size_t large = ThreadBackend::cheaper_alone_from() / sizeof(float);
    std::vector<std::size_t> counts(300, large);
    for (std::size_t i = 0; i < 10; ++i) counts[i * 7] = 2 * large;
    CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
              auto model = tensors(counts);
              Reducer sync(comm, model, {}, SizeCappedBuckets(std::size_t{1} << 30));
              // Beside them two buckets: the first one is of 1 MiB at most.
              finding.check(sync.plan().size() == 10 + 2, std::to_string(sync.plan().size()) + " buckets");
          }) == "");
}

TEST_CASE("large gradients share buckets where they cannot travel where they are") {
    constexpr std::size_t large = ThreadBackend::cheaper_alone_from() / sizeof(float);
    const auto plan = [&]<class Overlap = OverlapBackward, class Exchange = AllReduce>(const ReducerOptions& options, Overlap = {},
                                                                                       const Exchange& exchange = {}) {
        std::vector<Buckets> plans(2);
        run_threads(2, [&](ThreadBackend comm) {
            auto model = tensors({large, large});
            Reducer<ThreadBackend, SizeCappedBuckets, Overlap, Exchange> sync(comm, model, options, exchange);
            plans[static_cast<std::size_t>(comm.rank())] = buckets(sync.plan());
        });
        CHECK(plans[0] == plans[1]);
        return plans[0];
    };
    const Buckets apart{{1}, {0}}, together{{1, 0}};
    CHECK(plan({}) == apart);
    CHECK(plan({}, NoOverlap{}) == apart);
    CHECK(plan({}, OverlapForward{}) == apart);
    CHECK(plan({.gradients = GradientStorage::in_buckets}) == together);
    CHECK(plan({.accumulation = Accumulation::in_buckets}) == together);
    CHECK(plan({.unused = UnusedParameters::find_unused}) == together);
    CHECK(plan({.reduce_dtype = DType::f64}) == together);
    CHECK(plan({.reduce_dtype = DType::f32}) == apart);
    CHECK(plan({}, OverlapBackward{}, PowerSgd{}) == together);
}

TEST_CASE("gradients in buckets lie where elements of their type may") {
    const auto check = [](const auto& buckets) {
        return findings(2, [&](ThreadBackend comm, Finding& finding) {
            auto model = mixed_tensors();
            Reducer sync(comm, model, {.gradients = GradientStorage::in_buckets}, buckets);
            for (int step = 0; step < 2; ++step) {
                for (std::size_t i = 0; i < sync.parameters().size(); ++i)
                    finding.check(is_aligned(sync.gradient_view(i)), "parameter " + std::to_string(i) + ", step " + std::to_string(step));
                backward(sync, model, comm.rank(), step);
                sync.finish();
                (void)sync.rebuild_buckets();
            }
        });
    };
    CHECK(check(Flat{}) == "");
    CHECK(check(PerParameter{}) == "");
    CHECK(check(SizeCappedBuckets(200)) == "");
}

TEST_CASE("a model with empty parameters only trains") {
    for (const int ranks : rank_counts(1, 3))
        for (const std::vector<std::size_t>& counts : {std::vector<std::size_t>{0}, {0, 0, 0}})
            for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets}) {
                CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                          auto model = tensors(counts);
                          const int rank = comm.rank();
                          Reducer sync(comm, model, {.gradients = storage});
                          sync.broadcast_parameters();
                          for (int step = 0; step < 2; ++step) {
                              backward(sync, model, rank, step);
                              sync.finish();
                              finding.check(sync.gradient_norm() == 0, "a norm of nothing");
                          }
                          finding.check(!sync.rebuild_buckets() || counts.size() > 1, "a plan of nothing changed");
                      }) == "");
            }
}

TEST_CASE("a plan may have more buckets than collectives can be in flight") {
    CHECK(findings(3, [&](ThreadBackend comm, Finding& finding) {
              auto model = tensors(std::vector<std::size_t>(1500, 3));
              const int rank = comm.rank();
              Reducer<ThreadBackend, PerParameter, OverlapBackward> sync(comm, model);
              sync.broadcast_parameters();
              for (int step = 0; step < 2; ++step) {
                  backward(sync, model, rank, step);
                  sync.finish();
                  finding.check(wrong_mean(sync, model, 3, step).empty(), wrong_mean(sync, model, 3, step));
              }
          }) == "");
}

TEST_CASE("broadcast_parameters gives every rank the root's weights, of frozen parameters too") {
    for (const int ranks : rank_counts())
        for (int root = 0; root < ranks; ++root) {
            CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                      auto model = tensors({5, 0, 1000}, DType::bf16);
                      model[2].requires_grad = false;
                      for (std::size_t i = 0; i < model.size(); ++i) model[i].value = random_gradient(model[i], comm.rank(), 0, i);
                      Bytes mean = random_gradient(DType::f64, 10, comm.rank(), 1, 9);
                      Reducer sync(comm, model);
                      sync.broadcast_parameters(root);
                      const BufferView buffers[] = {{mean.data(), 10, DType::f64, MemorySpace::host}};
                      sync.broadcast_buffers(buffers, root);
                      for (std::size_t i = 0; i < model.size(); ++i)
                          finding.check(model[i].value == random_gradient(model[i], root, 0, i), "a weight is not the root's");
                      finding.check(mean == random_gradient(DType::f64, 10, root, 1, 9), "a buffer is not the root's");
                  }) == "");
        }
}

TEST_CASE("broadcast_parameters throws if a parameter has no value") {
    const Outcome outcome = outcome_of([] {
        run_threads(1, [](ThreadBackend comm) {
            std::vector<std::vector<float>> gradients(2, std::vector<float>(3));
            Reducer sync(comm, gradients);
            sync.broadcast_parameters();
        });
    });
    CHECK(outcome.is(Errc::invalid_argument));
    CHECK(outcome.says("parameter '0' has no value"));
}

TEST_CASE("a parameter may have a value and no gradient, whatever its type: frozen, or with a gradient in the bucket") {
    CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
              std::vector<double> frozen(4), trained(3), none;
              auto first = parameter("frozen", frozen, none);
              first.requires_grad = false;
              Reducer sync(comm, {first, parameter("trained", trained, none)}, {.gradients = GradientStorage::in_buckets});
              for (double& x : sync.gradient_view(1).as<double>()) x = comm.rank();
              sync.mark_ready(1);
              sync.finish();
              for (const double x : sync.gradient_view(1).as<double>()) finding.check(x == 0.5, "no mean");
          }) == "");
}

TEST_CASE("frozen parameters take no part, and keep whatever is in their gradient") {
    for (const int ranks : rank_counts(1, 3))
        for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets}) {
            CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                      auto model = tensors({10, 20, 30, 40});
                      const int rank = comm.rank();
                      for (const std::size_t i : {std::size_t{0}, std::size_t{2}}) {
                          model[i].requires_grad = false;
                          model[i].gradient = random_gradient(model[i], rank, 9, i);
                      }
                      Reducer sync(comm, model, {.gradients = storage});
                      backward(sync, model, rank, 0);
                      sync.finish();
                      finding.check(wrong_mean(sync, model, ranks, 0).empty(), wrong_mean(sync, model, ranks, 0));
                      for (const std::size_t i : {std::size_t{0}, std::size_t{2}})
                          finding.check(model[i].gradient == random_gradient(model[i], rank, 9, i), "a frozen gradient was touched");
                      finding.check(sync.parameters().size() == 4 && sync.parameters()[2].name == "p2", "frozen parameters have an index");
                  }) == "");
        }
}

TEST_CASE("rebind_gradient follows borrowed gradients that move") {
    for (const int ranks : {1, 2})
        for (const bool alone : {true, false}) {
            CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                      auto model = tensors({10, 20, 30});
                      const int rank = comm.rank();
                      Reducer<ThreadBackend, SizeCappedBuckets> sync(comm, model, {}, SizeCappedBuckets(alone ? 1 : 10'000));
                      for (int step = 0; step < 3; ++step) {
                          std::vector<Bytes> elsewhere;
                          for (std::size_t i = 0; i < model.size(); ++i) {
                              elsewhere.emplace_back(model[i].gradient.size());
                              sync.rebind_gradient(i, {elsewhere[i].data(), model[i].count(), DType::f32, MemorySpace::host});
                          }
                          backward(sync, model, rank, step);
                          sync.finish();
                          for (std::size_t i = 0; i < model.size(); ++i)
                              finding.check(elsewhere[i] == expected_mean(model[i], ranks, step, i), "the moved gradient is not the mean");
                      }
                      const Outcome outcome = outcome_of([&] { sync.rebind_gradient(0, model[1].gradient_view()); });
                      finding.check(outcome.is(Errc::invalid_argument) && outcome.says("'p0'"), "another count was taken: " + outcome.text);
                  }) == "");
        }
}

TEST_CASE("gradients may swap their memory; two that share it, or one that is not aligned, are an error") {
    for (const bool at_mark : {true, false})
        for (const bool alone : {true, false})
            CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
                      std::vector<float> one(10), other(10);
                      Reducer sync(comm, std::vector{buffer(one), buffer(other)}, SizeCappedBuckets(alone ? 1 : 10'000));
                      const auto move = [&](std::size_t i, BufferView to) {
                          at_mark ? sync.mark_ready(i, to) : sync.rebind_gradient(i, to);
                      };
                      const auto step = [&](BufferView first, BufferView second) {
                          move(1, second);
                          move(0, first);
                          if (!at_mark) sync.mark_ready();
                          sync.finish();
                      };
                      const BufferView crooked{reinterpret_cast<std::byte*>(one.data()) + 1, 10, DType::f32, MemorySpace::host};
                      const Outcome refused = outcome_of([&] { move(0, crooked); });
                      finding.check(refused.is(Errc::invalid_argument) && refused.says("aligned"), "not aligned: " + refused.text);
                      const auto rank = static_cast<float>(comm.rank());
                      one.assign(10, rank), other.assign(10, 2 + rank);
                      step(buffer(other), buffer(one));
                      finding.check(one == std::vector(10, 0.5f) && other == std::vector(10, 2.5f), "not the mean after a swap");
                      const Outcome shared = outcome_of([&] { step(buffer(one), buffer(one)); });
                      finding.check(shared.says("the gradients of '0' and '1' share memory"), "two share memory: " + shared.text);
                  }) == "");
}

TEST_CASE("two gradients that share memory are an error also if only another rank has one of them") {
    for (const bool without_batch : {true, false})
        CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
                  std::vector<float> one(10), other(10);
                  const UnusedParameters unused = without_batch ? UnusedParameters::error : UnusedParameters::find_unused;
                  Reducer sync(comm, std::vector{buffer(one), buffer(other)}, ReducerOptions{.unused = unused});
                  const bool moves = comm.rank() == 0;
                  if (moves) sync.rebind_gradient(0, buffer(other));
                  const Outcome shared = outcome_of([&] {
                      if (without_batch) finding.check(sync.begin_step(!moves), "nobody has a batch");
                      if (!moves) sync.mark_ready();
                      else if (!without_batch) sync.mark_ready(0);
                      sync.finish();
                  });
                  finding.check(!moves || shared.says("the gradients of '0' and '1' share memory"), "two share memory: " + shared.text);
              }) == "");
}

TEST_CASE("mark_ready takes gradients that are somewhere else in each step") {
    for (const int ranks : rank_counts())
        for (const bool alone : {true, false})
            for (const auto storage : {GradientStorage::borrowed, GradientStorage::in_buckets}) {
                CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                          auto model = tensors({10, 20, 30});
                          const int rank = comm.rank();
                          Reducer sync(comm, model, {.gradients = storage}, SizeCappedBuckets(alone ? 1 : 10'000));
                          std::vector<Bytes> elsewhere;
                          for (int step = 0; step < 3; ++step) {
                              std::vector<Bytes> anew;
                              for (std::size_t i = 0; i < model.size(); ++i) anew.push_back(random_gradient(model[i], rank, step, i));
                              for (std::size_t i = model.size(); i-- > 0;) {
                                  const BufferView view{anew[i].data(), model[i].count(), DType::f32, MemorySpace::host};
                                  const Outcome other = outcome_of([&] { sync.mark_ready(i, model[(i + 1) % 3].gradient_view()); });
                                  finding.check(other.is(Errc::invalid_argument), "another count was taken: " + other.text);
                                  sync.mark_ready(i, view);
                              }
                              sync.finish();
                              for (std::size_t i = 0; i < model.size(); ++i) {
                                  const BufferView view = sync.gradient_view(i);
                                  finding.check((view.data == anew[i].data()) == (storage == GradientStorage::borrowed), "it moved");
                                  finding.check(holds(view, expected_mean(model[i], ranks, step, i)), "it is not the mean");
                              }
                              elsewhere = std::move(anew);
                          }
                          sync.mark_ready(0, sync.gradient_view(0));
                          const Outcome twice = outcome_of([&] { sync.mark_ready(0, {elsewhere[0].data() + 4, 10, DType::f32}); });
                          finding.check(twice.is(Errc::gradient_marked_twice), "marked twice: " + twice.text);
                      }) == "");
            }
}

TEST_CASE("mark_ready counts the copy of a gradient to its bucket as time that holds the step up") {
    struct Copies : Observer {
        void ready(std::size_t, Time) noexcept override {}
        void begin(Activity activity, std::size_t, Time) noexcept override { count += activity == Activity::copy ? 1 : 0; }
        void end(Activity, std::size_t, Time) noexcept override {}
        int count = 0;
    };
    for (const int ranks : rank_counts())
        for (const auto storage : {GradientStorage::borrowed, GradientStorage::in_buckets})
            CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                      auto model = tensors({8000});  // alone in its bucket
                      std::vector<float> elsewhere(8000);
                      Copies copies;
                      Reducer sync(comm, model, {.gradients = storage, .observer = &copies});
                      sync.mark_ready(0, buffer(elsewhere));
                      sync.finish();
                      finding.check(copies.count == (storage == GradientStorage::in_buckets ? 1 : 0),
                                    std::to_string(copies.count) + " copies");
                  }) == "");
}

TEST_CASE("rebind_gradient moves a frozen gradient, also if nothing is trained") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              std::vector<float> gradient(3), elsewhere(3);
              Reducer sync(comm, {ParameterView{.gradient = buffer(gradient), .requires_grad = false}});
              sync.rebind_gradient(0, buffer(elsewhere));
              finding.check(sync.gradient_view(0).data == elsewhere.data(), "it did not move");
          }) == "");
}

TEST_CASE("as<T>() is the view with its type, and refuses another one") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              auto model = tensors({4}, DType::f64);
              Reducer sync(comm, model, {.gradients = GradientStorage::in_buckets});
              finding.check(sync.gradient_view(0).as<double>().size() == 4 && sync.gradient_view(0).as<double>()[3] == 0,
                            "not zero at first");
              const Outcome outcome = outcome_of([&] { (void)sync.gradient_view(0).as<float>(); });
              finding.check(outcome.is(Errc::invalid_argument) && outcome.says("f64") && outcome.says("f32"), outcome.text);
              const Outcome beyond = outcome_of([&] { (void)sync.gradient_view(1); });
              finding.check(beyond.is(Errc::invalid_argument) && beyond.says("parameter index 1 is out of range [0, 1)"),
                            "beyond the end: " + beyond.text);
          }) == "");
}
