#pragma once

#include <cstddef>

#include "../core/backend_clock.hpp"
#include "../observe/observer.hpp"
#include "exposure.hpp"

namespace gradsync::inline v0::detail {

/// A stopwatch on the backend's clock: adds up what holds a step up, and tells the observer, if there is one. For any thread.
template <class B>
class Watch {
public:
    using Time = Observer::Time;

    /// Both outlive this; `observer` may be null.
    Watch(const B& backend, Observer* observer) noexcept : backend_(backend), observer_(observer) {}

    Time now() const { return backend_now(backend_); }
    Observer* observer() const noexcept { return observer_; }

    void ready(std::size_t parameter) {
        if (observer_ != nullptr) observer_->ready(parameter, now());
    }
    void begin(Activity activity, std::size_t index, Time at) noexcept {
        if (observer_ != nullptr) observer_->begin(activity, index, at);
    }
    void end(Activity activity, std::size_t index, Time at) noexcept {
        if (observer_ != nullptr) observer_->end(activity, index, at);
    }

    /// Now.
    void begin(Activity activity, std::size_t index) {
        if (observer_ != nullptr) observer_->begin(activity, index, now());
    }
    void end(Activity activity, std::size_t index) {
        if (observer_ != nullptr) observer_->end(activity, index, now());
    }

    /// The step was held up.
    void add(Time begin, Time end) noexcept { exposure_.add(begin, end); }

    /// The step is held up, until the end of this or `end()`.
    class [[nodiscard]] Held {
    public:
        Held(Watch& watch, Activity activity, std::size_t index) : watch_(watch), activity_(activity), index_(index), begin_(watch.now()) {
            watch_.begin(activity_, index_, begin_);
        }
        Held(const Held&) = delete;
        Held& operator=(const Held&) = delete;
        ~Held() { end(); }

        void end() {
            if (ended_) return;
            ended_ = true;
            const Time at = watch_.now();
            watch_.add(begin_, at);
            watch_.end(activity_, index_, at);
        }

    private:
        Watch& watch_;
        Activity activity_;
        std::size_t index_;
        Time begin_;
        bool ended_ = false;
    };
    Held hold(Activity activity, std::size_t index = Observer::no_index) { return Held(*this, activity, index); }

    /// Seconds by which the step was held up since the last call.
    double take_exposed_seconds() noexcept { return std::chrono::duration<double>(exposure_.take()).count(); }

private:
    const B& backend_;
    Observer* observer_;
    Exposure exposure_;
};

}  // namespace gradsync::inline v0::detail
