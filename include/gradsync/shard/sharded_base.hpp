// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/requirements.hpp"
#include "step_inside.hpp"
#include "whole_parameters.hpp"

namespace gradsync::inline v0_2::detail {

/// The common part of ShardedOptimizer and ShardedParameters: gradients reduced to shards, the optimizer that steps
/// them, and the state, which moves between ranks only for saving or loading.
///
/// Derived has `name`, `flush()`, which waits for gathers in flight, and `renew_values()`,
/// which distributes new master weights.
template <class Derived, class B, class O, class Buckets, class Overlap, class Exchange>
class ShardedBase {
    static_assert(Backend<B>, "gradsync: the first argument is a backend (ThreadBackend, ...)");
    static_assert(require_optimizer<O, B>());
    static_assert(require_scattering_exchange<Exchange, B>());

public:
    using Optimizer = O;  ///< the optimizer's type
    ShardedBase& operator=(ShardedBase&&) = delete;

    /// See Reducer::begin_step. Collective.
    [[nodiscard]] bool begin_step(bool has_batch = true) {
        check_averages("begin_step");
        if constexpr (ExchangeOver<Exchange, B>::traits.means_only)
            if (!has_batch) guard_.refuse("begin_step", "with hybrid sharding every rank needs a batch");
        if (!has_batch && counts_micro_batches() &&
            micro_batches_ < engine_->home().rounds().deal().count(backend_.rank()))
            guard_.refuse("begin_step",
                          "with micro_batches and sharded gradients every rank needs a batch; this one has had ",
                          micro_batches_, " of ", engine_->home().rounds().deal().count(backend_.rank()));
        return engine_->begin_step(has_batch);
    }
    /// See Reducer::set_weight: for the next `finish()`. If micro-batches are reduced one by one,
    /// it weighs the ranks of each.
    void set_weight(double weight) {
        check_averages("set_weight");
        engine_->set_weight(weight);
    }
    /// See Reducer::no_sync. Throws Error(invalid_argument) if gradients are sharded, or averaged already.
    NoSync no_sync() {
        check_open("no_sync");
        return engine_->marks().no_sync();
    }
    /// See Reducer::broadcast_buffers. With hybrid sharding the root is a rank of the first group. Collective.
    void broadcast_buffers(std::span<const BufferView> buffers, int root = 0) {
        guard_.broadcast_buffers(buffers, root);
        exchange_.with_replicas([&](B& replicas) {
            if constexpr (B::memory_space != MemorySpace::host)
                guard_.run([&] { backend_.barrier().wait(); });  // they have another stream
            for (const BufferView& b : buffers) guard_.run([&] { replicas.broadcast(b, 0).wait(); });
        });
    }
    /// The memory to write gradient i to; `acquire_gradient(i).as<float>()` has its type.
    /// Ask for it in each backward, in the order in which gradients become ready. If gradients are sharded,
    /// the call may wait until another bucket is reduced, the initial contents are unspecified, and the memory is valid
    /// until the last gradient of its bucket is marked.
    [[nodiscard]] BufferView acquire_gradient(std::size_t i) { return engine_->marks().acquire_gradient(i); }
    /// See Reducer::mark_ready. Thread-safe. Throws Error(invalid_argument) if the step takes no further micro-batch;
    /// call `step()` first.
    void mark_ready(std::size_t i) { check_open("mark_ready"), engine_->marks().mark_ready(i); }
    void mark_ready(std::span<const std::size_t> which) {
        check_open("mark_ready"), engine_->marks().mark_ready(which);
    }
    void mark_ready(std::initializer_list<std::size_t> which) { mark_ready(std::span(which.begin(), which.size())); }
    void mark_ready(std::string_view name) { check_open("mark_ready"), engine_->marks().mark_ready(name); }
    void mark_ready() { check_open("mark_ready"), engine_->marks().mark_ready(); }

