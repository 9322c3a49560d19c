// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../collective/deadline.hpp"
#include "deferred_gather.hpp"
#include "gradient_buckets.hpp"
#include "readiness.hpp"
#include "weights.hpp"

namespace gradsync::inline v0_2::detail {

/// Reduces the sums of a bucket, each in memory of its own. Ranks outside a sum contribute nothing to it and send
/// nothing. Rarely used, so it is compiled for size.
template <Backend B>
class DealtExchange {
public:
    void resize(const GradientBuckets<B>& gradients) {
        each_ = gradients.dealt().needs().at_a_time;
        works_ = List<typename B::WorkType>(gradients.plan().size() * each_);
    }
    [[gnu::cold]] Traffic traffic(const GradientBuckets<B>& gradients, std::size_t b) const {
        Traffic all{0, gradients.dealt().now().size()};
        for (const DealtSum& sum : gradients.dealt().now())
            all.bytes += gradients.has_part(sum) ? gradients.bucket(b).bytes() : 0;
        return all;
    }
    [[gnu::cold]] void start(B& backend, const GradientBuckets<B>& gradients, std::size_t b, Contribution own) {
        std::size_t k = 0;
        for (const DealtSum& sum : gradients.dealt().now()) {
            const Contribution part{gradients.has_part(sum) ? own.scale : 0, own.weight};
            const BufferView memory = gradients.sum(b, k);
            works_[b * each_ + k] = gradients.halves()
                                        ? backend.reduce_scatter(memory, gradients.result(b, k), ReduceOp::mean, part)
                                        : backend.all_reduce(memory, ReduceOp::mean, part);
            ++k;
        }
    }
    /// See AnyExchange. If a round uses fewer works than exist, the others are complete from an earlier round, or
    /// empty.
    [[gnu::cold]] bool poll(std::size_t b) {
        for (std::size_t k = 0; k < each_; ++k)
            if (!poll_work(works_[b * each_ + k])) return false;
        return true;
    }
    [[gnu::cold]] bool test(std::size_t b) {
        for (std::size_t k = 0; k < each_; ++k)
            if (!works_[b * each_ + k].test()) return false;
        return true;
    }
    [[gnu::cold]] void wait(B& backend, std::size_t b) {
        for (std::size_t k = 0; k < each_; ++k) await(backend, works_[b * each_ + k]);
    }

private:
    std::size_t each_ = 0;
    List<typename B::WorkType> works_;  ///< by bucket, and sum of a round
};

/// The order in which the collectives of buckets start.
enum class LaunchOrder : bool { of_plan, reverse };

/// Decides which buckets are launched together. With most backends each bucket is launched alone; a backend with groups
/// takes small consecutive buckets at once. The groups depend on the plan only, not on the order of readiness, because
/// all ranks must form the same ones: a bucket waits for the others of its group.
template <Backend B>
class LaunchGroups {
public:
    /// Forms the groups of a plan. Pooled buckets are not grouped: they free memory as they leave, so none may wait for
    /// another.
    void adopt([[maybe_unused]] const B& backend, [[maybe_unused]] const GradientBuckets<B>& buckets) {
        if constexpr (grouped) {
            ends_.clear();
            std::size_t first = 0, bytes = 0;
            for (std::size_t b = 0; b < buckets.plan().size(); ++b) {
                const std::size_t own = buckets.bucket(b).bytes();
                if (buckets.pooled() || b - first == max_buckets || bytes + own > backend.group_bytes()) {
                    while (ends_.size() < b) ends_.push_back(b);
                    first = b;
                    bytes = 0;
                }
                bytes += own;
            }
            while (ends_.size() < buckets.plan().size()) ends_.push_back(buckets.plan().size());
        }
    }

    /// Is the group of buckets that starts with b full?
    bool full(std::size_t b, const Readiness& readiness) const noexcept {
        if constexpr (!grouped) return readiness.full(b);
        std::size_t end = ends_[b];
        while (end > b && readiness.full(end - 1)) --end;  // the last one probably fills last
        return end == b;
    }

    /// Does bucket b belong to the group of the one before it?
    bool continues(std::size_t b) const noexcept { return grouped && b != 0 && ends_[b - 1] != b; }

    /// Launches buckets, one after another.
    class Launch {
    public:
        Launch(const LaunchGroups& groups, B& backend, LaunchOrder order = LaunchOrder::of_plan) noexcept
            : ends_(groups.ends_), backend_(backend), order_(order) {}
        /// Calls `start()`, which starts bucket b, the next one.
        template <class Start>
        void operator()(std::size_t b, Start&& start) {
            if constexpr (grouped)
                if (!open_ && !is_last(b)) {
                    group_ = backend_.group();
                    open_ = true;
                }
            start();
            if constexpr (grouped)
                if (open_ && is_last(b)) {
                    group_ = {};
                    open_ = false;
                }
        }

