// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <exception>
#include <mutex>
#include <string>

#include "../core/error.hpp"

namespace gradsync::inline v0_2::detail {

/// Remembers the first failure, for all calls that come after it. For any thread.
class FailureLatch {
public:
    bool failed() const noexcept { return failed_.load(std::memory_order_acquire); }
    /// The first failure's text; only after `failed()`.
    const std::string& what() const noexcept { return what_; }
    Errc code() const noexcept { return code_; }

    /// The first one counts.
    void remember(const std::string& what, Errc code = Errc::peer_failed) {
        std::lock_guard lock(lock_);
        if (failed()) return;
        what_ = what;
        code_ = code;
        failed_.store(true, std::memory_order_release);
    }

    /// Runs what leaves nothing to go on with if it throws: then the other ranks of `backend` are told.
    template <class B, class F>
    decltype(auto) guard(B& backend, F&& f) {
        try {
            return f();
        } catch (const Error& e) {
            remember(e.what(), e.errc());
            backend.fail(what());
            throw;
        } catch (const std::exception& e) {
            remember(e.what());
            backend.fail(what());
            throw;
        } catch (...) {
            remember("an exception that is no std::exception");
            backend.fail(what());
            throw;
        }
    }

private:
    std::mutex lock_;
    std::atomic<bool> failed_{false};
    std::string what_;
    Errc code_ = Errc::peer_failed;  ///< that of an Error; of what is none, what the communicator has for all
};

}  // namespace gradsync::inline v0_2::detail
