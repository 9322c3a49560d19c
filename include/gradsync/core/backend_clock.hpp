// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "backend_abilities.hpp"
#include "clock.hpp"

namespace gradsync::inline v0_2 {

/// Seconds on the clock of this backend's collectives, from an unspecified origin: its own `now()` if it has one, else the steady clock.
template <class B>
double backend_seconds([[maybe_unused]] const B& backend) {
    if constexpr (abilities_of<B>.clock) return backend.now();
    else return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// The same as a time point, in whole nanoseconds.
template <class B>
std::chrono::steady_clock::time_point backend_now([[maybe_unused]] const B& backend) {
    using Clock = std::chrono::steady_clock;
    if constexpr (abilities_of<B>.clock)
        return Clock::time_point(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(backend.now())));
    else return Clock::now();
}

namespace detail {

/// The clock of a backend, whatever the backend's type. The backend outlives it.
class BackendClock {
public:
    using Time = std::chrono::steady_clock::time_point;

    template <class B>
    explicit BackendClock([[maybe_unused]] const B& backend) noexcept {
        if constexpr (abilities_of<B>.clock) {
            backend_ = &backend;
            read_ = [](const void* own) { return backend_now(*static_cast<const B*>(own)); };
        }
    }
    Time now() const { return read_ == nullptr ? std::chrono::steady_clock::now() : read_(backend_); }

private:
    const void* backend_ = nullptr;
    Time (*read_)(const void*) = nullptr;  ///< null: the steady clock
};

}  // namespace detail

}  // namespace gradsync::inline v0_2
