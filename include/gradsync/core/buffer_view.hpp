// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <span>

#include "error.hpp"
#include "kernel_registry.hpp"

namespace gradsync::inline v0_2 {

/// The memory of a buffer: `host` is memory that host code can read, `device` belongs to a device.
enum class MemorySpace : std::uint8_t { host, device };

constexpr std::string_view name_of(MemorySpace space) noexcept {
    return space == MemorySpace::host ? "host" : "device";
}

namespace detail {

[[noreturn, gnu::cold, gnu::noinline]] inline void refuse_type(DType own, DType asked) {
    raise(Errc::invalid_argument, "as<T>(): the view has ", own, " elements, but T is ", asked,
          "; use the view's type");
}
[[noreturn, gnu::cold, gnu::noinline]] inline void refuse_number(DType type) {
    raise(Errc::invalid_argument, "BufferView: DType(", static_cast<int>(type),
          ") is not an element type; pass one that DType names");
}

// Without <ranges>, which takes longer to compile than this whole library. <span> brings std::begin and end, and the
// parts of std::ranges that are used here.
template <class R>
concept Range = requires(R& range) {
    std::begin(range);
    std::end(range);
};

template <Range R>
using range_element_t = std::remove_reference_t<decltype(*std::begin(std::declval<R&>()))>;

/// Needs no member `data()`: pointers as iterators will do.
template <class R>
concept ContiguousRange = Range<R> && std::ranges::contiguous_range<R> && std::ranges::sized_range<R>;

/// A range that converts to a view, or fails to compile with a sentence that says why.
template <class R>
concept RangeOfElements =
    ContiguousRange<R> && (Element<range_element_t<R>> || std::is_arithmetic_v<std::remove_cv_t<range_element_t<R>>>);

template <class T>
consteval bool owns_memory();

/// No memory holds more. A greater count was a negative number.
inline constexpr std::size_t most_elements = static_cast<std::size_t>(-1) / 16;

}  // namespace detail

template <class Void>
    requires std::is_void_v<Void>
struct BasicBufferView;

namespace detail {

/// Internal: a view whose dtype comes from another view, which has registered the loops.
template <class Void = void>
constexpr BasicBufferView<Void> typed_view(std::type_identity_t<Void>* data, std::size_t count, DType dtype,
                                           MemorySpace space = MemorySpace::host) noexcept {
    BasicBufferView<Void> view;
    view.data = data;
    view.count = count;
    view.dtype = dtype;
    view.space = space;
    return view;
}

}  // namespace detail

using BufferView = BasicBufferView<void>;             ///< a buffer that collectives may write
using ConstBufferView = BasicBufferView<const void>;  ///< a buffer that is only read

template <class R>
BufferView buffer(R&& tensor);
template <class R>
ConstBufferView const_buffer(R&& tensor);

/// A type-erased view of `count` contiguous elements of `dtype`. It does not own them:
/// the maker of the view keeps the memory alive.
template <class Void>
    requires std::is_void_v<Void>
struct BasicBufferView {
    Void* data = nullptr;                   ///< the first element
    std::size_t count = 0;                  ///< elements
    DType dtype = DType::f32;               ///< their type
    MemorySpace space = MemorySpace::host;  ///< where they are

    BasicBufferView() = default;
    /// Compiles the loops of all element types, unless `type` is a constant and the compiler optimises. Throws
    /// Error(invalid_argument) if `type` is a converted number that DType does not name.
    BasicBufferView(Void* first, std::size_t elements, DType type, MemorySpace where = MemorySpace::host)
        : data(first), count(elements), dtype(type), space(where) {
        if (static_cast<std::size_t>(type) >= dtype_count) detail::refuse_number(type);
        kernel::register_kernels(type);
    }
    /// The elements have the pointer's type.
    template <class T>
    BasicBufferView(T* first, std::size_t elements, MemorySpace where = MemorySpace::host) noexcept
        : data(first), count(elements), space(where) {
        static_assert(Element<T>,
                      "gradsync: name the type of these elements, as in BufferView{pointer, count, DType::f32}: the "
                      "pointer does not");
        if constexpr (Element<T>) {
            dtype = dtype_of<T>;
            kernel::register_kernels<dtype_of<T>>();
        }
    }
    /// A contiguous range (`std::vector`, `std::span`, an array) converts as it does to std::span; see `buffer()`. A
    /// temporary that owns its memory does not compile: a collective would use the memory after it is gone.
    template <class R>
        requires detail::RangeOfElements<std::remove_reference_t<R>>
    BasicBufferView(R&& range) {  // NOLINT: converts, as std::span does
        if constexpr (std::is_const_v<Void>) {
            static_assert(std::is_lvalue_reference_v<R&&> || !detail::owns_memory<std::remove_reference_t<R>>(),
                          "gradsync: give this range a name: a collective reads it when the temporary is gone "
                          "(const_buffer() makes a view of a temporary)");
            *this = const_buffer(range);
        } else {
            *this = buffer(std::forward<R>(range));
        }
    }

    constexpr std::size_t bytes() const noexcept { return count * size_of(dtype); }  ///< Returns the size in bytes.

    /// The `size` elements that start at element `first`.
    BasicBufferView subview(std::size_t first, std::size_t size) const noexcept {
        using Byte = std::conditional_t<std::is_const_v<Void>, const std::byte, std::byte>;
        return detail::typed_view<Void>(data ? static_cast<Byte*>(data) + first * size_of(dtype) : nullptr, size, dtype,
                                        space);
    }

