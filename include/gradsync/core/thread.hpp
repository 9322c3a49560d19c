// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <system_error>

#include "forked.hpp"

namespace gradsync::inline v0_2::detail {

/// A thread that the destructor joins, except in a forked child, which does not have the thread. It compiles faster
/// than std::thread, which has fifty functions per function that it runs.
class Thread {
public:
    Thread() = default;
    Thread& operator=(Thread&&) = delete;
    ~Thread() {
        if (joinable_) join();
    }

    /// Runs `f()`, which lives until `join()` has returned. Throws std::system_error if the system has no more threads.
    template <class F>
    void start(F& f) {
        const auto run = [](void* own) -> void* {
            (*static_cast<F*>(own))();
            return nullptr;
        };
        if (const int error = ::pthread_create(&thread_, nullptr, run, &f))
            throw std::system_error(
                error, std::generic_category(),
                "gradsync: a thread could not be started; start fewer, or raise the limits of processes and memory "
                "(ulimit -u, ulimit -v, the container's)");
        joinable_ = true;
    }
    bool joinable() const noexcept { return joinable_; }
    void join() noexcept {
        if (maker_.is_here()) ::pthread_join(thread_, nullptr);
        joinable_ = false;
    }

private:
    pthread_t thread_{};
    bool joinable_ = false;
    Maker maker_;
};

}  // namespace gradsync::inline v0_2::detail
