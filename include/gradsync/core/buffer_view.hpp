#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <type_traits>
#include <utility>

#include "dtype.hpp"

namespace gradsync::inline v0 {

/// Where a buffer lies: in memory that the host's code can read, or in a device's own.
enum class MemorySpace : std::uint8_t { host, device };

constexpr std::string_view name_of(MemorySpace space) noexcept {
    return space == MemorySpace::host ? "host" : "device";
}

/// `count` contiguous elements of `dtype`, borrowed: whoever made the view keeps the memory alive.
/// The erased form in which buffers travel inside the library.
template <class Void>
    requires std::is_void_v<Void>
struct BasicBufferView {
    Void* data = nullptr;
    std::size_t count = 0;
    DType dtype = DType::f32;
    MemorySpace space = MemorySpace::host;

    constexpr std::size_t bytes() const noexcept { return count * size_of(dtype); }

    /// The `size` elements that start at element `first`.
    BasicBufferView subview(std::size_t first, std::size_t size) const noexcept {
        using Byte = std::conditional_t<std::is_const_v<Void>, const std::byte, std::byte>;
        return {data ? static_cast<Byte*>(data) + first * size_of(dtype) : nullptr, size, dtype, space};
    }

    /// A mutable view serves where a constant one is asked for.
    constexpr operator BasicBufferView<const void>() const noexcept
        requires(!std::is_const_v<Void>)
    {
        return {data, count, dtype, space};
    }

    friend constexpr bool operator==(BasicBufferView, BasicBufferView) = default;
};

using BufferView = BasicBufferView<void>;
using ConstBufferView = BasicBufferView<const void>;

namespace detail {

// The concepts of <ranges> without that header, which costs more compile time than all of ours. What std::begin, end,
// data and size are comes with <span> too.
template <class R>
concept Range = requires(R& range) {
    std::begin(range);
    std::end(range);
};

template <Range R>
using range_element_t = std::remove_reference_t<decltype(*std::begin(std::declval<R&>()))>;

template <class R>
concept ContiguousRange = Range<R> && requires(R& range) {
    std::data(range);
    std::span(std::begin(range), std::size(range));  // takes contiguous iterators only
};

template <class R>
consteval void check_buffer_range() {
    static_assert(Range<R>,
                  "gradsync: describe this type by specialising gradsync::parameter_traits, or pass a "
                  "contiguous range such as std::span; see docs/your-own-tensor.md");
    if constexpr (Range<R>) {
        static_assert(ContiguousRange<R>,
                      "gradsync: copy this tensor into contiguous memory first, or hand out a std::span of it: "
                      "collectives need contiguous elements");
        static_assert(Element<range_element_t<R>>,
                      "gradsync: use float, double, Float16, BFloat16, or an integer of 1, 4 or 8 bytes: this element "
                      "type is not supported");
    }
}

}  // namespace detail

/// A view of a contiguous range (`std::vector`, `std::span`, `std::array`, ...) in host memory.
template <class R>
BufferView buffer(R&& range) {
    detail::check_buffer_range<R>();
    if constexpr (detail::ContiguousRange<R>) {
        using T = detail::range_element_t<R>;
        static_assert(!std::is_const_v<T>,
                      "gradsync: pass a mutable range: the library writes the result into it (const_buffer() makes a "
                      "read-only view)");
        if constexpr (Element<T> && !std::is_const_v<T>)
            return {std::data(range), static_cast<std::size_t>(std::size(range)), dtype_of<T>,
                    MemorySpace::host};
    }
    return {};
}

/// The same, read-only.
template <class R>
ConstBufferView const_buffer(R&& range) {
    detail::check_buffer_range<R>();
    if constexpr (detail::ContiguousRange<R>) {
        using T = detail::range_element_t<R>;
        if constexpr (Element<T>)
            return {std::data(range), static_cast<std::size_t>(std::size(range)), dtype_of<T>,
                    MemorySpace::host};
    }
    return {};
}

}  // namespace gradsync::inline v0
