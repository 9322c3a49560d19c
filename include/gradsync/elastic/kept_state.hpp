// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <bit>

#include "kept_memory.hpp"
#include "membership.hpp"

namespace gradsync::inline v0_2 {

/// How the state of the ranks differs.
enum class StateKind {
    replicated,  ///< every rank has the same: each keeps a part of it
    own          ///< each rank has a state of its own, such as shards: it keeps all of that
};

/// Keeps the state of a training in memory that outlives this process, so that ranks that meet again go on with it.
///
///     while (!job.is_over()) try {
///             gs::TcpBackend comm = job.connect();
///             gs::Reducer sync(comm, model.parameters());
///             gs::KeptState kept(job, comm, {gs::buffer(model.weights), gs::buffer(model.momentum)});
///             std::uint64_t step = kept.newest() ? kept.restore() : load_checkpoint(comm, model);
///             for (; step < steps; kept.keep(++step)) {
///                 ...
///             }
///             job.end(comm);
///         } catch (const gs::Error& error) {
///             if (!job.goes_on(error)) throw;
///         }
///
/// The launcher holds the memory (gradsync_run --restarts K). It takes twice the bytes of the state: of one rank's if
/// it is replicated, of each rank's otherwise. Without a store there is no such memory: rank 0 says so on standard
/// error, and `keep` does nothing. The state is the bytes of the views, on the host; pointers mean nothing to another
/// process. Not thread-safe.
class KeptState {
public:
    /// `state`: the memory of this rank's state, in the same order on every start of it. It must live as long as this
    /// object, at the same place. `name`: of what it is the state, such as the model; what is kept under another name
    /// is refused. A job has one object at a time. Throws Error(storage) on all ranks if one has not enough memory,
    /// Error(parameter_mismatch) if what is kept is the state of something else, and Error(invalid_argument) for memory
    /// of a device, a second object, and a backend of some ranks only. Collective.
    KeptState(Membership& job, TcpBackend& comm, std::span<const BufferView> state,
              StateKind kind = StateKind::replicated, std::string_view name = {})
        : kind_(kind), rank_(comm.rank()), size_(comm.size()) {
        for (const BufferView& view : state) {
            if (view.space != MemorySpace::host)
                bootstrap::raise(Errc::invalid_argument, {.operation = "KeptState", .rank = rank_},
                                 "KeptState takes memory of the host; copy what is on a device");
            if (view.bytes() != 0) state_.push_back({static_cast<std::byte*>(view.data), view.bytes(), bytes_});
            bytes_ += view.bytes();
        }
        if (!job.records_) {
            Membership::tell_missing(rank_, "KeptState keeps nothing", "gradsync_run --restarts K");
            return;
        }
        if (job.keeps_ || size_ != job.job_.size)
            bootstrap::raise(Errc::invalid_argument, {.operation = "KeptState", .rank = rank_},
                             job.keeps_ ? "KeptState: the job has one already; give it all of the state"
                                        : "KeptState takes the backend of all ranks of the job, and no part of it");
        comm_.emplace(comm);
        Row own{.bytes = bytes_, .layout = layout(name)};
        std::string problem;
        attempt(own, problem, [&] {
            memory_.resize(static_cast<std::size_t>(size_));
            this->own() = take_memory(job.store(), job.own_.id, own.layout, comm.timeout());
            own.steps[0] = this->own().step(0);
            own.steps[1] = this->own().step(1);
            own.handle = this->own().handle();
        });
        const List<Row> all = agree(own, problem);
        attempt(own, problem, [&] {
            for (std::size_t r = 0; r < all.size(); ++r)
                if (static_cast<int>(r) != rank_) memory_[r] = elastic::KeptMemory::open(all[r].handle);
        });
        find_newest(all);
        this->own().set_digest(0);
        (void)agree(own, problem);  // nobody keeps anything before all have forgotten what not all have
        job.keeps_ = true;
        keeps_ = &job.keeps_;
    }
    KeptState(Membership& job, TcpBackend& comm, std::initializer_list<BufferView> state,
              StateKind kind = StateKind::replicated, std::string_view name = {})
        : KeptState(job, comm, std::span(state.begin(), state.size()), kind, name) {}
    KeptState(const KeptState&) = delete;
    ~KeptState() {
        if (keeps_ != nullptr) *keeps_ = false;
    }

    /// The newest step of which all ranks have kept the state, when this object was made; the same on all ranks.
    std::optional<std::uint64_t> newest() const noexcept { return newest_; }

