// SPDX-License-Identifier: BSL-1.0
// OverlapForward: reduce-scatters in the backward, all-gathers under the next forward.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <filesystem>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/overlap/overlap_forward.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>

#include "support/averaging_oracle.hpp"
#include "support/optimizers.hpp"
#include "support/ranks.hpp"
#include "support/tensor.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

template <class Buckets>
using ForwardReducer = Reducer<ThreadBackend, Buckets, OverlapForward>;

using Averages = PendingAverages<ThreadBackend>;

/// A forward that acquires each average before its parameter is used.
void forward(Averages& averages, const std::vector<Tensor>& model) {
    for (std::size_t i = 0; averages && i < model.size(); ++i) averages.acquire(i);
}

/// Calls `finish()`. Returns the PendingAverages of OverlapForward; of other policies, whose `finish()` returns nothing, true.
template <class Sync>
auto finish(Sync& sync) {
    if constexpr (std::is_void_v<decltype(sync.finish())>) return sync.finish(), true;
    else return sync.finish();
}

/// What finish() and try_finish() are to say, of averages that nobody has waited for.
bool tells_to_wait(const Outcome& outcome) {
    return outcome.is(Errc::invalid_argument) && outcome.says("were not waited for") && outcome.says("acquire(i)");
}

/// Wants a thread that polls, as ranks on several machines do.
struct Networked : ThreadBackend {
    static constexpr BackendAbilities abilities = [] {
        BackendAbilities all = ThreadBackend::abilities;
        all.progress_thread = true;
        return all;
    }();
    explicit Networked(ThreadBackend backend) : ThreadBackend(std::move(backend)) {}
    bool wants_progress_thread() const { return true; }
    Networked split(int color, int key) { return Networked(ThreadBackend::split(color, key)); }
    Networked duplicate() { return Networked(ThreadBackend::duplicate()); }
};
auto threads_here() { return std::distance(std::filesystem::directory_iterator("/proc/self/task"), std::filesystem::directory_iterator()); }
/// A thread that was joined may be listed for a moment.
auto settled_threads_here() {
    auto count = threads_here();
    for (int same = 0; same < 20;) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        const auto now = threads_here();
        same = now == count ? same + 1 : 0;
        count = now;
    }
    return count;
}

}  // namespace

TEST_CASE("gradients are waited for one by one, in the forward's order, and are the oracle's") {
    for (const int size : rank_counts())
        for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets}) {
            CAPTURE(size);
            CHECK(findings(size, [&](ThreadBackend comm, Finding& finding) {
                      auto model = tensors({700, 1, 3000, 0, 5, 1025});
                      ForwardReducer<SizeCappedBuckets> sync(comm, model, {.gradients = storage}, SizeCappedBuckets(4096));
                      Averages averages;
                      for (int step = 0; step < 5; ++step) {
                          forward(averages, model);
                          if (step > 0)
                              finding.check(wrong_mean(sync, model, size, step - 1).empty(), wrong_mean(sync, model, size, step - 1));
                          for (std::size_t i = model.size(); i-- > 0;) {
                              write(sync.gradient_view(i), random_gradient(model[i], comm.rank(), step, i));
                              sync.mark_ready(i);
                          }
                          averages = sync.finish();
                      }
                      averages.wait();
                      finding.check(wrong_mean(sync, model, size, 4).empty(), wrong_mean(sync, model, size, 4));
                  }) == "");
        }
}

TEST_CASE("the norm between the two halves has the bits that whole gradients give") {
    for (const int size : rank_counts())
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
                              [[maybe_unused]] const auto finished = finish(sync);  // averages are in flight as long as it lives
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
                  [[maybe_unused]] const auto finished = finish(sync);
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

TEST_CASE("with OverlapForward and agreed use, what no rank used is left untouched") {
    CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
              for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets}) {
                  auto model = tensors({100, 200, 300});
                  ForwardReducer<Flat> sync(comm, model, {.gradients = storage, .unused = UnusedParameters::find_unused});
                  write(sync.gradient_view(1), constant_bytes(DType::f32, 200, 7));
                  for (const std::size_t i : {2u, 0u}) {
                      write(sync.gradient_view(i), constant_bytes(DType::f32, model[i].count(), comm.rank()));
                      sync.mark_ready(i);
                  }
                  sync.finish().wait();
                  for (std::size_t i = 0; i < 3; ++i) finding.check(sync.was_used(i) == (i != 1), "use of p" + std::to_string(i));
                  finding.check(holds(sync.gradient_view(1), constant_bytes(DType::f32, 200, 7)), "p1 was touched");
                  finding.check(holds(sync.gradient_view(2), constant_bytes(DType::f32, 300, 0.5)), "p2 is not the mean");
              }
          }) == "");
}

