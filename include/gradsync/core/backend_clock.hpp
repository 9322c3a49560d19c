// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>

#include "clock.hpp"

namespace gradsync::inline v0_2 {

namespace detail {

template <class B>
concept HasClock = requires(const B& backend) {
    { backend.now() } -> std::convertible_to<double>;
};

}  // namespace detail

/// Seconds, from any moment on, of the time in which this backend's collectives take place: its own `now()` where it has
/// one, as a simulation has, else the steady clock's.
template <class B>
double backend_seconds(const B& backend) {
    if constexpr (detail::HasClock<B>) return backend.now();
    else return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// The same in whole nanoseconds.
template <class B>
std::chrono::steady_clock::time_point backend_now([[maybe_unused]] const B& backend) {
    using Clock = std::chrono::steady_clock;
    if constexpr (detail::HasClock<B>)
        return Clock::time_point(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(backend.now())));
    else return Clock::now();
}

}  // namespace gradsync::inline v0_2
