// SPDX-License-Identifier: BSL-1.0
// libtorch's tensors and modules. One translation unit for all headers: libtorch's own take 15 s to compile.
// ctest: COMPILE_OPTIONS -O0 LIBRARIES gradsync_torch

#include <gradsync/interop/torch_memory.hpp>
#include <gradsync/interop/torch_module.hpp>
#include <gradsync/interop/torch_reducer.hpp>
#include <gradsync/interop/torch_tensor.hpp>

#include <optional>
#include <string>
#include <vector>

#include <torch/autograd.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <doctest/doctest.h>

#include <gradsync/backend/tcp.hpp>
#include <gradsync/backend/thread_backend.hpp>
#include <gradsync/bucket/per_parameter.hpp>

#include "support/forked.hpp"
#include "support/ports.hpp"
#include "support/ranks.hpp"

namespace gs = gradsync;
using gradsync_test::Finding;
using gradsync_test::findings;
using gradsync_test::Outcome;
using gradsync_test::outcome_of;

namespace {

/// A layer that stands in two places, one that only some batches go through, and a frozen one.
struct Net : torch::nn::Module {
    Net() {
        first = register_module("first", torch::nn::Linear(torch::nn::LinearOptions(6, 6)));
        register_module("again", first);
        sometimes = register_module("sometimes", torch::nn::Linear(6, 6));
        frozen = register_module("frozen", torch::nn::Linear(6, 6));
        for (auto& p : frozen->parameters()) p.set_requires_grad(false);
        last = register_module("last", torch::nn::Linear(6, 1));
        to(torch::kDouble);
        const torch::NoGradGuard guard;
        for (auto& p : parameters()) p.copy_(torch::sin(torch::arange(p.numel(), torch::kDouble) + p.numel()).view_as(p) / 2);
    }
    torch::Tensor forward(torch::Tensor x, bool through_all) {
        x = torch::tanh(first(torch::tanh(first(x))));
        if (through_all) x = sometimes(x);
        return last(frozen(x)).squeeze(1);
    }
    torch::nn::Linear first{nullptr}, sometimes{nullptr}, frozen{nullptr}, last{nullptr};
};

struct Batch {
    torch::Tensor x, y;
};

/// The same on every rank: `size` parts of 4 rows.
Batch joint_batch(int step, int size) {
    const auto i = torch::arange(4 * size * 6, torch::kDouble).reshape({4 * size, 6});
    const auto x = torch::sin(i * 0.7 + step);
    return {x, x.sum(1)};
}

std::vector<torch::Tensor> weights_of(const torch::nn::Module& module) {
    std::vector<torch::Tensor> result;
    for (const auto& p : module.parameters()) result.push_back(p.detach().clone());
    return result;
}

void descend(const Net& net) {
    const torch::NoGradGuard guard;
    for (auto& p : net.parameters())
        if (p.grad().defined()) p.sub_(p.grad(), 0.05);
}

void forget_gradients(Net& net, bool set_to_none) {
    for (auto& p : net.parameters()) {
        if (!p.grad().defined()) continue;
        if (set_to_none) p.mutable_grad().reset();
        else p.mutable_grad().zero_();
    }
}

constexpr int steps_in_all = 5;
constexpr int ranks = 2;

/// One process on the joint batch: what the ranks together are to come to. In odd steps the first rank's part skips a layer.
std::vector<torch::Tensor> train_alone() {
    Net net;
    for (int step = 0; step < steps_in_all; ++step) {
        const Batch batch = joint_batch(step, ranks);
        torch::Tensor loss = torch::zeros({}, torch::kDouble);
        for (int r = 0; r < ranks; ++r) {
            const auto rows = torch::indexing::Slice(4 * r, 4 * (r + 1));
            const bool through_all = !(step % 2 == 1 && r == 0);
            loss = loss + torch::mse_loss(net.forward(batch.x.index({rows}), through_all), batch.y.index({rows})) / ranks;
        }
        forget_gradients(net, false);
        loss.backward();
        descend(net);
    }
    return weights_of(net);
}

using Named = std::vector<std::pair<std::string, at::Tensor>>;

at::Tensor trainable(std::vector<std::int64_t> sizes) { return torch::ones(sizes, torch::requires_grad()); }

/// The identity of its first argument. Its backward makes no gradient for the second.
struct Ignore : torch::autograd::Function<Ignore> {
    static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x, const torch::Tensor&) { return x * 1; }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list gradients) {
        return {gradients[0], {}};
    }
};

}  // namespace

