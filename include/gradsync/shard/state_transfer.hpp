// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "../core/backend.hpp"
#include "../core/bucket_plan.hpp"
#include "../core/math.hpp"
#include "../core/parameter.hpp"
#include "shard_state.hpp"

namespace gradsync::inline v0_2::detail {

/// Moves the state of shards between ranks in pieces of one parameter, so that no rank holds more than its shard and one piece.
template <Backend B>
class StateTransfer {
public:
    /// The most elements of a piece.
    static constexpr std::size_t piece = std::size_t{1} << 18;

    /// Collective.
    StateTransfer(B& backend, const BucketPlan& plan, const ShardState<B>& state, std::span<const ParameterView> parameters)
        : backend_(backend),
          plan_(plan),
          state_(state),
          parameters_(parameters),
          slice_of_(parameters.size(), nullptr),
          memory_(backend.allocate(piece * sizeof(double))) {
        for (const ShardSlice& slice : state.slices()) slice_of_[slice.parameter] = &slice;  // one slice of a parameter at most
    }

    /// Calls `sink(parameter, array, first, view)` on the root for every piece of every trainable parameter's arrays. Collective.
    template <class Sink>
    void collect(int root, Sink&& sink) {
        for_pieces(state_.array_count(), [&](std::size_t i, std::size_t a, std::size_t first, BufferView whole) {
            put_own(i, a, first, whole);
            backend_.reduce(as_bits(whole), ReduceOp::sum, root).wait();
            if (backend_.rank() == root) sink(i, a, first, ConstBufferView(whole));
        });
    }

    /// `collect` with `sink` called on every rank. Collective.
    template <class Sink>
    void collect_everywhere(Sink&& sink) {
        for_pieces(state_.array_count(), [&](std::size_t i, std::size_t a, std::size_t first, BufferView whole) {
            put_own(i, a, first, whole);
            backend_.all_reduce(as_bits(whole), ReduceOp::sum).wait();
            sink(i, a, first, ConstBufferView(whole));
        });
    }

    /// Sets the first `arrays` arrays from the root: `source(parameter, array, first, view)` fills each piece there. Collective.
    template <class Source>
    void distribute(int root, std::size_t arrays, Source&& source) {
        for_pieces(arrays, [&](std::size_t i, std::size_t a, std::size_t first, BufferView whole) {
            if (backend_.rank() == root) source(i, a, first, whole);
            backend_.broadcast(whole, root).wait();
            store(i, a, first, whole);
        });
    }

    /// Copies the part of a piece that this rank owns into its state.
    void store(std::size_t i, std::size_t a, std::size_t first, ConstBufferView whole) const {
        with_own(i, a, first, whole.count,
                 [&](std::size_t offset, BufferView own) { std::memcpy(own.data, whole.subview(offset, own.count).data, own.bytes()); });
    }

private:
    template <class Use>
    void for_pieces(std::size_t arrays, Use&& use) {
        for (std::size_t b = 0; b < plan_.size(); ++b)
            for (std::size_t i : plan_.bucket(b))
                for (std::size_t a = 0; a < arrays; ++a)
                    for (std::size_t first = 0, count = parameters_[i].gradient.count; first < count; first += piece)
                        use(i, a, first,
                            BufferView{memory_.data(), smaller(piece, count - first), state_.array(b, a).dtype, B::memory_space});
    }

    /// Calls `use(offset in the piece, own elements)` if this rank owns a part of the piece.
    template <class Use>
    void with_own(std::size_t i, std::size_t a, std::size_t first, std::size_t count, Use&& use) const {
        const ShardSlice* const slice = slice_of_[i];
        if (slice == nullptr) return;
        const std::size_t from = larger(first, slice->first), to = smaller(first + count, slice->first + slice->count);
        if (from < to) use(from - first, state_.array(*slice, a).subview(from - slice->first, to - from));
    }

    void put_own(std::size_t i, std::size_t a, std::size_t first, BufferView whole) const {
        std::memset(whole.data, 0, whole.bytes());
        with_own(i, a, first, whole.count,
                 [&](std::size_t offset, BufferView own) { std::memcpy(whole.subview(offset, own.count).data, own.data, own.bytes()); });
    }

    /// As integers: the element is nonzero on one rank at most, so the sum of the bits is exact, even for negative zeros.
    static BufferView as_bits(BufferView view) noexcept {
        view.dtype = size_of(view.dtype) == 8 ? DType::u64 : DType::u32;
        return view;
    }

    B& backend_;
    const BucketPlan& plan_;
    const ShardState<B>& state_;
    std::span<const ParameterView> parameters_;
    std::vector<const ShardSlice*> slice_of_;  ///< by parameter: this rank's slice, or null
    decltype(std::declval<B&>().allocate(std::size_t{})) memory_;
};

}  // namespace gradsync::inline v0_2::detail
