// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../kernel/tables.hpp"
#include "deadline.hpp"
#include "member.hpp"

/// @file
/// The calls of a backend, over an engine that knows collectives by number.

namespace gradsync::inline v0_2::detail {

[[noreturn, gnu::cold, gnu::noinline]] inline void refuse_copied(pid_t maker) {
    raise(Errc::invalid_argument, "this communicator belongs to process ", maker, ", of which process ", ::getpid(),
          " is a forked child; create a new one in the child, or do not use it there");
}
/// Throws Error(invalid_argument) if this process got the object by fork.
template <class T>
void check_maker(const Shared<T>& object) {
    if (!object.maker().is_here()) [[unlikely]]
        refuse_copied(object.maker().number());
}

/// A collective that its engine knows by number. See the concept `Work`.
template <class Engine>
class [[nodiscard]] NumberedWork {
public:
    NumberedWork() = default;
    NumberedWork(Shared<Engine> engine, std::uint64_t number) noexcept : engine_(std::move(engine)), number_(number) {}
    NumberedWork(NumberedWork&&) noexcept = default;
    NumberedWork& operator=(NumberedWork other) noexcept {  // `other` then abandons the previous collective
        std::swap(engine_, other.engine_);
        std::swap(number_, other.number_);
        deadline_ = other.deadline_;
        return *this;
    }
    [[gnu::noinline]] ~NumberedWork() {
        if (engine_ && engine_.maker().is_here()) engine_->abandon(number_);
    }

    /// Makes progress without blocking; returns true if the collective is complete. Throws Error if the communicator
    /// has failed, a rank has left or died, or repeated tests reach the backend's time limit. A pause between two tests
    /// counts as a second at most, or as a sixteenth of the limit if that is less.
    bool test() {
        if (poll()) return true;
        if constexpr (requires { engine_->look(number_, deadline_); }) engine_->look(number_, deadline_);
        return false;
    }
    /// The same without the time limit and the liveness check, for callers that wait or test later.
    bool poll() {
        if (!engine_) return true;
        check_maker(engine_);
        if (engine_->test(number_)) end();
        return !engine_;
    }

    /// Returns when the collective is complete. Throws Error, at the latest when the backend's time limit is reached.
    void wait() {
        if (!engine_) return;
        check_maker(engine_);
        engine_->wait(number_);
        end();
    }

    /// Orders a device's stream after the collective, and returns at once. From then on the Work counts as complete,
    /// and its buffers belong to the work on the stream. Throws Error if the communicator has failed.
    template <class Stream>
        requires requires(Engine& engine, Stream stream) { engine.wait_on(std::uint64_t{}, stream); }
    void wait_on(Stream stream) {
        if (!engine_) return;
        check_maker(engine_);
        engine_->wait_on(number_, stream);
        end();
    }

private:
    void end() noexcept {
        if constexpr (requires { engine_->flights(); })
            if (auto* const flights = engine_->flights()) flights->end(number_);
        engine_.reset();
    }

    Shared<Engine> engine_;
    std::uint64_t number_ = 0;
    collective::Deadline deadline_;  ///< time limit of repeated tests
};

/// The common part of backends that are a handle to an engine. It checks what one rank can check alone, and turns it
/// into a `Call`. The concept `Backend` documents the calls. Invalid arguments throw Error(invalid_argument) before
/// anything is communicated.
///
/// `space` is the memory space of the buffers. Derived has `abilities`, and `join(group)`, which returns its handle to
/// a new group. If the buffers are in device memory, the engine's `control()` exchanges on the host what a split needs.
template <class Derived, class Engine, MemorySpace space = MemorySpace::host>
class EngineCollectives {
public:
    using WorkType = NumberedWork<Engine>;
    static constexpr MemorySpace memory_space = space;

    int rank() const { return engine().rank(); }  ///< Returns this rank.
    int size() const { return engine().size(); }  ///< Returns the number of ranks.
    /// This rank's number before any split. Errors name ranks by it.
    int world_rank() const { return engine().own_world_rank(); }
    int world_rank(int r) const { return engine().world_rank(r); }  ///< The same of rank r.

