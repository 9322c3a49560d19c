// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../collective/engine_collectives.hpp"
#include "../collective/shared_memory/seat.hpp"
#include "../core/backend.hpp"
#include "../kernel/host_buffer.hpp"
#include "run_ranks.hpp"

/// @file
/// ThreadBackend: the ranks are threads of one process.

namespace gradsync::inline v0_2 {

namespace detail {

using ThreadSeat = shared_memory::Seat<shared_memory::OneAddressSpace>;
using SharedBoard = Shared<shared_memory::Board>;

/// The world of ranks that are threads. Members of a new group find one another here.
class ThreadWorld : public collective::World {
public:
    // Templates without arguments: code is generated only where they are called, not wherever this header is included.

    template <class = void>
    explicit ThreadWorld(int ranks) : World(ranks, Shared<State>::make()) {}

    /// Returns the board that the members of a group share.
    template <class = void>
    static SharedBoard meet(const ThreadSeat& parent, const collective::Group& group) {
        auto& world = static_cast<ThreadWorld&>(parent.world());
        std::lock_guard lock(world.mutex_);
        return world.meetings_.meet(&parent.board(), group,
                                    [&] { return board(parent.board().shared_world(), parent.world_ranks_of(group)); });
    }

    template <class = void>
    static SharedBoard board(Shared<World> world, List<int> world_ranks) {
        const auto memory = Shared<kernel::HostBuffer>::make(shared_memory::Board::bytes(world_ranks.size()));
        return SharedBoard::make(std::move(world), collective::Member::WorldRanks::make(std::move(world_ranks)),
                                 Shared<std::byte>(memory, static_cast<std::byte*>(memory->data())));
    }

private:
    std::mutex mutex_;
    collective::Meetings<SharedBoard> meetings_;
};

}  // namespace detail

/// Internal: a collective of a ThreadBackend. See the concept `Work`.
using ThreadWork = detail::NumberedWork<detail::ThreadSeat>;

/// Ranks are threads of one process. It has no dependencies; the other backends are tested against it.
///
/// - A reduction is one fused pass that reads every rank's elements and writes every rank's result;
///   all ranks work on it, by chunks. Elements are combined in the order of a tree over the ranks (core/math.hpp);
///   the bits depend on nothing else.
/// - Collectives advance inside `progress()`, `test()` and `wait()` of any rank; the library starts no thread. A rank
///   that waits also works on the shares of late ranks (but not in a `reduce_step`).
/// - Several threads of a rank may use a handle. Collectives run in the order in which they are started.
/// - If a rank fails, leaves early or reaches its time limit, every other rank's wait throws an Error that names it.
///   From then on every call on any communicator of the same origin throws the same Error.
/// - When the last handle of a rank is destroyed, the rank counts as gone: collectives that others start later fail.
class ThreadBackend : public detail::EngineCollectives<ThreadBackend, detail::ThreadSeat> {
public:
    static constexpr BackendAbilities abilities{
        .poll = true, .failed = true, .tags = true, .cheaper_alone = true, .steps_inside = true};
    static constexpr std::chrono::nanoseconds default_timeout = std::chrono::minutes(5);  ///< of every wait

    /// Returns the handles of `size` new ranks, for threads that you run yourself; `run_threads` runs them for you.
    template <class = void>
    static std::vector<ThreadBackend> make(int size, std::chrono::nanoseconds timeout = default_timeout) {
        if (size < 1) detail::raise(Errc::invalid_argument, "a ThreadBackend needs at least 1 rank, not ", size);
        collective::check_limit(timeout);
        const auto board = detail::ThreadWorld::board(detail::Shared<detail::ThreadWorld>::make(size),
                                                      collective::Group::of_all(size, 0).members);
        std::vector<ThreadBackend> handles;
        for (int r = 0; r < size; ++r) handles.push_back(ThreadBackend(board, r, timeout));
        return handles;
    }

    std::string describe() const { return detail::text(size(), size() == 1 ? " thread" : " threads"); }

    /// In bytes; see the concept. All memory is equally near, and a collective costs about as much as copying 8 KiB
    /// twice. It costs more if there are more ranks than cores and few gradients: see docs/background/lab-notes.md.
    static constexpr std::size_t cheaper_alone_from(bool = true) noexcept { return std::size_t{16} << 10; }
    static constexpr bool shares(const BufferView&) noexcept { return true; }  ///< Internal.
    static constexpr bool steps_inside() noexcept { return true; }             ///< Internal.

    /// Returns memory for buckets; see the concept.
    kernel::HostBuffer allocate(std::size_t bytes) { return kernel::HostBuffer(bytes); }

private:
    friend EngineCollectives;

    template <class = void>
    ThreadBackend(detail::SharedBoard board, int rank, std::chrono::nanoseconds timeout)
        : EngineCollectives(detail::Shared<detail::ThreadSeat>::make(std::move(board), rank, timeout)) {
        if (detail::debugs()) announce(describe());
    }

    template <class = void>
    ThreadBackend join(const collective::Group& group) const {
        return ThreadBackend(detail::ThreadWorld::meet(*engine_, group), group.rank, timeout());
    }
};

static_assert(Backend<ThreadBackend>);

/// Options of `run_threads`.
struct ThreadOptions {
    /// Limit of every wait; `set_timeout` changes it.
    std::chrono::nanoseconds timeout = ThreadBackend::default_timeout;
};

/// Runs `f(ThreadBackend)` on `size` threads, one per rank, and returns when all have returned. Returns nothing, or the
/// results by rank if `f` returns something.
///
/// If a rank throws, the others are released from any collective that they wait for, with an Error that names it. The
/// exception that was the cause (by rank, the first that blames no other rank) is rethrown here with its own type. A
/// rank that neither communicates nor returns cannot be stopped from outside: run_threads waits for it.
template <class F>
auto run_threads(int size, F&& f, ThreadOptions options = {}) {
    return detail::run_ranks(ThreadBackend::make(size, options.timeout), std::forward<F>(f),
                             [](std::size_t, auto&& run) { run(); });
}

}  // namespace gradsync::inline v0_2