// First, because children of a process whose autograd has threads have no autograd.
TEST_CASE("processes average gradients where autograd puts them: in memory that they share") {
    torch::set_num_threads(1);
    constexpr std::int64_t width = 256;
    for (const int size : {1, 2, 3, 4})
        for (const auto storage : {gs::GradientStorage::automatic, gs::GradientStorage::in_buckets}) {
            const std::uint16_t port = gradsync_test::free_port();
            const auto reports = gradsync_test::forked(size, [&](int rank) -> std::string {
                gs::TcpRendezvous meeting({.rank = rank, .size = size, .port = port});
                gs::TcpBackend comm(meeting);
                const auto weights = [&](double x) {
                    return torch::full({width, width}, x, torch::dtype(torch::kDouble).requires_grad(true));
                };
                const std::vector<std::pair<std::string, at::Tensor>> parameters{
                    {"a", weights(0.5)},
                    {"net.b", weights(0.25)},
                    {"bias", torch::zeros({width}, torch::dtype(torch::kDouble).requires_grad(true))}};
                std::optional<gs::TorchReducer<gs::TcpBackend>> made(std::in_place, comm, parameters,
                                                                     gs::ReducerOptions{.gradients = storage});
                auto& sync = *made;
                sync.broadcast_parameters();
                const auto& [a, b, bias] = std::tie(parameters[0].second, parameters[1].second, parameters[2].second);
                const auto loss = [&](int r, int step) {
                    const auto x = torch::sin(torch::arange(4 * width, torch::kDouble).reshape({4, width}) * (r + 1) + step);
                    return torch::tanh(x.mm(a) * 0.01 + bias).mm(b).sum();
                };
                for (int step = 0; step < 6; ++step) {
                    std::vector<torch::Tensor> expected;
                    for (int r = 0; r < size; ++r) {
                        const auto gradients = torch::autograd::grad({loss(r, step)}, {a, b, bias});
                        for (std::size_t i = 0; i < 3; ++i)
                            if (r == 0) expected.push_back(gradients[i] / size);
                            else expected[i] += gradients[i] / size;
                    }
                    for (const auto& p : parameters)
                        if (step < 4) p.second.mutable_grad().reset();
                        else p.second.mutable_grad().zero_();
                    loss(rank, step).backward();
                    sync.finish();
                    for (std::size_t i = 0; i < 3; ++i)
                        if (!torch::allclose(parameters[i].second.grad(), expected[i], 1e-12, 1e-14))
                            return "step " + std::to_string(step) + ": the gradient of " + parameters[i].first + " is no mean";
                    if (size > 1 && !(comm.shares(gs::buffer(a.grad())) && comm.shares(gs::buffer(b.grad()))))
                        return "step " + std::to_string(step) + ": a gradient is not shared";
                }
                if (storage != gs::GradientStorage::automatic) return "";
                torch::Tensor kept = a.grad();
                const torch::Tensor copy = kept.clone();
                a.mutable_grad().reset();
                loss(rank, 7).backward();  // in other memory: `kept` lives
                sync.finish();
                if (!torch::equal(kept, copy)) return "memory of a tensor that lives was used again";
                const auto is_shared = [&] {  // the memory of a result that is as large as a gradient
                    const auto other = weights(1);
                    (other * 2).sum().backward();
                    return comm.shares(gs::buffer(other.grad()));
                };
                kept.reset();
                if (size == 1) return "";
                if (!is_shared()) return "memory for gradients is not shared";
                if (gradsync_test::forked(1, [&](int) -> std::string { return is_shared() ? "shared" : ""; })[0].text != "")
                    return "a forked child writes into the ranks' memory";
                made.reset();
                return is_shared() ? "memory is shared without a TorchReducer" : "";
            });
            for (const auto& report : reports) CHECK(report.text == "");
        }
}

