// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "bucket/size_capped.hpp"
#include "core/backend.hpp"
#include "core/bucket_plan.hpp"
#include "core/error.hpp"
#include "core/exchange.hpp"
#include "core/math.hpp"
#include "core/overlap_policy.hpp"
#include "core/parameter.hpp"
#include "core/requirements.hpp"
#include "engine/deferred_gather.hpp"
#include "engine/failure_latch.hpp"
#include "engine/gather_progress.hpp"
#include "engine/gradient_buckets.hpp"
#include "engine/gradient_norm.hpp"
#include "engine/options.hpp"
#include "engine/parameters.hpp"
#include "engine/readiness.hpp"
#include "engine/ready_order.hpp"
#include "engine/step.hpp"
#include "engine/verification.hpp"
#include "kernel/passes.hpp"
#include "observe/observer.hpp"
#include "observe/statistics.hpp"
#include "overlap/overlap_backward.hpp"

namespace gradsync::inline v0_2 {

/// Keeps the gradients of data-parallel ranks in step: mark each gradient when it is ready, then `finish()`, and
/// every rank holds the mean. The engine plans buckets once, starts their collectives in the plan's order, and
/// checks that nothing half-reduced ever reaches an optimizer.
///
///     gs::Reducer<gs::ThreadBackend, gs::SizeCappedBuckets, gs::OverlapBackward> sync(comm, model.parameters());
///     sync.broadcast_parameters();
///     for (...) {
///         model.backward(batch, [&](std::size_t i) { sync.mark_ready(i); });
///         sync.finish();
///         model.step();
///     }
///
/// Collective: construction, `broadcast_*`, `begin_step`, `finish`, `try_finish`, `gradient_norm`, `clip_gradients_by_norm`,
/// `rebuild_buckets`: all ranks call them in the same order. Threads: `mark_ready` from any thread, and `gradient_view` of pooled
/// gradients; everything else from one thread at a time, when no marks are under way. Errors: what is refused before anything has
/// happened (an argument, a call at the wrong time) changes nothing; after any other exception the object is of no more use, and so is its
/// communicator; every call says so. The trainer's parameters and gradients outlive the object; it neither moves nor copies.
template <class B, class Buckets = SizeCappedBuckets, class Overlap = OverlapBackward, class Exchange = AllReduce>
class Reducer {
    static_assert(require_backend<B>() && require_bucket_policy<Buckets>() && require_overlap_policy<Overlap>() &&
                  require_exchange<Exchange, B>());

    static_assert(std::is_same_v<Exchange, AllReduce> || Exchange::traits.scatters || !detail::gathers_in_forward<Overlap>(),
                  "gradsync: OverlapForward splits AllReduce in two halves, and no other exchange; use OverlapBackward with this one");

    /// `finish()` leaves half of the all-reduce to be waited for.
    static constexpr bool decoupled = !Exchange::traits.scatters && detail::gathers_in_forward<Overlap>();
    static constexpr bool scatters = Exchange::traits.scatters || decoupled;
    static constexpr bool timed = TimedBucketPolicy<Buckets>;
    using Step = detail::Step<B, Buckets, std::conditional_t<decoupled, ReduceScatter, Exchange>>;
    static constexpr std::size_t worth_timing = 16384;   ///< bytes; copying fewer takes no longer than reading the clock twice
    static constexpr std::size_t worth_polling = 16384;  ///< bytes; computing the gradients of fewer takes no longer than a poll

public:
    /// `parameters`: a range of anything that is a `Parameter`, in the order in which the forward uses them; their
    /// gradients are expected to become ready in the reverse of it. Collective. Throws Error(parameter_mismatch),
    /// the same text on every rank, where parameters, policies or options differ.
    template <class Range>
    Reducer(B backend, Range&& parameters, ReducerOptions options = {}, Buckets buckets = {}, Overlap overlap = {},
            Exchange exchange = Exchange())
        : backend_(std::move(backend)),
          options_(checked(options)),
          gradients_(backend_, detail::view_parameters<B::memory_space>(parameters), options, std::move(buckets), Exchange::traits.scatters,
                     !std::is_same_v<Exchange, AllReduce>),
          readiness_(detail::uses_of(gradients_.parameters()), gradients_.plan()),
          step_(backend_, options_, gradients_, readiness_, exchange_of_step(exchange)),
          overlap_(std::move(overlap)) {
        detail::verify(detail::host_of(backend_), gradients_.parameters(), gradients_.plan(),
                       gradients_.describe_policy() + " " + overlap_.describe() + " " + exchange.describe() + " " + describe(options_));
        detail::check_types(backend_, gradients_.plan(), gradients_.infos());
        gradients_.allocate(backend_);  // collective: only now is it known that all ranks want the same
        statistics_.transport = backend_.describe();
        adopt_plan();
        record_order();
        if constexpr (decoupled) {
            gathers_.attach(backend_);
            gathers_.set_watch(step_.watch());
        }
        overlap_.attach(background_);
    }
    Reducer(const Reducer&) = delete;
    Reducer& operator=(const Reducer&) = delete;
    /// Where an exception has ended a step, or buckets were launched and `finish()` was not called, the communicator fails on every rank:
    /// the others would wait for the rest of the step. (So it does where all ranks do the same: that they do, none of them knows.)
    ~Reducer() {
        overlap_.detach();
        const bool unwinds = std::uncaught_exceptions() != exceptions_;
        if (!failure_.failed() && !step_.is_single_rank() && (step_.launched() != 0 || (unwinds && !between_steps())))
            backend_.fail(unwinds ? "an exception ended its step"
                                  : "its Reducer was destroyed in the middle of a step; call finish() first");
        if constexpr (decoupled)
            if (failure_.failed()) gathers_.drop();
    }

