// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/flat_optimizer.hpp"
#include "../engine/bucket_memory.hpp"
#include "../engine/parameters.hpp"
#include "../engine/weights.hpp"
#include "rounding.hpp"

namespace gradsync::inline v0_2 {

/// Bytes of memory that the library owns on this rank, gaps between parameters included.
struct ShardMemory {
    std::size_t parameters = 0;       ///< weights that the model computes with
    std::size_t gradients = 0;        ///< buckets and shards of gradients
    std::size_t master_weights = 0;   ///< master weights kept in addition to the weights
    std::size_t optimizer_state = 0;  ///< this rank's shards of the optimizer's arrays
};

namespace detail {

/// Fails to compile, with an explanation, if O cannot step shards in the memory of B.
template <class O, class B>
consteval bool require_optimizer() {
    if constexpr (B::memory_space == MemorySpace::host)
        static_assert(FlatOptimizer<O>,
                      "gradsync: the second argument is an optimizer with state_count(), begin_step() and "
                      "step(OptimizerSlice<float>); see docs/guides/sharding.md");
    else {
        static_assert(
            DeviceOptimizer<O, decltype(std::declval<B&>().stream())>,
            "gradsync: the second argument is an optimizer for devices, with state_count(), begin_step() and "
            "step(std::span<const DeviceSlice>, double, stream), such as gs::cuda::AdamW; see docs/guides/sharding.md");
        static_assert(
            !requires(O& optimizer, const RoundingSlice& slice) { optimizer.round(slice); },
            "gradsync: round(RoundingSlice) is for host memory; on devices the library rounds weights, to nearest");
        static_assert(
            !requires(O& optimizer, const OptimizerMatrix<float>& matrix) { optimizer.step(matrix); },
            "gradsync: step(OptimizerMatrix) is for host memory; on devices pass WholeParameters, and step the slices "
            "that begin at element 0");
    }
    return true;
}

/// Is parameter i whole? `costs`: see `costs_of_whole`.
inline bool is_whole(ListView<const double> costs, std::size_t i) noexcept { return i < costs.size() && costs[i] != 0; }
/// Why O cannot step this parameter, as a matrix if it is `whole`; null if it can.
template <class O, MemorySpace space>
const char* refusal_of(const ParameterView& p, bool whole) {
    if (!is_floating(p.value.dtype) || !is_floating(p.gradient.dtype))
        return "is not of a floating type; freeze it (requires_grad = false)";
    if constexpr (space == MemorySpace::host) {
        if constexpr (!requires(O& optimizer, const OptimizerSlice<double>& slice) { optimizer.step(slice); })
            if (p.value.dtype == DType::f64) return "is f64, and the optimizer has no step(OptimizerSlice<double>)";
        if constexpr (MatrixOptimizer<O>) {
            if constexpr (!requires(O& optimizer, const OptimizerMatrix<double>& matrix) { optimizer.step(matrix); })
                if (whole && p.value.dtype == DType::f64)
                    return "is f64, and the optimizer has no step(OptimizerMatrix<double>); give it one, or the "
                           "parameter a cost of 0";
            if (whole && p.shape.size() < 2)
                return "is to be stepped as a matrix, but has no shape of two dimensions; give it one, or a cost of 0";
            if (whole && !p.row_major)
                return "is to be stepped as a matrix, but does not lie row by row; register it with the shape that "
                       "its memory has row by row, or give it a cost of 0";
        }
    } else if constexpr (requires { O::takes_f64; }) {
        if (!O::takes_f64 && (p.value.dtype == DType::f64 || p.gradient.dtype == DType::f64))
            return "has weights or gradients in f64, which the optimizer does not take; use f32, or an optimizer of "
                   "your own";
    }
    return nullptr;
}
/// Throws Error(invalid_argument) if O cannot step one of the trainable parameters. `costs`: see `costs_of_whole`.
/// `face`: the public object as errors name it.
template <class O, MemorySpace space>
void check_types(const List<ParameterView>& parameters, const List<double>& costs, const char* face, int rank) {
    for (std::size_t i = 0; i < parameters.size(); ++i) {
        const ParameterView& p = parameters[i];
        if (const char* const why = p.requires_grad ? refusal_of<O, space>(p, is_whole(costs, i)) : nullptr)
            refuse_on({.operation = face, .rank = rank, .parameter = p.name}, "parameter '", p.name, "' ", why);
    }
}

/// Passes the slices of an optimizer's step to a function.
template <class Use>
struct SliceVisitor {
    void step(const auto& slice) { (*use)(slice); }
    void step(std::span<const DeviceSlice> slices, double gradient_scale, const auto&) {
        for (const DeviceSlice& slice : slices) (*use)(slice, gradient_scale);
    }

