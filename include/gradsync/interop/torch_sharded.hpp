// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <map>

#include "../shard/sharded_optimizer.hpp"
#include "../shard/sharded_parameters.hpp"
#include "torch_module.hpp"

namespace gradsync::inline v0_2 {

/// Stands for your own optimizer: you step `shards()` with `torch::optim::Adam`, or another optimizer that works
/// element by element, and call `stepped()`. One that needs whole tensors, such as Muon, needs WholeParameters.
struct ExternalOptimizer {
    std::size_t state_count() const noexcept { return 0; }
    void begin_step() noexcept {}
    void step(const auto&) const noexcept {}
};

namespace detail {

/// The common part of TorchShardedOptimizer and TorchFullyShard, which are a ShardedOptimizer and a
/// ShardedParameters of tensors.
template <class B, class Sharded>
class TorchSharded : public Sharded {
protected:
    static constexpr bool external = std::same_as<typename Sharded::Optimizer, ExternalOptimizer>;
    static_assert(B::memory_space == MemorySpace::host,
                  "gradsync: sharded tensors are in host memory; on devices use ShardedOptimizer or ShardedParameters");
    static_assert(!external || !Sharded::steps_inside,
                  "gradsync: your optimizer steps after the reduction; use Zero1 or Zero2");
    // Hooks of autograd call these.
    using Sharded::acquire_gradient, Sharded::mark_ready, Sharded::parameter_value;
    using Sharded::broadcast_parameters, Sharded::for_each_gradient;

public:
    TorchSharded& operator=(TorchSharded&&) = delete;

    /// Gives every rank the root's buffers of the module, such as the statistics of batch norms. Collective.
    void broadcast_buffers(int root = 0) { Sharded::broadcast_buffers(trained_.buffer_bytes(), root); }

    /// See ShardedOptimizer::finish. With an ExternalOptimizer, `.grad()` of `shards()` are then the averages, or, with
    /// ReducerOptions::micro_batches, undefined until the last of them. Throws Error(invalid_argument) if `shards()`
    /// were stepped without a call of `stepped()`. Collective.
    void finish() {
        check_stepped("finish");
        Sharded::finish();
        if constexpr (external) {
            for (at::Tensor& s : shards_) s.mutable_grad().reset();
            if (!Sharded::all_averaged()) return;
            Sharded::for_each_gradient([&](const auto& slice) {
                const at::NoGradGuard no_graph;
                using T = std::remove_cvref_t<decltype(slice.value[0])>;
                const auto count = static_cast<std::int64_t>(slice.value.size());
                const at::Tensor &shard = shards_[slice.parameter], &whole = gradients_[slice.parameter];
                at::Tensor part = whole.narrow(0, slice.value.data() - shard.template data_ptr<T>(), count);
                part.copy_(at::from_blob(const_cast<T*>(slice.gradient.data()), {count}, part.options()));
                if (slice.gradient_scale != 1) part.mul_(slice.gradient_scale);
                shard.mutable_grad() = in_shape(slice.parameter, whole);
            });
            averaged_ = digest();
        }
    }

    /// Skips the step; see ShardedOptimizer::discard.
    void discard() {
        check_stepped("discard");
        Sharded::discard();
        averaged_.reset();
        for (at::Tensor& s : shards_)
            if (external) s.mutable_grad().reset();
        forget_gradients();
    }

    /// The optimizer steps this rank's shards with the gradients times `gradient_scale`; see ShardedOptimizer::step.
    /// Clears `.grad()`. Collective, after `finish()`.
    void step(double gradient_scale = 1) {
        static_assert(!external, "gradsync: step the shards with your optimizer, then call stepped()");
        Sharded::step(gradient_scale);
        end_graphs();
    }

    /// This rank's slices of the master weights: for each parameter a flat tensor of f32 (f64 for f64) in memory of
    /// this object. It is empty if this rank has none of its elements. It has the parameter's shape if this rank owns
    /// it as a whole one (WholeParameters), and no `.grad()` if no rank used the parameter
    /// (UnusedParameters::find_unused).
    const std::vector<at::Tensor>& shards() const noexcept {
        static_assert(external,
                      "gradsync: shards() are for an ExternalOptimizer; this optimizer gets its slices from step()");
        return shards_;
    }
    /// Scales the gradients of `shards()`, once after `finish()`; see Reducer::clip_gradients_by_norm. Collective
    /// without `total`.
    double clip_gradients_by_norm(double max_norm, std::optional<double> total = {}) {
        static_assert(external, "gradsync: pass step() clip_factor(gradient_norm(), max_norm)");
        const double norm = total ? *total : Sharded::gradient_norm();
        for (at::Tensor& s : shards_)
            if (s.grad().defined()) s.mutable_grad().mul_(clip_factor(norm, max_norm));
        return norm;
    }
    /// Call it after you have stepped `shards()`: every rank gets the new weights. Clears `.grad()`.
    /// Collective, after `finish()`.
    void stepped() {
        static_assert(external, "gradsync: call step(), which steps the optimizer");
        Sharded::step();
        end_graphs();
    }

