// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <span>
#include <string>
#include <utility>

#include "backend.hpp"
#include "bucket_plan.hpp"
#include "collective_tag.hpp"
#include "dtype.hpp"
#include "exchange.hpp"
#include "overlap_policy.hpp"

/// Checks that say in one sentence why a type does not model a concept. That sentence is the first error that the compiler prints.
///
///     static_assert(gradsync::require_backend<MyBackend>());
///
/// compiles if `static_assert(gradsync::Backend<MyBackend>)` does and the backend's abilities are those of its members. Otherwise it says
/// which member to add or to mend. A Reducer checks its arguments in this way.

namespace gradsync::inline v0_2 {

namespace detail {

template <class...>
inline constexpr bool never = false;

template <class W>
consteval void explain_work() {
    static_assert(std::movable<W>, "gradsync: make the backend's WorkType movable");
    static_assert(std::default_initializable<W>,
                  "gradsync: give the backend's WorkType a default constructor: a Work of nothing, which is complete");
    static_assert(
        requires(W& w) {
            { w.test() } -> std::same_as<bool>;
        },
        "gradsync: give the backend's WorkType a member bool test(), which makes progress, says whether the collective is complete, "
        "and does not block");
    static_assert(
        requires(W& w) {
            { w.wait() } -> std::same_as<void>;
        },
        "gradsync: give the backend's WorkType a member void wait(), which returns when the collective is complete, or throws "
        "gradsync::Error");
}

#define GRADSYNC_MEMBERS(request, ...)                                                                                    \
    static_assert(                                                                                                        \
        requires(B& b, const B& c, BufferView x, ConstBufferView in, ReduceOp op, Contribution own, int i, std::size_t n, \
                 std::string what, std::chrono::nanoseconds limit) { __VA_ARGS__ },                                       \
        "gradsync: give this backend a member " request)
#define GRADSYNC_MEMBER(call, type, request) GRADSYNC_MEMBERS(request, { call } -> type;)

template <class B>
consteval void explain_backend() {
    if constexpr (BucketPolicy<B> || OverlapPolicy<B>) {
        static_assert(never<B>, "gradsync: the backend comes first: write Reducer<Backend, BucketPolicy, OverlapPolicy>");
    } else if constexpr (!requires { typename B::WorkType; }) {
        static_assert(never<B>,
                      "gradsync: the first template argument of Reducer is a backend (ThreadBackend, ...); in one of your own name "
                      "WorkType, the type that its collectives return");
    } else if constexpr (!Work<typename B::WorkType>) {
        explain_work<typename B::WorkType>();
    } else {
        using W = typename B::WorkType;
        static_assert(std::copy_constructible<B>, "gradsync: make this backend copyable: it is a handle, and its copies are the same rank");
        static_assert(
            requires {
                { B::memory_space } -> std::convertible_to<MemorySpace>;
            }, "gradsync: give this backend a static constexpr MemorySpace memory_space: where the buffers lie that it works on");
        GRADSYNC_MEMBER(c.rank(), std::same_as<int>, "int rank() const");
        GRADSYNC_MEMBER(c.size(), std::same_as<int>, "int size() const: the number of ranks");
        GRADSYNC_MEMBERS(
            "WorkType all_reduce(BufferView, ReduceOp, Contribution = {})", { b.all_reduce(x, op) } -> std::same_as<W>;
            { b.all_reduce(x, op, own) } -> std::same_as<W>;);
        GRADSYNC_MEMBERS(
            "WorkType reduce(BufferView, ReduceOp, int root, Contribution = {})", { b.reduce(x, op, i) } -> std::same_as<W>;
            { b.reduce(x, op, i, own) } -> std::same_as<W>;);
        GRADSYNC_MEMBERS(
            "WorkType reduce_scatter(ConstBufferView in, BufferView out, ReduceOp, Contribution = {})",
            { b.reduce_scatter(in, x, op) } -> std::same_as<W>;
            { b.reduce_scatter(in, x, op, own) } -> std::same_as<W>;);
        GRADSYNC_MEMBER(b.all_gather(in, x), std::same_as<W>, "WorkType all_gather(ConstBufferView in, BufferView out)");
        GRADSYNC_MEMBER(b.broadcast(x, i), std::same_as<W>, "WorkType broadcast(BufferView, int root)");
        GRADSYNC_MEMBER(b.gather(in, x, i), std::same_as<W>, "WorkType gather(ConstBufferView in, BufferView out, int root)");
        GRADSYNC_MEMBER(b.scatter(in, x, i), std::same_as<W>, "WorkType scatter(ConstBufferView in, BufferView out, int root)");
        GRADSYNC_MEMBER(b.barrier(), std::same_as<W>, "WorkType barrier()");
        GRADSYNC_MEMBER(b.progress(), std::same_as<void>, "void progress(), which advances what is under way and does not block");
        GRADSYNC_MEMBER(c.progress_time(), std::convertible_to<std::chrono::nanoseconds>, "std::chrono::nanoseconds progress_time() const");
        GRADSYNC_MEMBERS("void fail(const std::string&) noexcept, which makes every rank's calls throw",
                         { b.fail(what) } noexcept -> std::same_as<void>;);
        GRADSYNC_MEMBER(b.set_timeout(limit), std::same_as<void>, "void set_timeout(std::chrono::nanoseconds)");
        GRADSYNC_MEMBER(c.timeout(), std::convertible_to<std::chrono::nanoseconds>, "std::chrono::nanoseconds timeout() const");
        GRADSYNC_MEMBER(b.split(i, i), std::same_as<B>,
                        "split(int color, int key) that returns a backend of the same type (one that is inherited returns the base)");
        GRADSYNC_MEMBER(b.duplicate(), std::same_as<B>,
                        "duplicate() that returns a backend of the same type (one that is inherited returns the base)");
        GRADSYNC_MEMBER(b.allocate(n).data(), std::same_as<void*>,
                        "allocate(std::size_t bytes), whose result owns memory and has void* data()");
        GRADSYNC_MEMBER(c.describe(), std::convertible_to<std::string>, "std::string describe() const");
    }
}
#undef GRADSYNC_MEMBER
#undef GRADSYNC_MEMBERS

#define GRADSYNC_CHECK_ABILITY(ability, member, request)                                                                      \
    static_assert(!stated.ability || right.ability, "gradsync: this backend states the ability " #ability ": give " request); \
    static_assert(stated.ability || !there.ability,                                                                           \
                  "gradsync: this backend has " member ", but does not state it: add ." #ability " = true to its abilities")

/// Checks that B has the members of the abilities that it states, and states those whose members it has.
template <class B>
consteval void check_abilities() {
    using W = typename B::WorkType;
    constexpr BackendAbilities stated = abilities_of<B>;
    constexpr BackendAbilities right = {
        .progress_thread = (requires(const B& b) { bool{b.wants_progress_thread()}; }),
        .poll = (requires(W& w) { bool{w.poll()}; }),
        .wait_on = (requires(W& w, B& b) { w.wait_on(b.stream()); }),
        .failed = (requires(const B& b) { bool{b.failed()}; }),
        .tags = (requires(B& b, CollectiveTag tag) { b.set_tag(tag), std::size_t{b.next_owner()}; }),
        .check_reduces = (requires(const B& b, DType dtype) { b.check_reduces(dtype); }),
        .cheaper_alone = (requires(const B& b) { std::size_t{b.cheaper_alone_from()}; }),
        .clock = (requires(const B& b) { double{b.now()}; }),
        .groups = (requires(B& b, const B& c) { decltype(b.group())() = b.group(), std::size_t{c.group_bytes()}; }),
        .device_passes = (requires(B& b) { b.passes(), b.stream(), b.host().rank(); }),
    };
    constexpr BackendAbilities there = {
        .progress_thread = (requires(B& b) { b.wants_progress_thread(); }),
        .poll = (requires(W& w) { w.poll(); }),
        .wait_on = right.wait_on,
        .failed = (requires(B& b) { b.failed(); }),
        .tags = (requires(B& b, CollectiveTag tag) { b.set_tag(tag); }) || (requires(B& b) { b.next_owner(); }),
        .check_reduces = (requires(B& b, DType dtype) { b.check_reduces(dtype); }),
        .cheaper_alone = (requires(B& b) { b.cheaper_alone_from(); }),
        .clock = (requires(B& b) { double{b.now()}; }),
        .groups = (requires(B& b) { b.group_bytes(); }),
        .device_passes = (requires(B& b) { b.passes(); }),
    };
    GRADSYNC_CHECK_ABILITY(progress_thread, "wants_progress_thread()", "it a member bool wants_progress_thread() const");
    GRADSYNC_CHECK_ABILITY(poll, "Work::poll()", "its WorkType a member bool poll()");
    GRADSYNC_CHECK_ABILITY(wait_on, "Work::wait_on(stream)", "its WorkType a member void wait_on(stream), for what stream() returns");
    GRADSYNC_CHECK_ABILITY(failed, "failed()", "it a member bool failed() const");
    GRADSYNC_CHECK_ABILITY(tags, "set_tag() or next_owner()", "it members void set_tag(CollectiveTag) and std::size_t next_owner()");
    GRADSYNC_CHECK_ABILITY(check_reduces, "check_reduces()", "it a member void check_reduces(DType) const");
    GRADSYNC_CHECK_ABILITY(cheaper_alone, "cheaper_alone_from()", "it a member std::size_t cheaper_alone_from() const");
    GRADSYNC_CHECK_ABILITY(clock, "now()", "it a member double now() const");
    GRADSYNC_CHECK_ABILITY(groups, "group_bytes()", "it members group() and std::size_t group_bytes() const; see BackendAbilities");
    GRADSYNC_CHECK_ABILITY(device_passes, "passes()", "it members passes(), stream() and host(); see BackendAbilities");
}
#undef GRADSYNC_CHECK_ABILITY

template <class P>
consteval void explain_bucket_policy() {
    if constexpr (OverlapPolicy<P>) {
        static_assert(never<P>,
                      "gradsync: the second template argument of Reducer is a bucket policy, the third an overlap policy: swap them "
                      "(Reducer<Backend, BucketPolicy, OverlapPolicy>)");
    } else {
        static_assert(std::copy_constructible<P>, "gradsync: make this bucket policy copyable");
        static_assert(
            requires(const P& p, std::span<const ParameterInfo> parameters, std::span<const std::size_t> order) {
                { p.plan(parameters, order) } -> std::same_as<BucketPlan>;
            },
            "gradsync: the second template argument of Reducer is a bucket policy (SizeCappedBuckets, ...); one of your own has a member "
            "BucketPlan plan(std::span<const ParameterInfo>, std::span<const std::size_t> order) const");
        static_assert(
            requires(const P& p) {
                { p.describe() } -> std::convertible_to<std::string>;
            }, "gradsync: give this bucket policy a member std::string describe() const, which names it and its numbers");
    }
}

template <class P>
consteval void explain_overlap_policy() {
    if constexpr (BucketPolicy<P>) {
        static_assert(never<P>,
                      "gradsync: the second template argument of Reducer is a bucket policy, the third an overlap policy: swap them "
                      "(Reducer<Backend, BucketPolicy, OverlapPolicy>)");
    } else {
        static_assert(std::copy_constructible<P>, "gradsync: make this overlap policy copyable; copies are made only before attach()");
        static_assert(
            requires(P& p, BucketEngine& engine) { p.attach(engine); },
            "gradsync: the third template argument of Reducer is an overlap policy (OverlapBackward, ...); one of your own has a member "
            "void attach(gradsync::BucketEngine&)");
        static_assert(
            requires(P& p, BucketEngine& engine) { p.bucket_full(engine); },
            "gradsync: give this overlap policy a member void bucket_full(gradsync::BucketEngine&)");
        static_assert(
            requires(P& p, BucketEngine& engine) { p.gradients_ready(engine); },
            "gradsync: give this overlap policy a member void gradients_ready(gradsync::BucketEngine&)");
        static_assert(
            requires(P& p) { p.detach(); },
            "gradsync: give this overlap policy a member void detach(), after which it does not touch the engine");
        static_assert(
            requires(const P& p) {
                { p.describe() } -> std::convertible_to<std::string>;
            }, "gradsync: give this overlap policy a member std::string describe() const, which names it");
    }
}

/// `X`: an exchange, or what the settings `Policy` name as one.
template <class X, class B, class Policy = X>
consteval void explain_exchange() {
    if constexpr (BucketPolicy<X> || OverlapPolicy<X> || !requires { typename X::template WorkType<B>; }) {
        static_assert(never<X>,
                      "gradsync: the fourth template argument of Reducer is an exchange (AllReduce, ReduceScatter, ...): write "
                      "Reducer<Backend, BucketPolicy, OverlapPolicy, Exchange>; in one of your own name WorkType<B>, a template: "
                      "the type that start() returns");
    } else if constexpr (!Work<typename X::template WorkType<B>>) {
        static_assert(never<X>,
                      "gradsync: make this exchange's WorkType a Work: movable and default-constructible, with members bool test() "
                      "and void wait()");
    } else if constexpr (!requires { requires HasTraits<X>; }) {
        static_assert(never<X>,
                      "gradsync: give this exchange a member static constexpr gradsync::ExchangeTraits traits: {} if every rank "
                      "gets the whole result, {.scatters = true} if each gets its shard");
    } else {
        using W = typename X::template WorkType<B>;
        static_assert(std::copy_constructible<Policy>, "gradsync: make this exchange copyable: each Reducer has its own");
        static_assert(std::same_as<X, Policy> || std::constructible_from<X, const Policy&>,
                      "gradsync: make Exchange<B> of these settings constructible from them: explicit Exchange(const Settings&)");
        static_assert(
            requires(X& x, B& backend, std::size_t b, BufferView bucket, ReduceOp op, Contribution own) {
                { x.start(backend, b, bucket, op, own) } -> std::same_as<W>;
            },
            "gradsync: give this exchange a member WorkType<B> start(B& backend, std::size_t b, BufferView bucket, ReduceOp, "
            "Contribution)");
        static_assert(
            requires(const X& x, const B& backend) {
                { x.is_single_rank(backend) } -> std::same_as<bool>;
            }, "gradsync: give this exchange a member bool is_single_rank(const B& backend) const");
        static_assert(
            requires(const X& x) {
                { x.describe() } -> std::convertible_to<std::string>;
            }, "gradsync: give this exchange a member std::string describe() const, which names it and its numbers");
        constexpr ExchangeTraits traits = X::traits;
        static_assert(!traits.adopts_plan || AdoptsPlan<X, B>,
                      "gradsync: this exchange's traits say adopts_plan: give it a member void adopt_plan(B& backend, std::span<const "
                      "gradsync::BucketContents>)");
        static_assert(!traits.reports_traffic || ReportsTraffic<X, B>,
                      "gradsync: this exchange's traits say reports_traffic: give it a member gradsync::Traffic traffic(const B& backend, "
                      "std::size_t b, gradsync::BufferView bucket) const");
        static_assert(!traits.reports_progress_time || ReportsProgressTime<X>,
                      "gradsync: this exchange's traits say reports_progress_time: give it a member std::chrono::nanoseconds "
                      "progress_time() const");
        static_assert(traits.adopts_plan >= AdoptsPlan<X, B> && traits.reports_traffic >= ReportsTraffic<X, B> &&
                          traits.reports_progress_time >= ReportsProgressTime<X>,
                      "gradsync: this exchange has a member adopt_plan, traffic or progress_time that its traits do not mention: set "
                      ".adopts_plan, .reports_traffic or .reports_progress_time in them");
    }
}

}  // namespace detail

template <class B>
consteval bool require_backend() {
    if constexpr (!Backend<B>) detail::explain_backend<B>();
    else detail::check_abilities<B>();
    return true;
}

template <class P>
consteval bool require_bucket_policy() {
    if constexpr (!BucketPolicy<P>) detail::explain_bucket_policy<P>();
    return true;
}

template <class P>
consteval bool require_overlap_policy() {
    if constexpr (!OverlapPolicy<P>) detail::explain_overlap_policy<P>();
    return true;
}

template <class X, class B>
consteval bool require_exchange() {
    if constexpr (!ExchangePolicy<X, B>) detail::explain_exchange<ExchangeOver<X, B>, B, X>();
    return true;
}

/// For ShardedOptimizer and ShardedParameters.
template <class X, class B>
consteval bool require_scattering_exchange() {
    if constexpr (!ExchangePolicy<X, B>) detail::explain_exchange<ExchangeOver<X, B>, B, X>();
    else if constexpr (!ExchangeOver<X, B>::traits.scatters)
        static_assert(detail::never<X>,
                      "gradsync: sharded training needs an exchange that scatters (ReduceScatter, HybridReduceScatter, ...), which "
                      "says so in its traits: {.scatters = true}");
    else if constexpr (!ScatteringExchange<X, B>)
        static_assert(detail::never<X>,
                      "gradsync: sharded training needs one more member of this exchange: void with_replicas(auto&& use) const, "
                      "which calls use(replicas) with the communicator of the ranks that hold the same shards, if there are any");
    return true;
}

}  // namespace gradsync::inline v0_2
