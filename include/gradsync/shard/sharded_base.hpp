#pragma once

#include <cstddef>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../core/backend.hpp"
#include "../core/error.hpp"
#include "../core/parameter.hpp"
#include "../observe/statistics.hpp"
#include "../reducer.hpp"
#include "../reducer/exposure.hpp"
#include "../reducer/failure_latch.hpp"
#include "flat_optimizer.hpp"
#include "options.hpp"
#include "shard_state.hpp"
#include "state_transfer.hpp"

namespace gradsync::inline v0::detail {

/// What ShardedOptimizer and ShardedParameters have in common: gradients that are reduced to shards, the optimizer that steps
/// them, and the state that moves between ranks only to be saved and loaded.
///
/// Derived has `check_before_finish()`, `before_state_moves()`, and `after_state_moves()`, which makes new master weights known.
template <class Derived, class B, class O, class Buckets, class Overlap, class Exchange>
class ShardedBase {
    static_assert(Backend<B>, "gradsync: the first argument is a backend (ThreadBackend, ...)");
    static_assert(FlatOptimizer<O>,
                  "gradsync: the second argument is an optimizer with state_count(), begin_step() and step(OptimizerSlice<float>); see "
                  "docs/sharding.md");

protected:
    using Engine = Reducer<B, Buckets, Overlap, Exchange>;

public:
    using Optimizer = O;

    ShardedBase(const ShardedBase&) = delete;
    ShardedBase& operator=(const ShardedBase&) = delete;

    // ---------------------------------------------------------------------------------- the backward, as with a Reducer

    /// See Reducer::begin_step. Collective.
    bool begin_step(bool has_batch = true) {
        check_usable("begin_step");
        if constexpr (requires { Exchange::means_only; })
            if (!has_batch) refuse("begin_step", "with hybrid sharding every rank needs a batch");
        return reducer_->begin_step(has_batch);
    }
    /// See Reducer::set_weight.
    void set_weight(double weight) {
        check_usable("set_weight");
        reducer_->set_weight(weight);
    }
    /// Where gradient i is to be written. Where gradients are sharded, memory that lasts until this backward's `finish()`, and
    /// that holds anything at first: ask in each backward, in the order in which gradients become ready.
    BufferView gradient_view(std::size_t i) { return reducer_->gradient_view(i); }
    template <Element T>
    std::span<T> gradient(std::size_t i) {
        return reducer_->template gradient<T>(i);
    }
    /// See Reducer::mark_ready. From any thread.
    void mark_ready(std::size_t i) { reducer_->mark_ready(i); }

    /// Returns when this rank's shards hold the averages of this backward, or throws, as Reducer::finish does. Called again before
    /// `step()`, it adds those of another micro-batch (not in stage 1). Collective.
    void finish() {
        check_usable("finish");
        guard([&] {
            self().check_before_finish();
            reducer_->finish();
            ++micro_batches_;
            reducer_->add_to_shards(true);
            step_ += reducer_->statistics().last;
        });
    }

    /// The L2 norm of all gradients (of their mean over the micro-batches), in double; the same bits as Reducer::gradient_norm has
    /// with whole gradients. Between `finish()` and `step()`. Collective.
    double gradient_norm() {
        check_usable("gradient_norm");
        if (micro_batches_ == 0) refuse("gradient_norm", "there are no averaged gradients; call finish() first");
        return guard([&] { return reducer_->gradient_norm() / static_cast<double>(micro_batches_); });
    }
    /// What to give to `step` so that the norm is at most `max_norm`. See Reducer::clip_factor.
    static double clip_factor(double norm, double max_norm) noexcept { return Engine::clip_factor(norm, max_norm); }

    // ------------------------------------------------------------------------------------------------ state and its moves

    O& optimizer() noexcept { return *optimizer_; }
    const O& optimizer() const noexcept { return *optimizer_; }
    const Statistics& statistics() const noexcept { return statistics_; }
    const BucketPlan& plan() const noexcept { return reducer_->plan(); }
    const B& backend() const noexcept { return backend_; }
    std::size_t size() const noexcept { return parameters_.size(); }  ///< parameters, frozen ones too
    const ParameterView& parameter(std::size_t i) const { return reducer_->parameter(i); }

    /// This rank's own state: `use(parameter, first element, array, view)` for each slice and array; array 0 is the master weights,
    /// array 1 + k the optimizer's k-th. Views may be read and, after `flush()`, written; call `publish()` (collective) then. Local.
    template <class Use>
    void for_each_shard(Use&& use) {
        for (const ShardSlice& slice : state_.slices())
            for (std::size_t a = 0; a < state_.array_count(); ++a) use(slice.parameter, slice.first, a, state_.array(slice, a));
    }
    std::size_t array_count() const noexcept { return state_.array_count(); }

