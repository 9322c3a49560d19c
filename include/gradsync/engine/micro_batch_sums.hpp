// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/deal.hpp"
#include "../kernel/passes.hpp"

namespace gradsync::inline v0_2::detail {

/// The sums of micro-batches that are still to be completed lie in places of one size, one after the other.

inline BufferView shifted(BufferView view, std::size_t bytes) noexcept {
    view.data = static_cast<std::byte*>(view.data) + bytes;
    return view;
}

/// Stacks of sums (core/math.hpp), one for each gradient. The caller owns the memory: the open sums of a gradient lie
/// in places 0, 1, ...; the sum of the first leaves is in place 0. `first` is place 0, in all functions. Different
/// gradients may be added concurrently.
template <Backend B>
class SumStacks {
public:
    SumStacks(B& backend, std::size_t count) : passes_(passes_of(backend)), stacks_(count) {}

    /// Sets the distance between places, in bytes.
    void set_stride(std::size_t bytes) noexcept { stride_ = bytes; }
    /// Makes `count` empty stacks.
    void reset(std::size_t count) { stacks_ = List<Stack>(count); }
    BufferView place(BufferView first, std::size_t number) const noexcept { return shifted(first, number * stride_); }

    std::size_t size() const noexcept { return stacks_.size(); }
    std::size_t leaves(std::size_t i) const noexcept { return stacks_[i].leaves; }
    bool holds(std::size_t i) const noexcept { return stacks_[i].present != 0; }  ///< Has gradient i a sum?
    void forget() noexcept { stacks_.fill({}); }

    /// Pushes the sum of the next `leaves` leaves, a power of two. A sum without memory stands for missing leaves.
    /// If `to` has memory, the node that the sum completes is left there instead of in its place;
    /// the sum may already be there.
    void push(std::size_t i, BufferView sum, BufferView first, std::size_t leaves = 1, BufferView to = {}) {
        Stack& stack = stacks_[i];
        std::uint32_t bit = static_cast<std::uint32_t>(leaves);
        std::size_t top = open(stack);
        for (; (stack.leaves & bit) != 0; bit <<= 1) sum = add(stack, bit, sum, place(first, --top), to);
        stack.leaves += static_cast<std::uint32_t>(leaves);
        if (sum.data == nullptr) return;
        stack.present |= bit;
        put(sum, to.data != nullptr ? to : place(first, top));
    }
    /// Adds a leaf to the sum of those before it, without a tree.
    void push_in_a_row(std::size_t i, BufferView leaf, BufferView first) {
        if (holds(i)) passes_.add(first, leaf);
        else passes_.copy(leaf, first);
        stacks_[i] = {1, 1};
    }
    /// Ends the stack: `to` gets the sum of all and of `last`, which may lie in `to`, or have no memory.
    [[gnu::noinline]] void fold(std::size_t i, BufferView last, BufferView first, BufferView to) {
        Stack& stack = stacks_[i];
        std::size_t top = open(stack);
        for (std::uint32_t bit = 1; top != 0; bit <<= 1)
            if ((stack.leaves & bit) != 0) last = add(stack, bit, last, place(first, --top), to);
        stack = {};
        put(last, to);
    }
    /// Copies a sum to its place; a missing sum is zero.
    void put(BufferView sum, BufferView to) {
        if (sum.data == nullptr) passes_.clear(to);
        else if (sum.data != to.data) passes_.copy(sum, to);
    }
    /// Ends the stack without adding up its sums, and clears those that are missing. `to`: as in the last `push`.
    void settle(std::size_t i, BufferView first, BufferView to) {
        Stack& stack = stacks_[i];
        std::size_t top = open(stack);
        const std::size_t last = top;
        for (std::uint32_t bit = 1; top != 0; bit <<= 1)
            if ((stack.leaves & bit) != 0 && --top, (stack.leaves & ~stack.present & bit) != 0)
                passes_.clear(top + 1 == last && to.data != nullptr ? to : place(first, top));
        stack = {};
    }

private:
    struct Stack {
        std::uint32_t leaves = 0;   ///< pushed so far; bit b: a node over 2^b of them is open
        std::uint32_t present = 0;  ///< the open nodes that have a sum
    };

    static std::size_t open(const Stack& stack) noexcept {
        return static_cast<std::size_t>(std::popcount(stack.leaves));
    }
    /// Adds `right`, the sum of what follows, to the open node `bit`, which lies in `left`. A missing sum adds nothing.
    BufferView add(Stack& stack, std::uint32_t bit, BufferView right, BufferView left, BufferView to) {
        if ((stack.present & bit) == 0) return right;
        stack.present &= ~bit;
        if (right.data == nullptr) return left;
        if (right.data == to.data) return passes_.add(right, left), right;
        return passes_.add(left, right), left;
    }

