// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <mutex>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "../core/backend.hpp"
#include "../core/clock.hpp"
#include "../core/collective_tag.hpp"
#include "../core/error.hpp"
#include "../core/exchange.hpp"
#include "../kernel/passes.hpp"
#include "../observe/observer.hpp"
#include "../observe/statistics.hpp"
#include "buckets_in_flight.hpp"
#include "gradient_buckets.hpp"
#include "launch_groups.hpp"
#include "options.hpp"
#include "readiness.hpp"
#include "watch.hpp"

namespace gradsync::inline v0_2::detail {

/// The buckets of a step in flight: starts their collectives in the plan's order as they fill, advances them, waits for them, and measures
/// how long that held the step up. `Readiness` tells it which buckets are full.
template <Backend B, class Buckets, class Exchange>
class Step {
public:
    using Time = Observer::Time;

    /// The arguments passed by reference outlive this; `backend` and `exchange` are copied.
    Step(const B& backend, const ReducerOptions& options, GradientBuckets<B, Buckets>& gradients, const Readiness& readiness,
         Exchange exchange)
        : backend_(backend),
          number_(next_owner(backend_)),
          options_(options),
          gradients_(gradients),
          readiness_(readiness),
          exchange_(std::move(exchange)),
          watch_(backend, options.observer),
          flight_(0) {}
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

    /// Adapts to a new plan, whose buckets are allocated. Between steps.
    void adopt_plan() {
        const BucketPlan& plan = gradients_.plan();
        flight_.resize(plan.size());
        groups_.adopt(backend_, gradients_);
        if constexpr (Exchange::traits.adopts_plan)
            if (!is_single_rank()) exchange_.adopt_plan(backend_, contents());
        if (watch_.observer() == nullptr) return;
        std::vector<std::size_t> bytes;
        for (std::size_t b = 0; b < plan.size(); ++b) bytes.push_back(gradients_.bucket(b).bytes());
        std::vector<std::string_view> names;
        for (const ParameterView& p : gradients_.parameters()) names.push_back(p.name);
        watch_.observer()->plan(plan, bytes, names);
    }

    // ------------------------------------------------------------------------------------------ what this rank brings

    void set_weight(double weight) noexcept { weight_ = weight; }
    void set_has_batch(bool has_batch) noexcept { has_batch_ = has_batch; }
    bool has_batch() const noexcept { return has_batch_; }
    /// The tag of bucket b's collectives.
    CollectiveTag tag(std::size_t b) const noexcept { return {CollectiveTag::Kind::bucket, number_, b}; }
    /// Is this rank the only one?
    bool is_single_rank() const noexcept { return exchange_.is_single_rank(backend_); }
    Exchange& exchange() noexcept { return exchange_; }

    // ------------------------------------------------------------------------------------------------- for any thread

    Watch<B>& watch() noexcept { return watch_; }
    std::size_t launched() const noexcept { return flight_.started(); }
    bool in_flight() const noexcept { return flight_.in_flight(); }

    /// Starts the full buckets that are next in the plan's order. `in_hook`: the call holds the step up.
    void launch_full_buckets(bool in_hook) {
        std::lock_guard lock(launching_);
        std::size_t b = flight_.started();
        if (b == flight_.size() || !groups_.full(b, readiness_)) return;
        const bool travels = !is_single_rank();
        const Time first = watch_.now();
        Time last = first;
        typename LaunchGroups<B>::Launch group(groups_, backend_);
        for (; b < flight_.size() && groups_.full(b, readiness_); ++b) {
            const Time begin = last;
            if (travels) {
                auto launch = watch_.tell(Activity::launch, b, begin);
                group.enter(b);
                set_tag(backend_, tag(b));
                auto work = naming_bucket(b, [&] { return start(b); });
                group.leave(b);
                last = watch_.now();
                launch.end(last);
                watch_.depart(Activity::collective, b, begin);
                flight_.start(std::move(work), begin);
            } else {
                flight_.start(start(b), begin);
            }
        }
        if (in_hook) watch_.add(first, last);
    }

    /// Starts the gathers of all buckets, when all collectives of the step are complete. The last bucket goes first, because the next
    /// forward starts with the parameters whose gradients came last. They use the same launch groups as the buckets. All start before any
    /// is waited for, one after another, so a gather is delayed at most by its own group.
    template <class Gathers>
    void start_gathers(Gathers& gathers) {
        typename LaunchGroups<B>::Launch group(groups_, backend_, LaunchOrder::reverse);
        for (std::size_t b = flight_.size(); b-- > 0;) {
            group.enter(b);
            gathers.start(b, gradients_.bucket(b), tag(b));
            group.leave(b);
        }
    }

    /// Advances the collectives in flight, unless another thread does so now. Never blocks.
    void poll(bool in_hook) {
        if (!polling_.try_lock()) return;
        std::lock_guard polling(polling_, std::adopt_lock);
        const auto before = progress_time();
        advance();
        if (!in_hook) return;
        const auto worked = std::chrono::duration_cast<Time::duration>(progress_time() - before);
        if (worked == Time::duration::zero()) return;  // saves reading the clock
        const Time now = watch_.now();
        watch_.add(now - worked, now);
        watch_.begin(Activity::progress, Observer::no_index, now - worked);
        watch_.end(Activity::progress, Observer::no_index, now);
    }

