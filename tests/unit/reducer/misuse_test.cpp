// SPDX-License-Identifier: BSL-1.0
// Mistakes in a trainer that would train on in silence with wrong weights, and what is said of them.
#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gradsync/backend/tcp.hpp>
#include <gradsync/gradsync.hpp>
#include <gradsync/overlap/no_overlap.hpp>
#include <gradsync/overlap/overlap_forward.hpp>

#include "support/averaging_oracle.hpp"
#include "support/forked.hpp"
#include "support/ports.hpp"
#include "support/ranks.hpp"
#include "support/tensor.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

struct Layer {
    std::string name;
    std::vector<float> value, gradient;
};

std::vector<Layer> layers() {
    std::vector<Layer> model;
    for (const std::size_t n : {1u, 300u, 70'001u})
        model.push_back({"layer " + std::to_string(n), std::vector<float>(n, 0.5f), std::vector<float>(n)});
    return model;
}

std::vector<ParameterView> views(std::vector<Layer>& model) {
    std::vector<ParameterView> all;
    for (Layer& l : model) all.push_back(parameter(l.name, l.value, l.gradient));
    return all;
}

template <class Sync>
void step(Sync& sync) {
    for (std::size_t i = sync.parameters().size(); i-- > 0;) sync.mark_ready(i);
    sync.finish();
}

}  // namespace

TEST_CASE("weights that differ are found in the first finish(), with the parameter and the ranks that have others") {
    for (const int ranks : rank_counts(2))
        for (const std::size_t at : {0u, 7u, 8u, 69'999u, 70'000u}) {
            CAPTURE(ranks);
            CAPTURE(at);
            const auto seen = outcomes(ranks, [&](ThreadBackend comm) {
                auto model = layers();
                if (comm.rank() == 1) model[2].value[at] += 1e-7f;
                Reducer sync(comm, views(model));
                step(sync);
            });
            for (const Outcome& outcome : seen) {
                INFO(outcome.text);
                CHECK(outcome.is(Errc::parameter_mismatch));
                CHECK(outcome.says(
                    "the weights of 'layer 70001' differ: those of rank 1 are not those of rank 0; call broadcast_parameters()"));
            }
        }
}

TEST_CASE("no parameters, and a count that was negative, are refused") {
    const std::vector<ParameterView> none;
    const Outcome empty = outcome_of([&] { run_threads(1, [&](ThreadBackend comm) { Reducer(comm, none); }); });
    CHECK(empty.is(Errc::invalid_argument));
    CHECK(empty.says("there are no parameters; construct it when the model has its layers"));

    const int n = -1;
    std::vector<float> memory(4);
    for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets}) {
        const Outcome outcome = outcome_of([&] {
            run_threads(1, [&](ThreadBackend comm) {
                Reducer(comm, {ParameterView{.gradient = BufferView(memory.data(), static_cast<std::size_t>(n))}}, {.gradients = storage});
            });
        });
        CHECK(outcome.is(Errc::invalid_argument));
        CHECK(outcome.says("parameter '0' has -1 elements; look for a count that is negative or not set"));
    }
    const Outcome sum = outcome_of(
        [&] { run_threads(1, [&](ThreadBackend comm) { average(comm, BufferView(memory.data(), static_cast<std::size_t>(n))); }); });
    CHECK(sum.is(Errc::invalid_argument));
    CHECK(sum.says("a buffer's count is negative"));
}

TEST_CASE("gradients in buckets: a trainer that writes those that it has registered is told so in the first finish()") {
    for (const bool writes_there : {false, true})
        for (const int ranks : {1, 2}) {
            const auto seen = outcomes(ranks, [&](ThreadBackend comm) {
                auto model = layers();
                Reducer sync(comm, views(model), {.gradients = GradientStorage::in_buckets});
                for (int steps = 0; steps < 2; ++steps) {
                    for (std::size_t i = 0; i < model.size(); ++i) {
                        model[i].gradient[0] = 1;  // also there, which is no mistake of its own
                        if (writes_there) sync.gradient_view(i).as<float>()[0] = 1;
                    }
                    step(sync);
                }
            });
            for (const Outcome& outcome : seen) {
                CHECK(outcome.is(Errc::invalid_argument) == !writes_there);
                if (!writes_there) CHECK(outcome.says("with GradientStorage::in_buckets write to gradient_view(i), or use borrowed"));
            }
        }
}