    // ------------------------------------------------------------------------------------------ before the first step

    /// Gives every rank the root's weights, of frozen parameters too. Collective.
    void broadcast_parameters(int root = 0) {
        std::vector<BufferView> values(size());
        for (std::size_t i = 0; i < size(); ++i) {
            const ParameterView& p = gradients_.parameter(i);
            if (p.value.data == nullptr && p.gradient.count != 0)
                throw_here(Errc::invalid_argument, "broadcast_parameters",
                           "parameter '" + p.name + "' has no value; give one in its ParameterView or parameter_traits", p.name);
            values[i] = p.value;
        }
        broadcast_buffers(values, root);
    }

    /// Gives every rank the root's contents of these buffers: state that has no gradient. Collective.
    void broadcast_buffers(std::span<const BufferView> buffers, int root = 0) {
        check_usable("broadcast_buffers");
        if (root < 0 || root >= backend_.size())
            throw_here(Errc::invalid_argument, "broadcast_buffers",
                       "there is no rank " + std::to_string(root) + " among " + std::to_string(backend_.size()));
        for (std::size_t i = 0; i < buffers.size(); ++i) {  // before the first of them is under way
            const bool no_memory = buffers[i].data == nullptr && buffers[i].count != 0;
            if (no_memory || buffers[i].space != B::memory_space)
                throw_here(Errc::invalid_argument, "broadcast_buffers",
                           "buffer " + std::to_string(i) + " of " + std::to_string(buffers.size()) +
                               (no_memory ? " has no memory; give it some"
                                          : " lies in another memory space than this backend takes; copy it there first"));
        }
        guard([&] {
            std::vector<typename B::WorkType> works;
            works.reserve(buffers.size());
            for (const BufferView& b : buffers) works.push_back(backend_.broadcast(b, root));
            for (auto& work : works) detail::await(backend_, work);
        });
    }

    // -------------------------------------------------------------------------------------------------------- a step

    /// For uneven inputs: says whether this rank has a batch for the next step, and returns whether any rank has.
    /// A rank without a batch skips its backward and calls `finish()` all the same: it contributes nothing, but gets
    /// the gradients, so that its weights stay in step; gradients that it marks all the same are not used, nor are those of its
    /// micro-batches under `no_sync()` that this step was to end. With OverlapForward it calls `flush()`, and steps, before `finish()`,
    /// as there is no forward in which it would wait for the averages of the step before. Collective.
    ///
    ///     while (sync.begin_step(batch.has_value())) { if (batch) backward(...); sync.finish(); step(); }
    bool begin_step(bool has_batch = true) {
        check_usable("begin_step");
        check_between_steps("begin_step");
        std::int32_t live = has_batch ? 1 : 0;
        guard([&] { detail::host_of(backend_).all_reduce(buffer(std::span(&live, 1)), ReduceOp::sum).wait(); });
        set_has_batch(has_batch || live == 0);  // with no batch anywhere there is no such step
        return live > 0;
    }

    /// This rank's weight in `Averaging::weighted_mean` and `mean_over_count`: samples, tokens or micro-batches.
    /// Holds from the step that comes until it is set again; not while buckets are in flight.
    void set_weight(double weight) {
        check_usable("set_weight");
        if (options_.averaging != Averaging::weighted_mean && options_.averaging != Averaging::mean_over_count)
            throw_here(Errc::invalid_argument, "set_weight",
                       "weights go with Averaging::weighted_mean or mean_over_count; choose one in ReducerOptions");
        if (!(weight >= 0) || !detail::is_finite(weight))
            throw_here(Errc::invalid_argument, "set_weight",
                       "a weight must be a finite number of 0 or more, not " + std::to_string(weight));
        if (step_.launched() != 0)
            throw_here(Errc::invalid_argument, "set_weight",
                       "buckets of this step are in flight already; set the weight before the first mark_ready()");
        step_.set_weight(weight);
    }

    /// While it lives, marks synchronise nothing: see `no_sync()`. The Reducer outlives it.
    class [[nodiscard]] NoSync {
    public:
        explicit NoSync(Reducer& owner) noexcept : owner_(&owner) { owner.unsynchronised_ += one_guard; }
        NoSync(NoSync&& other) noexcept : owner_(std::exchange(other.owner_, nullptr)) {}
        NoSync& operator=(NoSync&&) = delete;
        ~NoSync() {
            if (owner_ != nullptr) owner_->end_no_sync(std::uncaught_exceptions() != exceptions_);
        }

