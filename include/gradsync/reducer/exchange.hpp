#pragma once

#include <string>

#include "../core/backend.hpp"
#include "../core/shard_range.hpp"

namespace gradsync::inline v0 {

/// How a Reducer's buckets are exchanged. `WorkType<B>` is what `start` returns; `scatters` says whether each rank gets only its
/// own shard (`shard_range`) of the result, in place; `alone(backend)` whether there is nothing to exchange; `describe()` is compared
/// over the ranks.

/// Every rank gets the whole result.
struct AllReduce {
    static constexpr bool scatters = false;

    template <Backend B>
    using WorkType = typename B::WorkType;

    template <Backend B>
    WorkType<B> start(B& backend, BufferView bucket, ReduceOp op, Contribution contribution = {}) {
        return backend.all_reduce(bucket, op, contribution);
    }
    /// Has this rank nobody to exchange with?
    template <Backend B>
    bool alone(const B& backend) const noexcept {
        return backend.size() == 1;
    }
    std::string describe() const { return "AllReduce"; }
};

/// Every rank gets its shard, half the bytes of an all-reduce: for optimizers that step shards.
struct ReduceScatter {
    static constexpr bool scatters = true;

    template <Backend B>
    using WorkType = typename B::WorkType;

    template <Backend B>
    WorkType<B> start(B& backend, BufferView bucket, ReduceOp op, Contribution contribution = {}) {
        const ElementRange own = shard_range(bucket.count, backend.size(), backend.rank());
        return backend.reduce_scatter(bucket, bucket.subview(own.first, own.size()), op, contribution);
    }
    template <Backend B>
    bool alone(const B& backend) const noexcept {
        return backend.size() == 1;
    }
    /// Gives every rank that takes part the root's buffer.
    template <Backend B>
    void broadcast(B& backend, BufferView buffer, int root) {
        backend.broadcast(buffer, root).wait();
    }
    /// Gives those that hold the same shards as this rank the state of the first of them: there are none.
    template <class State>
    void share(const State&) {}
    std::string describe() const { return "ReduceScatter"; }
};

}  // namespace gradsync::inline v0
