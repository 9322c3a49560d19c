// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../average.hpp"
#include "../reducer.hpp"
#include "torch_memory.hpp"
#include "torch_module.hpp"

namespace gradsync::inline v0_2 {

namespace detail {

/// Keeps the gradients of tensors in the memory that the engine reads and writes.
class TorchGradients : protected TorchParameters {
protected:
    /// `plain`: the exchange is AllReduce, over host memory. Collective.
    template <class B>
    TorchGradients(B& comm, const TorchParameters& parameters, ReducerOptions options, bool plain)
        : TorchParameters(parameters), options_(options), homes_(tensors.size()), taken_(tensors.size()) {
        const bool borrows = (plain && options.unused == UnusedParameters::error) || options.reduce_dtype ||
                             options.accumulation == Accumulation::in_buckets;
        options_ = with_storage(options, borrows ? GradientStorage::borrowed : GradientStorage::in_buckets);
        for (const ParameterView& p : views())
            weights_.push_back(p.value.data);  // throws for tensors that are not dense
        if constexpr (abilities_of<B>.cheaper_alone) share_memory(comm);
        for (std::size_t i = 0; !in_buckets() && i < tensors.size(); ++i)
            if (tensors[i].requires_grad()) tensors[i].mutable_grad() = homes_[i] = home(tensors[i]);
    }
    ~TorchGradients() = default;

    /// Returns the views that the engine gets. A gradient that moves into a bucket has no memory of its own.
    std::vector<ParameterView> placed_views() const {
        std::vector<ParameterView> all = views();
        for (ParameterView& one : all)
            if (in_buckets()) one.gradient.data = nullptr;
        return all;
    }
    bool in_buckets() const noexcept { return options_.gradients != GradientStorage::borrowed; }

    /// Whether gradient i lies where the engine expects it.
    bool at_home(std::size_t i) const {
        const at::Tensor& gradient = tensors[i].grad();
        return gradient.defined() && gradient.layout() == at::kStrided && gradient.data_ptr() == homes_[i].data_ptr();
    }
    /// Gradient i, which autograd put elsewhere, with the strides of its parameter. Zeros if autograd made none.
    at::Tensor dense(std::size_t i) const {
        const at::Tensor& gradient = tensors[i].grad();
        if (!gradient.defined()) return at::zeros_like(homes_[i]);
        if (gradient.layout() == at::kStrided && gradient.strides() == homes_[i].strides()) return gradient;
        const at::NoGradGuard no_graph;
        return at::zeros_like(homes_[i]).add_(gradient);  // it may be sparse
    }
    /// Returns all gradients to the memory that the engine expects. An undefined gradient becomes zero.
    void settle() {
        check_weights();
        for (std::size_t i = 0; i < tensors.size(); ++i) {
            if (!tensors[i].requires_grad() || at_home(i)) continue;
            const at::NoGradGuard no_graph;
            if (!std::exchange(taken_[i], char{})) homes_[i].copy_(dense(i));
            tensors[i].mutable_grad() = homes_[i];
        }
    }

    /// Throws for weights that this object cannot keep equal any more.
    void check_weights() const {
        for (std::size_t i = 0; i < tensors.size(); ++i) {
            check_place(i, weights_[i]);
            if (tensors[i].requires_grad() && !homes_[i].defined())
                raise(Errc::invalid_argument, {.parameter = names[i]}, "parameter '", names[i],
                      "' was frozen at construction; make a new TorchReducer after it was unfrozen");
        }
    }

    ReducerOptions options_;
    std::vector<at::Tensor> homes_;  ///< by parameter: the memory of its gradient that the engine expects
    std::vector<char> taken_;        ///< by parameter: the engine adds up micro-batches, and has taken the gradient

private:
    /// Makes an arena for the gradients if all ranks are processes of one machine and have gradients of the same sizes.
    template <class B>
    void share_memory(B& comm) {
        std::vector<std::size_t> sizes;
        for (const at::Tensor& t : tensors)
            if (t.requires_grad() && t.is_cpu()) sizes.push_back(t.nbytes());
        const bool useful = !in_buckets() && comm.size() > 1 && !comm.shares(BufferView(this, 1, DType::u8));
        const std::uint64_t bytes = useful ? TorchArena::bytes(sizes) : 0;
        bool same = bytes != 0;
        for (const std::uint64_t others : gather_values(comm, {&bytes, 1})) same = same && others == bytes;
        if (!same) return;  // if ranks differ, the engine says how
        const auto memory = std::make_shared<decltype(comm.allocate(bytes))>(comm.allocate(bytes));
        if (!comm.shares(BufferView(memory->data(), bytes, DType::u8))) return;
        arena_ = std::make_shared<TorchArena>(std::shared_ptr<void>(memory, memory->data()), sizes);
        open_ = TorchAllocator::open(arena_);
    }

