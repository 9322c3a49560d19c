// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../reducer.hpp"
#include "kept_parts.hpp"
#include "live_state.hpp"
#include "membership.hpp"
#include "watch.hpp"

/// @file
/// ElasticJob: a training whose ranks come and go.

namespace gradsync::inline v0_2 {

template <class B, class O, class Stage, class Buckets, class Overlap, class Exchange>
class ShardedOptimizer;
template <class B, class O, class Overlap, class Exchange>
class ShardedParameters;

namespace elastic {

/// Do the sums of this face not depend on the number of ranks, and are its steps whole?
template <class Face>
inline constexpr bool fits = false;
template <class Buckets, class Overlap>
inline constexpr bool fits<Reducer<TcpBackend, Buckets, Overlap, AllReduce>> = !detail::gathers_in_forward<Overlap>();
template <class O, class Stage, class Buckets, class Overlap>
inline constexpr bool fits<ShardedOptimizer<TcpBackend, O, Stage, Buckets, Overlap, ReduceScatter>> =
    !requires { Stage::steps_inside; };
template <class O, class Overlap>
inline constexpr bool fits<ShardedParameters<TcpBackend, O, Overlap, ReduceScatter>> = true;

template <class Face>
inline constexpr bool is_sharded = requires(Face& face) { face.publish(); };

}  // namespace elastic

/// What `ElasticJob::restore` has done.
struct Restored {
    /// The source of the state.
    enum class From : std::uint8_t {
        start,      ///< what rank 0 has at the start
        rank,       ///< a rank that had the newest state
        checkpoint  ///< what `load` has read: no process had a state
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
/// Make the model and the optimizer's state before `run`, not in the body: without a sharded object, the `restore` of
/// the body's second call throws Error(invalid_argument) if they were made anew.
///
/// The gradients of a micro-batch may depend on the step and on the number of the micro-batch. They must not depend on
/// the rank. Not thread-safe, except for `request_leave`.
class ElasticJob {
public:
    /// Reads the job from the environment; see `Job::from`. Throws what `Job::from` and the constructor throw.
    static ElasticJob from_environment() { return ElasticJob(Job::from_environment()); }
    /// Without a store rank 0 of several says on standard error that the first lost rank will end the job. Throws what
    /// Membership's constructor throws.
    explicit ElasticJob(const Job& job)
        : most_(job.max_ranks != 0 ? job.max_ranks : job.size),
          membership_(job, most_, detail::larger(job.min_ranks, 1), true) {
        if (job.store.empty() && job.size > 1)
            Membership::tell_missing(job.rank, "the first lost rank ends this ElasticJob",
                                     "gradsync_run --min-ranks N");
    }
    ElasticJob(ElasticJob&&) = delete;

    /// Calls `body(backend)` each time when the ranks have met, until it returns on all of them although `goes_on()`
    /// has not asked for that. Returns on all processes, also on those that were never needed, and on a rank that has
    /// left. `options.timeout` also limits how long ranks wait for one another before they go on with fewer; at the
    /// start they wait that long for all. Throws what `body` throws if it is this rank's own failure, and what
    /// `Membership::meet` throws. Collective.
    template <class Body>
    void run(Body&& body, const TcpOptions& options = {}) {
        if (membership_.has_taken_part() && is_over())
            detail::refuse("run",
                           "the job has ended; a process takes part in a job once, also with another ElasticJob");
        while (!is_over()) try {
                try {
                    TcpBackend comm = connect(options);
                    body(comm);
                    leave(comm);
                } catch (const Error& error) {
                    if (!goes_on(error)) throw;
                }
            } catch (...) {
                abandon();
                throw;
            }
    }

    // ------------------------------------------------------------------------------------ what the body of `run` calls