    /// Returns when this rank's shards hold the averages of this backward (with StepInside: when the marks are
    /// complete), or throws as Reducer::finish does. Further calls before `step()` add the averages of further
    /// micro-batches (not in stage 1). The step then uses their mean, or their sum with Averaging::sum. Collective.
    void finish() {
        guard_.check_usable("finish");
        check_open("finish");
        check_last_micro_batch("finish", backend_, engine_->home(), engine_->in_flight().contribution());
        guard_.run([&] {
            if (inside_.possible() && !engine_->in_flight().weights().is_due()) {
                engine_->settle();
                averages_ = Averages::settled;
            } else {
                reduce();
            }
            ++micro_batches_;
            take_traces();
        });
    }

    /// Skips the step, for example if a loss scale that is too large made gradients infinite. Forgets the averages
    /// since the last step, and the micro-batches under `no_sync()`. Call it instead of `step()`, on all ranks;
    /// `gradient_norm()` returns the same on all of them. The skipped time and traffic count in the statistics of the
    /// next step. Local.
    void discard() {
        guard_.check_usable("discard");
        if (averages_ == Averages::settled) {
            if (engine_->marks().accumulates())  // before anything is dropped
                guard_.refuse("discard", "a guard of no_sync() lives; destroy it first");
            engine_->drop_step();
        }
        engine_->marks().discard();
        end_averages();
    }

    /// The L2 norm, in double, of the gradients that `step()` uses. Bit-identical to Reducer::gradient_norm on whole
    /// gradients, unless those travel in a wider type than their own and are rounded at the end. Call it between
    /// `finish()` and `step()`. Collective.
    double gradient_norm() {
        check_averaged("gradient_norm");
        return guard_.run([&] {
            if (averages_ == Averages::settled) reduce(), take_traces();
            return engine_->gradient_norm() / divisor();
        });
    }

    O& optimizer() noexcept { return optimizer_; }  ///< Returns the optimizer, to change its settings between steps.
    const O& optimizer() const noexcept { return optimizer_; }             ///< The same, read-only.
    const Statistics& statistics() const noexcept { return statistics_; }  ///< Returns what steps cost so far.
    const BucketPlan& plan() const noexcept { return engine_->home().planned().plan(); }  ///< Returns the buckets.
    const B& backend() const noexcept { return backend_; }  ///< Returns this rank's handle.
    /// Returns the bytes on this rank.
    ShardMemory memory() const noexcept {
        return {values_.bytes(), engine_->home().bytes(), state_.master_bytes(), state_.state_bytes()};
    }
    /// The parameters as registered. Trainable ones have no value if weights live in buckets, or (stage 3) after a
    /// broadcast, load or step.
    std::span<const ParameterView> parameters() const noexcept { return parameters_; }

    /// Calls `use(parameter, array, first element, view)` for each slice and each array of this rank's state. Array 0
    /// holds the master weights, array 1 + k the optimizer's k-th array. You may read the views. You may write them
    /// after `flush()`; then call `publish()` (collective), at the latest before the next backward. Local.
    void for_each_shard(auto&& use) {
        adopt_written();
        for (const ShardSlice& slice : state_.slices())
            for (std::size_t a = 0; a < state_.array_count(); ++a) {
                const BufferView view = state_.array(slice, a);
                const std::uint64_t before = trace_of(view, looks_at_all());
                use(slice.parameter, a, slice.first, view);
                unpublished_ = unpublished_ || (a == 0 && trace_of(view, looks_at_all()) != before);
            }
    }
    /// Calls `use(slice)` with slices of this rank's shards, as the optimizer's `step` gets them; on devices
    /// `use(slice, gradient_scale)`, whose memory may be read on the compute stream. The gradients are those of the
    /// micro-batches so far. Call it between `finish()` and `step()`, with ReducerOptions::micro_batches after the
    /// step's last `finish()`. Local.
    template <class Use>
    void for_each_gradient(Use&& use) {
        check_averaged("for_each_gradient");
        adopt_written();
        SliceVisitor<std::remove_reference_t<Use>> visitor{&use};
        for (std::size_t b = 0; b < plan().size(); ++b) step_bucket(b, 1, visitor);
    }
    /// The number of this rank's group with hybrid sharding, from 0; 0 otherwise.
    int replica() const {
        int number = 0;
        exchange_.with_replicas([&](const B& replicas) { number = replicas.rank(); });
        return number;
    }
    /// Internal, for checkpoints: calls `use(replicas)` with hybrid sharding; see the concept ExchangePolicy.
    template <class Use>  // nvcc does not take `auto&&` in a friend
    friend void with_replicas(const ShardedBase& sharded, Use&& use) {
        sharded.exchange_.with_replicas(use);
    }
    /// Internal: refuses a load while there are averages, which `step()` would apply to the loaded state.
    friend void check_loadable(const ShardedBase& sharded) { sharded.check_averages("load_shards"); }

