// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <exception>
#include <utility>

namespace gradsync::inline v0_2 {

namespace detail {

/// Adds up micro-batches while a `NoSync` lives.
class MicroBatches {
public:
    virtual void begin_no_sync() noexcept = 0;
    /// `unwinds`: an exception ends the micro-batch.
    virtual void end_no_sync(bool unwinds) noexcept = 0;

protected:
    ~MicroBatches() = default;
};

}  // namespace detail

/// While it lives, marks synchronise nothing. `no_sync()` of a Reducer or of a sharded training returns it, and must outlive it as an
/// object.
class [[nodiscard]] NoSync {
public:
    explicit NoSync(detail::MicroBatches& owner) noexcept : owner_(&owner) { owner.begin_no_sync(); }
    NoSync(NoSync&& other) noexcept : owner_(std::exchange(other.owner_, nullptr)) {}
    NoSync& operator=(NoSync&&) = delete;
    ~NoSync() {
        if (owner_ != nullptr) owner_->end_no_sync(std::uncaught_exceptions() != exceptions_);
    }

private:
    detail::MicroBatches* owner_;
    int exceptions_ = std::uncaught_exceptions();
};

}  // namespace gradsync::inline v0_2
