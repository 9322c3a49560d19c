// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../collective/world.hpp"
#include "../core/thread.hpp"
#include "records.hpp"

namespace gradsync::inline v0_2::elastic {

/// Internal: looks at the store in a thread of its own while the ranks train, and tells whether they should change:
/// because a process waits to become a member, or a member wants to leave. A store that is away delays that.
class Watch {
public:
    /// `records`: for the thread alone. Throws std::system_error if no thread can be started.
    Watch(Records records, const collective::ProcessIdentity& self) : records_(std::move(records)), is_dead_{self} {
        records_.store().set_timeout(std::chrono::seconds(1));  // the destructor waits for a look
        thread_.start(*this);
    }
    Watch(const Watch&) = delete;
    ~Watch() {
        stops_ = true;
        wakes_.ring();
    }

    bool wants_change() const noexcept { return wants_change_.load(std::memory_order_relaxed); }

private:
    friend class detail::Thread;
    static constexpr auto interval = std::chrono::milliseconds(10);

    void operator()() {
        while (!stops_) {
            const auto begin = std::chrono::steady_clock::now();
            try {
                look();
            } catch (const std::exception&) {  // the next meeting learns of it
            }
            wakes_.nap([&] { return stops_.load(); }, pause_after_look(begin, interval));
        }
    }
    void look() {
        records_.refresh();
        records_.call_waiting(is_dead_);
        wants_change_.store(records_.machine().wants_change(is_dead_), std::memory_order_relaxed);
    }

    Records records_;
    IsDead is_dead_;
    std::atomic<bool> wants_change_ = false, stops_ = false;
    collective::WaitQueue wakes_;
    detail::Thread thread_;  // the last member: the others outlive it
};

}  // namespace gradsync::inline v0_2::elastic