    /// Writes the state of `newest()` into this rank's memory, and returns its step. With sharding, call `publish()`
    /// afterwards. Throws Error(invalid_argument) if there is none, or if `keep` has overwritten it. Collective.
    std::uint64_t restore() {
        const std::uint64_t number = newest_ ? *newest_ + 1 : 0;
        bool is_there = true;
        for (const elastic::KeptMemory& memory : memory_) is_there = is_there && memory.slot_of(number) >= 0;
        if (!newest_ || !is_there)
            bootstrap::raise(Errc::invalid_argument, {.operation = "restore", .rank = rank_},
                             !comm_     ? "restore: nothing is kept without a store; start the ranks with gradsync_run"
                             : !newest_ ? "restore: nothing is kept; ask newest() first"
                                        : "restore: keep() has replaced the state; call restore() before");
        for (int r = 0; r < size_; ++r) {
            const elastic::KeptMemory& memory = memory_[r];
            if (r == rank_ || kind_ == StateKind::replicated) memory.read(memory.slot_of(number), part(r));
        }
        comm_->barrier().wait();  // all have read
        return *newest_;
    }

    /// Keeps the state after `step` steps. Call it on all ranks, with a collective of all ranks between two calls, such
    /// as `finish()`: then all have kept the state before, and it stays while this one is written. Waits for no other
    /// rank. Throws Error(invalid_argument) if `step` is not greater than that of every call before, in earlier
    /// processes too (the first call may repeat what was restored), or if a rank has not kept the state before. The
    /// 1st, 3rd, 7th, 15th, ... call hashes a replicated state; the next one throws Error(parameter_mismatch) if it was
    /// not the same on all ranks.
    void keep(std::uint64_t step) {
        if (!comm_) return;
        if (own().newest() > step + (calls_++ == 0))
            bootstrap::raise(Errc::invalid_argument, {.operation = "keep", .rank = rank_}, "keep: step ", step,
                             " comes after step ", own().newest() - 1, "; numbers must grow: ",
                             "after a return to an earlier step, count on, and make your own step a part of the state");
        for (std::size_t r = 0; r < memory_.size(); ++r)
            if (memory_[r].newest() < own().newest())
                bootstrap::raise(Errc::invalid_argument,
                                 {.operation = "keep", .rank = rank_, .peer = static_cast<int>(r)},
                                 "keep: this rank has kept step ", own().newest() - 1, ", and rank ", r,
                                 memory_[r].newest() == 0 ? std::string(" none")
                                                          : bootstrap::text(" step ", memory_[r].newest() - 1),
                                 "; call keep() on all ranks with the same steps, and a finish() between two calls");
        if (kind_ == StateKind::replicated) compare_now_and_then();
        own().write(step + 1, part(rank_));
    }

private:
    using Handle = shared_memory::Segment::IpcHandle;

    static std::size_t cut(std::size_t bytes, int rank, int size) noexcept {
        constexpr std::size_t line = 64;  // parts begin at cache lines
        return static_cast<std::size_t>(rank) == static_cast<std::size_t>(size)
                   ? bytes
                   : bytes / line * static_cast<std::size_t>(rank) / static_cast<std::size_t>(size) * line;
    }
    elastic::KeptMemory& own() noexcept { return memory_[rank_]; }

    /// Returns the part of the state that rank r keeps.
    List<elastic::Piece> part(int r) const {
        if (kind_ == StateKind::own) return state_;
        const std::size_t first = cut(bytes_, r, size_);
        return elastic::part_of(state_, first, cut(bytes_, r + 1, size_) - first);
    }
    static std::optional<Handle> handle_in(const std::optional<Blob>& bytes) {
        Handle handle;
        if (!bytes || bytes->size() != sizeof handle) return std::nullopt;
        std::memcpy(&handle, bytes->data(), sizeof handle);
        return handle;
    }

    /// Compares the states of all ranks, more and more rarely: what differs would be mixed without a word. Between two
    /// calls lies a collective, so that no rank replaces a hash that another one is about to read.
    void compare_now_and_then() {
        if (std::has_single_bit(calls_ + 1)) {
            std::uint64_t digest = 1;
            for (const elastic::Piece& piece : state_) digest = detail::fnv1a(piece.data, piece.bytes, digest);
            return own().set_digest(digest | 1);
        }
        if (!std::has_single_bit(calls_)) return;
        for (std::size_t r = 0; r < memory_.size(); ++r)
            if (memory_[r].digest() != own().digest())
                bootstrap::raise(Errc::parameter_mismatch,
                                 {.operation = "keep", .rank = rank_, .peer = static_cast<int>(r)},
                                 "keep: the state of rank ", r, " was not that of rank ", rank_,
                                 " at the call before; if ranks differ, as in their random numbers, pass "
                                 "StateKind::own");
    }

    /// The values that a rank sends to the others at construction.
    struct Row {
        std::uint64_t steps[2] = {};  ///< that its memory has
        std::uint64_t bytes = 0, layout = 0;
        Handle handle = {};
        std::uint64_t code = 0;  ///< of its error
    };

