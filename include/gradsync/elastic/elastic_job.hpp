// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../reducer.hpp"
#include "live_state.hpp"
#include "membership.hpp"
#include "watch.hpp"

namespace gradsync::inline v0_2 {

/// What `ElasticJob::restore` has done.
struct Restored {
    /// Where the state is from.
    enum class From : std::uint8_t {
        start,      ///< the state of rank 0: the job begins
        rank,       ///< a rank that had the newest state
        checkpoint  ///< no process had a state: steps after the checkpoint are lost, and done again
    };
    From from = From::start;  ///< where the state is from
    std::uint64_t step = 0;   ///< the steps that are done
    std::uint64_t again = 0;  ///< steps that a lost rank had done, and that are done again, with the same bits
};

/// A training whose ranks come and go. If a rank is lost, the others go on without it at once. Processes that wait
/// become ranks at the next step. The weights at the end have the bits of a run in which nothing happened, as the
/// gradients of a step are those of V micro-batches, however many ranks compute them.
///
///     gs::ElasticJob job = gs::ElasticJob::from_environment();  // reads what gradsync_run sets; without it, one rank
///     job.run([&](gs::TcpBackend& comm) {                       // called again whenever the ranks change
///         gs::Reducer sync(comm, model.parameters(),
///                          {.accumulation = gs::Accumulation::in_buckets, .micro_batches = 48});
///         job.restore(sync, {gs::buffer(model.weights), gs::buffer(model.momentum)});
///         while (job.step() < steps && job.goes_on()) {
///             for (const std::size_t m : job.micro_batches()) {
///                 std::optional<gs::NoSync> more;  // to come
///                 if (m != job.micro_batches().back()) more.emplace(sync.no_sync());
///                 model.backward(data.batch(job.step(), m), [&](std::size_t i) { sync.mark_ready(i); });
///             }
///             sync.finish();
///             job.update([&] { model.step(); });
///         }
///     });
///
/// What a step computes may depend on its number and on that of the micro-batch, and on nothing else that differs
/// between ranks. Not thread-safe, except for `request_leave`.
class ElasticJob {
public:
    /// Reads the job from the environment; see `Job::from`. Throws what `Job::from` and the constructor throw.
    static ElasticJob from_environment() { return ElasticJob(Job::from_environment()); }
    /// Throws what Membership's constructor throws.
    explicit ElasticJob(const Job& job)
        : most_(job.max_ranks != 0 ? job.max_ranks : job.size),
          membership_(job, most_, detail::larger(job.min_ranks, 1)) {}
    ElasticJob(ElasticJob&&) = delete;

    /// Calls `body(backend)` each time when the ranks have met, until it returns on all of them although `goes_on()`
    /// has not asked for that. Returns on all processes, also on those that were never needed, and on a rank that has
    /// left. `options.timeout` also limits how long ranks wait for one another before they go on with fewer; at the
    /// start they wait that long for all. Throws what `body` throws if it is this rank's own failure, and what
    /// `Membership::meet` throws. Collective.
    template <class Body>
    void run(Body&& body, const TcpOptions& options = {}) {
        while (!is_over()) try {
                TcpBackend comm = connect(options);
                body(comm);
                leave(comm);
            } catch (const Error& error) {
                if (!goes_on(error)) throw;
            }
    }

    // ------------------------------------------------------------------------------------ what the body of `run` calls

    /// Gives all ranks the newest state that one of them has, or at the start that of rank 0, and sets `step()`.
    /// The Reducer needs no other broadcast. Collective.
    ///
    /// - `state`: the memory of all that a step changes, in the same order on every rank: weights, the optimizer's
    ///   state, random numbers. It outlives the calls of the body. A state that is whole is overwritten only when all
    ///   ranks have the newer one.
    /// - `load()`: called on rank 0 if no process has a state. Reads the newest checkpoint into that memory and returns
    ///   its step, or returns 0.
    ///
    /// Throws Error(invalid_argument) if the sums of `sync` depend on the number of ranks, or if the state was changed
    /// outside of `update`; Error(parameter_mismatch) if the states of the ranks are not alike; and Error(storage) if
    /// the state is lost and there is no checkpoint.
    template <class Sync, class Load>
    Restored restore(Sync& sync, std::span<const BufferView> state, Load&& load) {
        check(sync);
        TcpBackend comm = sync.backend();
        return restore(comm, detail::OptionsOf::face(sync), state, load);
    }
    template <class Sync>
    Restored restore(Sync& sync, std::span<const BufferView> state) {
        return restore(sync, state, [] { return std::uint64_t{0}; });
    }
    template <class Sync, class... Load>
    Restored restore(Sync& sync, std::initializer_list<BufferView> state, Load&&... load) {
        return restore(sync, std::span(state.begin(), state.size()), std::forward<Load>(load)...);
    }

