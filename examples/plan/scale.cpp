// SPDX-License-Identifier: BSL-1.0
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <gradsync/bucket/flat.hpp>
#include <gradsync/bucket/per_parameter.hpp>
#include <gradsync/bucket/size_capped.hpp>
#include <gradsync/overlap/no_overlap.hpp>
#include <gradsync/overlap/overlap_backward.hpp>
#include <gradsync/planning/optimal_buckets.hpp>
#include <gradsync/planning/scaling.hpp>
#include <gradsync/planning/simulated_backend.hpp>
#include <gradsync/reducer.hpp>

#include "command.hpp"
#include "gradients.hpp"

namespace gradsync_plan {

namespace {

namespace gs = gradsync;

struct Flags {
    GradientFlags gradients;
    ClusterFlags cluster;
    double forward_ms = 0, optimizer_ms = 0, jitter = 0;
    std::vector<std::uint64_t> worlds{8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096};
    bool simulate = false;
};

/// A bucket policy that was chosen at run time: the engine is compiled once for all of them.
struct AnyBuckets {
    std::shared_ptr<const gs::BucketPlan> buckets;

    gs::BucketPlan plan(std::span<const gs::ParameterInfo>, std::span<const std::size_t>) const { return *buckets; }
    std::string describe() const { return "AnyBuckets"; }
};

struct Policy {
    std::string name;
    plan::Algorithm algorithm;
    bool overlap;
    gs::BucketPlan (*make)(const std::vector<gs::ParameterInfo>&, const std::vector<std::size_t>&, plan::CallCost, std::vector<double>);
};

std::vector<Policy> policies(plan::Algorithm algorithm) {
    const auto per_parameter = [](const auto& infos, const auto& order, plan::CallCost, std::vector<double>) {
        return gs::PerParameter{}.plan(infos, order);
    };
    const auto flat = [](const auto& infos, const auto& order, plan::CallCost, std::vector<double>) {
        return gs::Flat{}.plan(infos, order);
    };
    const auto capped = [](const auto& infos, const auto& order, plan::CallCost, std::vector<double>) {
        return gs::SizeCappedBuckets{}.plan(infos, order);
    };
    const auto optimal = [](const auto& infos, const auto& order, plan::CallCost cost, std::vector<double> ready) {
        return gs::OptimalBuckets(cost, std::move(ready)).plan(infos, order);
    };
    return {{"naive", algorithm, false, per_parameter},     {"flat", algorithm, false, flat},
            {"overlapped", algorithm, true, per_parameter}, {"capped at 25 MiB", algorithm, true, capped},
            {"optimal", algorithm, true, optimal},          {"optimal, hierarchical", plan::Algorithm::hierarchical, true, optimal}};
}

/// One step of a real Reducer on a simulated cluster.
template <class Overlap>
double simulate_step(const Flags& f, const plan::Cluster& cluster, plan::Algorithm algorithm,
                     const std::vector<plan::ReadyGradient>& gradients, const gs::BucketPlan& buckets) {
    const std::size_t n = gradients.size();
    std::vector<gs::ParameterView> parameters(n);  // in the order of readiness, reversed: as they are registered
    for (std::size_t i = 0; i < n; ++i)
        parameters[i] = {.name = std::to_string(i),
                         .gradient = {nullptr, gradients[n - 1 - i].bytes / 4, gs::DType::f32, gs::MemorySpace::host}};
    const AnyBuckets policy{std::make_shared<const gs::BucketPlan>(buckets)};
    const gs::SimulatedCluster options{
        .cluster = cluster, .algorithm = algorithm, .jitter = f.jitter, .moves_buckets = false, .timeout = std::chrono::hours(24)};
    double begin = 0;
    const gs::SimulatedRun run = gs::run_simulated(options, [&](gs::SimulatedBackend comm) {
        gs::Reducer<gs::SimulatedBackend, AnyBuckets, Overlap> sync(
            comm, parameters, {.gradients = gs::GradientStorage::in_buckets, .compare_weights_every = gs::never}, policy);
        comm.barrier().wait();
        begin = comm.now();
        comm.compute(f.forward_ms * 1e-3);
        for (std::size_t k = 0; k < n; ++k) {
            comm.compute(gradients[k].ready - (k == 0 ? 0 : gradients[k - 1].ready));
            sync.mark_ready(n - 1 - k);
        }
        sync.finish();
        comm.compute(f.optimizer_ms * 1e-3);
    });
    return run.seconds() - begin;
}

Json bound_json(const std::optional<int>& ranks) { return ranks ? Json(*ranks) : Json(nullptr); }
std::string bound_text(const std::optional<int>& ranks) { return ranks ? grouped(static_cast<std::uint64_t>(*ranks)) : "never"; }

Answer answer(const Flags& f) {
    const std::vector<plan::ReadyGradient> gradients = f.gradients.gradients();
    const std::size_t n = gradients.size();
    const plan::StepTimes compute{f.forward_ms * 1e-3, gradients.back().ready, f.optimizer_ms * 1e-3};
    double bytes = 0;
    std::vector<gs::ParameterInfo> infos(n);
    std::vector<double> ready(n);
    std::vector<plan::ReadyGradient> by_parameter(n);
    std::vector<std::size_t> order(n);
    for (std::size_t i = 0; i < n; ++i) {
        const plan::ReadyGradient& g = by_parameter[i] = gradients[n - 1 - i];
        infos[i].count = g.bytes / 4;
        ready[i] = g.ready;
        order[i] = n - 1 - i;
        bytes += static_cast<double>(g.bytes);
    }

    Answer a;
    a.json = {{"gradients", n}, {"bytes", bytes}, {"compute_seconds", compute.sum()}, {"simulated", f.simulate}, {"curves", Json::array()}};
    const char* const how = f.simulate ? ", simulated" : ", by the model";
    Table table{std::string("Efficiency, compute / step") + how + ":", {"ranks"}, {}};
    a.chart = {"Compute / step of " + digits(bytes / 1e6, 4) + " MB of gradients", "ranks", "efficiency", true, false};
    for (const std::uint64_t world : f.worlds) table.rows.push_back({grouped(world)});
    for (const Policy& policy : policies(f.cluster.chosen())) {
        table.header.push_back(policy.name);
        Json points = Json::array();
        Curve curve{policy.name, {}};
        for (std::size_t w = 0; w < f.worlds.size(); ++w) {
            const plan::Cluster cluster = f.cluster.cluster(f.worlds[w]);
            const plan::CallCost cost = plan::collective_cost(plan::Collective::all_reduce, policy.algorithm, cluster);
            const gs::BucketPlan buckets = policy.make(infos, order, cost, ready);
            const plan::StepForecast forecast = plan::forecast_step(compute, plan::buckets_of(by_parameter, buckets), cost, policy.overlap);
            double step = forecast.step;
            if (f.simulate)
                step = policy.overlap ? simulate_step<gs::OverlapBackward>(f, cluster, policy.algorithm, gradients, buckets)
                                      : simulate_step<gs::NoOverlap>(f, cluster, policy.algorithm, gradients, buckets);
            const double efficiency = compute.sum() / step;
            points.push_back({{"ranks", f.worlds[w]},
                              {"step_seconds", step},
                              {"exposed_seconds", step - compute.sum()},
                              {"efficiency", efficiency},
                              {"forecast_seconds", forecast.step},
                              {"buckets", buckets.size()}});
            char text[32];
            std::snprintf(text, sizeof text, "%.4f", efficiency);
            table.rows[w].push_back(text);
            curve.points.emplace_back(static_cast<double>(f.worlds[w]), efficiency);
        }
        a.json["curves"].push_back({{"policy", policy.name}, {"points", points}});
        a.chart.curves.push_back(curve);
    }
    a.tables.push_back(table);

    Table bounds{"Bound by communication from so many ranks on, one call for all bytes, " + f.cluster.algorithm + ":",
                 {"", "data parallel", "FSDP forward", "FSDP backward"},
                 {}};
    for (const plan::Growth growth : {plan::Growth::weak, plan::Growth::strong}) {
        const plan::CommunicationBound bound =
            plan::communication_bound(compute, bytes, bytes, f.cluster.chosen(), f.cluster.cluster(f.cluster.ranks_per_node), growth);
        const bool weak = growth == plan::Growth::weak;
        Json& json = a.json["communication_bound"][weak ? "weak" : "strong"];
        json = {{"data_parallel", bound_json(bound.data_parallel)}, {"fsdp_backward", bound_json(bound.fsdp_backward)}};
        if (f.forward_ms > 0) json["fsdp_forward"] = bound_json(bound.fsdp_forward);
        bounds.rows.push_back({weak ? "the same batch a rank" : "the same global batch, these times on one rank",
                               bound_text(bound.data_parallel), f.forward_ms > 0 ? bound_text(bound.fsdp_forward) : "?",
                               bound_text(bound.fsdp_backward)});
    }
    if (f.forward_ms == 0) bounds.notes.push_back("FSDP's forward: give --forward-ms.");
    if (f.cluster.latency_us > 0) {
        const double wall = plan::ring_latency_wall(f.cluster.cluster(f.cluster.ranks_per_node).between, 25 << 20);
        a.json["ring_latency_wall_25_mib"] = wall;
        bounds.notes.push_back("A ring's latency takes as long as the bytes of 25 MiB at " + digits(wall, 4) + " ranks.");
    }
    a.tables.push_back(bounds);
    return a;
}

}  // namespace

Question add_scale(CLI::App& app) {
    const auto f = std::make_shared<Flags>();
    f->gradients.add(app);
    f->cluster.add(app, false)->required();
    const char* const group = "Step";
    app.add_option("--forward-ms", f->forward_ms, "what the forward takes")->check(amount())->capture_default_str()->group(group);
    app.add_option("--optimizer-ms", f->optimizer_ms, "what the optimizer takes")->check(amount())->capture_default_str()->group(group);
    app.add_option("--worlds", f->worlds, "numbers of ranks")
        ->check(whole_number(2))
        ->delimiter(',')
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
        ->capture_default_str()
        ->group(group);
    auto* const simulate = app.add_flag("--simulate", f->simulate, "real Reducers in virtual time, not the model alone")->group(group);
    app.add_option("--jitter", f->jitter, "compute takes up to this part longer, at random: 0.1 is 10 %")
        ->check(amount())
        ->needs(simulate)
        ->group(group);
    return [f] {
        if (f->simulate && *std::max_element(f->worlds.begin(), f->worlds.end()) > 16'384)
            throw UsageError("--simulate: every rank is a thread; 16384 of them are the most, or leave it out");
        return answer(*f);
    };
}

}  // namespace gradsync_plan
