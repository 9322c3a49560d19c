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

/// Not inline, so that an explicit instantiation elsewhere can replace it.
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