    Use* use;
};

/// The training state of one rank: the master weights and the optimizer's arrays for its shard of each bucket, in f32
/// (f64 for f64). Array 0 is the master weights, array 1 + k the optimizer's k-th array. Weights of the trainer whose
/// type allows it are the master weights themselves, so what the trainer writes there is stepped; others are copied to
/// the master weights when they were written: see `adopt`.
template <Backend B>
class ShardState {
public:
    static constexpr std::size_t max_states = 8;  ///< most arrays that an optimizer may have

    ShardState() = default;

    /// `values[b]`: the values of bucket b; without memory if they do not stay. `weights`: by parameter, where the
    /// trainer has them; none if it has copies only.
    ShardState(B& backend, const BucketPlan& plan, const BucketLayout& layout, std::span<const ParameterInfo> infos,
               std::span<const BufferView> values, List<BufferView> weights, std::size_t state_count)
        : slices_(shard_slices(plan, layout, infos, backend.size(), backend.rank())),
          arrays_(1 + state_count),
          weights_(std::move(weights)),
          rounded_(slices_.size()) {
        List<BufferView> masters, states;
        std::size_t at = 0;
        for (std::size_t b = 0; b < plan.size(); ++b) {
            const BufferView own = shard_of(values[b], backend.size(), backend.rank());
            states.push_back(typed_view(nullptr, own.count, accumulator_of(own.dtype), B::memory_space));
            masters.push_back(own.data != nullptr && !is_low_precision(own.dtype) ? own : states.back());
            while (at < slices_.size() && slices_[at].bucket <= b) ++at;
            ends_.push_back(at);
        }
        auto passes = passes_of(backend);
        masters_ = Arrays<PassesOf<B>>("master weights", passes, std::move(masters));
        states_ = Arrays<PassesOf<B>>("optimizer state", passes, std::move(states), state_count);
    }

    /// Tells which parameters are whole. `costs`: see WholeCosts. Both outlive this.
    void know_whole(const List<ParameterView>& parameters, const List<double>& costs) noexcept {
        parameters_ = &parameters;
        costs_ = costs;
    }
    /// Reserves the scratch memory of a MatrixOptimizer.
    void reserve_scratch(const auto& optimizer) {
        for (const ShardSlice& slice : slices_)
            if (is_whole(slice.parameter))
                scratch_of(optimizer.scratch_count(shape_of(slice)) * size_of(array(slice, 0).dtype));
    }

    std::size_t array_count() const noexcept { return arrays_; }
    std::size_t state_bytes() const noexcept { return states_.bytes(); }  ///< bytes of the optimizer's arrays
    /// Bytes of master weights kept in addition to the values.
    std::size_t master_bytes() const noexcept { return masters_.bytes(); }

    std::span<const ShardSlice> slices() const noexcept { return slices_; }
    std::span<const ShardSlice> slices(std::size_t b) const noexcept {
        const std::size_t first = b == 0 ? 0 : ends_[b - 1];
        return std::span(slices_).subspan(first, ends_[b] - first);
    }
    /// Array a of this rank's shard of bucket b.
    BufferView array(std::size_t b, std::size_t a) const noexcept {
        return a == 0 ? masters_[b] : states_.image(b, a - 1);
    }
    /// The part of array a that belongs to `slice`.
    BufferView array(const ShardSlice& slice, std::size_t a) const noexcept {
        if (a == 0 && is_master(slice.parameter)) return weights_[slice.parameter].subview(slice.first, slice.count);
        return array(slice.bucket, a).subview(slice.offset, slice.count);
    }
    /// Are the trainer's weights of parameter i the master weights?
    bool is_master(std::size_t i) const noexcept { return !weights_.empty() && !is_low_precision(weights_[i].dtype); }

