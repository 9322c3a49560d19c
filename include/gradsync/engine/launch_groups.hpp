// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "gradient_home.hpp"
#include "readiness.hpp"

namespace gradsync::inline v0_2::detail {

/// The order in which the collectives of buckets start.
enum class LaunchOrder : bool { of_plan, reverse };

/// Decides which buckets are launched together. With most backends each bucket is launched alone; a backend with groups
/// takes small consecutive buckets at once. The groups depend on the plan only, not on the order of readiness, because
/// all ranks must form the same ones: a bucket waits for the others of its group.
template <Backend B>
class LaunchGroups {
public:
    /// Forms the groups of a plan. Pooled buckets are not grouped: they free memory as they leave,
    /// so none may wait for another.
    void adopt([[maybe_unused]] const B& backend, [[maybe_unused]] const GradientHome<B>& home) {
        if constexpr (grouped) {
            ends_.clear();
            std::size_t first = 0, bytes = 0;
            for (std::size_t b = 0; b < home.planned().plan().size(); ++b) {
                const std::size_t own = home.storage().buckets()[b].bytes();
                if (home.pooled() || b - first == max_buckets || bytes + own > backend.group_bytes()) {
                    while (ends_.size() < b) ends_.push_back(b);
                    first = b;
                    bytes = 0;
                }
                bytes += own;
            }
            while (ends_.size() < home.planned().plan().size()) ends_.push_back(home.planned().plan().size());
        }
    }

    /// Is the group of buckets that starts with b full?
    bool full(std::size_t b, const Readiness& readiness) const noexcept {
        if constexpr (!grouped) return readiness.full(b);
        std::size_t end = ends_[b];
        while (end > b && readiness.full(end - 1)) --end;  // the last one probably fills last
        return end == b;
    }

    /// Does bucket b belong to the group of the one before it?
    bool continues(std::size_t b) const noexcept { return grouped && b != 0 && ends_[b - 1] != b; }

    /// The group that is open while buckets are launched, one after another.
    class OpenGroup {
    public:
        OpenGroup(const LaunchGroups& groups, B& backend, LaunchOrder order = LaunchOrder::of_plan) noexcept
            : ends_(groups.ends_), backend_(backend), order_(order) {}
        /// Call these before and after bucket b, the next one, is started.
        void before([[maybe_unused]] std::size_t b) {
            if constexpr (grouped)
                if (!group_ && !is_last(b)) group_.emplace(backend_.group());
        }
        void after([[maybe_unused]] std::size_t b) {
            if constexpr (grouped)
                if (is_last(b)) group_.reset();
        }

    private:
        /// Is b the last bucket of its group in launch order?
        bool is_last(std::size_t b) const noexcept {
            return order_ == LaunchOrder::of_plan ? ends_[b] == b + 1 : b == 0 || ends_[b - 1] == b;
        }
        static auto group_of(B& backend) {
            if constexpr (grouped) return backend.group();
            else return false;
        }

        const List<std::size_t>& ends_;
        B& backend_;
        const LaunchOrder order_;
        std::optional<decltype(group_of(std::declval<B&>()))> group_;
    };

private:
    static constexpr bool grouped = abilities_of<B>.groups;
    /// The largest group. A larger one saves nothing, delays other buckets, and backends have room
    /// for a limited number of calls.
    static constexpr std::size_t max_buckets = 32;

    List<std::size_t> ends_;  ///< by bucket: one past the last of its group; only if buckets are grouped
};

}  // namespace gradsync::inline v0_2::detail
