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
    explicit Membership(Job job) : job_(std::move(job)) {
        if (job_.store.empty()) return;
        store_.emplace(AnyStore::open(job_.store));
        const std::string secret = net::Nonce::random().text();
        const Blob first = store_->create("job", std::as_bytes(std::span(secret)));
        if (job_.token.empty()) job_.token = bootstrap::text_of(first);
        job_.run_id = bootstrap::text("changing ", job_.run_id);
    }

    Membership(Membership&&) = delete;  // a KeptState refers to it

    /// Returns a backend of all ranks. `options.timeout` limits the meeting, as in `meet`, and the backend. The backend
    /// is yours; destroy it, and the Reducers over it, before you connect again. Throws what `meet` and TcpBackend
    /// throw. Collective.
    TcpBackend connect(const TcpOptions& options = {}) {
        auto ranks = meet(
            {.timeout = collective::limit_or(options.timeout, TcpRendezvousOptions().timeout), .bind = options.bind});
        return TcpBackend(ranks, options);
    }

    /// Returns a rendezvous of all ranks. Waits up to `options.timeout` for missing ranks; the time starts anew when a
    /// process comes or goes. Throws Error(timeout) if ranks are still missing, Error(peer_left) if the job has ended
    /// or its launcher starts no rank again, and otherwise what TcpRendezvous throws. Collective.
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
        List<elastic::Member> members = newest_.members;
        std::size_t here = 0;
        for (auto deadline = Clock::now() + options.timeout;;) {
            refresh();
            if (const std::size_t before = std::exchange(here, count_here()); here != before)
                deadline = Clock::now() + options.timeout;
            if (!elastic::are_same(newest_.members, members)) {
                deadline = Clock::now() + options.timeout;
                failures = 0;
                members = newest_.members;
            }
            if (self_.id == 0 || (listed_ && newest_.rank_of(self_.id) < 0)) join();
            const elastic::Decision next = elastic::decide(view());
            if (next.step == elastic::Step::leave) leave();
            if (next.step == elastic::Step::propose) {
                (void)store_->create(elastic::name_of_generation(newest_.number + 1), bytes_of(next.members));
            } else if (next.step == elastic::Step::meet) {
                if (auto ranks = meet_newest(options.timeout)) {
                    met_ = newest_.number;
                    return *std::move(ranks);
                }
                if (++failures == most_failures) give_up(Clock::now() - begin);
                deadline = Clock::now() + options.timeout;
            } else if (Clock::now() < deadline) {
                // Whoever is listed, and finds a member dead before it could come, waits like those that have left.
                if (left_ < newest_.number && newest_.rank_of(self_.id) >= 0) note_left(newest_);
                ::usleep(1'000);
            } else if (accuse_silent()) {
                deadline = Clock::now() + options.timeout;
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
        const elastic::Generation met = newest_;  // the error is of these members, and there may be others by now
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

    /// Thrown by `look`.
    struct Interrupted {};

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
        listener_ = net::listen(where, self_.listener, problem);
        if (!listener_)
            bootstrap::raise(
                Errc::invalid_argument,
                bootstrap::text("cannot listen at ", where.empty() ? "any address" : "'" + where + "'", ": ", problem),
                {.operation = "connect", .rank = job_.rank});
        self_.place = job_.rank;
        self_.process = collective::ProcessIdentity::own();
    }
    void join() {
        self_.id = bootstrap::random_token() | 1;
        listed_ = false;
        (void)store_->create(elastic::name_of("join/", self_.id), std::as_bytes(std::span(&self_, 1)));
    }

    /// Reads what is new in the store.
    void refresh() {
        for (;;) {
            const std::string name = elastic::name_of_generation(newest_.number + 1);
            const auto found = store_->read(name);
            if (!found) break;
            newest_ = {newest_.number + 1, members_in(*found, name)};
            listed_ |= newest_.rank_of(self_.id) >= 0;
            waiting_.erase_if([&](const elastic::Member& one) { return newest_.rank_of(one.id) >= 0; });
            for (const elastic::Member& one : newest_.members)
                if (!is_known(one.id)) known_.push_back(one.id);
        }
        if (!end_) end_ = store_->read("end");
        for (const std::string& name : store_->names("join/")) {
            const std::uint64_t id = std::strtoull(name.c_str() + std::strlen("join/"), nullptr, 16);
            if (is_known(id)) continue;
            const auto found = store_->read(name);
            if (!found) continue;  // it is late
            known_.push_back(id);
            waiting_.push_back(members_in(*found, name)[0]);
        }
    }
    bool is_known(std::uint64_t member) const noexcept {
        for (const std::uint64_t known : known_)
            if (known == member) return true;
        return false;
    }

    bool is_dead(const elastic::Member& one) const noexcept { return !one.process.alive(self_.process); }
    elastic::View view() {
        waiting_.erase_if([&](const elastic::Member& one) { return is_dead(one); });
        elastic::View known{.self = self_.id, .left = left_, .newest = newest_, .was = newest_.members.size()};
        known.newest.members.erase_if([&](const elastic::Member& one) { return is_dead(one); });
        known.waiting = waiting_;
        known.ended = end_.has_value();
        known.ranks = static_cast<std::size_t>(job_.size);
        return known;
    }

    /// The processes that may be members of the next generation.
    std::size_t count_here() {
        const elastic::View known = view();
        return known.newest.members.size() + known.waiting.size();
    }
    /// If all are here, the members of the newest generation have to propose the next one: if none does, each of them
    /// is stopped. A process that waits for them names them. Returns false if it cannot, or has done so before.
    bool accuse_silent() {
        if (newest_.rank_of(self_.id) >= 0 || accused_ == newest_.number ||
            count_here() < static_cast<std::size_t>(job_.size))
            return false;
        accused_ = newest_.number;
        for (const elastic::Member& one : view().newest.members)
            (void)store_->create(elastic::name_of("out/", one.id), {});
        return true;
    }

    /// Returns nothing if the members have to meet again.
    std::optional<TcpRendezvous> meet_newest(std::chrono::nanoseconds limit) {
        const int rank = newest_.rank_of(self_.id), size = static_cast<int>(newest_.members.size());
        try {
            return TcpRendezvous({.rank = rank, .size = size, .token = job_.token, .run_id = job_.run_id},
                                 {.timeout = limit},
                                 {.contact = newest_.members[0].listener,
                                  .listener = &listener_,
                                  .generation = newest_.number,
                                  .look = {look, this}});
        } catch (const Interrupted&) {
            note_left(newest_);
        } catch (const Error& error) {
            if (!is_of_peer(error)) throw;
            leave_generation(newest_, error);
        }
        return {};
    }

    /// Ends a meeting that cannot succeed any more.
    static void look(void* argument) {
        Membership& own = *static_cast<Membership*>(argument);
        if (own.store_->read(elastic::name_of_generation(own.newest_.number + 1))) throw Interrupted();
        const List<elastic::Member>& members = own.newest_.members;
        if (own.is_dead(members[own.looked_at_++ % members.size()])) throw Interrupted();
    }

    void note_left(const elastic::Generation& generation) {
        left_ = generation.number;
        (void)store_->create(elastic::name_of(elastic::name_of_return(left_), self_.id), {});
    }
    void leave_generation(const elastic::Generation& generation, const Error& error) {
        note_left(generation);
        const int peer = error.context().peer;
        if (error.errc() != Errc::timeout || peer < 0 || static_cast<std::size_t>(peer) >= generation.members.size())
            return;
        const std::uint64_t culprit = generation.members[static_cast<std::size_t>(peer)].id;
        if (culprit != self_.id) (void)store_->create(elastic::name_of("out/", culprit), {});
    }

    [[noreturn]] void leave() {
        bootstrap::raise(Errc::peer_left,
                         is_over() ? std::string("the job has ended well")
                                   : bootstrap::text("the job was ended: ", bootstrap::text_of(*end_)),
                         {.operation = "connect", .rank = job_.rank});
    }
    [[noreturn]] void give_up(std::chrono::nanoseconds limit) {
        gave_up_ = true;
        const std::size_t here = count_here();
        bootstrap::raise(Errc::timeout,
                         bootstrap::text("rank ", job_.rank, " has waited ", bootstrap::format_duration(limit),
                                         " for the other ranks in the store ", job_.store, ": the job needs ",
                                         job_.size, " ranks, and ", here, here == 1 ? " process is" : " processes are",
                                         " there; look at the output of those that are missing"),
                         {.operation = "connect", .rank = job_.rank});
    }

    Job job_;
    std::optional<AnyStore> store_;
    net::Socket listener_;
    elastic::Member self_;
    elastic::Generation newest_;
    List<elastic::Member> waiting_;  ///< those that no generation has listed
    List<std::uint64_t> known_;      ///< members that this process has heard of
    std::optional<Blob> end_;
    std::uint32_t left_ = 0, met_ = 0;
    std::uint32_t accused_ = 0;  ///< the generation whose members this process has accused; 0: none
    std::size_t looked_at_ = 0;
    bool listed_ = false;   ///< a generation has listed `self_`; if the newest does not, this process joins again
    bool gave_up_ = false;  ///< the last call of `meet` has
    bool keeps_ = false;    ///< a KeptState has the job's memory
};

}  // namespace gradsync::inline v0_2
