// SPDX-License-Identifier: BSL-1.0
#pragma once

/// The kernels, compiled here. Every file that makes a backend or a Reducer compiles them anew, for ten element types
/// in three instruction sets (two more share those of f32). A program of several such files defines
/// GRADSYNC_EXTERN_KERNELS for all of them and includes this header in one, or in a file of its own.

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
