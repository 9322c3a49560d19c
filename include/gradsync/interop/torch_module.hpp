// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <ATen/Functions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <functional>
#include <memory>

#include "torch_tensor.hpp"

namespace gradsync::inline v0_2 {

/// The tensors to train: the parameters and buffers of a module, or a list of them, such as Python's
/// `named_parameters()`. A parameter that occurs several times is listed once, under its first name.
struct TorchParameters {
    /// Takes all parameters and buffers of a module.
    TorchParameters(const torch::nn::Module& module) : buffers(module.buffers()) {
        for (const auto& item : module.named_parameters()) add(item.key(), item.value());
    }
    /// Takes named tensors, and buffers if there are any.
    TorchParameters(const std::vector<std::pair<std::string, at::Tensor>>& parameters,
                    std::vector<at::Tensor> buffers_ = {})
        : buffers(std::move(buffers_)) {
        for (const auto& [name, tensor] : parameters) add(name, tensor);
    }

    /// Returns the tensors as a Reducer takes them. Throws Error(invalid_argument) for a tensor that is no leaf of
    /// autograd's graph.
    std::vector<ParameterView> views() const {
        std::vector<ParameterView> result;
        for (std::size_t i = 0; i < tensors.size(); ++i) {
            try {
                if (!tensors[i].is_leaf())
                    detail::raise(Errc::invalid_argument,
                                  "autograd leaves no gradient in the result of an operation: pass a leaf");
                result.push_back(parameter_view(tensors[i]));
            } catch (const Error& e) {
                detail::raise(e.errc(), {.parameter = names[i]}, "parameter '", names[i], "': ", e.what());
            }
            result.back().name = names[i];
        }
        return result;
    }
    /// The buffers as bytes, because broadcasts take every dtype; without the floating ones if `floating` is false.
    std::vector<BufferView> buffer_bytes(bool floating = true) const {
        std::vector<BufferView> result;
        for (const at::Tensor& b : buffers)
            if (floating || !b.is_floating_point()) result.push_back(buffer_traits<at::Tensor>::bytes(b));
        return result;
    }

    /// Throws if tensor i is no longer at `place`, where this library reads and writes it.
    void check_place(std::size_t i, const void* place) const {
        if (tensors[i].numel() != 0 && tensors[i].data_ptr() != place)
            detail::raise(Errc::invalid_argument, {.parameter = names[i]}, "parameter '", names[i],
                          "' has other memory than at construction, as after torch::load ",
                          "or set_data; load weights before this object is made");
    }

    /// The unit of each parameter, for units that are submodules. Parameters outside of all
    /// of them get the next number.
    std::vector<std::size_t> units_of(const std::vector<std::string>& units) const {
        std::vector<std::size_t> unit_of(names.size(), units.size());
        for (std::size_t k = 0; k < units.size(); ++k) {
            std::size_t found = 0;
            for (std::size_t i = 0; i < names.size(); ++i) {
                if (!names[i].starts_with(units[k] + ".")) continue;
                if (unit_of[i] != units.size())
                    detail::refuse("TorchFullyShard", "units do not nest, but '", names[i], "' is in '",
                                   units[unit_of[i]], "' and '", units[k], "'");
                unit_of[i] = k, ++found;
            }
            if (found == 0)
                detail::refuse("TorchFullyShard", "unit '", units[k],
                               "' has no parameters; is it the name of a submodule?");
        }
        return unit_of;
    }

    std::vector<std::string> names;  ///< by parameter
    /// The parameters, and the buffers.
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

/// A tensor like `t` in memory of another owner. `move_storage` gives it memory.
inline at::Tensor alias(const at::Tensor& t) {
    const auto keep = [](void*) {};  // libtorch cannot ask where no memory is
    return at::from_blob(nullptr, t.sizes(), t.strides(), keep, t.options().requires_grad(false), t.device());
}
/// Gives the storage of `t` other memory. It applies to all tensors that share the storage: views that autograd saves,
/// and results of `detach()`.
inline at::DataPtr move_storage(const at::Tensor& t, at::DataPtr memory) {
    at::Storage storage = t.storage();
    return storage.set_data_ptr(std::move(memory));
}

/// May the memory of `gradient` be overwritten? Autograd may take `produced`, which a backward has made, as the
/// gradient without a copy, although others still read its memory, or take it, too: as of `a.view(-1) + b.view(-1)`.
inline bool is_alone(const at::Tensor& gradient, const at::Tensor& produced) {
    if (!produced.defined() || produced.layout() != at::kStrided || !produced.is_alias_of(gradient)) return true;
    if (produced.is_view() && produced._base().use_count() > 1) return false;
    return gradient.storage().use_count() <= (produced.is_view() ? 3u : 2u);  // theirs, and that of the view's base
}

/// Calls `mark(i, produced)` whenever autograd has accumulated the gradient of tensor i, from what a backward has
/// produced, until it is destroyed.
class TorchHooks {
public:
    using Mark = std::function<void(std::size_t, const at::Tensor& produced)>;

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
                                                  const torch::autograd::variable_list& inputs) override {
            mark(i, inputs[0]);
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