TEST_CASE("finish() after a backward() that has called it says so") {
    const Outcome outcome = outcome_of([] {
        run_threads(1, [](ThreadBackend comm) {
            auto model = layers();
            Reducer sync(comm, views(model));
            sync.backward([&](auto ready) { ready({0, 1, 2}); });
            sync.finish();
        });
    });
    CHECK(outcome.is(Errc::gradient_not_ready));
    CHECK(outcome.says("no gradient was marked since the last finish(), which backward() calls by itself"));
}

TEST_CASE("several indices in braces are marked") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              auto model = layers();
              for (Layer& l : model) l.gradient[0] = static_cast<float>(comm.rank());
              Reducer sync(comm, views(model));
              sync.mark_ready({2, 1});
              sync.mark_ready({0});
              sync.finish();
              for (Layer& l : model) finding.check(l.gradient[0] == 0.5f, "not averaged");
          }) == "");
}

TEST_CASE("weights that differ: the first parameter is named, and the minority") {
    const auto seen = outcomes(4, [&](ThreadBackend comm) {
        auto model = layers();
        if (comm.rank() == 0 || comm.rank() == 2) model[1].value[5] = 1;
        if (comm.rank() == 2) model[1].value[5] = 2;
        if (comm.rank() == 3) model[2].value[5] = 1;
        Reducer sync(comm, views(model));
        step(sync);
    });
    for (const Outcome& outcome : seen)
        CHECK(outcome.says("the weights of 'layer 300' differ: those of rank 0 and rank 2 are not those of rank 1"));
}

TEST_CASE("weights of an empty parameter are the same, with an address and without") {
    const auto seen = outcomes(2, [&](ThreadBackend comm) {
        float place = 0, gradient = 0;
        Reducer sync(
            comm,
            {ParameterView{.name = "a", .value = {&place, 1}, .gradient = {&gradient, 1}},
             ParameterView{
                 .name = "none", .value = {comm.rank() == 0 ? nullptr : &place, 0}, .gradient = {&gradient, 0}, .may_be_empty = true}});
        step(sync);
    });
    for (const Outcome& outcome : seen) CHECK(outcome.text == "");
}

TEST_CASE("weights that differ between processes are found over shared memory and over messages") {
    for (const bool shared_memory : {true, false}) {
        const std::uint16_t port = free_port();
        const auto reports = forked(3, [&](int rank) -> std::string {
            TcpRendezvous rendezvous({.rank = rank, .size = 3, .port = port});
            auto model = layers();
            if (rank == 2) model[1].value[299] = 1;
            try {
                Reducer sync(TcpBackend(rendezvous, {.shared_memory = shared_memory}), views(model));
                step(sync);
                return "nothing was thrown";
            } catch (const Error& error) {
                return error.what();
            }
        });
        for (const auto& report : reports)
            CHECK_MESSAGE(report.says("the weights of 'layer 300' differ: those of rank 2 are not those of rank 0"), report.text);
    }
}

TEST_CASE("weights are compared again every so many steps, or never") {
    for (const std::size_t every : {std::size_t{0}, std::size_t{1}, std::size_t{3}, never})
        for (const bool polls : {false, true}) {
            CAPTURE(every);
            std::vector<int> steps(3);
            const auto seen = outcomes(3, [&](ThreadBackend comm) {
                auto model = layers();
                Reducer sync(comm, views(model), {.compare_weights_every = every});
                if (every == never && comm.rank() == 2) model[0].value[0] = 7;
                for (int& s = steps[static_cast<std::size_t>(comm.rank())]; s < 7; ++s) {
                    for (std::size_t i = model.size(); i-- > 0;) sync.mark_ready(i);
                    if (!polls) sync.finish();
                    else
                        while (!sync.try_finish()) std::this_thread::yield();
                    if (s == 1 && comm.rank() == 2) model[0].value[0] = 3;  // a drift after the second step
                }
            });
            for (std::size_t r = 0; r < 3; ++r) {
                INFO(seen[r].text);
                CHECK(steps[r] == (every == 1 ? 2 : every == 3 ? 3 : 7));
                CHECK(seen[r].says("the weights of 'layer 1' differ") == (every == 1 || every == 3));
            }
        }
}