    private:
        Reducer* owner_;
        int exceptions_ = std::uncaught_exceptions();
    };

    /// While the guard lives, marks synchronise nothing: gradients of micro-batches add up (see Accumulation). Guards
    /// nest; an exception that passes through leaves nothing switched on, and what was marked by then counts: `discard()` forgets it. Each
    /// mark of a gradient counts as the next micro-batch's: one too many is not noticed here. A gradient of several uses that got fewer
    /// marks counts as complete when the last guard goes; unless an exception ended it, then as not marked at all.
    NoSync no_sync() {
        check_usable("no_sync");
        if (gradients_.pooled())
            throw_here(Errc::invalid_argument, "no_sync",
                       "pooled gradients do not outlive a backward; reduce each micro-batch with finish(), and add_to_shards()");
        if (step_.launched() != 0)
            throw_here(Errc::invalid_argument, "no_sync", "buckets of this step are in flight already; call finish() first");
        return NoSync(*this);
    }

    /// Forgets the micro-batches that were marked under `no_sync()`, as if they had not been: after an exception, or where a step is
    /// skipped. Gradients that add up in your memory (`Accumulation::in_gradients`) are yours to clear. Local, between steps; all ranks
    /// do alike.
    void discard() {
        check_usable("discard");
        check_between_steps("discard");
        if (unsynchronised_.load(std::memory_order_relaxed) >= one_guard)
            throw_here(Errc::invalid_argument, "discard", "a guard of no_sync() lives; let it go first");
        readiness_.reset();
        gradients_.forget_sums();
    }
    /// Between steps: has a micro-batch been marked under `no_sync()` since the last `finish()`, or may it be, as a guard lives?
    bool accumulates() const noexcept {
        return unsynchronised_.load(std::memory_order_relaxed) >= one_guard || (between_steps() && readiness_.any_used());
    }

    /// Gradient i is final for this backward (at its `uses`-th mark). From any thread. May copy the gradient into its
    /// bucket, start collectives and advance them, as the policies say. Throws Error(gradient_marked_twice) for a mark too many, which ends
    /// the communicator, Error(invalid_argument) for an index that is none or a frozen parameter, and what `finish()` throws where other
    /// ranks have failed.
    void mark_ready(std::size_t i) {
        check_index(i, "mark_ready");
        check_usable("mark_ready");
        switch (readiness_.mark(i)) {
            case detail::Readiness::Mark::more_to_come: return;
            case detail::Readiness::Mark::too_often: refuse_mark(i);
            case detail::Readiness::Mark::ready: break;
        }
        if constexpr (decoupled)
            if (gathers_.pending(readiness_.bucket_of(i))) refuse_unwaited(i);
        if (gradients_.pooled() && !gradients_.was_asked_for(i)) refuse_unasked(i);
        const unsigned unsynchronised = unsynchronised_.load(std::memory_order_relaxed);
        if (unsynchronised & without_batch) return readiness_.rearm(i);
        const bool synchronises = unsynchronised == 0;
        const bool copies = synchronises ? gradients_.is_copied(i) : options_.accumulation == Accumulation::in_buckets;
        // Before it is copied twice; where that adds it twice, not even by two threads that mark it at the same moment.
        if (copies && !readiness_.claim(i, options_.accumulation == Accumulation::in_buckets)) refuse_mark(i);
        if (!synchronises) {
            readiness_.used()[i] = 1;
            if (copies) gradients_.add_up(i);
            return readiness_.rearm(i);
        }
        const std::size_t bytes = gradients_.parameter(i).gradient.bytes();
        if (copies) {
            if (bytes < worth_timing) {
                gradients_.deposit(i);
            } else {
                const auto held = step_.watch().hold(Activity::copy, i);
                gradients_.deposit(i);
            }
        }
        if (marks_watched_) watch_mark(i);
        readiness_.used()[i] = 1;  // before it is filled in: a step that is full may end
        const auto filled = readiness_.fill(i);
        if (filled == detail::Readiness::Fill::too_often) refuse_mark(i);
        if (step_.is_single_rank()) return;  // nothing travels; what is to be scaled is scaled in finish()
        const bool full = filled == detail::Readiness::Fill::bucket_full;
        // Marks that come at once may count as one here: a lost update costs nothing but a later poll.
        const std::size_t unpolled = unpolled_bytes_.load(std::memory_order_relaxed) + bytes;
        const bool poll = full || unpolled >= worth_polling;
        unpolled_bytes_.store(poll ? 0 : unpolled, std::memory_order_relaxed);
        if (!poll) return;
        guard([&] {
            if (full) overlap_.bucket_full(hook_);
            overlap_.gradients_ready(hook_);
        });
    }

    /// Returns when every gradient holds the average over the ranks, or throws: Errc::gradient_not_ready, naming the
    /// parameters, if some were not marked; whatever the backend throws. Collective.
    void finish() {
        check_usable("finish");
        check_gathered("finish");
        auto held = step_.watch().hold(Activity::finish);
        guard([&] {
            close_step();
            const auto lock = step_.exclusive();
            complete_step(held);
        });
    }

