// SPDX-License-Identifier: BSL-1.0
// ctest: COMPILE_OPTIONS -O0 PROCESSORS 2 LIBRARIES gradsync_torch

#include <gradsync/interop/torch_reducer.hpp>
#include <gradsync/interop/torch_sharded.hpp>

#include <cmath>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/sgd.h>

#include <doctest/doctest.h>

#include "support/ranks.hpp"

namespace gs = gradsync;
using gradsync_test::Finding;
using gradsync_test::findings;
using gradsync_test::outcome_of;

namespace {

constexpr int steps = 4;
constexpr std::int64_t width = 12;

/// No unit of a module that is not sharded.
struct Whole {
    template <class F>
    torch::Tensor run(std::size_t, F&& forward) {
        return forward();
    }
};

/// Two blocks, a layer that both use, a scale outside of all submodules, and a frozen layer. The ranks begin with different weights.
struct ShardedNet : torch::nn::Module {
    explicit ShardedNet(int rank = 0, torch::Dtype dtype = torch::kFloat) {
        for (int k = 0; k < 2; ++k) {
            const std::string name = "block" + std::to_string(k);
            norms.push_back(register_module("norm" + std::to_string(k), torch::nn::LayerNorm(torch::nn::LayerNormOptions({width}))));
            blocks.push_back(register_module(name, torch::nn::Linear(width, width)));
        }
        frozen = register_module("frozen", torch::nn::Linear(width, width));
        frozen->weight.set_requires_grad(false);
        frozen->bias.set_requires_grad(false);
        head = register_module("head", torch::nn::Linear(width, 3));
        scale = register_parameter("scale", torch::ones({width}));
        const torch::NoGradGuard guard;
        for (auto& p : parameters())
            p.copy_((torch::sin(torch::arange(p.numel(), torch::kFloat) * 1.7 + p.numel()) / 3 + rank).view_as(p));
        to(dtype);
    }
    template <class Sharded>
    torch::Tensor forward(torch::Tensor x, Sharded& sharded) {
        for (std::size_t k = 0; k < 2; ++k)
            x = scale * sharded.run(k, [&] { return x + torch::tanh(blocks[k](norms[k](x))); });
        x = sharded.run(0, [&] { return torch::tanh(blocks[0](x)); });  // once more
        return sharded.run(2, [&] { return head(frozen(x)); });
    }
    std::vector<torch::nn::LayerNorm> norms;
    std::vector<torch::nn::Linear> blocks;
    torch::nn::Linear frozen{nullptr}, head{nullptr};
    torch::Tensor scale;
};
const std::vector<std::string> net_units = {"block0", "block1", "head"};

/// The loss of a step's micro-batch on one rank: sequences, so that weights are used through views.
template <class Sharded>
torch::Tensor loss_of(ShardedNet& net, Sharded& sharded, int rank, int step, int micro_batch = 0) {
    const auto x = torch::sin(torch::arange(2 * 3 * width, torch::kFloat) * 0.7 + 5 * rank + 0.3 * step + 11 * micro_batch);
    const auto y = net.forward(x.view({2, 3, width}).to(net.head->weight.dtype()), sharded);
    return (y.to(torch::kFloat) - 0.5).square().mean();
}

struct Momentum {
    std::size_t state_count() const { return 1; }
    void begin_step() { ++count; }
    template <class T>
    void step(const gs::OptimizerSlice<T>& s) const {
        for (std::size_t k = 0; k < s.value.size(); ++k) {
            T& m = s.state[0][k];
            m = T(0.9) * m + s.gradient[k] * T(s.gradient_scale);
            s.value[k] -= T(count % 2 == 0 ? 0.05 : 0.1) * m;
        }
    }
    int count = 0;
};

using Weights = std::map<std::string, torch::Tensor>;

struct Result {
    std::vector<float> losses;
    Weights weights;