    WorkType all_reduce(BufferView buffer, ReduceOp op, Contribution contribution = {}) {
        return start(reduction(Operation::all_reduce, buffer, buffer, op, contribution));
    }
    WorkType reduce(BufferView buffer, ReduceOp op, int root, Contribution contribution = {}) {
        return start(reduction(Operation::reduce, buffer, buffer, op, contribution, root));
    }
    WorkType reduce_scatter(ConstBufferView in, BufferView out, ReduceOp op, Contribution contribution = {}) {
        check_shard(Operation::reduce_scatter, "out", out.count, in.count);
        return start(reduction(Operation::reduce_scatter, in, out, op, contribution));
    }
    /// See BackendAbilities::steps_inside.
    template <class D = Derived>
        requires(D::abilities.steps_inside)
    WorkType reduce_step(ConstBufferView in, BufferView out, ReduceOp op, Contribution contribution, ShardStep& step) {
        const BufferView from = typed_view(const_cast<void*>(in.data), in.count, in.dtype, in.space);
        if (Derived& self = static_cast<Derived&>(*this);
            !self.steps_inside() || !self.shares(from) || !self.shares(out))
            refuse(Operation::reduce_step,
                   "the ranks do not reach each other's buffers; ask steps_inside() and shares() first");
        Call call = reduction(Operation::reduce_step, in, typed_view(out.data, in.count, in.dtype, out.space), op,
                              contribution);
        call.out_count = out.bytes();
        return start(call, &step);
    }
    WorkType all_gather(ConstBufferView in, BufferView out) {
        check_shard(Operation::all_gather, "in", in.count, out.count);
        return start(movement(Operation::all_gather, in, out, 0));
    }
    WorkType broadcast(BufferView buffer, int root) {
        return start(movement(Operation::broadcast, buffer, buffer, root));
    }
    WorkType gather(ConstBufferView in, BufferView out, int root) {
        check_handle();
        if (rank() != root) out = typed_view(nullptr, 0, in.dtype, in.space);
        else check_shard(Operation::gather, "in", in.count, out.count);
        return start(movement(Operation::gather, in, out, root));
    }
    WorkType scatter(ConstBufferView in, BufferView out, int root) {
        check_handle();
        if (rank() != root) in = typed_view<const void>(nullptr, 0, out.dtype, out.space);
        else check_shard(Operation::scatter, "out", out.count, in.count);
        return start(movement(Operation::scatter, in, out, root));
    }
    WorkType barrier() { return start({}); }

    /// Splits the communicator: ranks with the same colour form a new one, in the order of (key, rank). Collective.
    Derived split(int color, int key) {
        check_handle();
        struct Entry {
            std::int32_t color, key;
        };
        List<Entry> entries(static_cast<std::size_t>(size()));
        const Entry own{color, key};
        collective::Group group{.split = engine_->next_number(), .color = color};
        if constexpr (space == MemorySpace::host)
            all_gather(typed_view<const void>(&own, 2, DType::i32),
                       typed_view(entries.data(), 2 * entries.size(), DType::i32))
                .wait();
        else entries = engine_->control()->exchange(own);

        const auto entry = [&](int r) { return entries[r]; };
        for (int r = 0; r < size(); ++r)
            if (entry(r).color == color) group.members.push_back(r);
        sort_by(group.members, [&](int a, int b) { return entry(a).key < entry(b).key; });
        while (group.members[group.rank] != rank()) ++group.rank;
        return static_cast<Derived&>(*this).join(group);
    }

    /// Returns a communicator of the same ranks, whose collectives have an order of their own. Collective.
    Derived duplicate() {
        check_handle();
        return split(0, rank());
    }

    /// Sets the tag of this handle's next collectives without a root. See CollectiveTag.
    template <class D = Derived>
        requires(D::abilities.tags)
    void set_tag(CollectiveTag tag) noexcept {
        tag_ = tag;
    }
    /// Returns a number for a CollectiveTag's owner. Local, but all ranks must call it at
    /// the same places in the program.
    template <class D = Derived>
        requires(D::abilities.tags)
    std::size_t next_owner() {
        return engine().next_number();
    }

    /// Sets the time limit of every wait of this rank, here and in communicators that are made from this one later.
    /// Throws Error(invalid_argument) if it is not positive.
    void set_timeout(std::chrono::nanoseconds limit) {
        check_handle();
        collective::check_limit(limit);
        engine_->set_timeout(limit);
    }
    std::chrono::nanoseconds timeout() const { return engine().timeout(); }

    /// Works on this rank's share of all collectives that all ranks have started.
    /// Never blocks. No-op in a forked child.
    void progress() noexcept {
        if (engine_ && engine_.maker().is_here()) engine_->progress();
    }

    /// The time that this rank has spent on work in `progress()` and `test()`.
    std::chrono::nanoseconds progress_time() const { return engine().progress_time(); }

    /// Has the communicator failed? Later starts then throw the reason.
    template <class D = Derived>
        requires(D::abilities.failed)
    bool failed() const {
        return engine().world().failed();
    }

