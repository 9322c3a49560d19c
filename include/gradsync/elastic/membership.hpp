// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../backend/tcp.hpp"
#include "records.hpp"

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

    /// Opens the store `job.store`, if the job has one. `job.rank` and `job.size` are those of the launcher. Throws
    /// Error(storage) if the store cannot be opened or does not answer, and Error(invalid_argument) if others may write
    /// into the folder, or etcd refuses. Later the job waits for a store that is away, for up to ten minutes.
    explicit Membership(const Job& job) : Membership(job, job.size, job.size, false) {}

    Membership(Membership&&) = delete;  // others refer to it

    /// Returns a backend of all ranks. `options.timeout` limits the meeting, as in `meet`, and the backend. The backend
    /// is yours; destroy it, and the Reducers over it, before you connect again. Throws what `meet` and TcpBackend
    /// throw. Collective.
    TcpBackend connect(const TcpOptions& options = {}) {
        auto ranks = meet(
            {.timeout = collective::limit_or(options.timeout, TcpRendezvousOptions().timeout), .bind = options.bind});
        try {
            TcpBackend comm(ranks, options);
            pause_ = {};
            return comm;
        } catch (const Error& error) {  // of two members that cannot reach each other, the others go on without one
            const auto peer = static_cast<std::size_t>(error.context().peer);  // -1 is more than any size
            if (records_ && error.context().operation == "connect_mesh" && peer < newest().members.size())
                machine().miss(newest().members[peer].id);
            throw;
        }
    }

    /// Returns a rendezvous of all ranks. Waits up to `options.timeout` for missing ranks; the time starts anew when a
    /// process comes or goes. Throws Error(timeout) if ranks are still missing, Error(peer_left) if the job has ended
    /// or its launcher starts no rank again, and otherwise what TcpRendezvous throws. Collective.
    TcpRendezvous meet(const TcpRendezvousOptions& options = {}) {
        if (!records_) {
            met_ = 1;
            return TcpRendezvous(job_, options);
        }
        const auto limit = detail::smaller<std::chrono::nanoseconds>(options.timeout, std::chrono::hours(24 * 365));
        gave_up_ = false;
        if (!listener_) listen(options.bind);
        const auto begin = Clock::now();
        constexpr int most_failures = 3;  // in a row: meetings of the same members, or looks that reached none of them
        int failures = 0;
        List<elastic::Member> members = newest().members;
        std::size_t here = 0;
        auto turn = begin;
        for (auto deadline = begin + limit;;) {
            const auto looked = Clock::now();
            records_->refresh();
            // The limit is for ranks. A store that was away has kept them from telling of themselves.
            const auto away = Clock::now() - std::exchange(turn, Clock::now());
            if (away > std::chrono::seconds(1)) deadline += away;
            const std::size_t before = std::exchange(here, count_here());
            if (here != before && !machine().changes()) deadline = Clock::now() + limit;
            if (newest().members != members) {
                deadline = Clock::now() + limit;
                failures = 0;
                members = newest().members;
            }
            if (machine().must_join()) join(limit);
            if (leaves() && rank() < 0) raise_end();
            const bool late = Clock::now() >= deadline;
            const elastic::Decision next = elastic::decide(machine().view(is_dead(), late));
            if (next.step == elastic::Step::leave) raise_end();
            if (next.step == elastic::Step::propose) {
                (void)store().create(elastic::name_of_generation(newest().number + 1), bytes_of(next.members));
            } else if (next.step == elastic::Step::meet) {
                if (auto ranks = meet_newest(limit)) {
                    met_ = newest().number;
                    last_store_ = job_.store;
                    return *std::move(ranks);
                }
                if (++failures == most_failures) give_up(Clock::now() - begin);
                deadline = (turn = Clock::now()) + limit;
            } else if (const bool is_spare = machine().view(is_dead()).is_spare(); is_spare && late) {
                if (reaches_member()) failures = 0;
                else if (++failures == most_failures) give_up(Clock::now() - begin, true);
                deadline = (turn = Clock::now()) + limit;
            } else if (is_spare || !late) {
                // Whoever is listed, and finds a member dead before it could come, waits like those that have left.
                if (machine().left() < newest().number && rank() >= 0) note_left(newest());
                else if (rank() < 0) answer();
                else if (machine().changes()) records_->call_waiting(is_dead());  // too few are left
                const auto pause = elastic::pause_after_look(looked, std::chrono::milliseconds(is_spare ? 10 : 1));
                ::usleep(static_cast<useconds_t>(pause.count()));
            } else if (accuse_silent()) {
                deadline = Clock::now() + limit;
            } else {
                give_up(Clock::now() - begin);
            }
        }
    }

    /// Returns whether to go on after `error`, the first error since `meet` or `connect`. True: another rank was lost
    /// (`peer_failed`, `peer_left` or `timeout`); call `connect` again, unless `is_over()`. False: the failure is this
    /// process's own, the ranks did not meet within the time limit, the job was ended, or there is no store.
    bool goes_on(const Error& error) {
        if (!records_) return false;
        const elastic::Generation met = newest();  // the error is of these members, and there may be others by now
        records_->refresh();
        if (records_->end()) return is_over();
        if (gave_up_ || !is_of_peer(error)) return false;
        leave_generation(met, error);
        return true;
    }

    /// Waits for all ranks and ends the job: a rank that fails later is not replaced. Throws what `barrier` throws, and
    /// Error(storage). Collective.
    void end(TcpBackend& comm) {
        comm.barrier().wait();
        if (records_) (void)store().create("end", {});
        has_ended_ = true;
    }
    /// Has this process, or have all others, called `end`?
    bool is_over() const noexcept { return has_ended_ || (records_ && records_->end() && records_->end()->empty()); }

    /// Returns the number of the last meeting, from 1: how often the ranks of the job have met, or tried to.
    std::uint32_t generation() const noexcept { return met_; }