TEST_CASE("a step whose gradients were not waited for throws on every rank") {
    const auto seen = outcomes(2, [](ThreadBackend comm) {
        auto model = tensors({100, 200});
        ForwardReducer<PerParameter> sync(comm, model);
        for (std::size_t i = 2; i-- > 0;) sync.mark_ready(i);
        const Averages averages = sync.finish();
        sync.mark_ready(1);
    });
    for (const Outcome& outcome : seen) CHECK(outcome.says("the average of the last step was not waited for; call acquire(i)"));
}

TEST_CASE("Progress::polls starts no thread, also for gathers over a network") {
    for (const bool sharded : {false, true})
        for (const Progress progress : {Progress::automatic, Progress::polls}) {
            std::atomic<std::ptrdiff_t> threads{0};
            CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
                      Networked backend(std::move(comm));
                      std::vector<float> weight(100), gradient(100, static_cast<float>(backend.rank()));
                      const std::vector parameters{parameter("w", weight, gradient)};
                      backend.barrier().wait();
                      const auto before = settled_threads_here();
                      backend.barrier().wait();
                      const auto step = [&](auto& sync) {
                          backend.barrier().wait();
                          threads = threads_here() - before;
                          backend.barrier().wait();
                          sync.mark_ready(0);
                      };
                      if (sharded) {
                          ShardedOptimizer sync(backend, parameters, Sgd{1.0f}, OverlapForward(progress));
                          step(sync);
                          sync.finish();
                          sync.step();
                          sync.wait_parameter(0);
                          finding.check(weight[7] == -0.5f, "the weight");
                      } else {
                          Reducer sync(backend, parameters, OverlapForward(progress));
                          step(sync);
                          sync.finish().wait();
                          finding.check(gradient[7] == 0.5f, "the average");
                      }
                  }) == "");
            CHECK((threads == 0) == (progress == Progress::polls));
        }
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
                  Averages averages = sync.finish();
                  if (step == 1) finding.check(sync.rebuild_buckets(), "the plan has not changed");
                  else averages.wait();
                  finding.check(wrong_mean(sync, model, 3, step).empty(), wrong_mean(sync, model, 3, step));
              }
          }) == "");
}

TEST_CASE("uneven inputs: a rank without a batch flushes, and every step's gradients are the oracle's on all ranks") {
    for (const std::vector<int>& batches : {std::vector<int>{4, 2}, {3, 0}, {4, 1, 2}, {3, 0, 0}})
        for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets})
            for (const std::size_t cap : {200u, 4096u}) {
                const int ranks = static_cast<int>(batches.size());
                CAPTURE(ranks);
                CAPTURE(cap);
                CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                          auto model = tensors({700, 1, 3000, 0, 5, 1025});
                          const int rank = comm.rank(), own = batches[static_cast<std::size_t>(rank)];
                          ForwardReducer<SizeCappedBuckets> sync(comm, model, {.gradients = storage}, SizeCappedBuckets(cap));
                          // Only once they are waited for, as a forward does or flush(): nothing else is to complete them.
                          const auto check_step = [&](int step) {
                              std::vector<Contribution> by;
                              for (const int n : batches) by.push_back(step < n ? Contribution{1, 1} : Contribution{0, 0});
                              for (std::size_t i = 0; i < model.size(); ++i)
                                  finding.check(
                                      holds(sync.gradient_view(i), combined(DType::f32, gradients_of_all(model[i], ranks, step, i), by)),
                                      "gradient " + std::to_string(i) + ", step " + std::to_string(step));
                          };
                          int step = 0;
                          Averages averages;
                          for (; sync.begin_step(step < own); ++step) {
                              if (step < own) forward(averages, model);
                              else averages.wait();
                              if (step > 0) check_step(step - 1);
                              if (step < own) {
                                  backward(sync, model, rank, step);
                              } else {
                                  for (std::size_t i = 0; i < model.size(); ++i)  // what is left in its gradients must not matter
                                      write(sync.gradient_view(i),
                                            constant_bytes(DType::f32, model[i].count(), std::numeric_limits<double>::quiet_NaN()));
                              }
                              averages = sync.finish();
                          }
                          averages.wait();
                          check_step(step - 1);
                          finding.check(step == *std::max_element(batches.begin(), batches.end()),
                                        "stopped after " + std::to_string(step) + " steps");
                          forward(averages, model);  // the next epoch
                          backward(sync, model, rank, 50);
                          sync.finish().wait();
                          finding.check(wrong_mean(sync, model, ranks, 50).empty(), wrong_mean(sync, model, ranks, 50));
                      }) == "");
            }
}

