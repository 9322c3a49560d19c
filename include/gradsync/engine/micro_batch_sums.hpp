// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <bit>

#include "../core/backend.hpp"
#include "../core/buffer_view.hpp"
#include "../core/list.hpp"
#include "../core/math.hpp"
#include "../core/sum_tree.hpp"
#include "../kernel/passes.hpp"

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

/// The sums of gradients over micro-batches, by parameter, or by bucket if they are this rank's shards. If their number is known, they are
/// sums of the tree (core/sum_tree.hpp); otherwise each micro-batch is added to the sum of those before it.
///
/// The open sums of a gradient lie in places 0, 1, ..., that of the first micro-batches in place 0. `slot` is where the sum of all is to be,
/// in all functions. Different gradients may be added at once.
template <Backend B>
class MicroBatchSums {
public:
    enum class Place : std::uint8_t {
        none,      ///< nothing is added up
        slot,      ///< place 0 is the slot
        apart,     ///< it is not, because the slot's type would round the sums
        gradient,  ///< it is not, because the gradients are written into the slot
    };

    /// `count`: gradients. `due`: micro-batches of a step, all of this rank; 0: unknown.
    MicroBatchSums(B& backend, std::size_t count, Place place, std::size_t due)
        : passes_(passes_of(backend)), place_(place), due_(due), sums_(count) {}

    /// Allocates the places: as many as are taken before the last micro-batch. `like`: by gradient, its count and the type of its sums.
    /// Collective.
    void allocate(B& backend, const List<BufferView>& like) {
        if (place_ == Place::none) return;
        std::size_t places = due_ == 0 ? 1 : 0;
        for (std::size_t leaves = 1; leaves < due_; ++leaves) places = larger(places, std::size_t(std::popcount(leaves)));
        views_.clear();
        for (std::size_t number = apart() ? 0 : 1; number < places; ++number)
            for (const BufferView& view : like) views_.push_back(view);
        bytes_ = allocate_lines(backend, views_, memory_);
    }

    std::size_t bytes() const noexcept { return bytes_; }
    bool in_place() const noexcept { return place_ == Place::gradient; }
    bool apart() const noexcept { return place_ >= Place::apart; }
    bool holds(std::size_t i) const noexcept { return sums_[i].present != 0; }  ///< Has gradient i a sum?

    /// The micro-batches of a step, and those of this step that are over.
    std::size_t due() const noexcept { return due_; }
    std::size_t over() const noexcept { return over_; }
    /// A guard of no_sync() has ended, after one micro-batch or several.
    void end_micro_batch() noexcept {
        ++over_;
        for (const Sums& sums : sums_) over_ = larger<std::size_t>(over_, sums.leaves);
    }
    /// Can a micro-batch of gradient i be added that is not the last?
    bool has_room(std::size_t i) const noexcept { return due_ == 0 || larger<std::size_t>(sums_[i].leaves, over_) + 1 < due_; }
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
        if (ends && in_place()) {
            while (top > 0) passes_.add(slot, place(i, --top, slot));
            return;
        }
        if (ends) passes_.add(place(i, top - 1, slot), gradient);
        for (; top > 1; --top) passes_.add(place(i, top - 2, slot), place(i, top - 1, slot));
        if (apart()) passes_.copy(place(i, 0, slot), slot);
    }

private:
    using Memory = decltype(std::declval<B&>().allocate(std::size_t{}));

    struct Sums {
        std::uint32_t leaves = 0;   ///< micro-batches so far; bit b: a node over 2^b of them is open
        std::uint32_t present = 0;  ///< the open nodes with a micro-batch that used the gradient; the sum of each has a place
    };

    BufferView place(std::size_t i, std::size_t number, BufferView slot) const noexcept {
        if (number == 0 && !apart()) return slot;
        return views_[(apart() ? number : number - 1) * sums_.size() + i];
    }
    std::size_t places(std::size_t i) const noexcept { return static_cast<std::size_t>(std::popcount(sums_[i].present)); }

    /// Micro-batches that did not use gradient i have no leaf: the sum of something and nothing is no sum.
    void skip_unused(std::size_t i, BufferView slot) {
        while (due_ != 0 && sums_[i].leaves < over_) push(i, {}, slot);
    }
    /// Adds the next leaf; none if it has no memory.
    void push(std::size_t i, BufferView leaf, BufferView slot) {
        Sums& sums = sums_[i];
        std::size_t top = places(i);
        bool is_there = leaf.data != nullptr, placed = false;  // whether the node that grows has a leaf, and whether it has the last place
        std::uint32_t bit = 1;
        for (const std::uint32_t open = due_ != 0 ? sums.leaves : sums.present; (open & bit) != 0; bit <<= 1) {
            if ((sums.present & bit) == 0) continue;
            sums.present &= ~bit;
            if (placed) passes_.add(place(i, top - 2, slot), place(i, top - 1, slot)), --top;
            else if (is_there) passes_.add(place(i, top - 1, slot), leaf);
            is_there = placed = true;
        }
        if (is_there && !placed) passes_.copy(leaf, place(i, top, slot));
        if (is_there) sums.present |= due_ != 0 ? bit : 1;  // in a row there is one sum
        ++sums.leaves;
    }

    [[no_unique_address]] PassesOf<B> passes_;
    Place place_;
    std::size_t due_, over_ = 0;
    Memory memory_{};
    List<BufferView> views_;  ///< by place and parameter, without place 0 if that is in the bucket
    std::size_t bytes_ = 0;
    List<Sums> sums_;  ///< by parameter
};

}  // namespace gradsync::inline v0_2::detail
