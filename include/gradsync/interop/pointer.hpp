// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/buffer_view.hpp"
#include "../kernel/tables.hpp"

/// @file
/// Views of a raw pointer and a count. A pointer does not say which memory it points to, so the name of the function
/// does. A pointer to const gives a `ConstBufferView`.

namespace gradsync::inline v0_2 {

/// A view of host or device memory behind a pointer; read-only for a pointer to const.
template <class T>
using PointerView = BasicBufferView<std::conditional_t<std::is_const_v<T>, const void, void>>;

/// `count` elements in host memory.
template <Element T>
PointerView<T> host_buffer(T* data, std::size_t count) noexcept {
    return {data, count, MemorySpace::host};
}

/// `count` elements in a device's own memory, such as cudaMalloc's.
template <Element T>
PointerView<T> device_buffer(T* data, std::size_t count) noexcept {
    return {data, count, MemorySpace::device};
}

}  // namespace gradsync::inline v0_2
