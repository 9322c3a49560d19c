// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "gradient_norm.hpp"
#include "marks.hpp"

namespace gradsync::inline v0_2::detail {

/// Exchanges gradients in buckets as they become ready: the engine below Reducer, ShardedOptimizer and
/// ShardedParameters. It plans buckets once, starts their collectives in the plan's order, and checks that nothing
/// half-reduced reaches an optimizer. It has three parts: `marks()` tells which gradients are ready, `home()` holds the
/// gradients, and `in_flight()` has the collectives that were started.
///
/// A step ends in two parts: `close_step` settles the gradients that are not ready and launches the remaining buckets;
/// `complete_step` waits for the collectives in order and hands out the results of each bucket.
template <class B>
class GradientSync final {
public:
    /// `guard` is the public object's, and outlives this. Collective.
    GRADSYNC_SETUP GradientSync(Guard<B>& guard, List<ParameterView> parameters, const ReducerOptions& options,
                                Policies<B> policies)
        : guard_(guard),
          scatters_(policies.exchange->traits.scatters && !policies.decoupled),
          options_(checked(with_storage(options, GradientStorage::borrowed), !policies.packs, policies.sums)),
          policies_(std::move(policies)),
          home_(backend_, std::move(parameters), options_, policies_),
          in_flight_(backend_, options_, home_, readiness_, std::move(policies_.exchange)) {
        verify(host_of(backend_), planned_.parameters(), planned_.plan(),
               text(policies_.buckets.describe(), " ", policies_.overlap.describe(), " ", policies_.exchange_name, " ",
                    describe(options_)));
        if (planned_.size() == 0)
            refuse_on({"Reducer", named_rank(backend_)},
                      "there are no parameters; construct it when the model has its layers");
        check_own_memory(host_of(backend_), planned_.parameters(), options_.gradients == GradientStorage::borrowed);
        // After verify(): all ranks ask for the same, so all throw or none.
        if constexpr (abilities_of<B>.check_reduces)
            for (std::size_t b = 0; b < planned_.plan().size(); ++b)
                backend_.check_reduces(planned_.infos()[planned_.plan().bucket(b).front()].dtype);
        guard_.run([&] { home_.allocate(backend_); });  // collective, so only after verify()
        statistics_.transport = backend_.describe();
        adopt_plan();
        record_order();
        if (policies_.decoupled) {
            gathers_.attach(backend_, policies_.overlap.only_polls(), this, [](void* self, std::size_t b) {
                static_cast<GradientSync*>(self)->home_.hand_out(b, every);
            });
            gathers_.set_watch(in_flight_.watch());
        }
        policies_.overlap.attach(in_flight_.background());
    }
    GradientSync& operator=(GradientSync&&) = delete;
    /// If an exception ended a step, or buckets were launched without a `finish()`, the communicator fails on every
    /// rank, because the others would wait for the rest of the step. It fails even if all ranks do the same: no rank
    /// can tell whether the others did.
    ~GradientSync() {
        policies_.overlap.detach();
        const bool unwinds = std::uncaught_exceptions() != exceptions_;
        if (!guard_.failed() && !in_flight_.is_single_rank() &&
            (in_flight_.launched() != 0 || (unwinds && !marks_.between_steps())))
            backend_.fail(unwinds ? "an exception ended its step"
                                  : "its Reducer was destroyed during a step; call finish() first");
        if (policies_.decoupled && guard_.failed()) gathers_.drop();
    }

    Marks<B>& marks() noexcept { return marks_; }
    const Marks<B>& marks() const noexcept { return marks_; }
    GradientHome<B>& home() noexcept { return home_; }
    const GradientHome<B>& home() const noexcept { return home_; }
    InFlight<B>& in_flight() noexcept { return in_flight_; }
    const ReducerOptions& options() const noexcept { return options_; }  ///< as the engine understands them
    const Statistics& statistics() const noexcept { return statistics_; }

    // ------------------------------------------------------------------------------------------------ before a step

    bool begin_step(bool has_batch = true) {
        marks_.check_phase("begin_step");
        if (!has_batch && home_.rounds().dealt().several() && !home_.pooled())
            guard_.refuse("begin_step", "every rank needs a batch here; give this one some, or set micro_batches to ",
                          backend_.size(), " times a power of two, not ", options_.micro_batches);
        std::int32_t live = has_batch ? 1 : 0;
        guard_.run([&] { host_of(backend_).all_reduce(BufferView(&live, 1), ReduceOp::sum).wait(); });
        marks_.set_has_batch(has_batch || live == 0, live < backend_.size());  // if no rank has one, no step follows
        return live > 0;
    }

