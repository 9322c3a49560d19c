// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "bucket/size_capped.hpp"
#include "core/requirements.hpp"
#include "engine/arguments.hpp"
#include "engine/gradient_engine.hpp"
#include "engine/options.hpp"
#include "overlap/overlap_backward.hpp"

namespace gradsync::inline v0_2 {

/// What `finish()` returns with OverlapForward: the averages of a step, which arrive under the next forward. Until `acquire(i)` returns,
/// gradient i must be neither read nor written; where averages are copied to memory of yours, its first element is a NaN. Declare it after
/// the Reducer:
///
///     gs::PendingAverages<Comm> averages;
///     for (...) {
///         for (layer i, first to last) { if (averages) step(i, averages.acquire(i)); forward(i); }
///         backward(...);
///         averages = sync.finish();
///     }
///     averages.wait();  // and step
///
/// The destructor waits for averages that were not acquired, unless an exception is propagating. So a result that is dropped costs the
/// overlap, and nothing else. The Reducer must outlive this object. For one thread at a time.
template <class B>
class [[nodiscard(
    "gradsync: the averages arrive later; keep what finish() returns, and call acquire(i) before parameter i is stepped")]] PendingAverages {
public:
    /// The averages of no step.
    PendingAverages() = default;
    explicit PendingAverages(detail::GradientEngine<B>& engine) noexcept : engine_(&engine), step_(engine.statistics().steps) {}
    PendingAverages(PendingAverages&& other) noexcept : engine_(std::exchange(other.engine_, nullptr)), step_(other.step_) {}
    PendingAverages& operator=(PendingAverages other) noexcept {  // `other` then waits for what this had
        std::swap(engine_, other.engine_);
        std::swap(step_, other.step_);
        return *this;
    }
    ~PendingAverages() {
        if (engine_ == nullptr || std::uncaught_exceptions() != exceptions_) return;
        try {
            engine_->acquire_all(step_);
        } catch (...) {  // every later call reports the failure
        }
    }

    /// False for the averages of no step.
    explicit operator bool() const noexcept { return engine_ != nullptr; }

    /// Returns gradient i once it holds the average: step parameter i then, and use it. Starts no collectives: each rank may call it in an
    /// order of its own. Throws Error(invalid_argument) after another `finish()`, and what a wait throws.
    BufferView acquire(std::size_t i) {
        if (engine_ == nullptr) detail::refuse("acquire", "these are the averages of no step; call finish() first");
        return engine_->acquire_average(i, step_);
    }
    /// Returns when all gradients hold their averages. Call it before a validation, a checkpoint, and at the end.
    void wait() {
        if (engine_ != nullptr) engine_->acquire_all(step_);
    }

private:
    detail::GradientEngine<B>* engine_ = nullptr;
    std::uint64_t step_ = 0;
    int exceptions_ = std::uncaught_exceptions();
};

/// Keeps the gradients of data-parallel ranks in step: mark each gradient when it is ready, then call `finish()`, and every rank holds
/// the mean. Buckets are planned once and leave in the plan's order; nothing half-reduced ever reaches an optimizer.
///
///     gs::Reducer sync(comm, model.parameters());
///     sync.broadcast_parameters();
///     for (...) {
///         model.backward(batch, [&](std::size_t i) { sync.mark_ready(i); });
///         sync.finish();
///         model.step();
///     }
///
/// Collective functions are called by all ranks in the same order: construction, `broadcast_*`, `begin_step`, `finish`, `try_finish`,
/// `gradient_norm`, `clip_gradients_by_norm`, `rebuild_buckets`.
///
/// Threads: any thread may call `mark_ready`. Call everything else from one thread at a time, while no marks are under way.
///
/// Errors: a call that is refused before anything has happened (a bad argument, the wrong time) changes nothing. After any other exception
/// the Reducer and its communicator are unusable; every later call throws the first error's code.
///
/// Ownership: the trainer's parameters and gradients outlive the Reducer. It neither moves nor copies.
template <class B, class Buckets = SizeCappedBuckets, class Overlap = OverlapBackward, class Exchange = AllReduce>
class Reducer {
    static_assert(require_backend<B>() && require_bucket_policy<Buckets>() && require_overlap_policy<Overlap>() &&
                  require_exchange<Exchange, B>());