TEST_CASE("a module's backward marks its gradients, wherever they live and however they are cleared") {
    torch::set_num_threads(1);
    const auto expected = train_alone();
    for (const auto storage : {gs::GradientStorage::in_buckets, gs::GradientStorage::borrowed})
        for (const bool set_to_none : {false, true}) {
            INFO("in_buckets ", storage == gs::GradientStorage::in_buckets, ", set_to_none ", set_to_none);
            CHECK(findings(ranks, [&](gs::ThreadBackend comm, Finding& finding) {
                      const int rank = comm.rank();
                      Net net;
                      gs::TorchReducer sync(comm, net, {.gradients = storage, .unused = gs::UnusedParameters::find_unused},
                                            gs::SizeCappedBuckets{512, 128});
                      finding.check(sync.parameters().size() == 8, "tied weights count twice: " + std::to_string(sync.parameters().size()));
                      sync.broadcast_parameters();
                      for (int step = 0; step < steps_in_all; ++step) {
                          const Batch batch = joint_batch(step, ranks);
                          const auto rows = torch::indexing::Slice(4 * rank, 4 * (rank + 1));
                          forget_gradients(net, set_to_none);
                          torch::mse_loss(net.forward(batch.x.index({rows}), !(step % 2 == 1 && rank == 0)), batch.y.index({rows}))
                              .backward();
                          sync.finish();
                          descend(net);
                          if (step == 0) (void)sync.rebuild_buckets();
                      }
                      const auto weights = weights_of(net);
                      for (std::size_t i = 0; i < weights.size(); ++i)
                          finding.check(torch::allclose(weights[i], expected[i], 1e-12, 1e-14),
                                        "parameter " + std::to_string(i) + " differs");
                      finding.check(!net.frozen->weight.grad().defined(), "a frozen parameter got a gradient");
                  }) == "");
        }
}

TEST_CASE("micro-batches under no_sync add up") {
    CHECK(findings(2, [](gs::ThreadBackend comm, Finding& finding) {
              Net net, alone;
              gs::TorchReducer sync(comm, net, {.averaging = gs::Averaging::sum});
              const Batch batch = joint_batch(0, 4);
              const auto loss = [&](Net& n, int part) {
                  const auto rows = torch::indexing::Slice(4 * part, 4 * (part + 1));
                  return torch::mse_loss(n.forward(batch.x.index({rows}), true), batch.y.index({rows}));
              };
              {
                  const auto guard = sync.no_sync();
                  loss(net, comm.rank()).backward();
              }
              loss(net, 2 + comm.rank()).backward();
              sync.finish();
              for (int part = 0; part < 4; ++part) loss(alone, part).backward();
              for (std::size_t i = 0; i < net.parameters().size(); ++i)
                  if (alone.parameters()[i].grad().defined())
                      finding.check(torch::allclose(net.parameters()[i].grad(), alone.parameters()[i].grad(), 1e-12, 1e-14),
                                    "gradient " + std::to_string(i));
          }) == "");
}