    /// All state as whole tensors of f32 (f64 for f64): the master weights under the parameters' names, and the
    /// optimizer's k-th array, from 1, under the name and ":k". Frozen parameters and buffers are not included, because
    /// every rank has them. With a root only the root gets the state, otherwise every rank. Collective, between steps.
    std::map<std::string, at::Tensor> state_dict(std::optional<int> root = {}) {
        std::map<std::string, at::Tensor> state;
        const auto sink = [&](std::size_t i, std::size_t a, std::size_t first, ConstBufferView piece) {
            at::Tensor& whole = state[key(i, a)];
            if (first == 0) whole = like(i, piece.dtype);
            std::memcpy(static_cast<std::byte*>(whole.data_ptr()) + first * size_of(piece.dtype), piece.data,
                        piece.bytes());
        };
        if (root) Sharded::collect_state(*root, sink);
        else Sharded::collect_state(sink);
        return state;
    }

    /// Sets all state to the root's `state`, of any floating types, and the weights accordingly. The `state` of other
    /// ranks is ignored. Missing arrays of the optimizer become zero, so the f32 weights of a module, taken before a
    /// cast, are a valid state. Throws on every rank if a trainable parameter is missing or has another shape.
    /// Collective, between steps.
    void load_state_dict(const std::map<std::string, at::Tensor>& state, int root = 0) {
        at::Tensor whole;
        Sharded::distribute_state(root, [&](std::size_t i, std::size_t a, std::size_t first, BufferView piece) {
            const at::NoGradGuard no_graph;
            const auto found = state.find(key(i, a));
            const bool here = found != state.end();
            if (here ? found->second.sizes() != tensors_[i].sizes() : a == 0)
                raise(Errc::invalid_argument,
                      {.operation = "load_state_dict", .rank = root, .parameter = Sharded::parameters()[i].name},
                      "the state ", here ? "has a wrong shape for '" : "lacks '", key(i, a), "'");
            if (first == 0) whole = here ? like(i, piece.dtype).copy_(found->second) : like(i, piece.dtype).zero_();
            std::memcpy(piece.data, static_cast<const std::byte*>(whole.data_ptr()) + first * size_of(piece.dtype),
                        piece.bytes());
        });
        end_graphs();
    }

protected:
    /// Broadcasts rank 0's weights.
    template <class... Arguments>
    TorchSharded(B comm, const TorchParameters& trained, Arguments&&... arguments)
        : Sharded(std::move(comm), without_gradients(trained).views(), std::forward<Arguments>(arguments)...),
          trained_(trained),
          keeps_(this->engine_options_.gradients != GradientStorage::pooled &&
                 this->engine_options_.accumulation == Accumulation::in_gradients),
          hooks_(tensors_, [this](std::size_t i, const at::Tensor&) { mark(i); }) {
        Sharded::broadcast_parameters();
        if (!external) return;
        Sharded::for_each_shard([&](std::size_t i, std::size_t, std::size_t, BufferView m) {
            shards_[i] = in_shape(i, at::from_blob(m.data, {static_cast<std::int64_t>(m.count)}, scalar_type(m.dtype)));
        });
        for (at::Tensor& s : shards_) {
            if (!s.defined()) s = at::empty({0});
            gradients_.push_back(at::empty({s.numel()}, s.options()));
        }
    }
    ~TorchSharded() { forget_gradients(); }

    const TorchParameters trained_;
    const std::vector<at::Tensor>& tensors_ = trained_.tensors;

private:
    static const TorchParameters& without_gradients(const TorchParameters& trained) {
        for (const at::Tensor& t : trained.tensors) t.mutable_grad().reset();
        return trained;
    }
    static at::ScalarType scalar_type(DType dtype) noexcept { return dtype == DType::f64 ? at::kDouble : at::kFloat; }
    /// The shard of parameter i as its optimizer sees it. `flat`: its elements.
    at::Tensor in_shape(std::size_t i, const at::Tensor& flat) const {
        return Sharded::is_whole(i) ? flat.as_strided(tensors_[i].sizes(), tensors_[i].strides()) : flat;
    }
    /// A tensor of the shape and strides of parameter i.
    at::Tensor like(std::size_t i, DType dtype) const { return at::empty_like(tensors_[i], scalar_type(dtype)); }
    std::string key(std::size_t i, std::size_t a) const {
        const ParameterView& p = Sharded::parameters()[i];
        return a == 0 ? p.name : text(p.name, ":", a);
    }