TEST_CASE("ranks of one process that share a model are refused at construction, with the memory that they share") {
    for (const bool values : {false, true})
        for (const int ranks : {2, 3}) {
            auto shared = layers();
            const auto seen = outcomes(ranks, [&](ThreadBackend comm) {
                auto own = layers();
                if (comm.rank() != 1 || ranks == 2) (values ? own[1].value : own[1].gradient).clear();
                auto all = views(own);
                if (comm.rank() != 1 || ranks == 2) {
                    if (values) all[1].value = buffer(shared[1].value);
                    else all[1].gradient = buffer(shared[1].gradient);
                }
                Reducer sync(comm, all);
                step(sync);
            });
            for (const Outcome& outcome : seen) {
                INFO(outcome.text);
                CHECK(outcome.is(Errc::invalid_argument));
                CHECK(outcome.says("ranks 0 and " + std::to_string(ranks - 1) + " share the " + (values ? "weights" : "gradient") +
                                   " of 'layer 300': each rank needs a model of its own"));
            }
        }
}

TEST_CASE("frozen weights may be shared by the ranks of one process") {
    auto shared = layers();
    CHECK(findings(3, [&](ThreadBackend comm, Finding&) {
              auto own = layers();
              auto all = views(own);
              all[1].value = buffer(shared[1].value);
              all[1].requires_grad = false;
              Reducer sync(comm, all);
              for (const std::size_t i : {2u, 0u}) sync.mark_ready(i);
              sync.finish();
          }) == "");
}

TEST_CASE("a parameter that no rank used: was_used() says so on every rank") {
    for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets})
        for (const int ranks : rank_counts(1, 3))
            CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                      auto model = tensors({10, 20, 30});
                      Reducer sync(comm, model, {.gradients = storage, .unused = UnusedParameters::find_unused});
                      for (std::size_t s = 0; s < 4; ++s) {
                          if (comm.rank() == 0) sync.mark_ready(s % 3);  // the others use nothing
                          sync.finish();
                          for (std::size_t i = 0; i < 3; ++i)
                              finding.check(sync.was_used(i) == (i == s % 3),
                                            "step " + std::to_string(s) + ", parameter " + std::to_string(i));
                      }
                      finding.check(outcome_of([&] { (void)sync.was_used(3); }).is(Errc::invalid_argument), "there is no parameter 3");
                  }) == "");
}

TEST_CASE("a mark, or a second finish(), while another thread is in finish() throws") {
    /// Calls a function while `finish()` is running.
    struct Meanwhile : Observer {
        std::function<void()> call;
        void ready(std::size_t, Time) noexcept override {}
        void begin(Activity activity, std::size_t, Time) noexcept override {
            if (activity == Activity::finish && call) std::exchange(call, {})();
        }
        void end(Activity, std::size_t, Time) noexcept override {}
    };
    for (const int ranks : {1, 2})
        for (const bool marks : {true, false}) {
            std::string told;
            const auto seen = outcomes(ranks, [&](ThreadBackend comm) {
                auto model = tensors({10, 20});
                Meanwhile meanwhile;
                Reducer<ThreadBackend, PerParameter> sync(comm, model, {.observer = &meanwhile});
                for (std::size_t i = 2; i-- > 0;) sync.mark_ready(i);
                if (comm.rank() == 0)
                    meanwhile.call = [&] {
                        std::thread([&] { told = outcome_of([&] { marks ? sync.mark_ready(1) : sync.finish(); }).text; }).join();
                    };
                sync.finish();
            });
            CAPTURE(ranks);
            CHECK(told.find("another thread is in finish(); end the backward on all threads") != std::string::npos);
            // A refused finish() has no effect; a mark ends the training, unless its step was over.
            for (const Outcome& outcome : seen) CHECK((outcome.text.empty() || (marks && outcome.is(Errc::peer_failed))));
        }
}

TEST_CASE("a tracked gradient that moved, or has another size, is told at its mark or in finish(), on every rank") {
    enum class How { resized, moved, after_its_mark };
    for (const How how : {How::resized, How::moved, How::after_its_mark})
        for (const int ranks : {1, 2}) {
            const auto seen = outcomes(ranks, [&](ThreadBackend comm) {
                auto model = layers();
                std::vector<ParameterView> all;
                for (Layer& l : model) all.push_back(parameter(l.name, l.value, tracked(l.gradient)));
                Reducer sync(comm, all);
                step(sync);
                std::vector<float> elsewhere(model[1].gradient.size());
                for (std::size_t i = model.size(); i-- > 0;) {
                    if (i == 1 && how == How::resized) model[i].gradient.resize(301);
                    if (i == 1 && how == How::moved) model[i].gradient.swap(elsewhere);
                    sync.mark_ready(i);
                    if (i == 1 && how == How::after_its_mark) model[i].gradient.swap(elsewhere);
                }
                sync.finish();
            });
            for (const Outcome& outcome : seen) {
                INFO(outcome.text);
                CHECK(outcome.says(how == How::resized ? "the gradient of 'layer 300' has 301 elements now, and had 300"
                                                       : "the gradient of 'layer 300' moved; call rebind_gradient()"));
            }
        }
}