    /// As `finish()`, but never blocks: false while gradients are not marked or collectives not complete; true when
    /// it has done all that `finish()` does. To be called again until then. Collective, as a whole. With
    /// UnusedParameters::find_unused the first call ends the backward: what is not marked by then counts as unused.
    /// A gradient that was marked under an earlier `no_sync()` only is for `finish()`: here it counts as not marked yet.
    /// Who calls it again and again meets the backend's time limit, once something is in flight (of a pause between two calls a second
    /// counts at most, or a sixteenth of the limit).
    bool try_finish() {
        check_usable("try_finish");
        if (step_.has_batch() && options_.unused == UnusedParameters::error && !all_ready()) {
            guard([&] {
                step_.try_test();
                if constexpr (requires { backend_.failed(); })
                    if (backend_.failed()) backend_.barrier().wait();  // throws why
            });
            return false;
        }
        check_gathered("try_finish");
        const auto begin = step_.watch().now();
        bool complete = false;
        guard([&] {
            close_step();
            const auto lock = step_.exclusive();
            step_.test();
            complete = !step_.in_flight() && used_map_work_.test();
            if (!complete) return step_.watch().add(begin, step_.watch().now());
            auto held = step_.watch().hold_since(begin, Activity::finish);
            complete_step(held);
        });
        return complete;
    }

    // ----------------------------------------------------------------------------------------------- after `finish()`

    /// With `OverlapForward`: returns when gradient i holds the average; before its parameter is stepped and used. With other
    /// policies it does already. Collectives are not started here: the ranks may call it in any order.
    void wait_gradient(std::size_t i) {
        check_index(i, "wait_gradient");
        check_usable("wait_gradient");
        if constexpr (decoupled)
            if (gradients_.parameter(i).requires_grad) land_gather(readiness_.bucket_of(i), "wait_gradient");
    }

    /// With `OverlapForward`: the same for all gradients; before a validation, a checkpoint, and at the end.
    void flush() {
        check_usable("flush");
        if constexpr (decoupled)
            for (std::size_t b = plan().size(); gathers_.pending() != 0 && b-- > 0;) land_gather(b, "flush");
    }

    /// Where gradient i lives. With GradientStorage::in_buckets, memory of the Reducer's, zero at first, valid until
    /// `rebuild_buckets` returns true. With GradientStorage::pooled, memory that holds anything at first and is valid until the last
    /// gradient of its bucket is marked: to be asked for in each backward, in the order in which gradients become ready. That may wait
    /// for buckets that are in flight, and throws what `finish()` throws; from any thread, while others mark.
    BufferView gradient_view(std::size_t i) {
        check_index(i, "gradient_view");
        check_usable("gradient_view");
        if (gradients_.pooled() && gradients_.parameter(i).requires_grad) {
            obtain(readiness_.bucket_of(i), "gradient_view");
            gradients_.ask_for(i);
        }
        return gradients_.gradient(i);
    }

    /// The same with its type; T must be the gradient's.
    template <Element T>
    std::span<T> gradient(std::size_t i) {
        const BufferView view = gradient_view(i);
        if (view.dtype != dtype_of<T>)
            throw Error(Errc::invalid_argument,
                        "gradient '" + gradients_.parameter(i).name + "' holds " + std::string(name_of(view.dtype)) + ", not " +
                            std::string(name_of(dtype_of<T>)),
                        {.operation = "gradient", .rank = backend_.rank(), .parameter = gradients_.parameter(i).name});
        return {static_cast<T*>(view.data), view.count};
    }

    /// Where the exchange scatters: this rank's part (`shard_range`) of bucket b's averages, gaps between parameters included. Pooled
    /// ones lie in memory of their own, in the accumulator's type.
    BufferView gradient_shard(std::size_t b) const noexcept
        requires(Exchange::traits.scatters)
    {
        return gradients_.shard(b);
    }
    /// Pooled gradients: do shards of steps that come add to those that are there, as those of further micro-batches?
    void add_to_shards(bool adds) noexcept { gradients_.add_to_shards(adds); }
    /// Did any rank use parameter i in the last step, or the micro-batches that were added up? (UnusedParameters::find_unused; otherwise all are
    /// used.)
    bool was_used(std::size_t i) const {
        check_index(i, "was_used");
        return used_.empty() || used_[i] != 0;
    }
    /// Where parameter i lies in its bucket, and how long buckets are, in elements.
    const detail::BucketLayout& layout() const noexcept { return gradients_.layout(); }
    std::span<const ParameterInfo> infos() const noexcept { return gradients_.infos(); }
    /// For what goes with this Reducer: what its collectives of bucket b are for.
    CollectiveTag tag(std::size_t b) const noexcept { return step_.tag(b); }
    /// For what goes with this Reducer, and is to count in its statistics.
    detail::Watch<B>& watch() noexcept { return step_.watch(); }
    std::size_t bytes() const noexcept { return gradients_.bytes(); }  ///< of gradient memory that is the Reducer's

