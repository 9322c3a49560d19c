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

namespace detail {

/// The clock of a backend, whatever the backend's type. The backend outlives it.
class BackendClock {
public:
    using Clock = std::chrono::steady_clock;

    template <class B>
    explicit BackendClock(const B& backend) noexcept : backend_(&backend) {
        if constexpr (abilities_of<B>.clock) read_ = [](const void* own) { return backend_seconds(*static_cast<const B*>(own)); };
    }
    double seconds() const { return read_ == nullptr ? backend_seconds(*this) : read_(backend_); }
    /// The same as a time point.
    Clock::time_point now() const {
        if (read_ == nullptr) return Clock::now();
        return Clock::time_point(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(read_(backend_))));
    }

private:
    const void* backend_;
    double (*read_)(const void*) = nullptr;  ///< null: the steady clock
};

}  // namespace detail

/// The time on the clock of this backend's collectives, in whole nanoseconds.
template <class B>
std::chrono::steady_clock::time_point backend_now(const B& backend) {
    return detail::BackendClock(backend).now();
}

}  // namespace gradsync::inline v0_2
