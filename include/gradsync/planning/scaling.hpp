// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <optional>

#include "backward.hpp"

namespace gradsync::inline v0_2::plan {

/// The compute of one step on one rank, in seconds.
struct StepTimes {
    double forward = 0;    ///< seconds of the forward
    double backward = 0;   ///< seconds of the backward
    double optimizer = 0;  ///< seconds of the optimizer's step

    /// Returns the step without communication.
    constexpr double sum() const noexcept { return forward + backward + optimizer; }
};

/// The expected times of a step.
struct StepForecast {
    double step = 0;           ///< seconds
    double communication = 0;  ///< seconds in which collectives are in flight
    double exposed = 0;        ///< the part of `communication` that the step waits for
    double efficiency = 1;     ///< compute / step
};

/// Forecasts a step whose buckets start when they are ready (`overlap`), or all after the backward. `ready` of each
/// bucket counts from the beginning of the backward.
inline StepForecast forecast_step(StepTimes compute, std::span<const BucketTime> buckets, CallCost cost, bool overlap) {
    std::vector<BucketTime> times(buckets.begin(), buckets.end());
    if (!overlap)
        for (BucketTime& b : times) b.ready = compute.backward;
    const double end = schedule(times, cost);
    StepForecast forecast;
    forecast.exposed = gradsync::detail::larger(0.0, end - compute.backward);
    for (const BucketTime& b : times) forecast.communication += b.end - b.start;
    forecast.step = compute.sum() + forecast.exposed;
    forecast.efficiency = forecast.step > 0 ? compute.sum() / forecast.step : 1;
    return forecast;
}

// ------------------------------------------------------------ the limit at which communication bounds data parallelism

/// The quantity that stays constant as ranks are added.
enum class Growth : std::uint8_t {
    weak,    ///< each rank's batch, and so its compute
    strong,  ///< the global batch: compute is divided by the ranks
};

/// The fewest ranks at which communication takes longer than the compute that could hide it. Empty if it never does.
struct CommunicationBound {
    std::optional<int> data_parallel;  ///< an all-reduce of the gradients, hidden by the backward
    std::optional<int> fsdp_forward;   ///< an all-gather of the weights, hidden by the forward
    /// An all-gather of the weights and a reduce-scatter of the gradients, hidden by the backward.
    std::optional<int> fsdp_backward;
};

/// Finds the number of ranks at which communication bounds a step. `compute` is that of one rank (weak), or of all the
/// work done by one rank (strong). The number of ranks of `cluster` is ignored: the search takes 1, 2, 3, ... nodes,
/// and only powers of two with recursive halving. The bytes are divided over `calls` calls. Throws
/// Error(invalid_argument), see `check`.
inline CommunicationBound communication_bound(StepTimes compute, double weight_bytes, double gradient_bytes,
                                              Algorithm algorithm, Cluster cluster, Growth growth = Growth::weak,
                                              double calls = 1) {
    cluster.ranks = cluster.ranks_per_node;
    check(cluster);
    const bool powers = algorithm == Algorithm::recursive_halving ||
                        (algorithm == Algorithm::hierarchical && cluster.across == Algorithm::recursive_halving);
    // In nodes.
    const int most = static_cast<int>((1u << 30) / std::bit_ceil(static_cast<unsigned>(cluster.ranks_per_node)));
    const auto first = [&](auto&& communication, double time) -> std::optional<int> {
        const auto bound = [&](int nodes) {
            Cluster c = cluster;
            c.ranks = nodes * c.ranks_per_node;
            return c.ranks > 1 && communication(c) > (growth == Growth::weak ? time : time / c.ranks);
        };
        // Communication grows with the ranks and compute does not: double, then bisect.
        int high = 1, low = 0;
        while (!bound(high)) {
            low = high;
            if (high >= most) return std::nullopt;
            high *= 2;
        }
        while (!powers && high - low > 1) {
            const int middle = low + (high - low) / 2;
            (bound(middle) ? high : low) = middle;
        }
        return high * cluster.ranks_per_node;
    };
    const auto seconds = [&](Collective what, const Cluster& c, double bytes) {
        const CallCost cost = collective_cost(what, algorithm, c);
        return calls * cost.fixed + cost.per_byte * bytes;
    };
    const auto gather = [&](const Cluster& c) { return seconds(Collective::all_gather, c, weight_bytes); };
    return {
        first([&](const Cluster& c) { return seconds(Collective::all_reduce, c, gradient_bytes); }, compute.backward),
        first(gather, compute.forward),
        first([&](const Cluster& c) { return gather(c) + seconds(Collective::reduce_scatter, c, gradient_bytes); },
              compute.backward)};
}

}  // namespace gradsync::inline v0_2::plan
