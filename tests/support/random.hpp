// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>

namespace gradsync_test {

/// SplitMix64: quick to seed, and the same numbers on every platform.
class Random {
public:
    explicit Random(std::uint64_t seed) noexcept : state_(seed) {}
    std::uint64_t operator()() noexcept {
        std::uint64_t x = state_ += 0x9e3779b97f4a7c15u;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
        return x ^ (x >> 31);
    }
    std::size_t below(std::size_t n) noexcept { return static_cast<std::size_t>((*this)() % n); }

private:
    std::uint64_t state_;
};

}  // namespace gradsync_test
