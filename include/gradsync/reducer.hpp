// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "bucket/size_capped.hpp"
#include "core/requirements.hpp"
#include "engine/arguments.hpp"
#include "engine/gradient_sync.hpp"
#include "overlap/overlap_backward.hpp"

namespace gradsync::inline v0_2 {

/// The averages of a step with OverlapForward, which arrive during the next forward; `finish()` returns them. Until
/// `acquire(i)` returns, gradient i must be neither read nor written; if averages are copied to your memory, its first
/// element is a NaN until then. Declare it after the Reducer:
///
///     gs::PendingAverages<Comm> averages;
///     for (...) {
///         for (layer i, first to last) { if (averages) step(i, averages.acquire(i)); forward(i); }
///         backward(...);
///         averages = sync.finish();
///     }
///     averages.wait();  // and step
///
/// The destructor waits for averages that were not acquired, unless an exception is propagating: a dropped result costs
/// only the overlap. The Reducer must outlive this object. Use it from one thread at a time.
template <class B>
class [[nodiscard(
    "gradsync: the averages arrive later; keep what finish() returns, and call acquire(i) before parameter i is "
    "stepped")]] PendingAverages {
public:
    /// Makes an empty object, which belongs to no step.
    PendingAverages() = default;
    /// Internal.
    explicit PendingAverages(detail::GradientSync<B>& engine) noexcept
        : engine_(&engine), step_(engine.statistics().steps) {}
    PendingAverages(PendingAverages&& other) noexcept
        : engine_(std::exchange(other.engine_, nullptr)), step_(other.step_) {}
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

    /// Returns false if the object is empty.
    explicit operator bool() const noexcept { return engine_ != nullptr; }

    /// Returns gradient i once it holds the average; then step parameter i. Starts no collectives, so each rank may
    /// call it in its own order. Throws Error(invalid_argument) after another `finish()`, and what a wait throws.
    BufferView acquire(std::size_t i) {
        if (engine_ == nullptr) detail::refuse("acquire", "no averages are pending here; call finish() first");
        return engine_->acquire(i, step_);
    }
    /// Returns when all gradients hold their averages. Call it before a validation, before
    /// a checkpoint, and at the end.
    void wait() {
        if (engine_ != nullptr) engine_->acquire_all(step_);
    }

private:
    detail::GradientSync<B>* engine_ = nullptr;
    std::uint64_t step_ = 0;
    int exceptions_ = std::uncaught_exceptions();
};

namespace detail {

/// The options of a face, for components above it.
struct OptionsOf {
    template <class Face>
    static const ReducerOptions& face(const Face& face) noexcept {
        if constexpr (requires { face.engine_options_; }) return face.engine_options_;
        else return face.engine_.options();
    }
};

}  // namespace detail

/// Averages gradients over data-parallel ranks. Mark each gradient when it is ready, then call `finish()`: every rank
/// then holds the mean. Buckets are planned once and launched in the plan's order.
///
///     gs::Reducer sync(comm, model.parameters());
///     sync.broadcast_parameters();
///     for (...) {
///         model.backward(batch, [&](std::size_t i) { sync.mark_ready(i); });
///         sync.finish();
///         model.step();
///     }
///
/// Collective functions are called by all ranks in the same order: construction, `broadcast_*`, `begin_step`, `finish`,
/// `try_finish`, `gradient_norm`, `clip_gradients_by_norm`, `rebuild_buckets`.
///
/// Threads: any thread may call `mark_ready`. Call everything else from one thread at a time,
/// while no marks are under way.
///
/// Errors: a call that throws before it starts anything (an invalid argument, the wrong time) changes nothing. After
/// any other exception the Reducer and its communicator are unusable; every later call throws the first error's code.
///
/// Ownership: the trainer's parameters and gradients must outlive the Reducer. A Reducer can
/// be neither moved nor copied.
template <class B, class Buckets = SizeCappedBuckets, class Overlap = OverlapBackward, class Exchange = AllReduce>
class Reducer {
    static_assert(require_backend<B>() && require_bucket_policy<Buckets>() && require_overlap_policy<Overlap>() &&
                  require_exchange<Exchange, B>());