    /// Moves the gradient that autograd made into the engine's memory.
    void mark(std::size_t i) {
        trained_.check_place(i, Sharded::parameter_value(i).data);
        if (keeps_) check_stepped("mark_ready");  // else it may be another micro-batch
        const at::NoGradGuard no_graph;
        at::Tensor& gradient = tensors_[i].mutable_grad();
        const at::Tensor& t = tensors_[i];
        at::Tensor home =
            at::from_blob(Sharded::acquire_gradient(i).data, t.sizes(), t.strides(), t.options().requires_grad(false));
        if (!gradient.defined()) home.zero_();
        else if (gradient.layout() != at::kStrided) home.zero_().add_(gradient);
        else if (gradient.data_ptr() != home.data_ptr()) home.copy_(gradient);
        gradient = keeps_ ? home : at::Tensor();
        Sharded::mark_ready(i);
    }
    void forget_gradients() { without_gradients(trained_); }
    /// Marks the weights as changed, so that libtorch refuses a backward through an older graph.
    void end_graphs() {
        averaged_.reset();
        forget_gradients();
        for (const at::Tensor& t : tensors_)
            if (t.requires_grad()) torch::autograd::impl::bump_version(t);
    }

    /// Refuses a call after shards() were stepped, but not distributed.
    void check_stepped(const char* operation) const {
        if (averaged_ && digest() != *averaged_)
            refuse(operation, "this rank's shards() were stepped, but no rank has the new weights; ",
                   "call stepped() after your optimizer");
    }
    /// A digest of one element of each shard. C++ optimizers do not count versions.
    std::uint64_t digest() const {
        std::uint64_t sum = 0;
        for (const at::Tensor& s : shards_)
            if (s.numel() != 0) sum = fnv1a(s.data_ptr(), 4, sum);
        return sum;
    }

