// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "../compress/staged_work.hpp"
#include "../core/backend.hpp"
#include "../core/collective_tag.hpp"
#include "../core/error.hpp"
#include "../core/exchange.hpp"
#include "../engine/bucket_layout.hpp"

namespace gradsync::inline v0_2 {

/// Shards within a group of ranks (the GPUs of a machine, say), whole copies of the training across groups: half the memory saving for
/// gathers that never leave the group. A bucket is reduce-scattered in the group, then each shard is averaged over the ranks that hold
/// the same one in all groups.
///
///     auto [group, replicas] = gs::hybrid_groups(world, 8);
///     gs::ShardedParameters<B, MyAdam, gs::OverlapBackward, gs::HybridReduceScatter<B>>
///         sharded(group, parameters, MyAdam{}, units, {}, {}, gs::HybridReduceScatter<B>(replicas));
///
/// For Averaging::mean, every rank with a batch. Sums are in the order of the group first, then over groups: not the bits of one
/// group. State is collected and distributed in each group by itself, with its own root; checkpoints are saved by the first group
/// only, and loaded by all.
template <Backend B>
class HybridReduceScatter {
public:
    static constexpr ExchangeTraits traits{.scatters = true, .means_only = true, .reports_traffic = true};

    /// `replicas`: those that hold the same shards.
    explicit HybridReduceScatter(B replicas) : replicas_(std::move(replicas)), number_(detail::next_owner(replicas_)) {}

    /// What follows the first collective of a bucket.
    struct Replicate {
        B* replicas = nullptr;
        BufferView shard;
        ReduceOp op = ReduceOp::mean;
        CollectiveTag tag = {};

        bool next(typename B::WorkType& work) {
            detail::set_tag(*replicas, tag);
            work = replicas->all_reduce(shard, op);
            return false;
        }
        void drop() noexcept { replicas->fail("the exchange of a bucket was dropped before it was complete"); }
    };

    template <class>
    using WorkType = detail::StagedWork<typename B::WorkType, Replicate>;

    WorkType<B> start(B& group, std::size_t b, BufferView bucket, ReduceOp op, Contribution contribution = {}) {
        if (contribution != Contribution{})
            throw Error(Errc::invalid_argument,
                        "HybridReduceScatter: every rank takes part with a weight of 1; use begin_step(true) on all ranks",
                        {.operation = "HybridReduceScatter", .rank = group.rank()});
        const BufferView shard = detail::shard_of(bucket, group.size(), group.rank());
        return WorkType<B>(group.reduce_scatter(bucket, shard, op),
                           Replicate{&replicas_, shard, op, {CollectiveTag::Kind::bucket, number_, b}});
    }

    Traffic traffic(const B& group, std::size_t, BufferView bucket) const noexcept {
        return {bucket.bytes() + detail::shard_of(bucket, group.size(), group.rank()).bytes(), 2};
    }

    bool is_single_rank(const B& group) const noexcept { return group.size() == 1 && replicas_.size() == 1; }
    template <class Use>
    void with_replicas(Use&& use) const {
        B replicas = replicas_;
        use(replicas);
    }
    std::string describe() const { return "HybridReduceScatter{" + std::to_string(replicas_.size()) + "}"; }

private:
    B replicas_;
    std::size_t number_;  ///< among what starts collectives of the replicas
};

template <Backend B>
struct HybridGroups {
    B group;     ///< within which state is sharded
    B replicas;  ///< the ranks of all groups that hold the same shards
};

/// Groups of `ranks_per_group` consecutive ranks. Throws Error(invalid_argument) unless that divides the world size. Collective.
template <Backend B>
HybridGroups<B> hybrid_groups(B world, int ranks_per_group) {
    if (ranks_per_group < 1 || world.size() % ranks_per_group != 0)
        throw Error(Errc::invalid_argument,
                    "hybrid_groups: groups of " + std::to_string(ranks_per_group) + " ranks do not divide " + std::to_string(world.size()) +
                        " ranks",
                    {.operation = "hybrid_groups", .rank = world.rank()});
    const int rank = world.rank();
    B group = world.split(rank / ranks_per_group, rank);
    return {std::move(group), world.split(rank % ranks_per_group, rank)};
}

}  // namespace gradsync::inline v0_2