    void set_weight(double weight) {
        marks_.check_phase("set_weight");
        if (!is_weighted(options_.averaging))
            guard_.refuse("set_weight",
                          "weights go with Averaging::weighted_mean or mean_over_count; choose one in ReducerOptions");
        constexpr double least = 0x1p-126, most = 0x1.fffffep127;  // of f32
        if (weight != 0 && !(weight >= least && weight <= most))
            guard_.refuse("set_weight", "a weight must be 0, or from 1.2e-38 to 3.4e38, not ", weight);
        in_flight_.contribution().weight = weight;
    }

    GRADSYNC_SETUP bool rebuild_buckets(auto&& share) {
        marks_.check_phase("rebuild_buckets");
        flush("rebuild_buckets");
        return guard_.run([&] {
            ReadyOrder<B>& recorded = marks_.order();
            const List<std::uint64_t> order = recorded.agree(backend_, planned_.order(), share);
            if (!recorded.seconds().empty()) policies_.buckets.set_ready_seconds(recorded.seconds());
            statistics_.ready_seconds = recorded.seconds();
            if (!home_.reorder(backend_, order)) return false;
            readiness_.set_plan(planned_.plan());
            adopt_plan();
            return true;
        });
    }
    void record_order(unsigned steps = 1) {
        guard_.check_usable("record_order");
        marks_.order().start(steps, planned_.size());
        marks_.watch();
    }

    // ------------------------------------------------------------------------------------------------------- a step

    void finish() {
        const auto alone = marks_.end("finish");
        auto held = in_flight_.watch().hold(Activity::finish);
        guard_.run([&] {
            close_step();
            const auto lock = in_flight_.exclusive();
            complete_step(held);
        });
    }
    bool try_finish() {
        guard_.check_usable("try_finish");
        if (in_flight_.contribution().has_batch && options_.unused == UnusedParameters::error && !marks_.all_ready()) {
            guard_.run([&] {
                in_flight_.try_test([&] { marks_.name_unready(); });
                if constexpr (abilities_of<B>.failed)
                    if (backend_.failed()) backend_.barrier().wait();  // throws the reason
            });
            return false;
        }
        const auto alone = marks_.end("try_finish");
        const auto begin = in_flight_.watch().now();
        return guard_.run([&] {
            close_step();
            const auto lock = in_flight_.exclusive();
            in_flight_.test();
            if (in_flight_.in_flight() || !agreement_.test() || !in_flight_.weights().test()) {
                in_flight_.watch().add(begin, in_flight_.watch().now());
                return false;
            }
            auto held = in_flight_.watch().hold_since(begin, Activity::finish);
            complete_step(held);
            return true;
        });
    }
    /// The first part of `finish()`, for callers that finish later: no marks may follow.
    void settle() {
        const auto alone = marks_.end("finish");
        guard_.run([&] { marks_.settle(); });
    }
    /// Ends a step after `settle()` without its reductions.
    void drop_step() {
        if (marks_.order().recording()) marks_.order().forget();
        in_flight_.contribution() = {};
        marks_.reset();
    }

    // ---------------------------------------------------------------------------------------------------- afterwards

    /// Did any rank use parameter i in the last step, or in the micro-batches that were added up to shards? Always true
    /// without UnusedParameters::find_unused.
    bool was_used(std::size_t i) const {
        guard_.check_index(i, planned_.size(), "was_used");
        return used_.empty() || used_[i] != 0;
    }
    /// The memory of gradient i.
    BufferView gradient_view(std::size_t i) const {
        guard_.check_index(i, planned_.size(), "gradient_view");
        guard_.check_usable("gradient_view");
        if (planned_[i].requires_grad && marks_.is_arriving(i))
            guard_.refuse({.operation = "gradient_view", .parameter = planned_[i].name}, "the average of '",
                          planned_[i].name, "' is in flight; call acquire(", i, ") on what finish() has returned");
        return home_.gradient(i);
    }
    /// Moves the borrowed gradient i to another memory.
    void rebind_gradient(std::size_t i, BufferView gradient) {
        guard_.check_index(i, planned_.size(), "rebind_gradient");
        marks_.check_phase("rebind_gradient");
        const ParameterView& p = planned_[i];
        const auto refuse = [&](const auto&... what) {
            guard_.refuse({.operation = "rebind_gradient", .parameter = p.name}, what...);
        };
        if (p.requires_grad && marks_.is_arriving(i))
            refuse("the average of '", p.name, "' is in flight; acquire it first");
        if (options_.gradients != GradientStorage::borrowed || !may_replace(gradient, p.gradient))
            refuse("the new memory of '", p.name,
                   "' must be a borrowed gradient of the same count, type and space, aligned for its type");
        if (!home_.rebind(i, readiness_.bucket_of(i), gradient))
            refuse("'", p.name,
                   "' is part of an arena in device memory, which is a bucket; make a new Reducer to move it");
    }