TEST_CASE("a tracked gradient may move between steps, where rebind_gradient() is called; untracked ones are not looked at") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              auto model = tensors({10, 20});
              std::vector<std::vector<float>> gradients = {std::vector<float>(10), std::vector<float>(20)};
              Reducer sync(comm, std::vector{tracked(gradients[0]), tracked(gradients[1])});
              for (int s = 0; s < 4; ++s) {
                  std::vector<float> next(20);
                  gradients[1].swap(next);
                  sync.rebind_gradient(1, buffer(gradients[1]));
                  gradients[1][7] = static_cast<float>(comm.rank() + s);
                  step(sync);
                  finding.check(gradients[1][7] == static_cast<float>(s) + 0.5f, "step " + std::to_string(s));
              }
          }) == "");
}

TEST_CASE("a gradient without elements is refused, unless it is meant") {
    for (const int ranks : {1, 2})
        CHECK(findings(ranks, [](ThreadBackend comm, Finding& finding) {
                  auto model = layers();
                  model[1].value.clear();
                  model[1].gradient.clear();
                  const Outcome refused = outcome_of([&] { Reducer(comm, views(model)); });
                  finding.check(
                      refused.is(Errc::invalid_argument) && refused.says("parameter 'layer 300' has no elements; register it when"),
                      refused.text);
                  auto all = views(model);
                  all[1].may_be_empty = true;
                  Reducer sync(comm, all);
                  step(sync);
              }) == "");
}

namespace {

/// A step in which the last rank's gradient `bad` has an element that is not finite.
template <class Sync>
void step_with(Sync& sync, std::vector<Tensor>& model, int rank, int batch, std::size_t bad, double value) {
    for (std::size_t i = model.size(); i-- > 0;) {
        const BufferView view = sync.gradient_view(i);
        write(view, random_gradient(model[i], rank, batch, i));
        if (i == bad && rank == sync.backend().size() - 1) {
            const Bytes one = constant_bytes(view.dtype, 1, value);
            std::memcpy(static_cast<std::byte*>(view.data) + (view.count - 1) * size_of(view.dtype), one.data(), one.size());
        }
        sync.mark_ready(i);
    }
    sync.finish();
}

const double not_finite[] = {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()};

}  // namespace

TEST_CASE("NonFinite::error names rank and parameter on every rank") {
    for (const DType dtype : {DType::f32, DType::bf16, DType::f64})
        for (const double value : not_finite)
            for (const int ranks : rank_counts(1, 3))
                for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets}) {
                    const auto seen = outcomes(ranks, [&](ThreadBackend comm) {
                        auto model = tensors({10, 2000, 30}, dtype);
                        Reducer sync(comm, model, {.gradients = storage, .non_finite = NonFinite::error});
                        step_with(sync, model, comm.rank(), 0, 99, value);
                        step_with(sync, model, comm.rank(), 1, 1, value);
                    });
                    for (const Outcome& outcome : seen) CHECK(outcome.says("the gradient of 'p1' has an element that is infinite or NaN"));
                    CHECK(seen.back().is(Errc::non_finite));
                    CHECK(seen.back().says("on rank " + std::to_string(ranks - 1)));
                }
}