    /// The L2 norm of all gradients together, in double: the same bits on every rank and for every policy (but for OverlapForward with
    /// a wider `reduce_dtype`, where averages that nobody has waited for are not rounded yet). Each rank reads only its share. The first
    /// call takes memory: 8 bytes for 1,024 elements, and 8 KiB for each place where a bucket is cut into shards. Collective, after
    /// `finish()`.
    double gradient_norm() {
        check_usable("gradient_norm");
        check_between_steps("gradient_norm");
        return guard([&] {
            if (norm_ == std::nullopt) prepare_norm();
            return norm_->compute(backend_, [&](std::size_t i, std::size_t first, std::size_t count, [[maybe_unused]] std::size_t b,
                                                [[maybe_unused]] std::size_t offset) {
                if constexpr (Exchange::traits.scatters) return gradients_.shard(b).subview(offset, count);
                if constexpr (decoupled)
                    if (gathers_.pending(b)) return gradients_.shard(b).subview(offset, count);
                return gradients_.gradient(i).subview(first, count);
            });
        });
    }

    /// What to multiply gradients by so that their norm is at most `max_norm`: for optimizers that take a factor and
    /// save the pass. 1 where nothing is to be done; not finite where the norm is not.
    static double clip_factor(double norm, double max_norm) noexcept {
        if (norm <= max_norm) return 1;
        return detail::is_finite(norm) ? max_norm / norm : std::numeric_limits<double>::quiet_NaN();
    }

    /// Scales all gradients down to a global norm of at most `max_norm`; returns the norm before. Collective.
    double clip_gradients_by_norm(double max_norm)
        requires(!Exchange::traits.scatters)
    {
        check_limit(max_norm, "clip_gradients_by_norm");
        const double norm = gradient_norm();
        if (const double factor = clip_factor(norm, max_norm); factor != 1)
            for_gradients([&](BufferView gradient) { detail::passes_of(backend_).scale(gradient, factor); });
        return norm;
    }

    /// Clamps every element to [-limit, limit]. Local.
    void clip_gradients_by_value(double limit)
        requires(!Exchange::traits.scatters)
    {
        check_usable("clip_gradients_by_value");
        check_between_steps("clip_gradients_by_value");
        check_limit(limit, "clip_gradients_by_value");
        for_gradients([&](BufferView gradient) { detail::passes_of(backend_).clamp(gradient, limit); });
    }

    // --------------------------------------------------------------------------------------------------- bookkeeping

    /// Plans the buckets anew from the order in which gradients became ready in rank 0's first step (or in the steps
    /// after `record_order()`). A policy that plans by times (TimedBucketPolicy: OptimalBuckets) gets those at which gradients
    /// became ready, the latest of all ranks, and their order; where nothing was recorded yet, it plans as before. Values are kept,
    /// accumulated ones too; for a moment there are both the old and the new buckets. True if the plan changed:
    /// then views from `gradient_view` are to be asked for again. Between steps. Collective.
    bool rebuild_buckets() {
        check_usable("rebuild_buckets");
        check_between_steps("rebuild_buckets");
        flush();
        return guard([&] {
            const std::vector<std::uint64_t> order = ready_order_.agree(backend_, gradients_.order());
            if (!ready_order_.seconds().empty()) gradients_.set_ready_seconds(ready_order_.seconds());
            if (!gradients_.reorder(backend_, order)) return false;
            readiness_.set_plan(plan());
            adopt_plan();
            return true;
        });
    }

    /// Records the order in which gradients become ready in the next steps, of which the last one counts, and when they do, of
    /// which the mean counts; for `rebuild_buckets`.
    void record_order(unsigned steps = 1) {
        check_usable("record_order");
        ready_order_.start(steps, size());
        watch_marks();
    }

    /// When gradients become ready, as the ranks have agreed in `rebuild_buckets`: by parameter, in seconds; empty before.
    std::span<const double> ready_seconds() const noexcept { return {ready_order_.seconds().data(), ready_order_.seconds().size()}; }

    /// Gradient i of borrowed ones lives elsewhere from now on: same count, same type. Between steps.
    void rebind_gradient(std::size_t i, BufferView gradient) {
        check_index(i, "rebind_gradient");
        check_usable("rebind_gradient");
        check_between_steps("rebind_gradient");
        const BufferView own = gradients_.parameter(i).gradient;
        if (options_.gradients != GradientStorage::borrowed || gradient.count != own.count || gradient.dtype != own.dtype ||
            gradient.space != own.space || gradient.data == nullptr)
            throw_here(Errc::invalid_argument, "rebind_gradient",
                       "the new memory of '" + name(i) + "' must be a borrowed gradient of the same count, type and space", name(i));
        gradients_.rebind(i, readiness_.bucket_of(i), gradient);
    }

