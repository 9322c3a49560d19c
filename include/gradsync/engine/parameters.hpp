// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstring>
#include <optional>

#include "../core/backend.hpp"
#include "../core/bucket_plan.hpp"
#include "../core/parameter.hpp"
#include "options.hpp"

/// Turns the trainer's parameters, of any type, into views and infos.

namespace gradsync::inline v0_2::detail {

/// Views of a range of parameters. A parameter without a name is named after its index. A missing gradient gets the
/// type and count of the value, without memory.
template <MemorySpace space, class Parameters>
List<ParameterView> view_parameters(Parameters&& parameters) {
    static_assert(Range<std::remove_reference_t<Parameters>>,
                  "gradsync: pass a range of parameters, e.g. {gs::parameter(...)}, also where there is only one");
    List<ParameterView> views;
    if constexpr (Range<std::remove_reference_t<Parameters>>) {
        using T = range_element_t<std::remove_reference_t<Parameters>>;
        static_assert(require_parameter<T>());
        if constexpr (!std::is_lvalue_reference_v<Parameters> &&
                      (HasBufferTraits<T> || requires { traits_of<T>::is_range; }))
            static_assert(
                !owns_memory<Parameters>() || !owns_memory<T>(),
                "gradsync: give this range a name that outlives the object: its gradients are gone with the temporary");
        if constexpr (Parameter<T> && !std::is_lvalue_reference_v<Parameters> && !std::is_copy_constructible_v<T>)
            static_assert(!owns_memory<Parameters>() || std::is_same_v<described_t<T>, T>,
                          "gradsync: give this range of unique pointers a name that outlives the object: its tensors "
                          "are gone with the temporary");
        if constexpr (Parameter<T>) {
            using Traits = traits_of<described_t<T>>;
            if constexpr (requires { Traits::space; })
                static_assert(
                    Traits::space == space,
                    "gradsync: choose a backend for the memory that these tensors lie in, or stage them through the "
                    "host: parameter_traits<T>::space is not the backend's memory_space");
            if constexpr (requires { parameters.size(); }) views.reserve(parameters.size());
            for (auto&& p : parameters) {
                views.push_back(parameter_view(p));
                if (ParameterView& v = views.back();
                    v.gradient == BufferView{} || v.gradient == typed_view(nullptr, 0, v.value.dtype, v.value.space)) {
                    v.gradient = v.value;
                    v.gradient.data = nullptr;
                }
                if (views.back().name.empty()) views.back().name = text(views.size() - 1);
            }
        }
    }
    return views;
}

/// Finds two trainable parameters whose `part` (value or gradient) shares memory; a pair of nulls if there are none.
/// `counts`, if given, is 0 for each parameter to leave out.
template <BufferView ParameterView::*part>
std::pair<const ParameterView*, const ParameterView*> overlapping(const List<ParameterView>& parameters,
                                                                  const std::uint8_t* counts = nullptr) {
    List<const ParameterView*> by_address;
    by_address.reserve(parameters.size());
    for (const ParameterView& p : parameters)
        if (p.requires_grad && (p.*part).data != nullptr && (p.*part).bytes() != 0 &&
            (counts == nullptr || counts[&p - parameters.data()] != 0))
            by_address.push_back(&p);
    const auto first = [](const ParameterView* p) { return reinterpret_cast<std::uintptr_t>((p->*part).data); };
    sort_by(by_address,
            [&](const ParameterView* one, const ParameterView* other) { return first(one) < first(other); });
    for (std::size_t k = 1; k < by_address.size(); ++k) {
        const ParameterView *one = by_address[k - 1], *other = by_address[k];
        if (first(other) - first(one) < (one->*part).bytes())
            return one < other ? std::pair(one, other) : std::pair(other, one);
    }
    return {};
}

/// The range that the `part` (value or gradient) of these parameters fills in the trainer's memory, if it may serve as
/// a bucket: they lie side by side, in any order, with nothing between them. Otherwise a view without memory. All parts
/// have one type and do not overlap. Empty ones may lie anywhere.
template <Backend B>
BufferView range_in_place(std::span<const std::size_t> bucket, ListView<const ParameterView> parameters,
                          BufferView ParameterView::*part) {
    const void* const arena = parameters[bucket.front()].arena;
    // In device memory, two allocations may be adjacent by chance. No copy may cross that border, and the bucket could
    // not be detached.
    bool may = B::memory_space == MemorySpace::host || bucket.size() == 1 || arena != nullptr;
    BufferView range = (parameters[bucket.front()].*part).subview(0, 0);
    const std::byte* end = nullptr;
    for (const std::size_t i : bucket) {
        const BufferView next = parameters[i].*part;
        may = may && parameters[i].arena == arena && (next.count == 0 || next.data != nullptr);
        if (!may || next.count == 0) continue;
        if (range.count == 0 || next.data < range.data) range.data = next.data;
        if (const auto* its_end = static_cast<std::byte*>(next.data) + next.bytes(); its_end > end) end = its_end;
        range.count += next.count;
    }
    return may && (range.count == 0 || static_cast<std::byte*>(range.data) + range.bytes() == end) ? range
                                                                                                   : BufferView();
}

/// The product of the extents; nullopt if it overflows std::size_t.
inline std::optional<std::size_t> volume_of(const std::vector<std::size_t>& shape) {
    std::size_t volume = 1;
    bool fits = true;
    for (const std::size_t extent : shape) {
        if (extent == 0) return 0;
        fits = !__builtin_mul_overflow(volume, extent, &volume) && fits;
    }
    return fits ? std::optional(volume) : std::nullopt;
}

/// Is its memory aligned for its element type?
inline bool is_aligned(const BufferView& view) noexcept {
    return reinterpret_cast<std::uintptr_t>(view.data) % size_of(view.dtype) == 0;
}

/// Does `other` have what the gradient `own` has, so that it can take its place?
inline bool may_replace(const BufferView& other, const BufferView& own) noexcept {
    return other.count == own.count && other.dtype == own.dtype && other.space == own.space &&
           (other.data != nullptr || own.count == 0) && is_aligned(other);
}

/// Are all bytes 0, or is there no memory?
[[gnu::cold]] inline bool is_zero(const BufferView& view) noexcept {
    const auto* const bytes = static_cast<const unsigned char*>(view.data);
    return bytes == nullptr || view.count == 0 || (*bytes == 0 && std::memcmp(bytes, bytes + 1, view.bytes() - 1) == 0);
}

/// The index of the parameter with this name. Throws Error(invalid_argument) if there is none, or several.
inline std::size_t index_of(std::string_view name, ListView<const ParameterView> parameters, int rank) {
    std::size_t found = parameters.size();
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        if (parameters[i].name != name) continue;
        if (found != parameters.size())
            refuse_on({"mark_ready", rank}, "parameters ", found, " and ", i, " are both named '", name,
                      "'; give an index, or other names");
        found = i;
    }
    if (found != parameters.size()) return found;
    refuse_on({"mark_ready", rank}, "no parameter is named '", name,
              "'; give an index, or one of the names in parameters()");
}