    /// Gives the root all state, piece by piece: calls `sink(parameter, array, first element, view)`
    /// there, in order of registration. The pieces of an array come in order. No rank holds more than its
    /// shards and one piece. Collective.
    void collect_state(int root, auto&& sink) {
        guard_.check_root(root, "collect_state");
        with_settled_state("collect_state",
                           [&] { StateTransfer<B>(backend_, plan(), state_, parameters_).collect(root, sink); });
    }
    /// The same for all ranks at once: calls `sink` with every piece on each rank. Collective.
    void collect_state(auto&& sink) {
        using Transfer = StateTransfer<B>;
        with_settled_state("collect_state",
                           [&] { Transfer(backend_, plan(), state_, parameters_).collect(Transfer::all, sink); });
    }

    /// Sets all state from the root: `source(parameter, array, first element, view)` fills each piece there, in the
    /// same order. Every rank's weights then follow array 0. Throws Error(invalid_argument) between `finish()` and
    /// `step()`; call `discard()` first. Collective.
    void distribute_state(int root, auto&& source) {
        guard_.check_root(root, "distribute_state");
        check_averages("distribute_state");
        with_settled_state("distribute_state", [&] {
            StateTransfer<B>(backend_, plan(), state_, parameters_).distribute(root, state_.array_count(), source);
            self().renew_values();
        });
    }

    /// Call it after writing master weights: every rank then computes with the new ones. Collective.
    void publish() {
        with_settled_state("publish", [&] { self().renew_values(); });
    }

protected:
    friend struct OptionsOf;

    /// The overlap policy and the exchange are among the `arguments`.
    template <class... Arguments>
    ShardedBase(B backend, List<ParameterView> parameters, O optimizer, const ReducerOptions& options, Buckets buckets,
                Arguments&... arguments)
        : guard_(backend, "this object"),
          parameters_(std::move(parameters)),
          engine_options_(options),
          buckets_(std::move(buckets)),
          overlap_(choose<Overlap, B>(arguments...)),
          exchange_(choose<Exchange, B>(arguments...)),
          costs_(costs_of_whole<O, B>(parameters_, Derived::name, named_rank(backend_), arguments...)),
          optimizer_(std::move(optimizer)) {
        if constexpr (ExchangeOver<Exchange, B>::traits.means_only)
            if (options.averaging != Averaging::mean || options.unused != UnusedParameters::error ||
                options.micro_batches != 0)
                guard_.refuse(Derived::name, "hybrid sharding goes with Averaging::mean and ",
                              "UnusedParameters::error only, without micro_batches");
        if (optimizer_.state_count() > ShardState<B>::max_states)
            guard_.refuse(Derived::name, "an optimizer may keep ", ShardState<B>::max_states, " arrays of state, not ",
                          optimizer_.state_count());
    }