    /// Is no gradient marked since the last `finish()`, but under `no_sync()`?
    bool between_steps() const noexcept { return readiness_.untouched(); }
    const Statistics& statistics() const noexcept { return statistics_; }
    const BucketPlan& plan() const noexcept { return gradients_.plan(); }
    const B& backend() const noexcept { return backend_; }
    /// What the buckets are exchanged by: for its state, between steps. (With OverlapForward it has none.)
    Exchange& exchange() noexcept
        requires(!decoupled)
    {
        return step_.exchange();
    }
    std::size_t size() const noexcept { return gradients_.parameters().size(); }  ///< parameters, frozen ones too
    const ParameterView& parameter(std::size_t i) const {
        check_index(i, "parameter");
        return gradients_.parameter(i);
    }

private:
    /// The engine as the overlap policy sees it. What happens in hooks counts as exposed, what a thread of the
    /// policy's does in the background does not.
    template <bool in_hook>
    struct Engine {
        Reducer& reducer;
        void launch_full_buckets() { reducer.step_.launch_full_buckets(in_hook); }
        bool in_flight() const noexcept { return reducer.step_.in_flight(); }
        void poll() { reducer.step_.poll(in_hook); }
        bool wants_thread() const noexcept { return detail::wants_progress_thread(reducer.backend_); }
    };

    // ---------------------------------------------------------------------------------------------------- a step

    /// Before anything is made: a rank that is refused here may try again.
    const ReducerOptions& checked(const ReducerOptions& options) const {
        if (options.gradients == GradientStorage::pooled && !Exchange::traits.scatters)
            throw_here(Errc::invalid_argument, "Reducer",
                       "GradientStorage::pooled is for gradients that are reduced to shards (ReduceScatter); use in_buckets");
        return options;
    }

    /// What follows from the plan, when it is made and when it changes.
    void adopt_plan() {
        step_.adopt_plan();
        statistics_.buckets.assign(plan().size(), {});
        if constexpr (decoupled) gathers_.resize(plan().size());
        norm_.reset();
    }

    /// Not before a norm is asked for: where gradients are sharded over many ranks, it takes memory.
    void prepare_norm() {
        const std::vector<std::size_t> counts = detail::norm_counts(gradients_.parameters());
        if constexpr (scatters) {
            std::vector<std::vector<detail::ShardSlice>> slices;
            for (int r = 0; r < backend_.size(); ++r)
                slices.push_back(detail::shard_slices(plan(), gradients_.layout(), gradients_.infos(), backend_.size(), r));
            norm_.emplace(counts, slices, backend_.rank());
        } else {
            norm_.emplace(counts, backend_.size(), backend_.rank());
        }
    }

    /// With OverlapForward the other half of AllReduce is the gathers'.
    static auto exchange_of_step([[maybe_unused]] const Exchange& exchange) {
        if constexpr (decoupled) return ReduceScatter{};
        else return exchange;
    }

    void set_has_batch(bool has_batch) noexcept {
        step_.set_has_batch(has_batch);
        if (has_batch) unsynchronised_ &= ~without_batch;
        else unsynchronised_ |= without_batch;
    }

    /// A guard goes. With the last one, and where an exception ends the micro-batch, what is left of its marks does not count for the next.
    void end_no_sync(bool unwinds) noexcept {
        const bool last = (unsynchronised_ -= one_guard) < one_guard;
        if (!(last || unwinds) || failure_.failed()) return;
        try {
            guard([&] {
                for (std::size_t i : gradients_.order()) {
                    const std::uint32_t remaining = readiness_.remaining(i);
                    if (remaining == 0 || remaining == readiness_.uses(i)) continue;
                    readiness_.rearm(i);
                    if (unwinds || !step_.has_batch()) continue;
                    readiness_.used()[i] = 1;
                    if (options_.accumulation == Accumulation::in_buckets) gradients_.add_up(i);
                }
            });
        } catch (...) {  // every later call says so
        }
    }

    bool all_ready() const noexcept {
        for (std::size_t b = step_.launched(); b < plan().size(); ++b)
            if (!readiness_.full(b)) return false;
        return true;
    }

    void land_gather([[maybe_unused]] std::size_t b, [[maybe_unused]] const char* operation) {
        if constexpr (decoupled) {
            if (!gathers_.pending(b)) return guard([&] { gathers_.poll(); });
            const auto held = step_.watch().hold(Activity::wait, b);
            guard([&] { gathers_.wait(b); });
            check_usable(operation);
            gradients_.hand_out(b, [](std::size_t) { return true; });
        }
    }

    /// All marks are in, or never will be: settles the gradients that are not ready and launches what is left.
    void close_step() {
        if (closed_) return;
        if (!step_.has_batch()) settle_all();
        else if (!all_ready()) settle_unready();
        step_.launch_full_buckets(false);
        if (options_.unused == UnusedParameters::find_unused && backend_.size() > 1) {
            if (!step_.has_batch()) readiness_.forget_used();
            used_map_work_ = detail::host_of(backend_).all_reduce(buffer(readiness_.used()), ReduceOp::max);
        }
        closed_ = true;
    }

    /// Without a batch: what this rank's gradients hold does not matter, but may have to be put back.
    void settle_all() {
        if (options_.unused == UnusedParameters::find_unused)
            for (std::size_t i : gradients_.order()) gradients_.keep(i);
        for (std::size_t b = step_.launched(); b < plan().size(); ++b) {
            if (gradients_.pooled()) obtain(b, "finish");
            readiness_.fill_all(b, plan().bucket(b));
        }
    }

