// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "gradient_engine.hpp"

namespace gradsync::inline v0_2 {

/// What `finish()` returns with OverlapForward: the averages of a step, which arrive under the next forward. Until `acquire(i)` returns,
/// gradient i must be neither read nor written; where averages are copied to memory of yours, its first element is a NaN. Declare it after
/// the Reducer:
///
///     gs::PendingAverages<Comm> averages;
///     for (...) {
///         for (layer i, first to last) { if (averages) step(i, averages.acquire(i)); forward(i); }
///         backward(...);
///         averages = sync.finish();
///     }
///     averages.wait();  // and step
///
/// The destructor waits for averages that were not acquired, unless an exception is propagating. So a result that is dropped costs the
/// overlap, and nothing else. The Reducer must outlive this object. For one thread at a time.
template <class B>
class [[nodiscard(
    "gradsync: the averages arrive later; keep what finish() returns, and call acquire(i) before parameter i is stepped")]] PendingAverages {
public:
    /// The averages of no step.
    PendingAverages() = default;
    explicit PendingAverages(detail::GradientEngine<B>& engine) noexcept : engine_(&engine), step_(engine.statistics().steps) {}
    PendingAverages(PendingAverages&& other) noexcept : engine_(std::exchange(other.engine_, nullptr)), step_(other.step_) {}
    PendingAverages& operator=(PendingAverages other) noexcept {  // `other` then waits for what this had
        std::swap(engine_, other.engine_);
        std::swap(step_, other.step_);
        return *this;
    }
    ~PendingAverages() {
        if (engine_ == nullptr || std::uncaught_exceptions() != exceptions_) return;
        try {
            engine_->acquire_all(step_);
        } catch (...) {  // every later call reports the failure
        }
    }

    /// False for the averages of no step.
    explicit operator bool() const noexcept { return engine_ != nullptr; }

    /// Returns gradient i once it holds the average: step parameter i then, and use it. Starts no collectives: each rank may call it in an
    /// order of its own. Throws Error(invalid_argument) after another `finish()`, and what a wait throws.
    BufferView acquire(std::size_t i) {
        if (engine_ == nullptr) detail::refuse("acquire", "these are the averages of no step; call finish() first");
        return engine_->acquire_average(i, step_);
    }
    /// Returns when all gradients hold their averages. Call it before a validation, a checkpoint, and at the end.
    void wait() {
        if (engine_ != nullptr) engine_->acquire_all(step_);
    }

private:
    detail::GradientEngine<B>* engine_ = nullptr;
    std::uint64_t step_ = 0;
    int exceptions_ = std::uncaught_exceptions();
};

}  // namespace gradsync::inline v0_2