    /// Waits for the oldest collective in flight; false if there is none.
    bool complete_one() {
        const auto lock = exclusive();
        if (!flight_.in_flight()) return false;
        const auto held = watch_.hold(Activity::wait);
        complete(flight_.completed());
        return true;
    }

    // ------------------------------------------------------------------------------------------ for the thread that finishes

    /// A lock that keeps other threads from advancing collectives. Hold it for the calls below, except `try_test`.
    [[nodiscard]] std::unique_lock<std::mutex> exclusive() { return std::unique_lock(polling_); }

    void advance() { flight_.poll(land_); }
    /// Non-blocking variant of a wait, as `Work::test()` is.
    void test() {
        advance();
        flight_.test_first();
    }
    /// The same, unless another thread advances collectives now.
    void try_test() {
        const std::unique_lock lock(polling_, std::try_to_lock);
        if (lock) test();
    }
    /// Returns when bucket b is complete. Call it for all buckets before b first.
    void complete(std::size_t b) {
        if (b == flight_.completed()) flight_.wait(b, land_, await_);
    }
    /// Ends the step and returns its statistics. `buckets`: by bucket, filled here.
    StepStatistics take_statistics(std::span<BucketStatistics> buckets) {
        StepStatistics step;
        step.exposed_seconds = watch_.take_exposed_seconds();
        if (!is_single_rank()) {
            for (std::size_t b = 0; b < flight_.size(); ++b) {
                buckets[b] = {gradients_.bucket(b).bytes(), flight_.launch_seconds(b), flight_.end_seconds(b)};
                const Traffic traffic = traffic_of(b);
                step.bytes += traffic.bytes;
                step.collectives += traffic.collectives;
            }
            step.collectives += options_.unused == UnusedParameters::find_unused ? 1 : 0;
            step.communication_seconds = watch_.take_covered_seconds();
        }
        flight_.reset();
        return step;
    }

private:
    /// Lands a bucket whose collective is complete; returns the time of completion.
    struct Land {
        Step& step;
        Time operator()(std::size_t b) {
            const Time at = step.is_single_rank() ? step.watch_.now() : step.watch_.arrive(Activity::collective, b);
            step.gradients_.land(b);
            return at;
        }
    };
    struct Await {
        Step& step;
        template <class W>
        void operator()(W& work) {
            await(step.backend_, work);
        }
    };

    Traffic traffic_of(std::size_t b) const {
        const BufferView bucket = gradients_.bucket(b);
        if constexpr (Exchange::traits.reports_traffic) return exchange_.traffic(backend_, b, bucket);
        else return {bucket.bytes(), 1};
    }
    std::chrono::nanoseconds progress_time() const {
        std::chrono::nanoseconds time = backend_.progress_time();
        if constexpr (Exchange::traits.reports_progress_time) time += exchange_.progress_time();
        return time;
    }
    std::vector<BucketContents> contents() const {
        std::vector<BucketContents> all;
        for (std::size_t b = 0; b < gradients_.plan().size(); ++b) {
            BucketContents& bucket = all.emplace_back(BucketContents{gradients_.bucket(b).count, gradients_.bucket(b).dtype, {}});
            for (std::size_t i : gradients_.plan().bucket(b))
                bucket.parts.push_back({i, gradients_.layout().offsets[i], gradients_.infos()[i].count, gradients_.parameter(i).shape});
        }
        return all;
    }

    auto start(std::size_t b) -> typename Exchange::template WorkType<B> {
        const BufferView bucket = gradients_.bucket(b);
        if (!is_floating(bucket.dtype)) {
            if (!has_batch_) gradients_.clear_bucket(b);
            if (is_single_rank()) return {};
            return exchange_.start(backend_, b, bucket, ReduceOp::sum, {});
        }
        const Contribution own = contribution_of(options_, backend_.rank(), weight_, has_batch_);
        if (is_single_rank() && own.scale == own.weight && own.scale != 0) return {};  // x w / w
        return exchange_.start(backend_, b, bucket, ReduceOp::mean, own);
    }

    B backend_;                 ///< its tag names the bucket that is started
    const std::size_t number_;  ///< number of the Reducer among those of its communicator
    const ReducerOptions& options_;
    GradientBuckets<B, Buckets>& gradients_;
    const Readiness& readiness_;
    Exchange exchange_;
    LaunchGroups<B> groups_;
    Watch<B> watch_;
    BucketsInFlight<typename Exchange::template WorkType<B>> flight_;
    double weight_ = 1;
    bool has_batch_ = true;
    // No spin locks: a thread that waits for memory waits for a collective, and a compressor computes for milliseconds at a launch.
    std::mutex polling_;
    std::mutex launching_;
    Land land_{*this};
    Await await_{*this};
};

}  // namespace gradsync::inline v0_2::detail
