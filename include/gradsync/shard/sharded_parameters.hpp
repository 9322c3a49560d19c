// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../bucket/units.hpp"
#include "../overlap/overlap_backward.hpp"
#include "gather_order.hpp"
#include "sharded_base.hpp"

namespace gradsync::inline v0_2 {

/// Options of ShardedParameters; equal on all ranks, like ReducerOptions.
struct ShardedParametersOptions {
    /// Without `gradients` (see `shard_gradients`) and `compare_weights_every` (except `never`).
    ReducerOptions reducer = {};
    /// False: every rank keeps whole gradients, so that micro-batches add up under `no_sync()`.
    bool shard_gradients = true;
    std::size_t prefetch = 1;  ///< number of units that are gathered ahead of the one in use
    /// False: a gathered unit stays until the end of the step, so its backward need not gather.
    bool reshard_after_forward = true;
    std::size_t replicate_below = 0;  ///< parameters with fewer elements (norms, biases) are never released
};

/// Fully sharded data-parallel training (ZeRO stage 3, FSDP): each rank stores only its share of the weights, the
/// gradients and the optimizer state. A unit is a layer, or any set of parameters that you name. Its weights exist only
/// while it is in use: they are gathered before use and released after it, in the forward and again in the backward.
///
///     gs::ShardedParameters sharded(comm, model.parameters(), MyAdam{...}, gs::Units({0, 0, 1, 1, 2}));
///     sharded.broadcast_parameters();          // from here on the trainer's own weights are not needed
///     for (...) {
///         for (layer u, first to last) { auto use = sharded.gather(u); forward(u, sharded.parameter_value(...)); }
///         for (layer u, last to first) {
///             auto use = sharded.gather(u);
///             backward(u, sharded.parameter_value(...), sharded.acquire_gradient(...)), sharded.mark_ready(...);
///         }
///         sharded.finish();
///         sharded.step();
///     }
///
/// Units are prefetched in the order in which the previous step gathered them. Gradients are reduce-scattered bucket by
/// bucket. If `finish()` is called more than once before `step()`, they add up in shards of f32 (f64 for f64). Frozen
/// parameters stay in the trainer's memory. On a backend whose sums have one order, the weights are bit-identical to
/// those of a plain Reducer with the same optimizer, except with micro-batches that the options do not count, which are
/// added in another order.
///
/// All ranks must gather and release the same units in the same order. `mark_ready` and `acquire_gradient` are
/// thread-safe; call `gather`, `release` and everything else from one thread. Errors are as for Reducer.
template <class B, class O, class Overlap = OverlapBackward, class Exchange = ReduceScatter>
class ShardedParameters
    : public detail::ShardedBase<ShardedParameters<B, O, Overlap, Exchange>, B, O, Units, Overlap, Exchange> {
    using Base = detail::ShardedBase<ShardedParameters, B, O, Units, Overlap, Exchange>;
    friend Base;
    using Base::backend_, Base::engine_, Base::guard_, Base::parameters_, Base::values_;

public:
    static constexpr const char* name = "ShardedParameters";  ///< Internal.
    static constexpr bool steps_inside = false;               ///< Internal.
    static constexpr bool joins_buckets = false;              ///< Internal.

    /// `parameters`: as for Reducer; gradients need no memory. Each rank copies its shards of the given values, which
    /// need not outlive `broadcast_parameters()`. A `value` without memory means weights of zero, of its dtype. After
    /// the units come the options (`ShardedParametersOptions`), an overlap policy and an exchange, in any order; see
    /// Reducer. Collective.
    template <class Range = std::initializer_list<ParameterView>, class First = ShardedParametersOptions, class... More>
    ShardedParameters(B backend, Range&& parameters, O optimizer, const Units& units, First first = {}, More... more)
        : Base(std::move(backend), detail::view_parameters<B::memory_space>(std::forward<Range>(parameters)),
               std::move(optimizer), detail::choose<ShardedParametersOptions, B>(first, more...).reducer, units, first,
               more...),
          options_(detail::choose<ShardedParametersOptions, B>(first, more...)),
          given_units_(units) {
        static_assert(detail::Accepts<B, ShardedParametersOptions, detail::Role::overlap, detail::Role::exchange,
                                      detail::Role::shards>::template check<First, More...>());
        // A separate communicator, because marks from other threads start collectives, too.
        this->gathering_.emplace(backend_.duplicate());
        number_ = detail::next_owner(backend_);
        if (options_.reducer.gradients != GradientStorage::automatic)
            guard_.refuse(name, "gradients never live in your memory; ",
                          "leave ReducerOptions::gradients out, and see shard_gradients");
        this->engine_options_.gradients =
            options_.shard_gradients ? GradientStorage::pooled : GradientStorage::in_buckets;
        replicate_small_ones();
        for (ParameterView& p : parameters_)  // a missing value gets the type of the gradient
            if (p.value.data == nullptr)
                p.value =
                    detail::typed_view(nullptr, p.gradient.count,
                                       p.value == BufferView{} ? p.gradient.dtype : p.value.dtype, B::memory_space);
        this->make_engine(detail::text("stage=3 prefetch=", options_.prefetch,
                                       options_.reshard_after_forward ? " reshard" : " no_reshard",
                                       " replicate_below=", options_.replicate_below),
                          true);
        this->gathers_.attach(*this->gathering_, detail::only_polls(this->overlap_));
        guard_.run([&] { make_state(); });
        reads_values_ = true;
        give_weights();
    }

    /// The gathers in flight are waited for on the stream that is set now: the one of the last gather may be gone.
    ~ShardedParameters() { detail::follow_stream(*this->gathering_, backend_); }

    /// See Reducer::begin_step. A rank without a batch still takes part in the gathers: it must gather and release the
    /// same units as the others.
    using Base::begin_step;
    using Base::plan;

    /// Gives every rank its shards of the root's weights, and the root's frozen parameters. It reads the memory that
    /// the root named at construction. After a load, `publish()`, a step or another broadcast the shards stay as they
    /// are. Collective.
    void broadcast_parameters(int root = 0) {
        this->check_broadcast(root);
        // The first parameter that has no value on the root.
        auto missing = static_cast<std::uint64_t>(parameters_.size());
        for (std::size_t i = parameters_.size(); reads_values_ && i-- > 0;)
            if (const ParameterView& p = parameters_[i];
                p.requires_grad && p.value.data == nullptr && p.value.count != 0)
                missing = i;
        guard_.run([&] {
            const BufferView shared(&missing, 1);
            detail::host_of(backend_).broadcast(shared, root).wait();
            this->exchange_.with_replicas([&](B& replicas) { detail::host_of(replicas).broadcast(shared, 0).wait(); });
        });
        if (missing < parameters_.size())
            guard_.refuse({.operation = "broadcast_parameters", .parameter = parameters_[missing].name}, "parameter '",
                          parameters_[missing].name, "' has no value on rank ", root, "; give it one there");
        guard_.run([&] {
            for (const ParameterView& p : parameters_)
                if (!p.requires_grad) this->broadcast_buffers({&p.value, 1}, root);
            if (!reads_values_) return;
            detail::StateTransfer<B>(backend_, plan(), this->state_, parameters_)
                .distribute(root, 1, [&](std::size_t i, std::size_t, std::size_t first, BufferView piece) {
                    const BufferView value = parameters_[i].value;
                    if (value.data != nullptr)
                        detail::read_as(backend_, value.subview(first, piece.count), piece);  // else replica 0 has it
                });
            this->exchange_.with_replicas([&](B& replicas) {
                for (std::size_t b = 0; b < plan().size(); ++b) replicas.broadcast(this->state_.array(b, 0), 0).wait();
            });
            renew_values();
        });
    }

    /// Keeps a unit in use. The destructor ends the use; the weights may then be released.
    class [[nodiscard]] Use {
    public:
        Use(ShardedParameters& owner, std::size_t unit) noexcept : owner_(&owner), unit_(unit) {}
        Use(Use&& other) noexcept : owner_(std::exchange(other.owner_, nullptr)), unit_(other.unit_) {}
        Use& operator=(Use&&) = delete;
        ~Use() {
            if (owner_ != nullptr) owner_->values_.release(unit_);
        }

    private:
        ShardedParameters* owner_;
        std::size_t unit_;
    };

    /// Returns when the weights of unit u are available. They stay while the returned object lives. Collective.
    Use gather(std::size_t u) {
        acquire(u);
        return Use(*this, u);
    }
    /// `gather` without a scope: call `release(u)` once per call. Collective.
    void acquire(std::size_t u) {
        guard_.check_usable("gather");
        guard_.check_index(u, unit_count(), "gather", "unit");
        const Unit& unit = values_[u];
        const bool is_here = unit.bytes == 0 || (unit.slot != unit.none && !unit.gathering);
        guard_.run([&] {
            if (is_here) return use(u);
            const auto held = this->watch().hold(Activity::wait, unit.buckets.front());
            use(u);
        });
    }
    /// Ends one use of unit u. Throws Error(invalid_argument) if the unit is not in use.
    void release(std::size_t u) {
        guard_.check_index(u, unit_count(), "release", "unit");
        if (values_[u].users == 0) guard_.refuse("release", "unit ", u, " is not in use; acquire() it first");
        values_.release(u);
    }

    /// See ShardedBase. With UnusedParameters::find_unused it does not wait for a bucket in flight: a rank that does
    /// not use that bucket joins it only in `finish()`, and may wait in a `gather` for this rank until then. In host
    /// memory it adds memory instead.
    BufferView acquire_gradient(std::size_t i) {
        return engine_->marks().acquire_gradient(i, this->engine_options_.unused == UnusedParameters::find_unused);
    }

    /// The weights of parameter i while its unit is in use (without `reshard_after_forward`: from then until the step).
    /// Throws Error(invalid_argument) at any other time. Ask again after each gather: the address may change.
    /// `parameter_value(i).as<float>()` has its type. They are copies, so a write would be lost: write master weights
    /// in `for_each_shard`, then call `publish()`.
    ConstBufferView parameter_value(std::size_t i) const {
        guard_.check_index(i, parameters_.size(), "parameter_value");
        if (!parameters_[i].requires_grad) return parameters_[i].value;
        const Unit& unit = values_[this->buckets_.unit_of(i)];
        const BufferView whole = values_.parameter(i);
        // Weights of unused units may be here, too: prefetched ones in flight, or released
        // ones whose memory is still free.
        const bool stays = unit.users != 0 || !options_.reshard_after_forward;
        if (whole.count != 0 && (whole.data == nullptr || unit.gathering || !stays))
            guard_.refuse({.operation = "parameter_value", .parameter = parameters_[i].name}, "the weights of '",
                          parameters_[i].name, "' are not here; call gather(", unit_of(i), ") first");
        return whole;
    }
    /// Returns when no prefetched unit is in flight.
    void flush() {
        guard_.check_usable("flush");
        guard_.run([&] {
            for (std::size_t u = 0; u < this->buckets_.count(); ++u) {
                const bool gathering = values_[u].gathering;
                wait(values_[u]);
                values_[u].gathering = gathering;  // it decides which slot a gather takes: on all ranks the same one
            }
        });
    }
    std::size_t unit_count() const noexcept { return given_units_.count(); }  ///< Returns the number of units.
    /// The unit of parameter i, as given. The weights of a replicated parameter are available even
    /// if its unit is not gathered.
    std::size_t unit_of(std::size_t i) const noexcept { return given_units_.unit_of(i); }

    /// Steps this rank's shards with the gradients times `gradient_scale`. Unused units lose their outdated weights;
    /// units in use are gathered again. Call it after `finish()`. Throws Error(invalid_argument) if the scale is not
    /// finite. Collective.
    void step(double gradient_scale = 1) {
        Base::step(gradient_scale, [&] {
            for (std::size_t b = 0; b < plan().size(); ++b) this->step_bucket(b, gradient_scale);
            renew_values();
        });
    }

private:
    using Unit = typename detail::BucketMemory<B>::Unit;

    /// Puts small parameters into an extra last unit, which is always in use.
    void replicate_small_ones() {
        if (given_units_.size() != parameters_.size())
            guard_.refuse(name, "there are ", parameters_.size(), " parameters, but units for ", given_units_.size());
        std::vector<std::size_t> unit_of(parameters_.size());
        for (std::size_t i = 0; i < parameters_.size(); ++i) {
            const ParameterView& p = parameters_[i];
            unit_of[i] =
                p.requires_grad && p.gradient.count < options_.replicate_below ? unit_count() : given_units_.unit_of(i);
        }
        this->buckets_ = Units(std::move(unit_of));
    }

    /// The ranks compare the weights that they have here in their first step.
    void give_weights() { engine_->in_flight().weights().give(detail::passes_of(backend_), parameters_); }

    /// Allocates units and state for the current plan. Collective.
    void make_state() {
        this->lay_out_values(this->buckets_.count(),
                             [&](std::size_t b) { return this->buckets_.unit_of(plan().bucket(b).front()); });
        slot_bytes_ = 0;
        for (std::size_t u = 0; u < unit_count(); ++u) slot_bytes_ = detail::larger(slot_bytes_, values_[u].bytes);
        Base::make_state();
        for (const detail::ShardSlice& slice : this->state_.slices())
            if (const BufferView value = parameters_[slice.parameter].value; value.data != nullptr)
                detail::passes_of(backend_).copy(value.subview(slice.first, slice.count), this->state_.array(slice, 0));
        if (this->buckets_.count() > unit_count()) values_[unit_count()].users = 1;
        renew_values();
    }

    /// Gathers unit u, and starts to gather the units expected next.
    void use(std::size_t u) {
        prefetch(u);
        ++values_[u].users;
        for (const std::size_t next : order_.next(u)) prefetch(next);
        wait(values_[u]);
    }

    /// Starts to gather unit u. No-op if it is available or in flight.
    void prefetch(std::size_t u) {
        const Unit& unit = values_[u];
        if (unit.slot == unit.none && unit.bytes != 0) fill(u, !options_.reshard_after_forward);
    }

    /// Gathers the master weights of all ranks into unit u. For `keep` see BucketMemory::take.
    void fill(std::size_t u, bool keep) {
        Unit& unit = values_[u];
        if (unit.slot == unit.none)
            values_.place(*this->gathering_, u, keep, u < unit_count() ? slot_bytes_ : unit.bytes);
        unit.gathering = true;
        detail::follow_stream(*this->gathering_, backend_);
        for (const std::size_t b : unit.buckets)
            this->start_gather(b, {CollectiveTag::Kind::unit, number_, u}, [](std::size_t) { return true; });
    }

    void wait(Unit& unit) {
        if (!unit.gathering) return this->gathers_.advance();
        detail::follow_stream(*this->gathering_, backend_);
        for (const std::size_t b : unit.buckets) {
            while (engine_->in_flight().launch_before_wait() && !this->gathers_.test(b)) ::sched_yield();
            this->gathers_.wait(b);
        }
        unit.gathering = false;
    }

    /// After a change of the master weights: drops gathered copies, or gathers them again if they are in use.
    void renew_values() {
        if (std::exchange(reads_values_, false)) {
            for (ParameterView& p : parameters_)  // the trainer may free them now
                if (p.requires_grad) p.value.data = nullptr;
            give_weights();  // none: the ranks have one set now
        }
        for (std::size_t u = 0; u < this->buckets_.count(); ++u) {
            Unit& unit = values_[u];
            wait(unit);
            if (unit.users == 0) {
                values_.displace(u);
                continue;
            }
            fill(u, false);
            wait(unit);
        }
        for (const std::size_t next : order_.end_step()) prefetch(next);
        this->unpublished_ = false;
    }

    ShardedParametersOptions options_;
    bool reads_values_ = false;   ///< the weights are still those that each rank gave at construction
    Units given_units_;           ///< the user's, without the replicated one
    std::size_t number_ = 0;      ///< number of this object among the users of `backend_`
    std::size_t slot_bytes_ = 0;  ///< of a slot that may hold any unit, but for the replicated one
    detail::GatherOrder order_{options_.prefetch};
};

template <class B, class Range = std::initializer_list<ParameterView>, class O, class First = ShardedParametersOptions,
          class... More>
ShardedParameters(B, Range&&, O, Units, First = First(), More...)
    -> ShardedParameters<B, O, detail::Chosen<B, OverlapBackward, First, More...>,
                         detail::Chosen<B, ReduceScatter, First, More...>>;

}  // namespace gradsync::inline v0_2
