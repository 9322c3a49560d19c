// SPDX-License-Identifier: BSL-1.0
#pragma once
// The gradients of a model, in the order in which a backward delivers them; and what ranks and links are like.

#include <cstdint>
#include <string>
#include <vector>

#include <gradsync/planning/backward.hpp>
#include <gradsync/planning/cost_model.hpp>

#include "command.hpp"

namespace gradsync_plan {

namespace plan = gradsync::plan;

/// Where gradients come from: a profile that gradsync_train has written, or a model of which the time of each gradient is
/// in proportion to its bytes.
struct GradientFlags {
    std::string profile;
    std::uint64_t count = 0, bytes = 0;
    std::uint64_t d_model = 0, blocks = 0, vocabulary = 0;
    double backward_ms = 0;

    void add(CLI::App& app);

    /// In order of readiness. Throws UsageError where the flags do not say enough, or the file cannot be read.
    std::vector<plan::ReadyGradient> gradients() const;
    bool has_profile() const { return !profile.empty(); }
    /// What a call costs, of a profile.
    plan::CallCost profiled_cost() const;
};

/// What the links are like.
struct ClusterFlags {
    std::uint64_t ranks = 2, ranks_per_node = 1;
    double latency_us = 0, bandwidth = 0;            // GB/s
    double node_latency_us = 0, node_bandwidth = 0;  // within a node; 0: as between nodes
    double overhead_us = 0;
    std::string algorithm = "ring", across = "ring";

    CLI::Option* add(CLI::App& app, bool with_ranks);  // the bandwidth

    plan::Cluster cluster(std::uint64_t world) const;
    plan::Algorithm chosen() const { return named(algorithm); }
    static plan::Algorithm named(const std::string& name);
};

}  // namespace gradsync_plan
