// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "../core/clock.hpp"
#include "../core/error.hpp"
#include "../core/math.hpp"
#include "waiting.hpp"

namespace gradsync::inline v0_2::collective {

/// The reason why a world ended. Ranks are world ranks.
struct Failure {
    Errc code = Errc::peer_failed;
    int culprit = -1;     ///< world rank to blame; -1: unknown
    std::string message;  ///< text that makes sense on every rank
};

/// State that all communicators of one origin share: the first failure, which ends all of them, and the wait queue that wakes their
/// sleepers.
class World {
public:
    /// The part in memory that all ranks see: of this process, or mapped by several. Initially zero.
    struct State {
        std::atomic<std::uint32_t> failed{0};  ///< 0: no; 1: being written; 2: yes
        std::int32_t code = 0;
        std::int32_t culprit = 0;
        char message[1200] = {};
        WaitQueue wait_queue;
    };

    /// `ranks`: number of ranks on this machine; `more_elsewhere`: whether there are others. `state` must outlive the object.
    World(int ranks, State& state, bool more_elsewhere = false) noexcept
        : wait_queue(state.wait_queue),
          cores(gradsync::detail::larger(1, static_cast<int>(std::thread::hardware_concurrency()))),
          cores_are_shared(ranks > cores),
          spans_machines(more_elsewhere),
          state_(state) {}
    World(const World&) = delete;
    World& operator=(const World&) = delete;
    virtual ~World() = default;

    /// Records the failure if it is the first, and wakes all sleepers.
    void fail(const Failure& failure) noexcept {
        std::uint32_t none = 0;
        if (!state_.failed.compare_exchange_strong(none, being_written, std::memory_order_acquire)) {
            // Writing takes no time, unless its process died meanwhile: then this failure counts.
            const auto deadline = std::chrono::steady_clock::now() + std::chrono::milliseconds(100);
            while (!failed() && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
            if (failed()) return;
        }
        state_.code = static_cast<std::int32_t>(failure.code);
        state_.culprit = failure.culprit;
        const std::size_t length = gradsync::detail::smaller(failure.message.size(), sizeof state_.message - 1);
        std::memcpy(state_.message, failure.message.data(), length);
        state_.message[length] = '\0';
        state_.failed.store(written, std::memory_order_seq_cst);
        wait_queue.ring();
    }

    bool failed() const noexcept { return state_.failed.load(std::memory_order_seq_cst) == written; }

    /// The first failure; only after `failed()`.
    Failure failure() const { return {static_cast<Errc>(state_.code), state_.culprit, state_.message}; }

    /// Is the process of this world rank alive? Threads of one process always are.
    virtual bool alive(int /*world_rank*/) noexcept { return true; }

    WaitQueue& wait_queue;
    const int cores;
    const bool cores_are_shared;  ///< there are more ranks than cores
    const bool spans_machines;    ///< not all ranks run on this machine

private:
    static constexpr std::uint32_t being_written = 1, written = 2;

    State& state_;
};

/// The state of a world in one process. A base class that must come before World.
struct OwnState {
    World::State state;
};

}  // namespace gradsync::inline v0_2::collective