    /// Memory for the gradient of `t`, with its contents.
    at::Tensor home(const at::Tensor& t) const {
        const at::Tensor& gradient = t.grad();
        void* const slot = arena_ ? arena_->take(t.nbytes()) : nullptr;
        if (slot == nullptr && gradient.defined() && gradient.strides() == t.strides()) return gradient;
        const auto give_back = [arena = arena_, bytes = t.nbytes()](void* data) { arena->give_back(data, bytes); };
        at::Tensor result =
            slot == nullptr ? at::empty_like(t)
                            : at::from_blob(slot, t.sizes(), t.strides(), give_back, t.options().requires_grad(false));
        return gradient.defined() ? result.copy_(gradient) : result.zero_();
    }

    std::vector<const void*> weights_;
    std::shared_ptr<TorchArena> arena_;
    std::shared_ptr<void> open_;  ///< while it lives, autograd allocates from the arena
};

}  // namespace detail

/// The Reducer of libtorch tensors: gradients are marked ready as autograd produces them.
///
///     gs::TorchReducer sync(comm, *model);  // or names and tensors: {{"weight", weight}, {"bias", bias}}
///     sync.broadcast_parameters();
///     for (...) {
///         optimizer.zero_grad();
///         loss_of(batch).backward();  // full buckets leave meanwhile
///         sync.finish();
///         optimizer.step();
///     }
///
/// - GradientStorage::borrowed, the default: large gradients have a bucket of their own, and are averaged where
///   autograd puts them. Processes of one machine share memory for them: while a TorchReducer lives, an allocator in
///   front of libtorch's puts results of a backward there that are as large as one of its gradients. Smaller gradients
///   are copied into buckets and back.
/// - GradientStorage::in_buckets, the default with UnusedParameters::find_unused, with a compressor, and in device
///   memory: `.grad()` is a view of its bucket. `zero_grad()` drops the view, which costs a copy in the next backward;
///   `zero_grad(false)` keeps it.
///
/// With Accumulation::in_buckets a backward clears `.grad()`, so that autograd does not add up micro-batches too;
/// `finish()` restores it.
///
/// A weight that occurs several times in the module is one parameter, ready when all its uses are accumulated.
///
/// `finish()` throws an error that names the parameters without a gradient. With UnusedParameters::find_unused, ranks
/// that did not use a parameter contribute zeros to its average. If no rank used it, its gradient stays as it was, or
/// becomes zero if there was none; `was_used(i)` tells.
///
/// OverlapForward does not compile: libtorch's optimizers step all parameters at once, so they would wait for all
/// averages before the forward.
///
/// Collective calls, threads and errors are as for Reducer. Do not add, replace, freeze or unfreeze parameters while it
/// lives. `broadcast_parameters()` and `finish()` throw Error(invalid_argument) if a weight was unfrozen or has other
/// memory, as after `torch::load`. It owns gradients in buckets: their `.grad()` is undefined after its destruction. It
/// can be neither moved nor copied.
template <class B, class Buckets = SizeCappedBuckets, class Overlap = OverlapBackward, class Exchange = AllReduce>
class TorchReducer : detail::TorchGradients, public Reducer<B, Buckets, Overlap, Exchange> {
    using Base = Reducer<B, Buckets, Overlap, Exchange>;
    using Role = detail::Role;
    static_assert(!detail::gathers_in_forward<Overlap>(),
                  "gradsync: OverlapForward steps one parameter at a time, and libtorch's optimizers cannot; use "
                  "OverlapBackward");
    static constexpr bool plain = std::is_same_v<Exchange, AllReduce> && B::memory_space == MemorySpace::host;

public:
    /// Synchronises the parameters of a module, in the order of their registration, or those of a list of names and
    /// tensors. After them come options, policies and an exchange, in any order, as for Reducer. Collective. Throws as
    /// Reducer's constructor does, and Error(invalid_argument), naming the tensor, if one cannot be synchronised.
    template <class First = ReducerOptions, class... More>
    TorchReducer(B comm, const TorchParameters& trained, First first = {}, More... more)
        : TorchGradients(comm, trained, detail::choose<ReducerOptions, B>(first, more...), plain),
          Base(comm, this->placed_views(), this->options_, detail::choose<Buckets, B>(first, more...),
               detail::choose<Overlap, B>(first, more...), detail::choose<Exchange, B>(first, more...)),
          hooks_(tensors, [this](std::size_t i, const at::Tensor& produced) { mark(i, produced); }) {
        static_assert(detail::Accepts<B, ReducerOptions, Role::buckets, Role::overlap,
                                      Role::exchange>::template check<First, More...>());
        if (in_buckets()) move_into_buckets();
    }
    /// Takes gradients that are in buckets from the module.
    ~TorchReducer() {
        for (std::size_t i = 0; in_buckets() && i < homes_.size(); ++i) {
            if (!homes_[i].defined()) continue;
            tensors[i].mutable_grad().reset();
            detail::move_storage(homes_[i], {nullptr, tensors[i].device()});
        }
    }