    /// The same, where the type of the Reducer is not known. It has the exchange AllReduce, and not OverlapForward.
    template <class Load>
    Restored restore(TcpBackend& comm, const ReducerOptions& options, std::span<const BufferView> state, Load&& load) {
        check_options(options, comm.rank());
        deal(detail::deal_of(options, comm.size()), comm.rank());
        const bool speaks = comm.rank() == 0;
        const auto all = state_.meet(comm, state, speaks && membership_.has_begun());
        elastic::Plan plan = plan_of(all);
        Restored restored{.from = Restored::From::rank, .again = plan.lost};
        if (plan.base == 0) {  // rank 0 has what it begins with, or a checkpoint
            std::uint64_t number = speaks ? static_cast<std::uint64_t>(load()) + 1 : 0;
            comm.broadcast(BufferView(&number, 1), 0).wait();
            if (all[0].begun != 0 && number == 1) membership_.refuse_loss();
            restored.from = all[0].begun != 0 ? Restored::From::checkpoint : Restored::From::start;
            if (speaks) state_.set_initial(number);
            plan = {.base = number, .owners = List<std::uint32_t>(1, 0)};
        }
        state_.heal(comm, plan, all);
        start(comm);
        restored.step = step_ = plan.base - 1;
        return restored;
    }

    /// The steps that are done.
    std::uint64_t step() const noexcept { return step_; }
    /// The numbers, from 0, of the micro-batches of each step that this rank computes.
    std::span<const std::size_t> micro_batches() const noexcept {
        return {micro_batches_.data(), micro_batches_.size()};
    }

    /// Call it before each step. Returns false, on all ranks, if the ranks change now: then return from the body. Waits
    /// for no other rank, as what it returns was agreed during the step before. Throws what a wait of the backend
    /// throws, and Error(invalid_argument) if `update` was not called since the last call. Collective.
    [[nodiscard]] bool goes_on() {
        if (!votes_) refuse("goes_on", "call restore() first, each time when the body of run() is called");
        if (vote_ && voted_ == step_)
            refuse("goes_on", "no step was counted since the last call; change the state in update()");
        voted_ = step_;
        if (vote_) {
            std::exchange(vote_, {})->wait();
            if (word_ != 0) return !(changes_ = true);
        }
        if (membership_.leaves()) membership_.note_leaving();
        word_ = membership_.leaves() || (watch_ && watch_->wants_change());
        vote_.emplace(votes_->all_reduce(BufferView(&word_, 1), ReduceOp::max));
        return true;
    }

    /// Calls `change()`, which must change the state by one step and call no collective, and counts the step. After an
    /// exception of `change` this process's state does not count any more. Throws Error(invalid_argument) without a
    /// `restore` before. Local.
    template <class F>
    void update(F&& change) {
        if (!votes_) refuse("update", "call restore() first, each time when the body of run() is called");
        state_.update(std::forward<F>(change));
        ++step_;
    }

    // ----------------------------------------------------------------------------- for a loop of your own, as in `run`

    /// Meets the other ranks; see `Membership::connect`. Collective.
    TcpBackend connect(const TcpOptions& options = {}) { return membership_.connect(options); }
    /// Ends what `connect` has begun: for a change if `goes_on()` has returned false, else the job. Collective.
    void leave(TcpBackend& comm) {
        if (vote_ && !changes_) std::exchange(vote_, {})->wait();
        stop();
        if (!std::exchange(changes_, false)) return membership_.end(comm);
        has_left_ = !membership_.change();
    }
    /// Returns whether to go on after `error`; see `Membership::goes_on`.
    bool goes_on(const Error& error) {
        if (vote_) votes_->fail(error.what());
        stop();
        changes_ = false;
        has_left_ = membership_.leaves();
        return has_left_ || membership_.goes_on(error);
    }
    /// Has the job ended well, or has this rank left it?
    bool is_over() const noexcept { return has_left_ || membership_.is_over(); }
    /// Has this rank left a job that goes on?
    bool has_left() const noexcept { return has_left_; }

