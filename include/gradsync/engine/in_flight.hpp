// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../collective/deadline.hpp"
#include "deferred_gather.hpp"
#include "launch_groups.hpp"
#include "weights.hpp"

namespace gradsync::inline v0_2::detail {

/// Whether this rank has a batch in a step, and the weight that the trainer has set for it.
struct OwnContribution {
    std::optional<double> weight = {};
    bool has_batch = true;
    bool some_have_none = false;  ///< other ranks may have no batch
};

/// Throws Error(invalid_argument) if the micro-batches of this rank are counted, and this is not the last one.
template <Backend B>
void check_last_micro_batch(const char* operation, const B& backend, GradientHome<B>& home,
                            const OwnContribution& own) {
    const std::size_t due = own.has_batch && !home.pooled() ? home.sums().due() : 0;
    if (due != 0 && home.sums().over() + 1 != due)
        refuse_on({operation, named_rank(backend)}, "this is micro-batch ", home.sums().over() + 1,
                  " of the step, and not the last of ", due,
                  "; put all but the last under no_sync(), or give ReducerOptions::micro_batches their number on all "
                  "ranks");
}

/// The buckets of a step in flight. Starts their collectives in the plan's order as they fill, advances them, waits for
/// them, and measures the time that this adds to the step. `Readiness` tells which buckets are full.
template <Backend B>
class InFlight {
public:
    using Time = Observer::Time;

    /// The arguments passed by reference outlive this; `backend` is copied. `exchange` holds the collectives in flight.
    [[gnu::cold]] InFlight(const B& backend, const ReducerOptions& options, GradientHome<B>& home, Readiness& readiness,
                           std::unique_ptr<AnyExchange<B>> exchange)
        : backend_(backend), options_(options), home_(home), readiness_(readiness), exchange_(std::move(exchange)) {}
    InFlight& operator=(InFlight&&) = delete;

    /// This as the overlap policy sees it: `hook()` in the policy's hooks, where work counts as exposed; `background()`
    /// in a thread of its own, where it does not.
    BucketLauncher& hook() noexcept { return hook_; }
    BucketLauncher& background() noexcept { return background_; }

    /// Adapts to a new plan, whose buckets are allocated. Call between steps.
    [[gnu::cold]] void adopt_plan() {
        const BucketPlan& plan = planned_.plan();
        times_.resize(plan.size());
        groups_.adopt(backend_, home_);
        running_->adopt_plan(backend_, home_.storage().layout(), plan, planned_.infos(), planned_.parameters());
        if (watch_.observer() == nullptr) return;
        List<std::size_t> bytes;
        for (std::size_t b = 0; b < plan.size(); ++b) bytes.push_back(home_.storage().buckets()[b].bytes());
        List<std::string_view> names;
        for (const ParameterView& p : planned_.parameters()) names.push_back(p.name);
        watch_.observer()->plan(plan, bytes, names);
    }

    /// Returns this rank's batch flag and weight for the current step.
    OwnContribution& contribution() noexcept { return contribution_; }
    /// The tag of bucket b's collectives.
    CollectiveTag tag(std::size_t b) const noexcept { return {CollectiveTag::Kind::bucket, number_, b}; }
    /// Is this rank the only one?
    bool is_single_rank() const noexcept { return single_rank_; }
    AnyExchange<B>& exchange() noexcept { return *exchange_.get(); }

    // -------------------------------------------------------------------------------------------------- for any thread

    Watch& watch() noexcept { return watch_; }
    /// The number of buckets that were started; they are the first ones of the plan.
    std::size_t launched() const noexcept { return started_.load(std::memory_order_acquire); }
    bool in_flight() const noexcept { return completed() < launched(); }

    /// Starts the full buckets that are next in the plan's order. `in_hook`: the time of the call counts as exposed.
    /// `ends`: the backward is over; before that, some may be left for a later call (see `most_ahead`).
    void launch_full_buckets(bool in_hook, bool ends = false) {
        std::lock_guard lock(launching_);
        const bool waits = !ends && exchange_->traits.scatters &&
                           (contribution_.some_have_none || options_.unused == UnusedParameters::find_unused);
        const auto next = [&](std::size_t b) {
            return b < times_.size() && groups_.full(b, readiness_) &&
                   (!waits || groups_.continues(b) || b - completed() < most_ahead);
        };
        std::size_t b = launched();
        if (!next(b)) return;
        const bool travels = !is_single_rank();
        const Time first = watch_.now();
        Time last = first;
        typename LaunchGroups<B>::OpenGroup group(groups_, backend_);
        for (; next(b); ++b) {
            times_[b].launch = last;
            if (travels) {
                auto launch = watch_.tell(Activity::launch, b, last);
                group.before(b);
                naming_bucket(b, [&] { start(b); });
                group.after(b);
                last = watch_.now();
                launch.end(last);
                watch_.depart(Activity::collective, b, times_[b].launch);
            } else {
                naming_bucket(b, [&] { start(b); });
            }
            started_.store(b + 1, std::memory_order_release);
        }
        // Here, not in `finish()`: ranks may finish two Reducers of different communicators in different orders.
        if (b == times_.size() && weights_.is_due())
            weights_.start(host_of(backend_), passes_of(backend_), planned_.parameters());
        if (in_hook) watch_.add(first, last);
    }
    WeightComparison<HostOf<B>>& weights() noexcept { return weights_; }