    /// The same as in Reducer.
    void broadcast_parameters(int root = 0) {
        this->check_weights();
        Base::broadcast_parameters(root);
    }
    /// Gives every rank the root's buffers of the module, such as the statistics of batch norms. Collective.
    void broadcast_buffers(int root = 0) { Base::broadcast_buffers(this->buffer_bytes(), root); }
    /// Replaces floating buffers by their mean over the ranks, and others, such as counts of batches, by rank 0's. Call
    /// it before an evaluation or a checkpoint. Collective.
    void average_buffers() {
        List<BufferView> floating;
        for (const at::Tensor& b : buffers)
            if (b.is_floating_point()) floating.push_back(buffer(b));
        if (!floating.empty())
            detail::all_reduce_together(Base::backend(), ListView<const BufferView>(floating), ReduceOp::mean);
        Base::broadcast_buffers(this->buffer_bytes(false));
    }

    /// These three do the same as in Reducer.
    void finish() {
        settle();
        Base::finish();
    }
    /// See Reducer::try_finish.
    [[nodiscard]] bool try_finish() {
        settle();
        return Base::try_finish();
    }
    /// See Reducer::rebuild_buckets.
    [[nodiscard]] bool rebuild_buckets() {
        if (!Base::rebuild_buckets()) return false;
        if (in_buckets()) move_into_buckets();
        return true;
    }

private:
    // Hooks of autograd mark gradients, and place them.
    using Base::backward, Base::gradient_view, Base::mark_ready, Base::rebind_gradient;

    void move_into_buckets() {
        for (std::size_t i = 0; i < tensors.size(); ++i) {
            const at::Tensor& t = tensors[i];
            if (!t.requires_grad()) continue;
            if (!homes_[i].defined()) homes_[i] = detail::alias(t);
            detail::move_storage(homes_[i], {Base::gradient_view(i).data, t.device()});
            if (!taken_[i]) t.mutable_grad() = homes_[i];
        }
    }

    void mark(std::size_t i, const at::Tensor& produced) {
        at::Tensor& current = tensors[i].mutable_grad();
        if (at_home(i)) {
            Base::mark_ready(i);
        } else {
            at::Tensor gradient = dense(i);
            // The average may be written to this memory, and others may still read autograd's numbers there.
            if (const at::NoGradGuard no_graph; !in_buckets() && !detail::is_alone(gradient, produced))
                gradient = gradient.clone();
            current = gradient;
            Base::mark_ready(i, buffer(gradient));  // if it throws, both memories live
            if (Base::gradient_view(i).data == gradient.data_ptr()) homes_[i] = gradient;
            else current = homes_[i];  // it was copied
        }
        if (options_.accumulation == Accumulation::in_buckets) {  // autograd must not add to it
            taken_[i] = 1;
            current.reset();
        }
    }

    detail::TorchHooks hooks_;
};

template <class B, class First = ReducerOptions, class... More>
TorchReducer(B, const TorchParameters&, First = First(), More...)
    -> TorchReducer<B, detail::Chosen<B, SizeCappedBuckets, First, More...>,
                    detail::Chosen<B, OverlapBackward, First, More...>, detail::Chosen<B, AllReduce, First, More...>>;

}  // namespace gradsync::inline v0_2
