// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "gradient_norm.hpp"
#include "marking.hpp"

namespace gradsync::inline v0_2::detail {

/// Exchanges gradients in buckets as they become ready: the engine below Reducer, ShardedOptimizer and
/// ShardedParameters. It plans buckets once, starts their collectives in the plan's order, and checks that nothing
/// half-reduced reaches an optimizer.
///
/// A step ends in two parts: `close_step` settles the gradients that are not ready and launches the remaining buckets;
/// `complete_step` waits for the collectives in order and hands out the results of each bucket.
template <class B>
class GradientEngine final : public Marking<B> {
    using Base = Marking<B>;
    using Base::backend_, Base::background_, Base::bucket_policy_, Base::check_index, Base::check_limit,
        Base::check_root, Base::check_usable, Base::decoupled_, Base::fail, Base::gathers_, Base::gradients_,
        Base::guard, Base::name, Base::obtain, Base::options_, Base::overlap_, Base::readiness_, Base::ready_order_,
        Base::refuse, Base::scatters_, Base::set_has_batch, Base::step_, Base::watch_marks;

public:
    using Base::between_steps, Base::check_between_steps, Base::check_micro_batches, Base::failed, Base::gradient_view,
        Base::mark_ready, Base::plan;

    /// `owner`: the public object as errors name it. Collective.
    GRADSYNC_SETUP GradientEngine(const B& backend, const char* owner, List<ParameterView> parameters,
                                  const ReducerOptions& options, Policies<B> policies)
        : Base(backend, owner, std::move(parameters), options, policies) {
        verify(host_of(backend_), gradients_.parameters(), gradients_.plan(),
               text(bucket_policy_.describe(), " ", overlap_.describe(), " ", policies.exchange_name, " ",
                    describe(options_)));
        check_own_memory(host_of(backend_), gradients_.parameters(), options_.gradients == GradientStorage::borrowed);
        if constexpr (abilities_of<B>.check_reduces)  // after verify(): all ranks ask for the same, so all of them
                                                      // throw or none
            for (std::size_t b = 0; b < plan().size(); ++b)
                backend_.check_reduces(infos()[plan().bucket(b).front()].dtype);
        gradients_.allocate(backend_);  // collective, so only after verify()
        statistics_.transport = backend_.describe();
        adopt_plan();
        record_order();
        if (decoupled_) {
            gathers_.attach(backend_);
            gathers_.set_watch(step_.watch());
        }
        overlap_.attach(background_);
    }
    /// If an exception ended a step, or buckets were launched without a `finish()`, the communicator fails on every
    /// rank, because the others would wait for the rest of the step. It fails even if all ranks do the same: no rank
    /// can tell whether the others did.
    ~GradientEngine() {
        overlap_.detach();
        const bool unwinds = std::uncaught_exceptions() != exceptions_;
        if (!failed() && !step_.is_single_rank() && (step_.launched() != 0 || (unwinds && !between_steps())))
            backend_.fail(unwinds ? "an exception ended its step"
                                  : "its Reducer was destroyed during a step; call finish() first");
        if (decoupled_ && failed()) gathers_.drop();
    }

    void broadcast_parameters(int root = 0) {
        List<BufferView> values(gradients_.parameters().size());
        for (std::size_t i = 0; i < gradients_.parameters().size(); ++i) {
            const ParameterView& p = gradients_.parameter(i);
            Guard<B>::check_value(p);
            values[i] = p.value;
        }
        this->broadcast_buffers(values, root);
    }

    /// `mark_ready` for a gradient that its producer left in `gradient`.
    void mark_ready(std::size_t i, const BufferView& gradient) {
        check_index(i, gradients_.parameters().size(), "mark_ready");
        check_usable("mark_ready");
        const BufferView own = gradients_.gradient(i);
        if (!may_replace(gradient, own))
            refuse("mark_ready",
                   text("the gradient of '", name(i), "' has another count, type or space now, or no memory"), name(i));
        const bool refused =
            own.data == nullptr || readiness_.remaining(i) == 0 || this->is_arriving(i);  // mark_ready reports it
        if (!refused && gradient.data != own.data &&
            !(options_.gradients == GradientStorage::borrowed &&
              gradients_.rebind(i, readiness_.bucket_of(i), gradient))) {
            const auto held = step_.watch().hold(Activity::copy, i);
            passes_of(backend_).copy(gradient, own);
        }
        mark_ready(i);
    }

    void finish() {
        const auto alone = end_marks("finish");
        auto held = step_.watch().hold(Activity::finish);
        guard([&] {
            close_step();
            const auto lock = step_.exclusive();
            complete_step(held);
        });
    }

    /// The first part of `finish()`, for callers that finish later: no marks may follow.
    void settle() {
        const auto alone = end_marks("finish");
        guard([&] { settle_marks(); });
    }

