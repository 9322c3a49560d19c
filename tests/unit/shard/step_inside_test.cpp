// SPDX-License-Identifier: BSL-1.0
// ctest: COST 16
// The optimizer inside the reduction: the bits of stage 1, whatever the step needs, and one collective a bucket.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include <gradsync/backend/tcp.hpp>
#include <gradsync/gradsync.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>

#include "step_inside.hpp"
#include "support/forked.hpp"
#include "support/ports.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

/// Trains in both ways over threads. Returns the collectives of a bucket in each step, or what differs.
std::string collectives_of(int ranks, const How& how) {
    std::string collectives;
    const std::string found = findings(ranks, [&](ThreadBackend comm, Finding& finding) {
        const Trained expected = train_as(comm, how, Zero1{}), inside = train_as(comm, how, StepInside{});
        finding.check(first_difference(expected.weights, inside.weights).empty(),
                      first_difference(expected.weights, inside.weights) + " differs");
        if (comm.rank() != 0) return;
        for (const std::size_t c : inside.collectives) collectives += std::to_string(c);
    });
    return found.empty() ? collectives : found;
}

void check_inside(const How& how, const std::string& expected = "21111") {
    for (const int ranks : rank_counts()) {
        CAPTURE(ranks);
        CHECK(collectives_of(ranks, how) == (ranks == 1 ? std::string(expected.size(), '0') : expected));
    }
}

}  // namespace

// The first step compares weights, and is one of stage 1: two collectives a bucket.

TEST_CASE("StepInside has the bits of stage 1, with one collective per bucket, for weights and gradients anywhere") {
    for (const auto parameters : {ParameterStorage::in_buckets, ParameterStorage::borrowed})
        for (const auto gradients : {GradientStorage::in_buckets, GradientStorage::borrowed}) {
            How how{.parameters = parameters};
            how.training.reducer.gradients = gradients;
            if (parameters == ParameterStorage::in_buckets) how.training.reducer.compare_weights_every = never;
            check_inside(how, parameters == ParameterStorage::in_buckets ? "11111" : "21111");
        }
}

TEST_CASE("ranks that are threads may share one set of weights, with and without StepInside") {
    for (const DType dtype : {DType::f32, DType::bf16}) {
        How how;
        how.training.dtype = dtype;
        how.training.reducer.compare_weights_every = never;
        for (const bool thaws : {false, true})
            for (const int ranks : rank_counts()) {
                CAPTURE(ranks);
                how.thaws = thaws;
                how.parameters = ParameterStorage::in_buckets;
                How shared = how;
                shared.parameters = ParameterStorage::shared;
                CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                          const Trained expected = train_as(comm, how, Zero1{});
                          for (const Trained& found : {train_as(comm, shared, StepInside{}), train_as(comm, shared, Zero1{})})
                              finding.check(first_difference(expected.weights, found.weights).empty(),
                                            first_difference(expected.weights, found.weights) + " differs");
                      }) == "");
            }
    }
    const auto refused = [](auto comm) {
        std::vector<float> w(10), gradient(10);
        return outcome_of([&] {
            ShardedOptimizer(comm, {ParameterView{.name = "w", .value = buffer(w), .gradient = buffer(gradient)}}, Sgd{},
                             ShardingOptions{.parameters = ParameterStorage::shared});
        });
    };
    const std::uint16_t port = free_port();
    for (const Report& report : forked(2, [&](int rank) {
             TcpRendezvous rendezvous({.rank = rank, .size = 2, .port = port});
             return refused(TcpBackend(rendezvous)).text;
         }))
        CHECK(report.says("ParameterStorage::shared is for ranks that are threads of one process; use in_buckets"));
}

TEST_CASE("StepInside has the bits of stage 1 for all types, and for micro-batches under no_sync()") {
    for (const DType dtype : {DType::f64, DType::bf16, DType::f16}) {
        CAPTURE(name_of(dtype));
        How how;
        how.training.dtype = dtype;
        how.training.reducer.compare_weights_every = never;
        check_inside(how, "11111");
        how.training.micro_batches = 3;
        how.training.reducer.accumulation = Accumulation::in_buckets;
        check_inside(how, "11111");
    }
}

TEST_CASE("StepInside reduces first in a step whose norm is asked for") {
    How how{.norms = true};
    how.training.reducer.compare_weights_every = never;
    check_inside(how, "12121");
}

TEST_CASE("StepInside has the bits of stage 1 for weighted means, and for ranks without a batch") {
    How how{.weighs = true};
    how.training.reducer = {.averaging = Averaging::weighted_mean, .compare_weights_every = never};
    check_inside(how, "11111");
}

TEST_CASE("StepInside has the bits of stage 1 for sums, discarded steps, and parameters that are trained later") {
    How how{.discards = true};
    how.training.reducer = {.averaging = Averaging::sum, .compare_weights_every = never};
    for (const int ranks : rank_counts()) CHECK(collectives_of(ranks, how).size() == 3);
    How thawing{.thaws = true};
    thawing.training.reducer.compare_weights_every = never;
    check_inside(thawing, "11111");
}