    static_assert(!ExchangeOver<Exchange, B>::traits.scatters,
                  "gradsync: a Reducer's averages are whole, and this exchange leaves each rank its shard; use "
                  "AllReduce, a compressor, or ShardedOptimizer");
    static_assert(std::is_same_v<Exchange, AllReduce> || !detail::gathers_in_forward<Overlap>(),
                  "gradsync: OverlapForward splits AllReduce in two halves, and no other exchange; use OverlapBackward "
                  "with this one");

    static constexpr bool forward = detail::gathers_in_forward<Overlap>();

public:
    /// `parameters`: a range of `Parameter` objects, in the order in which the forward uses them; their gradients are
    /// expected to become ready in the reverse order. Then come the options (`ReducerOptions`), a bucket policy, an
    /// overlap policy and an exchange, in any order and each at most once; those that are missing have their defaults:
    ///
    ///     gs::Reducer sync(comm, model.parameters(), gs::OverlapForward{}, gs::Flat{});
    ///     gs::Reducer sync(comm, model.parameters(), {.unused = gs::UnusedParameters::find_unused},
    ///                      gs::PowerSgd{.rank = 2});
    ///
    /// Collective. Throws Error(parameter_mismatch), with the same text on every rank,
    /// if parameters, policies or options differ.
    template <detail::NoBackend Range = std::initializer_list<ParameterView>, class First = ReducerOptions,
              class... More>
    Reducer(const B& backend, Range&& parameters, First first = {}, More... more)
        : guard_(backend, "this Reducer"),
          engine_(guard_, detail::view_parameters<B::memory_space>(std::forward<Range>(parameters)),
                  detail::choose<ReducerOptions, B>(first, more...),
                  detail::make_policies<B>(detail::choose<Buckets, B>(first, more...),
                                           detail::choose<Overlap, B>(first, more...),
                                           detail::choose<Exchange, B>(first, more...))) {
        static_assert(detail::Accepts<B, ReducerOptions, detail::Role::buckets, detail::Role::overlap,
                                      detail::Role::exchange>::template check<First, More...>());
    }
    /// Swapped arguments do not compile.
    template <class Range = std::initializer_list<ParameterView>, std::same_as<B> Self, class... More>
    Reducer(Range&& parameters, const Self& backend, More... more)
        : Reducer(backend, std::forward<Range>(parameters), std::move(more)...) {
        static_assert(detail::never<Self>, "gradsync: the backend comes first: Reducer(comm, parameters, ...)");
    }

    // ------------------------------------------------------------------------------------------- before the first step

    /// Gives every rank the root's weights, frozen parameters included. Collective.
    void broadcast_parameters(int root = 0) { guard_.broadcast_values(parameters(), root); }
    /// Gives every rank the root's contents of these buffers: state without a gradient. Collective.
    void broadcast_buffers(std::span<const BufferView> buffers, int root = 0) {
        guard_.broadcast_buffers(buffers, root);
    }
    void broadcast_buffers(std::initializer_list<BufferView> buffers, int root = 0) {
        guard_.broadcast_buffers({buffers.begin(), buffers.size()}, root);
    }

    // ---------------------------------------------------------------------------------------------------------- a step

    /// For uneven inputs: says whether this rank has a batch for the next step, and returns whether any rank has one.
    ///
    ///     while (sync.begin_step(batch.has_value())) { if (batch) backward(...); sync.finish(); step(); }
    ///
    /// A rank without a batch skips its backward but calls `finish()`: it contributes nothing and gets the averages, so
    /// its weights stay equal to the others'. Gradients that it marks anyway are ignored, also those under `no_sync()`.
    /// With OverlapForward it must wait for the last step's averages, and step, before `finish()`. Collective.
    [[nodiscard]] bool begin_step(bool has_batch = true) { return engine_.begin_step(has_batch); }