    /// Ends a step after `settle()` without its reductions.
    void drop_step() {
        readiness_.reset();
        if (ready_order_.recording()) ready_order_.forget();
        step_.forget_weight();
        this->written_.reset();
        set_has_batch(true);
    }

    bool try_finish() {
        check_usable("try_finish");
        if (step_.has_batch() && options_.unused == UnusedParameters::error && !all_ready()) {
            guard([&] {
                step_.try_test([&] { settle_unready(true); });  // other threads may be marking
                if constexpr (abilities_of<B>.failed)
                    if (backend_.failed()) backend_.barrier().wait();  // throws the reason
            });
            return false;
        }
        const auto alone = end_marks("try_finish");
        const auto begin = step_.watch().now();
        bool complete = false;
        guard([&] {
            close_step();
            const auto lock = step_.exclusive();
            step_.test();
            complete = !step_.in_flight() && agreement_.test() && step_.weights().test();
            if (!complete) return step_.watch().add(begin, step_.watch().now());
            auto held = step_.watch().hold_since(begin, Activity::finish);
            complete_step(held);
        });
        return complete;
    }

    /// With OverlapForward: returns gradient i once it holds the average of step number `step`.
    BufferView acquire_average(std::size_t i, std::uint64_t step) {
        check_index(i, gradients_.parameters().size(), "acquire");
        check_usable("acquire");
        if (step != statistics_.steps)
            refuse("acquire", "these averages are of an earlier step; use what the last finish() returned");
        if (gradients_.parameter(i).requires_grad) land_gather(readiness_.bucket_of(i), "acquire");
        return gradients_.gradient(i);
    }
    /// Waits for all averages of step number `step`; no-op if it is not the last one.
    void acquire_all(std::uint64_t step) {
        if (step == statistics_.steps) flush();
    }

    void flush() {
        check_usable("flush");
        for (std::size_t b = plan().size(); gathers_.pending() != 0 && b-- > 0;) land_gather(b, "flush");
    }

    double gradient_norm() {
        check_averaged("gradient_norm");
        return guard([&] {
            if (norm_ == std::nullopt) prepare_norm();
            return norm_->compute(
                backend_, [&](std::size_t i, std::size_t first, std::size_t count, std::size_t b, std::size_t offset) {
                    if (scatters_ || (decoupled_ && gathers_.pending(b)))
                        return gradients_.shard(b).subview(offset, count);
                    return gradients_.gradient(i).subview(first, count);
                });
        });
    }

    double clip_gradients_by_norm(double max_norm, std::optional<double> total = {}) {
        check_averaged("clip_gradients_by_norm");
        check_limit(max_norm, "clip_gradients_by_norm");
        const double norm = total ? *total : gradient_norm();
        if (const double factor = clip_factor(norm, max_norm); factor != 1)
            for_gradients([&](BufferView gradient) { passes_of(backend_).scale(gradient, factor); });
        return norm;
    }
    void clip_gradients_by_value(double limit) {
        check_averaged("clip_gradients_by_value");
        check_limit(limit, "clip_gradients_by_value");
        for_gradients([&](BufferView gradient) { passes_of(backend_).clamp(gradient, limit); });
    }

    GRADSYNC_SETUP bool rebuild_buckets(auto&& share) {
        check_usable("rebuild_buckets");
        check_between_steps("rebuild_buckets");
        flush();
        return guard([&] {
            const List<std::uint64_t> order = ready_order_.agree(backend_, gradients_.order(), share);
            if (!ready_order_.seconds().empty()) bucket_policy_.set_ready_seconds(ready_order_.seconds());
            statistics_.ready_seconds = ready_order_.seconds();
            if (!gradients_.reorder(backend_, order)) return false;
            readiness_.set_plan(plan());
            adopt_plan();
            return true;
        });
    }

    void record_order(unsigned steps = 1) {
        check_usable("record_order");
        ready_order_.start(steps, gradients_.parameters().size());
        watch_marks();
    }

