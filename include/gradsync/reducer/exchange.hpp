#pragma once

#include <concepts>
#include <string>

#include "../core/backend.hpp"
#include "bucket_layout.hpp"

namespace gradsync::inline v0 {

/// How a Reducer's buckets are exchanged over backend B.
///
/// - `start(backend, bucket, op, contribution)` starts it and returns a `WorkType<B>`.
/// - `scatters`: does each rank get only its own shard (`shard_range`) of the result, in place?
/// - `alone(backend)`: is there nothing to exchange?
/// - `describe()` is compared over the ranks.
///
/// One that starts several collectives for a bucket says so, for the statistics: `static constexpr std::size_t collectives`, and
/// `bytes(backend, bucket)`, handed to all of them.
template <class X, class B>
concept ExchangePolicy = std::copy_constructible<X> && Work<typename X::template WorkType<B>> &&
                         requires(X& exchange, const X& constant, B& backend, BufferView bucket, ReduceOp op, Contribution contribution) {
                             { X::scatters } -> std::convertible_to<bool>;
                             { exchange.start(backend, bucket, op, contribution) } -> std::same_as<typename X::template WorkType<B>>;
                             { constant.alone(backend) } -> std::same_as<bool>;
                             { constant.describe() } -> std::convertible_to<std::string>;
                         };

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
        return backend.reduce_scatter(bucket, detail::shard_of(bucket, backend.size(), backend.rank()), op, contribution);
    }
    template <Backend B>
    bool alone(const B& backend) const noexcept {
        return backend.size() == 1;
    }
    /// Calls `use(backend)` with the communicator of those that hold the same shards as this rank: there are none.
    template <class Use>
    void with_replicas(Use&&) const {}
    std::string describe() const { return "ReduceScatter"; }
};

}  // namespace gradsync::inline v0
