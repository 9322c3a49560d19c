#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "../core/error.hpp"
#include "waiting.hpp"

namespace gradsync::inline v0::shared_memory {

class Board;

/// Why a world ended. Ranks are world ranks.
struct Failure {
    Errc code = Errc::peer_failed;
    int culprit = -1;      ///< the rank to blame
    std::string message;   ///< a sentence that makes sense on every rank
};

/// What all communicators that descend from one another share: the first failure, which ends all of them, and
/// the bell that wakes their sleepers.
class World {
public:
    explicit World(int size) noexcept
        : cores_are_shared(static_cast<unsigned>(size) > std::thread::hardware_concurrency()) {}

    /// Records the failure if it is the first, and wakes everybody. True if it was the first.
    bool fail(Failure failure) noexcept {
        {
            std::lock_guard lock(mutex_);
            if (failed_.load(std::memory_order_relaxed)) return false;
            failure_ = std::move(failure);
            failed_.store(true, std::memory_order_seq_cst);
        }
        bell.ring();
        return true;
    }

    bool failed() const noexcept { return failed_.load(std::memory_order_seq_cst); }

    /// The first failure; only after `failed()`.
    const Failure& failure() const noexcept { return failure_; }

    /// The board that the members of a new group share: made by the first of them who asks, forgotten once all
    /// `members` have it. `key` tells groups apart: (parent board, number of the split on it, colour).
    template <class Make>
    std::shared_ptr<Board> meet(std::pair<std::pair<const Board*, std::size_t>, int> key, int members, Make&& make) {
        std::lock_guard lock(mutex_);
        Meeting& meeting = meetings_[key];
        if (!meeting.board) meeting.board = make();
        std::shared_ptr<Board> board = meeting.board;
        if (++meeting.arrived == members) meetings_.erase(key);
        return board;
    }

    const bool cores_are_shared;
    Bell bell;

private:
    struct Meeting {
        std::shared_ptr<Board> board;
        int arrived = 0;
    };

    std::mutex mutex_;
    std::atomic<bool> failed_{false};
    Failure failure_;
    std::map<std::pair<std::pair<const Board*, std::size_t>, int>, Meeting> meetings_;
};

}  // namespace gradsync::inline v0::shared_memory