TEST_CASE("NonFinite::skip: all ranks skip the step, its gradients are 0, and the next step is like any") {
    const auto check = [](auto overlap, GradientStorage storage, UnusedParameters unused, int ranks) {
        return findings(ranks, [&](ThreadBackend comm, Finding& finding) {
            auto model = tensors({10, 2000, 30});
            Reducer<ThreadBackend, SizeCappedBuckets, decltype(overlap)> sync(
                comm, model, {.gradients = storage, .unused = unused, .non_finite = NonFinite::skip}, SizeCappedBuckets(200));
            for (int s = 0; s < 6; ++s) {
                const bool skips = s % 3 == 1;
                for (std::size_t i = model.size(); i-- > 0;) {
                    write(sync.gradient_view(i), random_gradient(model[i], comm.rank(), s, i));
                    if (skips && i == 1 && comm.rank() == ranks - 1)
                        sync.gradient_view(i).template as<float>()[1999] = std::numeric_limits<float>::infinity();
                    sync.mark_ready(i);
                }
                (void)sync.finish();
                finding.check(sync.statistics().last.skipped == (skips ? 1u : 0u), "step " + std::to_string(s));
                if (!skips) finding.check(wrong_mean(sync, model, ranks, s).empty(), wrong_mean(sync, model, ranks, s));
                for (std::size_t i = 0; skips && i < model.size(); ++i)
                    finding.check(holds(sync.gradient_view(i), Bytes(model[i].gradient.size())), "a gradient of a skipped step is not 0");
            }
            finding.check(sync.statistics().total.skipped == 2, "the sum of skipped steps");
        });
    };
    for (const int ranks : rank_counts(1, 3))
        for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets})
            for (const UnusedParameters unused : {UnusedParameters::error, UnusedParameters::find_unused}) {
                CHECK(check(OverlapBackward{}, storage, unused, ranks) == "");
                CHECK(check(NoOverlap{}, storage, unused, ranks) == "");
                CHECK(check(OverlapForward{}, storage, unused, ranks) == "");
            }
}

TEST_CASE("NonFinite::skip sees micro-batches, and discard() forgets what it saw") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              auto model = tensors({10, 20});
              Reducer sync(comm, model, {.accumulation = Accumulation::in_buckets, .non_finite = NonFinite::skip});
              for (int s = 0; s < 3; ++s) {
                  {
                      const auto guard = sync.no_sync();
                      backward(sync, model, comm.rank(), s);
                      if (s != 2 && comm.rank() == 1) {
                          write(model[1].gradient_view(), constant_bytes(DType::f32, 20, std::numeric_limits<double>::quiet_NaN()));
                          sync.mark_ready(1);
                      }
                  }
                  if (s == 1) sync.discard();
                  backward(sync, model, comm.rank(), s);
                  sync.finish();
                  finding.check(sync.statistics().last.skipped == (s == 0 ? 1u : 0u), "step " + std::to_string(s));
              }
          }) == "");
}

TEST_CASE("NonFinite sees gradients of fewer marks than uses; what a rank without a batch holds does not count") {
    for (const bool joins : {false, true})
        CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
                  auto model = tensors({10, 20});
                  model[1].uses = 2;
                  Reducer sync(
                      comm, model,
                      {.accumulation = Accumulation::in_buckets, .unused = UnusedParameters::find_unused, .non_finite = NonFinite::skip});
                  const bool has_batch = !joins || comm.rank() == 0;
                  const double value = comm.rank() == 1 ? not_finite[0] : 1.0;
                  write(model[1].gradient_view(), constant_bytes(DType::f32, 20, value));
                  if (joins) {
                      {
                          const auto guard = sync.no_sync();
                          for (int use = 0; use < 2; ++use) sync.mark_ready(1);
                      }
                      (void)sync.begin_step(has_batch);
                  }
                  if (has_batch) sync.mark_ready(1);
                  sync.finish();
                  finding.check(sync.statistics().last.skipped == (joins ? 0u : 1u), joins ? "it was skipped" : "it was not skipped");
              }) == "");
}

TEST_CASE("clipping by a norm that is not finite leaves all gradients as they are") {
    for (const double value : not_finite)
        CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
                  auto model = tensors({10, 20});
                  Reducer sync(comm, model);
                  step_with(sync, model, comm.rank(), 0, 1, value);
                  const Bytes before = bytes_of(sync.gradient_view(0)), other = bytes_of(sync.gradient_view(1));
                  finding.check(!std::isfinite(sync.clip_gradients_by_norm(0.1)), "the norm is finite");
                  finding.check(holds(sync.gradient_view(0), before) && holds(sync.gradient_view(1), other), "gradients were scaled");
              }) == "");
}

