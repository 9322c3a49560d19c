// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../backend/tcp.hpp"
#include "../bootstrap/store/any_store.hpp"
#include "machine.hpp"

namespace gradsync::inline v0_2 {

/// Lets a process meet the other ranks of its job, and meet them again after one of them was lost and started again.
///
///     auto job = gs::Membership::from_environment();      // reads what gradsync_run --restarts K sets
///     while (!job.is_over()) try {
///             gs::TcpBackend comm = job.connect();        // waits for all ranks
///             ...                                         // make a Reducer; load the newest checkpoint; train
///             job.end(comm);
///         } catch (const gs::Error& error) {
///             if (!job.goes_on(error)) throw;             // true: another rank was lost; meet again
///         }
///
/// The number of ranks does not change. A launcher must start lost ranks again; `connect` waits for them. Without a
/// store, `connect` does what `TcpBackend::from_environment` does, and the first failure ends the job. Not
/// thread-safe.
class Membership {
    using Clock = net::Clock;

public:
    /// Reads the job from the environment; see `Job::from`. Throws Error(invalid_argument) if a variable is invalid,
    /// and otherwise what the constructor throws.
    static Membership from_environment() { return Membership(Job::from_environment()); }

    /// Opens the folder `job.store`, if the job has one. `job.rank` and `job.size` are those of the launcher. Throws
    /// Error(storage) if the folder cannot be opened, and Error(invalid_argument) if others may write into it.
    explicit Membership(Job job) : Membership(std::move(job), job.size, job.size) {}

    Membership(Membership&&) = delete;  // others refer to it

    /// Returns a backend of all ranks. `options.timeout` limits the meeting, as in `meet`, and the backend. The backend
    /// is yours; destroy it, and the Reducers over it, before you connect again. Throws what `meet` and TcpBackend
    /// throw. Collective.
    TcpBackend connect(const TcpOptions& options = {}) {
        auto ranks = meet(
            {.timeout = collective::limit_or(options.timeout, TcpRendezvousOptions().timeout), .bind = options.bind});
        return TcpBackend(ranks, options);
    }