    private:
        /// Is b the last bucket of its group in launch order?
        bool is_last(std::size_t b) const noexcept {
            return order_ == LaunchOrder::of_plan ? ends_[b] == b + 1 : b == 0 || ends_[b - 1] == b;
        }
        static auto no_group(B& backend) {
            if constexpr (grouped) return decltype(backend.group())();
            else return false;
        }

        const List<std::size_t>& ends_;
        B& backend_;
        const LaunchOrder order_;
        decltype(no_group(std::declval<B&>())) group_{};
        bool open_ = false;
    };

private:
    static constexpr bool grouped = abilities_of<B>.groups;
    /// The largest group. A larger one saves nothing, delays other buckets, and backends have room for a limited number
    /// of calls.
    static constexpr std::size_t max_buckets = 32;

    List<std::size_t> ends_;  ///< by bucket: one past the last of its group; only if buckets are grouped
};

/// The buckets of a step in flight. Starts their collectives in the plan's order as they fill, advances them, waits for
/// them, and measures the time that this adds to the step. `Readiness` tells which buckets are full.
template <Backend B>
class Step {
public:
    using Time = Observer::Time;

    /// The arguments passed by reference outlive this; `backend` is copied. `exchange` holds the collectives in flight.
    [[gnu::cold]] Step(const B& backend, const ReducerOptions& options, GradientBuckets<B>& gradients,
                       const Readiness& readiness, Owner<AnyExchange<B>> exchange)
        : backend_(backend),
          options_(options),
          gradients_(gradients),
          readiness_(readiness),
          exchange_(std::move(exchange)) {}
    Step& operator=(Step&&) = delete;

    /// Adapts to a new plan, whose buckets are allocated. Call between steps.
    [[gnu::cold]] void adopt_plan() {
        const BucketPlan& plan = gradients_.plan();
        times_.resize(plan.size());
        groups_.adopt(backend_, gradients_);
        exchange_->adopt_plan(backend_, gradients_.layout(), plan, gradients_.infos(), gradients_.parameters());
        if (several_) dealt_.resize(gradients_);
        if (watch_.observer() == nullptr) return;
        List<std::size_t> bytes;
        for (std::size_t b = 0; b < plan.size(); ++b) bytes.push_back(gradients_.bucket(b).bytes());
        List<std::string_view> names;
        for (const ParameterView& p : gradients_.parameters()) names.push_back(p.name);
        watch_.observer()->plan(plan, bytes, names);
    }

    // ----------------------------------------------------------------------------------------------------- this rank's
    // contribution

    void set_weight(double weight) noexcept { weight_ = weight; }
    void forget_weight() noexcept { weight_.reset(); }
    /// `some_have_none`: other ranks may have no batch.
    void set_has_batch(bool has_batch, bool some_have_none) noexcept {
        has_batch_ = has_batch, some_have_none_ = some_have_none;
    }
    bool has_batch() const noexcept { return has_batch_; }
    /// The tag of bucket b's collectives.
    CollectiveTag tag(std::size_t b) const noexcept { return {CollectiveTag::Kind::bucket, number_, b}; }
    /// Is this rank the only one?
    bool is_single_rank() const noexcept { return single_rank_; }
    AnyExchange<B>& exchange() noexcept { return *exchange_.get(); }

    // -------------------------------------------------------------------------------------------------- for any thread

    Watch& watch() noexcept { return watch_; }
    /// The number of buckets that were started, and of those known to be complete. Both count from the start of the
    /// plan.
    std::size_t launched() const noexcept { return started_.load(std::memory_order_acquire); }
    std::size_t completed() const noexcept { return completed_.load(std::memory_order_acquire); }
    bool in_flight() const noexcept { return completed() < launched(); }