/// Throws Error(invalid_argument) if the options do not go with one another, the memory or the exchange. `scatters`:
/// this rank gets only its shards. `plain`: the exchange is AllReduce. `sums`: see Policies.
[[gnu::cold]] inline void check_options(const ReducerOptions& options, MemorySpace space, bool scatters, bool plain,
                                        bool sums, int rank, int size) {
    const auto refuse = [&](const auto&... what) { refuse_on({"Reducer", rank}, what...); };
    const bool pooled = options.gradients == GradientStorage::pooled;
    if (options.non_finite != NonFinite::pass && space != MemorySpace::host)
        refuse("NonFinite reads gradients in host memory only; use NonFinite::pass, and look at gradient_norm()");
    if (options.non_finite == NonFinite::skip && !plain)
        refuse("NonFinite::skip is for AllReduce; ",
               "else leave out steps whose gradient_norm() is not finite (with shards: discard())");
    if (options.check_writes && space != MemorySpace::host)
        refuse("check_writes reads gradients in host memory only; leave it out");
    if (pooled && !scatters)
        refuse("GradientStorage::pooled is for gradients that are reduced to shards (Zero2); use in_buckets");
    if (pooled && !sums && has_several_sums(options, size))
        refuse("with this exchange, micro_batches of sharded gradients need a power of two of ranks, not ", size,
               ", and the same number on each rank");
    const bool borrowed = options.gradients == GradientStorage::borrowed;
    const bool adds_up = options.accumulation == Accumulation::in_buckets;
    if (!borrowed && ((adds_up && options.micro_batches == 0) || (options.reduce_dtype && !pooled)))
        refuse("Accumulation::in_buckets and reduce_dtype are for borrowed gradients (reduce_dtype for pooled ones, ",
               "too); gradients that live in the buckets are added up there by the trainer");
    if (options.micro_batches != 0 && options.micro_batches < static_cast<std::size_t>(size))
        refuse("micro_batches is the total over all ranks: with ", options.micro_batches, " of them, ",
               static_cast<std::size_t>(size) - options.micro_batches, " of the ", size,
               " ranks would have none; set it to ", size, " or more, or use fewer ranks");
    if (options.micro_batches > static_cast<std::size_t>(size)) {
        if (!adds_up && !pooled)
            refuse("the reducer adds up micro_batches; ",
                   "set Accumulation::in_buckets, too, and let each of them overwrite its gradients");
        if (options.averaging == Averaging::weighted_mean)
            refuse("micro_batches goes with mean, sum and mean_over_count, not with weighted_mean; ",
                   "weigh the losses instead");
    }
    if (is_weighted(options.averaging) && options.micro_batches != 0 && pooled)
        refuse("with gradients that are sharded, micro_batches goes with Averaging::mean and sum only");
    if (is_weighted(options.averaging) && has_several_sums(options, size))
        refuse("with Averaging::mean_over_count, micro_batches must be ", size, " times a power of two, not ",
               options.micro_batches);
    if (options.divisor != JoinDivisor::live_ranks && options.averaging != Averaging::mean)
        refuse("JoinDivisor is the divisor of Averaging::mean; leave it out with another averaging");
    if (options.reduce_dtype && !is_floating(*options.reduce_dtype))
        refuse("reduce_dtype must be a floating type, not ", *options.reduce_dtype);
}

