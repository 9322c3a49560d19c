// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <mutex>
#include <vector>

namespace gradsync::inline v0_2::collective {

/// Work that one of this rank's threads must do for it, even while it waits for something else: it may wait in one communicator for a rank
/// that waits in another.
class ProgressHook {
public:
    /// Does as much as it can at once; a no-op if another thread is doing it.
    virtual void try_advance() noexcept = 0;

protected:
    ~ProgressHook() = default;
};

/// The hooks of all communicators of one rank. Thread-safe.
class ProgressHooks {
public:
    void enlist(ProgressHook& hook) {
        std::lock_guard lock(mutex_);
        hooks_.push_back(&hook);
    }
    void dismiss(ProgressHook& hook) noexcept {
        std::lock_guard lock(mutex_);
        std::erase(hooks_, &hook);
    }
    void try_advance() noexcept {
        std::unique_lock lock(mutex_, std::try_to_lock);
        if (!lock) return;
        for (ProgressHook* hook : hooks_) hook->try_advance();
    }

private:
    std::mutex mutex_;
    std::vector<ProgressHook*> hooks_;
};

}  // namespace gradsync::inline v0_2::collective