    /// Gives all ranks the newest state that they have, or at the start that of rank 0, and sets `step()`. `sync` is a
    /// Reducer, ShardedOptimizer or ShardedParameters, and needs no other broadcast. Collective.
    ///
    /// - `state`: the memory of all that a step changes, in the same order on every rank: weights, the optimizer's
    ///   state, random numbers. It outlives the calls of the body. A state that is whole is overwritten only when all
    ///   ranks have the newer one. With a sharded object: what a step changes beside the shards, equal on all ranks,
    ///   such as a number that counts the optimizer's steps. It may live in the object.
    /// - `load()`: called if no process has a state. Reads the newest checkpoint and returns its step, or returns 0.
    ///   Called on rank 0; with a sharded object on all ranks, as `load_shards` is collective.
    ///
    /// Throws Error(invalid_argument) if the sums of `sync` depend on the number of ranks, or if the state was changed
    /// outside of `update`; Error(parameter_mismatch) if the states of the ranks are not alike; and Error(storage) if
    /// the state is lost and there is no checkpoint.
    template <class Sync, class Load>
    Restored restore(Sync& sync, std::span<const BufferView> state, Load&& load) {
        static_assert(
            elastic::fits<Sync>,
            "gradsync: ElasticJob::restore takes a Reducer<TcpBackend, ...> with the exchange AllReduce and "
            "without OverlapForward, or a sharded object over TcpBackend with the exchange ReduceScatter and without "
            "StepInside; what others hold depends on the number of ranks");
        if constexpr (!elastic::fits<Sync>) {
            return {};
        } else {
            TcpBackend comm = sync.backend();
            const ReducerOptions& options = detail::OptionsOf::face(sync);
            std::optional<elastic::AnyShards> shards;
            if constexpr (elastic::is_sharded<Sync>) shards.emplace(sync);
            else
                for (const ParameterView& one : sync.parameters()) check_part(one, state, comm.rank());
            return restore(comm, options, state, load, shards);
        }
    }
    template <class Sync>
    Restored restore(Sync& sync, std::span<const BufferView> state = {}) {
        return restore(sync, state, [] { return std::uint64_t{0}; });
    }
    template <class Sync, class... Load>
    Restored restore(Sync& sync, std::initializer_list<BufferView> state, Load&&... load) {
        return restore(sync, std::span(state.begin(), state.size()), std::forward<Load>(load)...);
    }

    /// The same, where the types are not known. `shards`: of a sharded object; `load` is then collective. A Reducer has
    /// the exchange AllReduce, and not OverlapForward.
    template <class Load>
    Restored restore(TcpBackend& comm, const ReducerOptions& options, std::span<const BufferView> state, Load&& load,
                     const std::optional<elastic::AnyShards>& shards = {}) {
        check_options(options, comm.rank());
        deal(detail::deal_of(options, comm.size()), comm.rank());
        const bool speaks = comm.rank() == 0, begun = speaks && membership_.has_begun();
        if (membership_.was_left_behind()) state_.forget(), parts_.forget();
        const List<elastic::Entry> all =
            shards ? parts_.meet(comm, *shards, state, begun) : state_.meet(comm, state, begun);
        List<elastic::Row> rows;
        for (const elastic::Entry& one : all) rows.push_back(one.row);
        elastic::Plan plan = elastic::agree(rows);
        Restored restored{.from = Restored::From::rank, .again = plan.lost};
        std::uint64_t number = plan.base.number;
        if (number == 0) {  // rank 0 has what it begins with, or a checkpoint
            if (shards || speaks) number = static_cast<std::uint64_t>(load()) + 1;
            if (!shards) comm.broadcast(BufferView(&number, 1), 0).wait();
            if (all[0].begun != 0 && number == 1) membership_.refuse_loss();
            restored.from = number == 1 ? Restored::From::start : Restored::From::checkpoint;
            if (shards) parts_.begin(comm, *shards, number == 1);
            else plan = state_.begin(number, speaks);
        } else if (shards) {
            parts_.restore(comm, *shards, plan);
        }
        if (!shards) state_.heal(comm, plan, all);
        restored.step = step_ = number - 1;
        shards_ = shards;
        votes_.emplace(comm.duplicate());
        if (shards_) {
            keep_for(List<std::uint64_t>(all.size()), &plan);
            votes_->barrier().wait();  // all have kept it: what they had before is no longer needed
            parts_.go_on();
        }
        start();
        return restored;
    }