    /// The optimizer steps this rank's shard of bucket b, except parameters i with `used(i)` false.
    void step([[maybe_unused]] B& backend, std::size_t b, ConstBufferView gradients, double gradient_scale,
              auto& optimizer, auto&& used) {
        if constexpr (B::memory_space == MemorySpace::host) step_part(b, 0, gradients, gradient_scale, optimizer, used);
        else step_on(backend.stream(), b, gradients, gradient_scale, optimizer, used);
    }
    /// The same for the part of the shard that begins at element `first`, in host memory.
    template <class O>
    void step_part(std::size_t b, std::size_t first, ConstBufferView gradients, double gradient_scale, O& optimizer,
                   auto&& used) const {
        for (const ShardSlice& whole : slices(b)) {
            const ShardSlice slice = part_of(whole, first, gradients.count);
            if (slice.count == 0 || !used(slice.parameter)) continue;
            const ConstBufferView gradient = gradients.subview(slice.offset - first, slice.count);
            if constexpr (MatrixOptimizer<O>) {
                if (is_whole(slice.parameter)) {
                    if (array(b, 0).dtype == DType::f32) step_whole<float>(slice, gradient, gradient_scale, optimizer);
                    else if constexpr (requires(const OptimizerMatrix<double>& m) { optimizer.step(m); })
                        step_whole<double>(slice, gradient, gradient_scale, optimizer);
                    continue;
                }
            }
            if (array(b, 0).dtype == DType::f32) step_slice<float>(slice, gradient, gradient_scale, optimizer);
            else if constexpr (requires(const OptimizerSlice<double>& s) { optimizer.step(s); })
                step_slice<double>(slice, gradient, gradient_scale, optimizer);
        }
    }

    /// Sets `values`, the part of this rank's shard of the weights of bucket b that begins at element `first`, from the
    /// master weights. If the optimizer rounds weights, parameters i with `used(i)` false are left out.
    void round(const auto& passes, std::size_t b, std::size_t first, BufferView values, auto& optimizer,
               auto&& used) const {
        constexpr bool rounds = requires(const RoundingSlice& slice) { optimizer.round(slice); };
        const bool low = is_low_precision(values.dtype);
        if (low ? !rounds : weights_.empty()) return passes.copy(array(b, 0).subview(first, values.count), values);
        for (const ShardSlice& whole : slices(b)) {
            const ShardSlice slice = part_of(whole, first, values.count);
            if (slice.count == 0 || (low && !used(slice.parameter))) continue;
            const BufferView master = array(slice, 0), rounded = values.subview(slice.offset - first, slice.count);
            if constexpr (rounds) {
                const std::span from(static_cast<const float*>(master.data), low ? slice.count : 0);
                if (low)
                    optimizer.round(RoundingSlice{
                        .parameter = slice.parameter, .first = slice.first, .master = from, .rounded = rounded});
            }
            if (!low) passes.copy(master, rounded);
        }
    }

    /// Records the weights of this rank's shard of bucket b as they were rounded. `values`: the shard.
    void note_rounded(std::size_t b, BufferView values) noexcept {
        if (!has_masters(values)) return;
        for (const ShardSlice& slice : slices(b)) was_written(slice, values.subview(slice.offset, slice.count));
    }

