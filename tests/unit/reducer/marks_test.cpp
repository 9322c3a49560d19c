// SPDX-License-Identifier: BSL-1.0
// The ways to mark gradients: by index, several at once, by name, and all that are left.
#include <doctest/doctest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
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

std::vector<Tensor> tied_model() {
    auto model = tensors({40, 3, 700, 1, 5000, 33, 64});
    model[0].uses = 2;
    model[4].uses = 3;
    model[2].requires_grad = false;
    return model;
}

/// Marks all gradients in some of the ways, drawn from the seed; the last of them all that are left.
template <class Sync>
void mark_all(Sync& sync, const std::vector<Tensor>& model, std::uint32_t seed) {
    Random random(seed);
    for (const std::size_t i : shuffled(model.size(), seed)) {
        if (!model[i].requires_grad) continue;
        const std::size_t marks = random.below(model[i].uses + 1u);  // fewer leave it to the last call
        for (std::size_t use = 0; use < marks; ++use) switch (random.below(3)) {
                case 0: sync.mark_ready(i); break;
                case 1: sync.mark_ready(model[i].name); break;
                default: sync.mark_ready(std::span(&i, 1)); break;
            }
    }
    sync.mark_ready();
}

}  // namespace

TEST_CASE("marks by name, of several, and of all that are left give the means that marks by index give") {
    for (const int ranks : rank_counts())
        for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets})
            for (const bool finds_unused : {false, true})
                CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                          auto model = tied_model();
                          ReducerOptions options{.gradients = storage};
                          if (finds_unused) options.unused = UnusedParameters::find_unused;
                          Reducer sync(comm, model, options, SizeCappedBuckets{400});
                          for (int step = 0; step < 8; ++step) {
                              for (std::size_t i = 0; i < model.size(); ++i)
                                  if (model[i].requires_grad) write(sync.gradient_view(i), random_gradient(model[i], comm.rank(), step, i));
                              mark_all(sync, model, static_cast<std::uint32_t>(step * 8 + comm.rank()));
                              sync.finish();
                              finding.check(wrong_mean(sync, model, ranks, step).empty(), wrong_mean(sync, model, ranks, step));
                          }
                      }) == "");
}

TEST_CASE("micro-batches under no_sync(): all that are left means all that this micro-batch has not marked") {
    for (const int ranks : rank_counts())
        for (const Accumulation accumulation : {Accumulation::in_gradients, Accumulation::in_buckets})
            for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets})
                CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                          const bool adds_up = accumulation == Accumulation::in_buckets;
                          constexpr int each = 4;
                          const std::size_t all = adds_up ? static_cast<std::size_t>(each * ranks) : 0;
                          const ReducerOptions options{.gradients = storage, .accumulation = accumulation, .micro_batches = all};
                          auto model = tied_model(), by_index = tied_model();
                          Reducer sync(comm, model, options, SizeCappedBuckets{400});
                          Reducer other(comm.duplicate(), by_index, options, SizeCappedBuckets{400});
                          for (int step = 0; step < 3; ++step) {
                              std::optional<NoSync> guard, other_guard;
                              for (int m = 0; m < each; ++m) {
                                  const bool one_guard_for_all = adds_up && step == 2;
                                  if (m == 0 || m + 1 == each || !one_guard_for_all) guard.reset(), other_guard.reset();
                                  if (m + 1 < each && !guard) guard.emplace(sync.no_sync()), other_guard.emplace(other.no_sync());
                                  const int batch = step * each + m;
                                  for (std::size_t i = 0; i < model.size(); ++i)
                                      if (model[i].requires_grad)
                                          write(sync.gradient_view(i), random_gradient(model[i], comm.rank(), batch, i));
                                  mark_all(sync, model, static_cast<std::uint32_t>(batch * 8 + comm.rank()));
                                  backward(other, by_index, comm.rank(), batch);
                              }
                              sync.finish();
                              other.finish();
                              for (std::size_t i = 0; i < model.size(); ++i)
                                  if (model[i].requires_grad)
                                      finding.check(holds(sync.gradient_view(i), bytes_of(other.gradient_view(i))),
                                                    model[i].name + " has other bits than after marks by index");
                          }
                      }) == "");
}

TEST_CASE("a trainer that does not say when gradients are ready: one backward, one mark, also without a batch") {
    CHECK(findings(3, [](ThreadBackend comm, Finding& finding) {
              std::vector<float> weights(5), gradient(5);
              Reducer sync(comm, {parameter("w", weights, gradient)});
              for (int step = 0; sync.begin_step(step <= comm.rank()); ++step) {
                  gradient.assign(5, static_cast<float>(comm.rank()));
                  sync.mark_ready();
                  sync.finish();
                  finding.check(gradient[4] == static_cast<float>(step + 2) / 2, "a mean of other ranks");
              }
          }) == "");
}

