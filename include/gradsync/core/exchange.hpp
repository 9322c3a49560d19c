// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <string>
#include <vector>

#include "backend.hpp"
#include "shard_range.hpp"

namespace gradsync::inline v0_2 {

/// What an exchange has handed to collectives for one bucket.
struct Traffic {
    std::size_t bytes = 0;
    std::size_t collectives = 1;
};

/// What lies in a bucket.
struct BucketContents {
    struct Part {
        std::size_t parameter = 0;
        std::size_t offset = 0;  ///< elements from the bucket's first
        std::size_t count = 0;
        std::vector<std::size_t> shape;  ///< as its `ParameterView` has it; may be empty
    };
    std::size_t count = 0;  ///< elements, with the zeros between parts that keep them apart
    DType dtype = DType::f32;
    std::vector<Part> parts;
};

/// How a Reducer's buckets are exchanged over backend B.
///
/// - `start(backend, b, bucket, op, contribution)` starts it for bucket b and returns a `WorkType<B>`. One thread at a time; those
///   that were started are advanced, in their order, by one thread at a time, which may be another one. What follows later is started on a
///   handle of its own, a copy or a duplicate: what `backend` starts is said to be for bucket b.
/// - `scatters`: does each rank get only its own shard (`shard_range`) of the result, in place?
/// - `is_single_rank(backend)`: is there nothing to exchange?
/// - `describe()` is compared over the ranks.
///
/// Optional:
/// - `adopt_plan(backend, contents)`, the contents by bucket: at construction and when the plan changes, before a bucket is started;
///   collective.
/// - `traffic(backend, b, bucket)`, a `Traffic`, for the statistics: where it is not one collective of the bucket's bytes.
/// - `progress_time()`: what it has computed itself, inside `WorkType::test`, and what communicators of its own have, so far; for the
///   statistics, too.
template <class X, class B>
concept ExchangePolicy =
    std::copy_constructible<X> && Work<typename X::template WorkType<B>> &&
    requires(X& exchange, const X& constant, B& backend, std::size_t b, BufferView bucket, ReduceOp op, Contribution contribution) {
        { X::scatters } -> std::convertible_to<bool>;
        { exchange.start(backend, b, bucket, op, contribution) } -> std::same_as<typename X::template WorkType<B>>;
        { constant.is_single_rank(backend) } -> std::same_as<bool>;
        { constant.describe() } -> std::convertible_to<std::string>;
    };

/// Every rank gets the whole result.
struct AllReduce {
    static constexpr bool scatters = false;

    template <Backend B>
    using WorkType = typename B::WorkType;

    template <Backend B>
    WorkType<B> start(B& backend, std::size_t, BufferView bucket, ReduceOp op, Contribution contribution = {}) {
        return backend.all_reduce(bucket, op, contribution);
    }
    /// Has this rank nobody to exchange with?
    template <Backend B>
    bool is_single_rank(const B& backend) const noexcept {
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
    WorkType<B> start(B& backend, std::size_t, BufferView bucket, ReduceOp op, Contribution contribution = {}) {
        return backend.reduce_scatter(bucket, detail::shard_of(bucket, backend.size(), backend.rank()), op, contribution);
    }
    template <Backend B>
    bool is_single_rank(const B& backend) const noexcept {
        return backend.size() == 1;
    }
    /// Calls `use(backend)` with the communicator of those that hold the same shards as this rank: there are none.
    template <class Use>
    void with_replicas(Use&&) const {}
    std::string describe() const { return "ReduceScatter"; }
};

}  // namespace gradsync::inline v0_2
