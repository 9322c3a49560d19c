// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>

#include "torch_tensor.hpp"

namespace gradsync::inline v0_2 {

namespace detail {

/// The parameters of a module. A parameter that stands in several places is listed once, under its first name.
struct TorchParameters {
    explicit TorchParameters(const torch::nn::Module& module) {
        for (const auto& item : module.named_parameters()) {
            bool known = false;
            for (const at::Tensor& t : tensors) known |= t.is_same(item.value());
            if (known) continue;
            names.push_back(item.key());
            tensors.push_back(item.value());
        }
    }

    std::vector<ParameterView> views() const {
        std::vector<ParameterView> result;
        for (std::size_t i = 0; i < tensors.size(); ++i) {
            try {
                result.push_back(parameter_view(tensors[i]));
            } catch (const Error& e) {
                raise(e.errc(), text("parameter '", names[i], "': ", e.what()), {.operation = "TorchReducer", .parameter = names[i]});
            }
            result.back().name = names[i];
        }
        return result;
    }

    /// Allocates the gradients that have no memory yet, as zeros.
    const TorchParameters& allocate_gradients() const {
        for (const at::Tensor& t : tensors)
            if (t.requires_grad() && !t.grad().defined()) t.mutable_grad() = at::zeros_like(t);
        return *this;
    }

    std::vector<std::string> names;
    std::vector<at::Tensor> tensors;
};

/// Calls `mark(i)` whenever autograd has accumulated the gradient of tensor i, until it is destroyed.
class TorchHooks {
public:
    using Mark = std::function<void(std::size_t)>;

    TorchHooks(const std::vector<at::Tensor>& tensors, Mark mark) : mark_(std::move(mark)) {
        for (std::size_t i = 0; i < tensors.size(); ++i) {
            if (!tensors[i].requires_grad()) continue;
            // The tensor does not keep the node alive; the owner of the hook must.
            auto node = torch::autograd::impl::grad_accumulator(tensors[i]);
            nodes_.emplace_back(node, node->add_post_hook(std::make_unique<Hook>(mark_, i)));
        }
    }
    TorchHooks& operator=(TorchHooks&&) = delete;
    ~TorchHooks() {
        for (auto& [node, key] : nodes_) node->del_post_hook(key);
    }

private:
    struct Hook final : torch::autograd::FunctionPostHook {
        Hook(const Mark& mark_, std::size_t i_) : mark(mark_), i(i_) {}
        torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                                  const torch::autograd::variable_list&) override {
            mark(i);
            return outputs;
        }
        const Mark& mark;
        std::size_t i;
    };
    /// A std::shared_ptr, or from libtorch 2.15 on a c10::intrusive_ptr.
    using Node = decltype(torch::autograd::impl::grad_accumulator(at::Tensor()));

    const Mark mark_;
    std::vector<std::pair<Node, std::uintptr_t>> nodes_;
};

}  // namespace detail

}  // namespace gradsync::inline v0_2
