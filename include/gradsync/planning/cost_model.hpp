// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "checked_size.hpp"

/// @file
/// A cost model of collectives, after Thakur, Rabenseifner and Gropp, "Optimization of collective
/// communication operations in MPICH" (2005): a message of n bytes takes alpha + beta n seconds.
/// The time of the reduction itself is left out.

namespace gradsync::inline v0_2::plan {

/// The cost of messages of one rank, or of one node.
struct Link {
    double alpha = 0;  ///< seconds before the first byte
    double beta = 0;   ///< seconds per byte, one over the bandwidth
};

/// The cost of a collective call, for any algorithm: n bytes take  fixed + per_byte n  seconds.
struct CallCost {
    double fixed = 0;     ///< seconds per call
    double per_byte = 0;  ///< seconds per byte

    /// Returns the time of a call.
    constexpr double seconds(double bytes) const noexcept { return fixed + per_byte * bytes; }

    friend constexpr CallCost operator+(CallCost a, CallCost b) noexcept {
        return {a.fixed + b.fixed, a.per_byte + b.per_byte};
    }
    friend constexpr bool operator==(CallCost, CallCost) = default;
};

/// The collectives that have a cost.
enum class Collective : std::uint8_t { all_reduce, reduce_scatter, all_gather, broadcast };

/// How a collective moves its bytes.
enum class Algorithm : std::uint8_t {
    ring,  ///< each byte passes every rank: fewest bytes, most messages
    tree,  ///< down a tree and up again, in pieces: few messages, whole buffers
    /// Partners at distances 1, 2, 4, ...: fewest bytes and few messages; costs more if p is not a power of 2.
    recursive_halving,
    hierarchical,  ///< within the nodes, across them, within the nodes
};

/// "ring", "tree", "recursive-halving", "hierarchical".
constexpr std::string_view name_of(Algorithm algorithm) noexcept {
    return gradsync::detail::name_in({"ring", "tree", "recursive-halving", "hierarchical"}, algorithm);
}

/// Ranks on nodes, the same number on each.
struct Cluster {
    int ranks = 1;                       ///< all ranks
    int ranks_per_node = 1;              ///< must divide `ranks`, or be larger
    Link between = {};                   ///< from a node to the others; its ranks share it
    Link within = {};                    ///< between the ranks of a node
    double call_overhead = 0;            ///< seconds that every call costs in addition
    Algorithm across = Algorithm::ring;  ///< the algorithm of `hierarchical` between the nodes

