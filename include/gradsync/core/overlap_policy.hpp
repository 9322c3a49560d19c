// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <string>

namespace gradsync::inline v0_2 {

/// What an overlap policy may ask of the engine that it steers. All are safe to call from several threads.
///
/// - `launch_full_buckets()` starts the collectives of all full buckets that are next in the plan's order. Buckets
///   behind one that is not full wait for it: this is what keeps the ranks in one order.
/// - `in_flight()` says whether a started collective is not known to be complete.
/// - `poll()` advances started collectives; never blocks.
/// - `wants_thread()` says whether a thread that polls all the time is what the backend needs, rather than polls now and then.
template <class E>
concept BucketEngine = requires(E& engine) {
    { engine.launch_full_buckets() } -> std::same_as<void>;
    { engine.in_flight() } -> std::same_as<bool>;
    { engine.poll() } -> std::same_as<void>;
    { engine.wants_thread() } -> std::same_as<bool>;
};

namespace detail {

/// The least engine, to check policies against.
struct EngineArchetype {
    void launch_full_buckets() {}
    bool in_flight() { return false; }
    void poll() {}
    bool wants_thread() { return false; }
};
static_assert(BucketEngine<EngineArchetype>);

}  // namespace detail

/// Decides when buckets are launched before `finish()`, which launches what is left, and how they are advanced
/// while the backward goes on.
///
/// - `attach(engine)` comes once, before anything else; the engine outlives the policy's `detach()`.
/// - `bucket_full(engine)` comes when the last gradient of a bucket was marked ready, from that thread.
/// - `gradients_ready(engine)` comes once in a while as gradients are marked ready: after every `bucket_full`, and in
///   between whenever gradients of some 16 KiB were marked since it came last.
/// - `detach()` comes before the engine goes; no call to the engine after it returns.
/// - `describe()` names the policy; the ranks compare it.
///
/// `static constexpr bool gathers_in_forward = true` asks for reduce-scatters in the backward, and all-gathers that go on after
/// `finish()`.
template <class P>
concept OverlapPolicy = std::move_constructible<P> && requires(P& policy, const P& constant, detail::EngineArchetype& engine) {
    policy.attach(engine);
    policy.bucket_full(engine);
    policy.gradients_ready(engine);
    policy.detach();
    { constant.describe() } -> std::convertible_to<std::string>;
};

namespace detail {

template <class P>
constexpr bool gathers_in_forward() noexcept {
    if constexpr (requires { P::gathers_in_forward; }) return P::gathers_in_forward;
    else return false;
}

}  // namespace detail

}  // namespace gradsync::inline v0_2
