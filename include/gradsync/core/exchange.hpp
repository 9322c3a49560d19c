// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <vector>

#include "backend.hpp"
#include "shard_range.hpp"

namespace gradsync::inline v0_2 {

/// The data that an exchange hands to collectives for one bucket.
struct Traffic {
    std::size_t bytes = 0;        ///< that this rank passes to collectives
    std::size_t collectives = 1;  ///< collectives of one bucket
};

/// The contents of a bucket.
struct BucketContents {
    struct Part {
        std::size_t parameter = 0;
        std::size_t offset = 0;  ///< elements from the bucket's first
        std::size_t count = 0;
        std::vector<std::size_t> shape;  ///< shape in its `ParameterView`; may be empty
    };
    std::size_t count = 0;     ///< elements, including the zeros that pad parts
    DType dtype = DType::f32;  ///< of all elements
    List<Part> parts;          ///< in buffer order
};

/// The abilities and demands of an exchange: the type of its member `traits`. An optional member counts only if its
/// trait says so. A trait without its member does not compile.
struct ExchangeTraits {
    /// Each rank gets only its own shard (`shard_range`) of the result, in place.
    /// Otherwise every rank gets the whole result.
    bool scatters = false;
    /// Means are taken over all ranks, each with a weight of 1; `start` throws Error(invalid_argument) for any other
    /// contribution. Sharded training then refuses other averagings and ranks without a batch.
    bool means_only = false;
    /// `adopt_plan(backend, contents)` gets the contents by bucket, at construction and when the plan changes, before a
    /// bucket is started. Collective. Not called if `is_single_rank(backend)`.
    bool adopts_plan = false;
    /// `traffic(backend, b, bucket)` returns the `Traffic` of bucket b, for the statistics. Otherwise it is one
    /// collective of the bucket's bytes.
    bool reports_traffic = false;
    /// `progress_time()` returns how long the exchange has computed inside `WorkType::test` so far, communicators of
    /// its own included; for the statistics.
    bool reports_progress_time = false;
};

namespace detail {

/// The members that the traits stand for.
template <class X>
concept HasTraits = std::same_as<std::remove_cvref_t<decltype(X::traits)>, ExchangeTraits> &&
                    requires { typename std::bool_constant<X::traits.scatters>; };
template <class X, class B>
concept AdoptsPlan = requires(X& exchange, B& backend, std::span<const BucketContents> contents) {
    exchange.adopt_plan(backend, contents);
};
template <class X, class B>
concept ReportsTraffic = requires(const X& exchange, const B& backend, std::size_t b, BufferView bucket) {
    { exchange.traffic(backend, b, bucket) } -> std::same_as<Traffic>;
};
template <class X>
concept ReportsProgressTime = requires(const X& exchange) {
    { exchange.progress_time() } -> std::convertible_to<std::chrono::nanoseconds>;
};

template <class X, class B>
auto exchange_of() {
    if constexpr (requires { typename X::template Exchange<B>; })
        return std::type_identity<typename X::template Exchange<B>>();
    else return std::type_identity<X>();
}

/// Base of exchanges with one collective of the backend per bucket.
struct OneCollective {
    template <Backend B>
    using WorkType = typename B::WorkType;

    template <Backend B>
    bool is_single_rank(const B& backend) const noexcept {
        return backend.size() == 1;
    }
};

}  // namespace detail

/// The exchange of a Reducer's buckets over backend B, with its state for that communicator.
///
/// - `traits`: a `static constexpr ExchangeTraits`; `{}` for an all-reduce without optional members.
/// - `start(backend, b, bucket, op, contribution)` starts the exchange of bucket b and returns a `WorkType<B>`, which
///   follows the rules of `Work`: if it is dropped unfinished, no rank hangs. `op` is a mean, or a sum of integers. One
///   thread at a time calls `start`; one thread at a time, possibly another, advances the started buckets in their
///   order. The tag of `backend` names bucket b, so later stages start their collectives on a handle of their own (a
///   copy or a duplicate).
/// - `is_single_rank(backend)` is true if there is no other rank to exchange with. It must not throw. A Reducer then
///   calls `start` only to scale a bucket.
/// - `describe()` names the exchange and its numbers; the ranks compare it.
template <class X, class B>
concept BucketExchange = detail::HasTraits<X> && Work<typename X::template WorkType<B>> &&
                         requires(X& exchange, const X& constant, B& backend, const B& handle, std::size_t b,
                                  BufferView bucket, ReduceOp op, Contribution contribution) {
                             {
                                 exchange.start(backend, b, bucket, op, contribution)
                             } -> std::same_as<typename X::template WorkType<B>>;
                             { constant.is_single_rank(handle) } -> std::same_as<bool>;
                             { constant.describe() } -> std::convertible_to<std::string>;
                             requires X::traits.adopts_plan == detail::AdoptsPlan<X, B>;
                             requires X::traits.reports_traffic == detail::ReportsTraffic<X, B>;
                             requires X::traits.reports_progress_time == detail::ReportsProgressTime<X>;
                         };

/// The exchange of a policy X over backend B: `X::template Exchange<B>` if there is one, or X itself.
template <class X, class B>
using ExchangeOver = typename decltype(detail::exchange_of<X, B>())::type;

/// The exchange policy of a Reducer: a BucketExchange itself (AllReduce), or plain settings that name the exchange to
/// make for a backend (PowerSgd):
///
/// - `template <class B> using Exchange` is a BucketExchange over B that is constructible from the settings.
///
/// Policies are copied before the first bucket; a copy need not keep the state of buckets. A Reducer takes no exchange
/// that scatters. OverlapForward takes AllReduce and, in sharded training, an exchange that scatters.
/// `require_exchange` names the first missing member.
template <class X, class B>
concept ExchangePolicy = std::copy_constructible<X> && BucketExchange<ExchangeOver<X, B>, B> &&
                         std::constructible_from<ExchangeOver<X, B>, const X&>;

/// An exchange for ShardedOptimizer and ShardedParameters.
///
/// - `with_replicas(use)` calls `use(replicas)`. `B& replicas` is the communicator of the ranks with the same shards as
///   this rank, one of each group. Sharded training gives them the same weights, and numbers the groups by rank in it.
///   If every shard exists once, it does not call `use`.
template <class X, class B>
concept ScatteringExchange = ExchangePolicy<X, B> && ExchangeOver<X, B>::traits.scatters &&
                             requires(const X& exchange, void (&use)(B&)) { exchange.with_replicas(use); };

/// Every rank gets the whole result.
struct AllReduce : detail::OneCollective {
    static constexpr ExchangeTraits traits{};

    template <Backend B>
    WorkType<B> start(B& backend, std::size_t, BufferView bucket, ReduceOp op, Contribution contribution = {}) {
        return backend.all_reduce(bucket, op, contribution);
    }
    std::string describe() const { return "AllReduce"; }
};

/// Every rank gets its shard, half the bytes of an all-reduce: for optimizers that step shards.
struct ReduceScatter : detail::OneCollective {
    static constexpr ExchangeTraits traits{.scatters = true};

    template <Backend B>
    WorkType<B> start(B& backend, std::size_t, BufferView bucket, ReduceOp op, Contribution contribution = {}) {
        return backend.reduce_scatter(bucket, detail::shard_of(bucket, backend.size(), backend.rank()), op,
                                      contribution);
    }
    /// Every shard exists once.
    template <class Use>
    void with_replicas(Use&&) const {}
    std::string describe() const { return "ReduceScatter"; }
};

}  // namespace gradsync::inline v0_2