    /// The steps that are done.
    std::uint64_t step() const noexcept { return step_; }
    /// The numbers, from 0, of the micro-batches of each step that this rank computes.
    std::span<const std::size_t> micro_batches() const noexcept {
        return {micro_batches_.data(), micro_batches_.size()};
    }
    /// How often each rank calls `finish()` in a step. With sharded gradients once for each of its micro-batches, and
    /// once more, after `begin_step(false)`, if it has one fewer than others.
    std::size_t rounds() const noexcept { return rounds_; }

    /// Call it before each step. Returns false, on all ranks, if the ranks change now: then return from the body. Waits
    /// for no other rank unless they change, as what it returns was agreed during the step before. Throws what a wait
    /// of the backend throws; Error(invalid_argument) if `update` was not called since the last call; and
    /// Error(parameter_mismatch) if the states of the ranks differed one step ago. Collective.
    [[nodiscard]] bool goes_on() {
        if (!votes_) detail::refuse("goes_on", "call restore() first, each time when the body of run() is called");
        if (vote_ && voted_ == step_)
            detail::refuse("goes_on", "no step was counted since the last call; change the state in update()");
        if (!read_vote()) {
            vote(*votes_);
            return true;
        }
        if (shards_) keep_for_change();
        votes_->barrier().wait();  // all have done the step: who leaves now does not take the only whole state along
        return false;
    }

    /// Calls `change()`, which must change the state by one step, and counts the step. After an exception of `change`
    /// this process's state does not count any more: let it leave the body. Throws Error(invalid_argument) without a
    /// `goes_on()` before, and if the state is torn. Local, and `change` must call no collective. With a sharded object
    /// `change` calls its `step()`; then the call is collective, and throws what the backend throws.
    template <class F>
    void update(F&& change) {
        if (!vote_ || voted_ != step_) detail::refuse("update", "call restore() once and goes_on() before each step");
        if (shards_) {
            std::forward<F>(change)();
            parts_.know(++step_ + 1);
            if (step_ - kept_ >= keep_every_) keep();
            quiet_failures_ = 0;
            return;
        }
        if (state_.number() == 0)
            detail::refuse("update",
                           "an exception has torn this rank's state; let it leave the body, and the ranks meet again");
        state_.update(std::forward<F>(change));
        ++step_;
        quiet_failures_ = 0;
    }

    /// With a sharded object: `update` copies this rank's shards to another rank after every `steps` steps, 1 unless
    /// you say otherwise. If ranks are lost, at most these steps are done again. Call it on all ranks before `restore`.
    void keep_every(std::uint64_t steps) {
        if (steps == 0) detail::refuse("keep_every", "0 steps; at least 1 lies between two copies of the shards");
        keep_every_ = steps;
    }

    // ----------------------------------------------------------------------------- for a loop of your own, as in `run`