    /// What differs, or "".
    std::string difference(const Result& other) const {
        if (losses != other.losses) return "the losses differ";
        for (const auto& [name, w] : other.weights)
            if (!torch::equal(weights.at(name), w)) return name + " differs";
        return "";
    }
};

/// A TorchReducer and the same optimizer on whole tensors.
Result train_whole(int ranks, int micro_batches = 1) {
    Result result;
    gs::run_threads(ranks, [&](gs::ThreadBackend comm) {
        ShardedNet net(comm.rank());
        Whole whole;
        gs::TorchReducer sync(comm, net);
        sync.broadcast_parameters();
        Momentum optimizer;
        std::map<std::string, std::vector<float>> state;
        for (int step = 0; step < steps; ++step) {
            for (auto& p : net.parameters()) p.mutable_grad().reset();
            torch::Tensor loss;
            for (int m = 0; m < micro_batches; ++m) {
                std::optional<gs::NoSync> guard;
                if (m + 1 < micro_batches) guard.emplace(sync.no_sync());
                loss = loss_of(net, whole, comm.rank(), step, m);
                loss.backward();
            }
            sync.finish();
            optimizer.begin_step();
            for (const auto& p : net.named_parameters()) {
                if (!p.value().requires_grad()) continue;
                const auto count = static_cast<std::size_t>(p.value().numel());
                auto& m = state[p.key()];
                m.resize(count);
                float* const array = m.data();
                optimizer.step(gs::OptimizerSlice<float>{.value = {p.value().data_ptr<float>(), count},
                                                         .gradient = {p.value().grad().data_ptr<float>(), count},
                                                         .state = {&array, 1}});
            }
            if (comm.rank() == 0) result.losses.push_back(loss.item<float>());
        }
        if (comm.rank() == 0)
            for (const auto& p : net.named_parameters())
                if (p.value().requires_grad()) result.weights[p.key()] = p.value().detach().clone();
    });
    return result;
}

template <class Sharded>
Result train_sharded(ShardedNet& net, Sharded& sharded, int first = 0, int micro_batches = 1, bool each_reduced = false) {
    Result result;
    const int rank = sharded.backend().rank();
    Whole whole;
    for (int step = first; step < steps; ++step) {
        torch::Tensor loss;
        for (int m = 0; m < micro_batches; ++m) {
            std::optional<gs::NoSync> guard;
            if (!each_reduced && m + 1 < micro_batches) guard.emplace(sharded.no_sync());
            if constexpr (requires { sharded.unit_count(); }) loss = loss_of(net, sharded, rank, step, m);
            else loss = loss_of(net, whole, rank, step, m);
            loss.backward();
            if (each_reduced) sharded.finish();
        }
        if (!each_reduced) sharded.finish();
        if constexpr (requires { sharded.step(); }) sharded.step();
        result.losses.push_back(loss.item<float>());
    }
    result.weights = sharded.state_dict();
    return result;
}

/// `make(comm, net)` returns a sharded face, and its training must equal `expected`; the losses are rank 0's.
template <class Make>
std::string compare(int ranks, const Result& expected, Make&& make, int micro_batches = 1) {
    return findings(ranks, [&](gs::ThreadBackend comm, Finding& finding) {
        ShardedNet net(comm.rank());
        auto sharded = make(comm, net);
        Result result = train_sharded(net, *sharded, 0, micro_batches);
        if (comm.rank() != 0) result.losses = expected.losses;
        const std::string difference = result.difference(expected);
        finding.check(difference.empty(), difference);
    });
}

template <class... Arguments>
auto make_optimizer(Arguments... arguments) {
    return [=](gs::ThreadBackend comm, ShardedNet& net) {
        using Sharded = decltype(gs::TorchShardedOptimizer(comm, net, Momentum{}, arguments...));
        return std::make_unique<Sharded>(comm, net, Momentum{}, arguments...);
    };
}
template <class... Arguments>
auto make_fully(Arguments... arguments) {
    return [=](gs::ThreadBackend comm, ShardedNet& net) {
        using Sharded = decltype(gs::TorchFullyShard(comm, net, Momentum{}, net_units, arguments...));
        return std::make_unique<Sharded>(comm, net, Momentum{}, net_units, arguments...);
    };
}

}  // namespace

TEST_CASE("losses and weights of sharded trainings have the bits of whole ones") {
    torch::set_num_threads(1);
    for (const int ranks : {1, 2, 3}) {
        INFO(ranks, " ranks");
        const Result expected = train_whole(ranks);
        CHECK(compare(ranks, expected, make_optimizer()) == "");
        CHECK(compare(ranks, expected, make_optimizer(gs::Zero2{}, gs::SizeCappedBuckets{512, 128})) == "");
        CHECK(compare(ranks, expected, make_fully()) == "");
        for (const auto& options : {gs::ShardedParametersOptions{.prefetch = 0}, {.prefetch = 2, .reshard_after_forward = false},
                                    {.shard_gradients = false}, {.replicate_below = width + 1}})
            CHECK(compare(ranks, expected, make_fully(options)) == "");
    }
}

TEST_CASE("micro-batches add up") {
    const Result expected = train_whole(2, 2);
    CHECK(compare(2, expected, make_optimizer(), 2) == "");
    CHECK(compare(2, expected, make_fully(gs::ShardedParametersOptions{.shard_gradients = false}), 2) == "");
}
