// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <optional>

#include "deadline.hpp"
#include "failures.hpp"
#include "member.hpp"

namespace gradsync::inline v0_2::collective {

/// One rank's side of a communicator, for backends that choose at run time how their ranks reach one another.
///
/// - `start` begins this rank's next collective and returns its number, counted from 0.
/// - `test` makes progress and returns whether the collective is complete. Throws Error if the world has failed.
/// - `wait` returns when the collective is complete. Throws Error if the world has failed or the time limit is reached.
/// - `abandon` declares that nobody will wait for it, and that its buffers may be freed soon.
/// - `fail` ends the world. It returns once no other rank touches this rank's buffers.
///
/// The rest is as in the concept Backend.
class Engine : public Member, public ProgressHook {
public:
    using Member::Member;
    virtual ~Engine() = default;

    virtual World& world() const noexcept = 0;

    /// `step`: of a `reduce_step`, if the engine `steps_inside()`.
    virtual std::uint64_t start(const Call& call, ShardStep* step = nullptr) = 0;
    virtual bool steps_inside() const noexcept { return false; }
    virtual bool test(std::uint64_t number) {
        return is_over([&] { return advance_to(number); });
    }
    virtual void wait(std::uint64_t number) {
        wait_until([&] { return advance_to(number); }, [&](Deadline& deadline) { look(number, deadline); });
    }
    /// For repeated tests: ends the world if `deadline`, which began with the first look, says that the time limit is
    /// reached, or if a rank that it waits for has left or died.
    virtual void look(std::uint64_t number, Deadline& deadline) = 0;
    virtual void abandon(std::uint64_t number) noexcept {
        // It may already be complete.
        if (const std::optional<Call> open = advance_to(number))
            fail(abandoned(name_of(*open, number), own_world_rank(), flights()));
    }
    virtual void fail(const Failure& failure) noexcept = 0;
    virtual std::chrono::nanoseconds progress_time() const noexcept = 0;
    /// The ranks that hold up collective n, if the engine can tell.
    virtual Late late(std::uint64_t /*n*/) { return {}; }

    /// Makes all possible progress. Returns the collective's call if it is not complete afterwards.
    virtual std::optional<Call> advance_to(std::uint64_t number) noexcept = 0;
    /// Throws Error(invalid_argument) if the calling thread may not communicate.
    virtual void check_thread(Operation) const {}

    virtual void set_timeout(std::chrono::nanoseconds limit) noexcept { Member::set_timeout(limit); }

    /// Collective over all ranks; each passes its own group.
    virtual Shared<Engine> split(const Group& group) = 0;
    /// Returns memory in which collectives are fastest, zeroed and aligned to at least 64 bytes. Collective.
    virtual Memory allocate(std::size_t bytes) = 0;
    /// Turns memory of this process, in whole pages, into memory as `allocate` returns it, for the lifetime of the
    /// result. Returns an empty Memory if the region stays as it is. Collective.
    [[gnu::cold]] virtual Memory adopt(std::span<std::byte> /*region*/) { return {}; }
    /// Can other ranks access these bytes?
    [[gnu::cold]] virtual bool shares(const void* /*data*/, std::size_t /*bytes*/) const noexcept { return false; }

    /// Explains why a communicator is slower than it could be: ", but ...", or empty.
    virtual std::string remark() const { return {}; }

    /// Returns `own` of all ranks, by rank. Collective.
    template <class T>
        requires std::is_trivially_copyable_v<T>
    List<T> exchange(const T& own) {
        List<T> all(static_cast<std::size_t>(size()));
        wait(start({.in = &own,
                    .out = all.data(),
                    .in_count = sizeof(T),
                    .out_count = all.size() * sizeof(T),
                    .operation = Operation::all_gather,
                    .dtype = DType::u8}));
        return all;
    }

    /// Throws Error, on all ranks, if they pass different sizes, or if one of them cannot go on for
    /// its own `problem`. Collective.
    [[gnu::cold]] void check_size(const char* operation, std::size_t bytes, const std::string& problem = {}) {
        constexpr std::uint64_t unable = ~std::uint64_t{0};
        const List<std::uint64_t> sizes = exchange(problem.empty() ? std::uint64_t{bytes} : unable);
        const auto refuse = [&](Errc code, int r, const auto&... what) {
            gradsync::detail::raise(code, {.operation = operation, .rank = own_world_rank(), .peer = world_rank(r)},
                                    operation, " on rank ", own_world_rank(), ": ", what...);
        };
        if (!problem.empty()) refuse(Errc::invalid_argument, rank(), problem);
        for (int r = 0; r < size(); ++r)
            if (sizes[r] == unable)
                refuse(Errc::invalid_argument, r, "rank ", world_rank(r), " cannot do it; see what it says");
        for (int r = 1; r < size(); ++r)
            if (const std::uint64_t theirs = sizes[r]; theirs != sizes[0])
                refuse(Errc::parameter_mismatch, r, "rank ", world_rank(r), " passes ", theirs, " bytes, rank ",
                       world_rank(0), " ", sizes[0], "; all ranks must pass the same number");
    }

protected:
    /// Waits until collective `oldest` no longer takes a place among those in flight.
    virtual void make_room(std::uint64_t oldest) { wait(oldest); }
    /// Throws the world's failure, once no other rank touches this rank's buffers.
    [[noreturn]] void throw_failure(Operation operation) {
        fail(world().failure());
        raise_failure(world().failure(), operation, own_world_rank(), flights());
    }

    /// Returns the number of a new collective. `begin(oldest)` starts it and returns its number,
    /// or sets `oldest` and returns nothing if it must wait until collective `oldest` is complete.
    /// Throws Error if the world fails meanwhile.
    template <class Begin>
    std::uint64_t start_in_turn(Operation operation, Begin&& begin) {
        for (std::uint64_t oldest = 0;; make_room(oldest)) {
            try {
                if (const std::optional<std::uint64_t> started = begin(oldest)) return *started;
            } catch (const Error&) {
                if (!world().failed()) throw;
            }
            if (world().failed()) throw_failure(operation);
        }
    }

    /// `advance()` makes progress and returns the call if it is not complete. Throws Error if it is
    /// not and the world has failed.
    template <class Advance>
    bool is_over(Advance&& advance) {
        // Read before `advance()`: collectives that the failed rank had seen complete are found complete here too.
        const bool failed = world().failed();
        const std::optional<Call> open = advance();
        if (!open) return true;
        check_thread(open->operation);
        if (failed) throw_failure(open->operation);
        return false;
    }

    /// Returns once `advance()` returns no call; see `is_over`. After a while `look(deadline)` checks the wait.
    /// Meanwhile the rank serves the needs of other ranks in other communicators.
    template <class Advance, class Look>
    void wait_until(Advance&& advance, Look&& look) {
        World& world = this->world();
        // An arriving message does not signal the wait queue, so naps are short.
        const Backoff fresh(world.cores_are_shared, std::chrono::microseconds(50));
        Backoff backoff = fresh;
        std::uint64_t arrivals = world.arrivals();
        Deadline deadline;
        while (!is_over(advance)) {
            if (backoff.patient() || deadline.begun()) {
                look(deadline);
                world.advance_hooks();
            }
            if (std::exchange(arrivals, world.arrivals()) != arrivals) backoff = fresh;
            backoff.wait_a_little(world.wait_queue, [&] { return world.failed(); });
        }
    }
};

}  // namespace gradsync::inline v0_2::collective