    /// Meets the other ranks; see `Membership::connect`. Collective.
    TcpBackend connect(const TcpOptions& options = {}) { return membership_.connect(options); }
    /// Ends what `connect` has begun: for a change if `goes_on()` has returned false, else the job. Collective.
    void leave(TcpBackend& comm) {
        const bool changes = votes_ && !vote_ && word_.change != 0;  // goes_on() has said so
        if (!changes && votes_) {
            (void)read_vote();
            vote(comm);  // the states after the last step; and a rank that has returned alone is found at once
            (void)read_vote();
        }
        stop();
        if (!changes) return membership_.end(comm);
        membership_.leave_as_agreed();
        if (has_left() && !membership_.leaves())
            bootstrap::raise(Errc::peer_left, {.operation = "goes_on", .rank = comm.rank()},
                             "a rank leaves, and without a store the others cannot meet again");
    }
    /// Returns whether to go on after `error`; see `Membership::goes_on`. Also false after ten failures in a row
    /// without a step, in which no rank was lost.
    bool goes_on(const Error& error) {
        // A rank that has trained with the others is right; a new one that differs ends, and they go on without it.
        const bool has_trained = state_.number() > 1 || parts_.number() > 1;
        const bool is_newcomers = error.errc() == Errc::parameter_mismatch && !votes_ && has_trained;
        if (vote_) votes_->fail(error.what());
        stop();
        constexpr int most_failures = 10;
        const bool again = membership_.goes_on(is_newcomers ? Error(Errc::peer_failed, error.what()) : error);
        if (again && membership_.leaves()) membership_.note_leaving();
        if (has_left()) return again || membership_.leaves();  // the launcher may have ended the job meanwhile
        if (!again) return false;
        quiet_failures_ = membership_.are_all_alive() ? quiet_failures_ + 1 : 0;
        return quiet_failures_ < most_failures;
    }
    /// Says that this process takes no part any more, because of an error of its own. It may begin again with
    /// `connect`.
    void abandon() {
        if (votes_) votes_->fail("another error has ended this rank's part");
        stop();
        membership_.abandon();
    }
    /// Has the job ended well, or has this rank left it?
    bool is_over() const noexcept { return has_left() || membership_.is_over(); }
    /// Has this rank left a job that goes on?
    bool has_left() const noexcept { return membership_.has_left(); }

    /// False if the others have gone on without this rank, as after it was stopped for long. Ask it on the rank that
    /// writes a file for all, just before the file is moved to its place: else an old checkpoint could replace a newer
    /// one. Throws Error(storage).
    bool is_current() { return membership_.is_current(); }
    /// Returns the number of the last meeting, from 1.
    std::uint32_t generation() const noexcept { return membership_.generation(); }
    /// Lets this rank leave the job after the step under way: `run` then returns. Call it from any thread, or from a
    /// signal handler.
    void request_leave() noexcept { membership_.request_leave(); }

private:
    using Work = decltype(std::declval<TcpBackend&>().all_reduce(BufferView(), ReduceOp::max));

    [[gnu::cold]] void check_options(const ReducerOptions& options, int rank) const {
        const bool rounds = options.reduce_dtype && is_low_precision(*options.reduce_dtype);
        if (options.micro_batches >= static_cast<std::size_t>(most_) && !rounds &&
            !detail::is_weighted(options.averaging))
            return;
        bootstrap::raise(
            Errc::invalid_argument, {.operation = "restore", .rank = rank},
            rounds ? "ElasticJob: with a reduce_dtype of 16 or 8 bits the sums depend on the number of ranks; leave it "
                     "out"
            : detail::is_weighted(options.averaging)
                ? std::string("ElasticJob: weights of ranks depend on their number; use Averaging::mean or sum")
                : bootstrap::text(
                      "ElasticJob: the sums depend on the number of ranks; set ReducerOptions::micro_batches "
                      "to a number that is at least ",
                      most_, ", not ", options.micro_batches,
                      ", the same in every run (with whole gradients also accumulation to in_buckets)"));
    }

    [[gnu::cold]] static void check_part(const ParameterView& one, std::span<const BufferView> state, int rank) {
        const auto* const first = static_cast<const std::byte*>(one.value.data);
        bool is_part = first == nullptr;
        for (const BufferView& view : state) {
            const auto* const begin = static_cast<const std::byte*>(view.data);
            is_part = is_part || (first >= begin && first + one.value.bytes() <= begin + view.bytes());
        }
        if (!is_part)
            bootstrap::raise(Errc::invalid_argument, {.operation = "restore", .rank = rank}, "restore: parameter '",
                             one.name, "' is no part of the state; pass all that a step changes");
    }

