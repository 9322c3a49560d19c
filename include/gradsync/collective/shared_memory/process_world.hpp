// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../process.hpp"
#include "../world.hpp"
#include "segment.hpp"

namespace gradsync::inline v0_2::shared_memory {

/// The world of ranks that are processes of one machine. Their shared state is in a segment, which also has room for the shared state of
/// the first communicator. One process creates the segment; every rank then joins.
class ProcessWorld : public collective::World {
public:
    /// Creates the segment for `ranks` ranks, some of which may run on other machines. `room`: bytes for `memory()`.
    static Segment create(int ranks, std::size_t room) { return Segment::create(room_offset(ranks) + room); }

    /// Makes the calling process rank `rank` of `ranks`, of which `ranks_here` run on this machine.
    ProcessWorld(const Segment& segment, int rank, int ranks, int ranks_here)
        : World(ranks_here, collective::Shared<State>(segment.memory(), &reinterpret_cast<Shared*>(segment.data())->state),
                collective::Shared<collective::ProgressHooks>::make()),
          segment_(segment.memory()),
          ranks_(ranks) {
        processes()[rank].store(self_.number, std::memory_order_release);
    }

    /// Memory that all ranks see, zeroed, aligned to 64 bytes. The pointer keeps the segment alive.
    collective::Shared<std::byte> memory() const { return {segment_, segment_.get() + room_offset(ranks_)}; }

    /// False once the process has died; true if it has not joined yet.
    bool alive(int world_rank) noexcept override {
        const std::int64_t number = processes()[world_rank].load(std::memory_order_acquire);
        return number == 0 || collective::ProcessIdentity{.machine = self_.machine, .system = self_.system, .number = number}.alive(self_);
    }

    /// Returns the number of a new region, 1 or more; no other rank gets it.
    std::uint32_t next_region() noexcept { return shared().regions.fetch_add(1, std::memory_order_relaxed) + 1; }

private:
    struct Shared {
        State state;
        std::atomic<std::uint32_t> regions{0};
    };

    static constexpr std::size_t room_offset(int ranks) noexcept {
        return gradsync::detail::in_lines(sizeof(Shared)) +
               gradsync::detail::in_lines(static_cast<std::size_t>(ranks) * sizeof(std::atomic<std::int64_t>));
    }

    Shared& shared() const noexcept { return *reinterpret_cast<Shared*>(segment_.get()); }
    std::atomic<std::int64_t>* processes() const noexcept {
        return reinterpret_cast<std::atomic<std::int64_t>*>(segment_.get() + gradsync::detail::in_lines(sizeof(Shared)));
    }

    collective::Shared<std::byte> segment_;
    const int ranks_;
    const collective::ProcessIdentity self_ = collective::ProcessIdentity::own();
};

}  // namespace gradsync::inline v0_2::shared_memory