    /// Starts the full buckets that are next in the plan's order. `in_hook`: the time of the call counts as exposed.
    /// `ends`: the backward is over; before that, some may be left for a later call (see `most_ahead`).
    void launch_full_buckets(bool in_hook, bool ends = false) {
        std::lock_guard lock(launching_);
        const bool waits =
            !ends && gradients_.halves() && (some_have_none_ || options_.unused == UnusedParameters::find_unused);
        const auto next = [&](std::size_t b) {
            return b < times_.size() && groups_.full(b, readiness_) &&
                   (!waits || groups_.continues(b) || b - completed() < most_ahead);
        };
        std::size_t b = launched();
        if (!next(b)) return;
        const bool travels = !is_single_rank();
        const Time first = watch_.now();
        Time last = first;
        typename LaunchGroups<B>::Launch group(groups_, backend_);
        for (; next(b); ++b) {
            times_[b].launch = last;
            if (travels) {
                auto launch = watch_.tell(Activity::launch, b, last);
                group(b, [&] {
                    set_tag(backend_, tag(b));
                    naming_bucket(b, [&] { start(b); });
                });
                last = watch_.now();
                launch.end(last);
                watch_.depart(Activity::collective, b, times_[b].launch);
            } else {
                start(b);
            }
            started_.store(b + 1, std::memory_order_release);
        }
        // Here, not in `finish()`: ranks may finish two Reducers of different communicators in different orders.
        if (b == times_.size() && compares_weights())
            weights_.start(host_of(backend_), passes_of(backend_), gradients_.parameters());
        if (in_hook) watch_.add(first, last);
    }
    WeightComparison<HostOf<B>>& weights() noexcept { return weights_; }
    /// Do the ranks compare their weights in this step?
    bool compares_weights() const noexcept {
        const std::size_t every = options_.compare_weights_every;
        return !is_single_rank() && every != gradsync::never && (steps_ == 0 || (every != 0 && steps_ % every == 0));
    }
    /// If this step compares weights: those that parameters have no address of are `value_of(i)`. See
    /// WeightComparison::give.
    template <class ValueOf>
    void give_weights(ValueOf&& value_of) {
        if (compares_weights()) weights_.give(passes_of(backend_), gradients_.parameters().size(), value_of);
    }

    /// Starts the gathers of all buckets, once all collectives of the step are complete. The last bucket goes first,
    /// because the next forward starts with the parameters whose gradients came last. The launch groups are those of
    /// the buckets. All gathers start before any is waited for, so its own group at most delays a gather.
    void start_gathers(DeferredGather<B>& gathers) {
        typename LaunchGroups<B>::Launch group(groups_, backend_, LaunchOrder::reverse);
        for (std::size_t b = times_.size(); b-- > 0;) group(b, [&] { gathers.start(b, gradients_.bucket(b), tag(b)); });
    }

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
        watch_.add(now - worked, now);
        watch_.begin(Activity::progress, Observer::no_index, now - worked);
        watch_.end(Activity::progress, Observer::no_index, now);
    }

    /// Before a wait for others outside of `finish`: launches the pooled buckets that are full, whatever the overlap
    /// policy, because ranks with less memory may wait for them; without a batch, those that get memory. Never blocks.
    /// False once there is nothing to do.
    bool launch_before_wait(Readiness& readiness) {
        if (!gradients_.pooled() || launched() == times_.size()) return false;
        if (has_batch_) return launch_full_buckets(true), false;
        poll(true);
        for (std::size_t b = launched(); b < times_.size() && b - completed() < most_ahead && gradients_.obtain(b); ++b)
            readiness.fill_all(b, gradients_.plan().bucket(b));
        launch_full_buckets(true);
        return true;
    }

    /// Waits for the oldest collective in flight; false if there is none.
    bool complete_one() {
        const auto lock = exclusive();
        if (!in_flight()) return false;
        const auto held = watch_.hold(Activity::wait);
        complete(completed());
        return true;
    }

    // --------------------------------------------------------------------------------------------- for the thread that
    // finishes

    /// A lock that keeps other threads from advancing collectives. Hold it for the calls below, except `try_test`.
    [[nodiscard]] std::unique_lock<std::mutex> exclusive() { return std::unique_lock(polling_); }