    /// Sets this rank's weight for this step, with `Averaging::weighted_mean` or `mean_over_count`: a number of
    /// samples, tokens or micro-batches; 0, or from 1.2e-38 to 3.4e38. A rank with a batch must call it in every step
    /// before it marks a gradient outside of `no_sync()`; otherwise the step throws Error(invalid_argument). Local.
    void set_weight(double weight) { engine_.set_weight(weight); }

    /// Accumulates micro-batches: while the guard lives, marks start no collectives,
    /// and gradients add up (see Accumulation).
    ///
    /// - Guards nest.
    /// - Each mark of a gradient counts as its next micro-batch.
    /// - If an exception ends the guard, gradients that are marked by then count, unless `discard()` forgets them.
    /// - A gradient with several `uses` that got fewer marks counts as complete when the outermost guard ends; if an
    ///   exception ended the guard, it counts as not marked.
    /// - Without ReducerOptions::micro_batches, extra marks are not detected.
    /// - With it, the end of the outermost guard ends one micro-batch, or as many as were marked. The last micro-batch
    ///   of a step needs no guard: `no_sync()` then throws Error(invalid_argument).
    [[nodiscard]] NoSync no_sync() { return engine_.marks().no_sync(); }

    /// Forgets the micro-batches that were marked under `no_sync()`: after an exception, or to skip a step. Gradients
    /// that add up in your memory (`Accumulation::in_gradients`) are yours to clear. What `begin_step` and `set_weight`
    /// said stays. Local, between steps; all ranks must do the same.
    void discard() { engine_.marks().discard(); }

    /// Says that gradient i is final for this backward (at its `uses`-th mark). Thread-safe. May copy the gradient into
    /// its bucket, start collectives and advance them, as the policies say. Throws Error(gradient_marked_twice) for an
    /// extra mark, which ends the communicator, Error(invalid_argument) for an index out of range or a frozen
    /// parameter, and what `finish()` throws if other ranks have failed.
    GRADSYNC_ALWAYS_INLINE void mark_ready(std::size_t i) { engine_.marks().mark_ready(i); }

    /// The same for a gradient that a framework allocated anew: it lies in `gradient`, with the count,
    /// type and space of the old one. A borrowed gradient stays there until the next such call or `rebind_gradient`,
    /// so keep its memory until then. A gradient that lives in a bucket, or in an arena of device memory that is one,
    /// is copied to its place. Throws what `mark_ready(i)` throws, and Error(invalid_argument) for another count,
    /// type or space, or no aligned memory. See `rebind_gradient` for memory that two gradients share.
    void mark_ready(std::size_t i, const BufferView& gradient) { engine_.marks().mark_ready(i, gradient); }

    /// The same for several gradients, such as those of `Packed::layer(l)`.
    void mark_ready(std::span<const std::size_t> which) { engine_.marks().mark_ready(which); }
    void mark_ready(std::initializer_list<std::size_t> which) { mark_ready(std::span(which.begin(), which.size())); }
    /// The same for the parameter with this name; an index is faster, as names are compared one by one.
    void mark_ready(std::string_view name) { engine_.marks().mark_ready(name); }
    /// Marks every gradient that is not ready yet: after a backward that does not say when gradients are ready. It also
    /// marks gradients that the backward did not write, so `finish()` finds none missing or unused. Not while another
    /// thread marks. Throws Error(invalid_argument) if it is called twice in a step and the second call finds nothing
    /// left, because `finish()` was forgotten; and under `no_sync()` with Accumulation::in_buckets, unless
    /// ReducerOptions::micro_batches is set.
    void mark_ready() { engine_.marks().mark_ready(); }

