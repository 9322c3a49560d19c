// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <utility>

#include "../core/backend.hpp"

namespace gradsync::inline v0_2::detail {

/// A collective, and what is to follow when it is complete: a `Work` of several stages, which whoever tests it or waits for it carries out.
///
/// Stage, default-constructible and movable:
/// - `next(work)` is called when `work` is complete: it does what is to be done then, and starts the next collective in `work`, or leaves
///   it complete. True while there is more to follow. Where it throws, because the thread may not communicate, say, whoever tests or waits
///   next calls it again: what it has done by then it has to know.
/// - `drop()`: the rest will not happen; the other ranks are not to wait for it. Never throws.
///
/// Buckets are tested and waited for in their order, one after the other: so all ranks start the collectives of one stage in one order.
/// Those of different stages do not come in one order, and need a communicator each.
template <Work W, class Stage>
class StagedWork {
public:
    StagedWork() = default;
    /// One that has nothing to follow.
    explicit StagedWork(W work) : work_(std::move(work)) {}
    StagedWork(W work, Stage stage) : work_(std::move(work)), stage_(std::move(stage)), more_(true) {}
    StagedWork(StagedWork&& other) noexcept
        : work_(std::move(other.work_)), stage_(std::move(other.stage_)), more_(std::exchange(other.more_, false)) {}
    StagedWork& operator=(StagedWork&& other) noexcept {
        StagedWork old(std::move(*this));
        work_ = std::move(other.work_);
        stage_ = std::move(other.stage_);
        more_ = std::exchange(other.more_, false);
        return *this;
    }
    ~StagedWork() {
        if (more_) stage_.drop();
    }

    bool test() {
        return move([](W& work) { return work.test(); });
    }
    bool poll() {
        return move([](W& work) { return poll_work(work); });
    }
    void wait() {
        for (work_.wait(); more_; work_.wait()) more_ = stage_.next(work_);
    }

private:
    template <class IsComplete>
    bool move(IsComplete&& is_complete) {
        for (; is_complete(work_); more_ = stage_.next(work_))
            if (!more_) return true;
        return false;
    }

    W work_{};
    Stage stage_{};
    bool more_ = false;
};

}  // namespace gradsync::inline v0_2::detail
