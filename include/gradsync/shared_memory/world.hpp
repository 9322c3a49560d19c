#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../core/clock.hpp"
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
        : cores(std::max(1, static_cast<int>(std::thread::hardware_concurrency()))), cores_are_shared(size > cores) {}

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

    /// Which group a new board is for: the colour, in the split of that number of that board.
    struct Group {
        const Board* parent = nullptr;
        std::size_t split = 0;
        int color = 0;
        friend bool operator==(const Group&, const Group&) = default;
    };

    /// The board that the members of a new group share: made by the first of them who asks, forgotten once all
    /// `members` have it.
    template <class Make>
    std::shared_ptr<Board> meet(const Group& group, int members, Make&& make) {
        std::lock_guard lock(mutex_);
        auto meeting = std::find_if(meetings_.begin(), meetings_.end(), [&](const Meeting& m) { return m.group == group; });
        if (meeting == meetings_.end()) meeting = meetings_.insert(meeting, {group, make(), 0});
        std::shared_ptr<Board> board = meeting->board;
        if (++meeting->arrived == members) meetings_.erase(meeting);
        return board;
    }

    const int cores;
    const bool cores_are_shared;  ///< there are more ranks than cores
    Bell bell;

private:
    struct Meeting {
        Group group;
        std::shared_ptr<Board> board;
        int arrived = 0;
    };

    std::mutex mutex_;
    std::atomic<bool> failed_{false};
    Failure failure_;
    std::vector<Meeting> meetings_;
};

}  // namespace gradsync::inline v0::shared_memory
