// SPDX-License-Identifier: BSL-1.0
// ctest: COMPILE_OPTIONS -O0 LIBRARIES gradsync_torch

#include <gradsync/interop/torch_reducer.hpp>
#include <gradsync/interop/torch_sharded.hpp>

#include <cmath>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <torch/autograd.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>
#include <torch/version.h>

#include <doctest/doctest.h>

#include <gradsync/overlap/overlap_forward.hpp>
#include <gradsync/shard/checkpoint.hpp>

#include "support/ranks.hpp"
#include "support/temporary_directory.hpp"

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

/// docs/guides/libtorch.md and docs/migration/pytorch.md quote this, and the test case at the end.
struct TwoBlocks : torch::nn::Module {
    torch::nn::Linear block0 = register_module("block0", torch::nn::Linear(width, width));
    torch::nn::Linear block1 = register_module("block1", torch::nn::Linear(width, 1));

    torch::Tensor forward(torch::Tensor x, auto& sharded) {
        x = sharded.run(0, [&] { return block0(x); });
        return sharded.run(1, [&] { return block1(x); });
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
        for (auto& p : parameters()) p.copy_((torch::sin(torch::arange(p.numel(), torch::kFloat) * 1.7 + p.numel()) / 3 + rank).view_as(p));
        to(dtype);
    }
    template <class Sharded>
    torch::Tensor forward(torch::Tensor x, Sharded& sharded) {
        for (std::size_t k = 0; k < 2; ++k) x = scale * sharded.run(k, [&] { return x + torch::tanh(blocks[k](norms[k](x))); });
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

    /// Names the first difference; empty if there is none.
    std::string difference(const Result& other) const {
        if (losses != other.losses) return "the losses differ";
        for (const auto& [name, w] : other.weights)
            if (!torch::equal(weights.at(name), w)) return name + " differs";
        return "";
    }
};

void step_whole(const Momentum& optimizer, const torch::Tensor& weight, std::vector<float>& state) {
    const auto count = static_cast<std::size_t>(weight.numel());
    state.resize(count);
    float* const array = state.data();
    optimizer.step(gs::OptimizerSlice<float>{
        .value = {weight.data_ptr<float>(), count}, .gradient = {weight.grad().data_ptr<float>(), count}, .state = {&array, 1}});
}

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
            for (const auto& p : net.named_parameters())
                if (p.value().requires_grad()) step_whole(optimizer, p.value(), state[p.key()]);
            if (comm.rank() == 0) result.losses.push_back(loss.item<float>());
        }
        if (comm.rank() == 0)
            for (const auto& p : net.named_parameters())
                if (p.value().requires_grad()) result.weights[p.key()] = p.value().detach().clone();
    });
    return result;
}

