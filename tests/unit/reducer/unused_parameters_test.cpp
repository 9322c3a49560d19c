// SPDX-License-Identifier: BSL-1.0
// Parameters without a gradient, tied weights, control flow that differs.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gradsync/gradsync.hpp>

#include "support/averaging_oracle.hpp"
#include "support/ranks.hpp"
#include "support/tensor.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

/// A step in which rank r uses the parameters that `uses(r, i)` names; the others' gradients hold what they held.
template <class R, class Uses>
void partial_backward(R& sync, const std::vector<Tensor>& model, int rank, int batch, Uses&& uses) {
    for (const std::size_t i : shuffled(model.size(), static_cast<std::uint32_t>(rank + batch * 10))) {
        if (!uses(rank, i)) continue;
        write(sync.gradient_view(i), random_gradient(model[i], rank, batch, i));
        sync.mark_ready(i);
    }
}

/// The mean with zeros from ranks that did not use it; `before` if nobody did.
template <class Uses>
Bytes expected(const Tensor& t, int ranks, int batch, std::size_t i, const Bytes& before, Uses&& uses) {
    bool any = false;
    std::vector<Bytes> inputs;
    for (int r = 0; r < ranks; ++r) {
        any |= uses(r, i);
        inputs.push_back(uses(r, i) ? random_gradient(t, r, batch, i) : Bytes(t.gradient.size()));
    }
    return any ? mean_of(t.dtype, inputs) : before;
}

/// Several steps in which `uses(step)(rank, i)` says who used what.
template <class Buckets, class Overlap, class Uses>
std::string check_steps(int ranks, GradientStorage storage, Buckets buckets, Uses&& uses, DType dtype = DType::f32, Overlap overlap = {}) {
    return findings(ranks, [&](ThreadBackend comm, Finding& finding) {
        auto model = tensors({10, 20, 30, 5, 0, 7}, dtype);
        const int rank = comm.rank();
        Reducer<ThreadBackend, Buckets, Overlap> sync(comm, model, {.gradients = storage, .unused = UnusedParameters::find_unused}, buckets,
                                                      overlap);
        std::vector<Bytes> now;
        for (std::size_t i = 0; i < model.size(); ++i) {
            now.push_back(random_gradient(model[i], 99, 99, i));  // what the trainer left there
            write(sync.gradient_view(i), now[i]);
        }
        for (int step = 0; step < 4; ++step) {
            const auto in_step = [&](int r, std::size_t i) { return uses(step, r, i); };
            partial_backward(sync, model, rank, step, in_step);
            sync.finish();
            for (std::size_t i = 0; i < model.size(); ++i) {
                now[i] = expected(model[i], ranks, step, i, now[i], in_step);
                finding.check(holds(sync.gradient_view(i), now[i]), "gradient " + std::to_string(i) + ", step " + std::to_string(step));
            }
        }
    });
}

template <class Uses>
void check_everywhere(Uses&& uses) {
    for (const int ranks : rank_counts())
        for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets}) {
            CAPTURE(ranks);
            CAPTURE(static_cast<int>(storage));
            CHECK(check_steps<PerParameter, OverlapBackward>(ranks, storage, {}, uses) == "");
            CHECK(check_steps<Flat, NoOverlap>(ranks, storage, {}, uses, DType::bf16) == "");
            CHECK(check_steps<SizeCappedBuckets, OverlapBackward>(ranks, storage, SizeCappedBuckets(130), uses, DType::f32,
                                                                  OverlapBackward(Progress::thread)) == "");
        }
}

}  // namespace

TEST_CASE("PyTorch parity: an unused parameter keeps its gradient untouched") {
    check_everywhere([](int, int, std::size_t i) { return i != 1 && i != 3; });
}
TEST_CASE("PyTorch parity: a parameter used on one rank only is averaged with zeros") {
    check_everywhere([](int, int rank, std::size_t i) { return i != 2 || rank == 0; });
}
TEST_CASE("PyTorch parity: control flow may change from step to step on all ranks") {
    check_everywhere([](int step, int, std::size_t i) { return step % 2 == 0 ? i < 3 : i >= 3; });
}
TEST_CASE("PyTorch parity: control flow may differ across ranks") {
    check_everywhere([](int step, int rank, std::size_t i) { return (static_cast<int>(i) + step + rank) % 3 != 0; });
}
TEST_CASE("a step in which no rank used any parameter leaves all gradients untouched") {
    check_everywhere([](int step, int, std::size_t) { return step == 1; });
}