    /// Ends the communicator on all ranks: their outstanding and later calls throw Errc::peer_failed, which names this
    /// rank and `what`. If the current exception is an Error that blames another rank, that rank is named instead.
    /// Returns once no rank touches another's buffers.
    [[gnu::cold, gnu::noinline]] void fail(const std::string& what) noexcept {
        if (!engine_ || !engine_.maker().is_here()) return;
        const int self = engine_->own_world_rank(), peer = handled().peer;
        bool known = false;
        for (int r = 0; r < size(); ++r) known = known || engine_->world_rank(r) == peer;
        if constexpr (records) engine_->flights()->write(self);
        engine_->fail({Errc::peer_failed, known ? peer : self, text("rank ", self, " failed: ", what)});
    }

protected:
    /// The engine. Throws Error(invalid_argument) if this handle was moved from.
    Engine& engine() const {
        if (!engine_) [[unlikely]]
            refuse_moved_from();
        return *engine_;
    }
    void check_handle() const {
        (void)engine();
        check_maker(engine_);
    }
    explicit EngineCollectives(Shared<Engine> engine) : engine_(std::move(engine)) {
        if constexpr (records) engine_->record_flights();
    }

    /// For the debug log. `how`: how the ranks reach one another.
    [[gnu::cold, gnu::noinline]] void announce(const std::string& how) const noexcept {
        debug(DebugLevel::info, engine_->own_world_rank(), "is rank ", rank(), " of a communicator of ", how,
              ", with a time limit of ", format_duration(timeout()));
    }

    Shared<Engine> engine_;

private:
    static constexpr bool records = requires(Engine& engine) { engine.record_flights(); };

    WorkType start(Call call, ShardStep* step = nullptr) {
        check_handle();
        if (!collective::is_rooted(call.operation)) call.root = tag_.code();
        const std::uint64_t number = engine_->start(call, step);
        if constexpr (records) engine_->flights()->start(number, call);
        return {engine_, number};
    }

    [[noreturn, gnu::cold, gnu::noinline]] static void refuse_moved_from() {
        raise(Errc::invalid_argument, "this backend was moved from; use what it was moved to, or move a copy");
    }

    /// Texts are made only when they are thrown: the checks are on the path of every collective.
    template <class... Parts>
    [[noreturn, gnu::cold, gnu::noinline]] void refuse(Operation operation, const Parts&... what) const {
        detail::refuse({name_of(operation).data(), engine_->own_world_rank()}, what...);
    }

    Call reduction(Operation operation, ConstBufferView in, BufferView out, ReduceOp op, Contribution contribution,
                   int root = 0) const {
        Call call = movement(operation, in, out, root);
        if (op == ReduceOp::mean && !is_floating(in.dtype))
            refuse(operation, "a mean of ", in.dtype, " is not defined; use ReduceOp::sum and divide");
        if (op != ReduceOp::mean && contribution != Contribution{})
            refuse(operation, "a Contribution goes with ReduceOp::mean only, not with ", op);
        if constexpr (space == MemorySpace::host) kernel::require_kernels(in.dtype);
        call.op = op;
        call.contribution = contribution;
        return call;
    }

    Call movement(Operation operation, ConstBufferView in, BufferView out, int root) const {
        check_handle();
        if (in.dtype != out.dtype)
            refuse(operation, "in and out must have one dtype, not ", in.dtype, " and ", out.dtype);
        if (in.space != space || out.space != space)
            refuse(operation, space == MemorySpace::host
                                  ? "this backend reads host memory only; stage device buffers through the host"
                                  : "this backend reads device memory only; use host() for buffers in host memory");
        if ((!in.data && in.count != 0) || (!out.data && out.count != 0))
            refuse(operation, "a buffer of more than 0 elements has no memory");
        if (in.count > most_elements || out.count > most_elements)
            refuse(operation, "a buffer's count is negative, converted to ", larger(in.count, out.count), " elements");
        if (root < 0 || root >= size())
            raise(Errc::invalid_argument, {.rank = engine_->own_world_rank()}, "root ", root,
                  " is not a rank of this communicator of ", size());
        return {.in = in.data,
                .out = out.data,
                .in_count = in.count,
                .out_count = out.count,
                .root = root,
                .operation = operation,
                .dtype = in.dtype};
    }

    void check_shard(Operation operation, const char* side, std::size_t count, std::size_t whole) const {
        check_handle();
        const std::size_t shard = shard_range(whole, size(), rank()).size();
        if (count != shard)
            refuse(operation, "`", side, "` must hold this rank's shard of ", whole, " elements, which is ", shard,
                   " (see shard_range), not ", count);
    }

    CollectiveTag tag_;
};

}  // namespace gradsync::inline v0_2::detail
