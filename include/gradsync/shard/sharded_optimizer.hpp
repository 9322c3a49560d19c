// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../bucket/size_capped.hpp"
#include "../overlap/overlap_backward.hpp"
#include "sharded_base.hpp"

namespace gradsync::inline v0_2 {

/// The stages of ZeRO (Rajbhandari et al., arXiv 1910.02054) say which data is sharded.

/// Stage 1 shards the optimizer state and the master weights. Gradients are whole, and live where
/// `ReducerOptions::gradients` says; micro-batches add up there under `no_sync()`.
struct Zero1 {
    static constexpr bool shards_gradients = false;
};

/// Stage 2 also shards the gradients. A bucket has memory only while it is filled and reduced. This rank's shard stays,
/// in f32 (f64 for f64); further micro-batches are reduced and added to it.
struct Zero2 {
    static constexpr bool shards_gradients = true;
};

/// Stage 1 with the optimizer inside the reduction. `finish()` checks the marks and does not wait. `step()` does the
/// rest in one pass: it reads the gradients of all ranks, steps, and writes the weights of all ranks; averages are
/// never stored. The bits are those of Zero1. Gradients are reduced first, as in stage 1, if the norm is asked for, if
/// ranks do not share memory, with UnusedParameters::find_unused, if `micro_batches` need several sums, and in a step
/// that compares weights.
///
/// Buckets are reduced in `step()`, so it takes no overlap policy. The optimizer may run on any thread of its rank that
/// makes progress. If a rank has several such objects over threads, all ranks must step them in the same order.
struct StepInside {
    static constexpr bool shards_gradients = false;
    static constexpr bool steps_inside = true;
};

/// The place of the weights that the model computes with.
enum class ParameterStorage : std::uint8_t {
    borrowed,    ///< in the trainer's memory: the gathered weights are copied there
    in_buckets,  ///< in `parameter_value(i)`: no copy. Values given at construction are copied in
    /// The same, with one set for all ranks, which are threads of one process. Rank 0's values are copied in. Write
    /// weights on one rank only, and synchronise all ranks before the step. Mark a parameter only after the step's last
    /// read of its weights.
    shared,
};

/// Options of ShardedOptimizer; equal on all ranks, like ReducerOptions.
struct ShardingOptions {
    /// The same options as for a Reducer. `gradients` is for stage 1 only; stage 2 pools gradients.
    ReducerOptions reducer = {};
    ParameterStorage parameters = ParameterStorage::borrowed;  ///< where the weights live
};

/// Data-parallel training with a sharded optimizer (ZeRO stages 1 and 2). Each rank stores and steps only its share of
/// the optimizer state (`Zero1`), and also of the gradients (`Zero2`). Every rank holds the whole weights.
///
///     gs::ShardedOptimizer sharded(comm, model.parameters(), MyAdam{...}, gs::Zero2{});
///     sharded.broadcast_parameters();
///     for (...) {
///         model.backward(batch, [&](std::size_t i) { sharded.mark_ready(i); });
///         sharded.finish();                                       // this rank's shards of the averaged gradients
///         const double norm = sharded.gradient_norm();            // if you clip
///         sharded.step(gradsync::clip_factor(norm, 1.0));         // all ranks hold the new weights
///     }
///
/// Buckets are reduce-scattered during the backward, as the policies say. Each rank's optimizer steps its contiguous
/// shard of each bucket, then the weights are all-gathered. On a backend whose sums have one order, the weights are
/// bit-identical to those of a plain Reducer with the same optimizer. Micro-batches of stage 2 are the exception,
/// unless `ReducerOptions::micro_batches` counts them: they are summed over the ranks first, then over time.
///
/// With `OverlapForward`, `step()` returns while the all-gathers are in flight. Call `wait_parameter(i)` before you use
/// parameter i, and `flush()` before you read the weights in any other way.
///
/// The contents of the gradients are unspecified after `step()`. Collective calls, threads,
/// errors and ownership are as for Reducer.
template <class B, class O, class Stage = Zero1, class Buckets = SizeCappedBuckets, class Overlap = OverlapBackward,
          class Exchange = ReduceScatter>
class ShardedOptimizer : public detail::ShardedBase<ShardedOptimizer<B, O, Stage, Buckets, Overlap, Exchange>, B, O,
                                                    Buckets, Overlap, Exchange> {
    using Base = detail::ShardedBase<ShardedOptimizer, B, O, Buckets, Overlap, Exchange>;
    friend Base;
    using Base::backend_, Base::engine_, Base::guard_, Base::parameters_, Base::values_;
    static constexpr bool forward = detail::gathers_in_forward<Overlap>();

public:
    static constexpr const char* name = "ShardedOptimizer";                  ///< Internal.
    static constexpr bool stage_pools = Stage::shards_gradients;             ///< Internal.
    static constexpr bool steps_inside = requires { Stage::steps_inside; };  ///< Internal.
    static constexpr bool joins_buckets = true;                              ///< Internal.
    using Base::plan;

    /// `parameters`: as for Reducer, with values. With ParameterStorage::in_buckets a `value` may have a count and a
    /// dtype but no memory. Its weights then start at zero: write them to `parameter_value(i)`. After the optimizer
    /// come the options (`ShardingOptions`), the stage, and policies, in any order; see Reducer. Throws
    /// Error(parameter_mismatch) if the ranks differ, and Error(invalid_argument) if a trainable parameter has no
    /// value. Collective.
    template <class Range = std::initializer_list<ParameterView>, class First = ShardingOptions, class... More>
    ShardedOptimizer(B backend, Range&& parameters, O optimizer, First first = {}, More... more)
        : Base(std::move(backend), detail::view_parameters<B::memory_space>(std::forward<Range>(parameters)),
               std::move(optimizer), detail::choose<ShardingOptions, B>(first, more...).reducer,
               detail::choose<Buckets, B>(first, more...), first, more...),
          storage_(detail::choose<ShardingOptions, B>(first, more...).parameters) {
        using detail::Role;
        static_assert(detail::Accepts<B, ShardingOptions, Role::buckets, Role::overlap, Role::exchange, Role::stage,
                                      Role::shards>::template check<First, More...>());
        static_assert(!steps_inside || (!MatrixOptimizer<O> && ((detail::role_of<First, B>() != Role::shards) && ... &&
                                                                (detail::role_of<More, B>() != Role::shards))),
                      "gradsync: StepInside steps a parameter in parts, as they are reduced: use Zero1 or Zero2 for an "
                      "optimizer of whole parameters");
        static_assert(!steps_inside || std::same_as<Exchange, ReduceScatter>,
                      "gradsync: an optimizer inside the reduction takes no exchange");
        static_assert(!steps_inside || std::same_as<Overlap, OverlapBackward>,
                      "gradsync: with StepInside buckets leave in step(): leave the overlap policy out");
        (void)detail::choose<Stage, B>(first, more...);  // checks it against the template argument
        const GradientStorage gradients = this->engine_options_.gradients;
        if (Stage::shards_gradients && gradients != GradientStorage::automatic)
            guard_.refuse(name, "gradients of stage 2 are pooled; leave ReducerOptions::gradients out with Zero2");
        if (!Stage::shards_gradients && gradients == GradientStorage::pooled)
            guard_.refuse(name, "pooled gradients are for stage 2: write Zero2");
        if (B::memory_space != MemorySpace::host && shared())
            guard_.refuse(name, "ParameterStorage::shared is for host memory; use in_buckets");
        this->engine_options_ = detail::with_storage(
            this->engine_options_, Stage::shards_gradients ? GradientStorage::pooled : GradientStorage::borrowed);
        for (const ParameterView& p : parameters_)
            if (p.requires_grad && !(in_buckets() && p.value.count == p.gradient.count)) guard_.check_value(p, name);
        make_engine();
        this->gathers_.attach(backend_, detail::only_polls(this->overlap_), this,
                              [](void* self, std::size_t b) { static_cast<ShardedOptimizer*>(self)->hand_out(b); });
        guard_.run([&] { make_state(); });
        for (std::size_t b = 0; b < plan().size(); ++b) this->state_.note_rounded(b, this->own_values(b));
    }

    /// Gives every rank the root's weights, including those of frozen parameters. Collective.
    void broadcast_parameters(int root = 0) {
        this->check_broadcast(root);
        guard_.run([&] {
            flush();
            List<BufferView> values(parameters_.size());
            for (std::size_t i = 0; i < values.size(); ++i) values[i] = parameter_value(i);
            this->broadcast_buffers(values, root);
            adopt_values();
            this->exchange_.with_replicas([&](B& replicas) {  // masters may differ even if the weights are equal
                for (std::size_t b = 0; b < plan().size(); ++b)
                    if (const BufferView masters = this->state_.array(b, 0); masters.data != this->own_values(b).data)
                        replicas.broadcast(masters, 0).wait();
            });
        });
    }

    /// The memory of the weights of parameter i. With ParameterStorage::in_buckets the object owns that of a trainable
    /// parameter; it is valid until `rebuild_buckets` returns true or `unfreeze` is called.
    BufferView parameter_value(std::size_t i) const {
        guard_.check_index(i, parameters_.size(), "parameter_value");
        const ParameterView& p = parameters_[i];
        return in_buckets() && p.requires_grad ? values_.parameter(i) : p.value;
    }

    /// Takes weights that you have written, alike on all ranks, into their master weights. In host memory every call
    /// that needs them does so; in device memory weights of 16 and 8 bits need it. Master weights that round to their
    /// weights stay. Local.
    void adopt_values() {
        flush();
        for (std::size_t b = 0; b < plan().size(); ++b)
            this->state_.adopt(detail::passes_of(backend_), b, this->own_values(b), this->optimizer_);
    }

    /// Returns when this rank's shards hold the averages of this backward, or throws as Reducer::finish does. With
    /// Zero2 further calls before `step()` add the averages of further micro-batches; the step then uses their mean, or
    /// their sum with Averaging::sum. Collective.
    void finish() {
        guard_.check_usable("finish");
        if (this->gathers_.pending() != 0)
            guard_.refuse("finish", "weights of the last step were not waited for; ",
                          "call wait_parameter(i) before parameter i is used, or flush()");
        Base::finish();
    }

    /// Steps this rank's shards with the gradients times `gradient_scale`, then gives all ranks the new weights.
    /// Parameters that no rank used (UnusedParameters::find_unused) do not change. Weights that you have written count.
    /// Call it after `finish()`. Throws Error(invalid_argument) if the scale is not finite, or if gradients in host
    /// memory were written since `finish()`: one element in the first step and with `check_writes`, later all of a
    /// gradient. Collective.
    void step(double gradient_scale = 1) {
        Base::step(gradient_scale, [&] {
            if (step_inside(gradient_scale)) {
                for (std::size_t b = 0; b < plan().size(); ++b) hand_out(b);
                return;
            }
            // Last bucket first: the next forward starts with the parameters whose gradients came last.
            for (std::size_t b = plan().size(); b-- > 0;) {
                this->step_bucket(b, gradient_scale);
                this->start_gather(b, engine_->in_flight().tag(b), [&](std::size_t i) { return engine_->was_used(i); });
            }
            if (!forward) flush();
        });
    }

    /// With OverlapForward: returns when parameter i has the weights of the last step. Starts no collective, so each
    /// rank may call it in its own order.
    void wait_parameter(std::size_t i) {
        guard_.check_index(i, parameters_.size(), "wait_parameter");
        guard_.check_usable("wait_parameter");
        if (parameters_[i].requires_grad) guard_.run([&] { this->gathers_.land(values_.bucket_of(i)); });
    }
    /// The same for all parameters.
    void flush() {
        guard_.check_usable("flush");
        guard_.run([&] { this->gathers_.land_all(); });
    }

    /// Plans the buckets again, from the order in which gradients became ready (see Reducer::rebuild_buckets). Shards
    /// and their state move to their new owners. Returns true if the plan changed; ask for all views again then. With
    /// hybrid sharding all groups take the order of the first one. Call it between steps. Collective, over all groups.
    [[nodiscard]] bool rebuild_buckets() {
        check_no_gradients("rebuild_buckets");
        return guard_.run([&] {
            flush();
            this->adopt_written();
            const BucketPlan before = plan();
            const auto share = [&](BufferView view) {  // replicas have the same shards only if all groups plan alike
                this->exchange_.with_replicas(
                    [&](B& replicas) { detail::host_of(replicas).broadcast(view, 0).wait(); });
            };
            if (!engine_->rebuild_buckets(share)) return false;
            move_state(before);
            return true;
        });
    }

    /// Trains these parameters from now on; they were registered with requires_grad = false. Their optimizer state
    /// starts at zero. Buckets are planned as at construction; call `rebuild_buckets` after a step to adapt them. Old
    /// and new buckets exist at the same time for a moment. Afterwards ask for all views and set a weight again. Call
    /// it between steps. Collective.
    void unfreeze(std::span<const std::size_t> which) {
        guard_.check_usable("unfreeze");
        for (std::size_t i : which) {
            guard_.check_index(i, parameters_.size(), "unfreeze");
            const ParameterView& p = parameters_[i];
            if (!p.requires_grad) guard_.check_value(p, "unfreeze");
            if (this->engine_options_.gradients == GradientStorage::borrowed && p.gradient.data == nullptr &&
                p.gradient.count != 0)
                guard_.refuse({.operation = "unfreeze", .parameter = p.name}, "parameter '", p.name,
                              "' has no gradient memory; register it with some, or let gradients live in the buckets");
        }
        check_no_gradients("unfreeze");
        if (engine_->marks().accumulates())
            guard_.refuse("unfreeze", "there are gradients of micro-batches under no_sync(); ",
                          "call finish() and step() first, or discard()");
        List<ParameterView> trained = parameters_;
        for (std::size_t i : which) trained[i].requires_grad = true;
        check_values_apart(trained);
        detail::check_types<O, B::memory_space>(trained, this->costs_, name, detail::named_rank(backend_));
        (void)detail::bucket_infos(trained, engine_->options(), B::memory_space, true, detail::named_rank(backend_));
        guard_.run([&] {
            flush();
            this->adopt_written();
            const BucketPlan before = plan();
            parameters_ = std::move(trained);
            make_engine();
            move_state(before);
        });
    }

private:
    bool in_buckets() const noexcept { return storage_ != ParameterStorage::borrowed; }
    bool shared() const noexcept { return storage_ == ParameterStorage::shared; }
    void copy(ConstBufferView from, BufferView to) { detail::passes_of(backend_).copy(from, to); }
    bool writes_values() const noexcept { return !shared() || backend_.rank() == 0; }

    void check_values_apart(const List<ParameterView>& parameters) const {
        if (const auto [one, other] = detail::overlapping<&ParameterView::value>(parameters); one != nullptr)
            guard_.refuse({.operation = name, .parameter = other->name}, "the values of '", one->name, "' and '",
                          other->name, "' share memory, and each would be updated without the other; ",
                          "register tied weights once, with `uses` of 2");
    }
    void make_engine() {
        check_values_apart(parameters_);
        Base::make_engine(detail::text("stage=", Stage::shards_gradients ? "2" : "1", steps_inside ? " inside" : "",
                                       " parameters=", detail::name_in({"borrowed", "in_buckets", "shared"}, storage_)),
                          in_buckets());
    }

    void check_no_gradients(detail::CheckedCall call) const {
        this->check_averages(call);
        if (!engine_->marks().between_steps())
            guard_.refuse(call.name, "gradients of this step are marked ready already; call finish() and step() first");
    }

    /// Steps all shards inside the reductions if `finish()` has left these for it; false
    /// if averages are still to be stepped.
    bool step_inside(double gradient_scale) {
        if (this->averages_ != detail::Averages::settled) return false;
        this->inside_.run(gradient_scale / this->divisor(), [&] { this->reduce(); });
        for (std::size_t b = 0; b < plan().size(); ++b) {
            this->state_.note_rounded(b, this->own_values(b));
            this->step_.bytes += values_.buckets()[b].bytes();
        }
        return true;
    }
    /// Copies the weights of bucket b to the trainer's memory, except those that this rank has stepped there.
    void hand_out(std::size_t b) {
        if (in_buckets()) return;
        auto own = this->state_.slices(b).begin();
        for (std::size_t i : plan().bucket(b)) {
            const BufferView from = values_.parameter(i), to = parameters_[i].value;
            const bool here = own != this->state_.slices(b).end() && own->parameter == i,
                       stays = here && this->state_.is_master(i);
            const std::size_t first = stays ? own->first : 0, last = stays ? first + own->count : 0;
            copy(from.subview(0, first), to.subview(0, first));
            copy(from.subview(last, from.count - last), to.subview(last, from.count - last));
            own += here ? 1 : 0;
        }
    }

    void renew_values() {
        if (shared()) backend_.barrier().wait();  // no rank reads them any more
        for (std::size_t b = 0; b < plan().size(); ++b)
            this->start_gather(b, engine_->in_flight().tag(b), [](std::size_t) { return true; });
        flush();
        this->unpublished_ = false;
    }

    /// Allocates values and state for the current plan. Collective.
    void make_state() {
        this->lay_out_values(
            1, [](std::size_t) { return std::size_t{0}; }, !in_buckets());
        values_.place_images(backend_, 1);
        if (shared()) detail::share_values(backend_, values_, name);
        List<BufferView> weights(parameters_.size());
        for (std::size_t i = 0; i < weights.size(); ++i) {
            weights[i] = parameter_value(i);
            if (!shared()) engine_->home().planned().set_value(i, weights[i]);
        }
        Base::make_state(std::move(weights));
        if constexpr (steps_inside)  // collective
            this->inside_.adopt_plan(*engine_, this->engine_options_.unused == UnusedParameters::error &&
                                                   !engine_->home().rounds().dealt().several());
        for (std::size_t b = 0; b < plan().size(); ++b)
            for (std::size_t i : plan().bucket(b)) {
                BufferView& value = parameters_[i].value;
                if (writes_values() && value.data != nullptr) copy(value, values_.parameter(i));
                if (in_buckets()) value.data = nullptr;  // the trainer may free it now
            }
        if (shared()) backend_.barrier().wait();
        for (std::size_t b = 0; b < plan().size(); ++b) copy(this->own_values(b), this->state_.array(b, 0));
        if (shared()) backend_.barrier().wait();
    }
    /// Moves weights and state from the plan `before` to the current one. Collective.
    void move_state(const BucketPlan& before) {
        const detail::BucketMemory<B> old_values = std::move(values_);
        const detail::ShardState<B> old_state = std::move(this->state_);
        make_state();
        for (std::size_t b = 0; in_buckets() && writes_values() && b < before.size(); ++b)
            for (std::size_t i : before.bucket(b)) copy(old_values.parameter(i), values_.parameter(i));
        if (shared()) backend_.barrier().wait();
        const detail::StateTransfer<B> to(backend_, plan(), this->state_, parameters_);
        detail::StateTransfer<B>(backend_, before, old_state, parameters_)
            .collect(to.all, [&](std::size_t i, std::size_t a, std::size_t first, ConstBufferView piece) {
                to.store(i, a, first, piece);
            });
        for (std::size_t b = 0; b < plan().size(); ++b) this->state_.note_rounded(b, this->own_values(b));
    }

    ParameterStorage storage_;
};

template <class B, class Range = std::initializer_list<ParameterView>, class O, class First = ShardingOptions,
          class... More>
ShardedOptimizer(B, Range&&, O, First = First(), More...) -> ShardedOptimizer<
    B, O, detail::Chosen<B, Zero1, First, More...>, detail::Chosen<B, SizeCappedBuckets, First, More...>,
    detail::Chosen<B, OverlapBackward, First, More...>, detail::Chosen<B, ReduceScatter, First, More...>>;

}  // namespace gradsync::inline v0_2
