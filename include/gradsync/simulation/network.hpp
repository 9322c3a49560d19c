// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "../collective/call.hpp"
#include "../core/math.hpp"
#include "../plan/cost_model.hpp"

namespace gradsync::inline v0_2::simulation {

/// One collective, as the network saw it. Times are virtual seconds.
struct CollectiveRecord {
    int communicator = 0;      ///< 0: the one of all ranks; others in the order in which they were made
    std::uint64_t number = 0;  ///< number within the communicator, from 0
    collective::Operation operation = collective::Operation::barrier;
    std::size_t bytes = 0;      ///< of the whole buffer
    double first = 0;           ///< when the first rank started it
    double ready = 0;           ///< when the last rank started it
    double start = 0, end = 0;  ///< its times on the links
};

/// The links of a cluster. Each link carries one collective at a time. A collective within a node takes the inner link of that node; one
/// between nodes takes the inner and outer links of all its nodes.
class Network {
public:
    Network(const plan::Cluster& cluster, plan::Algorithm algorithm)
        : cluster_(cluster), algorithm_(algorithm), inner_(static_cast<std::size_t>(cluster.nodes())), outer_(inner_.size()) {}

    const plan::Cluster& cluster() const noexcept { return cluster_; }
    plan::Algorithm algorithm() const noexcept { return algorithm_; }
    std::size_t node_of(int rank) const noexcept { return static_cast<std::size_t>(rank / cluster_.ranks_per_node); }

    /// The network's view of a group of ranks.
    struct Route {
        std::vector<std::size_t> nodes;
        plan::Cluster shape;  ///< the cluster reduced to this group

        bool crosses() const noexcept { return nodes.size() > 1; }
    };

    /// A group with different numbers of ranks per node counts as one rank per node, on the slower link.
    Route route(std::span<const int> world_ranks) const {
        Route route{{}, cluster_};
        std::vector<int> on_node(inner_.size());
        for (const int r : world_ranks) ++on_node[node_of(r)];
        int each = 0;
        bool even = true;
        for (std::size_t node = 0; node < on_node.size(); ++node) {
            if (on_node[node] == 0) continue;
            route.nodes.push_back(node);
            even = even && (each == 0 || each == on_node[node]);
            each = on_node[node];
        }
        route.shape.ranks = static_cast<int>(world_ranks.size());
        route.shape.ranks_per_node = even ? each : 1;
        if (!even) route.shape.between = plan::detail::slower(cluster_.between, cluster_.within);
        return route;
    }

    /// Reserves the links for a collective of this route: sets its `start` and `end`.
    void reserve(const Route& route, CollectiveRecord& collective) {
        collective.start = collective.ready;
        for (const std::size_t node : route.nodes) {
            collective.start = gradsync::detail::larger(collective.start, inner_[node]);
            if (route.crosses()) collective.start = gradsync::detail::larger(collective.start, outer_[node]);
        }
        const plan::CallCost cost = plan::collective_cost(kind_of(collective.operation), algorithm_, route.shape);
        collective.end = collective.start + cost.seconds(static_cast<double>(collective.bytes));
        for (const std::size_t node : route.nodes) {
            inner_[node] = collective.end;
            if (route.crosses()) outer_[node] = collective.end;
        }
    }

private:
    /// A reduction to one rank costs as much as a broadcast; a gather or scatter as much as an all-gather; a barrier as much as an empty
    /// all-reduce.
    static plan::Collective kind_of(collective::Operation operation) noexcept {
        using enum plan::Collective;
        constexpr plan::Collective kinds[] = {all_reduce, broadcast,  reduce_scatter, all_gather,
                                              broadcast,  all_gather, all_gather,     all_reduce};
        return kinds[static_cast<std::size_t>(operation)];
    }

    plan::Cluster cluster_;
    plan::Algorithm algorithm_;
    std::vector<double> inner_, outer_;  ///< by node: the time until which the link is taken
};

}  // namespace gradsync::inline v0_2::simulation