    /// Makes the engine, after the ranks have compared what it does not know: `settings` and the types of values.
    /// `copies`: the weights that parameters name are copied, and not read again. Collective.
    GRADSYNC_SETUP void make_engine(const std::string& settings, bool copies) {
        if (copies && engine_options_.compare_weights_every != 0 &&
            engine_options_.compare_weights_every != gradsync::never)
            guard_.refuse(Derived::name, "weights that live with the library are compared once only; ",
                          "leave ReducerOptions::compare_weights_every out");
        check_types<O, B::memory_space>(parameters_, costs_, Derived::name, named_rank(backend_));
        const std::string all = text(settings, " states=", optimizer_.state_count(), describe_whole(costs_));
        verify(host_of(backend_), parameters_, {}, all);
        List<ParameterView> views = parameters_;
        for (ParameterView& p : views)
            if (copies && p.requires_grad) p.value.data = nullptr;
        // Not assigned yet: if construction throws, later calls still need the old engine to report the failure.
        auto made = std::make_unique<GradientSync<B>>(guard_, std::move(views), engine_options_, policies());
        if (engine_) take_times();
        engine_ = std::move(made);
        gathers_.set_watch(watch());
        const std::string planning = text(all, " ", std::string(buckets_.describe()), " ", describe(engine_options_));
        exchange_.with_replicas([&](B& replicas) {
            verify(host_of(replicas), parameters_, plan(), planning);
            if (engine_options_.compare_weights_every != gradsync::never)
                engine_->in_flight().weights().compare_groups(host_of(replicas).duplicate());
        });
    }

    /// Lays out the values like the gradients; units have no memory yet. `unit_of`: see BucketMemory. `borrows`: use
    /// the trainer's memory where possible; collective then.
    void lay_out_values(std::size_t units, auto&& unit_of, bool borrows = false) {
        const GradientHome<B>& home = engine_->home();
        const BucketLayout& layout = home.storage().layout();
        List<BufferView> buckets;
        for (std::size_t b = 0; b < plan().size(); ++b)  // a bucket is of one kind, so its values have one type
            buckets.push_back(typed_view(nullptr, layout.counts[b], parameters_[plan().bucket(b).front()].value.dtype,
                                         B::memory_space));
        if (borrows) borrow_values(backend_, plan(), layout, parameters_, buckets);
        values_ = BucketMemory<B>(plan(), layout, home.planned().infos(), std::move(buckets), units, unit_of);
    }
    /// Allocates the state of the current plan, after its values. `weights`: see ShardState. Collective.
    void make_state(List<BufferView> weights = {}) {
        state_ = ShardState<B>(backend_, plan(), values_.layout(), engine_->home().planned().infos(), values_.buckets(),
                               std::move(weights), optimizer_.state_count());
        state_.know_whole(parameters_, costs_);
        if constexpr (MatrixOptimizer<O>) state_.reserve_scratch(optimizer_);
        gathers_.resize(plan().size());
    }

    /// Does parameter i have one owner?
    bool is_whole(std::size_t i) const noexcept { return detail::is_whole(costs_, i); }
    /// This rank's shard of the values of bucket b.
    BufferView own_values(std::size_t b) const noexcept {
        return shard_of(values_.buckets()[b], backend_.size(), backend_.rank());
    }
    /// Starts to gather the master weights of all ranks into the values of bucket b. If the optimizer rounds weights,
    /// it does so only for parameters i with `used(i)` true; the others keep theirs.
    void start_gather(std::size_t b, CollectiveTag tag, auto&& used) {
        state_.round(passes_of(backend_), b, 0, own_values(b), optimizer_, used);
        state_.note_rounded(b, own_values(b));
        gathers_.start(b, values_.buckets()[b], tag);
        if (backend_.size() == 1) return;
        step_.bytes += values_.buckets()[b].bytes();
        ++step_.collectives;
    }