TEST_CASE("micro-batches that the reducer adds up are not added up by autograd too") {
    for (const int size : {1, 2, 3, 4})
        for (const bool in_buckets : {false, true}) {
            gs::ReducerOptions options{.accumulation = gs::Accumulation::in_buckets};
            if (in_buckets) options.gradients = gs::GradientStorage::in_buckets, options.micro_batches = 2 * static_cast<std::size_t>(size);
            INFO(size, " ranks, in_buckets ", in_buckets);
            CHECK(findings(size, [&](gs::ThreadBackend comm, Finding& finding) {
                      const Named parameters{{"a", trainable({5})}, {"b", trainable({3})}};
                      const at::Tensor &a = parameters[0].second, &b = parameters[1].second;
                      gs::TorchReducer sync(comm, parameters, options);
                      for (int step = 0; step < 3; ++step) {
                          for (const auto& p : parameters)
                              if (step == 1) p.second.mutable_grad().reset();
                              else p.second.mutable_grad().zero_();
                          {
                              const auto guard = sync.no_sync();
                              (a.sum() + b.sum() * 2).backward();
                          }
                          if (step == 0) (void)sync.rebuild_buckets();
                          (a.sum() * 10 + b.sum() * 20).backward();
                          sync.finish();
                          const double parts = in_buckets ? 2 : 1;
                          finding.check(torch::equal(a.grad(), torch::full({5}, 11 / parts)), "a in step " + std::to_string(step));
                          finding.check(torch::equal(b.grad(), torch::full({3}, 22 / parts)), "b in step " + std::to_string(step));
                      }
                  }) == "");
        }
}

TEST_CASE("gradients that were side by side in one memory are averaged where autograd puts the next ones") {
    for (const int size : {1, 2, 3, 4})
        CHECK(findings(size, [](gs::ThreadBackend comm, Finding& finding) {
                  const Named parameters{{"a", trainable({4, 4})}, {"b", trainable({16})}, {"c", trainable({16})}};
                  const auto memory = torch::zeros({48});
                  for (int i = 0; i < 3; ++i)
                      parameters[i].second.mutable_grad() = memory.narrow(0, 16 * i, 16).view_as(parameters[i].second);
                  gs::TorchReducer sync(comm, parameters);
                  for (int step = 0; step < 3; ++step) {
                      torch::Tensor sum = torch::zeros({});
                      for (int i = 0; i < 3; ++i) {
                          if (step == 1) parameters[i].second.mutable_grad().zero_();
                          else parameters[i].second.mutable_grad().reset();
                          sum = sum + parameters[i].second.sum() * (2 * comm.rank() + i);
                      }
                      sum.backward();
                      sync.finish();
                      for (int i = 0; i < 3; ++i)
                          finding.check(torch::equal(parameters[i].second.grad().flatten(), torch::full({16}, comm.size() - 1.0 + i)),
                                        parameters[i].first + " in step " + std::to_string(step));
                  }
              }) == "");
}

TEST_CASE("a gradient whose memory others still read, or have for a gradient, too, is averaged elsewhere") {
    for (const auto averaging : {gs::Averaging::mean, gs::Averaging::sum})
        for (const int size : {1, 2, 3})
            CHECK(findings(size, [&](gs::ThreadBackend comm, Finding& finding) {
                      const Named parameters{{"a", trainable({64, 64})}, {"b", trainable({64, 64})}, {"place", trainable({64, 64})}};
                      const auto& [a, b, place] = std::tie(parameters[0].second, parameters[1].second, parameters[2].second);
                      gs::TorchReducer sync(comm, parameters, gs::ReducerOptions{.averaging = averaging});
                      const auto numbers = torch::arange(64.0 * 64).view({64, 64});
                      torch::Tensor all = torch::zeros({64, 64});
                      for (int r = 0; r < size; ++r) all += numbers + r;
                      if (averaging == gs::Averaging::mean) all /= size;
                      for (int step = 0; step < 3; ++step) {
                          for (const auto& [name, p] : parameters) p.mutable_grad().reset();
                          const auto sum = (a.view(-1) + b.view(-1)).view({1, 64, 64}) * 1 + place.unsqueeze(0);
                          (sum.squeeze(0) * (numbers + comm.rank())).sum().backward();
                          sync.finish();
                          for (const auto& [name, p] : parameters)
                              finding.check(torch::allclose(p.grad(), all), name + " in step " + std::to_string(step));
                      }
                  }) == "");
}

