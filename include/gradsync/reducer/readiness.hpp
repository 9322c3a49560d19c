#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "../core/bucket_plan.hpp"

namespace gradsync::inline v0::detail {

/// Counts marks: which gradients are ready, which buckets are full. `mark` and `fill` are for any thread; the rest
/// is for one thread while nobody marks.
class Readiness {
public:
    /// `uses[i]`: marks until gradient i is ready; 0 for a parameter that takes no part.
    Readiness(std::vector<std::uint32_t> uses, const BucketPlan& plan)
        : uses_(std::move(uses)),
          remaining_(uses_.size()),
          used_(uses_.size()) {
        set_plan(plan);
        for (std::size_t i = 0; i < uses_.size(); ++i) rearm(i);
    }

    void set_plan(const BucketPlan& plan) {
        bucket_of_.assign(uses_.size(), 0);
        sizes_.resize(plan.size());
        pending_ = std::vector<std::atomic<std::uint32_t>>(plan.size());
        for (std::size_t b = 0; b < plan.size(); ++b) {
            for (std::size_t i : plan.bucket(b)) bucket_of_[i] = static_cast<std::uint32_t>(b);
            sizes_[b] = static_cast<std::uint32_t>(plan.bucket(b).size());
            pending_[b].store(sizes_[b], std::memory_order_relaxed);
        }
    }

    std::size_t size() const noexcept { return uses_.size(); }
    std::uint32_t uses(std::size_t i) const noexcept { return uses_[i]; }
    std::size_t bucket_of(std::size_t i) const noexcept { return bucket_of_[i]; }

    enum class Mark { ready, more_to_come, too_often };

    /// One mark of gradient i.
    Mark mark(std::size_t i) noexcept {
        const std::uint32_t before = remaining_[i].fetch_sub(1, std::memory_order_acq_rel);
        if (before == 1) return Mark::ready;
        return before != 0 && before <= uses_[i] ? Mark::more_to_come : Mark::too_often;
    }

    /// Gradient i lies in its bucket now; true if that made the bucket full.
    bool fill(std::size_t i) noexcept { return pending_[bucket_of_[i]].fetch_sub(1, std::memory_order_acq_rel) == 1; }

    bool full(std::size_t b) const noexcept { return pending_[b].load(std::memory_order_acquire) == 0; }

    /// Marks that gradient i still needs.
    std::uint32_t remaining(std::size_t i) const noexcept { return remaining_[i].load(std::memory_order_acquire); }
    /// Makes gradient i await its marks again.
    void rearm(std::size_t i) noexcept { remaining_[i].store(uses_[i], std::memory_order_release); }

    /// Did gradient i become ready since the last `reset`? Bytes, so that they can be reduced.
    std::vector<std::uint8_t>& used() noexcept { return used_; }
    void forget_used() noexcept { used_.assign(used_.size(), 0); }

    /// Gradient i counts as ready in its bucket, however often it was marked; a mark that comes later is too many.
    void settle(std::size_t i) noexcept {
        remaining_[i].store(0, std::memory_order_release);
        fill(i);
    }
    /// The same for all of bucket b, which holds `parameters`.
    void fill_all(std::size_t b, std::span<const std::size_t> parameters) noexcept {
        for (std::size_t i : parameters) remaining_[i].store(0, std::memory_order_release);
        pending_[b].store(0, std::memory_order_release);
    }

    /// Has no gradient been filled in since the last `reset`?
    bool untouched() const noexcept {
        for (std::size_t b = 0; b < sizes_.size(); ++b)
            if (pending_[b].load(std::memory_order_acquire) != sizes_[b]) return false;
        return true;
    }

    /// Everything as at the start of a step.
    void reset() noexcept {
        for (std::size_t i = 0; i < uses_.size(); ++i) rearm(i);
        for (std::size_t b = 0; b < sizes_.size(); ++b) pending_[b].store(sizes_[b], std::memory_order_relaxed);
        forget_used();
    }

private:
    std::vector<std::uint32_t> uses_;
    std::vector<std::atomic<std::uint32_t>> remaining_;
    std::vector<std::uint8_t> used_;
    std::vector<std::uint32_t> bucket_of_;
    std::vector<std::uint32_t> sizes_;
    std::vector<std::atomic<std::uint32_t>> pending_;
};

}  // namespace gradsync::inline v0::detail