    /// Refuses an invalid `broadcast_parameters` before anything is in flight.
    void check_broadcast(int root) const {
        guard_.check_usable("broadcast_parameters");
        guard_.check_root(root, "broadcast_parameters");
        for (const ParameterView& p : parameters_)
            if (!p.requires_grad) guard_.check_value(p, "broadcast_parameters");
    }
    /// Are gradients sharded, and the micro-batches of a step counted?
    bool counts_micro_batches() const noexcept {
        return engine_options_.micro_batches != 0 && engine_options_.gradients == GradientStorage::pooled;
    }
    /// Has this step had all of its micro-batches?
    bool all_averaged() const noexcept {
        return !counts_micro_batches() || micro_batches_ == engine_->home().rounds().deal().rounds();
    }
    /// Refuses another micro-batch of a step that takes none after this `finish()`, and one that
    /// is computed with old weights.
    void check_open(const char* operation) const {
        if (averages_ == Averages::none && !unpublished_) return;
        guard_.check_usable(operation);
        if (unpublished_)
            guard_.refuse(operation, "for_each_shard() has written master weights; ",
                          "call publish() on all ranks before the forward");
        if (engine_options_.gradients != GradientStorage::pooled)
            guard_.refuse(operation, "gradients are averaged already; ",
                          "call step() first, or put micro-batches before the last under no_sync()");
        if (counts_micro_batches() && all_averaged())
            guard_.refuse(operation, "all ", micro_batches_,
                          " micro-batches of this step were averaged; call step() first");
        if (counts_micro_batches() && engine_->in_flight().contribution().has_batch &&
            micro_batches_ >= engine_->home().rounds().deal().count(backend_.rank()))
            guard_.refuse(operation, "this rank has had all of its ", micro_batches_,
                          " micro-batches; call begin_step(false), and mark nothing");
    }
    /// Refuses a call for which there are no averages, or some of another step.
    void check_averages(CheckedCall call) const {
        guard_.check_usable(call.name);
        if (const char* const refusal = call.refusal(averages_)) guard_.refuse(call.name, refusal);
    }
    /// Refuses a call that uses the averages before all of them are there, or after gradients were written.
    void check_averaged(CheckedCall call) const {
        check_averages(call);
        if (averages_ == Averages::reduced) engine_->marks().check_phase(call);
        if (!all_averaged())
            guard_.refuse(call.name, "only ", micro_batches_, " of this step's ",
                          engine_->home().rounds().deal().rounds(),
                          " micro-batches were averaged; call finish() after each");
        check_traces(call.name);
    }
    void take_traces() {
        for (std::size_t i = 0; i < traces_.size(); ++i)
            if (parameters_[i].requires_grad) traces_[i] = trace_of(engine_->gradient_view(i), looks_at_all());
    }
    /// Refuses gradients that were written since `finish()`: whether they count would depend on the layout.
    void check_traces(const char* operation) const {
        for (std::size_t i = 0; i < traces_.size(); ++i)
            if (parameters_[i].requires_grad &&
                trace_of(engine_->gradient_view(i), (traces_[i] & 1) != 0) != traces_[i])
                guard_.refuse({.operation = operation, .parameter = parameters_[i].name}, "the gradient of '",
                              parameters_[i].name, "' was written or asked for after finish(); ",
                              "pass step() a factor, or write it before its mark");
    }
    /// Is a write to one element to be noticed, or only one to all of them?
    bool looks_at_all() const noexcept { return statistics_.steps == 0 || engine_->options().check_writes; }
    /// The shards hold this many times the gradients that the step uses.
    double divisor() const noexcept {
        return engine_options_.averaging == Averaging::sum || counts_micro_batches()
                   ? 1
                   : static_cast<double>(micro_batches_);
    }
    /// Takes weights that the trainer has written since they were rounded. In device memory
    /// only `adopt_values()` does so.
    void adopt_written() {
        const bool may = B::memory_space == MemorySpace::host && !guard_.failed();
        for (std::size_t b = 0; may && b < plan().size(); ++b)
            if (!gathers_.pending(b)) state_.adopt(passes_of(backend_), b, own_values(b), optimizer_);
    }
    /// The optimizer steps this rank's shard of bucket b.
    void step_bucket(std::size_t b, double gradient_scale) {
        const auto stepping = watch().tell(Activity::optimizer, b, watch().now());
        step_bucket(b, gradient_scale, optimizer_);
    }
    void step_bucket(std::size_t b, double gradient_scale, auto& optimizer) {
        state_.step(backend_, b, engine_->home().rounds().shard(b), gradient_scale / divisor(), optimizer,
                    [&](std::size_t i) { return engine_->was_used(i); });
    }