/// Checks parameters against the options. The functions throw Error(invalid_argument), which names the parameter.
struct ParameterRules {
    const ReducerOptions& options;
    MemorySpace space;  ///< of the backend
    int rank;

    bool borrows() const noexcept { return options.gradients == GradientStorage::borrowed; }
    bool adds_up() const noexcept { return options.accumulation == Accumulation::in_buckets; }
    [[noreturn, gnu::cold]] void refuse(const ParameterView& p, const auto&... what) const {
        refuse_on({.operation = "Reducer", .rank = rank, .parameter = p.name}, "parameter '", p.name, "' ", what...);
    }

    void check_alignment(const ParameterView& p, const BufferView& view, const char* part) const {
        if (!is_aligned(view))
            refuse(p, "has a ", part, " of ", view.dtype, " at an address that is no multiple of ", size_of(view.dtype),
                   "; align it for its element type");
    }
    /// Checks any parameter.
    [[gnu::cold]] void check(const ParameterView& p) const {
        const BufferView& g = p.gradient;
        for (const BufferView* view : {&p.gradient, &p.value})
            if (view->count > most_elements)
                refuse(p, "has ", static_cast<std::ptrdiff_t>(view->count),
                       " elements; look for a count that is negative or not set");
        const std::optional<std::size_t> volume = volume_of(p.shape);
        if (!volume)
            refuse(p, "has a shape of more elements than std::size_t counts; ",
                   "look for an extent that is negative or not set");
        if (!p.shape.empty() && *volume != g.count)
            refuse(p, "has a shape of ", *volume, " elements, but a gradient of ", g.count);
        if (p.value.data && p.value.count != g.count)
            refuse(p, "has ", p.value.count, " values, but a gradient of ", g.count);
        if (p.value.data && p.value.space != space)
            refuse(p, "has values in ", p.value.space, " memory, but the backend works on ", space, " memory");
        if (p.uses == 0) refuse(p, "has 0 uses; freeze it with requires_grad = false");
        if (p.uses > max_uses)  // a negative number is shown as it was given
            refuse(p, "has ", static_cast<std::int32_t>(p.uses),
                   " uses; give it how often a backward marks it, from 1 to ", max_uses);
        check_alignment(p, p.value, "value");
    }
    /// Checks a trainable parameter.
    [[gnu::cold]] void check_gradient(const ParameterView& p) const {
        const BufferView& g = p.gradient;
        if (borrows() && g.data == nullptr && g.count != 0)
            refuse(p, "has no gradient memory; ",
                   "allocate it, or let gradients live in the buckets (GradientStorage::in_buckets)");
        if (g.count == 0 && !p.may_be_empty)
            refuse(p, p.value == BufferView{} && g == BufferView{}
                          ? "has no elements, no gradient and no value: a null pointer, or an empty ParameterView; set "
                            "it, or take it off the list (if it is empty on purpose: set may_be_empty)"
                          : "has no elements; register it when it has its size, or set may_be_empty if it is empty on "
                            "purpose");
        check_alignment(p, g, "gradient");
        if (const auto distance =
                reinterpret_cast<std::uintptr_t>(g.data) - reinterpret_cast<std::uintptr_t>(p.value.data);
            borrows() && g.data != nullptr && p.value.data != nullptr &&
            (distance < p.value.bytes() || -distance < g.bytes()))
            refuse(p, "has a gradient that shares memory with its value; give each its own");
        if (g.space != space) refuse(p, "lies in ", g.space, " memory, but the backend works on ", space, " memory");
        if (!is_floating(g.dtype)) {
            if (options.averaging != Averaging::sum)
                refuse(p, "has a gradient of ", g.dtype, ", which can be summed only (Averaging::sum)");
            if (adds_up())
                refuse(p, "has a gradient of ", g.dtype, ", which buckets do not add up (Accumulation::in_gradients)");
        } else if (options.gradients == GradientStorage::in_buckets && adds_up() && is_low_precision(g.dtype)) {
            refuse(p, "has a gradient of ", g.dtype,
                   " in its bucket, where micro-batches would be rounded; let it be borrowed");
        }
    }
    /// Returns the type in which a trainable gradient travels.
    DType bucket_dtype(DType gradient) const noexcept {
        if (!is_floating(gradient)) return gradient;
        if (options.reduce_dtype) return *options.reduce_dtype;
        // Also for one micro-batch per rank: the bits must not differ.
        return borrows() && (adds_up() || options.micro_batches != 0) ? accumulator_of(gradient) : gradient;
    }
};