    /// If the exchange scatters: this rank's part (`shard_range`) of the averages of bucket b, with the gaps between
    /// parameters. Pooled shards have memory of their own, in the accumulator's type.
    BufferView gradient_shard(std::size_t b) const noexcept { return gradients_.shard(b); }
    BufferView bucket(std::size_t b) const noexcept { return gradients_.bucket(b); }
    /// Does a bucket have several sums in a step?
    bool sums_apart() const noexcept { return gradients_.dealt().several(); }
    bool compares_weights() const noexcept { return step_.compares_weights(); }
    void compare_groups(HostOf<B> replicas) { step_.weights().compare_groups(std::move(replicas)); }
    void give_weights(auto&& value_of) { step_.give_weights(value_of); }  ///< see Step, also for `launch_before_wait`
    void set_value(std::size_t i, BufferView value) noexcept { gradients_.set_value(i, value); }
    bool launch_before_wait() { return step_.launch_before_wait(readiness_); }
    const Deal& deal() const noexcept { return gradients_.dealt().deal(); }
    void end_round(bool ends_step) { gradients_.end_round(ends_step); }  ///< see GradientBuckets
    /// Did any rank use parameter i in the last step, or in the micro-batches that were added up to shards? Always true
    /// without UnusedParameters::find_unused.
    bool was_used(std::size_t i) const {
        check_index(i, gradients_.parameters().size(), "was_used");
        return used_.empty() || used_[i] != 0;
    }
    /// The position of each parameter in its bucket, and the length of the buckets, in elements.
    const BucketLayout& layout() const noexcept { return gradients_.layout(); }
    ListView<const ParameterInfo> infos() const noexcept { return gradients_.infos(); }
    const ReducerOptions& options() const noexcept { return options_; }       ///< as the engine understands them
    CollectiveTag tag(std::size_t b) const noexcept { return step_.tag(b); }  ///< of bucket b's collectives
    Watch& watch() noexcept { return step_.watch(); }                         ///< the stopwatch behind the statistics
    std::size_t bytes() const noexcept { return gradients_.bytes(); }  ///< of gradient memory that the library owns
    const Statistics& statistics() const noexcept { return statistics_; }
    AnyExchange<B>& exchange() noexcept { return step_.exchange(); }

private:
    /// Adapts to a new plan.
    [[gnu::cold]] void adopt_plan() {
        step_.adopt_plan();
        statistics_.buckets = List<BucketStatistics>(plan().size());
        if (decoupled_) gathers_.resize(plan().size());
        norm_.reset();
    }

    /// Runs at the first request for a norm, because it takes memory if gradients are sharded over many ranks.
    [[gnu::cold]] void prepare_norm() {
        const List<std::size_t> counts = norm_counts(gradients_.parameters());
        if (scatters_ || decoupled_)
            norm_.emplace(counts, plan(), gradients_.layout(), gradients_.infos(), backend_.size(), backend_.rank());
        else norm_.emplace(counts, backend_.size(), backend_.rank());
    }

    bool all_ready() const noexcept {
        for (std::size_t b = step_.launched(); b < plan().size(); ++b)
            if (!readiness_.full(b)) return false;
        return true;
    }

    void land_gather(std::size_t b, const char* operation) {
        if (!gathers_.pending(b)) return guard([&] { gathers_.poll(); });
        const auto held = step_.watch().hold(Activity::wait, b);
        guard([&] { gathers_.wait(b); });
        check_usable(operation);
        gradients_.hand_out(b, [](std::size_t) { return true; });
    }

    // ----------------------------------------------------------------------------------------------- the end of a step
    /// Settles the gradients that are not ready and launches the remaining buckets. No marks may follow.
    void close_step() {
        if (closed_) return;
        settle_marks();
        for (std::size_t b = step_.launched(); this->written_.checked() && b < plan().size(); ++b)
            this->check_written(b, "finish");
        this->written_.reset();
        step_.launch_full_buckets(false, true);
        List<std::uint8_t>& used = readiness_.used();
        if (!step_.has_batch()) readiness_.forget_used();
        used.back() = this->skips_.exchange(false, std::memory_order_relaxed) && step_.has_batch();
        const bool finds_unused = options_.unused == UnusedParameters::find_unused && backend_.size() > 1;
        if (finds_unused || options_.non_finite == NonFinite::skip)
            agreement_ = host_of(backend_).all_reduce(
                finds_unused ? BufferView(used.data(), used.size()) : BufferView(&used.back(), 1), ReduceOp::max);
        closed_ = true;
    }

    void settle_marks() {
        if (readiness_.end_backward()) return;
        if (!step_.has_batch()) settle_all();
        else if (!all_ready()) settle_unready();
    }

    /// A mark is an error while the result lives.
    typename Base::Finishing end_marks(const char* operation) {
        check_usable(operation);
        check_gathered(operation);
        this->check_micro_batches(operation);
        for (std::size_t i = 0; this->tracks_ && i < gradients_.parameters().size(); ++i)
            this->check_place(i, operation);
        return {*this, operation};
    }

    /// Settles a step without a batch. This rank's gradients do not count, but may have to be restored.
    void settle_all() {
        if (options_.unused == UnusedParameters::find_unused)
            for (std::size_t i : gradients_.order()) gradients_.keep(i);
        for (std::size_t b = step_.launched(); b < plan().size(); ++b) {
            if (gradients_.pooled()) obtain(b, "finish");
            readiness_.fill_all(b, plan().bucket(b));
        }
    }