TEST_CASE("PyTorch parity: unused parameters go together with a rank without a batch") {
    for (const int ranks : rank_counts(2))
        for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets}) {
            CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                      auto model = tensors({10, 20, 30});
                      const int rank = comm.rank();
                      Reducer<ThreadBackend, Flat> sync(comm, model, {.gradients = storage, .unused = UnusedParameters::find_unused});
                      for (std::size_t i = 0; i < model.size(); ++i) write(sync.gradient_view(i), random_gradient(model[i], 99, 99, i));
                      const bool has_batch = rank != ranks - 1;
                      finding.check(sync.begin_step(has_batch), "no rank has a batch");
                      if (has_batch) partial_backward(sync, model, rank, 0, [](int, std::size_t i) { return i != 1; });
                      sync.finish();
                      finding.check(holds(sync.gradient_view(1), random_gradient(model[1], 99, 99, 1)), "an unused gradient was touched");
                      for (const std::size_t i : {std::size_t{0}, std::size_t{2}})
                          finding.check(holds(sync.gradient_view(i), expected_mean(model[i], ranks - 1, 0, i)),
                                        "not the mean over live ranks");
                  }) == "");
        }
}

TEST_CASE("PyTorch parity: used bits persist over micro-batches") {
    CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
              auto model = tensors({10, 20});
              const int rank = comm.rank();
              Reducer sync(comm, model, {.unused = UnusedParameters::find_unused});
              {
                  const auto guard = sync.no_sync();
                  partial_backward(sync, model, rank, 0, [](int r, std::size_t i) { return i == 1 && r == 1; });
              }
              partial_backward(sync, model, rank, 0, [](int, std::size_t i) { return i == 0; });
              sync.finish();
              finding.check(holds(sync.gradient_view(1), mean_of(DType::f32, {Bytes(80), random_gradient(model[1], 1, 0, 1)})),
                            "lost a micro-batch");
          }) == "");
}

TEST_CASE("PyTorch parity: a parameter without a gradient is named, on every rank") {
    for (const int ranks : rank_counts()) {
        for (const int guilty : {0, ranks - 1, -1}) {  // -1: all ranks
            const auto result = outcomes(ranks, [&](ThreadBackend comm) {
                auto model = tensors({10, 20, 30});
                model[1].name = "encoder.weight";
                const int rank = comm.rank();
                Reducer<ThreadBackend, PerParameter> sync(comm, model);
                partial_backward(sync, model, rank, 0, [&](int r, std::size_t i) { return i != 1 || (guilty >= 0 && r != guilty); });
                sync.finish();
            });
            CHECK(std::any_of(result.begin(), result.end(), [](const Outcome& outcome) { return outcome.is(Errc::gradient_not_ready); }));
            for (int r = 0; r < ranks; ++r) {
                const Outcome& outcome = result[static_cast<std::size_t>(r)];
                INFO(outcome.text);
                CHECK(outcome.says("'encoder.weight'"));
                if (guilty < 0 && ranks > 1 && outcome.is(Errc::peer_failed)) {  // it met the others' error before its own
                    CHECK(outcome.says("1 of 3 gradients"));
                } else if (guilty < 0 || r == guilty) {
                    REQUIRE(outcome.is(Errc::gradient_not_ready));
                    CHECK(outcome.error->context().parameter == "encoder.weight");
                    CHECK(outcome.error->context().bucket == 1);
                    CHECK(outcome.error->context().rank == r);
                    CHECK(outcome.says("1 of 3 gradients"));
                } else {
                    REQUIRE(outcome.is(Errc::peer_failed));
                    CHECK(outcome.error->context().peer == guilty);
                }
            }
        }
    }
}

TEST_CASE("many parameters without a gradient: the first few are named, all are counted") {
    const auto result = outcomes(1, [&](ThreadBackend comm) {
        auto model = tensors(std::vector<std::size_t>(20, 1));
        Reducer sync(comm, model);
        sync.mark_ready(19);
        sync.finish();
    });
    CHECK(result[0].says("19 of 20"));
    CHECK(result[0].says("'p18'"));
    CHECK(result[0].says("'p14'"));
    CHECK(!result[0].says("'p13'"));
    CHECK(result[0].says(", ..."));
}