    /// Takes the trainer's weights of this rank's shard of bucket b, if they were written since they were rounded.
    /// Master weights that round to their weights stay, with the bits that rounding drops; an optimizer's `round`
    /// rounds as in its present state. `values`: the shard, which gets the weights, too.
    void adopt(const auto& passes, std::size_t b, BufferView values, auto& optimizer) {
        if (!has_masters(values)) return;
        for (const ShardSlice& slice : slices(b)) {
            const BufferView own = weights_[slice.parameter].subview(slice.first, slice.count);
            if (!was_written(slice, own)) continue;
            adopt_slice(passes, slice, own, optimizer);
            passes.copy(own, values.subview(slice.offset, slice.count));
        }
    }

private:
    /// Has the trainer these weights, and do they have master weights beside them?
    bool has_masters(BufferView values) const noexcept { return !weights_.empty() && is_low_precision(values.dtype); }
    /// May the weights of a slice differ from those at the last call? In device memory that is not known.
    bool was_written(const ShardSlice& slice, BufferView weights) noexcept {
        if (B::memory_space != MemorySpace::host) return true;
        const std::uint64_t now = digest_of(static_cast<const std::byte*>(weights.data), weights.bytes(), 0);
        return std::exchange(rounded_[static_cast<std::size_t>(&slice - slices_.data())], now) != now;
    }
    [[gnu::cold, gnu::noinline]] void adopt_slice(const auto& passes, const ShardSlice& slice, BufferView own,
                                                  auto& optimizer) const {
        // On devices each block costs three copies that the host waits for.
        const std::size_t block =
                              smaller(own.count, std::size_t{1} << (B::memory_space == MemorySpace::host ? 12 : 20)),
                          width = size_of(own.dtype);
        List<float> masters(block), wide(block);
        List<std::byte> weights(block * width), rounded(block * width);
        for (std::size_t n, first = 0; first < own.count; first += n) {
            n = smaller(block, own.count - first);
            const BufferView now = typed_view(weights.data(), n, own.dtype),
                             before = typed_view(rounded.data(), n, own.dtype);
            passes.read(own.subview(first, n), weights.data());
            passes.read(array(slice, 0).subview(first, n), masters.data());
            if constexpr (B::memory_space == MemorySpace::host)
                round(passes, slice.bucket, slice.offset + first, before, optimizer, [](std::size_t) { return true; });
            else kernel::copy(typed_view(masters.data(), n, DType::f32), before);
            kernel::copy(now, typed_view(wide.data(), n, DType::f32));
            for (std::size_t k = 0; k < n; ++k)
                if (std::memcmp(&weights[k * width], &rounded[k * width], width) != 0) masters[k] = wide[k];
            passes.write(masters.data(), array(slice, 0).subview(first, n));
        }
    }

    /// Enqueues the step of a shard in device memory on a stream.
    void step_on(auto stream, std::size_t b, ConstBufferView gradients, double gradient_scale, auto& optimizer,
                 auto&& used) {
        device_slices_.clear();
        device_arrays_.resize(slices(b).size() * (arrays_ - 1));
        void** next = device_arrays_.data();
        for (const ShardSlice& slice : slices(b)) {
            if (slice.count == 0 || !used(slice.parameter)) continue;
            for (std::size_t a = 1; a < arrays_; ++a) next[a - 1] = array(slice, a).data;
            device_slices_.push_back({.parameter = slice.parameter,
                                      .first = slice.first,
                                      .master = array(slice, 0),
                                      .gradient = gradients.subview(slice.offset, slice.count),
                                      .state = {next, arrays_ - 1}});
            next += arrays_ - 1;
        }
        if (!device_slices_.empty())
            optimizer.step(std::span<const DeviceSlice>(device_slices_), gradient_scale, stream);
    }

    /// The part of the slice within `count` elements of the shard from element `first` on. May be empty.
    static ShardSlice part_of(ShardSlice slice, std::size_t first, std::size_t count) noexcept {
        const std::size_t from = larger(slice.offset, first), to = smaller(slice.offset + slice.count, first + count);
        slice.first += from - slice.offset;
        slice.offset = from;
        slice.count = from < to ? to - from : 0;
        return slice;
    }

