// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <vector>

#include "buffer_view.hpp"

namespace gradsync::inline v0_2 {

/// A contiguous range whose memory may move by mistake; see `tracked`.
template <detail::ContiguousRange R>
struct Tracked {
    R* range;  ///< the vector that is watched
};

/// Watches a gradient whose vector may be resized, assigned or swapped: each mark and each `finish()` throws if the
/// gradient is no longer where it was registered. The range object itself must not move.
///
///     gs::parameter("w", w, gs::tracked(w_gradient))
template <detail::ContiguousRange R>
Tracked<R> tracked(R& range) noexcept {
    return {&range};
}

/// A parameter as the library sees it: a name for messages, and views of memory that belongs to the trainer.
struct ParameterView {
    std::string name = {};
    BufferView value = {};                ///< the weights; required by `broadcast_parameters` and for sharding
    BufferView gradient = {};             ///< data may be null if gradients live in the buckets
    std::vector<std::size_t> shape = {};  ///< for verification; empty: one dimension
    bool row_major = true;                ///< false: the elements lie in another order than that of `shape`
    bool requires_grad = true;            ///< false: frozen, takes no part in synchronisation
    std::uint32_t uses = 1;               ///< the gradient is ready at the uses-th mark (tied weights)
    bool may_be_empty = false;            ///< true: the gradient may have 0 elements
    const void* arena = nullptr;          ///< arena in which gradients lie side by side; see `packed`
    const void* owner = nullptr;          ///< owner of the gradient's memory, if `look` is given
    BufferView (*look)(const void* owner) = nullptr;  ///< returns where the gradient is now; see `tracked`
};

/// The largest number of uses that a Reducer accepts. No backward has as many; larger values
/// are converted negative numbers.
inline constexpr std::uint32_t max_uses = std::uint32_t{1} << 20;

/// Describes a parameter type. Specialise it for a type that has weights and a gradient. All functions
/// are static and take a `T&`, or a `const T&` for handles that may be constant. Only `gradient` is required.
/// It returns `tracked(range)` or an argument for `buffer()`.
///
/// | function | returns | default |
/// |---|---|---|
/// | `gradient(t)` | a contiguous range, a `BufferView`, a type with `buffer_traits`; or `tracked(range)` | |
/// | `value(t)` | the weights, in the same form | none: `broadcast_parameters` throws |
/// | `name(t)` | `std::string` | the index |
/// | `shape(t)` | a range of integers | one dimension |
/// | `row_major(t)` | `bool`: whether the elements lie in the order of `shape`, the last index running fastest | true |
/// | `requires_grad(t)` | `bool` | true |
/// | `uses(t)` | how often the gradient is marked ready in one backward | 1 |
/// | `may_be_empty(t)` | `bool`: whether the gradient may have 0 elements | false |
///
/// `static constexpr MemorySpace space` states the memory space, which is checked against
/// the backend's at compile time.
template <class T>
struct parameter_traits {};

/// A contiguous range is a gradient without a name.
template <class T>
    requires(detail::ContiguousRange<T> && !detail::HasBufferTraits<T>)
struct parameter_traits<T> {
    static constexpr MemorySpace space = MemorySpace::host;
    static constexpr bool is_range = true;
    static T& gradient(T& range) { return range; }
};

/// So is a tensor with `buffer_traits`.
template <class T>
    requires(detail::HasBufferTraits<T> && !std::is_const_v<T>)
struct parameter_traits<T> : buffer_traits<T> {
    static T& gradient(T& tensor) { return tensor; }
    static const T& gradient(const T& tensor) { return tensor; }
};

template <class R>
struct parameter_traits<Tracked<R>> {
    static constexpr MemorySpace space = MemorySpace::host;
    static Tracked<R> gradient(Tracked<R> tracked) { return tracked; }
};

template <>
struct parameter_traits<BufferView> {
    static BufferView gradient(BufferView view) { return view; }
};

template <>
struct parameter_traits<ParameterView> {
    static BufferView gradient(const ParameterView& p) { return p.gradient; }
};

namespace detail {

template <class T>
concept HasOwnTraits = requires(T& t) { parameter_traits<T>::gradient(t); };

/// The traits of T. A constant T uses those of its type without const, unless it has traits of its
/// own, as a constant range does.
template <class T>
using traits_of = parameter_traits<std::conditional_t<HasOwnTraits<T>, T, std::remove_const_t<T>>>;

template <class T>
concept HasGradient = requires(T& t) { traits_of<T>::gradient(t); };

template <class Gradient>
void set_gradient(ParameterView& view, Gradient&& gradient) {
    view.gradient = buffer(std::forward<Gradient>(gradient));
}
template <class R>
void set_gradient(ParameterView& view, Tracked<R> gradient) {
    view.gradient = buffer(*gradient.range);
    view.owner = gradient.range;
    view.look = [](const void* owner) { return buffer(*static_cast<R*>(const_cast<void*>(owner))); };
}

template <class Extents>
std::vector<std::size_t> extents(const Extents& shape) {
    static_assert(Range<const Extents>, "gradsync: return a range of integers from shape(), one for each dimension");
    std::vector<std::size_t> result;
    if constexpr (Range<const Extents>)
        for (auto extent : shape) result.push_back(static_cast<std::size_t>(extent));
    return result;
}

/// A pointer or smart pointer. A type whose `*` is const if the object is, such as std::optional, owns what it holds,
/// and is no pointer.
template <class T>
concept PointerLike = requires(T& t, const T& c) {
    t ? *t : *t;
    requires std::is_lvalue_reference_v<decltype(*t)> && std::is_same_v<decltype(*t), decltype(*c)>;
};
/// std::reference_wrapper, whose header is not included for it.
template <class T>
concept ReferenceWrapper = !PointerLike<T> && requires(T& t) {
    { t.get() } -> std::same_as<typename T::type&>;
};

/// The type that describes the parameter: what a pointer, smart pointer or std::reference_wrapper
/// refers to, or T itself.
template <class T>
auto described() {
    if constexpr (HasGradient<T>) return std::type_identity<T>();
    else if constexpr (PointerLike<T>)
        return std::type_identity<std::remove_reference_t<decltype(*std::declval<T&>())>>();
    else if constexpr (ReferenceWrapper<T>) return std::type_identity<typename T::type>();
    else return std::type_identity<T>();
}
template <class T>
using described_t = typename decltype(described<T>())::type;

}  // namespace detail

/// A type whose `parameter_traits` have `gradient`, or a pointer, smart pointer or std::reference_wrapper to one.
template <class T>
concept Parameter = detail::HasGradient<detail::described_t<T>>;

/// Compiles if `static_assert(gradsync::Parameter<T>)` does. Otherwise the compiler says what to add or fix.
template <class T>
consteval bool require_parameter() {
    if constexpr (std::is_arithmetic_v<T> || Element<T>) {
        static_assert(!std::is_same_v<T, T>,
                      "gradsync: pass a range of parameters, e.g. {gs::parameter(\"weights\", weights, gradient)} or "
                      "std::vector{std::span(gradient)}: a range of numbers is one gradient");
    } else if constexpr (!Parameter<T>) {
        constexpr bool is_not_static =
            requires(parameter_traits<std::remove_const_t<T>> traits, T& t) { traits.gradient(t); };
        static_assert(!is_not_static, "gradsync: make gradient() in parameter_traits of this type static");
        if constexpr (!is_not_static)
            static_assert(
                Parameter<T>,
                "gradsync: pass a std::span(pointer, count) of its gradient, or gs::parameter(name, weights, gradient) "
                "with two such spans, or specialise gradsync::parameter_traits for this type, with a public static "
                "function gradient(T&) that returns a contiguous range, a BufferView or a tensor with buffer_traits; "
                "see docs/guides/tensors.md");
    }
    return true;
}

namespace detail {

/// Has T's traits a function that is not static? It would be ignored.
template <class Traits, class T>
inline constexpr bool needs_object =
    requires(Traits of, T& t) { of.value(t); } != requires(T& t) { Traits::value(t); } ||
    requires(Traits of, T& t) { of.name(t); } != requires(T& t) { Traits::name(t); } ||
    requires(Traits of, T& t) { of.shape(t); } != requires(T& t) { Traits::shape(t); } ||
    requires(Traits of, T& t) { of.row_major(t); } != requires(T& t) { Traits::row_major(t); } ||
    requires(Traits of, T& t) { of.requires_grad(t); } != requires(T& t) { Traits::requires_grad(t); } ||
    requires(Traits of, T& t) { of.uses(t); } != requires(T& t) { Traits::uses(t); } ||
    requires(Traits of, T& t) { of.may_be_empty(t); } != requires(T& t) { Traits::may_be_empty(t); };

}  // namespace detail

/// The view of one parameter of any type; empty for a null pointer.
template <class T>
ParameterView parameter_view(T& t) {
    if constexpr (!std::is_same_v<detail::described_t<T>, T>) {
        if constexpr (detail::ReferenceWrapper<T>) return parameter_view(t.get());
        else return t ? parameter_view(*t) : ParameterView{};  // a Reducer refuses it, and says which it is
    } else if constexpr (std::same_as<T, ParameterView> || std::same_as<T, const ParameterView>) {
        return t;
    } else {
        static_assert(require_parameter<T>());
        ParameterView view;
        if constexpr (detail::HasGradient<T>) {
            using Traits = detail::traits_of<T>;
            static_assert(!detail::needs_object<Traits, T>,
                          "gradsync: make every function in parameter_traits of this type static");
            detail::set_gradient(view, Traits::gradient(t));
            if constexpr (requires { Traits::value(t); }) view.value = buffer(Traits::value(t));
            if constexpr (requires { Traits::name(t); }) view.name = Traits::name(t);
            if constexpr (requires { Traits::shape(t); }) view.shape = detail::extents(Traits::shape(t));
            if constexpr (requires { Traits::row_major(t); }) view.row_major = Traits::row_major(t);
            if constexpr (requires { Traits::requires_grad(t); }) view.requires_grad = Traits::requires_grad(t);
            if constexpr (requires { Traits::uses(t); }) view.uses = static_cast<std::uint32_t>(Traits::uses(t));
            if constexpr (requires { Traits::may_be_empty(t); }) view.may_be_empty = Traits::may_be_empty(t);
        }
        return view;
    }
}

/// The extents of a tensor: integers, or a range of them.
struct Extents {
    Extents() = default;
    template <std::integral... I>
        requires(sizeof...(I) != 0)
    /// Takes the extents one by one.
    Extents(I... of_each) : extents{static_cast<std::size_t>(of_each)...} {}  // NOLINT: converts
    template <detail::Range R>
    /// Takes a range of extents.
    Extents(const R& range) : extents(detail::extents(range)) {}  // NOLINT: converts

    std::vector<std::size_t> extents;  ///< outermost first
};

/// Makes a parameter of a value and a gradient, each a tensor or contiguous range.
template <class Value, class Gradient>
ParameterView parameter(std::string name, Value&& value, Gradient&& gradient, Extents shape = {}) {
    using Traits = buffer_traits<std::remove_cvref_t<Value>>;
    if constexpr (requires { Traits::shape(value); })
        if (shape.extents.empty()) shape = Traits::shape(value);
    bool row_major = true;
    if constexpr (requires { Traits::row_major(value); }) row_major = Traits::row_major(value);
    ParameterView view{.name = std::move(name),
                       .value = buffer(std::forward<Value>(value)),
                       .shape = std::move(shape.extents),
                       .row_major = row_major};
    detail::set_gradient(view, std::forward<Gradient>(gradient));
    return view;
}

}  // namespace gradsync::inline v0_2
