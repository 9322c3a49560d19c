// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../compress/staged_work.hpp"
#include "../core/collective_tag.hpp"
#include "../core/exchange.hpp"
#include "../kernel/passes.hpp"

namespace gradsync::inline v0_2 {

/// Hybrid sharding: state is sharded within a group of ranks (say, the GPUs of a machine) and replicated across groups.
/// It saves less memory than sharding over all ranks, but its gathers never leave the group. A bucket is
/// reduce-scattered in the group, then each shard is averaged over the ranks that hold it in all groups.
///
///     auto [group, replicas] = gs::hybrid_groups(world, 8);
///     gs::ShardedParameters sharded(group, parameters, MyAdam{}, units, gs::HybridReduceScatter(replicas));
///
/// Works with Averaging::mean only, and every rank needs a batch. Sums go over the group first, then over groups, so
/// they are not bit-identical to those of one group. Each group collects and distributes its state separately, with its
/// own root. Only group 0 saves checkpoints; all groups load them.
///
/// The time limit of `group` also applies to the averages over `replicas`.
template <Backend B>
class HybridReduceScatter {
public:
    static constexpr ExchangeTraits traits{.scatters = true, .means_only = true, .reports_traffic = true};

    /// `replicas`: the communicator of the ranks that hold the same shards, one of each group. Over NCCL it gets a
    /// stream of its own: its collectives no longer wait for the compute stream, so use it for nothing else.
    explicit HybridReduceScatter(B replicas) : replicas_(std::move(replicas)), number_(detail::next_owner(replicas_)) {
        if constexpr (abilities_of<B>.own_stream) replicas_.use_own_stream();
    }

    /// Internal: the second stage of a bucket averages the shard over the groups.
    struct Replicate {
        B* replicas = nullptr;
        const B* group = nullptr;
        BufferView shard;
        ReduceOp op = ReduceOp::mean;
        CollectiveTag tag = {};

        bool next(typename B::WorkType& work) {
            // It may start long after the first stage; it must come after the stream on which that one was waited for.
            if constexpr (!abilities_of<B>.own_stream) detail::follow_stream(*replicas, *group);
            detail::set_tag(*replicas, tag);
            work = replicas->all_reduce(shard, op);
            return false;
        }
        void drop() noexcept { replicas->fail("the exchange of a bucket was dropped before it was complete"); }
    };

    template <class>
    using WorkType = detail::StagedWork<typename B::WorkType, Replicate>;

    /// `group` must outlive the Work.
    WorkType<B> start(B& group, std::size_t b, BufferView bucket, ReduceOp op, Contribution contribution = {}) {
        if (contribution != Contribution{})
            detail::refuse({"HybridReduceScatter", group.rank()},
                           "every rank takes part with a weight of 1; use begin_step(true) on all ranks");
        replicas_.set_timeout(group.timeout());
        const BufferView shard = detail::shard_of(bucket, group.size(), group.rank());
        typename B::WorkType scattered = group.reduce_scatter(bucket, shard, op);
        Replicate replicate{&replicas_, &group, shard, op, {CollectiveTag::Kind::bucket, number_, b}};
        // With a stream of its own both stages are in flight at once, and the device keeps them in order.
        if constexpr (abilities_of<B>.own_stream) {
            scattered.wait_on(replicas_.stream());
            replicate.next(scattered);
            return WorkType<B>(std::move(scattered));
        } else {
            return WorkType<B>(std::move(scattered), replicate);
        }
    }

    Traffic traffic(const B& group, std::size_t, BufferView bucket) const noexcept {
        return {bucket.bytes() + detail::shard_of(bucket, group.size(), group.rank()).bytes(), 2};
    }

    bool is_single_rank(const B& group) const noexcept { return group.size() == 1 && replicas_.size() == 1; }
    void with_replicas(auto&& use) const {
        B replicas = replicas_;
        use(replicas);
    }
    std::string describe() const { return detail::text("HybridReduceScatter{", replicas_.size(), "}"); }

private:
    B replicas_;
    std::size_t number_;  ///< number of this object among the users of `replicas_`
};

/// The result of `hybrid_groups`.
template <Backend B>
struct HybridGroups {
    B group;     ///< the ranks that shard the state
    B replicas;  ///< the ranks that hold the same shards, one of each group
};

/// Splits `world` into groups of `ranks_per_group` consecutive ranks. Throws Error(invalid_argument) if that does not
/// divide the world size. Collective.
template <Backend B>
HybridGroups<B> hybrid_groups(B world, int ranks_per_group) {
    if (ranks_per_group < 1 || world.size() % ranks_per_group != 0)
        detail::refuse({"hybrid_groups", world.rank()}, "groups of ", ranks_per_group, " ranks do not divide ",
                       world.size(), " ranks");
    const int rank = world.rank();
    B group = world.split(rank / ranks_per_group, rank);
    return {std::move(group), world.split(rank % ranks_per_group, rank)};
}

}  // namespace gradsync::inline v0_2