    static_assert(std::is_same_v<Exchange, AllReduce> || ExchangeOver<Exchange, B>::traits.scatters ||
                      !detail::gathers_in_forward<Overlap>(),
                  "gradsync: OverlapForward splits AllReduce in two halves, and no other exchange; use OverlapBackward with this one");

    static constexpr bool forward = detail::gathers_in_forward<Overlap>();

public:
    /// `parameters`: a range of anything that is a `Parameter`, in the order in which the forward uses them; their gradients are expected
    /// to become ready in the reverse order. After it come the options (`ReducerOptions`), a bucket policy, an overlap policy and an
    /// exchange, in any order and each at most once; what is not given is the default:
    ///
    ///     gs::Reducer sync(comm, model.parameters(), gs::OverlapForward{}, gs::Flat{});
    ///     gs::Reducer sync(comm, model.parameters(), {.unused = gs::UnusedParameters::find_unused}, gs::PowerSgd{.rank = 2});
    ///
    /// Collective. Throws Error(parameter_mismatch), with the same text on every rank, if parameters, policies or options differ.
    template <class Range = std::initializer_list<ParameterView>, class First = ReducerOptions, class... More>
    Reducer(const B& backend, Range&& parameters, First first = {}, More... more)
        : engine_(backend, "this Reducer", detail::view_parameters<B::memory_space>(parameters),
                  detail::choose<ReducerOptions, detail::Role::other, B>(first, more...),
                  detail::make_policies<B>(detail::choose<Buckets, detail::Role::buckets, B>(first, more...),
                                           detail::choose<Overlap, detail::Role::overlap, B>(first, more...),
                                           detail::choose<Exchange, detail::Role::exchange, B>(first, more...))) {
        static_assert(detail::Accepts<B, ReducerOptions, detail::Role::buckets, detail::Role::overlap,
                                      detail::Role::exchange>::template check<First, More...>());
    }

    // ------------------------------------------------------------------------------------------ before the first step

    /// Gives every rank the root's weights, those of frozen parameters too. Collective.
    void broadcast_parameters(int root = 0) { engine_.broadcast_parameters(root); }
    /// Gives every rank the root's contents of these buffers: state that has no gradient. Collective.
    void broadcast_buffers(std::span<const BufferView> buffers, int root = 0) { engine_.broadcast_buffers(buffers, root); }

    // -------------------------------------------------------------------------------------------------------- a step

    /// For uneven inputs: says whether this rank has a batch for the next step, and returns whether any rank has one.
    ///
    ///     while (sync.begin_step(batch.has_value())) { if (batch) backward(...); sync.finish(); step(); }
    ///
    /// A rank without a batch skips its backward but calls `finish()`: it contributes nothing and gets the gradients, so its weights stay
    /// in step. Gradients that it marks anyway are not used, nor are those of its micro-batches under `no_sync()`. With OverlapForward it
    /// waits for the averages of the last step, and steps, before `finish()`. Collective.
    [[nodiscard]] bool begin_step(bool has_batch = true) { return engine_.begin_step(has_batch); }

    /// This rank's weight in this step's `Averaging::weighted_mean` or `mean_over_count`: a number of samples, tokens or micro-batches; 0,
    /// or from 1.2e-38 to 3.4e38. Each step of a rank with a batch needs one, before its first gradient is marked (but those under
    /// `no_sync()`); otherwise the step ends in Error(invalid_argument). Local.
    void set_weight(double weight) { engine_.set_weight(weight); }

