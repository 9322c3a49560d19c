// SPDX-License-Identifier: BSL-1.0
#pragma once
// A 64-bit hash of bytes: tells apart what differs, by accident rather than by malice.

#include <array>
#include <bit>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "parameters.hpp"

namespace gradsync_train {

class Digest {
public:
    /// Bytes hashed in one call or in several pieces of a multiple of 8 give the same value.
    Digest& update(const void* data, std::size_t bytes) {
        const auto* at = static_cast<const unsigned char*>(data);
        for (; bytes > 0;) {
            std::uint64_t word = 0;
            const std::size_t n = bytes < 8 ? bytes : 8;
            std::memcpy(&word, at, n);
            state_ = std::rotl((state_ ^ word) * 0x9e3779b97f4a7c15u, 29);
            at += n;
            bytes -= n;
            length_ += n;
        }
        return *this;
    }

    std::uint64_t value() const { return Random::mix(state_ ^ length_); }

private:
    std::uint64_t state_ = 0x243f6a8885a308d3u;
    std::uint64_t length_ = 0;
};

inline std::string hexadecimal(std::uint64_t x) {
    std::array<char, 16> digits{};
    const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), x, 16).ptr;
    const std::string text(digits.data(), end);
    return std::string(16 - text.size(), '0') + text;
}

}  // namespace gradsync_train
