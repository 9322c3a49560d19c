// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <string>

namespace gradsync::inline v0_2 {

/// Launches buckets and advances their collectives, as an overlap policy says. All functions are thread-safe.
class BucketLauncher {
public:
    /// Starts the collectives of the full buckets that are next in the plan's order. Buckets behind one that is not
    /// full wait for it, so that all ranks launch in the same order.
    virtual void launch_full_buckets() = 0;
    /// Returns whether a started collective is not known to be complete.
    virtual bool in_flight() const noexcept = 0;
    /// Advances started collectives and never blocks.
    virtual void poll() = 0;
    /// Returns whether the backend needs a thread that polls all the time; otherwise occasional polls are enough.
    virtual bool wants_thread() const noexcept = 0;

protected:
    ~BucketLauncher() = default;
};

/// Decides when buckets are launched before `finish()`, and how they advance during the backward. `finish()` launches
/// the others. The Reducer calls:
///
/// - `attach(launcher)` once, before anything else. The launcher lives until `detach()` has returned.
///   Copies are made only before.
/// - `bucket_full(launcher)` when the last gradient of a bucket was marked ready, on the thread that marked it.
/// - `gradients_ready(launcher)` now and then as gradients are marked ready: after every `bucket_full`, and, while
///   collectives are in flight, whenever about 16 KiB of gradients were marked since the last call.
/// - `detach()` before the launcher is destroyed. The policy must not call the launcher after it returns.
/// - `describe()` for the name of the policy; the ranks compare it.
///
/// `static constexpr bool gathers_in_forward = true` requests reduce-scatters in the backward, and all-gathers that
/// continue after `finish()`. If `bool only_polls() const` is there and true, no thread advances all-gathers.
template <class P>
concept OverlapPolicy = std::copy_constructible<P> && requires(P& policy, const P& constant, BucketLauncher& launcher) {
    policy.attach(launcher);
    policy.bucket_full(launcher);
    policy.gradients_ready(launcher);
    policy.detach();
    { constant.describe() } -> std::convertible_to<std::string>;
};

namespace detail {

template <class P>
constexpr bool gathers_in_forward() noexcept {
    if constexpr (requires { P::gathers_in_forward; }) return P::gathers_in_forward;
    else return false;
}

template <class P>
bool only_polls([[maybe_unused]] const P& policy) noexcept {
    if constexpr (requires { policy.only_polls(); }) return policy.only_polls();
    else return false;
}

}  // namespace detail

}  // namespace gradsync::inline v0_2
