// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "parameter.hpp"

namespace gradsync::inline v0_2 {

/// A tensor of an arena. If `layers` is 1 or more, it is packed: that many tensors of `shape` one
/// after the other, one per layer.
struct PackedTensor {
    std::string name;
    std::vector<std::size_t> shape = {};  ///< shape of one layer
    std::size_t layers = 0;               ///< in how many equal parts it is split; 0: it is one parameter
    std::uint32_t uses = 1;               ///< see ParameterView
};

/// The parameters of a model whose weights lie one after the other in one arena, and whose
/// gradients lie likewise in another.
///
///     const gs::Packed model = gs::packed(weights, gradients, {{"wte", {V, C}}, {"ln1.weight", {C}, L},
///                                                              {"ln1.bias", {C}, L}, {"lnf", {C}}});
///     gs::Reducer sync(comm, model);
///     // in the backward:
///     sync.mark_ready(model.layer(l));
///
/// Parameters are in the order of a forward: the tensors before the first packed one, then layer by layer,
/// then the others. The parameters of a layer have consecutive indices. Pass it as the range
/// of parameters; it does not own the arenas.
class Packed {
public:
    auto begin() const noexcept { return parameters_.begin(); }       ///< the first parameter
    auto end() const noexcept { return parameters_.end(); }           ///< behind the last
    std::size_t size() const noexcept { return parameters_.size(); }  ///< the number of parameters
    const ParameterView& operator[](std::size_t i) const noexcept { return parameters_[i]; }  ///< Returns parameter i.

    /// Returns the number of layers of a tensor that `slices` split.
    std::size_t layers() const noexcept { return layers_; }
    /// The indices of a layer's parameters. Throws Error(invalid_argument) if there is no such layer.
    std::span<const std::size_t> layer(std::size_t l) const {
        if (l >= layers_) detail::refuse("Packed::layer", "there are ", layers_, " layers, and no layer ", l);
        return std::span<const std::size_t>(numbers_).subspan(first_ + l * in_layer_, in_layer_);
    }
    /// The index of a tensor's parameter; `layer` is ignored unless the tensor is packed. Throws
    /// Error(invalid_argument) if there is none.
    std::size_t index(std::string_view tensor, std::size_t layer = 0) const {
        for (const Tensor& t : tensors_)
            if (t.name == tensor && (!t.packed || layer < layers_)) return t.first + (t.packed ? layer * in_layer_ : 0);
        detail::refuse("Packed::index", "there is no tensor '", tensor, "' of layer ", layer);
    }

private:
    friend Packed packed_views(BufferView values, BufferView gradients, std::span<const PackedTensor> tensors);

    struct Tensor {
        std::string name;
        bool packed;
        std::size_t first;  ///< index of its first parameter
    };

    std::vector<ParameterView> parameters_;
    std::vector<Tensor> tensors_;
    std::vector<std::size_t> numbers_;  ///< 0, 1, 2, ...
    std::size_t layers_ = 0, first_ = 0, in_layer_ = 0;
};

/// As `packed`, from views.
[[gnu::cold]] inline Packed packed_views(BufferView values, BufferView gradients,
                                         std::span<const PackedTensor> tensors) {
    const auto refuse = [](const auto&... what) { detail::refuse("packed", what...); };
    Packed packed;
    std::vector<std::size_t> offsets, counts;
    std::size_t at = 0, last = 0;
    for (std::size_t t = 0; t < tensors.size(); ++t) {
        std::size_t count = 1;
        for (const std::size_t extent : tensors[t].shape) count *= extent;
        offsets.push_back(at);
        counts.push_back(count);
        at += count * (tensors[t].layers == 0 ? 1 : tensors[t].layers);
        if (tensors[t].layers == 0) continue;
        if (packed.layers_ == 0) packed.first_ = t;
        else if (tensors[t].layers != packed.layers_)
            refuse("'", tensors[t].name, "' has ", tensors[t].layers, " layers, but others have ", packed.layers_);
        packed.layers_ = tensors[t].layers;
        last = t + 1;
        ++packed.in_layer_;
    }
    if (at != gradients.count || (values.data != nullptr && at != values.count))
        refuse("the tensors have ", at, " elements together, the gradients ", gradients.count, ", and the values ",
               values.count);
    const auto add = [&](std::size_t t, std::size_t layer) {
        const PackedTensor& tensor = tensors[t];
        ParameterView view{.name = tensor.layers == 0 ? tensor.name : detail::text(tensor.name, ".", layer),
                           .shape = tensor.shape,
                           .uses = tensor.uses,
                           .arena = gradients.data};
        const std::size_t first = offsets[t] + layer * counts[t];
        view.gradient = gradients.subview(first, counts[t]);
        if (values.data != nullptr) view.value = values.subview(first, counts[t]);
        if (layer == 0) packed.tensors_.push_back({tensor.name, tensor.layers != 0, packed.parameters_.size()});
        packed.numbers_.push_back(packed.parameters_.size());
        packed.parameters_.push_back(std::move(view));
    };
    for (std::size_t t = 0; t < packed.first_; ++t) add(t, 0);
    for (std::size_t layer = 0; layer < packed.layers_; ++layer)
        for (std::size_t t = packed.first_; t < last; ++t)
            if (tensors[t].layers != 0) add(t, layer);
    for (std::size_t t = packed.first_; t < tensors.size(); ++t)
        if (tensors[t].layers == 0) add(t, 0);
    return packed;
}

/// The parameters of arenas that hold these tensors one after the other, without gaps; see `Packed`. `tensors`: a range
/// of PackedTensor. `values` may be empty; `broadcast_parameters` and sharding then throw. Throws
/// Error(invalid_argument) if sizes or numbers of layers do not match.
template <class Values, class Gradients, class Tensors = std::initializer_list<PackedTensor>>
Packed packed(Values&& values, Gradients&& gradients, Tensors&& tensors) {
    std::vector<PackedTensor> list;
    for (const PackedTensor& tensor : tensors) list.push_back(tensor);
    return packed_views(buffer(std::forward<Values>(values)), buffer(std::forward<Gradients>(gradients)), list);
}

/// The same for a range of sizes: the number of elements of each tensor, all its layers together. `layers_of(t)`
/// returns the number of layers of tensor t, or 0 if it is not packed. The tensors are named "0", "1", ...
///
///     gs::packed(weights, gradients, sizes, [&](std::size_t t) { return t < 2 ? 0 : layers; });
template <class Values, class Gradients, class Sizes, class LayersOf>
Packed packed(Values&& values, Gradients&& gradients, const Sizes& sizes, LayersOf&& layers_of) {
    std::vector<PackedTensor> tensors;
    for (const auto size : sizes) {
        const auto layers = static_cast<std::size_t>(layers_of(tensors.size()));
        tensors.push_back(
            {detail::text(tensors.size()), {static_cast<std::size_t>(size) / (layers == 0 ? 1 : layers)}, layers});
    }
    return packed(std::forward<Values>(values), std::forward<Gradients>(gradients), tensors);
}

}  // namespace gradsync::inline v0_2
