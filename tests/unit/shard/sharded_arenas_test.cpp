// SPDX-License-Identifier: BSL-1.0
// Sharded training of arenas: the bits are those of tensors that lie apart, whatever lies side by side, and on which ranks.
#include <gradsync/gradsync.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "support/ranks.hpp"

namespace gs = gradsync;

namespace {

struct Momentum {
    static std::size_t state_count() { return 1; }
    void begin_step() {}
    void step(const gs::OptimizerSlice<float>& s) {
        for (std::size_t k = 0; k < s.value.size(); ++k)
            s.value[k] -= 0.1f * (s.state[0][k] = 0.9f * s.state[0][k] + s.gradient[k] * static_cast<float>(s.gradient_scale));
    }
};

struct Arenas {
    bool values, gradients;  ///< lie side by side
    bool on_rank_1 = true;
};

const std::vector<std::size_t> counts_in_arena{100, 33, 64, 128, 1, 0, 50, 16};

/// Trains with bf16 or f32 values and f32 gradients; two parameters are trained later. Returns the last rank's weights.
template <class Stage>
std::vector<float> trained(int ranks, gs::DType dtype, Arenas arenas, Stage stage) {
    constexpr std::size_t apart = 192;
    std::vector<float> weights;
    gs::run_threads(ranks, [&](gs::ThreadBackend comm) {
        const auto rank = static_cast<std::size_t>(comm.rank());
        std::vector<float> values(counts_in_arena.size() * apart), gradients(values.size());
        std::vector<gs::ParameterView> parameters;
        std::size_t value = 0, gradient = 0;
        const bool here = arenas.on_rank_1 || rank != 1;
        for (std::size_t i = 0; i < counts_in_arena.size(); ++i) {
            gs::ParameterView p{.name = "p" + std::to_string(i), .requires_grad = i != 2 && i != 6, .may_be_empty = true};
            p.value = {reinterpret_cast<std::byte*>(values.data()) + value, counts_in_arena[i], dtype};
            p.gradient = {gradients.data() + gradient, counts_in_arena[i], gs::DType::f32};
            value += arenas.values && here ? p.value.bytes() : apart * sizeof(float);
            gradient += arenas.gradients && here ? counts_in_arena[i] : apart;
            std::vector<float> initial(counts_in_arena[i]);
            for (std::size_t k = 0; k < counts_in_arena[i]; ++k) initial[k] = 1 + static_cast<float>((i * 31 + k * 7) % 13) / 16;
            gs::kernel::copy(gs::buffer(initial), p.value);
            parameters.push_back(p);
        }
        gs::ShardedOptimizer sharded(comm, parameters, Momentum{}, stage, gs::SizeCappedBuckets{600});
        sharded.broadcast_parameters();
        for (std::size_t step = 0; step < 6; ++step) {
            const std::size_t later[] = {step == 2 ? 2u : 6u};
            if (step == 2 || step == 4) sharded.unfreeze(later);
            if (step == 3 || step == 5) (void)sharded.rebuild_buckets();
            for (std::size_t at = 0; at < counts_in_arena.size(); ++at) {
                const std::size_t i = (at * 3 + step) % counts_in_arena.size();
                if (!sharded.parameters()[i].requires_grad) continue;
                const gs::BufferView view = sharded.acquire_gradient(i);
                const std::span<float> to = view.as<float>();
                gs::kernel::copy(parameters[i].value, view);
                for (std::size_t k = 0; k < to.size(); ++k) to[k] *= static_cast<float>((k + rank * 3 + i) % 5) / 8;
                sharded.mark_ready(i);
            }
            sharded.finish();
            sharded.step(0.5 / (1 + sharded.gradient_norm()));
        }
        if (comm.rank() != ranks - 1) return;
        for (const gs::ParameterView& p : parameters) {
            std::vector<float> wide(p.value.count);
            gs::kernel::copy(p.value, gs::buffer(wide));
            weights.insert(weights.end(), wide.begin(), wide.end());
        }
    });
    return weights;
}

}  // namespace