    /// Returns the number of the last meeting, from 1.
    std::uint32_t generation() const noexcept { return membership_.generation(); }
    /// Lets this rank leave the job after the step under way: `run` then returns. Call it from any thread, or from a
    /// signal handler.
    void request_leave() noexcept { membership_.request_leave(); }

private:
    using Work = decltype(std::declval<TcpBackend&>().all_reduce(BufferView(), ReduceOp::max));

    [[noreturn, gnu::cold]] static void refuse(const char* operation, const char* text) {
        bootstrap::raise(Errc::invalid_argument, bootstrap::text(operation, ": ", text), {.operation = operation});
    }
    template <class Buckets, class Overlap>
    static void check(const Reducer<TcpBackend, Buckets, Overlap, AllReduce>&) {
        static_assert(!detail::gathers_in_forward<Overlap>(),
                      "gradsync: a step of an ElasticJob is whole before the next one begins; use OverlapBackward");
    }
    template <class Sync>
    static void check(const Sync&) {
        static_assert(
            sizeof(Sync) == 0,
            "gradsync: ElasticJob::restore takes a Reducer<TcpBackend, ...> with the exchange AllReduce; what "
            "compressors and sharded classes hold depends on the number of ranks");
    }
    [[gnu::cold]] void check_options(const ReducerOptions& options, int rank) const {
        const bool rounds = options.reduce_dtype && is_low_precision(*options.reduce_dtype);
        if (options.micro_batches >= static_cast<std::size_t>(most_) && !rounds &&
            !detail::is_weighted(options.averaging))
            return;
        bootstrap::raise(
            Errc::invalid_argument,
            rounds ? "ElasticJob: with a reduce_dtype of 16 or 8 bits the sums depend on the number of ranks; leave it "
                     "out"
            : detail::is_weighted(options.averaging)
                ? std::string("ElasticJob: weights of ranks depend on their number; use Averaging::mean or sum")
                : bootstrap::text(
                      "ElasticJob: the sums depend on the number of ranks; set ReducerOptions::micro_batches "
                      "to a number that is at least ",
                      most_, ", not ", options.micro_batches, ", and accumulation to in_buckets"),
            {.operation = "restore", .rank = rank});
    }

    void deal(const Deal& deal, int rank) {
        micro_batches_.clear();
        for (std::size_t turn = 0; turn < deal.count(rank); ++turn) micro_batches_.push_back(deal.number(rank, turn));
    }
    [[gnu::cold]] static elastic::Plan plan_of(const List<elastic::LiveState::Entry>& all) {
        List<elastic::Row> rows;
        for (const auto& one : all) rows.push_back(one.row);
        return elastic::agree(rows);
    }

    /// Prepares the votes.
    [[gnu::cold]] void start(TcpBackend& comm) {
        votes_.emplace(comm.duplicate());
        if (comm.rank() != 0) return;
        membership_.begin();  // there may be results from now on: this rank's part of the first sum comes later
        if (auto records = membership_.another_reader()) watch_.emplace(*std::move(records), membership_.own_.process);
    }
    [[gnu::cold]] void stop() {
        watch_.reset();
        vote_.reset();
        votes_.reset();
    }

    int most_;
    Membership membership_;
    elastic::LiveState state_;
    List<std::size_t> micro_batches_;
    std::uint64_t step_ = 0;
    std::optional<TcpBackend> votes_;  ///< for the votes alone
    std::int32_t word_ = 0;            ///< of the vote under way: not 0 if the ranks must change
    std::uint64_t voted_ = 0;          ///< the step of that vote
    std::optional<Work> vote_;
    std::optional<elastic::Watch> watch_;  ///< rank 0's
    bool changes_ = false;                 ///< `goes_on()` has said so
    bool has_left_ = false;
};

}  // namespace gradsync::inline v0_2