    /// While the guard lives, marks synchronise nothing: gradients of micro-batches add up (see Accumulation). Guards nest. An exception
    /// that passes through ends the guard; what was marked by then counts, unless `discard()` forgets it. Each mark of a gradient counts
    /// as the next micro-batch's; extra marks are detected only if the options count micro-batches. Then the end of the last guard ends one
    /// (or as many as were marked), and Error(invalid_argument) is thrown for the step's last one, which needs no guard. A gradient of several uses that got fewer marks counts as complete
    /// when the last guard goes, or as not marked at all if an exception ended it.
    [[nodiscard]] NoSync no_sync() { return engine_.no_sync(); }

    /// Forgets the micro-batches that were marked under `no_sync()`: after an exception, or to skip a step. Gradients that add up in your
    /// memory (`Accumulation::in_gradients`) are yours to clear. Local, between steps; all ranks must do the same.
    void discard() { engine_.discard(); }

    /// Gradient i is final for this backward (at its `uses`-th mark). From any thread. May copy the gradient into its bucket, start
    /// collectives and advance them, as the policies say. Throws Error(gradient_marked_twice) for an extra mark, which ends the
    /// communicator, Error(invalid_argument) for an index out of range or a frozen parameter, and what `finish()` throws if other ranks
    /// have failed.
    GRADSYNC_ALWAYS_INLINE void mark_ready(std::size_t i) { engine_.mark_ready(i); }

    /// The same for a gradient that a framework allocated anew: it lies in `gradient`, with the count, type and space of the old one. A
    /// borrowed gradient stays there until the next such call or `rebind_gradient`, so keep its memory until then. A gradient that lives in
    /// a bucket, or that is one bucket with its neighbours, is copied to its place. Throws what `mark_ready(i)` throws, and
    /// Error(invalid_argument) for another count, type or space.
    void mark_ready(std::size_t i, const BufferView& gradient) { engine_.mark_ready(i, gradient); }

    /// Returns when every gradient holds the average over the ranks, or throws: Errc::gradient_not_ready, naming the parameters, if some
    /// were not marked; Errc::parameter_mismatch if the weights of the ranks differ (see ReducerOptions::compare_weights_every); or
    /// whatever the backend throws. With OverlapForward the averages arrive later, and it returns the PendingAverages. Collective.
    auto finish() {
        engine_.finish();
        if constexpr (forward) return PendingAverages<B>(engine_);
    }

    /// A backward and `finish()`, which cannot be forgotten: calls `run(ready)`, in which `ready(i)` is `mark_ready(i)`, and returns what
    /// `finish()` returns.
    ///
    ///     sync.backward([&](auto ready) { model.backward(batch, ready); });
    template <class Run>
    auto backward(Run&& run) {
        std::forward<Run>(run)([this](std::size_t i) { mark_ready(i); });
        return finish();
    }

    /// Non-blocking variant of `finish()`: false while gradients are not marked or collectives not complete; true when it has done all
    /// that `finish()` does. Call it until then. Repeated calls time out as a wait does, once something is in flight (a pause between two
    /// calls counts for a second at most, or a sixteenth of the limit). With UnusedParameters::find_unused the first call ends the
    /// backward: gradients that are not marked by then count as unused. A gradient that was marked only under an earlier `no_sync()`
    /// counts as not marked. With OverlapForward it returns PendingAverages, which are false as long as it would return false. Collective,
    /// as a whole.
    [[nodiscard]] auto try_finish() {
        const bool finished = engine_.try_finish();
        if constexpr (forward) return finished ? PendingAverages<B>(engine_) : PendingAverages<B>();
        else return finished;
    }

    // ----------------------------------------------------------------------------------------------- after `finish()`

    /// With UnusedParameters::find_unused: did any rank use parameter i in this step? If not, gradient i is no average, and may differ
    /// from rank to rank: do not step the parameter. Always true with UnusedParameters::error.
    bool was_used(std::size_t i) const { return engine_.was_used(i); }

