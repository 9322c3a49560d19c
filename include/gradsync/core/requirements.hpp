// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "bucket_plan.hpp"
#include "collective_tag.hpp"
#include "exchange.hpp"
#include "overlap_policy.hpp"

/// @file
/// Checks that say in one sentence why a type does not model a concept. It is the first error that the compiler prints.
///
///     static_assert(gradsync::require_backend<MyBackend>());
///
/// compiles if `static_assert(gradsync::Backend<MyBackend>)` does and the backend's abilities match its members.
/// Otherwise it says which member to add or fix. A Reducer checks its arguments in this way.

namespace gradsync::inline v0_2 {

namespace detail {

template <class...>
inline constexpr bool never = false;

#define GRADSYNC_REQUIRE(sentence, ...)                                                                          \
    static_assert(                                                                                               \
        requires(T& t, const T& c, BufferView x, ConstBufferView in, ReduceOp op, Contribution own, int i,       \
                 std::size_t n, std::string what, std::chrono::nanoseconds limit, BucketLauncher& launcher,      \
                 std::span<const ParameterInfo> parameters, std::span<const std::size_t> order) { __VA_ARGS__ }, \
        "gradsync: " sentence)
#define GRADSYNC_MEMBERS(whom, request, ...) GRADSYNC_REQUIRE("give " whom " a member " request, __VA_ARGS__)
#define GRADSYNC_MEMBER(whom, call, type, request) GRADSYNC_MEMBERS(whom, request, { call } -> type;)

template <class T>
consteval void explain_work() {
    static_assert(std::movable<T>, "gradsync: make the backend's WorkType movable");
    static_assert(std::default_initializable<T>,
                  "gradsync: give the backend's WorkType a default constructor: a Work of nothing, which is complete");
    GRADSYNC_MEMBER("the backend's WorkType", t.test(), std::same_as<bool>,
                    "bool test(), which makes progress, says whether the collective is complete, and does not block");
    GRADSYNC_MEMBER("the backend's WorkType", t.wait(), std::same_as<void>,
                    "void wait(), which returns when the collective is complete, or throws gradsync::Error");
}

// `there`: a member of that name can be called; `right`: it is as BackendAbilities describes it.
#define GRADSYNC_HAS(expression) \
    (requires(B& b, const B& c, typename B::WorkType& w, CollectiveTag tag, DType dtype) { expression; })
#define GRADSYNC_CHECK_ABILITY(ability, member, there, right, request)                           \
    static_assert(!abilities_of<B>.ability || right,                                             \
                  "gradsync: this backend states the ability " #ability ": give " request);      \
    static_assert(abilities_of<B>.ability || !(there),                                           \
                  "gradsync: this backend has " member ", but does not state it: add ." #ability \
                  " = true to its abilities")

/// Checks that B has the members of the abilities that it states, and states those whose members it has.
template <class B>
consteval void check_abilities() {
    GRADSYNC_CHECK_ABILITY(progress_thread, "wants_progress_thread()", GRADSYNC_HAS(b.wants_progress_thread()),
                           GRADSYNC_HAS(bool{c.wants_progress_thread()}),
                           "it a member bool wants_progress_thread() const");
    GRADSYNC_CHECK_ABILITY(poll, "Work::poll()", GRADSYNC_HAS(w.poll()), GRADSYNC_HAS(bool{w.poll()}),
                           "its WorkType a member bool poll()");
    GRADSYNC_CHECK_ABILITY(wait_on, "Work::wait_on(stream)", GRADSYNC_HAS(w.wait_on(b.stream())),
                           GRADSYNC_HAS(w.wait_on(b.stream())),
                           "its WorkType a member void wait_on(stream), for what stream() returns");
    GRADSYNC_CHECK_ABILITY(own_stream, "use_own_stream()", GRADSYNC_HAS(b.use_own_stream()),
                           GRADSYNC_HAS((b.use_own_stream(), w.wait_on(b.stream()))),
                           "it a member void use_own_stream(), and wait_on");
    GRADSYNC_CHECK_ABILITY(failed, "failed()", GRADSYNC_HAS(b.failed()), GRADSYNC_HAS(bool{c.failed()}),
                           "it a member bool failed() const");
    GRADSYNC_CHECK_ABILITY(tags, "set_tag() or next_owner()",
                           GRADSYNC_HAS(b.set_tag(tag)) || GRADSYNC_HAS(b.next_owner()),
                           GRADSYNC_HAS((b.set_tag(tag), std::size_t{b.next_owner()})),
                           "it members void set_tag(CollectiveTag) and std::size_t next_owner()");
    GRADSYNC_CHECK_ABILITY(check_reduces, "check_reduces()", GRADSYNC_HAS(b.check_reduces(dtype)),
                           GRADSYNC_HAS(c.check_reduces(dtype)), "it a member void check_reduces(DType) const");
    GRADSYNC_CHECK_ABILITY(
        cheaper_alone, "cheaper_alone_from()", GRADSYNC_HAS(b.cheaper_alone_from(true)),
        GRADSYNC_HAS((std::size_t{c.cheaper_alone_from(true)}, bool{c.shares(BufferView())})),
        "it members std::size_t cheaper_alone_from(bool shared) const and bool shares(BufferView) const");
    GRADSYNC_CHECK_ABILITY(
        steps_inside, "steps_inside()", GRADSYNC_HAS(b.steps_inside()),
        GRADSYNC_HAS((bool{c.steps_inside()}, bool{c.shares(BufferView())},
                      w = b.reduce_step(ConstBufferView(), BufferView(), ReduceOp::sum, Contribution(),
                                        std::declval<ShardStep&>()))),
        "it members bool steps_inside() const, bool shares(BufferView) const and WorkType reduce_step(ConstBufferView, "
        "BufferView, ReduceOp, Contribution, ShardStep&)");
    GRADSYNC_CHECK_ABILITY(clock, "now()", GRADSYNC_HAS(double{b.now()}), GRADSYNC_HAS(double{c.now()}),
                           "it a member double now() const");
    GRADSYNC_CHECK_ABILITY(groups, "group_bytes()", GRADSYNC_HAS(b.group_bytes()),
                           GRADSYNC_HAS((decltype(b.group())() = b.group(), std::size_t{c.group_bytes()})),
                           "it members group() and std::size_t group_bytes() const; see BackendAbilities");
    GRADSYNC_CHECK_ABILITY(device_passes, "passes()", GRADSYNC_HAS(b.passes()),
                           GRADSYNC_HAS((b.passes(), b.stream(), b.host().rank())),
                           "it members passes(), stream() and host(); see BackendAbilities");
}
#undef GRADSYNC_HAS
#undef GRADSYNC_CHECK_ABILITY

/// `X`: an exchange, or the one that the settings `Policy` name.
template <class X, class B, class Policy = X>
consteval void explain_exchange() {
    if constexpr (BucketPolicy<X> || OverlapPolicy<X> || !requires { typename X::template WorkType<B>; }) {
        static_assert(
            never<X>,
            "gradsync: the fourth template argument of Reducer is an exchange (AllReduce, PowerSgd, ...): write "
            "Reducer<Backend, BucketPolicy, OverlapPolicy, Exchange>; an exchange of your own needs a member template "
            "WorkType<B>: the type that start() returns");
    } else if constexpr (!Work<typename X::template WorkType<B>>) {
        static_assert(never<X>,
                      "gradsync: make this exchange's WorkType a Work: movable and default-constructible, with members "
                      "bool test() and void wait()");
    } else if constexpr (!requires { requires HasTraits<X>; }) {
        static_assert(
            never<X>,
            "gradsync: give this exchange a member static constexpr gradsync::ExchangeTraits traits: {} if every rank "
            "gets the whole result, {.scatters = true} if each gets its shard");
    } else {
        using T = X;
        using W = typename X::template WorkType<B>;
        static_assert(std::copy_constructible<Policy>,
                      "gradsync: make this exchange copyable: each Reducer makes its own copy");
        static_assert(
            std::same_as<X, Policy> || std::constructible_from<X, const Policy&>,
            "gradsync: make Exchange<B> of these settings constructible from them: explicit Exchange(const Settings&)");
        GRADSYNC_MEMBER("this exchange", t.start(std::declval<B&>(), n, x, op, own), std::same_as<W>,
                        "WorkType<B> start(B& backend, std::size_t b, BufferView bucket, ReduceOp, Contribution)");
        GRADSYNC_MEMBER("this exchange", c.is_single_rank(std::declval<const B&>()), std::same_as<bool>,
                        "bool is_single_rank(const B& backend) const");
        GRADSYNC_MEMBER("this exchange", c.describe(), std::convertible_to<std::string>,
                        "std::string describe() const, which names it and its numbers");
        constexpr ExchangeTraits traits = X::traits;
        static_assert(!traits.adopts_plan || AdoptsPlan<X, B>,
                      "gradsync: this exchange's traits say adopts_plan: give it a member void adopt_plan(B& backend, "
                      "std::span<const gradsync::BucketContents>)");
        static_assert(!traits.reports_traffic || ReportsTraffic<X, B>,
                      "gradsync: this exchange's traits say reports_traffic: give it a member gradsync::Traffic "
                      "traffic(const B& backend, std::size_t b, gradsync::BufferView bucket) const");
        static_assert(
            !traits.reports_progress_time || ReportsProgressTime<X>,
            "gradsync: this exchange's traits say reports_progress_time: give it a member std::chrono::nanoseconds "
            "progress_time() const");
        static_assert(traits.adopts_plan >= AdoptsPlan<X, B> && traits.reports_traffic >= ReportsTraffic<X, B> &&
                          traits.reports_progress_time >= ReportsProgressTime<X>,
                      "gradsync: this exchange has a member adopt_plan, traffic or progress_time that its traits do "
                      "not mention: set .adopts_plan, .reports_traffic or .reports_progress_time in them");
    }
}

#define GRADSYNC_CALL(call, type, request) GRADSYNC_MEMBER("this backend", call, type, request)
template <class T>
consteval void explain_backend() {
    using W = typename T::WorkType;
    static_assert(std::copy_constructible<T>,
                  "gradsync: make this backend copyable: it is a handle, and its copies are the same rank");
    GRADSYNC_REQUIRE(
        "give this backend a static constexpr MemorySpace memory_space: where the buffers lie that it works on",
        { T::memory_space } -> std::convertible_to<MemorySpace>;);
    GRADSYNC_CALL(c.rank(), std::same_as<int>, "int rank() const");
    GRADSYNC_CALL(c.size(), std::same_as<int>, "int size() const: the number of ranks");
    GRADSYNC_MEMBERS(
        "this backend", "WorkType all_reduce(BufferView, ReduceOp, Contribution = {})",
        { t.all_reduce(x, op) } -> std::same_as<W>;
        { t.all_reduce(x, op, own) } -> std::same_as<W>;);
    GRADSYNC_MEMBERS(
        "this backend", "WorkType reduce(BufferView, ReduceOp, int root, Contribution = {})",
        { t.reduce(x, op, i) } -> std::same_as<W>;
        { t.reduce(x, op, i, own) } -> std::same_as<W>;);
    GRADSYNC_MEMBERS(
        "this backend", "WorkType reduce_scatter(ConstBufferView in, BufferView out, ReduceOp, Contribution = {})",
        { t.reduce_scatter(in, x, op) } -> std::same_as<W>;
        { t.reduce_scatter(in, x, op, own) } -> std::same_as<W>;);
    GRADSYNC_CALL(t.all_gather(in, x), std::same_as<W>, "WorkType all_gather(ConstBufferView in, BufferView out)");
    GRADSYNC_CALL(t.broadcast(x, i), std::same_as<W>, "WorkType broadcast(BufferView, int root)");
    GRADSYNC_CALL(t.gather(in, x, i), std::same_as<W>, "WorkType gather(ConstBufferView in, BufferView out, int root)");
    GRADSYNC_CALL(t.scatter(in, x, i), std::same_as<W>,
                  "WorkType scatter(ConstBufferView in, BufferView out, int root)");
    GRADSYNC_CALL(t.barrier(), std::same_as<W>, "WorkType barrier()");
    GRADSYNC_CALL(t.progress(), std::same_as<void>,
                  "void progress(), which advances what is under way and does not block");
    GRADSYNC_CALL(c.progress_time(), std::convertible_to<std::chrono::nanoseconds>,
                  "std::chrono::nanoseconds progress_time() const");
    GRADSYNC_MEMBERS("this backend", "void fail(const std::string&) noexcept, which makes every rank's calls throw",
                     { t.fail(what) } noexcept -> std::same_as<void>;);
    GRADSYNC_CALL(t.set_timeout(limit), std::same_as<void>, "void set_timeout(std::chrono::nanoseconds)");
    GRADSYNC_CALL(c.timeout(), std::convertible_to<std::chrono::nanoseconds>,
                  "std::chrono::nanoseconds timeout() const");
    GRADSYNC_CALL(t.split(i, i), std::same_as<T>,
                  "split(int color, int key) that returns a backend of the same type (one that is inherited "
                  "returns the base)");
    GRADSYNC_CALL(t.duplicate(), std::same_as<T>,
                  "duplicate() that returns a backend of the same type (one that is inherited returns the base)");
    GRADSYNC_CALL(t.allocate(n).data(), std::same_as<void*>,
                  "allocate(std::size_t bytes), whose result owns memory and has void* data()");
    GRADSYNC_CALL(c.describe(), std::convertible_to<std::string>, "std::string describe() const");
}
#undef GRADSYNC_CALL

}  // namespace detail

template <class T>
consteval bool require_backend() {
    if constexpr (Backend<T>) {
        detail::check_abilities<T>();
    } else if constexpr (BucketPolicy<T> || OverlapPolicy<T>) {
        static_assert(detail::never<T>,
                      "gradsync: the backend comes first: write Reducer<Backend, BucketPolicy, OverlapPolicy>");
    } else if constexpr (!requires { typename T::WorkType; }) {
        static_assert(
            detail::never<T>,
            "gradsync: the first template argument of Reducer is a backend (ThreadBackend, ...); a backend of your own "
            "needs a member type WorkType: the type that its collectives return");
    } else if constexpr (!Work<typename T::WorkType>) {
        detail::explain_work<typename T::WorkType>();
    } else {
        detail::explain_backend<T>();
    }
    return true;
}

template <class T>
consteval bool require_bucket_policy() {
    if constexpr (BucketPolicy<T>) {
        static_assert(
            TimedBucketPolicy<T> || !requires { &T::set_ready_seconds; },
            "gradsync: this bucket policy's set_ready_seconds takes a std::span<const double>: seconds by parameter");
    } else if constexpr (OverlapPolicy<T>) {
        static_assert(detail::never<T>,
                      "gradsync: the second template argument of Reducer is a bucket policy, the third an overlap "
                      "policy: swap them (Reducer<Backend, BucketPolicy, OverlapPolicy>)");
    } else {
        static_assert(std::copy_constructible<T>, "gradsync: make this bucket policy copyable");
        GRADSYNC_REQUIRE(
            "the second template argument of Reducer is a bucket policy (SizeCappedBuckets, ...); a policy of your own "
            "needs a member BucketPlan plan(std::span<const ParameterInfo>, std::span<const std::size_t> order) const",
            { c.plan(parameters, order) } -> std::same_as<BucketPlan>;);
        GRADSYNC_MEMBER("this bucket policy", c.describe(), std::convertible_to<std::string>,
                        "std::string describe() const, which names it and its numbers");
    }
    return true;
}

template <class T>
consteval bool require_overlap_policy() {
    if constexpr (OverlapPolicy<T>) {  // nothing to say
    } else if constexpr (BucketPolicy<T>) {
        static_assert(detail::never<T>,
                      "gradsync: the second template argument of Reducer is a bucket policy, the third an overlap "
                      "policy: swap them (Reducer<Backend, BucketPolicy, OverlapPolicy>)");
    } else {
        static_assert(std::copy_constructible<T>,
                      "gradsync: make this overlap policy copyable; copies are made only before attach()");
        GRADSYNC_REQUIRE(
            "the third template argument of Reducer is an overlap policy (OverlapBackward, ...); a policy of your own "
            "needs a member void attach(gradsync::BucketLauncher&)",
            t.attach(launcher););
        GRADSYNC_MEMBERS("this overlap policy", "void bucket_full(gradsync::BucketLauncher&)",
                         t.bucket_full(launcher););
        GRADSYNC_MEMBERS("this overlap policy", "void gradients_ready(gradsync::BucketLauncher&)",
                         t.gradients_ready(launcher););
        GRADSYNC_MEMBERS("this overlap policy", "void detach(), after which it does not touch the engine", t.detach(););
        GRADSYNC_MEMBER("this overlap policy", c.describe(), std::convertible_to<std::string>,
                        "std::string describe() const, which names it");
    }
    return true;
}

#undef GRADSYNC_REQUIRE
#undef GRADSYNC_MEMBERS
#undef GRADSYNC_MEMBER

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
                      "gradsync: sharded training needs an exchange that scatters (ReduceScatter, HybridReduceScatter, "
                      "...), which says so in its traits: {.scatters = true}");
    else if constexpr (!ScatteringExchange<X, B>)
        static_assert(
            detail::never<X>,
            "gradsync: sharded training needs one more member of this exchange: void with_replicas(auto&& use) const, "
            "which calls use(replicas) with the communicator of the ranks that hold the same shards, if there are any");
    return true;
}

}  // namespace gradsync::inline v0_2