    /// Returns when every gradient holds the average over the ranks, or throws: Errc::gradient_not_ready, naming the
    /// parameters, if some were not marked; Errc::parameter_mismatch if the weights of the ranks differ (see
    /// ReducerOptions::compare_weights_every); or whatever the backend throws. With OverlapForward it returns
    /// PendingAverages, which arrive later. Collective.
    auto finish() {
        engine_.finish();
        if constexpr (forward) return PendingAverages<B>(engine_);
    }

    /// Runs a backward and then `finish()`, so that you cannot forget it. Calls `run(ready)`, where `ready(i)` is
    /// `mark_ready(i)`, also for a name or several indices, and returns what `finish()` returns. If an exception ends
    /// `run`, the step is not finished: mark its other gradients and call `finish()`. Until then the next call throws
    /// Error(invalid_argument).
    ///
    ///     sync.backward([&](auto ready) { model.backward(batch, ready); });
    template <class Run>
    auto backward(Run&& run) {
        if (std::exchange(interrupted_, true) && !engine_.marks().unmarked() && !guard_.failed())
            detail::refuse({"backward", detail::named_rank(backend())}, "rank ", detail::named_rank(backend()),
                           " has not finished the last step, because an exception ended its backward; mark its other "
                           "gradients and call finish(), or let the exception end the training");
        std::forward<Run>(run)(Ready{*this});
        interrupted_ = false;
        return finish();
    }

    /// Non-blocking variant of `finish()`. Call it until it returns true: it has then done all that `finish()` does. It
    /// returns false while gradients are not marked or collectives are not complete.
    ///
    /// - The calls of a step together are one collective call.
    /// - Repeated calls time out as a wait does. A pause between two calls counts at most a second, or a sixteenth of
    ///   the limit if that is less.
    /// - If marks are missing, and no rank waits for them, the calls throw Errc::gradient_not_ready
    ///   after twice the limit.
    /// - With UnusedParameters::find_unused the first call ends the backward: gradients that are not marked by then
    ///   count as unused.
    /// - A gradient that was marked only under an earlier `no_sync()` counts as not marked.
    /// - With OverlapForward it returns PendingAverages, which are empty instead of false.
    [[nodiscard]] auto try_finish() {
        const bool finished = engine_.try_finish();
        if constexpr (forward) return finished ? PendingAverages<B>(engine_) : PendingAverages<B>();
        else return finished;
    }

    // ------------------------------------------------------------------------------------------------ after `finish()`

    /// Returns whether any rank used parameter i in this step (UnusedParameters::find_unused). If none did, gradient i
    /// is not an average and may differ between ranks: do not step the parameter. Always true with
    /// UnusedParameters::error.
    bool was_used(std::size_t i) const { return engine_.was_used(i); }

    /// The memory of gradient i. With GradientStorage::in_buckets it is the Reducer's, zero at first, and valid until
    /// `rebuild_buckets` returns true. `gradient_view(i).as<float>()` has its type. Throws Error(invalid_argument)
    /// while an average is in flight (OverlapForward).
    BufferView gradient_view(std::size_t i) const { return engine_.gradient_view(i); }

    /// The L2 norm of all gradients together, in double: the same bits on every rank and for every policy (except
    /// OverlapForward with a wider `reduce_dtype`, where averages that are not waited for are not rounded yet). Each
    /// rank reads only its share. The first call allocates 8 bytes per 1,024 elements. Collective, after `finish()`:
    /// throws Error(invalid_argument), as clipping does, if gradients are not averaged.
    double gradient_norm() { return engine_.gradient_norm(); }

    /// Scales all gradients down to a global norm of at most `max_norm`; returns the norm before.
    /// An optimizer that takes a factor saves this pass: `clip_factor(sync.gradient_norm(), max_norm)`.
    /// `total`: the norm to clip by, if a training has several Reducers. Leaves gradients as they are if the norm
    /// is infinite or NaN. Collective without `total`.
    double clip_gradients_by_norm(double max_norm, std::optional<double> total = {}) {
        return detail::clip_gradients_by_norm(engine_, guard_, max_norm, total);
    }
    /// Clamps every element to [-limit, limit]. Local, after `finish()`.
    void clip_gradients_by_value(double limit) { detail::clip_gradients_by_value(engine_, guard_, limit); }

