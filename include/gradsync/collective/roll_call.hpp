// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <vector>

#include "../core/clock.hpp"
#include "world.hpp"

namespace gradsync::inline v0_2::collective {

/// Finds out who is dead: a rank whose process has been gone for a while. Its last messages may still be on their way,
/// one that says that it has left among them.
class RollCall {
public:
    explicit RollCall(std::size_t ranks) : gone_since_(ranks) {}

    bool is_dead(World& world, int rank, int world_rank) noexcept {
        using Clock = std::chrono::steady_clock;
        Clock::time_point& since = gone_since_[static_cast<std::size_t>(rank)];
        if (world.alive(world_rank)) since = {};
        else if (since == Clock::time_point{}) since = Clock::now();
        else return Clock::now() - since > std::chrono::milliseconds(20);
        return false;
    }

private:
    std::vector<std::chrono::steady_clock::time_point> gone_since_;
};

}  // namespace gradsync::inline v0_2::collective
