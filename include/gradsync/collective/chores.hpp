// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <mutex>
#include <vector>

namespace gradsync::inline v0_2::collective {

/// What has to be done for this rank by a thread of its own, whatever it waits for: it may wait in one communicator for a
/// rank that waits in another.
class Chore {
public:
    /// As much as can be done at once; not if another thread is at it.
    virtual void try_advance() noexcept = 0;

protected:
    ~Chore() = default;
};

/// The chores of all communicators of one rank. For concurrent use.
class Chores {
public:
    void enlist(Chore& chore) {
        std::lock_guard lock(mutex_);
        chores_.push_back(&chore);
    }
    void dismiss(Chore& chore) noexcept {
        std::lock_guard lock(mutex_);
        std::erase(chores_, &chore);
    }
    void try_advance() noexcept {
        std::unique_lock lock(mutex_, std::try_to_lock);
        if (!lock) return;
        for (Chore* chore : chores_) chore->try_advance();
    }

private:
    std::mutex mutex_;
    std::vector<Chore*> chores_;
};

}  // namespace gradsync::inline v0_2::collective