    /// Returns the number of nodes.
    int nodes() const noexcept { return ranks / ranks_per_node + (ranks % ranks_per_node != 0 ? 1 : 0); }
};

/// Throws Error(invalid_argument) if the cluster is invalid.
inline void check(const Cluster& c) {
    using detail::refuse;
    if (c.ranks < 1) refuse("a cluster has at least 1 rank, not ", c.ranks);
    if (c.ranks_per_node < 1) refuse("a node has at least 1 rank, not ", c.ranks_per_node);
    if (c.ranks > c.ranks_per_node && c.ranks % c.ranks_per_node != 0)
        refuse(c.ranks, " ranks do not fill nodes of ", c.ranks_per_node, "; choose a multiple of it");
    for (const double x : {c.between.alpha, c.between.beta, c.within.alpha, c.within.beta, c.call_overhead})
        if (!(x >= 0) || !gradsync::detail::is_finite(x))
            refuse("latencies, times per byte and overheads must be finite numbers of 0 or more, not ",
                   std::to_string(x));
    if (c.across == Algorithm::hierarchical)
        refuse("`across` must not be hierarchical; choose ring, tree or recursive_halving");
}

namespace detail {

/// The cost for p ranks that all have the same link.
constexpr CallCost flat_cost(Collective what, Algorithm algorithm, int p, Link link) noexcept {
    if (p <= 1) return {};
    const double n = p, alpha = link.alpha, beta = link.beta;
    const double share = (n - 1) / n;  // the share of the bytes that are not a rank's own
    const bool all_reduce = what == Collective::all_reduce, broadcast = what == Collective::broadcast;
    const double up = std::bit_width(static_cast<unsigned>(p) - 1);  // log2, rounded up
    switch (algorithm) {
        case Algorithm::tree:
            if (broadcast) return {up * alpha, beta};
            if (all_reduce) return {2 * up * alpha, 2 * beta};
            // A reduction to one rank, then a scatter; or the mirror image.
            return {2 * up * alpha, (1 + share) * beta};
        case Algorithm::recursive_halving: {
            if (broadcast)  // a scatter, then an all-gather
                return CallCost{up * alpha, share * beta} + flat_cost(Collective::all_gather, algorithm, p, link);
            const auto q = std::bit_floor(static_cast<unsigned>(p));
            const double steps = std::bit_width(q) - 1, part = (q - 1.0) / q;
            const double halves = all_reduce ? 2 : 1;
            CallCost cost{halves * steps * alpha, halves * part * beta};
            // Each rank beyond the power of two first sends all its data to another rank, and gets its result from it.
            if (static_cast<int>(q) != p) cost = cost + CallCost{2 * alpha, (all_reduce ? 2 : 1 + 1 / n) * beta};
            return cost;
        }
        default:
            if (broadcast) return {(n - 1) * alpha, beta};  // a chain, in pieces
            return {(all_reduce ? 2 : 1) * (n - 1) * alpha, (all_reduce ? 2 : 1) * share * beta};
    }
}

constexpr Link slower(Link a, Link b) noexcept {
    return {gradsync::detail::larger(a.alpha, b.alpha), gradsync::detail::larger(a.beta, b.beta)};
}

}  // namespace detail

/// The cost of a collective over all ranks. The n bytes of `CallCost` are those of the whole buffer.
///
/// - ring: 2 (p-1) alpha + 2 (p-1)/p n beta for an all-reduce, half of it for a reduce-scatter or an all-gather,
///   (p-1) alpha + n beta for a broadcast.
/// - tree: 2 log2(p) alpha + 2 n beta for an all-reduce, half of it for a broadcast,
///   2 log2(p) alpha + (1 + (p-1)/p) n beta for a reduce-scatter or an all-gather.
/// - recursive halving: 2 log2(p) alpha + 2 (p-1)/p n beta for an all-reduce or a broadcast, half of it for a
///   reduce-scatter or an all-gather. If p is not a power of 2, the next lower one counts, and the other ranks' data
///   travel before and after.
/// - hierarchical: an all-reduce is a ring reduce-scatter within the nodes, an all-reduce of each of the g
///   shards across the nodes, and a ring all-gather within. The shards travel at the same time over links
///   that the g ranks of a node share.
///
/// On several nodes ring and tree are as fast as the slower of the two links.
/// Recursive halving takes near partners first, so it is hierarchical by itself. A tree's logarithms are rounded up.
/// Throws Error(invalid_argument), see `check`.
inline CallCost collective_cost(Collective what, Algorithm algorithm, const Cluster& cluster) {
    check(cluster);
    if (cluster.ranks == 1) return {};
    const CallCost overhead{cluster.call_overhead, 0};
    const int nodes = cluster.nodes(), each = nodes == 1 ? cluster.ranks : cluster.ranks_per_node;
    if (nodes == 1 || each == 1) {
        const Algorithm flat = algorithm != Algorithm::hierarchical ? algorithm
                               : nodes == 1                         ? Algorithm::ring
                                                                    : cluster.across;
        return overhead + detail::flat_cost(what, flat, cluster.ranks, nodes == 1 ? cluster.within : cluster.between);
    }
    if (algorithm == Algorithm::ring || algorithm == Algorithm::tree)
        return overhead +
               detail::flat_cost(what, algorithm, cluster.ranks, detail::slower(cluster.between, cluster.within));

    const bool by_halves = algorithm == Algorithm::recursive_halving;
    const Algorithm inner = by_halves ? algorithm : Algorithm::ring, outer = by_halves ? algorithm : cluster.across;
    const CallCost across = detail::flat_cost(what, outer, nodes, cluster.between);
    return overhead + across + detail::flat_cost(what, inner, each, cluster.within);
}

/// The number of ranks at which a ring's latency takes as long as its bytes: p = n beta / alpha.
/// Beyond it, more ranks only cost time.
constexpr double ring_latency_wall(Link link, double bytes) noexcept { return bytes * link.beta / link.alpha; }

}  // namespace gradsync::inline v0_2::plan
