// SPDX-License-Identifier: BSL-1.0
#pragma once

/// Explicit instantiations of the kernels. By default every file that makes a backend or a Reducer compiles them: for four floating types
/// in three instruction sets, and for six integer types in the baseline one (the 8-bit types use the kernels of f32). If a program has
/// several such files, define GRADSYNC_EXTERN_KERNELS for all of them, and include this header in one file.

#include "../core/version.hpp"
#include "convert.hpp"
#include "elementwise.hpp"
#include "reduce.hpp"

namespace gradsync::inline v0_2::kernel {

template void convert<void>(const void*, DType, void*, DType, std::size_t) noexcept;
template void copy<void>(ConstBufferView, BufferView);
template void add<void>(BufferView, ConstBufferView);
template void scale<void>(BufferView, double);
template void clamp<void>(BufferView, double);
template double sum_of_squares<void>(ConstBufferView);
template void reduce<void>(const Reduction&);

}  // namespace gradsync::inline v0_2::kernel