    template <class T, class O>
    void step_slice(const ShardSlice& slice, ConstBufferView gradient, double gradient_scale, O& optimizer) const {
        T block[4096];
        const bool converts = gradient.dtype != dtype_of<T>, whole = is_whole(slice.parameter);
        T* const converted = converts && whole ? reinterpret_cast<T*>(scratch_of(slice.count * sizeof(T))) : block;
        T* state[max_states];
        for (std::size_t done = 0; done < slice.count;) {
            const std::size_t left = slice.count - done,
                              n = converts && !whole ? smaller(std::size(block), left) : left;
            const ConstBufferView part = gradient.subview(done, n);
            if (converts) kernel::copy(part, buffer(std::span(converted, n)));
            const T* const gradients = converts ? converted : static_cast<const T*>(part.data);
            const auto at = [&](std::size_t a) { return static_cast<T*>(array(slice, a).subview(done, n).data); };
            for (std::size_t a = 1; a < arrays_; ++a) state[a - 1] = at(a);
            optimizer.step(OptimizerSlice<T>{.parameter = slice.parameter,
                                             .first = slice.first + done,
                                             .value = {at(0), n},
                                             .gradient = {gradients, n},
                                             .gradient_scale = gradient_scale,
                                             .state = {state, arrays_ - 1}});
            done += n;
        }
    }
    bool is_whole(std::size_t i) const noexcept { return detail::is_whole(costs_, i); }
    std::span<const std::size_t> shape_of(const ShardSlice& slice) const noexcept {
        return (*parameters_)[slice.parameter].shape;
    }
    /// Scratch memory, which grows if an optimizer's settings change.
    std::byte* scratch_of(std::size_t bytes) const {
        if (bytes > scratch_.bytes()) scratch_ = kernel::HostBuffer(bytes);
        return static_cast<std::byte*>(scratch_.data());
    }
    template <class T, class O>
    void step_whole(const ShardSlice& slice, ConstBufferView gradient, double gradient_scale, O& optimizer) const {
        const std::span<const std::size_t> shape = shape_of(slice);
        const std::size_t count = optimizer.scratch_count(shape), behind = in_lines(count * sizeof(T));
        const bool converts = gradient.dtype != dtype_of<T>;
        std::byte* const scratch = scratch_of(behind + (converts ? slice.count * sizeof(T) : 0));
        if (converts) {
            const BufferView converted(reinterpret_cast<T*>(scratch + behind), slice.count);
            kernel::copy(gradient, converted);
            gradient = converted;
        }
        const auto at = [&](std::size_t a) { return static_cast<T*>(array(slice, a).data); };
        T* state[max_states];
        for (std::size_t a = 1; a < arrays_; ++a) state[a - 1] = at(a);
        optimizer.step(OptimizerMatrix<T>{.parameter = slice.parameter,
                                          .shape = shape,
                                          .value = {at(0), slice.count},
                                          .gradient = {static_cast<const T*>(gradient.data), slice.count},
                                          .gradient_scale = gradient_scale,
                                          .state = {state, arrays_ - 1},
                                          .scratch = {reinterpret_cast<T*>(scratch), count}});
    }

    List<ShardSlice> slices_;  ///< of this rank, in the order of the buckets
    List<std::size_t> ends_;   ///< by bucket: index past its last slice
    std::size_t arrays_ = 1;
    List<BufferView> weights_;  ///< by parameter: the trainer's; empty if it has copies only
    /// By slice: digest of weights that have master weights beside them, as they were rounded.
    List<std::uint64_t> rounded_;
    // For whole parameters.
    const List<ParameterView>* parameters_ = nullptr;
    ListView<const double> costs_;
    mutable kernel::HostBuffer scratch_;  ///< of no meaning between steps
    Arrays<PassesOf<B>> masters_, states_;
    List<DeviceSlice> device_slices_;  ///< slices of a step, kept so that a step allocates nothing
    List<void*> device_arrays_;
};

/// Moves the state of shards between ranks in pieces of one parameter, so that no rank holds more
/// than its shard and one piece.
template <Backend B>
class StateTransfer {
public:
    /// The largest piece, in elements.
    static constexpr std::size_t piece = std::size_t{1} << 18;
    static constexpr int all = -1;  ///< as a root: every rank

