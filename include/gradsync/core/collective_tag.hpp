// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "backend_abilities.hpp"
#include "text.hpp"

namespace gradsync::inline v0_2 {

/// The purpose of a collective. Tags tell equal collectives apart, such as those of two Reducers with equal buckets, or
/// of units of equal size. A backend with BackendAbilities::tags compares them. Ranks whose tags differ get
/// Errc::collective_mismatch instead of a sum of unrelated buffers.
class CollectiveTag {
public:
    enum class Kind : std::uint32_t { none, bucket, unit, counts };

    /// Untagged.
    constexpr CollectiveTag() = default;
    /// Part `part` of the object numbered `owner`, the same on all ranks.
    constexpr CollectiveTag(Kind kind, std::size_t owner, std::size_t part) noexcept
        : code_(static_cast<std::uint32_t>(kind) << 29 | (static_cast<std::uint32_t>(owner) & owner_mask) << part_bits |
                (static_cast<std::uint32_t>(part) & part_mask)) {}

    static constexpr CollectiveTag from_code(int code) noexcept {
        CollectiveTag tag;
        tag.code_ = static_cast<std::uint32_t>(code);
        return tag;
    }
    /// For tensors that share a collective: `digest` is a digest of their counts.
    static constexpr CollectiveTag of_counts(std::uint64_t digest) noexcept {
        return {Kind::counts, digest >> part_bits, digest};
    }
    /// The tag as a number. It travels in the field for the root, which tagged collectives do not have.
    constexpr int code() const noexcept { return static_cast<int>(code_); }

    /// "bucket 3 of Reducer #1"
    static std::string text_of(int code) {
        const auto bits = static_cast<std::uint32_t>(code);
        if (bits == 0)
            return "a call outside of buckets (of your own, average, broadcast_parameters, begin_step, gradient_norm, "
                   "save_shards)";
        if (static_cast<Kind>(bits >> 29) == Kind::counts)
            return detail::text("tensors whose counts have the digest ", bits & ((1u << 29) - 1));
        const bool is_bucket = static_cast<Kind>(bits >> 29) == Kind::bucket;
        return detail::text(is_bucket ? "bucket " : "unit ", bits & part_mask,
                            is_bucket ? " of Reducer #" : " of ShardedParameters #", bits >> part_bits & owner_mask);
    }

private:
    static constexpr std::uint32_t part_bits = 19, part_mask = (1u << part_bits) - 1, owner_mask = (1u << 10) - 1;

    std::uint32_t code_ = 0;
};

namespace detail {

/// A number for an object that starts collectives, unique within its communicator. All ranks get the same number if
/// they create their objects in the same order. Does not communicate.
template <class B>
std::size_t next_owner([[maybe_unused]] B& backend) {
    if constexpr (abilities_of<B>.tags) return backend.next_owner();
    else return 0;
}

/// Sets the tag of this handle's next collectives.
template <class B>
void set_tag([[maybe_unused]] B& backend, [[maybe_unused]] CollectiveTag tag) {
    if constexpr (abilities_of<B>.tags) backend.set_tag(tag);
}

}  // namespace detail

}  // namespace gradsync::inline v0_2