    /// With OverlapForward: returns gradient i once it holds the average of step number `step`.
    BufferView acquire(std::size_t i, std::uint64_t step) {
        guard_.check_index(i, planned_.size(), "acquire");
        guard_.check_usable("acquire");
        if (step != statistics_.steps)
            guard_.refuse("acquire", "these averages are of an earlier step; use what the last finish() returned");
        if (planned_[i].requires_grad) guard_.run([&] { gathers_.land(readiness_.bucket_of(i)); });
        return home_.gradient(i);
    }
    /// Waits for all averages of step number `step`; no-op if it is not the last one.
    void acquire_all(std::uint64_t step) {
        if (step == statistics_.steps) flush("acquire");
    }

    double gradient_norm() {
        marks_.check_phase("gradient_norm");
        return guard_.run([&] {
            if (!norm_) norm_.emplace(backend_, home_, scatters_ || policies_.decoupled);
            return norm_->compute(
                backend_, [&](std::size_t i, std::size_t first, std::size_t count, std::size_t b, std::size_t offset) {
                    if (scatters_ || (policies_.decoupled && gathers_.pending(b)))
                        return home_.rounds().shard(b).subview(offset, count);
                    return home_.gradient(i).subview(first, count);
                });
        });
    }
    /// Calls `use(gradient)` with each average of a floating type.
    void for_averages(CheckedCall call, auto&& use) {
        marks_.check_phase(call);
        flush(call.name);
        for (const std::size_t i : planned_.order())
            if (const BufferView view = gradient_view(i); is_floating(view.dtype)) use(view);
    }

private:
    /// Runs before anything is constructed, so that a refused rank may try again. `plain`: the exchange is AllReduce.
    /// `sums`: see Policies.
    [[gnu::cold]] ReducerOptions checked(ReducerOptions options, bool plain, bool sums) const {
        check_options(options, B::memory_space, scatters_, plain, sums, named_rank(backend_), backend_.size());
        if (options.micro_batches == static_cast<std::size_t>(backend_.size()))  // one each: nothing is added up
            options.accumulation = Accumulation::in_gradients;
        // Nothing else adds up pooled gradients.
        else if (options.micro_batches != 0 && options.gradients == GradientStorage::pooled)
            options.accumulation = Accumulation::in_buckets;
        options.check_writes |= B::memory_space == MemorySpace::host && WrittenGradients::asked_for();
        return options;
    }
    [[gnu::cold]] void adopt_plan() {
        in_flight_.adopt_plan();
        statistics_.buckets = List<BucketStatistics>(planned_.plan().size());
        if (policies_.decoupled) gathers_.resize(planned_.plan().size());
        norm_.reset();
    }
    void flush(const char* operation) {
        guard_.check_usable(operation);
        guard_.run([&] { gathers_.land_all(); });
    }

    /// Settles the gradients that are not ready and launches the remaining buckets. No marks may follow.
    void close_step() {
        if (marks_.phase() == Phase::closed) return;
        marks_.settle();
        marks_.close();
        List<std::uint8_t>& used = readiness_.used();
        const bool finds_unused = options_.unused == UnusedParameters::find_unused && backend_.size() > 1;
        if (finds_unused || options_.non_finite == NonFinite::skip)
            agreement_ = host_of(backend_).all_reduce(
                finds_unused ? BufferView(used.data(), used.size()) : BufferView(&used.back(), 1), ReduceOp::max);
    }

