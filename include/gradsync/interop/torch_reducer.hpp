// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../reducer.hpp"
#include "torch_module.hpp"

namespace gradsync::inline v0_2 {

/// The Reducer of a libtorch module: gradients are marked ready as autograd produces them.
///
///     gs::TorchReducer sync(comm, *model);
///     sync.broadcast_parameters();
///     for (...) {
///         optimizer.zero_grad();
///         loss_of(batch).backward();  // full buckets leave meanwhile
///         sync.finish();
///         optimizer.step();
///     }
///
/// Unless the options name another GradientStorage, `.grad()` of every parameter is a view of its bucket, and nothing is copied. With
/// GradientStorage::borrowed it keeps its own memory. Both work with `zero_grad(set_to_none)`, at the cost of a copy. A weight that stands in several places of the module is one
/// parameter, ready when all its uses are accumulated.
///
/// `finish()` throws an error that names the parameters without a gradient. With UnusedParameters::find_unused such a parameter is averaged
/// over the ranks that used it. If no rank did, its gradient stays as it was, or becomes zero if there was none.
///
/// Collective calls, threads and errors are as for Reducer. Do not add, replace, freeze or unfreeze parameters while it lives. It owns
/// gradients in buckets: `.grad()` is undefined after its destruction. It neither moves nor copies.
template <class B, class Buckets = SizeCappedBuckets, class Overlap = OverlapBackward, class Exchange = AllReduce>
class TorchReducer : Reducer<B, Buckets, Overlap, Exchange> {
    using Base = Reducer<B, Buckets, Overlap, Exchange>;
    using Role = detail::Role;
    static_assert(!ExchangeOver<Exchange, B>::traits.scatters,
                  "gradsync: TorchReducer's gradients are whole; use AllReduce or a compressor");
    static_assert(!detail::gathers_in_forward<Overlap>(), "gradsync: TorchReducer has no step by parameter; use OverlapBackward");

public:
    /// Synchronises the parameters of `module`, in the order of their registration. After it come options, policies and an exchange, in any
    /// order, as for Reducer. Collective. Throws as Reducer's constructor does, and Error(invalid_argument), naming the tensor, if one
    /// cannot be synchronised.
    template <class First = ReducerOptions, class... More>
    TorchReducer(B comm, const torch::nn::Module& module, First first = {}, More... more)
        : TorchReducer(std::move(comm), detail::TorchParameters(module), module.buffers(),
                       detail::with_storage(detail::choose<ReducerOptions, Role::other, B>(first, more...), GradientStorage::in_buckets),
                       detail::choose<Buckets, Role::buckets, B>(first, more...), detail::choose<Overlap, Role::overlap, B>(first, more...),
                       detail::choose<Exchange, Role::exchange, B>(first, more...)) {
        static_assert(detail::Accepts<B, ReducerOptions, Role::buckets, Role::overlap, Role::exchange>::template check<First, More...>());
        if (in_buckets_) move_into_buckets();
        else
            for (std::size_t i = 0; i < tensors_.size(); ++i) homes_[i] = tensors_[i].grad();
    }
    /// Takes gradients that are in buckets from the module.
    ~TorchReducer() {
        for (std::size_t i = 0; in_buckets_ && i < homes_.size(); ++i)
            if (homes_[i].defined()) tensors_[i].mutable_grad().reset();
    }

    using Base::backend, Base::begin_step, Base::broadcast_parameters, Base::clip_gradients_by_norm, Base::clip_gradients_by_value,
        Base::discard, Base::exchange, Base::gradient_norm, Base::no_sync, Base::parameters, Base::plan, Base::record_order,
        Base::set_weight, Base::statistics;

    /// Gives every rank the root's buffers of the module, such as the statistics of batch norms. Collective.
    void broadcast_buffers(int root = 0) {
        std::vector<BufferView> views;
        for (const at::Tensor& b : buffers_) views.push_back(buffer(b));
        Base::broadcast_buffers(views, root);
    }

    /// These three do the same as in Reducer.
    void finish() {
        settle_all();
        Base::finish();
    }
    [[nodiscard]] bool try_finish() {
        settle_all();
        return Base::try_finish();
    }
    [[nodiscard]] bool rebuild_buckets() {
        if (!Base::rebuild_buckets()) return false;
        if (in_buckets_) move_into_buckets();
        return true;
    }

private:
    TorchReducer(B comm, const detail::TorchParameters& parameters, std::vector<at::Tensor> buffers, ReducerOptions options,
                 Buckets buckets, Overlap overlap, Exchange exchange)
        : Base(std::move(comm), (options.gradients == GradientStorage::in_buckets ? parameters : parameters.allocate_gradients()).views(),
               options, std::move(buckets), std::move(overlap), std::move(exchange)),
          tensors_(parameters.tensors),
          buffers_(std::move(buffers)),
          in_buckets_(options.gradients == GradientStorage::in_buckets),
          homes_(tensors_.size()),
          hooks_(tensors_, [this](std::size_t i) {
              settle(i);
              Base::mark_ready(i);
          }) {}

    void move_into_buckets() {
        for (std::size_t i = 0; i < tensors_.size(); ++i) {
            const at::Tensor& t = tensors_[i];
            if (!t.requires_grad()) continue;
            homes_[i] = at::from_blob(Base::gradient_view(i).data, t.sizes(), t.strides(), t.options().requires_grad(false));
            t.mutable_grad() = homes_[i];
        }
    }

    /// Copies a gradient back to its memory in the engine, if `zero_grad` made autograd put it elsewhere or drop it.
    void settle(std::size_t i) {
        at::Tensor& gradient = tensors_[i].mutable_grad();
        at::Tensor& home = homes_[i];
        if (gradient.defined() && gradient.layout() == at::kStrided && gradient.data_ptr() == home.data_ptr()) return;
        const at::NoGradGuard no_graph;
        home.zero_();
        if (gradient.defined()) home.add_(gradient);  // `gradient` may be sparse
        gradient = home;
    }

    void settle_all() {
        for (std::size_t i = 0; i < tensors_.size(); ++i)
            if (tensors_[i].requires_grad()) settle(i);
    }

    std::vector<at::Tensor> tensors_;
    std::vector<at::Tensor> buffers_;
    bool in_buckets_;
    std::vector<at::Tensor> homes_;  ///< the memory of each gradient that the engine knows
    detail::TorchHooks hooks_;
};

template <class B, class First = ReducerOptions, class... More>
TorchReducer(B, const torch::nn::Module&, First = First(), More...)
    -> TorchReducer<B, detail::Chosen<detail::Role::buckets, B, SizeCappedBuckets, First, More...>,
                    detail::Chosen<detail::Role::overlap, B, OverlapBackward, First, More...>,
                    detail::Chosen<detail::Role::exchange, B, AllReduce, First, More...>>;

}  // namespace gradsync::inline v0_2