private:
    friend class KeptState;
    friend class ElasticJob;

    /// Thrown by `look`.
    struct Interrupted {};
    /// A store that has answered, and is away then, delays the job for so long before it ends it.
    static constexpr auto patience = std::chrono::minutes(10);
    /// The job should have `ranks` ranks, and needs `least`. `changes`: their number may.
    Membership(const Job& job, int ranks, int least, bool changes) : job_(job) {
        if (job_.store.empty()) return;
        records_.emplace(job_.store,
                         elastic::Machine(static_cast<std::size_t>(ranks), static_cast<std::size_t>(least), changes));
        const std::string secret = job_.token.empty() ? net::Nonce::random().text() : job_.token;
        job_.token = bootstrap::text_of(store().create("job", std::as_bytes(std::span(secret))));
        (void)store().set_timeout(patience);
        job_.run_id = bootstrap::text("changing ", job_.run_id);
    }

    /// Says on standard error what a job without a store does not do. On rank 0.
    static void tell_missing(int rank, const char* what, const char* remedy) noexcept {
        if (rank == 0)
            detail::write_debug_line(detail::DebugLevel::info, rank,
                                     {"without a store ", what, "; start the ranks with ", remedy});
    }

    // For ElasticJob. Without a store the first change ends the job.

    /// Has this process been asked to leave?
    bool leaves() const noexcept { return leaves_.load(std::memory_order_relaxed); }
    void request_leave() noexcept { leaves_.store(true, std::memory_order_relaxed); }
    void note_leaving() {
        if (records_ && !noted_leaving_ && own_.id != 0) {
            (void)store().create(elastic::name_of("leave/", own_.id), {});
            machine().see_leaving(own_.id);
        }
        noted_leaving_ = true;
    }
    bool has_noted_leaving() const noexcept { return noted_leaving_; }
    /// Learns which members want to leave, by rank. Keeps those of them that leave now.
    [[gnu::cold]] void limit_leaving(List<std::uint64_t>& leaving) {
        if (!records_) return;
        for (std::size_t r = 0; r < leaving.size(); ++r)
            if (leaving[r] != 0) machine().see_leaving(newest().members[r].id);
        const elastic::Generation stays = machine().view(is_dead()).staying();
        for (std::size_t r = 0; r < leaving.size(); ++r)
            leaving[r] = leaving[r] != 0 && stays.rank_of(newest().members[r].id) < 0;
    }
    void note_gone() {
        if (records_ && own_.id != 0) (void)store().create(elastic::name_of("gone/", own_.id), {});
    }
    /// Leaves the newest generation, as all its members do, and the job if this process was asked to.
    void leave_as_agreed() {
        has_left_ = !records_;
        if (!records_) return;
        note_left(newest(), true);
        if (!leaves()) return;
        records_->refresh();
        if (!machine().may_leave(is_dead())) return;  // it gives its state to one that waits
        const std::string why = "all ranks have left it";
        if (machine().view(is_dead()).is_deserted()) (void)store().create("end", std::as_bytes(std::span(why)));
        note_gone();
        has_left_ = true;
    }
    /// This process goes away, although the job goes on: others neither wait for it nor accuse it.
    void abandon() {
        if (!records_) return;
        briefly([&] { note_gone(); });
        was_left_behind_ |= newest().members.size() > 1;
        own_.id = 0;
        machine().join(own_);
        noted_leaving_ = false;
    }
    /// Have the others gone on without this process since it last met them?
    bool was_left_behind() noexcept { return std::exchange(was_left_behind_, false); }
    /// Are all members of the newest generation alive?
    bool are_all_alive() {
        return records_ && machine().view(is_dead()).newest.members.size() == newest().members.size();
    }
    /// Has this process left for good?
    bool has_left() const noexcept { return has_left_; }
    bool has_store() const noexcept { return records_.has_value(); }
    /// Has this process been a rank of the job, perhaps with another object?
    bool has_taken_part() {
        if (!records_ || last_store_ != job_.store) return met_ != 0;
        records_->refresh();
        return true;
    }
    /// Returns for each rank a number of its host: those of one machine, and of one container in it, stand together.
    [[gnu::cold]] List<std::uint64_t> hosts() const {
        List<std::uint64_t> hosts;
        for (const elastic::Member& one : newest().members)
            hosts.push_back(one.process.machine << 32 | (one.process.system & 0xffff'ffffu));
        return hosts;
    }
    /// Have the others not met without this process?
    bool is_current() { return !records_ || !store().read(elastic::name_of_generation(met_ + 1)); }
    /// May there be results of an earlier generation? A read could be late, so rank 0 says no in the name of each one,
    /// unless that has said yes.
    bool has_begun() {
        while (records_ && !has_begun_ && asked_ + 1 < newest().number) has_begun_ = !says_begun(++asked_, "no");
        return has_begun_;
    }
    /// All ranks have the state.
    void settle() {
        if (records_) machine().settle();
    }
    /// There may be results of this generation from now on. Throws Error(peer_left) if a newer one counts on none.
    void begin() {
        if (records_ && !says_begun(met_, "yes"))
            bootstrap::raise(Errc::peer_left, {.operation = "restore", .rank = job_.rank},
                             "the ranks have met again meanwhile, without this one");
        has_begun_ = records_.has_value();
    }
    /// Does this generation say so, or has it said otherwise before?
    bool says_begun(std::uint32_t generation, std::string_view answer) {
        const Blob said = store().create(bootstrap::text("begun/", generation),
                                         std::as_bytes(std::span(answer.data(), answer.size())));
        return bootstrap::text_of(said) == answer;
    }
    /// Ends the job: nobody is left who has its state.
    [[noreturn]] void refuse_loss() {
        const std::string why =
            "all ranks that had the state of the training were lost, and there is no checkpoint; start it anew";
        (void)store().create("end", std::as_bytes(std::span(why)));
        bootstrap::raise(Errc::storage, {.operation = "restore", .rank = job_.rank}, why);
    }
    std::optional<elastic::Records> another_reader() const {
        return records_ ? std::optional(records_->another()) : std::nullopt;
    }

    static std::span<const std::byte> bytes_of(const List<elastic::Member>& members) {
        return std::as_bytes(std::span(members.data(), members.size()));
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
            bootstrap::raise(Errc::invalid_argument, {.operation = "connect", .rank = job_.rank}, "cannot listen at ",
                             where.empty() ? "any address" : "'" + where + "'", ": ", problem);
        listener_.set(IPPROTO_TCP, TCP_DEFER_ACCEPT, 1);  // `reaches_member` of others leaves nothing in its queue
        own_.place = job_.rank;
        own_.process = collective::ProcessIdentity::own();
    }
    void join(std::chrono::nanoseconds limit) {
        // A process that others cannot reach costs them a time limit, so it waits longer each time.
        answers_at_ = Clock::now() + pause_;
        if (own_.id != 0) pause_ = detail::smaller(2 * pause_ + limit / 2, 16 * limit);
        was_left_behind_ |= own_.id != 0;
        own_.id = bootstrap::random_token() | 1;
        machine().join(own_);
        answered_ = false;
        (void)store().create(elastic::name_of("join/", own_.id), std::as_bytes(std::span(&own_, 1)));
    }
    /// Says that this process waits, if it is asked.
    void answer() {
        if (answered_ || Clock::now() < answers_at_ || !store().read(elastic::name_of("call/", own_.id))) return;
        (void)store().create(elastic::name_of("here/", own_.id), {});
        answered_ = true;
    }

    /// Calls `f`, which asks the store, and waits for no store that is away.
    template <class F>
    void briefly(F&& f) {
        struct Brief {
            AnyStore& store;
            std::chrono::nanoseconds usual = store.set_timeout(std::chrono::milliseconds(500));
            ~Brief() { (void)store.set_timeout(usual); }
        } const brief{store()};
        try {
            f();
        } catch (const Error& error) {
            if (error.errc() != Errc::storage) throw;
        }
    }
    AnyStore& store() noexcept { return records_->store(); }
    elastic::Machine& machine() noexcept { return records_->machine(); }
    const elastic::Generation& newest() const noexcept { return records_->machine().newest(); }
    int rank() const noexcept { return newest().rank_of(own_.id); }  ///< in the newest generation, or -1
    elastic::IsDead is_dead() const noexcept { return {own_.process}; }

    /// The processes that may be members of the next generation.
    std::size_t count_here() {
        const elastic::View known = machine().view(is_dead());
        return known.newest.members.size() + known.waiting.size();
    }
    /// If all are here, the members of the newest generation have to propose the next one: if none does, each of them
    /// is stopped. A process that waits for them names them. Returns false if it cannot, or has done so before.
    bool accuse_silent() {
        if (machine().changes() || rank() >= 0 || accused_ == newest().number || count_here() < machine().ranks())
            return false;
        accused_ = newest().number;
        for (const elastic::Member& one : machine().view(is_dead()).newest.members)
            (void)store().create(elastic::name_of("out/", one.id), {});
        return true;
    }

    /// Does a member of the newest generation listen? It does as long as its process lives. If none does, their hosts
    /// may be lost, and nobody is left to say that they are gone.
    bool reaches_member() {
        const auto until = Clock::now() + std::chrono::seconds(1);
        constexpr linger at_once{1, 0};  // see `listen`
        List<net::Socket> calls;
        for (const elastic::Member& one : machine().view(is_dead()).newest.members)
            for (const net::Address& address : one.listener.list()) {
                net::Socket socket = net::Socket::of_family(address.family());
                ::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
                if (socket.connect(address.get(), address.size())) calls.push_back(std::move(socket));
            }
        bool reached = false;
        for (; !reached && !calls.empty() && Clock::now() < until; ::usleep(2'000))
            calls.erase_if([&](const net::Socket& call) {
                const bool has_answered = call.await(POLLOUT, {});
                reached = reached || (has_answered && call.is_connected());
                return has_answered;
            });
        return reached;
    }

    /// Returns nothing if the members have to meet again.
    std::optional<TcpRendezvous> meet_newest(std::chrono::nanoseconds limit) {
        const int rank = this->rank(), size = static_cast<int>(newest().members.size());
        List<int> absent;
        try {
            return TcpRendezvous({.rank = rank, .size = size, .token = job_.token, .run_id = job_.run_id},
                                 {.timeout = limit},
                                 {.contact = newest().members[0].listener,
                                  .listener = &listener_,
                                  .generation = newest().number,
                                  .look = {look, this},
                                  .absent = &absent});
        } catch (const Interrupted&) {
            note_left(newest());
        } catch (const Error& error) {
            if (!is_of_peer(error)) throw;
            if (const std::uint64_t one = leave_generation(newest(), error); one != 0) machine().miss(one);
            for (const int one : absent) machine().miss(newest().members[one].id);
            if (rank > 0 && error.errc() == Errc::timeout) await_proposal();
        }
        return {};
    }

    /// Ends a meeting that cannot succeed any more.
    static void look(void* argument) {
        Membership& own = *static_cast<Membership*>(argument);
        const List<elastic::Member>& members = own.newest().members;
        const elastic::Member& one = members[own.looked_at_++ % members.size()];
        bool is_over = own.is_dead()(one);
        if (const auto begin = Clock::now(); begin >= own.looks_next_) {
            const auto is_there = [&](const std::string& name) { return own.store().read(name).has_value(); };
            own.briefly([&] {
                is_over = is_over || is_there(elastic::name_of_generation(own.newest().number + 1)) ||
                          (own.machine().changes() && is_there(elastic::name_of("gone/", one.id)));
            });
            own.looks_next_ = Clock::now() + elastic::pause_after_look(begin, {});
        }
        if (is_over) throw Interrupted();
    }
    /// The first member knows who has not come, and the others do not: one that cannot reach it may itself be cut off.
    void await_proposal() {
        const std::string next = elastic::name_of_generation(newest().number + 1);
        for (const auto until = Clock::now() + std::chrono::seconds(1); Clock::now() < until && !store().read(next);)
            ::usleep(5'000);
    }

    void note_left(const elastic::Generation& generation, bool agreed = false) {
        machine().leave(generation.number, agreed);
        (void)store().create(elastic::name_of(elastic::name_of_return(generation.number), own_.id), {});
    }
    /// Returns the member for which this process has waited in vain; 0: none.
    std::uint64_t leave_generation(const elastic::Generation& generation, const Error& error) {
        note_left(generation);
        const int peer = error.context().peer;
        if (error.errc() != Errc::timeout || peer < 0 || static_cast<std::size_t>(peer) >= generation.members.size())
            return 0;
        const std::uint64_t culprit = generation.members[peer].id;
        if (culprit != own_.id) (void)store().create(elastic::name_of("out/", culprit), {});
        return culprit;
    }

    [[noreturn]] void raise_end() {
        has_left_ = leaves();
        if (leaves()) note_gone();
        bootstrap::raise(Errc::peer_left, {.operation = "connect", .rank = job_.rank},
                         leaves()    ? std::string("this process leaves the job")
                         : is_over() ? std::string("the job has ended well")
                                     : bootstrap::text("the job was ended: ", bootstrap::text_of(*records_->end())));
    }
    [[noreturn]] void give_up(std::chrono::nanoseconds limit, bool reaches_none = false) {
        gave_up_ = true;
        std::size_t here = count_here();
        const elastic::View known = machine().view(is_dead());
        for (const elastic::Member& one : known.newest.members) here -= known.absent.contains(one.id);
        const std::string problem =
            reaches_none ? ", and reaches none of them; start the launchers of their hosts again, or the job anew with "
                           "another store"
                         : bootstrap::text(": the job needs ", machine().least(), " ranks, and ", here,
                                           here == 1 ? " process is" : " processes are",
                                           " there; look at the output of those that are missing");
        bootstrap::raise(Errc::timeout, {.operation = "connect", .rank = job_.rank}, "rank ", job_.rank, " has waited ",
                         bootstrap::format_duration(std::chrono::duration_cast<std::chrono::milliseconds>(limit)),
                         reaches_none ? " for the members of the job" : " for the other ranks", " in the store ",
                         job_.store, problem);
    }

    inline static std::string last_store_;  ///< of this process's last meeting

    Job job_;
    std::optional<elastic::Records> records_;  ///< none without a store
    net::Socket listener_;
    elastic::Member own_;  ///< this process, as it has joined
    bool has_ended_ = false;
    std::uint32_t met_ = 0;
    std::uint32_t accused_ = 0;  ///< the generation whose members this process has accused; 0: none
    std::size_t looked_at_ = 0;
    Clock::time_point looks_next_ = {};  ///< at the store, during a meeting
    bool answered_ = false;
    Clock::time_point answers_at_ = {};    ///< not before
    std::chrono::nanoseconds pause_ = {};  ///< when this process joins again
    std::uint32_t asked_ = 0;              ///< the generations up to this one have not begun
    bool has_begun_ = false;               ///< an earlier one, or this one, has
    bool gave_up_ = false;                 ///< the last call of `meet` has
    std::atomic<bool> leaves_ = false;
    bool noted_leaving_ = false;
    bool was_left_behind_ = false;
    bool has_left_ = false;
    bool keeps_ = false;  ///< a KeptState has the job's memory
};

}  // namespace gradsync::inline v0_2
