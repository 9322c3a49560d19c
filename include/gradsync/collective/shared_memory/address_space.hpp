// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>

#include "chunks.hpp"

namespace gradsync::inline v0_2::shared_memory {

/// How the addresses in one rank's calls are to be understood by another. `publish` turns a call of this rank's into
/// what others can read; `resolve` turns what `rank` published into addresses that are valid here. `idle` is called by
/// a thread that waits for long, now and then: for what nobody else can do for this rank. It does not wait. `keeps_memory`: does what one
/// rank works on stay mapped when another lets go of it?
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
