// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>

#include "chunks.hpp"

namespace gradsync::inline v0_2::shared_memory {

/// The way in which one rank reads the addresses in another rank's calls.
///
/// - `publish` turns a call of this rank into one that others can read.
/// - `resolve` turns a call that `rank` has published into addresses that are valid here.
/// - `idle` is called now and then by a thread that waits for long, to do work that only this rank can do. It does not wait.
/// - `keeps_memory`: whether memory that one rank works on stays mapped when another rank releases it.
template <class A>
concept AddressSpace = requires(const A& space, const Call& call, int rank) {
    { space.publish(call) } -> std::same_as<Call>;
    { space.resolve(call, rank) } -> std::same_as<Call>;
    space.idle();
    { A::keeps_memory } -> std::convertible_to<bool>;
};

/// Ranks that are threads of one process.
struct OneAddressSpace {
    static Call publish(const Call& call) noexcept { return call; }
    static Call resolve(const Call& call, int /*rank*/) noexcept { return call; }
    static void idle() noexcept {}
    static constexpr bool keeps_memory = false;
};
static_assert(AddressSpace<OneAddressSpace>);

}  // namespace gradsync::inline v0_2::shared_memory