    const bool keeps_;  ///< gradients stay in `.grad()` until the step, so that autograd adds to them
    std::optional<std::uint64_t> averaged_;                        ///< the digest at `finish()`, until the step
    std::vector<at::Tensor> shards_{tensors_.size()}, gradients_;  ///< by parameter, with an ExternalOptimizer
    TorchHooks hooks_;
};

}  // namespace detail

/// ShardedOptimizer (ZeRO stages 1 and 2) of libtorch tensors: each rank steps its share of the weights.
///
///     // Or names and tensors instead of the module, as for TorchReducer.
///     gs::TorchShardedOptimizer sharded(comm, *model, MyAdam{...}, gs::Zero2{});
///     for (...) {
///         loss_of(batch).backward();  // full buckets leave meanwhile
///         sharded.finish();
///         sharded.step();             // all ranks hold the new weights
///     }
///
/// The weights lie in memory of this object. Its destructor waits for them, and copies them to memory of their own.
/// With Zero2 `.grad()` is undefined after the backward. With Zero1 it holds the sum of micro-batches under `no_sync()`
/// until `step()`. You need not call `zero_grad()`.
///
/// Collective calls, threads and errors are as for ShardedOptimizer. Do not add, replace, freeze or unfreeze parameters
/// while it lives. It neither moves nor copies.
template <class B, class O, class Stage = Zero1, class Buckets = SizeCappedBuckets, class Overlap = OverlapBackward,
          class Exchange = ReduceScatter>
class TorchShardedOptimizer
    : public detail::TorchSharded<B, ShardedOptimizer<B, O, Stage, Buckets, Overlap, Exchange>> {
    using Sharded = ShardedOptimizer<B, O, Stage, Buckets, Overlap, Exchange>;
    using Base = detail::TorchSharded<B, Sharded>;
    using Role = detail::Role;

public:
    /// The optimizer is a FlatOptimizer or an ExternalOptimizer. After it come `ReducerOptions`, the stage, and
    /// policies, in any order. Gives every rank the weights of rank 0. Collective. Throws as ShardedOptimizer's
    /// constructor does.
    template <class First = ReducerOptions, class... More>
        requires(std::same_as<First, ReducerOptions> || (std::same_as<More, ReducerOptions> || ...))
    TorchShardedOptimizer(B comm, const TorchParameters& trained, O optimizer, First first = {}, More... more)
        : Base(std::move(comm), trained, std::move(optimizer), of_sharded(std::move(first)),
               of_sharded(std::move(more))...) {
        static_assert(detail::Accepts<B, ReducerOptions, Role::buckets, Role::overlap, Role::exchange, Role::stage,
                                      Role::shards>::template check<First, More...>());
        for (const at::Tensor& t : tensors_)
            if (t.requires_grad()) t.set_data(detail::alias(t));
        move_into_buckets();
    }
    /// The same with default options.
    template <class... Policies>
    TorchShardedOptimizer(B comm, const TorchParameters& trained, O optimizer, Policies... policies)
        : TorchShardedOptimizer(std::move(comm), trained, std::move(optimizer), ReducerOptions(),
                                std::move(policies)...) {}
    ~TorchShardedOptimizer() {
        try {
            Sharded::flush();
        } catch (...) {  // the weights are those of a failed step
        }
        for (const at::Tensor& t : tensors_)
            if (t.requires_grad())
                detail::move_storage(t, detail::move_storage(t.detach().clone(), {nullptr, at::kCPU}));
    }

    /// See ShardedOptimizer::rebuild_buckets. The slices of an ExternalOptimizer stay where they are. Throws
    /// Error(invalid_argument) after a micro-batch under `no_sync()`.
    [[nodiscard]] bool rebuild_buckets()
        requires(!Base::external)
    {
        for (const at::Tensor& t : tensors_)  // they lie in the buckets
            if (t.requires_grad() && t.grad().defined())
                detail::refuse("rebuild_buckets",
                               "`.grad()` holds micro-batches; call finish() and step() first, or discard()");
        if (!Sharded::rebuild_buckets()) return false;
        move_into_buckets();
        return true;
    }

private:
    using Base::tensors_;
    using Sharded::adopt_values, Sharded::unfreeze;  // the slices and the tensors would not follow

    /// An argument as the ShardedOptimizer takes it.
    static ShardingOptions of_sharded(const ReducerOptions& options) {
        return {Stage::shards_gradients ? options : detail::with_storage(options, GradientStorage::in_buckets),
                ParameterStorage::in_buckets};
    }
    template <class Policy>
    static Policy of_sharded(Policy policy) {
        return policy;
    }
    void move_into_buckets() {
        for (std::size_t i = 0; i < tensors_.size(); ++i)
            if (tensors_[i].requires_grad())
                detail::move_storage(tensors_[i], {Sharded::parameter_value(i).data, at::kCPU});
    }
};

template <class B, class O, class First = ReducerOptions, class... More>
TorchShardedOptimizer(B, const TorchParameters&, O, First = First(), More...) -> TorchShardedOptimizer<
    B, O, detail::Chosen<B, Zero1, First, More...>, detail::Chosen<B, SizeCappedBuckets, First, More...>,
    detail::Chosen<B, OverlapBackward, First, More...>, detail::Chosen<B, ReduceScatter, First, More...>>;

/// ShardedParameters (ZeRO stage 3, FSDP) of libtorch tensors. Units are submodules, and their weights exist only while
/// they run: your `forward` runs each unit with `run`, and autograd's hooks gather the weights again in the backward.
///
///     struct Net : torch::nn::Module {
///         torch::Tensor forward(torch::Tensor x, auto& sharded) {
///             x = sharded.run(0, [&] { return first(x); });
///             return sharded.run(1, [&] { return last(torch::relu(x)); });
///         }
///     };
///     gs::TorchFullyShard sharded(comm, *model, MyAdam{...}, {"first", "last"});
///
/// Parameters outside of all units stay gathered, as `replicate_below` does it for small ones. Weights of units that do
/// not run have no memory: libtorch refuses to compute with them, or crashes. One unit runs at a time. Units do not
/// nest, and tied weights must lie in one unit or in none. After the destruction of this object trainable weights have
/// no memory; take them from `state_dict()` before.
///
/// All ranks must run the same units in the same order; forward, backward and all other calls come from one thread.
/// Errors are as for ShardedParameters. Do not add, replace, freeze or unfreeze parameters while it lives. It neither
/// moves nor copies.
template <class B, class O, class Overlap = OverlapBackward, class Exchange = ReduceScatter>
class TorchFullyShard : public detail::TorchSharded<B, ShardedParameters<B, O, Overlap, Exchange>> {
    using Sharded = ShardedParameters<B, O, Overlap, Exchange>;
    using Base = detail::TorchSharded<B, Sharded>;
    using Role = detail::Role;

public:
    static constexpr std::size_t no_unit = static_cast<std::size_t>(-1);  ///< Internal.
    /// `units` are names of submodules, such as "blocks.0". The optimizer is a FlatOptimizer or an ExternalOptimizer.
    /// After the units come `ShardedParametersOptions`, an overlap policy and an exchange, in any order. Gives every
    /// rank the weights of rank 0. Collective. Throws as ShardedParameters' constructor does, and
    /// Error(invalid_argument) for a unit without parameters.
    template <class First = ShardedParametersOptions, class... More>
    TorchFullyShard(B comm, const TorchParameters& trained, O optimizer, const std::vector<std::string>& units,
                    First first = {}, More... more)
        : Base(std::move(comm), trained, std::move(optimizer), Units(trained.units_of(units)), std::move(first),
               std::move(more)...),
          units_(units.size()),
          members_(units.size() + 1) {
        static_assert(detail::Accepts<B, ShardedParametersOptions, Role::overlap, Role::exchange,
                                      Role::shards>::template check<First, More...>());
        for (std::size_t i = 0; i < tensors_.size(); ++i) {
            if (!tensors_[i].requires_grad()) continue;
            members_[detail::smaller(this->buckets_.unit_of(i), units_)].push_back(i);
            tensors_[i].set_data(detail::alias(tensors_[i]));
        }
        if (Sharded::unit_count() > units_) Sharded::acquire(units_);
        place(units_, true);
    }
    ~TorchFullyShard() {
        for (std::size_t k = 0; k <= units_; ++k) place(k, false);
    }