TEST_CASE("most gradients are averaged where autograd puts them: nobody else has their memory") {
    const auto other = torch::ones({64, 64}, torch::requires_grad()), x = torch::ones({8, 64});
    const auto is_alone = [](auto&& loss_of) {
        const auto p = trainable({64, 64});
        bool alone = false;
        const gs::detail::TorchHooks hooks(
            {p}, [&](std::size_t, const at::Tensor& produced) { alone = gs::detail::is_alone(p.grad(), produced); });
        loss_of(p).backward();
        return alone;
    };
    CHECK(is_alone([&](const at::Tensor& p) { return torch::linear(x, p).pow(2).sum(); }));
    CHECK(is_alone([&](const at::Tensor& p) { return x.mm(p).pow(2).sum(); }));
    CHECK(is_alone([&](const at::Tensor& p) { return (p * other).sum(); }));
    CHECK(is_alone([&](const at::Tensor& p) { return p.view(-1).pow(2).sum(); }));
    CHECK(is_alone([&](const at::Tensor& p) { return p.sum(); }));
    CHECK(!is_alone([&](const at::Tensor& p) { return (p.view(-1) + other.view(-1)).pow(2).sum(); }));
    CHECK(is_alone([&](const at::Tensor& p) { return (other + p).pow(2).sum(); }));  // autograd has copied it
}

TEST_CASE("a gradient that was there has the strides of its parameter afterwards, and one that a backward does not make is zero") {
    for (const auto storage : {gs::GradientStorage::in_buckets, gs::GradientStorage::borrowed})
        for (const int size : {1, 2, 3, 4})
            CHECK(findings(size, [&](gs::ThreadBackend comm, Finding& finding) {
                      const auto weight = torch::ones({3, 2}).t().requires_grad_();
                      const Named parameters{{"weight", weight}, {"other", trainable({2, 3})}};
                      if (comm.rank() == 0) weight.mutable_grad() = torch::zeros({2, 3});
                      gs::TorchReducer sync(comm, parameters, {.gradients = storage});
                      const auto factors = torch::arange(6.0f).view({2, 3}), x = weight * factors;
                      for (const auto& p : parameters) p.second.mutable_grad().zero_();
                      if (comm.rank() == 0) parameters[1].second.mutable_grad().reset();
                      (comm.rank() == 0 ? Ignore::apply(x, parameters[1].second) : x + parameters[1].second * 12).sum().backward();
                      sync.finish();
                      finding.check(torch::allclose(weight.grad(), factors), "weight");
                      finding.check(torch::allclose(parameters[1].second.grad(), torch::full({2, 3}, 12 - 12.0 / comm.size())), "other");
                  }) == "");
}

TEST_CASE("a weight whose memory was replaced is refused, and one that was unfrozen") {
    auto comm = gs::ThreadBackend::make(1);
    {
        Net net;
        gs::TorchReducer sync(comm[0], net);
        for (auto& p : net.frozen->parameters()) p.set_requires_grad(true);
        net.forward(joint_batch(0, 1).x, true).sum().backward();
        CHECK(outcome_of([&] { sync.finish(); }).says("'frozen.weight' was frozen"));
    }
    const Named parameters{{"a", trainable({4})}};
    gs::TorchReducer sync(comm[0], parameters);
    sync.broadcast_parameters();
    parameters[0].second.set_data(torch::zeros({4}));
    CHECK(outcome_of([&] { sync.broadcast_parameters(); }).says("parameter 'a' has other memory than at construction"));
    parameters[0].second.sum().backward();
    CHECK(outcome_of([&] { sync.finish(); }).says("parameter 'a' has other memory than at construction"));
}