    // ----------------------------------------------------------------------------------------------------- bookkeeping

    /// Plans the buckets anew, from the order in which gradients became ready in rank 0's first step
    /// (or in the steps after `record_order()`). A policy that plans by times (TimedBucketPolicy: OptimalBuckets)
    /// gets the latest times of all ranks, and their order. Gradients keep their values, accumulated ones included.
    /// Old and new buckets exist side by side during the call. Returns true if the plan changed;
    /// then call `gradient_view` again. Between steps. Collective.
    [[nodiscard]] bool rebuild_buckets() {
        return engine_.rebuild_buckets([](BufferView) {});
    }
    /// Records when gradients become ready in the next `steps` steps, for `rebuild_buckets`: the order of the last
    /// step, and the mean times.
    void record_order(unsigned steps = 1) { engine_.record_order(steps); }

    /// Makes borrowed gradient i live in other memory from now on, with the same count and type. Between steps.
    /// Local. Throws Error(invalid_argument) if it lies in device memory side by side with others,
    /// with which it forms a bucket. `finish()` throws if two gradients of the step then share memory.
    void rebind_gradient(std::size_t i, BufferView gradient) { engine_.rebind_gradient(i, gradient); }

    const Statistics& statistics() const noexcept { return engine_.statistics(); }  ///< Returns what steps cost so far.
    /// Size of the gradient memory that the Reducer owns.
    std::size_t bytes() const noexcept { return engine_.home().bytes(); }
    const BucketPlan& plan() const noexcept { return engine_.home().planned().plan(); }  ///< Returns the buckets.
    const B& backend() const noexcept { return guard_.backend(); }  ///< Returns this rank's handle.
    /// The exchange, for access to its state between steps. Not with OverlapForward.
    ExchangeOver<Exchange, B>& exchange() noexcept
        requires(!detail::gathers_in_forward<Overlap>())
    {
        return static_cast<detail::ExchangeAs<ExchangeOver<Exchange, B>, B>&>(engine_.in_flight().exchange())
            .exchange();
    }
    /// The parameters, frozen ones too.
    std::span<const ParameterView> parameters() const noexcept { return engine_.home().planned().parameters(); }

private:
    friend struct detail::OptionsOf;

    /// The argument that `backward` passes to `run`.
    struct Ready {
        Reducer& sync;
        GRADSYNC_ALWAYS_INLINE void operator()(std::size_t i) const { sync.mark_ready(i); }
        void operator()(std::string_view name) const { sync.mark_ready(name); }
        void operator()(std::span<const std::size_t> which) const { sync.mark_ready(which); }
        void operator()(std::initializer_list<std::size_t> which) const { sync.mark_ready(which); }
    };

    detail::Guard<B> guard_;
    detail::GradientSync<B> engine_;
    bool interrupted_ = false;  ///< an exception ended the last `backward`
};

template <class Range = std::initializer_list<ParameterView>, Backend B, class... More>
Reducer(Range&&, B, More...)
    -> Reducer<B, detail::Chosen<B, SizeCappedBuckets, More...>, detail::Chosen<B, OverlapBackward, More...>,
               detail::Chosen<B, AllReduce, More...>>;

template <class B, detail::NoBackend Range = std::initializer_list<ParameterView>, class First = ReducerOptions,
          class... More>
Reducer(B, Range&&, First = First(), More...)
    -> Reducer<B, detail::Chosen<B, SizeCappedBuckets, First, More...>,
               detail::Chosen<B, OverlapBackward, First, More...>, detail::Chosen<B, AllReduce, First, More...>>;

}  // namespace gradsync::inline v0_2