TEST_CASE("StepInside is stage 1 where it cannot step inside the reduction") {
    How how;
    how.training.reducer = {.unused = UnusedParameters::find_unused, .compare_weights_every = never};
    for (int ranks = 2; ranks <= 3; ++ranks) {
        const std::string collectives = collectives_of(ranks, how);
        CHECK(collectives.size() == 5);
        CHECK(collectives.find('1') == std::string::npos);
    }
}

TEST_CASE("StepInside has the bits of stage 1 for processes that share memory, and for processes that do not") {
    for (const bool shares : {true, false}) {
        CAPTURE(shares);
        const std::uint16_t port = free_port();
        const auto reports = forked(3, [&](int rank) -> std::string {
            TcpRendezvous rendezvous({.rank = rank, .size = 3, .port = port});
            TcpBackend comm(rendezvous, {.shared_memory = shares});
            How how;
            how.training.reducer = {.gradients = GradientStorage::in_buckets, .compare_weights_every = never};
            const Trained expected = train_as(comm, how, Zero1{}), inside = train_as(comm, how, StepInside{});
            return first_difference(expected.weights, inside.weights) + std::to_string(inside.collectives.back());
        });
        for (const Report& report : reports) CHECK(report.text == (shares ? "1" : "2"));
    }
}

namespace {

/// Throws on one rank in the second step, in the middle of its shard.
struct Breaks {
    int rank;
    std::size_t step_number = 0, first = 0;
    static std::size_t state_count() { return 0; }
    void begin_step() { ++step_number; }
    void step(const OptimizerSlice<float>& s) {
        if (rank == 1 && step_number == 2 && s.first > 20000) throw std::runtime_error("the optimizer has had enough");
        for (float& w : s.value) w = static_cast<float>(step_number);
    }
};

}  // namespace

TEST_CASE("an optimizer that throws is heard of on its rank, blamed on the others, and leaves each weight old or new") {
    std::vector<float> weights[2];
    const auto seen = outcomes(2, [&](ThreadBackend comm) {
        std::vector<float>& w = weights[comm.rank()];
        w.assign(60000, 0.5f);
        std::vector<float> gradient(w.size(), 1.0f);
        ShardedOptimizer sharded(comm, {ParameterView{.name = "w", .value = buffer(w), .gradient = buffer(gradient)}}, Breaks{comm.rank()},
                                 ShardingOptions{.reducer = {.compare_weights_every = never}}, StepInside{});
        for (int step = 0; step < 2; ++step) {
            sharded.mark_ready(0);
            sharded.finish();
            sharded.step();
        }
    });
    CHECK(seen[1].text == "not a gradsync::Error: the optimizer has had enough");
    CHECK(seen[0].is(Errc::peer_failed));
    CHECK(seen[0].says("rank 1 failed in the step of its shard: the optimizer has had enough"));
    for (const std::vector<float>& w : weights) {
        std::size_t other = 0;
        for (const float x : w) other += x != 1 && x != 2;
        CHECK(other == 0);
    }
}

TEST_CASE("check_writes: the marks of a step that was discarded are forgotten") {
    const auto all = outcomes(2, [](ThreadBackend comm) {
        auto model = initial_tensors({100}, DType::f32);
        ShardedOptimizer sharded(comm, model, AdamW{}, ShardingOptions{.reducer = {.check_writes = true}}, StepInside{});
        sharded.broadcast_parameters();
        for (int s = 0; s < 3; ++s) {
            (void)sharded.begin_step(s != 2 || comm.rank() == 0);
            write_gradient(sharded.acquire_gradient(0), sharded.parameter_value(0), comm.rank(), s, 0);
            sharded.mark_ready(0);
            sharded.finish();
            if (s == 1) sharded.discard();
            else sharded.step();
        }
    });
    for (const Outcome& one : all) CHECK(one.text == "");
}

TEST_CASE("a first step that is discarded does not count in the order of readiness") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              std::vector<float> w[3], gradient[3];
              std::vector<ParameterView> parameters;
              for (std::size_t i = 0; i < 3; ++i) {
                  w[i].resize(8), gradient[i].resize(8);
                  parameters.push_back(parameter(std::to_string(i), w[i], gradient[i]));
              }
              parameters[0].requires_grad = false;
              ShardedOptimizer sharded(comm, parameters, Sgd{}, StepInside{}, ShardingOptions{.reducer = {.compare_weights_every = never}});
              const auto backward = [&](std::size_t first, std::size_t second) {
                  sharded.mark_ready(first);
                  sharded.mark_ready(second);
                  sharded.finish();
              };
              backward(2, 1);
              sharded.discard();
              backward(1, 2);
              sharded.step();
              finding.check(sharded.rebuild_buckets(), "the plan is not that of the second step");
              finding.check(sharded.plan().bucket(0).front() == 1, "1 does not come first");

              ShardedOptimizer later(comm, parameters, Sgd{}, StepInside{}, ShardingOptions{.reducer = {.compare_weights_every = never}});
              for (const bool discards : {false, true}) {  // what was recorded before a step that is discarded stays
                  for (const std::size_t i : {std::size_t{1}, std::size_t{2}}) later.mark_ready(i);
                  later.finish();
                  if (discards) later.discard();
                  else later.step();
              }
              finding.check(later.rebuild_buckets() && later.plan().bucket(0).front() == 1, "what was recorded is lost");
          }) == "");
}