    /// Pooled gradients: memory for bucket b, when those that are in flight have to make room for it.
    void obtain(std::size_t b, const char* operation) {
        check_usable(operation);
        guard([&] {
            while (!gradients_.obtain(b)) {
                step_.launch_full_buckets(true);
                if (step_.complete_one()) continue;
                // All slots are being filled, by several threads or in another order than expected.
                if (gradients_.obtain(b, true)) return;
                fail(Errc::invalid_argument, operation,
                     "there is no memory for bucket " + std::to_string(b) +
                         ": too many others wait for marks; ask for gradients in the order in which they become ready",
                     name(plan().bucket(b).front()), static_cast<std::ptrdiff_t>(b));
            }
        });
    }

    void settle_unready() {
        std::vector<std::size_t> missing;
        for (std::size_t i : gradients_.order()) {
            const std::uint32_t remaining = readiness_.remaining(i);
            if (remaining == 0) continue;
            const bool partly_marked = remaining != readiness_.uses(i);
            if (readiness_.used()[i] && !partly_marked) {  // its gradient is that of earlier micro-batches
                if (gradients_.holds_sum(i)) gradients_.deposit_sum(i);
                else if (gradients_.is_copied(i)) gradients_.deposit(i);
            } else if (options_.unused == UnusedParameters::error) {
                missing.push_back(i);
                continue;
            } else if (partly_marked) {
                readiness_.used()[i] = 1;
                if (gradients_.is_copied(i)) gradients_.deposit(i);
            } else {
                if (gradients_.pooled()) obtain(readiness_.bucket_of(i), "finish");
                gradients_.keep(i);
                gradients_.clear(i);
            }
            readiness_.settle(i);
        }
        if (!missing.empty()) report_missing(missing);
    }

    // ------------------------------------------------------------------------------------------- watching marks

    /// Most steps are neither recorded nor observed: one flag says so to every mark.
    void watch_marks() noexcept { marks_watched_ = ready_order_.recording() || options_.observer != nullptr; }
    void watch_mark(std::size_t i) {
        if (ready_order_.recording()) ready_order_.record(i, backend_);
        step_.watch().ready(i);
    }

    // ------------------------------------------------------------------------------------------ the end of a step

    /// Waits for the collectives, hands out the results, and prepares the next step.
    void complete_step(typename detail::Watch<B>::Span& held) {
        const bool agree = options_.unused == UnusedParameters::find_unused;
        for (std::size_t b = 0; b < plan().size(); ++b) {
            step_.complete(b);
            if (!agree && !scatters) gradients_.hand_out(b, [](std::size_t) { return true; });
        }
        if constexpr (decoupled) step_.start_gathers(gathers_);
        if (agree) {
            used_map_work_.wait();
            if (Exchange::traits.scatters) {
                if (!gradients_.adds_to_shards()) used_.assign(used_.size(), 0);
                used_.resize(size());
                for (std::size_t i = 0; i < size(); ++i) used_[i] |= readiness_.used()[i];
            } else {
                if constexpr (decoupled)  // what is put back must come after what is gathered
                    for (std::size_t b = plan().size(); b-- > 0;) gathers_.wait(b);
                for (std::size_t b = 0; b < plan().size(); ++b)
                    gradients_.hand_out(b, [&](std::size_t i) { return readiness_.used()[i] != 0; });
                gradients_.restore([&](std::size_t i) { return readiness_.used()[i] == 0; });
            }
        }
        held.end();
        statistics_.last = step_.take_statistics(statistics_.buckets);
        if (decoupled && backend_.size() > 1) {  // the other halves are on their way
            for (std::size_t b = 0; b < plan().size(); ++b) statistics_.last.bytes += gradients_.bucket(b).bytes();
            statistics_.last.collectives += plan().size();
        }
        statistics_.total += statistics_.last;
        ++statistics_.steps;
        readiness_.reset();
        gradients_.forget_sums();
        if (ready_order_.recording()) {
            ready_order_.end_step();
            watch_marks();
        }
        set_has_batch(true);
        closed_ = false;
    }

    template <class Use>
    void for_gradients(Use&& use) {
        flush();
        for (std::size_t i : gradients_.order())
            if (const BufferView view = gradient_view(i); is_floating(view.dtype)) use(view);
    }

    // ---------------------------------------------------------------------------------------------------- errors

    [[noreturn]] void throw_here(Errc code, const char* operation, const std::string& what, std::string parameter = {},
                                 std::ptrdiff_t bucket = -1) const {
        throw Error(code, std::string(operation) + " on rank " + std::to_string(backend_.rank()) + ": " + what,
                    {.operation = operation, .rank = backend_.rank(), .bucket = bucket, .parameter = std::move(parameter)});
    }

    /// The same where gradients are lost by it: no rank may go on.
    [[noreturn]] void fail(Errc code, const char* operation, const std::string& what, std::string parameter, std::ptrdiff_t bucket) {
        failure_.remember(what, code);
        backend_.fail(what);
        throw_here(code, operation, what, std::move(parameter), bucket);
    }

