// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <exception>
#include <utility>

namespace gradsync::inline v0_2 {

/// Marks synchronise nothing while this lives. `no_sync()` of a Reducer or of a sharded class returns it; that object
/// must outlive it.
class [[nodiscard]] NoSync {
public:
    /// Internal: calls `end(owner, unwinds)` on destruction. `unwinds`: an exception ends the micro-batch.
    NoSync(void* owner, void (*end)(void* owner, bool unwinds)) noexcept : owner_(owner), end_(end) {}
    NoSync(NoSync&& other) noexcept : owner_(std::exchange(other.owner_, nullptr)), end_(other.end_) {}
    NoSync& operator=(NoSync&&) = delete;
    ~NoSync() {
        if (owner_ != nullptr) end_(owner_, std::uncaught_exceptions() != exceptions_);
    }

private:
    void* owner_;
    void (*end_)(void*, bool);
    int exceptions_ = std::uncaught_exceptions();
};

}  // namespace gradsync::inline v0_2