/// From step `first` on. The losses are of this rank, the weights and the rest of the state whole.
template <class Sharded>
Result train_sharded(ShardedNet& net, Sharded& sharded, int micro_batches = 1, int first = 0, int last = steps) {
    Result result;
    const int rank = sharded.backend().rank();
    Whole whole;
    for (int step = first; step < last; ++step) {
        torch::Tensor loss;
        for (int m = 0; m < micro_batches; ++m) {
            std::optional<gs::NoSync> guard;
            if (m + 1 < micro_batches) guard.emplace(sharded.no_sync());
            if constexpr (requires { sharded.unit_count(); }) loss = loss_of(net, sharded, rank, step, m);
            else loss = loss_of(net, whole, rank, step, m);
            loss.backward();
        }
        sharded.finish();
        sharded.step();
        if (step + 1 < last) sharded.flush();  // the weights of OverlapForward
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
        Result result = train_sharded(net, *sharded, micro_batches);
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
    for (const int ranks : {1, 2, 3, 4}) {
        INFO(ranks, " ranks");
        const Result expected = train_whole(ranks);
        CHECK(compare(ranks, expected, make_optimizer()) == "");
        CHECK(compare(ranks, expected, make_optimizer(gs::Zero2{}, gs::SizeCappedBuckets{512, 128})) == "");
        CHECK(compare(ranks, expected, make_optimizer(gs::OverlapForward{})) == "");
        CHECK(compare(ranks, expected, make_optimizer(gs::StepInside{})) == "");
        CHECK(compare(ranks, expected, make_fully()) == "");
        for (const auto& options : {gs::ShardedParametersOptions{.prefetch = 0},
                                    {.prefetch = 2, .reshard_after_forward = false},
                                    {.shard_gradients = false},
                                    {.replicate_below = width + 1}})
            CHECK(compare(ranks, expected, make_fully(options)) == "");
    }
}

TEST_CASE("micro-batches add up") {
    const Result expected = train_whole(2, 2);
    CHECK(compare(2, expected, make_optimizer(), 2) == "");
    CHECK(compare(2, expected, make_fully(gs::ShardedParametersOptions{.shard_gradients = false}), 2) == "");
}

TEST_CASE("buckets are not planned anew between micro-batches, whose gradients lie there") {
    const Result expected = train_whole(2, 2);
    CHECK(findings(2, [&](gs::ThreadBackend comm, Finding& finding) {
              ShardedNet net(comm.rank());
              Whole whole;
              gs::TorchShardedOptimizer sharded(comm, net, Momentum{}, gs::SizeCappedBuckets{512});
              for (int step = 0; step < steps; ++step) {
                  {
                      const auto guard = sharded.no_sync();
                      loss_of(net, whole, comm.rank(), step, 0).backward();
                  }
                  const auto outcome = outcome_of([&] { (void)sharded.rebuild_buckets(); });
                  finding.check(outcome.says("call finish() and step() first, or discard()"), "it is not refused: " + outcome.text);
                  loss_of(net, whole, comm.rank(), step, 1).backward();
                  sharded.finish();
                  sharded.step();
                  if (step == 0) finding.check(sharded.rebuild_buckets(), "the plan has not changed");
              }
              const auto weights = sharded.state_dict();
              for (const auto& [name, w] : expected.weights) finding.check(torch::equal(weights.at(name), w), name);
          }) == "");
}

TEST_CASE("masters of a 16-bit model start unrounded, and its weights are the rounded masters") {
    for (const auto dtype : {torch::kBFloat16, torch::kHalf}) {
        if (dtype == torch::kHalf && TORCH_VERSION_MAJOR < 2) continue;  // it has no norm of layers in f16 on the CPU
        Weights states[3];
        const auto train = [&](int which, auto&& make) {
            return findings(2, [&](gs::ThreadBackend comm, Finding& finding) {
                ShardedNet net(comm.rank());
                Weights masters;
                for (const auto& p : net.named_parameters()) masters[p.key()] = p.value().detach();
                net.to(dtype);
                auto sharded = make(comm, net);
                sharded->load_state_dict(masters);
                const auto state = sharded->state_dict();
                for (const auto& p : ShardedNet().named_parameters())
                    if (net.named_parameters()[p.key()].requires_grad()) {
                        finding.check(torch::equal(state.at(p.key()), p.value()), p.key() + " was rounded");
                        finding.check(torch::count_nonzero(state.at(p.key() + ":1")).template item<int>() == 0, "state");
                    }
                const auto trained = train_sharded(net, *sharded).weights;
                if constexpr (!requires { sharded->unit_count(); })
                    for (const auto& p : net.named_parameters())
                        if (p.value().requires_grad())
                            finding.check(torch::equal(p.value(), trained.at(p.key()).to(dtype)), p.key() + " is not its master");
                if (comm.rank() == 0) states[which] = trained;
            });
        };
        CHECK(train(0, make_optimizer()) == "");
        CHECK(train(1, make_optimizer(gs::Zero2{})) == "");
        CHECK(train(2, make_fully()) == "");
        for (const auto& [name, w] : states[0]) {
            INFO(name);
            CHECK(torch::equal(states[1].at(name), w));
            CHECK(torch::equal(states[2].at(name), w));
            CHECK((w.scalar_type() == torch::kFloat));
        }
    }
}

TEST_CASE("whole state moves from one face to another") {
    const Result expected = train_whole(2);
    Weights half;
    const gradsync_test::TemporaryDirectory directory;
    CHECK(findings(2, [&](gs::ThreadBackend comm, Finding& finding) {
              ShardedNet net;
              gs::TorchShardedOptimizer sharded(comm, net, Momentum{}, gs::Zero2{});
              const Weights everywhere = train_sharded(net, sharded, 1, 0, 2).weights;
              gs::save_shards(directory.path(), sharded);
              const Weights at_root = sharded.state_dict(1);
              finding.check(at_root.size() == (comm.rank() == 1 ? everywhere.size() : 0), "root");
              for (const auto& [name, w] : at_root) finding.check(torch::equal(w, everywhere.at(name)), name);
              if (comm.rank() == 0) half = everywhere;
          }) == "");
    CHECK(half.at("block0.weight").sizes().vec() == std::vector<std::int64_t>{width, width});
    CHECK(findings(2, [&](gs::ThreadBackend comm, Finding& finding) {
              ShardedNet net;
              for (auto& p : net.parameters())
                  if (p.requires_grad()) p.detach().zero_();
              gs::TorchFullyShard sharded(comm, net, Momentum{}, net_units);
              sharded.load_state_dict(comm.rank() == 0 ? half : Weights(), 0);
              for (const bool from_shards : {false, true}) {
                  if (from_shards) (void)gs::load_shards(directory.path(), sharded);
                  sharded.optimizer().count = 2;
                  const auto trained = train_sharded(net, sharded, 1, 2).weights;
                  for (const auto& [name, w] : expected.weights) finding.check(torch::equal(trained.at(name), w), name);
              }
          }) == "");
    const auto refused = gradsync_test::outcomes(2, [&](gs::ThreadBackend comm) {
        ShardedNet net;
        gs::TorchShardedOptimizer sharded(comm, net, Momentum{});
        sharded.load_state_dict({{"scale", torch::ones({width})}}, 1);
    });
    for (const auto& outcome : refused) CHECK_MESSAGE(outcome.says("the state lacks '"), outcome.text);
}

TEST_CASE("some parameters are replicated: a TorchReducer has them") {
    const Result expected = train_whole(3);
    CHECK(findings(3, [&](gs::ThreadBackend comm, Finding& finding) {
              ShardedNet net(comm.rank());
              std::vector<std::pair<std::string, at::Tensor>> parts[2];
              for (const auto& p : net.named_parameters()) parts[p.value().dim() < 2].emplace_back(p.key(), p.value());
              gs::TorchFullyShard sharded(comm, parts[0], Momentum{}, net_units);
              gs::TorchReducer replicated(comm.duplicate(), parts[1]);
              replicated.broadcast_parameters();
              std::map<std::string, std::vector<float>> state;
              for (int step = 0; step < steps; ++step) {
                  for (auto& [name, p] : parts[1]) p.mutable_grad().reset();
                  loss_of(net, sharded, comm.rank(), step).backward();
                  sharded.finish();
                  replicated.finish();
                  sharded.step();
                  for (const auto& [name, p] : parts[1])
                      if (p.requires_grad()) step_whole(sharded.optimizer(), p, state[name]);
              }
              Weights weights = sharded.state_dict();
              finding.check(!weights.contains("scale"), "scale is sharded");
              for (const auto& [name, p] : parts[1]) weights[name] = p;
              for (const auto& [name, w] : expected.weights) finding.check(torch::equal(weights.at(name), w), name + " differs");
          }) == "");
}

TEST_CASE("an optimizer of torch steps the shards") {
    std::vector<torch::Tensor> expected;
    gs::run_threads(2, [&](gs::ThreadBackend comm) {
        ShardedNet net;
        Whole whole;
        gs::TorchReducer sync(comm, net);
        torch::optim::SGD sgd(net.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
        for (int step = 0; step < steps; ++step) {
            sgd.zero_grad();
            loss_of(net, whole, comm.rank(), step).backward();
            sync.finish();
            sync.clip_gradients_by_norm(0.3);
            sgd.step();
        }
        if (comm.rank() == 0)
            for (const auto& p : net.parameters()) expected.push_back(p.detach().clone());
    });
    const auto train = [&](gs::ThreadBackend comm, Finding& finding, ShardedNet& net, auto& sharded, auto& in_forward) {
        torch::optim::SGD sgd(sharded.shards(), torch::optim::SGDOptions(0.1).momentum(0.9));
        for (int step = 0; step < steps; ++step) {
            loss_of(net, in_forward, comm.rank(), step).backward();
            sharded.finish();
            const double norm = step % 2 == 0 ? sharded.gradient_norm() : sharded.clip_gradients_by_norm(0.3);
            if (step % 2 == 0) sharded.clip_gradients_by_norm(0.3, norm);
            finding.check(norm > 0.3 || step > 1, "nothing to clip");
            sgd.step();
            sharded.stepped();
        }
        const auto state = sharded.state_dict();
        const auto names = net.named_parameters().keys();
        for (std::size_t i = 0; i < names.size(); ++i)
            if (state.contains(names[i])) finding.check(torch::allclose(state.at(names[i]), expected[i], 1e-6, 1e-7), names[i]);
        finding.check(state.size() == 11, "the state has more or less than the trainable parameters");
    };
    CHECK(findings(2, [&](gs::ThreadBackend comm, Finding& finding) {
              ShardedNet net;
              gs::TorchShardedOptimizer sharded(comm, net, gs::ExternalOptimizer{}, gs::Zero2{});
              Whole whole;
              train(comm, finding, net, sharded, whole);
          }) == "");
    CHECK(findings(2, [&](gs::ThreadBackend comm, Finding& finding) {
              ShardedNet net;
              gs::TorchFullyShard sharded(comm, net, gs::ExternalOptimizer{}, net_units);
              train(comm, finding, net, sharded, sharded);
          }) == "");
}

TEST_CASE("with micro_batches, shards have gradients after the last micro-batch of a step") {
    CHECK(findings(2, [&](gs::ThreadBackend comm, Finding& finding) {
              ShardedNet net;
              Whole whole;
              const gs::ReducerOptions options{.accumulation = gs::Accumulation::in_buckets, .micro_batches = 4};
              gs::TorchShardedOptimizer sharded(comm, net, gs::ExternalOptimizer{}, options, gs::Zero2{});
              for (int step = 0; step < 4; ++step) {
                  loss_of(net, whole, comm.rank(), step).backward();
                  sharded.finish();
                  for (const torch::Tensor& shard : sharded.shards())
                      finding.check(shard.numel() == 0 || shard.grad().defined() == (step % 2 == 1),
                                    "after micro-batch " + std::to_string(step));
                  if (step % 2 == 1) sharded.stepped();
              }
          }) == "");
}

TEST_CASE("an optimizer of torch that needs whole matrices steps shards of WholeParameters") {
    /// Matrices follow their gradient, made orthogonal as Muon does it; others follow it as it is.
    const auto step = [](const std::vector<torch::Tensor>& parameters) {
        const torch::NoGradGuard no_graph;
        for (torch::Tensor p : parameters) {
            if (!p.grad().defined() || p.numel() == 0) continue;
            torch::Tensor x = p.grad();
            if (p.dim() == 2) {
                x = x / (x.norm() + 1e-7);
                for (int k = 0; k < 5; ++k) x = 1.5 * x - 0.5 * x.mm(x.t()).mm(x);
            }
            p.sub_(x, 0.05);
        }
    };
    std::vector<torch::Tensor> expected;
    gs::run_threads(2, [&](gs::ThreadBackend comm) {
        ShardedNet net;
        Whole whole;
        gs::TorchReducer sync(comm, net);
        for (int s = 0; s < steps; ++s) {
            net.zero_grad();
            loss_of(net, whole, comm.rank(), s).backward();
            sync.finish();
            step(net.parameters());
        }
        if (comm.rank() == 0)
            for (const auto& p : net.parameters()) expected.push_back(p.detach().clone());
    });
    const auto train = [&](gs::ThreadBackend comm, Finding& finding, ShardedNet& net, auto& sharded, auto& in_forward) {
        for (int s = 0; s < steps; ++s) {
            loss_of(net, in_forward, comm.rank(), s).backward();
            sharded.finish();
            step(sharded.shards());
            sharded.stepped();
        }
        std::size_t matrices = 0;
        for (const torch::Tensor& shard : sharded.shards()) matrices += shard.dim() == 2;
        finding.check(matrices > 0, "this rank has no matrix");
        const auto state = sharded.state_dict();
        const auto names = net.named_parameters().keys();
        for (std::size_t i = 0; i < names.size(); ++i)
            if (state.contains(names[i])) finding.check(torch::allclose(state.at(names[i]), expected[i], 1e-5, 1e-6), names[i]);
    };
    CHECK(findings(2, [&](gs::ThreadBackend comm, Finding& finding) {
              ShardedNet net;
              gs::TorchShardedOptimizer sharded(comm, net, gs::ExternalOptimizer{}, gs::WholeParameters{});
              Whole whole;
              train(comm, finding, net, sharded, whole);
          }) == "");
    CHECK(findings(2, [&](gs::ThreadBackend comm, Finding& finding) {
              ShardedNet net;
              gs::TorchFullyShard sharded(comm, net, gs::ExternalOptimizer{}, net_units, gs::WholeParameters{});
              train(comm, finding, net, sharded, sharded);
          }) == "");
}

TEST_CASE("a call of stepped() that was forgotten is noticed, and so are weights whose memory was replaced") {
    const auto forgets = [](auto stage) {
        return gradsync_test::outcomes(2, [=](gs::ThreadBackend comm) {
            ShardedNet net;
            Whole whole;
            gs::TorchShardedOptimizer sharded(comm, net, gs::ExternalOptimizer{}, stage);
            torch::optim::SGD sgd(sharded.shards(), torch::optim::SGDOptions(0.1));
            for (int step = 0; step < 2; ++step) {
                loss_of(net, whole, comm.rank(), step).backward();
                sharded.finish();
                sgd.step();
            }
        });
    };
    for (const auto& outcomes : {forgets(gs::Zero1{}), forgets(gs::Zero2{})})  // a rank may hear of the other's exception first
        CHECK((outcomes[0].says("call stepped()") || outcomes[1].says("call stepped()")));

    auto comm = gs::ThreadBackend::make(1);
    const auto replaced = [](const std::string& name, const auto& run) {
        return outcome_of(run).says("parameter '" + name + "' has other memory than at construction");
    };
    {
        ShardedNet net;
        Whole whole;
        gs::TorchShardedOptimizer sharded(comm[0], net, Momentum{});
        net.scale.set_data(torch::ones({width}));
        CHECK(replaced("scale", [&] { loss_of(net, whole, 0, 0).backward(); }));
    }
    ShardedNet net;
    gs::TorchFullyShard sharded(comm[0], net, Momentum{}, net_units);
    net.blocks[1]->weight.set_data(torch::ones({width, width}));
    CHECK(replaced("block1.weight", [&] { loss_of(net, sharded, 0, 0); }));
}

TEST_CASE("a parameter may be empty") {
    const auto trains = [](auto make) {
        return findings(2, [&](gs::ThreadBackend comm, Finding& finding) {
            torch::nn::Module module;
            const auto empty = module.register_parameter("empty", torch::ones({0, 2})),
                       full = module.register_parameter("full", torch::ones({4}));
            auto sync = make(comm, module);
            for (int step = 0; step < 2; ++step) {
                (empty.sum() + full.sum()).backward();
                sync->finish();
                if constexpr (requires { sync->step(); }) sync->step();
                else full.detach().sub_(full.grad(), 0.1), full.mutable_grad().reset();
            }
            finding.check(full[0].item<float>() < 0.9, "not trained");
        });
    };
    CHECK(trains([](auto& comm, auto& module) { return std::make_unique<gs::TorchReducer<gs::ThreadBackend>>(comm, module); }) == "");
    CHECK(trains([](auto& comm, auto& module) {
              return std::make_unique<gs::TorchShardedOptimizer<gs::ThreadBackend, Momentum>>(comm, module, Momentum{});
          }) == "");
    CHECK(trains([](auto& comm, auto& module) {
              return std::make_unique<gs::TorchFullyShard<gs::ThreadBackend, Momentum>>(comm, module, Momentum{},
                                                                                        std::vector<std::string>{});
          }) == "");
}

TEST_CASE("a layer that one rank uses counts, and one that no rank uses is not stepped") {
    const auto check = [](auto stage) {
        return findings(3, [&](gs::ThreadBackend comm, Finding& finding) {
            torch::nn::Module module;
            for (const char* const name : {"all", "one", "none"}) module.register_parameter(name, torch::ones({8}));
            gs::TorchShardedOptimizer sharded(
                comm, module, gs::ExternalOptimizer{}, stage,
                gs::ReducerOptions{.averaging = gs::Averaging::sum, .unused = gs::UnusedParameters::find_unused});
            const auto& p = module.named_parameters();
            for (int step = 0; step < 3; ++step) {
                torch::Tensor sum = p["all"].sum();
                if (comm.rank() == 1) sum = sum + 2 * p["one"].sum();
                sum.backward();
                sharded.finish();
                finding.check(!sharded.shards()[2].grad().defined(), "a gradient of an unused layer");
                for (const at::Tensor& s : sharded.shards())
                    if (s.grad().defined()) s.detach().sub_(s.grad());
                sharded.stepped();
            }
            finding.check(torch::equal(p["all"], torch::full({8}, -8)), "all");
            finding.check(torch::equal(p["one"], torch::full({8}, -5)), "one");
            finding.check(torch::equal(p["none"], torch::ones({8})), "none");
        });
    };
    CHECK(check(gs::Zero1{}) == "");
    CHECK(check(gs::Zero2{}) == "");
}

TEST_CASE("weights of a unit have memory while it runs") {
    CHECK(findings(3, [](gs::ThreadBackend comm, Finding& finding) {
              ShardedNet net;
              torch::Tensor loss;
              {
                  gs::TorchFullyShard sharded(comm, net, Momentum{}, net_units);
                  const torch::Tensor weight = net.blocks[0]->weight;
                  finding.check(weight.data_ptr() == nullptr, "before");
                  finding.check(net.scale.data_ptr() != nullptr && net.frozen->weight.data_ptr() != nullptr, "outside of units");
                  sharded.enter(0);
                  finding.check(weight.data_ptr() != nullptr, "inside");
                  finding.check(torch::equal(weight, ShardedNet().blocks[0]->weight), "the weights of rank 0");
                  sharded.enter(1);
                  finding.check(weight.data_ptr() == nullptr, "after");
                  finding.check(outcome_of([&] { torch::linear(torch::ones({2, width}), weight); }).says("not allocated"), "use");
                  finding.check(outcome_of([&] { sharded.enter(3); }).says("unit index 3 is out of range [0, 3)"), "unit 3");
                  (void)train_sharded(net, sharded);
                  finding.check(!weight.grad().defined(), "a gradient");
                  loss = loss_of(net, sharded, 0, 0);
              }
              finding.check(net.scale.data_ptr() == nullptr, "afterwards");
          }) == "");
    gs::ShardMemory memory[2];
    for (const int ranks : {1, 4})
        gs::run_threads(ranks, [&](gs::ThreadBackend comm) {
            ShardedNet net;
            gs::TorchFullyShard sharded(comm, net, Momentum{}, net_units);
            (void)train_sharded(net, sharded);
            if (comm.rank() == 0) memory[ranks == 4] = sharded.memory();
        });
    CHECK(memory[1].master_weights < memory[0].master_weights / 2);
    CHECK(memory[1].optimizer_state < memory[0].optimizer_state / 2);
    CHECK(memory[1].gradients < memory[0].gradients);
}

TEST_CASE("units that cannot be are refused; a module has weights after its optimizer") {
    auto comm = gs::ThreadBackend::make(1);
    const auto refusal = [&](std::vector<std::string> units) {
        ShardedNet net;
        return outcome_of([&] { gs::TorchFullyShard(comm[0], net, Momentum{}, units); });
    };
    CHECK(refusal({"block0", "nothing"}).says("unit 'nothing' has no parameters"));
    CHECK(refusal({"block0", "block0"}).says("units do not nest"));

    ShardedNet net;
    Whole whole;
    torch::Tensor kept;
    {
        gs::TorchShardedOptimizer sharded(comm[0], net, Momentum{});
        kept = net.scale.detach();
        (void)train_sharded(net, sharded);
        (void)sharded.rebuild_buckets();
        const Weights weights = train_sharded(net, sharded).weights;
        CHECK(torch::equal(net.scale, weights.at("scale")));

        const torch::Tensor old = loss_of(net, whole, 0, 0);
        loss_of(net, whole, 0, 0).backward();
        sharded.finish();
        sharded.step();
        CHECK(outcome_of([&] { torch::autograd::grad({old}, {net.scale}); }).says("modified by an inplace operation"));
        const torch::Tensor before = loss_of(net, whole, 0, 0);
        sharded.load_state_dict(weights);
        CHECK(outcome_of([&] { torch::autograd::grad({before}, {net.scale}); }).says("modified by an inplace operation"));
    }
    CHECK(std::isfinite(net.scale.sum().item<float>()));
    CHECK(kept.data_ptr() == net.scale.data_ptr());  // what module.state_dict() returns in Python, too
    CHECK_FALSE(net.scale.grad().defined());
}

TEST_CASE("the documentation's examples of sharding: all stages train alike") {
    const auto loss_of = [](TwoBlocks& model, auto& in_forward, int rank) {
        const torch::Tensor x = torch::sin(torch::arange(4 * width, torch::kFloat).view({4, width}) + rank);
        return (model.forward(x, in_forward) - x.sum(1, true)).pow(2).mean();
    };
    torch::manual_seed(1);
    const auto initial = std::make_shared<TwoBlocks>();
    const auto check = [&](auto docs) {
        return findings(2, [&](gs::ThreadBackend comm, Finding& finding) {
            const auto model = std::make_shared<TwoBlocks>();
            const torch::NoGradGuard guard;
            for (std::size_t i = 0; i < 4; ++i) model->parameters()[i].copy_(initial->parameters()[i]);
            const torch::AutoGradMode on(true);
            docs(comm, finding, model);
        });
    };
    std::map<std::string, at::Tensor> expected;
    CHECK(check([&](gs::ThreadBackend comm, Finding& finding, const auto& model) {
              Whole whole;
              gs::TorchShardedOptimizer sharded(comm, *model, gs::ExternalOptimizer{}, gs::Zero2{});
              torch::optim::Adam adam(sharded.shards());  // flat f32 tensors: this rank's slices of the weights
              for (int step = 0; step < steps; ++step) {
                  loss_of(*model, whole, comm.rank()).backward();
                  sharded.finish();                     // .grad() of the shards: slices of the averages
                  sharded.clip_gradients_by_norm(1.0);  // by the norm of all gradients on all ranks
                  adam.step();
                  sharded.stepped();  // all ranks get the new weights
              }
              const auto state = sharded.state_dict();
              finding.check(state.size() == 4, "the state has not all weights");
              if (comm.rank() == 0) expected = state;
          }) == "");
    CHECK(check([&](gs::ThreadBackend comm, Finding& finding, const auto& model) {
              gs::TorchFullyShard sharded(comm, *model, gs::ExternalOptimizer{}, {"block0", "block1"});
              torch::optim::Adam adam(sharded.shards());
              for (int step = 0; step < steps; ++step) {
                  loss_of(*model, sharded, comm.rank()).backward();
                  sharded.finish();
                  sharded.clip_gradients_by_norm(1.0);
                  adam.step();
                  sharded.stepped();
              }
              for (const auto& [name, weights] : sharded.state_dict())
                  finding.check(torch::allclose(weights, expected.at(name), 1e-5, 1e-6), name);
          }) == "");
}