    void settle_unready(bool only_names = false) {
        List<std::size_t> missing;
        for (std::size_t i : gradients_.order()) {
            const std::uint32_t remaining = readiness_.remaining(i);
            if (remaining == 0) continue;
            const bool partly_marked = remaining != readiness_.uses(i);
            if (!only_names && readiness_.used()[i] &&
                !partly_marked) {  // its gradient comes from earlier micro-batches
                if (gradients_.sums().holds(i)) gradients_.deposit_sum(i, {});
                else if (gradients_.is_copied(i)) gradients_.deposit(i);
            } else if (options_.unused == UnusedParameters::error) {
                missing.push_back(i);
                continue;
            } else if (partly_marked) {
                this->check_gradient(i);
                readiness_.used()[i] = 1;
                if (gradients_.is_deposited(i)) gradients_.deposit(i);
            } else {
                if (gradients_.pooled()) obtain(readiness_.bucket_of(i), "finish");
                gradients_.keep(i);
                gradients_.clear(i);
            }
            readiness_.settle(i);
        }
        if (!missing.empty())
            this->fail_at(missing[0], "finish",
                          not_ready(missing, gradients_.order().size(), gradients_.parameters(), readiness_),
                          Errc::gradient_not_ready);
    }

    /// Waits for the collectives, hands out the results, and prepares the next step.
    void complete_step(Watch::Span& held) {
        const bool agree = options_.unused == UnusedParameters::find_unused;
        const bool skips = options_.non_finite == NonFinite::skip && (agreement_.wait(), readiness_.used().back() != 0);
        for (std::size_t b = 0; b < plan().size(); ++b) {
            step_.complete(b);
            if (skips) gradients_.clear_bucket(b);
            if (!agree && !scatters_ && !decoupled_) gradients_.hand_out(b, [](std::size_t) { return true; });
        }
        if (decoupled_) {
            step_.start_gathers(gathers_);
            for (std::size_t b = 0; !agree && b < plan().size(); ++b) gradients_.spoil(b);
        }
        if (agree) {
            agreement_.wait();
            if (gradients_.dealt().round() == 0) used_.fill(0);
            used_.resize(gradients_.parameters().size());
            for (std::size_t i = 0; i < gradients_.parameters().size(); ++i) used_[i] |= readiness_.used()[i];
            if (!scatters_) {
                for (std::size_t b = plan().size(); decoupled_ && b-- > 0;)
                    gathers_.wait(b);  // they overwrite what is restored
                for (std::size_t b = 0; b < plan().size(); ++b)
                    gradients_.hand_out(b, [&](std::size_t i) { return readiness_.used()[i] != 0; });
                gradients_.restore([&](std::size_t i) { return readiness_.used()[i] == 0; });
            }
        }
        step_.weights().finish(host_of(backend_), gradients_.parameters());
        held.end();
        statistics_.last = step_.take_statistics(statistics_.buckets);
        if (decoupled_ && backend_.size() > 1) {  // the gathers are in flight
            for (std::size_t b = 0; b < plan().size(); ++b) statistics_.last.bytes += gradients_.bucket(b).bytes();
            statistics_.last.collectives += plan().size();
        }
        statistics_.last.skipped = skips ? 1 : 0;
        statistics_.total += statistics_.last;
        ++statistics_.steps;
        readiness_.reset();
        gradients_.sums().forget();
        if (ready_order_.recording()) {
            ready_order_.end_step();
            watch_marks();
        }
        set_has_batch(true);
        closed_ = false;
    }

    void check_averaged(const char* operation) const {
        check_usable(operation);
        check_between_steps(operation);
        if (statistics_.steps == 0 || readiness_.any_used())
            refuse(operation, "gradients are not averaged yet; call finish() first");
    }
    /// With OverlapForward, averages that were not waited for would be lost.
    void check_gathered(const char* operation) const {
        if (!closed_ && gathers_.pending() != 0)
            refuse(operation,
                   "averages of the last step were not waited for; call acquire(i) on what finish() returned before "
                   "parameter i is stepped and used, or wait()");
    }

    void for_gradients(auto&& use) {
        flush();
        for (std::size_t i : gradients_.order())
            if (const BufferView view = gradient_view(i); is_floating(view.dtype)) use(view);
    }

    std::optional<GradientNorm> norm_;
    List<std::uint8_t> used_;                 ///< by parameter, of the last step; only with find_unused
    typename HostOf<B>::WorkType agreement_;  ///< the ranks' agreement on used gradients and on skipping the step
    Statistics statistics_;
    bool closed_ = false;  ///< all marks of this step are settled, and all buckets are launched
    int exceptions_ = std::uncaught_exceptions();
};

}  // namespace gradsync::inline v0_2::detail