    /// The memory of gradient i. With GradientStorage::in_buckets it is the Reducer's, zero at first, and valid until `rebuild_buckets`
    /// returns true. `gradient_view(i).as<float>()` has its type. Throws Error(invalid_argument) while an average is in flight
    /// (OverlapForward).
    BufferView gradient_view(std::size_t i) const { return engine_.gradient_view(i); }

    /// The L2 norm of all gradients together, in double: the same bits on every rank and for every policy (except OverlapForward with a
    /// wider `reduce_dtype`, where averages that are not waited for are not rounded yet). Each rank reads only its share. The first call
    /// allocates 8 bytes for 1,024 elements. Collective, after `finish()`.
    double gradient_norm() { return engine_.gradient_norm(); }

    /// Scales all gradients down to a global norm of at most `max_norm`; returns the norm before. An optimizer that takes a factor saves
    /// this pass: `clip_factor(sync.gradient_norm(), max_norm)`. `total`: the norm of more gradients than these, where a training has several
    /// Reducers. Leaves gradients as they are if the norm is infinite or NaN. Collective without `total`.
    double clip_gradients_by_norm(double max_norm, std::optional<double> total = {}) {
        return engine_.clip_gradients_by_norm(max_norm, total);
    }
    /// Clamps every element to [-limit, limit]. Local.
    void clip_gradients_by_value(double limit) { engine_.clip_gradients_by_value(limit); }

    // --------------------------------------------------------------------------------------------------- bookkeeping

    /// Plans the buckets anew, from the order in which gradients became ready in rank 0's first step (or in the steps after
    /// `record_order()`). A policy that plans by times (TimedBucketPolicy: OptimalBuckets) gets the latest times of all ranks, and their
    /// order. Values are kept, accumulated ones too; for a moment there are both the old and the new buckets. Returns true if the plan
    /// changed; ask for `gradient_view` again then. Between steps. Collective.
    [[nodiscard]] bool rebuild_buckets() { return engine_.rebuild_buckets(); }
    /// Records in the next steps when gradients become ready, for `rebuild_buckets`: the order of the last one, the mean of the times.
    void record_order(unsigned steps = 1) { engine_.record_order(steps); }

    /// Borrowed gradient i lives elsewhere from now on, with the same count and type. Between steps. Local. Throws Error(invalid_argument) if it
    /// lies in device memory side by side with others, which are a bucket there.
    void rebind_gradient(std::size_t i, BufferView gradient) { engine_.rebind_gradient(i, gradient); }

    const Statistics& statistics() const noexcept { return engine_.statistics(); }
    std::size_t bytes() const noexcept { return engine_.bytes(); }  ///< of gradient memory that is the Reducer's
    const BucketPlan& plan() const noexcept { return engine_.plan(); }
    const B& backend() const noexcept { return engine_.backend(); }
    /// The exchange, for its state, between steps. (OverlapForward has one of its own.)
    ExchangeOver<Exchange, B>& exchange() noexcept
        requires(!detail::gathers_in_forward<Overlap>())
    {
        return static_cast<detail::ExchangeAs<ExchangeOver<Exchange, B>, B>&>(engine_.exchange()).exchange();
    }
    std::span<const ParameterView> parameters() const noexcept { return engine_.parameters(); }  ///< frozen ones too

private:
    detail::GradientEngine<B> engine_;
};

template <class B, class Range = std::initializer_list<ParameterView>, class First = ReducerOptions, class... More>
Reducer(B, Range&&, First = First(), More...) -> Reducer<B, detail::Chosen<detail::Role::buckets, B, SizeCappedBuckets, First, More...>,
                                                         detail::Chosen<detail::Role::overlap, B, OverlapBackward, First, More...>,
                                                         detail::Chosen<detail::Role::exchange, B, AllReduce, First, More...>>;

}  // namespace gradsync::inline v0_2
