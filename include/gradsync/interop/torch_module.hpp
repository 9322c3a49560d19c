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

/// The tensors of a training: the parameters and buffers of a module, or a list of them, such as Python's `named_parameters()`. A parameter
/// that stands in several places is listed once, under its first name.
struct TorchParameters {
    TorchParameters(const torch::nn::Module& module) : buffers(module.buffers()) {
        for (const auto& item : module.named_parameters()) add(item.key(), item.value());
    }
    TorchParameters(const std::vector<std::pair<std::string, at::Tensor>>& parameters, std::vector<at::Tensor> buffers_ = {})
        : buffers(std::move(buffers_)) {
        for (const auto& [name, tensor] : parameters) add(name, tensor);
    }

    std::vector<ParameterView> views() const {
        std::vector<ParameterView> result;
        for (std::size_t i = 0; i < tensors.size(); ++i) {
            try {
                result.push_back(parameter_view(tensors[i]));
            } catch (const Error& e) {
                detail::raise(e.errc(), detail::text("parameter '", names[i], "': ", e.what()),
                              {.operation = "TorchReducer", .parameter = names[i]});
            }
            result.back().name = names[i];
        }
        return result;
    }

    std::vector<std::string> names;
    std::vector<at::Tensor> tensors, buffers;

private:
    void add(const std::string& name, const at::Tensor& tensor) {
        for (const at::Tensor& t : tensors)
            if (t.is_same(tensor)) return;
        names.push_back(name);
        tensors.push_back(tensor);
    }
};

namespace detail {

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