    /// Returns a rendezvous of all ranks. Waits up to `options.timeout` for missing ranks; the time starts anew when
    /// the members change. Throws Error(timeout) if ranks are still missing, Error(peer_left) if the job has ended or
    /// its launcher starts no rank again, and otherwise what TcpRendezvous throws. Collective.
    TcpRendezvous meet(const TcpRendezvousOptions& options = {}) {
        if (!store_) {
            met_ = 1;
            return TcpRendezvous(job_, options);
        }
        gave_up_ = false;
        if (!listener_) listen(options.bind);
        const auto begin = Clock::now();
        constexpr int most_failures = 3;  // of meetings of the same members
        int failures = 0;
        List<elastic::Member> members = newest().members;
        for (auto deadline = Clock::now() + options.timeout;;) {
            refresh();
            if (!elastic::are_same(newest().members, members)) {
                deadline = Clock::now() + options.timeout;
                failures = 0;
                members = newest().members;
            }
            if (machine_.must_join()) join();
            const bool late = Clock::now() >= deadline;
            const elastic::Decision next = machine_.next(is_dead(), late);
            if (next.step == elastic::Step::leave) leave();
            if (next.step == elastic::Step::propose) {
                (void)store_->create(elastic::name_of_generation(newest().number + 1), bytes_of(next.members));
            } else if (next.step == elastic::Step::meet) {
                if (auto ranks = meet_newest(options.timeout)) {
                    met_ = newest().number;
                    return *std::move(ranks);
                }
                if (++failures == most_failures) give_up(Clock::now() - begin);
                deadline = Clock::now() + options.timeout;
            } else if (!late) {
                // Whoever is listed, and finds a member dead before it could come, waits like those that have left.
                if (machine_.left() < newest().number && rank() >= 0) note_left(newest());
                else if (rank() < 0) answer();
                ::usleep(1'000);
            } else {
                give_up(Clock::now() - begin);
            }
        }
    }

    /// Returns whether to go on after `error`, the first error since `meet` or `connect`. True: another rank was lost
    /// (`peer_failed`, `peer_left` or `timeout`); call `connect` again, unless `is_over()`. False: the failure is this
    /// process's own, the ranks did not meet within the time limit, the job was ended, or there is no store.
    bool goes_on(const Error& error) {
        if (!store_) return false;
        const elastic::Generation met = newest();  // the error is of these members, and there may be others by now
        refresh();
        if (end_) return is_over();
        if (gave_up_ || !is_of_peer(error)) return false;
        leave_generation(met, error);
        return true;
    }

    /// Waits for all ranks and ends the job: a rank that fails later is not replaced. Throws what `barrier` throws, and
    /// Error(storage). Collective.
    void end(TcpBackend& comm) {
        comm.barrier().wait();
        if (store_) (void)store_->create("end", {});
        end_.emplace();
    }
    /// Has this process, or have all others, called `end`?
    bool is_over() const noexcept { return end_ && end_->empty(); }

    /// Returns the number of the last meeting, from 1: how often the ranks of the job have met, or tried to.
    std::uint32_t generation() const noexcept { return met_; }

private:
    friend class KeptState;
    friend class ElasticJob;

    /// Thrown by `look`.
    struct Interrupted {};
    struct IsDead {
        collective::ProcessIdentity self;
        bool operator()(const elastic::Member& one) const noexcept { return !one.process.alive(self); }
    };

    /// The job should have `ranks` ranks, and needs `least`.
    Membership(Job job, int ranks, int least)
        : job_(std::move(job)), machine_(static_cast<std::size_t>(ranks), static_cast<std::size_t>(least)) {
        if (job_.store.empty()) return;
        store_.emplace(AnyStore::open(job_.store));
        const std::string secret = job_.token.empty() ? net::Nonce::random().text() : job_.token;
        job_.token = bootstrap::text_of(store_->create("job", std::as_bytes(std::span(secret))));
        job_.run_id = bootstrap::text("changing ", job_.run_id);
    }

    static std::span<const std::byte> bytes_of(const List<elastic::Member>& members) {
        return std::as_bytes(std::span(members.data(), members.size()));
    }
    /// Throws Error(storage) unless the bytes are members.
    List<elastic::Member> members_in(const Blob& bytes, const std::string& name) const {
        List<elastic::Member> members = elastic::members_in(bytes);
        if (members.empty())
            bootstrap::raise(
                Errc::storage,
                bootstrap::text("the store ", job_.store, " holds something else under ", name,
                                "; give each job a store of its own, and all ranks one version of gradsync"),
                {.operation = "store"});
        return members;
    }
    static bool is_of_peer(const Error& error) noexcept {
        return error.errc() == Errc::peer_failed || error.errc() == Errc::peer_left || error.errc() == Errc::timeout;
    }

    /// Listens for the whole life of this process: at a fixed port, a rank that is stopped could keep others from it.
    void listen(const std::string& bind) {
        std::string problem;
        const std::string where = bind.empty() && job_.is_at_loopback() ? job_.address : bind;
        listener_ = net::listen(where, own_.listener, problem);
        if (!listener_)
            bootstrap::raise(
                Errc::invalid_argument,
                bootstrap::text("cannot listen at ", where.empty() ? "any address" : "'" + where + "'", ": ", problem),
                {.operation = "connect", .rank = job_.rank});
        own_.place = job_.rank;
        own_.process = collective::ProcessIdentity::own();
    }
    void join() {
        own_.id = bootstrap::random_token() | 1;
        machine_.join(own_);
        answered_ = false;
        (void)store_->create(elastic::name_of("join/", own_.id), std::as_bytes(std::span(&own_, 1)));
    }
    /// Says that this process waits, if it is asked.
    void answer() {
        if (answered_ || !store_->read(elastic::name_of("call/", own_.id))) return;
        (void)store_->create(elastic::name_of("here/", own_.id), {});
        answered_ = true;
    }

    /// Reads what is new in the store.
    void refresh() {
        for (;;) {
            const std::string name = elastic::name_of_generation(newest().number + 1);
            const auto found = store_->read(name);
            if (!found) break;
            machine_.see(members_in(*found, name));
        }
        if (!end_) end_ = store_->read("end");
        if (end_) machine_.see_end();
        for_each_member_in(*store_, "join/", [&](std::uint64_t id, const std::string& name) {
            if (machine_.knows(id)) return;
            if (const auto found = store_->read(name)) machine_.see(members_in(*found, name)[0]);  // it may be late
        });
        if (machine_.least() == machine_.ranks()) return;
        for_each_member_in(*store_, "here/", [&](std::uint64_t id, const std::string&) { machine_.see_ready(id); });
        for_each_member_in(*store_, "leave/", [&](std::uint64_t id, const std::string&) { machine_.see_leaving(id); });
    }
    template <class F>
    static void for_each_member_in(AnyStore& store, const std::string& prefix, F&& f) {
        for (const std::string& name : store.names(prefix))
            f(std::strtoull(name.c_str() + prefix.size(), nullptr, 16), name);
    }

    const elastic::Generation& newest() const noexcept { return machine_.newest(); }
    int rank() const noexcept { return newest().rank_of(own_.id); }  ///< in the newest generation, or -1
    IsDead is_dead() const noexcept { return {own_.process}; }

    /// Returns nothing if the members have to meet again.
    std::optional<TcpRendezvous> meet_newest(std::chrono::nanoseconds limit) {
        const int rank = this->rank(), size = static_cast<int>(newest().members.size());
        try {
            return TcpRendezvous({.rank = rank, .size = size, .token = job_.token, .run_id = job_.run_id},
                                 {.timeout = limit},
                                 {.contact = newest().members[0].listener,
                                  .listener = &listener_,
                                  .generation = newest().number,
                                  .look = {look, this}});
        } catch (const Interrupted&) {
            note_left(newest());
        } catch (const Error& error) {
            if (!is_of_peer(error)) throw;
            if (const std::uint64_t absent = leave_generation(newest(), error); absent != 0) machine_.miss(absent);
        }
        return {};
    }

    /// Ends a meeting that cannot succeed any more.
    static void look(void* argument) {
        Membership& own = *static_cast<Membership*>(argument);
        if (own.store_->read(elastic::name_of_generation(own.newest().number + 1))) throw Interrupted();
        const List<elastic::Member>& members = own.newest().members;
        if (own.is_dead()(members[own.looked_at_++ % members.size()])) throw Interrupted();
    }

    void note_left(const elastic::Generation& generation, bool agreed = false) {
        machine_.leave(generation.number, agreed);
        (void)store_->create(elastic::name_of(elastic::name_of_return(generation.number), own_.id), {});
    }
    /// Returns the member for which this process has waited in vain; 0: none.
    std::uint64_t leave_generation(const elastic::Generation& generation, const Error& error) {
        note_left(generation);
        const int peer = error.context().peer;
        if (error.errc() != Errc::timeout || peer < 0 || static_cast<std::size_t>(peer) >= generation.members.size())
            return 0;
        const std::uint64_t culprit = generation.members[static_cast<std::size_t>(peer)].id;
        if (culprit == own_.id) return 0;
        (void)store_->create(elastic::name_of("out/", culprit), {});
        return culprit;
    }

    [[noreturn]] void leave() {
        bootstrap::raise(Errc::peer_left,
                         is_over() ? std::string("the job has ended well")
                                   : bootstrap::text("the job was ended: ", bootstrap::text_of(*end_)),
                         {.operation = "connect", .rank = job_.rank});
    }
    [[noreturn]] void give_up(std::chrono::nanoseconds limit) {
        gave_up_ = true;
        const elastic::View known = machine_.view(is_dead());
        const std::size_t here = known.newest.members.size() + known.waiting.size();
        bootstrap::raise(
            Errc::timeout,
            bootstrap::text("rank ", job_.rank, " has waited ", bootstrap::format_duration(limit),
                            " for the other ranks in the store ", job_.store, ": the job needs ", machine_.least(),
                            " ranks, and ", here, here == 1 ? " process is" : " processes are",
                            " there; look at the output of those that are missing"),
            {.operation = "connect", .rank = job_.rank});
    }

    Job job_;
    elastic::Machine machine_;
    std::optional<AnyStore> store_;
    net::Socket listener_;
    elastic::Member own_;  ///< this process, as it has joined
    std::optional<Blob> end_;
    std::uint32_t met_ = 0;
    std::size_t looked_at_ = 0;
    bool answered_ = false;
    bool gave_up_ = false;  ///< the last call of `meet` has
    bool keeps_ = false;    ///< a KeptState has the job's memory
};

}  // namespace gradsync::inline v0_2
