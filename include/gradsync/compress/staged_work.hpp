// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/backend.hpp"

namespace gradsync::inline v0_2::detail {

/// A `Work` of several stages: a collective, and stages that follow when it is complete. The thread that tests it or
/// waits for it runs the next stage.
///
/// Stage is default-constructible and movable, and has:
/// - `next(work)`: called when `work` is complete. It starts the next collective in `work`, or leaves `work` complete.
///   Returns true while more stages follow. If it throws, for example because the thread may not communicate, the next
///   test or wait calls it again; it must remember what it has done.
/// - `drop()`: the remaining stages will not run; releases the other ranks from waiting. Must not throw.
///
/// Buckets are tested and waited for in order, one after the other, so all ranks start the collectives of one stage in
/// the same order. Different stages have no common order, so each needs a communicator of its own.
template <Work W, class Stage>
class [[nodiscard]] StagedWork {
public:
    StagedWork() = default;
    /// Without further stages.
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

    /// Orders `stream` after the last stage. Between stages the host waits as long as `wait_on`
    /// of the backend's work blocks.
    template <class Stream>
        requires requires(W& work, Stream stream) { work.wait_on(stream); }
    void wait_on(Stream stream) {
        for (work_.wait_on(stream); more_; work_.wait_on(stream)) more_ = stage_.next(work_);
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