TEST_CASE("marks that mean no gradient, or one twice, are refused by name") {
    const auto says = [](Finding& finding, const char* what, auto&& call) {
        const Outcome outcome = outcome_of(call);
        finding.check(outcome.is(Errc::invalid_argument) && outcome.says(what), std::string(what) + ": " + outcome.text);
    };
    CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
              auto model = tensors({10, 20});
              Reducer sync(comm, model, {.accumulation = Accumulation::in_buckets});
              says(finding, "mark_ready on rank ", [&] { sync.mark_ready("p2"); });
              says(finding, "no parameter is named 'p2'; give an index, or one of the names in parameters()",
                   [&] { sync.mark_ready("p2"); });
              const std::size_t beyond[] = {2};
              says(finding, "mark_ready on rank ", [&] { sync.mark_ready(beyond); });
              {
                  const auto guard = sync.no_sync();
                  sync.mark_ready(0);
                  says(finding, "mark each by its index, or set ReducerOptions::micro_batches", [&] { sync.mark_ready(); });
                  sync.mark_ready("p1");
              }
              sync.mark_ready();
              sync.finish();
          }) == "");
    CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
              auto model = tensors({10, 20});
              model[1].name = model[0].name;
              Reducer sync(comm, model);
              says(finding, "parameters 0 and 1 are both named 'p0'; give an index, or other names", [&] { sync.mark_ready("p0"); });
          }) == "");
    CHECK(findings(1, [&](ThreadBackend comm, Finding& finding) {
              auto model = tensors({10, 20});
              Reducer sync(comm, model);
              sync.mark_ready();
              const Outcome twice = outcome_of([&] { sync.mark_ready("p1"); });
              finding.check(twice.is(Errc::gradient_marked_twice) && twice.says("'p1'"), twice.text);
          }) == "");
}

TEST_CASE(
    "a finish() that was forgotten is noticed by the next mark of all that are left; one mark that finds nothing left is no mistake") {
    const auto seen = outcomes(2, [](ThreadBackend comm) {
        auto model = tensors({10, 20});
        Reducer sync(comm, model);
        for (int step = 0; step < 2; ++step) {
            for (std::size_t i = 0; i < 2; ++i) write(sync.gradient_view(i), random_gradient(model[i], comm.rank(), step, i));
            sync.mark_ready(1);
            sync.mark_ready(0);
            sync.mark_ready();
            sync.finish();
            if (!wrong_mean(sync, model, 2, step).empty()) throw std::logic_error(wrong_mean(sync, model, 2, step));
        }
        sync.mark_ready();
        sync.mark_ready();
    });
    int told = 0;
    for (const Outcome& outcome : seen) {
        told += outcome.says("it was called twice in this step, and no gradient is left to mark; call finish() in each step") ? 1 : 0;
        CHECK(outcome.text != "");  // a rank that is slower hears of the other's exception
    }
    CHECK(told > 0);
}

TEST_CASE("a mark of all that are left is refused while try_finish() waits for the averages, and the step goes on") {
    std::atomic<bool> tried{false};
    CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
              auto model = tensors({10, 20});
              Reducer sync(comm, model);
              for (std::size_t i = 0; i < 2; ++i) write(sync.gradient_view(i), random_gradient(model[i], comm.rank(), 0, i));
              while (comm.rank() == 1 && !tried) std::this_thread::yield();
              sync.mark_ready();
              if (comm.rank() == 0) {
                  finding.check(!sync.try_finish(), "finished without rank 1");
                  const Outcome early = outcome_of([&] { sync.mark_ready(); });
                  tried = true;
                  finding.check(early.says("try_finish() has ended the backward; first call it until it returns true"), early.text);
              }
              while (!sync.try_finish()) std::this_thread::yield();
              finding.check(wrong_mean(sync, model, 2, 0).empty(), wrong_mean(sync, model, 2, 0));
          }) == "");
}

TEST_CASE("what backward() passes on takes what mark_ready() takes") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              auto model = tensors({10, 20, 30, 40});
              Reducer sync(comm, model);
              for (std::size_t i = 0; i < 4; ++i) write(sync.gradient_view(i), random_gradient(model[i], comm.rank(), 0, i));
              sync.backward([&](auto ready) {
                  const std::size_t two[] = {1, 2};
                  ready(3);
                  ready(two);
                  ready("p0");
              });
              finding.check(wrong_mean(sync, model, 2, 0).empty(), wrong_mean(sync, model, 2, 0));
          }) == "");
}
