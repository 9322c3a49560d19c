// SPDX-License-Identifier: BSL-1.0
// ctest: PROCESSORS 2
// Mistakes in a trainer that would train on in silence with wrong weights, and what is said of them.
#include <doctest/doctest.h>

#include <cstddef>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gradsync/gradsync.hpp>

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
    for (const int ranks : {2, 3, 4})
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

TEST_CASE("ranks of one process that share a model are told at construction, and which memory it is") {
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
        for (const int ranks : {1, 2, 3})
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

TEST_CASE("a mark, or a second finish(), while another thread is in finish() is told") {
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
            const auto seen = outcomes(ranks, [&](ThreadBackend comm) {
                auto model = tensors({10, 20});
                Meanwhile meanwhile;
                Reducer<ThreadBackend, PerParameter> sync(comm, model, {.observer = &meanwhile});
                for (std::size_t i = 2; i-- > 0;) sync.mark_ready(i);
                Outcome other;
                meanwhile.call = [&] {
                    if (comm.rank() == 0)
                        std::thread([&] { other = outcome_of([&] { marks ? sync.mark_ready(1) : sync.finish(); }); }).join();
                };
                const Outcome own = outcome_of([&] { sync.finish(); });
                if (comm.rank() != 0) return;
                CHECK(other.is(Errc::invalid_argument));
                CHECK(other.says("another thread is in finish(); end the backward on all threads"));
                if (!marks) CHECK(own.text.empty());  // a refused finish() has no effect
            });
        }
}