    template <class F>
    decltype(auto) guard(F&& f) {
        return failure_.guard(backend_, f);
    }

    const std::string& name(std::size_t i) const noexcept { return gradients_.parameter(i).name; }

    void check_index(std::size_t i, const char* operation) const {
        if (i >= size()) refuse_index(i, operation);
    }

    /// No gradient was marked since the last `finish()`, but under `no_sync()`.
    void check_between_steps(const char* operation) const {
        if (!readiness_.untouched())
            throw_here(Errc::invalid_argument, operation, "gradients of this step are marked ready already; call finish() first");
    }

    /// With OverlapForward: what nobody has waited for would be lost.
    void check_gathered([[maybe_unused]] const char* operation) const {
        if constexpr (decoupled)
            if (!closed_ && gathers_.pending() != 0)
                throw_here(Errc::invalid_argument, operation,
                           "averages of the last step were not waited for; call wait_gradient(i) before parameter i is used, or flush()");
    }

    void check_limit(double limit, const char* operation) const {
        if (!(limit >= 0)) throw_here(Errc::invalid_argument, operation, "a limit must be 0 or more, not " + std::to_string(limit));
    }

    void check_usable(const char* operation) const {
        if (failure_.failed()) refuse_use(operation);
    }

    // What is refused in hooks says so elsewhere: a mark takes nanoseconds, and texts in it keep the compiler from inlining the rest.

    [[noreturn]] void refuse_index(std::size_t i, const char* operation) const {
        throw_here(Errc::invalid_argument, operation, "there is no parameter " + std::to_string(i) + " among " + std::to_string(size()));
    }

    [[noreturn]] void refuse_use(const char* operation) const {
        throw_here(failure_.code(), operation, "this Reducer failed earlier and cannot go on: " + failure_.what());
    }

    [[noreturn]] void refuse_unwaited(std::size_t i) {
        fail(Errc::invalid_argument, "mark_ready",
             "the average of the last step was not waited for; call wait_gradient(i) before a parameter is used, or flush()", name(i),
             static_cast<std::ptrdiff_t>(readiness_.bucket_of(i)));
    }

    [[noreturn]] void refuse_unasked(std::size_t i) {
        fail(Errc::invalid_argument, "mark_ready",
             "the memory of '" + name(i) + "' was not asked for in this backward; call gradient_view(i) before its gradient is written",
             name(i), static_cast<std::ptrdiff_t>(readiness_.bucket_of(i)));
    }

    [[noreturn]] void refuse_mark(std::size_t i) {
        const ParameterView& p = gradients_.parameter(i);
        const std::size_t bucket = readiness_.bucket_of(i);
        const std::string what = detail::marked_too_often(p, bucket);
        if (!p.requires_grad) throw_here(Errc::invalid_argument, "mark_ready", what, p.name);
        fail(Errc::gradient_marked_twice, "mark_ready", what, p.name, static_cast<std::ptrdiff_t>(bucket));
    }

    [[noreturn]] void report_missing(const std::vector<std::size_t>& missing) {
        fail(Errc::gradient_not_ready, "finish", detail::not_ready(missing, gradients_.order().size(), gradients_.parameters(), readiness_),
             name(missing.front()), static_cast<std::ptrdiff_t>(readiness_.bucket_of(missing.front())));
    }

    B backend_;
    ReducerOptions options_;
    detail::GradientBuckets<B, Buckets> gradients_;
    detail::Readiness readiness_;
    Step step_;
    detail::ReadyOrder<timed> ready_order_;
    std::optional<detail::GradientNorm> norm_;
    std::conditional_t<decoupled, detail::DeferredGather<B>, detail::NoGather> gathers_;
    std::vector<std::uint8_t> used_;  ///< by parameter, of the last step; where gradients are scattered and their use is agreed on
    typename detail::HostOf<B>::WorkType used_map_work_;
    Statistics statistics_;

    static constexpr unsigned without_batch = 1, one_guard = 2;
    std::atomic<unsigned> unsynchronised_{0};     ///< why marks synchronise nothing: guards of `no_sync()`, and a step without a batch
    bool closed_ = false;                         ///< all marks of this step are settled
    bool marks_watched_ = false;                  ///< they are recorded, or observed
    std::atomic<std::size_t> unpolled_bytes_{0};  ///< of gradients that were marked since the policy was last told
    detail::FailureLatch failure_;
    int exceptions_ = std::uncaught_exceptions();

    Engine<true> hook_{*this};
    Engine<false> background_{*this};
    Overlap overlap_;
};

template <class B, class Range>
Reducer(B, Range&&) -> Reducer<B>;
template <class B, class Range>
Reducer(B, Range&&, ReducerOptions) -> Reducer<B>;
template <class B, class Range, class Buckets>
Reducer(B, Range&&, ReducerOptions, Buckets) -> Reducer<B, Buckets>;
template <class B, class Range, class Buckets, class Overlap>
Reducer(B, Range&&, ReducerOptions, Buckets, Overlap) -> Reducer<B, Buckets, Overlap>;

}  // namespace gradsync::inline v0_2