TEST_CASE("sharded arenas give the bits of separate tensors, also if parameters are trained later and buckets are planned anew") {
    for (const int ranks : gradsync_test::rank_counts(1, 3))
        for (const gs::DType dtype : {gs::DType::f32, gs::DType::bf16}) {
            const std::vector<float> apart = trained(ranks, dtype, {false, false}, gs::Zero1{});
            for (const Arenas arenas : {Arenas{true, true}, Arenas{true, false}, Arenas{false, true}, Arenas{true, true, false}}) {
                CAPTURE(ranks);
                CAPTURE(arenas.values);
                CAPTURE(arenas.gradients);
                CHECK(trained(ranks, dtype, arenas, gs::Zero1{}) == apart);
                CHECK(trained(ranks, dtype, arenas, gs::Zero2{}) == apart);
            }
        }
}

TEST_CASE("sharded arenas: weights and gradients that are one bucket have no second copy; all ranks copy where one has to") {
    for (const bool on_rank_1 : {true, false}) {
        std::vector<gs::ShardMemory> memory(2);
        gs::run_threads(2, [&](gs::ThreadBackend comm) {
            std::vector<float> values(200), gradients(200);
            const std::size_t second = on_rank_1 || comm.rank() == 0 ? 50 : 100;
            gs::ShardedOptimizer sharded(comm,
                                         {gs::ParameterView{.value = {values.data(), 50}, .gradient = {gradients.data(), 50}},
                                          gs::ParameterView{.value = {&values[second], 50}, .gradient = {&gradients[second], 50}}},
                                         Momentum{});
            memory[static_cast<std::size_t>(comm.rank())] = sharded.memory();
        });
        for (const gs::ShardMemory& m : memory) {
            CHECK((m.parameters == 0) == on_rank_1);
            CHECK((m.gradients == 0) == on_rank_1);
            CHECK(m.master_weights == 0);
        }
    }
}

TEST_CASE("sharded arenas: layers, names and all that is left are marked as with a Reducer") {
    constexpr std::size_t layers = 3;
    const auto train = [](int ranks, auto stage, bool by_index) {
        std::vector<float> result;
        gs::run_threads(ranks, [&](gs::ThreadBackend comm) {
            std::vector<float> weights(10 + layers * 24 + layers * 4 + 5, 1), gradients(weights.size());
            const gs::Packed arenas =
                gs::packed(weights, gradients, {{"embedding", {10}, 0, 2}, {"w", {24}, layers}, {"b", {4}, layers}, {"norm", {5}}});
            gs::ShardedOptimizer sharded(comm, arenas, Momentum{}, stage, gs::SizeCappedBuckets{100});
            for (int step = 0; step < 3; ++step) {
                for (std::size_t i = arenas.size(); i-- > 0;) {
                    float next = static_cast<float>(comm.rank() + step);
                    const gs::BufferView gradient = sharded.acquire_gradient(i);
                    for (float& g : gradient.as<float>()) g = next += 1;
                    for (std::uint32_t use = 0; by_index && use < arenas[i].uses; ++use) sharded.mark_ready(i);
                    if (!by_index && arenas[i].name == "norm") sharded.mark_ready("norm"), sharded.mark_ready("embedding");
                    if (!by_index && arenas[i].name == "w.1") sharded.mark_ready(arenas.layer(1));  // its b before
                }
                if (!by_index) sharded.mark_ready();
                sharded.finish();
                sharded.step();
            }
            if (comm.rank() == ranks - 1) result = weights;
        });
        return result;
    };
    for (const int ranks : gradsync_test::rank_counts()) {
        const std::vector<float> expected = train(ranks, gs::Zero1{}, true);
        CHECK(expected[0] != 1);
        CHECK(train(ranks, gs::Zero1{}, false) == expected);
        CHECK(train(ranks, gs::Zero2{}, true) == expected);
        CHECK(train(ranks, gs::Zero2{}, false) == expected);
    }
    CHECK(gradsync_test::findings(1, [](gs::ThreadBackend comm, gradsync_test::Finding& finding) {
              std::vector<float> weights(3), gradient(3);
              gs::ShardedOptimizer sharded(comm, {gs::parameter("w", weights, gradient)}, Momentum{});
              sharded.mark_ready();
              sharded.finish();
              const std::size_t first[] = {0};
              const auto refused = [&](auto&& mark) {
                  const auto outcome = gradsync_test::outcome_of(mark);
                  finding.check(outcome.is(gs::Errc::invalid_argument) && outcome.says("call step() first"), outcome.text);
              };
              refused([&] { sharded.mark_ready(); });
              refused([&] { sharded.mark_ready("w"); });
              refused([&] { sharded.mark_ready(first); });
          }) == "");
}
