// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/bucket_plan.hpp"
#include "../core/math.hpp"
#include "../core/parameter.hpp"

namespace gradsync::inline v0_2::detail {

/// Counts marks, and tells which gradients are ready and which buckets are full. The functions that marks call (`mark`,
/// `claim`, `fill`, `rearm`, `full`) are thread-safe; call the others from one thread, while no thread marks.
///
/// Each gradient has a bit, which is set until the gradient is in its bucket. So a gradient of one use costs one atomic
/// operation, which detects both an extra mark and the last of 64 gradients. Bits of different buckets share no word.
/// The functions that a mark calls are always inlined: GCC would call them out of line in some Reducers, at 2 ns of 10.
class Readiness {
public:
    /// `uses[i]`: marks until gradient i is ready; 0 for a parameter that needs none.
    [[gnu::cold]] Readiness(ListView<const std::uint32_t> uses, const BucketPlan& plan)
        : uses_(uses), remaining_(uses_.size()), used_(uses_.size() + 1) {
        set_plan(plan);
        for (std::size_t i = 0; i < uses_.size(); ++i) rearm(i);
    }

    [[gnu::cold]] void set_plan(const BucketPlan& plan) {
        bucket_of_ = List<std::uint32_t>(uses_.size());
        place_ = List<std::size_t>(uses_.size());
        first_word_ = {0};
        for (std::size_t b = 0; b < plan.size(); ++b) {
            std::size_t place = first_word_[b] * 64;
            for (std::size_t i : plan.bucket(b)) {
                bucket_of_[i] = static_cast<std::uint32_t>(b);
                place_[i] = place++;
            }
            first_word_.push_back(divide_up(place, 64));
        }
        unfilled_ = List<std::atomic<std::uint64_t>>(first_word_.back());
        all_ = List<std::uint64_t>(first_word_.back());
        for (std::size_t b = 0; b < plan.size(); ++b)
            for (std::size_t i : plan.bucket(b)) all_[place_[i] / 64] |= bit(i);
        pending_ = List<std::atomic<std::uint32_t>>(plan.size());
        empty_buckets();
    }

    std::uint32_t uses(std::size_t i) const noexcept { return uses_[i]; }
    std::size_t bucket_of(std::size_t i) const noexcept { return bucket_of_[i]; }

    enum class Mark { ready, more_to_come, too_often };

    /// Counts one mark of gradient i. If it has one use and two threads mark it at once, both may find it ready;
    /// `claim` and `fill` detect that.
    GRADSYNC_ALWAYS_INLINE Mark mark(std::size_t i) noexcept {
        if (uses_[i] == 1) return filled(i) ? Mark::too_often : Mark::ready;
        const std::uint32_t before = remaining_[i].fetch_sub(1, std::memory_order_acq_rel);
        if (before == 1) return Mark::ready;
        return before != 0 && before <= uses_[i] ? Mark::more_to_come : Mark::too_often;
    }

    /// Claims the copy of gradient i, which was found ready; false if another thread has claimed it.
    /// Unless `exactly`, two claims within a few nanoseconds may both succeed, which saves a second atomic
    /// operation; `fill` detects that.
    GRADSYNC_ALWAYS_INLINE bool claim(std::size_t i, bool exactly) noexcept {
        if (uses_[i] != 1) return true;
        if (exactly) return remaining_[i].exchange(0, std::memory_order_acq_rel) != 0;
        if (remaining_[i].load(std::memory_order_relaxed) == 0) return false;
        remaining_[i].store(0, std::memory_order_relaxed);
        return true;
    }

    enum class Fill { filled, bucket_full, too_often };

    /// Records that gradient i is in its bucket.
    GRADSYNC_ALWAYS_INLINE Fill fill(std::size_t i) noexcept {
        // Not a subtraction, which would be faster: with the bit already clear it would borrow from other bits.
        const std::uint64_t before = unfilled_[place_[i] / 64].fetch_and(~bit(i), std::memory_order_acq_rel);
        if ((before & bit(i)) == 0) return Fill::too_often;
        if (before != bit(i)) return Fill::filled;
        return pending_[bucket_of_[i]].fetch_sub(1, std::memory_order_acq_rel) == 1 ? Fill::bucket_full : Fill::filled;
    }

    bool full(std::size_t b) const noexcept { return pending_[b].load(std::memory_order_acquire) == 0; }

    /// The number of marks that gradient i still needs.
    std::uint32_t remaining(std::size_t i) const noexcept {
        if (uses_[i] == 1) return filled(i) ? 0 : 1;
        return remaining_[i].load(std::memory_order_acquire);
    }
    /// Resets the marks and the claim of gradient i, which was not filled.
    void rearm(std::size_t i) noexcept { remaining_[i].store(uses_[i], std::memory_order_release); }

