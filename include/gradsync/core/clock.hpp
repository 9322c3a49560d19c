// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <mutex>  // for durations and the steady clock, see below

#include "backend_abilities.hpp"
#include "text.hpp"

// Durations and the steady clock come from <mutex>, because libstdc++'s <chrono> also brings calendars and <sstream>:
// 0.06 s more per file. The waits of std::timed_mutex take them, and all standard libraries define these waits in that
// header, with the steady clock.
static_assert(std::chrono::steady_clock::is_steady);

namespace gradsync::inline v0_2::detail {

/// Limits a time-out to a hundred years, so that it can be added to a time. Callers pass
/// nanoseconds::max() for no limit.
constexpr std::chrono::nanoseconds clamp_timeout(std::chrono::nanoseconds limit) noexcept {
    constexpr std::chrono::nanoseconds longest = std::chrono::hours(24 * 365 * 100);
    return limit < longest ? limit : longest;
}

/// Formats a duration as "1.5 s", in every locale. The duration must not be negative.
[[gnu::cold]] inline std::string format_duration(std::chrono::nanoseconds duration) {
    constexpr std::int64_t second = 1'000'000'000;
    const std::int64_t whole = duration.count() / second, rest = duration.count() % second;
    if (rest == 0) return text(whole, " s");
    const std::string digits = std::to_string(second + rest);
    return text(whole, ".", digits.substr(1, digits.find_last_not_of('0')), " s");
}

}  // namespace gradsync::inline v0_2::detail

namespace gradsync::inline v0_2 {

/// Seconds on the clock of this backend's collectives, from an unspecified origin: its own `now()` if it has one, else
/// the steady clock.
template <class B>
double backend_seconds([[maybe_unused]] const B& backend) {
    if constexpr (abilities_of<B>.clock) return backend.now();
    else return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

namespace detail {

/// The clock of a backend, without the backend's type. The backend must outlive it.
class BackendClock {
public:
    using Clock = std::chrono::steady_clock;

    template <class B>
    explicit BackendClock(const B& backend) noexcept : backend_(&backend) {
        if constexpr (abilities_of<B>.clock)
            read_ = [](const void* own) { return backend_seconds(*static_cast<const B*>(own)); };
    }
    double seconds() const { return read_ == nullptr ? backend_seconds(*this) : read_(backend_); }
    /// The same as a time point.
    Clock::time_point now() const {
        if (read_ == nullptr) return Clock::now();
        return Clock::time_point(
            std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(read_(backend_))));
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