TEST_CASE("a step that ends before the averages of the last one were waited for is refused, and nothing is lost by it") {
    for (const int ranks : rank_counts(1, 3))
        for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets})
            CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                      auto model = tensors({700, 1, 3000, 0, 5, 1025});
                      const int rank = comm.rank();
                      ForwardReducer<SizeCappedBuckets> sync(comm, model, {.gradients = storage}, SizeCappedBuckets(4096));
                      for (int step = 0; step < 3; ++step) {
                          backward(sync, model, rank, step);
                          Averages averages = sync.finish();
                          // A loop that skips the backward, on all ranks.
                          const Outcome finished = outcome_of([&] { (void)sync.finish(); });
                          finding.check(tells_to_wait(finished), "finish(): " + finished.text);
                          const Outcome tried = outcome_of([&] { finding.check(!sync.try_finish(), "it has finished without a mark"); });
                          finding.check(tried.text.empty(), "try_finish(): " + tried.text);
                          // Some of them only.
                          averages.acquire(5);
                          const Outcome again = outcome_of([&] { (void)sync.finish(); });
                          finding.check(tells_to_wait(again), "finish() after one was waited for: " + again.text);
                          averages.wait();
                          finding.check(wrong_mean(sync, model, ranks, step).empty(), wrong_mean(sync, model, ranks, step));
                      }
                  }) == "");
}

TEST_CASE("finish() and try_finish() refuse a rank without a batch that has not flushed, which may do so then") {
    for (const int ranks : {2, 3})
        for (const bool polls : {false, true})
            for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets})
                CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                          auto model = tensors({700, 1, 3000, 0, 5, 1025});
                          const int rank = comm.rank();
                          ForwardReducer<SizeCappedBuckets> sync(comm, model, {.gradients = storage}, SizeCappedBuckets(4096));
                          Averages averages;
                          for (int step = 0; step < 4; ++step) {
                              const bool idles = step > 0 && rank == 1;  // the others know nothing of its mistake
                              (void)sync.begin_step(!idles);
                              if (idles) {
                                  const Outcome finished = outcome_of([&] { (void)sync.finish(); });
                                  finding.check(tells_to_wait(finished), "finish(): " + finished.text);
                                  const Outcome tried = outcome_of([&] { (void)sync.try_finish(); });
                                  finding.check(tells_to_wait(tried), "try_finish(): " + tried.text);
                                  averages.wait();
                              } else {
                                  forward(averages, model);
                                  backward(sync, model, rank, step);
                              }
                              if (!polls) averages = sync.finish();
                              else
                                  while (!(averages = sync.try_finish())) std::this_thread::yield();
                          }
                          averages.wait();
                          std::vector<Contribution> by(static_cast<std::size_t>(ranks));
                          by[1] = {0, 0};
                          for (std::size_t i = 0; i < model.size(); ++i)
                              finding.check(holds(sync.gradient_view(i), combined(DType::f32, gradients_of_all(model[i], ranks, 3, i), by)),
                                            "gradient " + std::to_string(i));
                      }) == "");
}

TEST_CASE("a dropped result waits for the averages; one that is kept is the only way to them") {
    for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets})
        CHECK(findings(3, [&](ThreadBackend comm, Finding& finding) {
                  auto model = tensors({700, 300, 5, 3000});
                  ForwardReducer<SizeCappedBuckets> sync(comm, model, {.gradients = storage}, SizeCappedBuckets(4096));
                  for (int step = 0; step < 3; ++step) {
                      backward(sync, model, comm.rank(), step);
                      (void)sync.finish();
                      finding.check(wrong_mean(sync, model, 3, step).empty(), wrong_mean(sync, model, 3, step));
                  }
                  backward(sync, model, comm.rank(), 3);
                  Averages averages = sync.finish();
                  finding.check(outcome_of([&] { (void)sync.gradient_view(1); }).says("call acquire(1)"), "a view of an average in flight");
                  // p0 to p2 share a bucket; they are copied out of it.
                  const auto spoilt = [&](std::size_t i) { return std::isnan(numbers(model[i].gradient_view())[0]); };
                  if (storage == GradientStorage::borrowed) finding.check(spoilt(0) && spoilt(2), "local gradients look like averages");
                  const BufferView view = averages.acquire(1);
                  finding.check(view == sync.gradient_view(1), "another view");
                  Averages moved = std::move(averages);
                  finding.check(!averages && moved, "what was moved from has averages");
                  finding.check(outcome_of([&] { averages.acquire(0); }).says("no averages are pending"), "averages of no step");
                  moved.wait();
                  backward(sync, model, comm.rank(), 4);
                  averages = sync.finish();
                  finding.check(outcome_of([&] { moved.acquire(0); }).says("of an earlier step"), "averages of an earlier step");
                  moved = {};  // waits for nothing that is not its own
                  finding.check(outcome_of([&] { (void)sync.gradient_view(0); }).says("call acquire(0)"), "they were waited for");
              }) == "");
}

TEST_CASE("a training that fails while averages are in flight ends on every rank") {
    const auto seen = outcomes(3, [](ThreadBackend comm) {
        auto model = tensors({1000, 2000});
        ForwardReducer<PerParameter> sync(comm, model);
        backward(sync, model, comm.rank(), 0);
        Averages averages = sync.finish();
        if (comm.rank() == 1) throw std::runtime_error("out of cheese");
        averages.wait();
        backward(sync, model, comm.rank(), 1);
        (void)sync.finish();
    });
    for (std::size_t r = 0; r < seen.size(); ++r) CHECK((r == 1 ? seen[r].says("out of cheese") : seen[r].is(Errc::peer_failed)));
}