    void deal(const Deal& deal, int rank) {
        rounds_ = deal.sharded_gradients ? deal.rounds() : 1;
        micro_batches_.clear();
        for (std::size_t turn = 0; turn < deal.count(rank); ++turn) micro_batches_.push_back(deal.number(rank, turn));
    }
    /// The ranks take the largest value of each field, in each step. `same` is a hash of the state, and `other` its
    /// complement: if all ranks have the same state, the largest values are complements, too.
    struct Vote {
        std::uint64_t change = 0, same = 0, other = 0;
    };
    void vote(TcpBackend& comm) {
        voted_ = step_;
        if (membership_.leaves()) membership_.note_leaving();
        const std::uint64_t same = shards_ ? step_ : state_.fingerprint();  // other ranks have other shards
        word_ = {.change = membership_.leaves() || (watch_ && watch_->wants_change()), .same = same, .other = ~same};
        vote_.emplace(comm.all_reduce(BufferView(&word_.change, 3), ReduceOp::max));
    }
    /// Returns what the vote under way says of a change; false if there is none.
    bool read_vote() {
        if (!vote_) return false;
        std::exchange(vote_, {})->wait();
        if (word_.same != ~word_.other) refuse_difference();
        return word_.change != 0;
    }
    [[noreturn, gnu::cold]] void refuse_difference() const {
        bootstrap::raise(Errc::parameter_mismatch, {.operation = "goes_on", .rank = votes_->rank()},
                         "goes_on: the states of the ranks differ after step ", voted_,
                         "; pass all that a step changes to restore(), and let a step depend on its number and on "
                         "those of its micro-batches only");
    }

    /// Keeps the shards, if another process could ever need them.
    void keep() {
        if (mates_) parts_.keep(*mates_, mate_ranks_, votes_->size(), *shards_, step_ + 1);
        kept_ = step_;
    }
    /// The same with other mates: see `elastic::mates_of`.
    [[gnu::cold]] void keep_for(const List<std::uint64_t>& goes, const elastic::Plan* plan) {
        kept_ = step_;
        if (!membership_.has_store()) return;
        mate_ranks_ = elastic::mates_of(static_cast<std::uint32_t>(votes_->rank()), membership_.hosts(), goes);
        mates_.emplace(votes_->split(static_cast<int>(mate_ranks_[0]), votes_->rank()));
        parts_.keep(*mates_, mate_ranks_, votes_->size(), *shards_, step_ + 1, plan);
    }
    /// The ranks change as agreed: what is done now is kept, and those that leave have their parts with one that stays.
    [[gnu::cold]] void keep_for_change() {
        const std::uint64_t own[] = {membership_.has_noted_leaving()};
        List<std::uint64_t> goes = detail::gather_values(*votes_, own);
        membership_.limit_leaving(goes);
        std::uint64_t any = 0;
        for (const std::uint64_t one : goes) any |= one;
        if (any != 0 || kept_ != step_) keep_for(goes, nullptr);
    }

    /// All ranks have the state.
    [[gnu::cold]] void start() {
        word_ = {};
        membership_.settle();
        if (votes_->rank() != 0) return;
        membership_.begin();  // there may be results from now on: this rank's part of the first sum comes later
        if (auto records = membership_.another_reader()) watch_.emplace(*std::move(records), membership_.own_.process);
    }
    [[gnu::cold]] void stop() {
        watch_.reset();
        vote_.reset();
        mates_.reset();
        votes_.reset();
        shards_.reset();
    }

    int most_;
    Membership membership_;
    elastic::LiveState state_;  ///< without a sharded object
    elastic::KeptParts parts_;  ///< with one
    std::optional<elastic::AnyShards> shards_;
    List<std::uint32_t> mate_ranks_;
    std::uint64_t keep_every_ = 1, kept_ = 0;  ///< `kept_`: the last step that was kept
    List<std::size_t> micro_batches_;
    std::size_t rounds_ = 0;
    std::uint64_t step_ = 0;
    std::optional<TcpBackend> votes_;  ///< for the votes, and what follows from them
    std::optional<TcpBackend> mates_;  ///< those that keep their shards together
    Vote word_;                        ///< of the vote under way
    std::uint64_t voted_ = 0;          ///< the step of that vote
    std::optional<Work> vote_;
    std::optional<elastic::Watch> watch_;  ///< rank 0's
    int quiet_failures_ = 0;               ///< in a row, without a step, in which no rank was lost
};

}  // namespace gradsync::inline v0_2