TEST_CASE("a gradient that did not come is named; the exception of a hook comes out of backward()") {
    const auto missing = gradsync_test::outcomes(2, [](gs::ThreadBackend comm) {
        Net net;
        gs::TorchReducer sync(comm, net);
        net.forward(joint_batch(0, 1).x, false).sum().backward();
        sync.finish();
    });
    CHECK(missing[0].says("'sometimes.weight'"));
    CHECK(missing[1].says("sometimes"));

    const auto twice = gradsync_test::outcomes(1, [](gs::ThreadBackend comm) {
        Net net;
        gs::TorchReducer sync(comm, net);
        for (int i = 0; i < 2; ++i) net.forward(joint_batch(0, 1).x, true).sum().backward();
    });
    CHECK(twice[0].is(gs::Errc::gradient_marked_twice));
}

TEST_CASE("nothing of it is left in the module afterwards, but gradients that are not in buckets") {
    Net net;
    auto comm = gs::ThreadBackend::make(1);
    for (const auto unused : {gs::UnusedParameters::error, gs::UnusedParameters::find_unused}) {
        torch::Tensor kept;
        {
            gs::TorchReducer sync(comm[0], net, gs::SizeCappedBuckets{512}, gs::ReducerOptions{.unused = unused});
            kept = net.first->weight.grad();
            net.forward(joint_batch(0, 1).x, true).sum().backward();
            sync.finish();
            CHECK(net.first->weight.grad().defined());
            (void)sync.rebuild_buckets();
            CHECK(kept.data_ptr() == net.first->weight.grad().data_ptr());
        }
        CHECK((kept.storage().data() == nullptr) == (unused == gs::UnusedParameters::find_unused));
        CHECK(net.first->weight.grad().defined() == (unused == gs::UnusedParameters::error));
    }
    for (int i = 0; i < 2; ++i) net.forward(joint_batch(0, 1).x, true).sum().backward();  // nobody counts the marks
    CHECK(net.first->weight.grad().defined());
}

TEST_CASE("a tensor's type, place and shape are known at run time") {
    const auto tensor = torch::zeros({2, 3, 4, 5}, torch::kHalf).contiguous(at::MemoryFormat::ChannelsLast);
    CHECK(gs::buffer(tensor) == gs::BufferView{tensor.data_ptr(), 120, gs::DType::f16});
    CHECK(gs::parameter("t", tensor, tensor).shape == std::vector<std::size_t>{2, 3, 4, 5});
    const std::pair<at::ScalarType, gs::DType> types[] = {
        {at::kChar, gs::DType::i8},  {at::kByte, gs::DType::u8},       {at::kInt, gs::DType::i32},   {at::kLong, gs::DType::i64},
        {at::kHalf, gs::DType::f16}, {at::kBFloat16, gs::DType::bf16}, {at::kFloat, gs::DType::f32}, {at::kDouble, gs::DType::f64}};
    for (const auto& [theirs, ours] : types) CHECK(gs::buffer(torch::zeros({3}, theirs)).dtype == ours);
    CHECK(gs::buffer(torch::zeros({2, 3}).t()).count == 6);
    CHECK(gs::dtype_of<c10::BFloat16> == gs::DType::bf16);
}

TEST_CASE("what cannot be synchronised is refused in words") {
    const auto text = [](const torch::Tensor& t) {
        const Outcome outcome = outcome_of([&] { (void)gs::buffer(t); });
        return outcome.is(gs::Errc::invalid_argument) ? outcome.text : "not refused, or not so: " + outcome.text;
    };
    const auto whole = torch::zeros({4, 4});
    CHECK(text(whole.slice(1, 0, 2)).starts_with("a tensor of Float [4, 2] on cpu is not contiguous"));
    CHECK(text(torch::zeros({1, 3}).expand({2, 3})).starts_with("a tensor of Float [2, 3] on cpu is not contiguous"));
    CHECK(text(torch::zeros({2}, torch::kComplexFloat)).starts_with("a tensor of ComplexFloat [2] on cpu cannot be synchronised"));
    CHECK(text(torch::zeros({2, 2}).to_sparse()).starts_with("a tensor of Float [2, 2] on cpu is sparse"));
    CHECK(text(torch::Tensor()).starts_with("an undefined tensor"));
    CHECK(text(torch::zeros({2}, torch::device(torch::kMeta))).find("on a device that is not supported") != std::string::npos);

    auto comm = gs::ThreadBackend::make(1);
    torch::nn::Module module;
    module.register_parameter("odd", torch::zeros({4, 4}).slice(1, 0, 2));
    const Outcome outcome = outcome_of([&] { gs::TorchReducer(comm[0], module); });
    CHECK(outcome.says("parameter 'odd': a tensor of Float [4, 2]"));
    CHECK(outcome_of([&] {
              gs::TorchReducer(comm[0], Named{{"twice", trainable({2}) * 2}});
          }).says("'twice': autograd leaves no gradient"));
}

