// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>

#include "dtype.hpp"

/// @file
/// A program compiles the loops of the element types of which it makes views, and of no others. A view is vocabulary
/// and knows no loop, so it only registers the table of its type here. kernel/tables.hpp defines the tables; every
/// header that computes includes it.

namespace gradsync::inline v0_2::kernel {

struct Kernels;

namespace detail {

/// By dtype. All shared objects of a program share them, even with -fvisibility=hidden.
[[gnu::visibility("default")]] inline std::atomic<const Kernels*> tables[dtype_count];

}  // namespace detail

/// The table of a floating type other than f32.
template <DType type>
const Kernels& table_of() noexcept;

/// Compiles the loops of an element type into the program. Called where a C++ type becomes a DType.
template <DType type>
void register_kernels() noexcept {
    if constexpr (is_floating(type) && type != DType::f32) {
        std::atomic<const Kernels*>& table = detail::tables[static_cast<std::size_t>(type)];
        if (table.load(std::memory_order_relaxed) == nullptr) table.store(&table_of<type>(), std::memory_order_relaxed);
    }
}

/// The function above for a type known at run time. A constant expression, so that constants can hold it.
template <class = void>
constexpr auto registration_of(DType type) noexcept -> void (*)() noexcept {
    switch (type) {
        case DType::f16: return register_kernels<DType::f16>;
        case DType::bf16: return register_kernels<DType::bf16>;
        case DType::f64: return register_kernels<DType::f64>;
        case DType::f8e4m3: return register_kernels<DType::f8e4m3>;
        case DType::f8e5m2: return register_kernels<DType::f8e5m2>;
        default: return register_kernels<DType::f32>;
    }
}

/// The same for a type known at run time. Compiles the loops of all types, unless `type` is a constant and the compiler
/// optimises. A template, so that only files that call it compile them.
template <class = void>
[[gnu::always_inline]] inline void register_kernels(DType type) noexcept {
    registration_of(type)();
}

}  // namespace gradsync::inline v0_2::kernel
