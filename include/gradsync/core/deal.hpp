// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <bit>
#include <cstddef>

#include "error.hpp"

namespace gradsync::inline v0_2 {

/// Says which of a step's micro-batches each rank computes. Their gradients are the leaves of a tree of sums
/// (core/math.hpp), so they are dealt in blocks that are nodes of the tree, in rounds: in each round, every rank gets
/// the block after that of the rank before it.
///
/// Whole gradients: each rank adds up its block before the ranks reduce the sums. So there are few rounds, of large
/// blocks: one for each 1 in the binary form of `micro_batches / ranks`, with blocks of that many micro-batches. The
/// left-over micro-batches, fewer than the ranks, go to the first ranks.
///
/// Sharded gradients (Zero2, ShardedParameters): the ranks reduce each round at once,
/// and each block is one micro-batch.
///
/// All functions throw Error(invalid_argument) if `ranks` is less than 1.
struct Deal {
    std::size_t micro_batches = 0;   ///< of a step, over all ranks
    int ranks = 1;                   ///< the number of ranks
    bool sharded_gradients = false;  ///< each round is reduced at once

    /// The number of micro-batches that `rank` computes.
    constexpr std::size_t count(int rank) const {
        return each() + (static_cast<std::size_t>(rank) < left_over() ? 1 : 0);
    }

    /// The number, from 0, of the micro-batch that `rank` computes as number `turn` of its own.
    constexpr std::size_t number(int rank, std::size_t turn) const {
        std::size_t at = sharded_gradients ? turn : 0;
        if (sharded_gradients) turn = 0;
        for (; turn >= round(at).block; ++at) turn -= round(at).block;
        return round(at).first + static_cast<std::size_t>(rank) * round(at).block + turn;
    }

    /// Rank r of the first `ranks` has the micro-batches from `first + r * block` on, `block` of them.
    struct Round {
        std::size_t first, block;
        int ranks;
    };
    /// Returns the number of rounds.
    constexpr std::size_t rounds() const {
        return (sharded_gradients ? each() : static_cast<std::size_t>(std::popcount(each()))) +
               (left_over() != 0 ? 1 : 0);
    }
    /// Returns a round, counted from 0.
    constexpr Round round(std::size_t number) const {
        std::size_t done = sharded_gradients ? number : 0;  // micro-batches of each rank in the rounds before
        for (; !sharded_gradients && number != 0; --number) done += block_after(done);
        const bool is_last = done == each();
        return {done * static_cast<std::size_t>(ranks), block_after(done),
                is_last ? static_cast<int>(left_over()) : ranks};
    }

private:
    constexpr std::size_t size() const {
        if (ranks < 1) detail::refuse("Deal", ranks, " ranks; set `ranks` to the size of the communicator");
        return static_cast<std::size_t>(ranks);
    }
    constexpr std::size_t each() const { return micro_batches / size(); }
    constexpr std::size_t left_over() const { return micro_batches % size(); }
    constexpr std::size_t block_after(std::size_t done) const {
        return sharded_gradients || done >= each() ? 1 : std::bit_floor(each() - done);
    }
};

}  // namespace gradsync::inline v0_2