    /// By parameter: did its gradient become ready since the last `reset`? Bytes, so that they can be reduced. The
    /// extra one at the end belongs to the engine.
    List<std::uint8_t>& used() noexcept { return used_; }
    bool any_used() const noexcept {
        for (const std::uint8_t used : used_)
            if (used != 0) return true;
        return false;
    }

    /// Treats gradient i as ready, however often it was marked. Later marks are extra marks.
    void settle(std::size_t i) noexcept {
        remaining_[i].store(0, std::memory_order_release);
        fill(i);
    }
    /// The same for all of bucket b, which holds `parameters`.
    void fill_all(std::size_t b, std::span<const std::size_t> parameters) noexcept {
        for (std::size_t i : parameters) remaining_[i].store(0, std::memory_order_release);
        for (std::size_t w = first_word_[b]; w < first_word_[b + 1]; ++w)
            unfilled_[w].store(0, std::memory_order_release);
        pending_[b].store(0, std::memory_order_release);
    }

    /// Was no gradient filled since the last `reset`?
    bool untouched() const noexcept {
        for (std::size_t w = 0; w < all_.size(); ++w)
            if (unfilled_[w].load(std::memory_order_acquire) != all_[w]) return false;
        return true;
    }

    /// Is no gradient filled, and none marked fewer times than it has uses?
    bool unmarked() const noexcept {
        bool unmarked = true;
        for (std::size_t i = 0; i < uses_.size(); ++i) unmarked = unmarked && remaining(i) == uses_[i];
        return unmarked;
    }

    /// Returns to the state at the start of a step.
    void reset() noexcept {
        for (std::size_t i = 0; i < uses_.size(); ++i) rearm(i);
        empty_buckets();
        used_.fill(0);
    }

private:
    std::uint64_t bit(std::size_t i) const noexcept { return std::uint64_t{1} << place_[i] % 64; }
    bool filled(std::size_t i) const noexcept {
        return (unfilled_[place_[i] / 64].load(std::memory_order_acquire) & bit(i)) == 0;
    }

    void empty_buckets() noexcept {
        for (std::size_t w = 0; w < all_.size(); ++w) unfilled_[w].store(all_[w], std::memory_order_relaxed);
        for (std::size_t b = 0; b < pending_.size(); ++b)
            pending_[b].store(static_cast<std::uint32_t>(first_word_[b + 1] - first_word_[b]),
                              std::memory_order_relaxed);
    }

    List<std::uint32_t> uses_;
    List<std::atomic<std::uint32_t>> remaining_;  ///< marks still to come; with one use, 0 once it is claimed
    List<std::uint8_t> used_;
    List<std::uint32_t> bucket_of_;
    List<std::size_t> place_;       ///< by parameter: index of its bit, in word place / 64
    List<std::size_t> first_word_;  ///< by bucket: index of its first word; then the end of the last bucket
    List<std::uint64_t> all_;       ///< by word: the bits of its gradients
    List<std::atomic<std::uint64_t>> unfilled_;  ///< by word: the bits of gradients not yet in their bucket
    List<std::atomic<std::uint32_t>> pending_;   ///< by bucket: number of words with bits set
};

// Error messages about extra and missing marks.

[[gnu::cold, gnu::noinline]] inline std::string marked_too_often(const ParameterView& p, std::size_t bucket,
                                                                 bool ended) {
    if (!p.requires_grad) return text("parameter '", p.name, "' is frozen (requires_grad = false) and takes no marks");
    if (ended)
        return text(
            "parameter '", p.name, "' (bucket ", bucket,
            ") was marked ready after try_finish() had ended the backward; first call it until it returns true");
    return text("parameter '", p.name, "' (bucket ", bucket, ") was marked ready more than ",
                p.uses == 1 ? "once" : text(p.uses, " times"),
                " before finish(); call finish() each step, put micro-batches before the last under no_sync(), or set "
                "its `uses` if it is used more often");
}

/// `missing`: indices of the `trainable` parameters whose gradients are not ready.
[[gnu::cold, gnu::noinline]] inline std::string not_ready(std::span<const std::size_t> missing, std::size_t trainable,
                                                          ListView<const ParameterView> parameters,
                                                          const Readiness& readiness) {
    constexpr std::size_t named = 5;
    std::string names;
    bool any = missing.size() != trainable;
    for (std::size_t k = 0; k < missing.size() && k < named; ++k) {
        const std::size_t i = missing[k];
        const std::uint32_t marks = readiness.uses(i) - readiness.remaining(i);
        any |= marks != 0;
        names += text(k ? ", '" : "'", parameters[i].name, "' (bucket ", readiness.bucket_of(i), ", marked ", marks,
                      " of ", readiness.uses(i), " times)");
    }
    return text(missing.size(), " of ", trainable, " gradients are not ready: ", names,
                missing.size() > named ? ", ..." : "",
                any ? "" : "; no gradient was marked since the last finish(), which backward() calls by itself",
                "; mark every trainable parameter before finish(), freeze it, or choose UnusedParameters::find_unused");
}

}  // namespace gradsync::inline v0_2::detail