    void advance() {
        for (std::size_t b = completed();
             b < launched() && naming_bucket(b, [&] { return several_ ? dealt_.poll(b) : exchange_->poll(b); }); ++b)
            land(b);
    }
    /// Non-blocking variant of a wait, as `Work::test()` is: repeated tests time out.
    void test() {
        advance();
        if (const std::size_t b = completed(); b < launched())
            naming_bucket(b, [&] { return several_ ? dealt_.test(b) : exchange_->test(b); });
    }
    /// The same while marks are missing, but a no-op if another thread is advancing collectives. Calls `on_limit()` if
    /// no bucket was launched for twice the time limit: by then ranks that wait for these marks have thrown.
    template <class OnLimit>
    void try_test(OnLimit&& on_limit) {
        if (const std::unique_lock lock(polling_, std::try_to_lock); lock) test();
        if (std::exchange(launched_before_, launched()) != launched()) unmarked_ = {};
        unmarked_.look(
            2 * backend_.timeout(), [&](std::chrono::nanoseconds) { on_limit(); }, [] {});
    }
    /// Returns when bucket b is complete. Call it for all earlier buckets first.
    void complete(std::size_t b) {
        if (b != completed()) return;
        naming_bucket(b, [&] { several_ ? dealt_.wait(backend_, b) : exchange_->wait(backend_, b); });
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
                const BufferView bucket = gradients_.bucket(b);
                buckets[b] = {bucket.bytes(), since_first(times_[b].launch), since_first(times_[b].end)};
                const Traffic traffic =
                    several_ ? dealt_.traffic(gradients_, b) : exchange_->traffic(backend_, b, bucket);
                step.bytes += traffic.bytes;
                step.collectives += traffic.collectives;
            }
            if (options_.unused == UnusedParameters::find_unused || options_.non_finite == NonFinite::skip)
                ++step.collectives;
            step.communication_seconds = watch_.take_covered_seconds();
        }
        started_.store(0, std::memory_order_relaxed);
        completed_.store(0, std::memory_order_relaxed);
        weight_.reset();
        unmarked_ = {};
        ++steps_;
        return step;
    }

private:
    /// The most buckets in flight, if ranks may join the first as late as in `finish()`. With more a start would block
    /// (over NCCL: with 128; a group has 32), and they need this rank's gathers to get there.
    static constexpr std::size_t most_ahead = 96;

    struct Times {
        Time launch, end;
    };

    /// Records that the collective of bucket b, the next one, is complete.
    void land(std::size_t b) {
        times_[b].end = is_single_rank() ? watch_.now() : watch_.arrive(Activity::collective, b);
        gradients_.land(b);
        completed_.store(b + 1, std::memory_order_release);
    }
    std::chrono::nanoseconds progress_time() const { return backend_.progress_time() + exchange_->progress_time(); }

    /// A single rank exchanges nothing: it starts a bucket only to scale it.
    void start(std::size_t b) {
        const BufferView bucket = gradients_.marked_bucket(b);
        if (!is_floating(bucket.dtype)) {
            if (!has_batch_) gradients_.clear_bucket(b);
            if (!is_single_rank()) exchange_->start(backend_, b, bucket, ReduceOp::sum, {});
            return;
        }
        if (has_batch_ && !weight_ && is_weighted(options_.averaging))
            raise(Errc::invalid_argument,
                  text("rank ", backend_.rank(),
                       " gave no weight for this step; call set_weight() in each step, before the first mark_ready()"),
                  {.operation = "set_weight", .rank = backend_.rank()});
        const double divisor = larger(several_ ? 1.0 : 0.0, sum_divisor(options_, bucket.dtype, backend_.size()));
        const auto count =
            static_cast<double>(options_.micro_batches == 0 ? 1 : gradients_.dealt().deal().count(backend_.rank()));
        const Contribution own =
            contribution_of(options_, backend_.rank(), weight_.value_or(1), has_batch_, count, divisor);
        if (is_single_rank() && own.scale == own.weight && own.scale != 0) return;  // x w / w
        if (several_) dealt_.start(backend_, gradients_, b, own);
        else exchange_->start(backend_, b, bucket, ReduceOp::mean, own);
    }

    B backend_;                                        ///< its tag names the bucket being started
    const std::size_t number_ = next_owner(backend_);  ///< number of the Reducer among those of its communicator
    const ReducerOptions& options_;
    GradientBuckets<B>& gradients_;
    const Readiness& readiness_;
    Owner<AnyExchange<B>> exchange_;
    DealtExchange<B> dealt_;
    const bool several_ = gradients_.dealt().several();             ///< dealt_ replaces exchange_
    const bool single_rank_ = exchange_->is_single_rank(backend_);  ///< cached, because every mark asks
    LaunchGroups<B> groups_;
    Watch watch_{BackendClock(backend_), options_.observer};
    List<Times> times_;  ///< by bucket
    std::atomic<std::size_t> started_{0}, completed_{0};
    WeightComparison<HostOf<B>> weights_;
    std::size_t steps_ = 0;         ///< completed steps
    std::optional<double> weight_;  ///< for this step
    bool has_batch_ = true, some_have_none_ = false;
    collective::Deadline unmarked_;    ///< of tests while marks are missing
    std::size_t launched_before_ = 0;  ///< buckets, at the last of these tests
    // No spin locks: a thread that holds one may wait for a collective, or compress for milliseconds at a launch.
    std::mutex polling_, launching_;
};

}  // namespace gradsync::inline v0_2::detail