    /// A hash of what the bytes mean, as far as this class knows.
    std::uint64_t layout(std::string_view name) const {
        std::uint64_t hash = detail::fnv1a(name.data(), name.size());
        for (const elastic::Piece& piece : state_) hash = detail::fnv1a(&piece.bytes, sizeof piece.bytes, hash);
        hash = detail::fnv1a(&size_, sizeof size_, hash);
        return detail::fnv1a(&kind_, sizeof kind_, hash);
    }

    template <class F>
    static void attempt(Row& own, std::string& problem, F&& f) {
        try {
            f();
        } catch (const Error& error) {
            own.code = static_cast<std::uint64_t>(error.errc());
            problem = error.what();
        } catch (const std::exception& error) {
            own.code = static_cast<std::uint64_t>(Errc::storage);
            problem = error.what();
        }
    }

    /// Returns the memory that this rank has had before, or some that was made and is held.
    elastic::KeptMemory take_memory(AnyStore& store, std::uint64_t self, std::uint64_t layout,
                                    std::chrono::nanoseconds limit) const {
        std::size_t bytes = 0;
        for (const elastic::Piece& piece : part(rank_)) bytes += piece.bytes;
        const std::string held = elastic::name_of_memory(rank_);
        auto handle = handle_in(store.read(held));
        elastic::KeptMemory made;  // until it is held
        if (!handle) {
            std::size_t sharers = 0;  // ranks that still make theirs
            for (int r = 0; r < size_; ++r) sharers += r == rank_ || !store.read(elastic::name_of_memory(r));
            made = elastic::KeptMemory::make(bytes, layout, sharers);
            (void)store.create(elastic::name_of_offer(rank_, self), std::as_bytes(std::span(&made.handle(), 1)));
        }
        for (const auto until = net::Clock::now() + limit / 2; !handle; ::usleep(500)) {
            handle = handle_in(store.read(held));
            if (!handle && net::Clock::now() > until)
                bootstrap::raise(Errc::storage, {.operation = "KeptState", .rank = rank_},
                                 "nobody holds the memory of rank ", rank_,
                                 "; start the ranks with gradsync_run --restarts K");
        }
        auto memory = elastic::KeptMemory::open(*handle);
        if (!memory.is_for(bytes, layout))
            bootstrap::raise(Errc::parameter_mismatch, {.operation = "KeptState", .rank = rank_},
                             "the kept state of rank ", rank_,
                             " is of another model or another number of ranks; use another folder for --state");
        return memory;
    }

    /// Returns what all ranks tell, or throws what is wrong with one. Collective.
    List<Row> agree(const Row& own, const std::string& problem) {
        List<Row> all = detail::gather_value(*comm_, own);
        if (!problem.empty())
            bootstrap::raise(static_cast<Errc>(own.code), {.operation = "KeptState", .rank = rank_}, problem);
        for (std::size_t r = 0; r < all.size(); ++r) {
            if (all[r].code != 0)
                bootstrap::raise(
                    is_errc(static_cast<int>(all[r].code)) ? static_cast<Errc>(all[r].code) : Errc::storage,
                    {.operation = "KeptState", .rank = rank_, .peer = static_cast<int>(r)}, "rank ", r,
                    " cannot keep its state; look at its error");
            if (kind_ == StateKind::replicated && (all[r].bytes != all[0].bytes || all[r].layout != all[0].layout))
                bootstrap::raise(Errc::parameter_mismatch,
                                 {.operation = "KeptState", .rank = rank_, .peer = static_cast<int>(r)},
                                 "KeptState: rank ", r, " has ", all[r].bytes, " bytes of state, rank 0 ", all[0].bytes,
                                 ", or in other pieces; a replicated state is the same on all ranks");
        }
        return all;
    }

    /// Finds the newest step that all ranks have, and forgets what they have of others.
    void find_newest(const List<Row>& all) {
        for (const std::uint64_t number : all[0].steps) {
            bool is_whole = number != 0;
            for (const Row& row : all) is_whole = is_whole && (row.steps[0] == number || row.steps[1] == number);
            if (is_whole && (!newest_ || number - 1 > *newest_)) newest_ = number - 1;
        }
        for (const int slot : {0, 1})
            if (!newest_ || own().step(slot) != *newest_ + 1) own().forget(slot);
    }

    StateKind kind_;
    int rank_, size_;
    List<elastic::Piece> state_;
    std::size_t bytes_ = 0;
    std::optional<TcpBackend> comm_;    ///< none without a store
    List<elastic::KeptMemory> memory_;  ///< by rank
    std::optional<std::uint64_t> newest_;
    std::uint64_t calls_ = 0;  ///< of `keep`
    bool* keeps_ = nullptr;    ///< of the Membership
};

}  // namespace gradsync::inline v0_2
