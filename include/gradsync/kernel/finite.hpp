// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "../core/buffer_view.hpp"
#include "isa.hpp"

namespace gradsync::inline v0_2::kernel {

namespace detail {

/// Is there an element whose bits in `mask` are all set?
struct AnyWith {
    template <class Bits>
    GRADSYNC_ALWAYS_INLINE static void run(const void* elements, std::size_t count, Bits mask, bool* found) {
        using Word [[gnu::may_alias]] = Bits;
        const auto* data = static_cast<const Word*>(elements);
        constexpr std::size_t block = 4096 / sizeof(Bits);
        for (std::size_t first = 0; first < count && !*found; first += block) {
            const std::size_t end = count - first < block ? count : first + block;
            Bits any = 0;
            for (std::size_t i = first; i < end; ++i) any |= static_cast<Bits>((data[i] & mask) == mask);
            *found = any != 0;
        }
    }
};

template <class Bits>
bool any_with(ConstBufferView buffer, Bits mask) {
    bool found = false;
    dispatch<AnyWith>(buffer.data, buffer.count, mask, &found);
    return found;
}

}  // namespace detail

/// True if no element is infinite or NaN. Stops soon after one. Integers are finite.
template <class = void>  // see isa.hpp
bool all_finite(ConstBufferView buffer) {
    switch (buffer.dtype) {
        case DType::f64: return !detail::any_with<std::uint64_t>(buffer, 0x7ff0'0000'0000'0000u);
        case DType::f32: return !detail::any_with<std::uint32_t>(buffer, 0x7f80'0000u);
        case DType::f16: return !detail::any_with<std::uint16_t>(buffer, 0x7c00u);
        case DType::bf16: return !detail::any_with<std::uint16_t>(buffer, 0x7f80u);
        case DType::f8e5m2: return !detail::any_with<std::uint8_t>(buffer, 0x7cu);
        case DType::f8e4m3: return !detail::any_with<std::uint8_t>(buffer, 0x7fu);  // has no infinity, and one NaN
        default: return true;
    }
}

}  // namespace gradsync::inline v0_2::kernel