    [[no_unique_address]] PassesOf<B> passes_;
    std::size_t stride_ = 0;
    List<Stack> stacks_;
};

/// The sums of gradients over the micro-batches of this rank, by parameter. If their number is known, they are sums of
/// the tree; otherwise each micro-batch is added to the sum of those before it.
///
/// `first` is place 0 of the gradient's sums; `slot` receives the sum of all.
template <Backend B>
class MicroBatchSums {
public:
    enum class Place : std::uint8_t {
        none,      ///< nothing is added up
        slot,      ///< place 0 is the slot
        apart,     ///< place 0 is elsewhere, because the slot's type would round the sums
        gradient,  ///< place 0 is elsewhere, because the gradients are written into the slot
    };

    /// `deal.micro_batches` is 0 if their number is unknown. With `leaves_roots`, the sums of the rounds
    /// are not added up: see `root`.
    MicroBatchSums(B& backend, std::size_t count, Place place, const Deal& deal, bool leaves_roots)
        : stacks_(backend, count),
          place_(place),
          due_(deal.count(backend.rank())),
          roots_(leaves_roots ? deal.rounds() - (due_ < deal.count(0) ? 1 : 0) : 0),
          has_more_(due_ > deal.count(deal.ranks - 1)) {
        if (place == Place::none) return;
        places_ = due_ == 0 ? 1 : open_sums(deal.count(0));  // the same on all ranks
        if (leaves_roots) places_ = larger(places_, deal.rounds() - (in_place() ? 1 : 0));
    }

    void set_stride(std::size_t bytes) noexcept { stacks_.set_stride(bytes); }
    std::size_t places() const noexcept { return places_; }

    bool in_place() const noexcept { return place_ == Place::gradient; }
    bool apart() const noexcept { return place_ == Place::apart; }
    std::size_t roots() const noexcept { return roots_; }  ///< rounds in which this rank has a sum
    bool leaves_roots() const noexcept { return roots_ != 0; }
    bool holds(std::size_t i) const noexcept { return stacks_.holds(i); }  ///< Has gradient i a sum?

    /// The number of this rank's micro-batches in a step, and the number of those that are over.
    std::size_t due() const noexcept { return due_; }
    std::size_t over() const noexcept { return over_; }
    /// All gradients of a micro-batch are marked; another one may follow under the same guard of no_sync().
    void end_marked() noexcept {
        for (std::size_t i = 0; i < stacks_.size(); ++i) over_ = larger(over_, stacks_.leaves(i));
        marked_ = true;
    }
    /// A guard of no_sync() has ended, after one micro-batch or several.
    void end_micro_batch() noexcept {
        if (!marked_) ++over_;
        end_marked();
        marked_ = false;
    }
    /// Was gradient i of the current micro-batch added? Only if their number is known.
    bool has(std::size_t i) const noexcept { return stacks_.leaves(i) > over_; }
    /// Can a micro-batch of gradient i be added that is not the last?
    bool has_room(std::size_t i) const noexcept { return due_ == 0 || larger(stacks_.leaves(i), over_) + 1 < due_; }
    /// Ends the step.
    void forget() noexcept {
        stacks_.forget();
        over_ = 0;
        marked_ = false;
    }

    /// Adds the gradient of a micro-batch that is not the last.
    void add(std::size_t i, BufferView gradient, BufferView first) {
        if (due_ == 0) return stacks_.push_in_a_row(i, gradient, first);
        skip_unused(i, first);
        stacks_.push(i, gradient, first);
    }

    /// Adds the gradient of the last micro-batch, if it has memory, and puts the sum of all into the slot.
    void add_last(std::size_t i, BufferView gradient, BufferView first, BufferView slot) {
        if (due_ != 0) skip_unused(i, first);
        if (leaves_roots()) leave_roots(i, gradient, first, slot);
        else stacks_.fold(i, gradient, first, slot);
    }
    /// The memory of this rank's sum of round `number`, for a gradient or a bucket.
    /// It is free in a round without a sum of this rank.
    BufferView root(std::size_t number, BufferView first, BufferView slot) const noexcept {
        if (in_place() && number + 1 == roots_) return slot;
        return stacks_.place(first, number - (in_place() && number >= roots_ ? 1 : 0));
    }

private:
    /// Micro-batches that did not use gradient i have no leaf.
    void skip_unused(std::size_t i, BufferView first) {
        while (stacks_.leaves(i) < over_) stacks_.push(i, {}, first);
    }
    void leave_roots(std::size_t i, BufferView gradient, BufferView first, BufferView slot) {
        const BufferView last = in_place() ? slot : BufferView{};
        if (!has_more_) stacks_.push(i, gradient, first, 1, last);
        stacks_.settle(i, first, has_more_ ? BufferView{} : last);
        if (has_more_) stacks_.put(gradient, root(roots_ - 1, first, slot));
    }

    SumStacks<B> stacks_;
    Place place_;
    std::size_t due_, roots_, over_ = 0, places_ = 0;
    bool marked_ = false;  ///< by `mark_ready()`, and so counted
    bool has_more_;        ///< this rank has one of the left-over micro-batches, which is a root by itself
};

}  // namespace gradsync::inline v0_2::detail