    /// Starts the gathers of all buckets, once all collectives of the step are complete. The last bucket goes first,
    /// because the next forward starts with the parameters whose gradients came last. The launch groups are those of
    /// the buckets. All gathers start before any is waited for, so its own group at most delays a gather.
    void start_gathers(DeferredGather<B>& gathers) {
        typename LaunchGroups<B>::OpenGroup group(groups_, backend_, LaunchOrder::reverse);
        for (std::size_t b = times_.size(); b-- > 0;) {
            group.before(b);
            gathers.start(b, home_.storage().buckets()[b], tag(b));
            group.after(b);
        }
    }

    /// Before a wait for others outside of `finish`: launches the pooled buckets that are full, whatever the overlap
    /// policy, because ranks with less memory may wait for them; without a batch, those that get memory. Ranks of other
    /// groups may wait for further stages of those in flight, so it starts them. Never blocks. False once there is
    /// nothing to do.
    bool launch_before_wait() {
        if (!home_.pooled()) return false;
        const bool fills = !contribution_.has_batch && launched() != times_.size();
        if (fills || running_->in_stages) poll(true);
        for (std::size_t b = launched(); fills && b < times_.size() && b - completed() < most_ahead && home_.obtain(b);
             ++b)
            readiness_.fill_all(b, planned_.plan().bucket(b));
        if (launched() != times_.size()) launch_full_buckets(true);
        return fills || (running_->in_stages && in_flight());
    }

    /// Waits for the oldest collective in flight; false if there is none.
    bool complete_one() {
        const auto lock = exclusive();
        if (!in_flight()) return false;
        const auto held = watch_.hold(Activity::wait);
        complete(completed());
        return true;
    }

    // ------------------------------------------------------------------------------------ for the thread that finishes

    /// A lock that keeps other threads from advancing collectives. Hold it for the calls below, except `try_test`.
    [[nodiscard]] std::unique_lock<std::mutex> exclusive() { return std::unique_lock(polling_); }

    /// Non-blocking variant of a wait, as `Work::test()` is: repeated tests time out.
    void test() {
        advance();
        if (const std::size_t b = completed(); b < launched()) naming_bucket(b, [&] { return running_->test(b); });
    }
    /// The same while marks are missing, but a no-op if another thread is advancing collectives. Calls `on_limit()` if
    /// no bucket was launched for twice the time limit: by then ranks that wait for these marks have thrown.
    void try_test(auto&& on_limit) {
        if (const std::unique_lock lock(polling_, std::try_to_lock); lock) test();
        if (std::exchange(launched_before_, launched()) != launched()) unmarked_ = {};
        unmarked_.look(2 * backend_.timeout(), [&](std::chrono::nanoseconds) { on_limit(); });
    }
    /// Returns when bucket b is complete. Call it for all earlier buckets first.
    void complete(std::size_t b) {
        if (b != completed()) return;
        naming_bucket(b, [&] { running_->wait(backend_, b); });
        land(b);
    }
    /// Ends the step and returns its statistics. Fills in `buckets`, by bucket.
    StepStatistics take_statistics(ListView<BucketStatistics> buckets) {
        StepStatistics step;
        step.exposed_seconds = watch_.take_exposed_seconds();
        if (!is_single_rank()) {
            const auto since_first = [&](Time at) {
                return std::chrono::duration<double>(at - times_[0].launch).count();
            };
            for (std::size_t b = 0; b < times_.size(); ++b) {
                const BufferView bucket = home_.storage().buckets()[b];
                buckets[b] = {bucket.bytes(), since_first(times_[b].launch), since_first(times_[b].end)};
                const Traffic traffic = running_->traffic(backend_, b, bucket);
                step.bytes += traffic.bytes;
                step.collectives += traffic.collectives;
            }
            if (options_.unused == UnusedParameters::find_unused || options_.non_finite == NonFinite::skip)
                ++step.collectives;
            step.communication_seconds = watch_.take_covered_seconds();
        }
        started_.store(0, std::memory_order_relaxed);
        completed_.store(0, std::memory_order_relaxed);
        contribution_ = {};
        unmarked_ = {};
        return step;
    }

private:
    class View final : public BucketLauncher {
    public:
        View(InFlight& of, bool in_hook) noexcept : of_(of), in_hook_(in_hook) {}
        /// With check_writes, buckets are launched in `finish()`, because a reduction in place also writes.
        void launch_full_buckets() override {
            if (!of_.options_.check_writes) of_.launch_full_buckets(in_hook_);
        }
        bool in_flight() const noexcept override { return of_.in_flight(); }
        void poll() override { of_.poll(in_hook_); }
        bool wants_thread() const noexcept override { return wants_progress_thread(of_.backend_); }