TEST_CASE("sparse gradients become dense") {
    CHECK(findings(2, [](gs::ThreadBackend comm, Finding& finding) {
              torch::nn::Embedding embedding(torch::nn::EmbeddingOptions(4, 1).sparse(true));
              gs::TorchReducer sync(comm, *embedding);
              sync.broadcast_parameters();
              for (const bool set_to_none : {false, true}) {
                  if (set_to_none) embedding->weight.mutable_grad().reset();
                  else if (embedding->weight.grad().defined()) embedding->weight.mutable_grad().zero_();
                  embedding(torch::tensor({0, comm.rank(), comm.rank()})).sum().backward();
                  sync.finish();
                  finding.check(torch::equal(embedding->weight.grad().flatten(), torch::tensor({2.0f, 1.0f, 0.0f, 0.0f})),
                                set_to_none ? "stolen" : "in place");
              }
          }) == "");
}

TEST_CASE("buffers: of rank 0, or floating ones averaged") {
    for (const int size : {1, 2, 3, 4})
        CHECK(findings(size, [](gs::ThreadBackend comm, Finding& finding) {
                  torch::nn::Module module;
                  module.register_parameter("weight", torch::zeros({2}));
                  const auto mean = module.register_buffer("mean", torch::full({3}, 1.0 * comm.rank())),
                             count = module.register_buffer("count", torch::full({}, comm.rank() + 1, torch::kLong)),
                             mask = module.register_buffer("mask", torch::full({3}, comm.rank() == 0, torch::kBool));
                  gs::TorchReducer sync(comm, module);
                  sync.average_buffers();
                  finding.check(torch::allclose(mean, torch::full({3}, 0.5 * (comm.size() - 1))), "not the mean");
                  finding.check(count.item<std::int64_t>() == 1, "not rank 0's count");
                  finding.check(mask.all().item<bool>(), "not rank 0's mask");
                  mask.fill_(comm.rank() == comm.size() - 1);
                  mean.fill_(comm.rank());
                  sync.broadcast_buffers(comm.size() - 1);
                  finding.check(mean.sum().item<float>() == 3.0f * static_cast<float>(comm.size() - 1), "not the last rank's");
                  finding.check(mask.all().item<bool>(), "not the last rank's mask");
              }) == "");
}

TEST_CASE("tensors serve without a module, too, as parameters with gradients of their own") {
    CHECK(findings(2, [](gs::ThreadBackend comm, Finding& finding) {
              std::vector<at::Tensor> tensors{torch::full({3}, 1.0 * comm.rank(), torch::requires_grad()),
                                              torch::zeros({2}, torch::requires_grad())};
              for (const auto& t : tensors) t.mutable_grad() = torch::full_like(t, comm.rank());
              gs::Reducer<gs::ThreadBackend, gs::PerParameter> sync(comm, tensors);
              sync.broadcast_parameters();
              sync.mark_ready(1);
              sync.mark_ready(0);
              sync.finish();
              finding.check(tensors[0].sum().item<float>() == 0, "not rank 0's value");
              finding.check(tensors[1].grad().sum().item<float>() == 1, "not the mean");
          }) == "");
}
