// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "loops.hpp"
#include "reduce.hpp"

namespace gradsync::inline v0_2::kernel {

namespace detail {

/// An element is not finite if all bits of `not_finite` are set.
template <class T, typename T::Bits not_finite>
constexpr Kernels kernels_of_low_precision() {
    Kernels kernels{
        .to_f32 = to_f32<T>, .from_f32 = from_f32<T>, .all_finite = none_with<typename T::Bits, not_finite>};
    if constexpr (sizeof(T) == 2) kernels.sum = dispatch_vectors<RegisterSum<T>, const Reduction*>;
    return kernels;
}

template <class T>
constexpr Kernels kernels_of_double() {
    return {.to_f32 = to_f32<T>,
            .from_f32 = from_f32<T>,
            .all_finite = none_with<std::uint64_t, 0x7ff0'0000'0000'0000u>,
            .sum = dispatch_vectors<RegisterSum<T>, const Reduction*>,
            .to_f32_odd = round_to_odd,
            .reduce = [](const Reduction* r) { dispatch<BlockedReduce<T>>(r, Conversions<T>()); },
            .scale = dispatch<InPlace<Product>, T*, std::size_t, T>,
            .clamp = dispatch<InPlace<Clamp>, T*, std::size_t, T>,
            .add = add<T>,
            .add_squares = dispatch<SumOfSquares, const T*, std::size_t, T*>};
}

}  // namespace detail

/// The table of a floating type other than f32. Not inline, so that an explicit instantiation elsewhere can replace it.
template <DType type>
const Kernels& table_of() noexcept {
    static constexpr Kernels table = [] {
        if constexpr (type == DType::f16) return detail::kernels_of_low_precision<Float16, 0x7c00>();
        else if constexpr (type == DType::bf16) return detail::kernels_of_low_precision<BFloat16, 0x7f80>();
        else if constexpr (type == DType::f8e4m3)
            return detail::kernels_of_low_precision<Float8E4M3, 0x7f>();  // has no infinity, and one NaN
        else if constexpr (type == DType::f8e5m2) return detail::kernels_of_low_precision<Float8E5M2, 0x7c>();
        else return detail::kernels_of_double<double>();
    }();
    return table;
}

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

#ifdef GRADSYNC_COMPILED  // these are in a library, whose source defines GRADSYNC_EXTERN as nothing
#ifndef GRADSYNC_EXTERN
#define GRADSYNC_EXTERN extern
#endif
GRADSYNC_EXTERN template const Kernels& table_of<DType::f16>() noexcept;
GRADSYNC_EXTERN template const Kernels& table_of<DType::bf16>() noexcept;
GRADSYNC_EXTERN template const Kernels& table_of<DType::f64>() noexcept;
GRADSYNC_EXTERN template const Kernels& table_of<DType::f8e4m3>() noexcept;
GRADSYNC_EXTERN template const Kernels& table_of<DType::f8e5m2>() noexcept;
GRADSYNC_EXTERN template void dispatch_vectors<detail::RegisterSum<float>>(const Reduction*);
GRADSYNC_EXTERN template void dispatch<detail::BlockedReduce<float>>(const Reduction*, detail::Conversions<float>);
GRADSYNC_EXTERN template void dispatch<detail::InPlace<detail::Product>>(float*, std::size_t, double);
GRADSYNC_EXTERN template void dispatch<detail::InPlace<detail::Clamp>>(float*, std::size_t, double);
GRADSYNC_EXTERN template void dispatch<detail::SumOfSquares>(const float*, std::size_t, double*);
GRADSYNC_EXTERN template void detail::add<float>(void*, DType, const void*, DType, std::size_t);
GRADSYNC_EXTERN template bool detail::none_with<std::uint32_t, 0x7f80'0000>(const void*, std::size_t);
GRADSYNC_EXTERN template void run_baseline<detail::BlockedReduce<std::uint64_t>>(const Reduction*,
                                                                                 detail::Conversions<std::uint64_t>);
#endif

}  // namespace gradsync::inline v0_2::kernel