    /// Gives the root all state, piece by piece: `sink(parameter, array, first element, view)`, in the same order on every run;
    /// pieces of an array come in order. No rank holds more of it than its shards and one piece. Collective.
    template <class Sink>
    void collect_state(int root, Sink&& sink) {
        check_usable("collect_state");
        guard([&] {
            self().before_state_moves();
            StateTransfer<B>(backend_, plan(), state_, parameters_).collect(root, sink);
        });
    }

    /// The other way round: `source(parameter, array, first element, view)` fills each piece on the root, in the same order. The
    /// weights are what array 0 says then, on every rank. Collective.
    template <class Source>
    void distribute_state(int root, Source&& source) {
        check_usable("distribute_state");
        guard([&] {
            self().before_state_moves();
            StateTransfer<B>(backend_, plan(), state_, parameters_).distribute(root, state_.array_count(), source);
            self().after_state_moves();
        });
    }

    /// After this rank's master weights were written: everyone computes with them. Collective.
    void publish() {
        check_usable("publish");
        guard([&] {
            self().before_state_moves();
            self().after_state_moves();
        });
    }

protected:
    ShardedBase(B backend, std::vector<ParameterView> parameters, O optimizer, const ReducerOptions& options)
        : backend_(std::move(backend)), parameters_(std::move(parameters)), optimizer_(std::move(optimizer)) {
        if constexpr (requires { Exchange::means_only; })
            if (options.averaging != Averaging::mean) refuse("ShardedOptimizer", "hybrid sharding goes with Averaging::mean only");
        if (optimizer_->state_count() > ShardState<B>::max_states)
            refuse("ShardedOptimizer", "an optimizer may keep " + std::to_string(ShardState<B>::max_states) + " arrays of state, not " +
                                           std::to_string(optimizer_->state_count()));
        if constexpr (!requires(const OptimizerSlice<double>& s) { optimizer_->step(s); })
            for (const ParameterView& p : parameters_)
                if (p.requires_grad && p.value.dtype == DType::f64)
                    refuse("ShardedOptimizer", "parameter '" + p.name + "' is f64, and the optimizer has no step(OptimizerSlice<double>)");
    }

    /// The optimizer steps this rank's shard of bucket b; its values, where they are there, follow.
    void step_bucket(std::size_t b, double gradient_scale) {
        state_.step(b, reducer_->gradient_shard(b), gradient_scale / static_cast<double>(micro_batches_), *optimizer_,
                    [&](std::size_t i) { return reducer_->was_used(i); });
    }

    /// Around a step: `gather` does what makes the new weights known.
    template <class Gather>
    void step(double gradient_scale, Gather&& gather) {
        check_usable("step");
        if (micro_batches_ == 0) refuse("step", "there are no averaged gradients; call finish() first");
        guard([&] {
            optimizer_->begin_step();
            gather(gradient_scale);
            micro_batches_ = 0;
            reducer_->add_to_shards(false);
            step_.exposed_seconds += seconds_of(exposure_.take());
            statistics_.transport = reducer_->statistics().transport;
            statistics_.buckets = reducer_->statistics().buckets;
            statistics_.last = std::exchange(step_, {});
            statistics_.total += statistics_.last;
            ++statistics_.steps;
        });
    }

    static double seconds_of(Exposure::Clock::duration d) noexcept { return std::chrono::duration<double>(d).count(); }

    /// Bytes of bucket b that its all-gather brings.
    void count_gather(std::size_t bytes) noexcept {
        if (backend_.size() == 1) return;
        step_.bytes += bytes;
        ++step_.collectives;
    }

    Derived& self() noexcept { return static_cast<Derived&>(*this); }

    /// A failure here is a failure of this rank, and the others are to know.
    template <class F>
    decltype(auto) guard(F&& f) {
        try {
            return failure_.guard(f);
        } catch (const std::exception& e) {
            backend_.fail(e.what());
            throw;
        }
    }

    void check_usable(const char* operation) const {
        if (failure_.failed()) refuse(operation, "this object failed earlier and cannot go on: " + failure_.what());
    }
    [[noreturn]] void refuse(const char* operation, const std::string& what, const std::string& parameter = {}) const {
        throw Error(Errc::invalid_argument, std::string(operation) + " on rank " + std::to_string(backend_.rank()) + ": " + what,
                    {.operation = operation, .rank = backend_.rank(), .parameter = parameter});
    }
    void check_index(std::size_t i, const char* operation) const {
        if (i >= size()) refuse(operation, "there is no parameter " + std::to_string(i) + " among " + std::to_string(size()));
    }

    B backend_;
    std::vector<ParameterView> parameters_;
    std::optional<O> optimizer_;
    std::optional<Engine> reducer_;
    ShardState<B> state_;
    std::size_t micro_batches_ = 0;  ///< reduced since the last step
    StepStatistics step_;
    Statistics statistics_;
    Exposure exposure_;  ///< beyond the Reducer's own
    FailureLatch failure_;
};

}  // namespace gradsync::inline v0::detail
