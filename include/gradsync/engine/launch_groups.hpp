// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <vector>

#include "../core/backend.hpp"
#include "readiness.hpp"

namespace gradsync::inline v0_2::detail {

/// The order in which collectives of buckets are started.
enum class LaunchOrder : bool { of_plan, reverse };

/// Decides which buckets are launched together. With most backends each bucket is launched on its own.
template <Backend B>
class LaunchGroups {
public:
    template <class Buckets>
    void adopt(const B&, const Buckets&) noexcept {}

    /// Is the group of buckets that starts with b full?
    bool full(std::size_t b, const Readiness& readiness) const noexcept { return readiness.full(b); }

    /// Launches, one bucket after another.
    struct Launch {
        Launch(const LaunchGroups&, B&, LaunchOrder = LaunchOrder::of_plan) noexcept {}
        void enter(std::size_t) noexcept {}  ///< bucket b is next
        void leave(std::size_t) noexcept {}  ///< it was started
    };
};

/// Groups small consecutive buckets. The groups depend on the plan alone, not on the order of readiness, because all ranks must form the
/// same ones: a bucket waits for the others of its group.
template <Backend B>
    requires(abilities_of<B>.groups)
class LaunchGroups<B> {
public:
    /// Forms the groups of a plan. Pooled buckets are not grouped: they give memory back as they leave, so none may wait for another.
    template <class Buckets>
    void adopt(const B& backend, const Buckets& buckets) {
        ends_.clear();
        std::size_t first = 0, bytes = 0;
        for (std::size_t b = 0; b < buckets.plan().size(); ++b) {
            const std::size_t own = buckets.bucket(b).bytes();
            if (buckets.pooled() || b - first == max_buckets || bytes + own > backend.group_bytes()) {
                ends_.resize(b, b);
                first = b;
                bytes = 0;
            }
            bytes += own;
        }
        ends_.resize(buckets.plan().size(), buckets.plan().size());
    }

    bool full(std::size_t b, const Readiness& readiness) const noexcept {
        std::size_t end = ends_[b];
        while (end > b && readiness.full(end - 1)) --end;  // the last one is expected last
        return end == b;
    }

    class Launch {
    public:
        Launch(const LaunchGroups& groups, B& backend, LaunchOrder order = LaunchOrder::of_plan) noexcept
            : ends_(groups.ends_), backend_(backend), order_(order) {}
        void enter(std::size_t b) {
            if (open_ || is_last(b)) return;
            group_ = backend_.group();
            open_ = true;
        }
        void leave(std::size_t b) {
            if (!open_ || !is_last(b)) return;
            group_ = {};
            open_ = false;
        }

    private:
        /// Is b the last bucket of its group in launch order?
        bool is_last(std::size_t b) const noexcept {
            return order_ == LaunchOrder::of_plan ? ends_[b] == b + 1 : b == 0 || ends_[b - 1] == b;
        }

        const std::vector<std::size_t>& ends_;
        B& backend_;
        const LaunchOrder order_;
        decltype(backend_.group()) group_{};
        bool open_ = false;
    };

private:
    /// The most buckets of a group. A larger one saves nothing, keeps others waiting, and backends have room for a limited number of calls.
    static constexpr std::size_t max_buckets = 32;

    std::vector<std::size_t> ends_;  ///< by bucket: one past the last that leaves with it
};

}  // namespace gradsync::inline v0_2::detail
