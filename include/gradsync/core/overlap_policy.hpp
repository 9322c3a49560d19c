// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <string>

namespace gradsync::inline v0_2 {

/// The functions of an engine that an overlap policy may call. All of them are thread-safe.
///
/// - `launch_full_buckets()` starts the collectives of the full buckets that are next in the plan's order. Buckets behind one that is not
///   full wait for it, so that all ranks launch in the same order.
/// - `in_flight()` returns whether a started collective is not known to be complete.
/// - `poll()` advances started collectives and never blocks.
/// - `wants_thread()` returns whether the backend needs a thread that polls all the time; otherwise occasional polls are enough.
template <class E>
concept BucketEngine = requires(E& engine) {
    { engine.launch_full_buckets() } -> std::same_as<void>;
    { engine.in_flight() } -> std::same_as<bool>;
    { engine.poll() } -> std::same_as<void>;
    { engine.wants_thread() } -> std::same_as<bool>;
};

namespace detail {

/// A minimal engine, for checks of policies.
struct EngineArchetype {
    void launch_full_buckets() {}
    bool in_flight() { return false; }
    void poll() {}
    bool wants_thread() { return false; }
};
static_assert(BucketEngine<EngineArchetype>);

}  // namespace detail

/// Decides when buckets are launched before `finish()`, and how they advance during the backward. `finish()` launches the others. The
/// engine calls:
///
/// - `attach(engine)` once, before anything else. The engine lives until `detach()` has returned.
/// - `bucket_full(engine)` when the last gradient of a bucket was marked ready, on the thread that marked it.
/// - `gradients_ready(engine)` now and then as gradients are marked ready: after every `bucket_full`, and whenever about 16 KiB of
///   gradients were marked since the last call.
/// - `detach()` before the engine is destroyed. The policy must not call the engine after it returns.
/// - `describe()` for the name of the policy; the ranks compare it.
///
/// `static constexpr bool gathers_in_forward = true` requests reduce-scatters in the backward, and all-gathers that continue after
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