TEST_CASE("PyTorch parity: tied weights are ready at their last use") {
    for (const int ranks : rank_counts())
        for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets}) {
            CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                      auto model = tensors({10, 20, 30});
                      model[1].uses = 2;
                      const int rank = comm.rank();
                      Reducer<ThreadBackend, PerParameter, OverlapBackward> sync(comm, model, {.gradients = storage});
                      for (int step = 0; step < 3; ++step) {
                          // The first use adds to a gradient of zeros, the second completes it.
                          const Bytes gradient = random_gradient(model[1], rank, step, 1);
                          write(sync.gradient_view(1), Bytes(gradient.size()));
                          sync.mark_ready(1);
                          for (const std::size_t i : {std::size_t{2}, std::size_t{0}}) {
                              write(sync.gradient_view(i), random_gradient(model[i], rank, step, i));
                              sync.mark_ready(i);
                              finding.check(!sync.try_finish(), "finished before the second use");
                          }
                          write(sync.gradient_view(1), gradient);
                          sync.mark_ready(1);
                          sync.finish();
                          finding.check(wrong_mean(sync, model, ranks, step).empty(), wrong_mean(sync, model, ranks, step));
                      }
                  }) == "");
        }
}

TEST_CASE("tied weights under no_sync: every micro-batch counts its uses anew") {
    CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
              auto model = tensors({10, 20});
              model[1].uses = 3;
              const int rank = comm.rank();
              Reducer sync(comm, model);
              for (int step = 0; step < 2; ++step) {
                  {
                      const auto guard = sync.no_sync();
                      for (int m = 0; m < 3; ++m) backward(sync, model, rank, 50 + m);
                  }
                  backward(sync, model, rank, step);
                  sync.finish();
                  finding.check(wrong_mean(sync, model, 2, step).empty(), wrong_mean(sync, model, 2, step));
              }
          }) == "");
}

TEST_CASE("PyTorch parity: invalid static graph, both ways: a tied weight that is marked too rarely is named") {
    for (const int ranks : rank_counts(1, 3)) {
        const auto result = outcomes(ranks, [&](ThreadBackend comm) {
            auto model = tensors({10, 20, 30});
            model[1].uses = 2;
            Reducer sync(comm, model);
            for (const std::size_t i : {2u, 1u, 0u}) sync.mark_ready(i);
            sync.finish();
        });
        // Nothing was on its way when the first rank failed: each finds its own mistake.
        for (const Outcome& outcome : result) {
            INFO(outcome.text);
            CHECK(outcome.is(Errc::gradient_not_ready));
            CHECK(outcome.says("'p1'"));
            CHECK(outcome.says("marked 1 of 2 times"));
        }
    }
}

TEST_CASE("PyTorch parity: invalid static graph, both ways: a tied weight that is marked too often is refused") {
    for (const int ranks : rank_counts(1, 3)) {
        const auto result = outcomes(ranks, [&](ThreadBackend comm) {
            auto model = tensors({10, 20, 30});
            model[1].uses = 2;
            Reducer sync(comm, model);
            for (int use = 0; use < 3; ++use) sync.mark_ready(1);
        });
        for (const Outcome& outcome : result) {
            INFO(outcome.text);
            CHECK(outcome.is(Errc::gradient_marked_twice));
            CHECK(outcome.says("'p1'"));
            CHECK(outcome.says("more than 2 times"));
        }
    }
}

TEST_CASE("with UnusedParameters::find_unused a tied weight that was used once only still counts as used") {
    CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
              auto model = tensors({10, 20});
              model[1].uses = 2;
              const int rank = comm.rank();
              Reducer<ThreadBackend, Flat> sync(comm, model, {.unused = UnusedParameters::find_unused});
              for (const std::size_t i : {1u, 0u}) {
                  write(sync.gradient_view(i), random_gradient(model[i], rank, 0, i));
                  sync.mark_ready(i);
              }
              sync.finish();
              finding.check(wrong_mean(sync, model, 2, 0).empty(), wrong_mean(sync, model, 2, 0));
          }) == "");
}

TEST_CASE("with UnusedParameters::find_unused a mark that comes after the step was closed is an error") {
    std::atomic<bool> tried{false};
    const auto result = outcomes(2, [&](ThreadBackend comm) {
        auto model = tensors({10, 20});
        Reducer sync(comm, model, {.unused = UnusedParameters::find_unused});
        sync.mark_ready(1);
        if (comm.rank() == 1) {
            while (!tried) std::this_thread::yield();
            sync.finish();
            return;
        }
        struct Tell {
            std::atomic<bool>& flag;
            ~Tell() { flag = true; }
        } tell{tried};
        if (sync.try_finish()) throw std::logic_error("finished without rank 1");
        sync.mark_ready(0);
    });
    INFO(result[0].text);
    CHECK(result[0].is(Errc::gradient_marked_twice));
    CHECK(result[0].says("after try_finish() had ended the backward"));
    CHECK(result[1].is(Errc::peer_failed));
}