    /// Collective.
    StateTransfer(B& backend, const BucketPlan& plan, const ShardState<B>& state,
                  std::span<const ParameterView> parameters)
        : host_(host_of(backend)), passes_(passes_of(backend)), state_(state), parameters_(parameters) {
        for (std::size_t b = 0; b < plan.size(); ++b)
            for (const std::size_t i : plan.bucket(b)) planned_[i] = 1;
        for (const ShardSlice& slice : state.slices())
            slice_of_[slice.parameter] = &slice;  // at most one slice per parameter
    }

    /// Calls `sink(parameter, array, first, view)` on the root, or on all, for every piece of every trainable
    /// parameter's arrays, in host memory. Plans differ between trainings, and change, so the order is that of
    /// registration. Collective.
    void collect(int root, auto&& sink) {
        for_pieces(state_.array_count(), [&](std::size_t i, std::size_t a, std::size_t first, BufferView whole) {
            std::memset(whole.data, 0, whole.bytes());
            with_own(i, a, first, whole, [&](BufferView part, BufferView own) { passes_.read(own, part.data); });
            (root == all ? host_.all_reduce(as_bits(whole), ReduceOp::sum)
                         : host_.reduce(as_bits(whole), ReduceOp::sum, root))
                .wait();
            if (root == all || root == host_.rank()) sink(i, a, first, ConstBufferView(whole));
        });
    }

    /// Sets the first `arrays` arrays from the root: `source(parameter, array, first, view)`
    /// fills each piece there. Collective.
    void distribute(int root, std::size_t arrays, auto&& source) {
        for_pieces(arrays, [&](std::size_t i, std::size_t a, std::size_t first, BufferView whole) {
            if (host_.rank() == root) source(i, a, first, whole);
            host_.broadcast(whole, root).wait();
            store(i, a, first, whole);
        });
    }

    /// Copies the part of a piece that this rank owns into its state.
    void store(std::size_t i, std::size_t a, std::size_t first, ConstBufferView whole) const {
        with_own(i, a, first, whole, [&](ConstBufferView part, BufferView own) { passes_.write(part.data, own); });
    }

private:
    void for_pieces(std::size_t arrays, auto&& use) {
        for (std::size_t i = 0; i < parameters_.size(); ++i)
            for (std::size_t a = 0; planned_[i] != 0 && a < arrays; ++a)
                for (std::size_t first = 0, count = parameters_[i].gradient.count; first < count; first += piece)
                    use(i, a, first,
                        typed_view(memory_.data(), smaller(piece, count - first),
                                   accumulator_of(parameters_[i].value.dtype)));
    }

    /// Calls `use(part, own)` if this rank owns a part of the piece; `own` are the same elements in its state.
    void with_own(std::size_t i, std::size_t a, std::size_t first, auto whole, auto&& use) const {
        const ShardSlice* const slice = slice_of_[i];
        if (slice == nullptr) return;
        const std::size_t from = larger(first, slice->first),
                          to = smaller(first + whole.count, slice->first + slice->count);
        if (from < to)
            use(whole.subview(from - first, to - from),
                state_.array(*slice, a).subview(from - slice->first, to - from));
    }

    /// The same memory as integers. At most one rank has a nonzero element, so the sum has exactly its bits, even those
    /// of a negative zero.
    static BufferView as_bits(BufferView view) noexcept {
        view.dtype = size_of(view.dtype) == 8 ? DType::u64 : DType::u32;
        return view;
    }

    HostOf<B>& host_;
    [[no_unique_address]] PassesOf<B> passes_;
    const ShardState<B>& state_;
    std::span<const ParameterView> parameters_;
    /// By parameter: does it have state? Others may be unfrozen by now.
    List<char> planned_ = List<char>(parameters_.size());
    List<const ShardSlice*> slice_of_{parameters_.size()};  ///< by parameter: this rank's slice, or null
    decltype(std::declval<HostOf<B>&>().allocate(std::size_t{})) memory_ = host_.allocate(piece * sizeof(double));
};

}  // namespace detail

}  // namespace gradsync::inline v0_2
