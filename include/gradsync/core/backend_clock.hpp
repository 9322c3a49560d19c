#pragma once

#include <concepts>

#include "clock.hpp"

namespace gradsync::inline v0 {

/// Seconds, from any moment on, of the time in which this backend's collectives take place: its own `now()` where it has
/// one, as a simulation has, else the steady clock's.
template <class B>
double backend_seconds(const B& backend) {
    if constexpr (requires { { backend.now() } -> std::convertible_to<double>; }) return backend.now();
    else return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace gradsync::inline v0