    /// Runs `forward` with the weights of unit k, and returns its result, a tensor. Collective.
    template <class F>
    at::Tensor run(std::size_t k, F&& forward) {
        enter(k);
        return leave(k, std::forward<F>(forward)());
    }
    /// For units with several results: `enter(k)` gathers the weights of unit k and releases those of the unit before
    /// it. Pass each result to `leave`, so that the weights are gathered again before its backward. Collective: a rank
    /// without a batch (`begin_step(false)`) enters the units in the order of the others' forward and backward.
    void enter(std::size_t k) {
        if (k == current_) return;
        if (k >= units_ && k != no_unit)
            detail::refuse("enter", "unit index ", k, " is out of range [0, ", units_, ")");
        if (const std::size_t last = std::exchange(current_, no_unit); last != no_unit) {
            place(last, false);
            Sharded::release(last);
        }
        if (k == no_unit) return;
        Sharded::acquire(k);
        current_ = k;
        place(k, true);
    }
    /// See `enter`.
    at::Tensor leave(std::size_t k, at::Tensor result) {
        if (result.requires_grad())
            result.register_hook([this, k, alive = std::weak_ptr(alive_)](const at::Tensor&) {
                if (!alive.expired()) enter(k);
            });
        return result;
    }
    std::size_t unit_count() const noexcept { return units_; }  ///< Returns the number of units.

    /// See TorchShardedOptimizer. Releases the unit that ran last.
    void finish() {
        enter(no_unit);
        Base::finish();
    }

private:
    using Base::tensors_;

    using Sharded::acquire, Sharded::gather, Sharded::release, Sharded::unit_of;  // see `enter`

    /// Gives the weights of unit k their memory, or takes it away. The storage stays, because views
    /// that autograd saves share it.
    void place(std::size_t k, bool here) {
        for (const std::size_t i : members_[k]) {
            if (here && tensors_[i].storage().data() != nullptr) Base::trained_.check_place(i, nullptr);
            detail::move_storage(tensors_[i],
                                 {here ? const_cast<void*>(Sharded::parameter_value(i).data) : nullptr, at::kCPU});
        }
    }

    const std::size_t units_;
    List<List<std::size_t>> members_;  ///< trainable parameters by unit; the last ones stay gathered
    std::size_t current_ = no_unit;    ///< the unit that runs
    /// For hooks of graphs that outlive this object.
    std::shared_ptr<const char> alive_ = std::make_shared<const char>();
};

template <class B, class O, class First = ShardedParametersOptions, class... More>
TorchFullyShard(B, const TorchParameters&, O, std::vector<std::string>, First = First(), More...)
    -> TorchFullyShard<B, O, detail::Chosen<B, OverlapBackward, First, More...>,
                       detail::Chosen<B, ReduceScatter, First, More...>>;

}  // namespace gradsync::inline v0_2