TEST_CASE("a mark that is missing is found by finish(), and micro-batches between finish() and step() are refused") {
    const auto seen = outcomes(2, [](ThreadBackend comm) {
        std::vector<float> w(10), gradient(10);
        ShardedOptimizer sharded(comm, {ParameterView{.name = "w", .value = buffer(w), .gradient = buffer(gradient)}}, Sgd{}, StepInside{},
                                 ShardingOptions{.reducer = {.compare_weights_every = never}});
        sharded.mark_ready(0);
        sharded.finish();
        const bool refused = outcome_of([&] { (void)sharded.no_sync(); }).says("call step() first") &&
                             outcome_of([&] { (void)sharded.begin_step(); }).says("call step() or discard() first") &&
                             outcome_of([&] { sharded.set_weight(1); }).says("call step() or discard() first");
        if (refused) sharded.step();
        sharded.finish();
    });
    for (const Outcome& outcome : seen) CHECK(outcome.says("'w' (bucket 0, marked 0 of 1 times)"));
}

TEST_CASE("a mark between finish() and step() is refused, and the step goes on") {
    for (const int ranks : rank_counts(2))
        CHECK(findings(ranks, [](ThreadBackend comm, Finding& finding) {
                  std::vector<float> w(10, 1.0f), gradient(10, 1.0f), v(3, 1.0f), twice(3, 1.0f);
                  ShardedOptimizer sharded(comm,
                                           {ParameterView{.name = "w", .value = buffer(w), .gradient = buffer(gradient)},
                                            ParameterView{.name = "v", .value = buffer(v), .gradient = buffer(twice), .uses = 2}},
                                           Sgd{}, StepInside{}, ShardingOptions{.reducer = {.compare_weights_every = never}});
                  for (int step = 0; step < 2; ++step) {
                      const float before = w[0];
                      for (const std::size_t i : {1u, 0u, 1u}) sharded.mark_ready(i);
                      sharded.finish();
                      for (const std::size_t i : {0u, 1u, 1u}) {
                          const Outcome late = outcome_of([&] { sharded.mark_ready(i); });
                          finding.check(late.is(Errc::invalid_argument) && late.says("averaged already; call step() first"), late.text);
                      }
                      if (step == 0) sharded.step();
                      else sharded.discard();
                      finding.check((w[0] != before) == (step == 0) && w[0] == v[0], "a wrong step");
                  }
              }) == "");
}

TEST_CASE("whatever an optimizer throws comes out of step()") {
    struct Seven {
        int rank;
        static std::size_t state_count() { return 0; }
        void begin_step() {}
        void step(const OptimizerSlice<float>&) const {
            if (rank == 1) throw 7;
        }
    };
    int caught = 0;
    const auto seen = outcomes(2, [&](ThreadBackend comm) {
        std::vector<float> w(100), gradient(100);
        ShardedOptimizer sharded(comm, {ParameterView{.name = "w", .value = buffer(w), .gradient = buffer(gradient)}}, Seven{comm.rank()},
                                 ShardingOptions{.reducer = {.compare_weights_every = never}}, StepInside{});
        sharded.mark_ready(0);
        sharded.finish();
        try {
            sharded.step();
        } catch (int number) {
            caught = number;
        }
    });
    CHECK(caught == 7);
    CHECK(seen[0].is(Errc::peer_failed));
}

TEST_CASE("StepInside steps weights that are narrower than their gradients, at the end of memory that processes share") {
    const std::uint16_t port = free_port();
    const auto reports = forked(2, [&](int rank) -> std::string {
        TcpRendezvous rendezvous({.rank = rank, .size = 2, .port = port});
        TcpBackend comm(rendezvous);
        ShardedOptimizer sharded(
            comm,
            {ParameterView{.name = "w", .value = {nullptr, 1, DType::bf16}, .gradient = {nullptr, 1, DType::f32}},
             ParameterView{.name = "v", .value = {nullptr, 31, DType::bf16}, .gradient = {nullptr, 31, DType::f32}}},
            Sgd{}, StepInside{}, PerParameter{},
            ShardingOptions{.reducer = {.gradients = GradientStorage::in_buckets}, .parameters = ParameterStorage::in_buckets});
        for (int step = 0; step < 3; ++step) {
            for (const std::size_t i : {1u, 0u}) {
                for (float& g : sharded.acquire_gradient(i).as<float>()) g = 1;
                sharded.mark_ready(i);
            }
            sharded.finish();
            sharded.step();
        }
        return std::to_string(static_cast<float>(sharded.parameter_value(0).as<BFloat16>()[0])).substr(0, 5) + " " +
               std::to_string(sharded.statistics().last.collectives);
    });
    for (const Report& report : reports) CHECK(report.text == "-0.56 2");
}