/// The input of the bucket policy: each parameter with the dtype of its bucket. With `scattered` gradients it also has
/// the dtype of its value, because values are gathered in buckets. Throws Error, naming the parameter, if a gradient
/// cannot be synchronised with these options.
[[gnu::cold]] inline List<ParameterInfo> bucket_infos(const List<ParameterView>& parameters,
                                                      const ReducerOptions& options, MemorySpace space, bool scattered,
                                                      int rank) {
    options.reduce_dtype.register_kernels();
    const ParameterRules rules{options, space, rank};
    List<ParameterInfo> infos(parameters.size());
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        const ParameterView& p = parameters[i];
        rules.check(p);
        infos[i] = {p.gradient.count, p.gradient.dtype, space};
        if (scattered) infos[i].value_dtype = p.value.dtype;
        if (!p.requires_grad) continue;
        rules.check_gradient(p);
        infos[i].dtype = rules.bucket_dtype(p.gradient.dtype);
        if (space == MemorySpace::host) kernel::require_kernels(p.gradient.dtype);
    }
    if (rules.borrows())
        if (const auto [one, other] = overlapping<&ParameterView::gradient>(parameters); one != nullptr)
            refuse_on({.operation = "Reducer", .rank = rank, .parameter = other->name}, "the gradients of '", one->name,
                      "' and '", other->name,
                      "' share memory, and would be averaged twice; register tied weights once, with `uses` of 2");
    return infos;
}

/// The trainable parameters in the order in which their gradients are expected: the reverse of their registration.
[[gnu::cold]] inline List<std::size_t> default_order(const List<ParameterView>& parameters) {
    List<std::size_t> order;
    order.reserve(parameters.size());
    for (std::size_t i = parameters.size(); i-- > 0;)
        if (parameters[i].requires_grad) order.push_back(i);
    return order;
}

/// Can a trainable gradient be seen to move? See ParameterView::look.
inline bool any_tracked(const List<ParameterView>& parameters) noexcept {
    bool any = false;
    for (const ParameterView& p : parameters) any = any || (p.requires_grad && p.look != nullptr);
    return any;
}

/// The number of marks until each gradient is ready; 0 for frozen parameters.
[[gnu::cold]] inline List<std::uint32_t> uses_of(const List<ParameterView>& parameters) {
    List<std::uint32_t> uses(parameters.size());
    for (std::size_t i = 0; i < uses.size(); ++i) uses[i] = parameters[i].requires_grad ? parameters[i].uses : 0;
    return uses;
}

}  // namespace gradsync::inline v0_2::detail