TEST_CASE("an exception ended the backward of all ranks: discard() says how to go on, and it does") {
    for (int ranks = 1; ranks <= 4; ++ranks)
        CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                  auto model = tensors({10, 20, 30});
                  Reducer sync(comm, model, PerParameter{});
                  const Outcome skipped = outcome_of([&] {
                      sync.backward([&](auto ready) {
                          ready(2);
                          throw Error(Errc::non_finite, "a bad batch");
                      });
                  });
                  finding.check(skipped.is(Errc::non_finite), skipped.text);
                  const Outcome refused = outcome_of([&] { sync.discard(); });
                  finding.check(refused.says("some gradients of this step are marked; mark the rest, and call finish() first"),
                                refused.text);
                  sync.mark_ready(1);
                  sync.mark_ready(0);
                  sync.finish();
                  sync.backward([](auto ready) {
                      for (std::size_t i : {2u, 1u, 0u}) ready(i);
                  });
              }) == "");
}

TEST_CASE("an exception ended a backward: the next one is refused and says so, until the step is finished") {
    for (const int ranks : rank_counts(1, 3))
        CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                  auto model = tensors({10, 20, 30});
                  Reducer sync(comm, model, PerParameter{});
                  const auto backward = [&](std::size_t marks) {
                      return outcome_of([&] {
                          sync.backward([&](auto ready) {
                              for (std::size_t i = 3; i-- > 3 - marks;) ready(i);
                              if (marks != 3) throw std::runtime_error("a bad batch");
                          });
                      });
                  };
                  finding.check(backward(0).says("a bad batch"), "it was not thrown");
                  finding.check(backward(3).text.empty(), "a backward without marks has left some");
                  finding.check(backward(1).says("a bad batch"), "it was not thrown");
                  for (int again = 0; again < 2; ++again) {
                      const Outcome refused = backward(3);
                      finding.check(refused.is(Errc::invalid_argument) &&
                                        refused.says("has not finished the last step, because an exception ended its backward; mark its "
                                                     "other gradients and call finish()"),
                                    refused.text);
                  }
                  sync.mark_ready(1);
                  sync.mark_ready(0);
                  sync.finish();
                  finding.check(backward(3).text.empty(), "the step after it");
              }) == "");
}

TEST_CASE("an exception ended a backward after the first of two marks of a gradient: the second is still to come") {
    CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
              auto model = tensors({10, 20});
              model[1].uses = 2;
              Reducer sync(comm, model);
              const auto backward = [&](bool fails) {
                  return outcome_of([&] {
                      sync.backward([&](auto ready) {
                          ready(1);
                          if (fails) throw std::runtime_error("a bad batch");
                          ready(1);
                          ready(0);
                      });
                  });
              };
              finding.check(backward(true).says("a bad batch"), "it was not thrown");
              finding.check(backward(false).says("an exception ended its backward"), "it was not refused");
              sync.mark_ready(1);
              sync.mark_ready(0);
              sync.finish();
              finding.check(backward(false).text.empty(), "the step after it");
          }) == "");
}

TEST_CASE("an exception ended the backward of one rank, which goes on: the others are told, and whose it was") {
    const auto seen = outcomes(3, [](ThreadBackend comm) {
        auto model = tensors({10, 20});
        Reducer sync(comm, model, PerParameter{});
        for (int step = 0; step < 2; ++step) {
            try {
                sync.backward([&](auto ready) {
                    ready(1);
                    if (comm.rank() == 1 && step == 0) throw std::runtime_error("a bad batch");
                    ready(0);
                });
            } catch (const std::runtime_error& error) {
                if (std::string(error.what()) != "a bad batch") throw;
            }
        }
    });
    CHECK(seen[1].says("an exception ended its backward"));
    for (const int rank : {0, 2}) {
        CHECK(seen[static_cast<std::size_t>(rank)].is(Errc::peer_failed));
        CHECK(seen[static_cast<std::size_t>(rank)].says("rank 1 failed: an exception ended its step"));
    }
}

TEST_CASE("options without effect are refused") {
    run_threads(1, [](ThreadBackend comm) {
        auto model = tensors({10, 20});
        for (const Averaging averaging : {Averaging::sum, Averaging::weighted_mean, Averaging::mean_over_count})
            CHECK(outcome_of([&] {
                      Reducer(comm, model, {.averaging = averaging, .divisor = JoinDivisor::all_ranks});
                  }).says("JoinDivisor is the divisor of Averaging::mean; leave it out with another averaging"));
        CHECK(outcome_of([&] { Reducer(comm, model, {.averaging = Averaging::mean, .divisor = JoinDivisor::all_ranks}); }).text == "");
    });
}