    /// Waits for the collectives, hands out the results, and prepares the next step.
    void complete_step(Watch::Span& held) {
        const std::size_t buckets = planned_.plan().size();
        const bool agree = options_.unused == UnusedParameters::find_unused;
        const bool skips = options_.non_finite == NonFinite::skip && (agreement_.wait(), readiness_.used().back() != 0);
        for (std::size_t b = 0; b < buckets; ++b) {
            in_flight_.complete(b);
            if (skips) passes_of(backend_).clear(home_.storage().buckets()[b]);
            if (!agree && !scatters_ && !policies_.decoupled) home_.hand_out(b, every);
        }
        if (policies_.decoupled) {
            in_flight_.start_gathers(gathers_);
            for (std::size_t b = 0; !agree && b < buckets; ++b) spoil(b);
        }
        if (agree) hand_out_used();
        in_flight_.weights().finish(host_of(backend_), planned_.parameters());
        if (statistics_.steps == 0 && !skips) check_written_place();
        held.end();
        take_statistics(skips);
        marks_.reset();
        if (marks_.order().recording()) {
            marks_.order().end_step();
            marks_.watch();
        }
    }
    /// A trainer that writes gradients of its own, while those in the buckets travel, would train alone without a word.
    /// Averages that are still gathered cannot be read.
    [[gnu::cold]] void check_written_place() const {
        if (B::memory_space != MemorySpace::host || options_.gradients != GradientStorage::in_buckets) return;
        if (policies_.decoupled) return;
        for (const std::size_t i : planned_.order())
            if (!is_zero(home_.gradient(i))) return;
        for (const std::size_t i : planned_.order())
            if (const ParameterView& p = planned_[i]; !is_zero(p.gradient))
                guard_.fail(
                    Errc::invalid_argument, "finish",
                    text("all averages are 0, and the gradient that was registered for '", p.name,
                         "' is not: with GradientStorage::in_buckets write to gradient_view(i), or use borrowed"),
                    p.name, 0);
    }
    /// Writes a NaN to the first element of each gradient that will receive results of bucket b, so that nobody trains
    /// on stale contents. In host memory only.
    void spoil(std::size_t b) noexcept {
        if constexpr (B::memory_space == MemorySpace::host)
            for (const std::size_t i : planned_.plan().bucket(b)) {
                const auto& row = home_.row(i);
                if (row.copied && row.bytes != 0 && is_floating(row.gradient.dtype))
                    std::memset(row.gradient.data, 0xff, size_of(row.gradient.dtype));
            }
    }
    /// With UnusedParameters::find_unused, once the ranks have agreed on what was used.
    void hand_out_used() {
        agreement_.wait();
        const List<std::uint8_t>& used = readiness_.used();
        if (home_.rounds().dealt().round() == 0) used_.fill(0);
        used_.resize(planned_.size());
        for (std::size_t i = 0; i < used_.size(); ++i) used_[i] |= used[i];
        if (scatters_) return;
        marks_.check_apart("finish", used.data());
        for (std::size_t b = planned_.plan().size(); policies_.decoupled && b-- > 0;)
            gathers_.wait(b);  // they overwrite what is restored
        for (std::size_t b = 0; b < planned_.plan().size(); ++b)
            home_.hand_out(b, [&](std::size_t i) { return used[i] != 0; });
        home_.restore([&](std::size_t i) { return used[i] == 0; });
    }
    void take_statistics(bool skips) {
        statistics_.last = in_flight_.take_statistics(statistics_.buckets);
        if (policies_.decoupled && backend_.size() > 1) {  // the gathers are in flight
            for (std::size_t b = 0; b < planned_.plan().size(); ++b)
                statistics_.last.bytes += home_.storage().buckets()[b].bytes();
            statistics_.last.collectives += planned_.plan().size();
        }
        statistics_.last.skipped = skips ? 1 : 0;
        statistics_.total += statistics_.last;
        ++statistics_.steps;
    }

    static bool every(std::size_t) noexcept { return true; }

    Guard<B>& guard_;
    B& backend_ = guard_.backend();
    const bool scatters_;  ///< this rank gets only its shards
    ReducerOptions options_;
    Policies<B> policies_;  ///< without the exchange, which `in_flight_` has
    GradientHome<B> home_;
    const PlannedParameters<B>& planned_ = home_.planned();
    Readiness readiness_{uses_of(planned_.parameters()), planned_.plan()};
    InFlight<B> in_flight_;
    DeferredGather<B> gathers_;  ///< only if decoupled
    Marks<B> marks_{guard_,     options_,          home_,    readiness_,
                    in_flight_, policies_.overlap, gathers_, policies_.buckets.plans_by_times()};
    std::optional<GradientNorm<B>> norm_;     ///< from the first request on, because it takes memory
    List<std::uint8_t> used_;                 ///< by parameter, of the last step; only with find_unused
    typename HostOf<B>::WorkType agreement_;  ///< the ranks' agreement on used gradients and on skipping the step
    Statistics statistics_;
    int exceptions_ = std::uncaught_exceptions();
};

/// Scales all gradients down to a global norm of at most `max_norm`; returns the norm before. See Reducer.
template <class B>
double clip_gradients_by_norm(GradientSync<B>& engine, Guard<B>& guard, double max_norm, std::optional<double> total) {
    engine.marks().check_phase("clip_gradients_by_norm");
    guard.check_limit(max_norm, "clip_gradients_by_norm");
    const double norm = total ? *total : engine.gradient_norm();
    if (const double factor = clip_factor(norm, max_norm); factor != 1)
        engine.for_averages("clip_gradients_by_norm",
                            [&](BufferView gradient) { passes_of(guard.backend()).scale(gradient, factor); });
    return norm;
}

/// Clamps every element. See Reducer.
template <class B>
void clip_gradients_by_value(GradientSync<B>& engine, Guard<B>& guard, double limit) {
    guard.check_limit(limit, "clip_gradients_by_value");
    engine.for_averages("clip_gradients_by_value",
                        [&](BufferView gradient) { passes_of(guard.backend()).clamp(gradient, limit); });
}

}  // namespace gradsync::inline v0_2::detail
