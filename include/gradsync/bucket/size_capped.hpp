// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <vector>

#include "assign_buckets.hpp"

namespace gradsync::inline v0_2 {

/// Buckets of limited size: large enough to use the bandwidth, small enough to start during the backward. The first one
/// is small, so that communication starts early.
///
/// The policy takes parameters in the order in which they become ready, and keeps one open bucket for each (dtype,
/// memory space). A parameter joins the open bucket if the total stays within that bucket's cap. Otherwise the bucket
/// closes, and the parameter opens the next one. A parameter is never split. A bucket exceeds its cap only if it holds
/// a single parameter that does. (PyTorch's DDP closes a bucket once it has *reached* its cap, and so overshoots it by
/// up to one parameter.)
///
/// A parameter that is `cheaper_alone` gets a bucket of its own and is not copied; the open bucket stays open. These
/// are borrowed gradients of 16 KiB and more over threads, and of 256 KiB or 1 MiB and more between processes
/// (docs/guides/memory.md); if there are more than 256, the threshold doubles until there are not.
///
/// Caps are in bytes. Each (dtype, space) counts its buckets separately, without those that are cheaper alone:
/// `caps()[k]` limits the k-th, and the last cap repeats.
class SizeCappedBuckets {
public:
    static constexpr std::size_t default_cap = std::size_t{25} << 20;       ///< 25 MiB
    static constexpr std::size_t default_first_cap = std::size_t{1} << 20;  ///< 1 MiB

    SizeCappedBuckets() : SizeCappedBuckets(default_cap) {}

    /// Every bucket stays within `cap`, and the first within 1 MiB too.
    explicit SizeCappedBuckets(std::size_t cap)
        : SizeCappedBuckets(cap, cap < default_first_cap ? cap : default_first_cap) {}

    /// The first bucket stays within `first_cap`, all others within `cap`.
    /// Throws Error(invalid_argument) if a cap is 0.
    SizeCappedBuckets(std::size_t cap, std::size_t first_cap) : SizeCappedBuckets(std::vector{first_cap, cap}) {}

    /// Bucket k stays within `caps[k]`; the last cap repeats. Example: `with_caps({40, 80})`.
    /// Throws Error(invalid_argument) if there are no caps, or one is 0.
    static SizeCappedBuckets with_caps(std::vector<std::size_t> caps) { return SizeCappedBuckets(std::move(caps)); }

    /// The caps in bytes: at least one, without repetitions at the end.
    std::span<const std::size_t> caps() const noexcept { return {caps_.data(), caps_.size()}; }

    BucketPlan plan(std::span<const ParameterInfo> parameters, std::span<const std::size_t> order) const {
        return detail::assign_buckets(parameters, order, caps(), true);
    }

    /// "SizeCappedBuckets{cap=26214400, first_cap=1048576}"; from three caps on: "SizeCappedBuckets{caps=[1, 2, 4]}".
    std::string describe() const {
        if (caps_.size() <= 2)
            return detail::text("SizeCappedBuckets{cap=", caps_.back(), ", first_cap=", caps_.front(), "}");
        return detail::text("SizeCappedBuckets{caps=[", detail::joined(caps_), "]}");
    }

    friend bool operator==(const SizeCappedBuckets&, const SizeCappedBuckets&) = default;

private:
    explicit SizeCappedBuckets(std::vector<std::size_t> caps) : caps_(std::move(caps)) {
        if (caps_.empty()) detail::refuse("SizeCappedBuckets", "give at least one bucket cap, in bytes");
        for (const std::size_t cap : caps_)
            if (cap == 0)
                detail::refuse("SizeCappedBuckets", "a bucket cap is 0 bytes, but must be positive; ",
                               "for one bucket per parameter use PerParameter");
        while (caps_.size() > 1 && caps_.back() == caps_[caps_.size() - 2]) caps_.pop_back();
    }

    std::vector<std::size_t> caps_;
};

static_assert(BucketPolicy<SizeCappedBuckets>);

}  // namespace gradsync::inline v0_2