    /// Runs `f` while no gather is in flight.
    void with_settled_state(const char* operation, auto&& f) {
        guard_.check_usable(operation);
        guard_.run([&] {
            self().flush();
            adopt_written();
            f();
        });
    }
    /// The frame of a step: `gather()` steps the shards and distributes the new weights.
    void step(double gradient_scale, auto&& gather) {
        if (!is_finite(gradient_scale)) guard_.refuse("step", "a gradient scale must be finite, not ", gradient_scale);
        check_averaged("step");
        guard_.run([&] {
            adopt_written();
            optimizer_.begin_step();
            gather();
            unpublished_ = false;
            end_averages();
            take_times();
            statistics_.transport = engine_->statistics().transport;
            statistics_.buckets = engine_->statistics().buckets;
            statistics_.total += statistics_.last = std::exchange(step_, {});
            ++statistics_.steps;
        });
    }

    Watch& watch() noexcept { return engine_->in_flight().watch(); }  ///< of the engine; also counts work outside of it
    /// Adds the time since the engine's last `finish()` to this step.
    void take_times() {
        step_.exposed_seconds += watch().take_exposed_seconds();
        step_.communication_seconds += watch().take_covered_seconds();
    }

    /// The step is over, or is not to be.
    void end_averages() {
        averages_ = Averages::none;
        micro_batches_ = 0;
        engine_->home().rounds().end_round(true);
    }
    /// Waits for the reductions of this backward.
    void reduce() {
        inside_.rethrow([&] { engine_->finish(); });
        averages_ = Averages::reduced;
        engine_->home().rounds().end_round(false);
        step_ += engine_->statistics().last;
    }

    Policies<B> policies() {
        if constexpr (Derived::steps_inside) {
            return inside_.policies(buckets_, overlap_);
        } else {
            auto made = make_policies<B>(buckets_, overlap_, exchange_);
            made.whole = {costs_, Derived::joins_buckets};
            return made;
        }
    }

    Derived& self() noexcept { return static_cast<Derived&>(*this); }

    Guard<B> guard_;
    B& backend_ = guard_.backend();
    List<ParameterView> parameters_;
    ReducerOptions engine_options_;
    Buckets buckets_;
    Overlap overlap_;
    Exchange exchange_;
    const List<double> costs_;  ///< see WholeCosts
    O optimizer_;
    // Declared before the engine: after a failed step its destructor waits until no other rank writes to these values.
    BucketMemory<B> values_;
    /// Of stage 3. Its end waits for the device, which may wait for ranks that the engine tells of a failure.
    std::optional<B> gathering_;
    ShardState<B> state_;
    InsideSteps<B, O> inside_{backend_, state_, values_, optimizer_};
    std::unique_ptr<GradientSync<B>> engine_;
    DeferredGather<B> gathers_;
    bool unpublished_ = false;  ///< master weights were written since they were distributed
    Averages averages_ = Averages::none;
    std::size_t micro_batches_ = 0;                                         ///< those of `finish()` since the last step
    List<std::uint64_t> traces_ = List<std::uint64_t>(parameters_.size());  ///< of gradients, at `finish()`
    StepStatistics step_;
    Statistics statistics_;
};

}  // namespace gradsync::inline v0_2::detail