    /// The elements as a span of T. Throws Error(invalid_argument) if T is not their type.
    template <class T>
    auto as() const {
        if (dtype != dtype_of<T>) detail::refuse_type(dtype, dtype_of<T>);
        return std::span(static_cast<std::conditional_t<std::is_const_v<Void>, const T, T>*>(data), count);
    }

    /// A mutable view converts to a constant one. (A template: nvcc warns of an operator that
    /// converts a class to itself.)
    template <class To>
        requires(std::is_const_v<To> && !std::is_const_v<Void>)
    constexpr operator BasicBufferView<To>() const noexcept {
        return detail::typed_view<To>(data, count, dtype, space);
    }

    friend constexpr bool operator==(BasicBufferView, BasicBufferView) = default;
};

/// Describes the memory of a tensor that is not a contiguous range. Specialise it for the type without const.
///
/// | static member | meaning | default |
/// |---|---|---|
/// | `view(t)` | a `BufferView`, or a `ConstBufferView` if the tensor is constant | |
/// | `shape(t)` | a range of integers | one dimension |
/// | `space` | the `MemorySpace`, if it is known at compile time | known at run time |
/// | `owns` | true if a copy of the object has memory of its own | false |
template <class T>
struct buffer_traits {};

namespace detail {

template <class T>
concept IsBufferView = std::is_same_v<T, BufferView> || std::is_same_v<T, ConstBufferView>;

template <class T>
concept HasBufferTraits = requires(T& t) { buffer_traits<std::remove_const_t<T>>::view(t); };

/// True if a copy of this object has memory of its own. A range owns its memory if a constant
/// range has constant elements.
template <class T>
consteval bool owns_memory() {
    if constexpr (HasBufferTraits<T>) {
        using Traits = buffer_traits<std::remove_const_t<T>>;
        if constexpr (requires { Traits::owns; }) return Traits::owns;
        else return false;
    } else if constexpr (Range<T> && Range<const T>) {
        return !std::is_same_v<range_element_t<T>, range_element_t<const T>>;
    } else {
        return false;
    }
}

template <class R>
consteval void check_buffer_range() {
    static_assert(!std::is_pointer_v<R>,
                  "gradsync: return or pass a std::span(pointer, count), or host_buffer() or device_buffer() of "
                  "gradsync/interop/pointer.hpp: a pointer does not say how much lies there");
    static_assert(Range<R> || std::is_pointer_v<R>,
                  "gradsync: return or pass a std::span(pointer, count) of this tensor's elements, or specialise "
                  "gradsync::buffer_traits or parameter_traits for its type; see docs/guides/tensors.md");
    if constexpr (Range<R>) {
        static_assert(ContiguousRange<R>,
                      "gradsync: return or pass a std::span(pointer, count) if this tensor's elements are contiguous, "
                      "as collectives need them; otherwise copy them into contiguous memory first");
        if constexpr (ContiguousRange<R>)
            static_assert(Element<range_element_t<R>>,
                          "gradsync: use float, double, Float16, BFloat16, Float8E4M3, Float8E5M2, or an integer of 1, "
                          "4 or 8 bytes: this element type is not supported");
    }
}

/// The view of a tensor or range. It is constant if the tensor or range is.
template <class R>
auto view_of(R& tensor) {
    if constexpr (IsBufferView<std::remove_const_t<R>>) {
        return tensor;
    } else if constexpr (HasBufferTraits<R>) {
        using View = decltype(buffer_traits<std::remove_const_t<R>>::view(tensor));
        static_assert(IsBufferView<View>,
                      "gradsync: return a BufferView, or of a constant tensor a ConstBufferView, from view() in "
                      "buffer_traits of this type");
        if constexpr (IsBufferView<View>) return buffer_traits<std::remove_const_t<R>>::view(tensor);
        else return BufferView{};
    } else {
        check_buffer_range<R>();
        if constexpr (ContiguousRange<R>) {
            using T = range_element_t<R>;
            using View = BasicBufferView<std::conditional_t<std::is_const_v<T>, const void, void>>;
            if constexpr (Element<T>)
                return View{std::ranges::data(tensor), static_cast<std::size_t>(std::ranges::size(tensor))};
            else return View{};
        } else {
            return BufferView{};
        }
    }
}

}  // namespace detail

/// A view of a contiguous range (`std::vector`, `std::span`, `arma::mat`, ...) in host memory, or of a type with
/// `buffer_traits`. The caller keeps the memory alive.
template <class R>
BufferView buffer(R&& tensor) {
    using T = std::remove_reference_t<R>;
    static_assert(std::is_lvalue_reference_v<R&&> || !detail::owns_memory<T>(),
                  "gradsync: return or pass a reference to this tensor: a copy is gone, and its memory with it, before "
                  "anything is written into it");
    using View = decltype(detail::view_of(static_cast<T&>(tensor)));
    static_assert(
        !std::is_same_v<View, ConstBufferView>,
        "gradsync: pass a mutable range: the library writes the result into it (buffer() takes a mutable one, "
        "const_buffer() makes a read-only view)");
    if constexpr (!std::is_same_v<View, ConstBufferView>) return detail::view_of(static_cast<T&>(tensor));
    else return {};
}

/// The same, read-only.
template <class R>
ConstBufferView const_buffer(R&& tensor) {
    return detail::view_of(static_cast<std::remove_reference_t<R>&>(tensor));
}

}  // namespace gradsync::inline v0_2
