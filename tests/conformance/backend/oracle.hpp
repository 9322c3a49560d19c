// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include <gradsync/core/buffer_view.hpp>
#include <gradsync/core/reduce_op.hpp>

#include "support/random.hpp"

namespace gradsync_test {

using Bytes = std::vector<std::byte>;
using ConstBytes = std::span<const std::byte>;

/// Calls `use(T{})` with the element type of `dtype`.
template <class F>
decltype(auto) with_element_type(gradsync::DType dtype, F&& use) {
    using gradsync::DType;
    switch (dtype) {
        case DType::i8: return use(std::int8_t{});
        case DType::u8: return use(std::uint8_t{});
        case DType::i32: return use(std::int32_t{});
        case DType::u32: return use(std::uint32_t{});
        case DType::i64: return use(std::int64_t{});
        case DType::u64: return use(std::uint64_t{});
        case DType::f16: return use(gradsync::Float16{});
        case DType::bf16: return use(gradsync::BFloat16{});
        case DType::f64: return use(double{});
        case DType::f8e4m3: return use(gradsync::Float8E4M3{});
        case DType::f8e5m2: return use(gradsync::Float8E5M2{});
        default: return use(float{});
    }
}

/// `count` random elements, the same for the same seed: integers of all sizes, which wrap around; floats over seven
/// binades, so that sums round, and depend on their order.
Bytes random_elements(gradsync::DType dtype, std::size_t count, std::uint64_t seed);

/// The same of an 8-bit type, for sums, means and products that are in any order and may be rounded after every step: in a type
/// of so few bits no tolerance could tell that from a wrong result. They are such powers of two that the result for up to 4 ranks has
/// the same bits in any order: every partial sum and product is a number of the type (see Collective for the weights of means).
Bytes representable_elements(gradsync::DType dtype, gradsync::ReduceOp op, std::size_t count, std::uint64_t seed);

/// The reduction of `inputs`, one for each rank, in the plainest way: element by element, in the order of the tree over the ranks, in the
/// accumulator's type, rounded once.
Bytes reduce_by_hand(gradsync::DType dtype, gradsync::ReduceOp op, const std::vector<Bytes>& inputs,
                     const std::vector<gradsync::Contribution>& contributions);

/// Whether two buffers have the same bits. (`==` of vectors of std::byte compares them byte by byte.)
inline bool same(ConstBytes a, ConstBytes b) noexcept {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
}

/// Where two buffers differ, or "". `exact`: in any bit; else, for floating types of more than 8 bits, by more than another order
/// of summation over `size` ranks can explain.
std::string difference(gradsync::DType dtype, ConstBytes actual, ConstBytes expected, bool exact, int size);

}  // namespace gradsync_test