    private:
        InFlight& of_;
        bool in_hook_;
    };

    /// The most buckets in flight, if ranks may join the first as late as in `finish()`. With more a start would block
    /// (over NCCL: with 128; a group has 32), and they need this rank's gathers to get there.
    static constexpr std::size_t most_ahead = 96;

    /// The number of buckets known to be complete; they are the first ones of the plan.
    std::size_t completed() const noexcept { return completed_.load(std::memory_order_acquire); }

    struct Times {
        Time launch, end;
    };

    /// Advances the collectives in flight, unless another thread is doing so. Never blocks.
    void poll(bool in_hook) {
        if (!polling_.try_lock()) return;
        std::lock_guard polling(polling_, std::adopt_lock);
        const auto before = progress_time();
        advance();
        if (!in_hook || abilities_of<B>.clock) return;  // in a simulation, work takes no time
        const auto worked = std::chrono::duration_cast<Time::duration>(progress_time() - before);
        if (worked == Time::duration::zero()) return;  // saves reading the clock
        const Time now = watch_.now();
        watch_.hold_since(now - worked, Activity::progress).end(now);
    }
    /// Advances the collectives in flight, in order. Never blocks.
    void advance() {
        for (std::size_t b = completed(); b < launched() && naming_bucket(b, [&] { return running_->poll(b); }); ++b)
            land(b);
    }
    /// Records that the collective of bucket b, the next one, is complete.
    void land(std::size_t b) {
        times_[b].end = is_single_rank() ? watch_.now() : watch_.arrive(Activity::collective, b);
        home_.land(b);
        completed_.store(b + 1, std::memory_order_release);
    }
    std::chrono::nanoseconds progress_time() const { return backend_.progress_time() + running_->progress_time(); }

    /// A single rank exchanges nothing: it starts a bucket only to scale it.
    void start(std::size_t b) {
        check_last_micro_batch("mark_ready", backend_, home_, contribution_);  // before other ranks can end the step
        set_tag(backend_, tag(b));
        const BufferView bucket = home_.marked_bucket(b);
        if (!is_floating(bucket.dtype)) {
            if (!contribution_.has_batch) passes_of(backend_).clear(bucket);
            if (!is_single_rank()) running_->start(backend_, b, bucket, ReduceOp::sum, {});
            return;
        }
        if (contribution_.has_batch && !contribution_.weight && is_weighted(options_.averaging))
            raise(Errc::invalid_argument, {.operation = "set_weight", .rank = named_rank(backend_)}, "rank ",
                  named_rank(backend_),
                  " gave no weight for this step; call set_weight() in each step, before the first mark_ready()");
        const double divisor =
            larger(home_.rounds().dealt().several() ? 1.0 : 0.0, sum_divisor(options_, bucket.dtype, backend_.size()));
        const auto count =
            static_cast<double>(options_.micro_batches == 0 ? 1 : home_.rounds().deal().count(backend_.rank()));
        const Contribution own = contribution_of(options_, backend_.rank(), contribution_.weight.value_or(1),
                                                 contribution_.has_batch, count, divisor);
        if (is_single_rank() && own.scale == own.weight && own.scale != 0) return;  // x w / w
        running_->start(backend_, b, bucket, ReduceOp::mean, own);
    }

    B backend_;                                        ///< its tag names the bucket being started
    const std::size_t number_ = next_owner(backend_);  ///< number of the Reducer among those of its communicator
    const ReducerOptions& options_;
    GradientHome<B>& home_;
    const PlannedParameters<B>& planned_ = home_.planned();
    Readiness& readiness_;
    std::unique_ptr<AnyExchange<B>> exchange_;
    /// Reduces the buckets.
    AnyExchange<B>* const running_ = home_.rounds().dealt().several() ? &home_.rounds() : exchange_.get();
    const bool single_rank_ = exchange_->is_single_rank(backend_);  ///< cached, because every mark asks
    LaunchGroups<B> groups_;
    Watch watch_{BackendClock(backend_), options_.observer};
    List<Times> times_;  ///< by bucket
    std::atomic<std::size_t> started_{0}, completed_{0};
    WeightComparison<HostOf<B>> weights_{is_single_rank() ? gradsync::never : options_.compare_weights_every};
    OwnContribution contribution_;
    collective::Deadline unmarked_;    ///< of tests while marks are missing
    std::size_t launched_before_ = 0;  ///< buckets, at the last of these tests
    // No spin locks: a thread that holds one may wait for a collective, or compress for milliseconds at a launch.
    std::mutex polling_, launching_;
    View hook_{*this, true}, background_{*this, false};
};

}  // namespace gradsync::inline v0_2::detail
