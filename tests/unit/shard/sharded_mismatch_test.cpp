// SPDX-License-Identifier: BSL-1.0
#include <doctest/doctest.h>

#include <chrono>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

#include "support/sharding.hpp"

using namespace gradsync;
using namespace gradsync_test;

TEST_CASE("ranks whose sharding differs get the same error on all of them") {
    const auto seen = outcomes(2, [](ThreadBackend comm) {
        auto model = initial_tensors({10, 20}, DType::f32);
        ShardedOptimizer<ThreadBackend, Sgd> sharded(
            comm, model, Sgd{}, {.parameters = comm.rank() == 0 ? ParameterStorage::borrowed : ParameterStorage::in_buckets});
    });
    for (const Outcome& outcome : seen) {
        CHECK(outcome.is(Errc::parameter_mismatch));
        CHECK(outcome.text == seen[0].text);
        CHECK(outcome.says("parameters=in_buckets"));
    }
    const auto types = outcomes(2, [](ThreadBackend comm) {
        auto model = initial_tensors({10, 20}, comm.rank() == 0 ? DType::f32 : DType::bf16);
        std::vector<float> gradient(20);
        std::vector<ParameterView> views = {{.name = "w", .value = model[1].value_view(), .gradient = buffer(gradient)}};
        ShardedOptimizer<ThreadBackend, Sgd> sharded(comm, views, Sgd{});
    });
    for (const Outcome& outcome : types) CHECK(outcome.is(Errc::parameter_mismatch));
}

TEST_CASE("ranks whose frozen parameters differ, or whose values have another type, get the same error, which names the parameter") {
    struct Difference {
        std::string says;
        std::function<void(ParameterView&)> make;  ///< of p1, on the last rank
    };
    const auto narrow = [](ParameterView& p) { p.value.dtype = DType::bf16; };  // it lies in the same memory, as nobody gets to read it
    const auto check = [&](const Difference& difference, bool frozen, auto&& construct) {
        for (const int size : {2, 3}) {
            const auto seen = outcomes(size, [&](ThreadBackend comm) {
                auto model = initial_tensors({10, 20, 30}, DType::f32);
                model[1].requires_grad = !frozen;
                std::vector<ParameterView> views = views_of(model);
                if (comm.rank() == size - 1) difference.make(views[1]);
                construct(comm, views);
            });
            for (const Outcome& outcome : seen) {
                INFO(outcome.text);
                REQUIRE(outcome.is(Errc::parameter_mismatch));
                CHECK(outcome.error->context().parameter == "p1");
                CHECK(outcome.text == seen[0].text);
                CHECK(outcome.says("rank 0 has 'p1' f32 [20]"));
                CHECK(outcome.says("rank " + std::to_string(size - 1) + " has 'p1' "));
                CHECK(outcome.says(difference.says));
            }
        }
    };
    const auto check_all = [&](const Difference& difference, bool frozen) {
        CAPTURE(difference.says);
        CAPTURE(frozen);
        check(difference, frozen, [](auto comm, auto& views) { ShardedOptimizer<ThreadBackend, Sgd>(comm, views, Sgd{}); });
        check(difference, frozen, [](auto comm, auto& views) {
            ShardedOptimizer<ThreadBackend, Sgd, Zero1>(comm, views, Sgd{}, {.parameters = ParameterStorage::in_buckets});
        });
        check(difference, frozen, [](auto comm, auto& views) { ShardedOptimizer<ThreadBackend, Sgd, Zero2>(comm, views, Sgd{}); });
        check(difference, frozen, [](auto comm, auto& views) {
            ShardedParameters<ThreadBackend, Sgd>(comm, views, Sgd{}, Units({0, 0, 1}));
        });
    };
    for (const bool frozen : {false, true}) {
        check_all({"values of bf16", narrow}, frozen);
        check_all({"'p1' f32 [19]",
                   [](ParameterView& p) {
                       p.shape = {19};
                       --p.value.count;
                       --p.gradient.count;
                   }},
                  frozen);
        check_all({frozen ? "f32 [20], frozen" : "[20], frozen", [&](ParameterView& p) { p.requires_grad = frozen; }}, frozen);
    }
    check_all({"'p1' bf16 [20], frozen",
               [](ParameterView& p) {
                   p.value.dtype = DType::bf16;
                   p.gradient.dtype = DType::bf16;
               }},
              true);
}

TEST_CASE("two optimizers of equal buckets, whose weights ranks gather in another order, are told apart") {
    for (const int ranks : {2, 3})
        for (const Outcome& outcome : outcomes(ranks, [](ThreadBackend comm) {
                 auto one = initial_tensors({100}, DType::f32), other = one;
                 ShardedOptimizer<ThreadBackend, Sgd> first(comm, one, Sgd{}), second(comm, other, Sgd{});
                 first.mark_ready(0);
                 first.finish();
                 second.mark_ready(0);
                 second.finish();
                 const bool odd = comm.rank() == 1;
                 (odd ? second : first).step();
                 (odd ? first : second).step();
                 first.flush();
                 second.flush();
             })) {
            INFO(outcome.text);
            CHECK(outcome.is(Errc::collective_mismatch));
            CHECK(outcome.says("rank 0 started all_gather(f32, "));
            CHECK(outcome.says(" for bucket 0 of Reducer #0"));
            CHECK(outcome.says(" for bucket 0 of Reducer #1"));
        }
}

TEST_CASE("a rank that fails in its optimizer is named on the others") {
    struct Failing : Sgd {
        int rank = 0;
        void step(const OptimizerSlice<float>& s) const {
            if (rank == 1) throw std::runtime_error("the optimizer broke");
            Sgd::step(s);
        }
    };
    const auto seen = outcomes(3, [](ThreadBackend comm) {
        auto model = initial_tensors({1000, 1000}, DType::f32);
        ShardedOptimizer<ThreadBackend, Failing> sharded(comm, model, Failing{{}, comm.rank()});
        for (std::size_t i = 0; i < 2; ++i) sharded.mark_ready(i);
        sharded.finish();
        sharded.step();
    });
    CHECK(seen[1].text == "not a gradsync::Error: the optimizer broke");
    for (const std::size_t r : {0u, 2u}) {
        CHECK(seen[r].is(Errc::peer_failed));
        CHECK(seen[r].says("rank 1"));
        CHECK(seen[r].says("the optimizer broke"));
    }
}

TEST_CASE("after a step that failed because of another rank, marks say why, too") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              auto model = initial_tensors({30}, DType::f32);
              ShardedOptimizer sharded(comm, model, Sgd{});
              write(sharded.acquire_gradient(0), random_gradient(model[0], comm.rank(), 0, 0));
              sharded.mark_ready(0);
              sharded.finish();
              if (comm.rank() == 1) return comm.fail("its disk is full");
              while (!comm.failed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
              finding.check(outcome_of([&] { sharded.step(); }).says("its disk is full"), "step() does not say it");
              const Outcome marked = outcome_of([&] { sharded.mark_ready(0); });
              finding.check(marked.is(Errc::peer_failed) && marked.says("its disk is full"), marked.text);
          }) == "");
}
