// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/deal.hpp"
#include "../core/list.hpp"
#include "../core/math.hpp"

namespace gradsync::inline v0_2::detail {

/// One sum that the ranks reduce: the blocks of ranks [first, last) in one round of the deal.
struct DealtSum {
    std::size_t round;
    int first, last;
    std::size_t leaves;  ///< of the tree of sums that a step adds up: micro-batches, or 1 if rounds are not split
    /// Does the rank contribute to it?
    bool has(int rank) const noexcept { return first <= rank && rank < last; }
};

/// One past the last rank of the longest run from `first` on whose blocks in this round add up to a node of the
/// micro-batch tree, in the order in which ranks are added up. Such a run is a node of the tree of ranks, or two ranks,
/// whose order is always the same.
constexpr int end_of_sum(const Deal::Round& round, int first) noexcept {
    const std::size_t at = round.first / round.block, rank = static_cast<std::size_t>(first);
    std::size_t size = 1;
    while (rank + 2 * size <= static_cast<std::size_t>(round.ranks) && (at + rank) % (2 * size) == 0 &&
           (size == 1 || rank % (2 * size) == 0))
        size *= 2;
    return static_cast<int>(rank + size);
}

/// The sums that are reduced together, in order: those of one round if gradients are sharded,
/// otherwise those of all rounds.
class DealtSums {
public:
    /// With `several`, a round is split into sums; otherwise it is one.
    DealtSums(const Deal& deal, bool several) : deal_(deal), several_(several) { set_round(0); }

    const Deal& deal() const noexcept { return deal_; }
    /// Does a step have several sums, which are added up afterwards?
    bool several() const noexcept { return several_; }
    ListView<const DealtSum> now() const noexcept { return now_; }
    std::size_t round() const noexcept { return round_; }
    /// The leaves of all sums of a step; 0 if micro-batches are not counted. If rounds are not split, they are the
    /// leaves: unless the number of ranks is a power of two, a round is no node of the tree of micro-batches.
    std::size_t leaves() const noexcept { return several_ ? deal_.micro_batches : deal_.rounds(); }
    [[gnu::noinline]] void set_round(std::size_t round) {
        round_ = round;
        now_.clear();
        const std::size_t end = !deal_.sharded_gradients ? deal_.rounds() : round < deal_.rounds() ? round + 1 : 0;
        for (std::size_t number = deal_.sharded_gradients ? round : 0; number < end; ++number) {
            const Deal::Round r = deal_.round(number);
            for (int first = 0, last = 0; first < r.ranks; first = last) {
                last = several_ ? end_of_sum(r, first) : r.ranks;
                now_.push_back({number, first, last, several_ ? static_cast<std::size_t>(last - first) * r.block : 1});
            }
        }
    }

    /// The memory for the sums of a step, and the order of their additions.
    struct Needs {
        std::size_t places = 1;        ///< open sums before the last one comes; at least 1
        std::size_t at_a_time = 0;     ///< sums that are reduced together
        List<std::uint8_t> additions;  ///< by sum of a step: see kernel::Reduction::sums
    };
    [[gnu::noinline]] Needs needs() const {
        Needs needs;
        DealtSums all = *this;
        std::size_t open[65], top = 0, leaves = 0;  // first leaf of each sum on the stack
        for (all.set_round(0); leaves < this->leaves(); all.set_round(all.round_ + 1)) {
            for (const DealtSum& sum : all.now_) {
                open[top++] = leaves;
                leaves += sum.leaves;
                needs.additions.push_back(0);
                for (; top > 1 && are_halves(open[top - 2], open[top - 1], leaves, this->leaves()); --top)
                    ++needs.additions.back();
                if (leaves != this->leaves()) needs.places = larger(needs.places, top);
            }
            needs.at_a_time = larger(needs.at_a_time, all.now_.size());
        }
        return needs;
    }

private:
    Deal deal_;
    bool several_;
    std::size_t round_ = 0;
    List<DealtSum> now_;
};

}  // namespace gradsync::inline v0_2::detail
