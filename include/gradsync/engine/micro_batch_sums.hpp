// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <bit>

#include "../core/backend.hpp"
#include "../core/bucket_plan.hpp"
#include "../core/list.hpp"
#include "../core/math.hpp"
#include "../core/sum_tree.hpp"
#include "../kernel/passes.hpp"
#include "options.hpp"

namespace gradsync::inline v0_2::detail {

/// Allocates memory for the views, one after the other in lines of 64 bytes; returns its bytes. Collective.
template <Backend B, class Memory>
std::size_t allocate_lines(B& backend, List<BufferView>& views, Memory& memory) {
    std::size_t bytes = 0, first = 0;
    for (const BufferView& view : views) bytes += in_lines(view.bytes());
    memory = backend.allocate(bytes);
    for (BufferView& view : views) {
        view = typed_view(static_cast<std::byte*>(memory.data()) + first, view.count, view.dtype, B::memory_space);
        first += in_lines(view.bytes());
    }
    return bytes;
}

/// The sums of gradients over micro-batches, with Accumulation::in_buckets. With ReducerOptions::micro_batches they are sums of the tree
/// (core/sum_tree.hpp); otherwise all are added up in a row.
///
/// The open sums of a gradient lie in places 0, 1, ..., that of the first micro-batches in place 0, which is the gradient's place in its
/// bucket unless that is used otherwise. `slot` is this place, in all functions. Different gradients may be added at once.
template <Backend B>
class MicroBatchSums {
public:
    MicroBatchSums(B& backend, const ReducerOptions& options, std::size_t parameters)
        : passes_(passes_of(backend)),
          adds_(options.accumulation == Accumulation::in_buckets),
          in_tree_(options.micro_batches != 0),
          in_place_(adds_ && options.gradients != GradientStorage::borrowed),
          apart_(in_place_ || (adds_ && options.reduce_dtype && is_low_precision(*options.reduce_dtype))),
          due_(micro_batches_each(options, backend.size())),
          sums_(parameters) {}

    /// Allocates the places: as many as are taken before the last micro-batch. Collective.
    void allocate(B& backend, ListView<const ParameterInfo> infos, std::span<const std::size_t> order) {
        if (!adds_) return;
        std::size_t places = in_tree_ ? 0 : 1;
        for (std::size_t leaves = 1; in_tree_ && leaves < due_; ++leaves) places = larger(places, std::size_t(std::popcount(leaves)));
        views_ = List<BufferView>((places - (apart_ ? 0 : 1)) * sums_.size());
        for (std::size_t first = 0; first < views_.size(); first += sums_.size())
            for (const std::size_t i : order) views_[first + i] = typed_view(nullptr, infos[i].count, accumulator_of(infos[i].dtype));
        bytes_ = allocate_lines(backend, views_, memory_);
    }

    std::size_t bytes() const noexcept { return bytes_; }
    bool in_place() const noexcept { return in_place_; }  ///< Are they added to the gradients in their buckets?
    bool apart() const noexcept { return apart_; }        ///< Is no sum in a bucket, because it would be overwritten or rounded there?
    bool holds(std::size_t i) const noexcept { return sums_[i].present != 0; }  ///< Has gradient i a sum?

    /// The micro-batches that a rank adds up in each step, and those of this step that are over.
    std::size_t due() const noexcept { return due_; }
    std::size_t over() const noexcept { return over_; }
    /// A guard of no_sync() has ended; it may have been there for several.
    void end_micro_batch() noexcept {
        ++over_;
        for (const Sums& sums : sums_) over_ = larger<std::size_t>(over_, sums.leaves);
    }
    /// May one more micro-batch of gradient i be added, and another one follow?
    bool has_room(std::size_t i) const noexcept { return !in_tree_ || larger<std::size_t>(sums_[i].leaves, over_) + 1 < due_; }
    /// Ends the step.
    void forget() noexcept {
        sums_.fill({});
        over_ = 0;
    }

    /// Adds the gradient of a micro-batch that is not the last.
    void add(std::size_t i, BufferView gradient, BufferView slot) {
        skip_unused(i, slot);
        push(i, gradient, slot);
    }

    /// Adds that of the last one, if it has memory, and puts the sum of all into the slot. There must be a sum.
    [[gnu::noinline]] void add_last(std::size_t i, BufferView gradient, BufferView slot) {
        skip_unused(i, slot);
        std::size_t top = places(i);
        const bool ends = gradient.data != nullptr;
        if (ends && in_place_) {
            while (top > 0) passes_.add(slot, place(i, --top, slot));
            return;
        }
        if (ends) passes_.add(place(i, top - 1, slot), gradient);
        for (; top > 1; --top) passes_.add(place(i, top - 2, slot), place(i, top - 1, slot));
        if (apart_) passes_.copy(place(i, 0, slot), slot);
    }

private:
    using Memory = decltype(std::declval<B&>().allocate(std::size_t{}));

    struct Sums {
        std::uint32_t leaves = 0;   ///< micro-batches so far; bit b: a node over 2^b of them is open
        std::uint32_t present = 0;  ///< those of these nodes with a leaf that used the gradient; each has a place
    };

    BufferView place(std::size_t i, std::size_t number, BufferView slot) const noexcept {
        if (number == 0 && !apart_) return slot;
        return views_[(apart_ ? number : number - 1) * sums_.size() + i];
    }
    std::size_t places(std::size_t i) const noexcept { return static_cast<std::size_t>(std::popcount(sums_[i].present)); }

    /// Micro-batches that did not use gradient i have no leaf: the sum of something and nothing is no sum.
    void skip_unused(std::size_t i, BufferView slot) {
        while (in_tree_ && sums_[i].leaves < over_) push(i, {}, slot);
    }
    /// Adds the next leaf; none if it has no memory.
    void push(std::size_t i, BufferView leaf, BufferView slot) {
        Sums& sums = sums_[i];
        std::size_t top = places(i);
        bool is_there = leaf.data != nullptr, placed = false;  // whether the node that grows has a leaf, and whether it has the last place
        std::uint32_t bit = 1;
        for (const std::uint32_t open = in_tree_ ? sums.leaves : sums.present; (open & bit) != 0; bit <<= 1) {
            if ((sums.present & bit) == 0) continue;
            sums.present &= ~bit;
            if (placed) passes_.add(place(i, top - 2, slot), place(i, top - 1, slot)), --top;
            else if (is_there) passes_.add(place(i, top - 1, slot), leaf);
            is_there = placed = true;
        }
        if (is_there && !placed) passes_.copy(leaf, place(i, top, slot));
        if (is_there) sums.present |= in_tree_ ? bit : 1;  // in a row there is one sum
        ++sums.leaves;
    }

    [[no_unique_address]] PassesOf<B> passes_;
    bool adds_, in_tree_, in_place_, apart_;
    std::size_t due_, over_ = 0;
    Memory memory_{};
    List<BufferView> views_;  ///< by place and parameter, without place 0 if that is in the bucket
    std::size_t bytes_ = 0;
    List<Sums> sums_;  ///< by parameter
};

}  // namespace gradsync::inline v0_2::detail
