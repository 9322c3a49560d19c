#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "../core/backend.hpp"
#include "../core/error.hpp"
#include "../core/shard_range.hpp"

namespace gradsync::inline v0 {

/// Shards within a group of ranks (the GPUs of a machine, say), whole copies of the training across groups: half the memory saving for
/// gathers that never leave the group. A bucket is reduce-scattered in the group, then each shard is averaged over the ranks that hold
/// the same one in all groups.
///
///     auto [group, replicas] = gs::hybrid_groups(world, 8);
///     gs::ShardedParameters<B, MyAdam, gs::OverlapBackward, gs::HybridReduceScatter<B>>
///         sharded(group, parameters, MyAdam{}, units, {}, {}, gs::HybridReduceScatter<B>(replicas));
///
/// For Averaging::mean, every rank with a batch. Sums are in the order of the group first, then over groups: not the bits of one
/// group. What is collected and loaded is so in each group by itself, with its own root.
template <Backend B>
class HybridReduceScatter {
public:
    static constexpr bool scatters = true;
    static constexpr bool means_only = true;

    /// `replicas`: those that hold the same shards.
    explicit HybridReduceScatter(B replicas) : replicas_(std::move(replicas)) {}

    /// The two collectives of a bucket, one after the other. See the concept `Work`.
    class Work {
    public:
        Work() = default;
        Work(typename B::WorkType scatter, BufferView shard, ReduceOp op, B& replicas)
            : scatter_(std::move(scatter)), shard_(shard), op_(op), replicas_(&replicas) {}

        bool test() {
            if (replicas_ != nullptr) {
                if (!scatter_.test()) return false;
                replicate();
            }
            return replicate_.test();
        }
        void wait() {
            if (replicas_ != nullptr) {
                scatter_.wait();
                replicate();
            }
            replicate_.wait();
        }

    private:
        // Buckets are tested and waited for in their order, so that all replicas start these in one order too.
        void replicate() { replicate_ = std::exchange(replicas_, nullptr)->all_reduce(shard_, op_); }

        typename B::WorkType scatter_, replicate_;
        BufferView shard_;
        ReduceOp op_ = ReduceOp::mean;
        B* replicas_ = nullptr;  ///< until the second collective is started
    };

    template <class>
    using WorkType = Work;

    Work start(B& group, BufferView bucket, ReduceOp op, Contribution contribution = {}) {
        if (contribution != Contribution{})
            throw Error(Errc::invalid_argument, "HybridReduceScatter: every rank takes part with a weight of 1; use begin_step(true) on all ranks",
                        {.operation = "HybridReduceScatter", .rank = group.rank()});
        const ElementRange own = shard_range(bucket.count, group.size(), group.rank());
        const BufferView shard = bucket.subview(own.first, own.size());
        return Work(group.reduce_scatter(bucket, shard, op), shard, op, replicas_);
    }

    bool alone(const B& group) const noexcept { return group.size() == 1 && replicas_.size() == 1; }
    void broadcast(B& group, BufferView buffer, int root) {
        group.broadcast(buffer, root).wait();
        replicas_.broadcast(buffer, 0).wait();
    }
    template <class State>
    void share(const State& state) {
        for (std::size_t b = 0; b < state.bucket_count(); ++b)
            for (std::size_t a = 0; a < state.array_count(); ++a) replicas_.broadcast(state.array(b, a), 0).wait();
    }
    std::string describe() const { return "HybridReduceScatter{" + std::to_string(replicas_.size()) + "}"; }

private:
    B replicas_;
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
                    "hybrid_groups: groups of " + std::to_string(ranks_per_group) + " ranks do not divide " + std::to_string(world.size()) + " ranks",
                    {.operation = "hybrid_groups", .rank = world.rank()});
    const int rank = world.rank();
    B group = world.split(rank / ranks_per_group, rank);
    return {std::move(group), world.split(rank % ranks_per_group, rank)};
}

}  // namespace gradsync::inline v0
