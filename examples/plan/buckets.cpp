// SPDX-License-Identifier: BSL-1.0
#include <algorithm>
#include <memory>

#include <gradsync/bucket/flat.hpp>
#include <gradsync/bucket/per_parameter.hpp>
#include <gradsync/bucket/size_capped.hpp>
#include <gradsync/planning/backward.hpp>
#include <gradsync/planning/partition.hpp>

#include "command.hpp"
#include "gradients.hpp"

namespace gradsync_plan {

namespace {

/// The plan of a bucket policy, for gradients that stand in the order of readiness.
template <gradsync::BucketPolicy Policy>
gradsync::BucketPlan plan_of(const Policy& policy, const std::vector<plan::ReadyGradient>& gradients) {
    std::vector<gradsync::ParameterInfo> infos;
    std::vector<std::size_t> order;
    for (const plan::ReadyGradient& g : gradients) {
        order.push_back(infos.size());
        infos.push_back({.count = g.bytes, .dtype = gradsync::DType::u8});
    }
    return policy.plan(infos, order);
}

std::size_t bytes_of(double mib) {
    if (!(mib * (1 << 20) >= 1 && mib < 1e9)) throw UsageError("--caps: " + digits(mib) + " MiB is no size of a bucket");
    return static_cast<std::size_t>(mib * (1 << 20));
}

std::string milliseconds(double seconds) {
    char text[32];
    std::snprintf(text, sizeof text, "%.3f", seconds * 1e3);
    return text;
}

/// Times of a profile were measured beside the collectives, of this cost, of the buckets that are the default until there are times.
std::vector<plan::ReadyGradient> undisturbed(const std::vector<plan::ReadyGradient>& measured, plan::CallCost cost,
                                             plan::Contention contention) {
    std::vector<std::size_t> ends;
    const gradsync::BucketPlan buckets = plan_of(gradsync::SizeCappedBuckets{}, measured);
    for (std::size_t b = 0; b < buckets.size(); ++b) ends.push_back((b == 0 ? 0 : ends.back()) + buckets.bucket(b).size());
    return plan::undisturbed(measured, ends, cost, contention);
}

/// Two rules plan by times, those that a Reducer has seen, and by a link and compute that share nothing: `seen`. What comes of it is
/// played with `gradients`, whose times nothing has disturbed.
Answer answer(const std::vector<plan::ReadyGradient>& seen, const std::vector<plan::ReadyGradient>& gradients, plan::CallCost cost,
              plan::Contention contention, std::vector<double> caps) {
    const double backward = gradients.back().ready;
    const std::vector<std::size_t> optimal = plan::optimal_ends(seen, cost);
    double total = 0;
    for (const plan::ReadyGradient& g : gradients) total += static_cast<double>(g.bytes);
    const double root = plan::square_root_bucket_bytes(total, cost);
    const auto play = [&](std::vector<plan::BucketTime>& buckets) { return plan::schedule(buckets, cost, backward, contention); };
    std::vector<plan::BucketTime> best_buckets = plan::buckets_of(gradients, optimal);
    const double best = play(best_buckets).finish;

    Answer a;
    a.json = {{"gradients", gradients.size()}, {"bytes", total},
              {"backward_seconds", backward},  {"fixed", cost.fixed},
              {"per_byte", cost.per_byte},     {"compute_keeps", contention.compute},
              {"link_keeps", contention.link}, {"square_root_bucket_bytes", cost.per_byte > 0 ? Json(root) : Json(nullptr)},
              {"policies", Json::array()}};
    Table table{
        "Buckets that leave while the backward goes on:", {"", "buckets", "largest, MiB", "finish, ms", "exposed, ms", "to optimal"}, {}};
    const auto add = [&](const std::string& name, const auto& how) {
        std::vector<plan::BucketTime> buckets = plan::buckets_of(gradients, how);
        const auto [finish, hidden, exposed] = play(buckets);
        std::size_t largest = 0;
        Json sizes = Json::array();
        for (const plan::BucketTime& b : buckets) {
            largest = std::max(largest, b.bytes);
            sizes.push_back(b.bytes);
        }
        a.json["policies"].push_back({{"policy", name},
                                      {"bucket_bytes", sizes},
                                      {"finish_seconds", finish},
                                      {"hidden_seconds", hidden},
                                      {"exposed_seconds", exposed},
                                      {"to_optimal", finish / best}});
        char ratio[32];
        std::snprintf(ratio, sizeof ratio, "%.4f", finish / best);
        table.rows.push_back({name, grouped(buckets.size()), digits(static_cast<double>(largest) / (1 << 20), 4), milliseconds(finish),
                              milliseconds(exposed), ratio});
        return finish;
    };
    add("per-parameter", plan_of(gradsync::PerParameter{}, gradients));
    add("flat", plan_of(gradsync::Flat{}, gradients));
    Curve curve{"capped", {}};
    for (const double cap : caps) {
        const double finish = add("capped " + digits(cap) + " MiB", plan_of(gradsync::SizeCappedBuckets(bytes_of(cap)), gradients));
        curve.points.emplace_back(cap, (finish - backward) * 1e3);
    }
    if (cost.per_byte > 0) {
        const std::size_t size = root < 1 ? 1 : static_cast<std::size_t>(root);
        add("square root", plan_of(gradsync::SizeCappedBuckets(size, size), gradients));
    }
    const double merged = add("merged greedily", plan::merged_ends(seen, cost));
    add("optimal", optimal);
    a.tables.push_back({grouped(gradients.size()) + " gradients of " + binary_bytes(static_cast<std::uint64_t>(total)) + ", ready within " +
                            milliseconds(backward) + " ms; a call of n bytes takes " + digits(cost.fixed * 1e6) + " us + n / " +
                            digits(1e-9 / cost.per_byte, 4) + " GB/s.",
                        {},
                        {}});
    a.tables.push_back(table);
    a.chart = {"What the step waits for, by the cap of a bucket", "cap, MiB", "exposed, ms", true, false, {curve}};
    const auto level = [&](const char* name, double finish) {
        a.chart.curves.push_back({name, {{caps.front(), (finish - backward) * 1e3}, {caps.back(), (finish - backward) * 1e3}}});
    };
    level("merged greedily", merged);
    level("optimal", best);
    return a;
}

}  // namespace

Question add_buckets(CLI::App& app) {
    struct Flags {
        GradientFlags gradients;
        ClusterFlags cluster;
        std::vector<double> caps{1, 2, 5, 10, 25, 50, 100};
        plan::Contention contention;
    };
    const auto f = std::make_shared<Flags>();
    f->gradients.add(app);
    CLI::Option* const bandwidth = f->cluster.add(app, true);
    app.add_option("--caps", f->caps, "caps to compare with, MiB")
        ->check(amount(true))
        ->delimiter(',')
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
        ->capture_default_str();
    const char* const group = "Where ranks compute on the cores that move the bytes";
    app.add_option("--compute-keeps", f->contention.compute, "of its speed while buckets are on their way, at most 1")
        ->check(amount(true))
        ->capture_default_str()
        ->group(group);
    app.add_option("--link-keeps", f->contention.link, "of its speed while the backward computes, at most 1")
        ->check(amount(true))
        ->capture_default_str()
        ->group(group);
    return [f, bandwidth] {
        const std::vector<plan::ReadyGradient> seen = f->gradients.gradients();
        plan::CallCost cost;
        if (bandwidth->count() != 0) {
            if (f->cluster.ranks < 2) throw UsageError("--ranks 1: one rank alone sends nothing; give at least 2");
            cost = plan::collective_cost(plan::Collective::all_reduce, f->cluster.chosen(), f->cluster.cluster(f->cluster.ranks));
        } else if (f->gradients.has_profile()) {
            cost = f->gradients.profiled_cost();
        } else {
            throw UsageError("--bandwidth is needed: of a node's link, GB/s");
        }
        std::vector<double> caps = f->caps;
        std::sort(caps.begin(), caps.end());
        const bool profiled = f->gradients.has_profile();
        return answer(seen, profiled ? undisturbed(seen, f->gradients.profiled_cost(), f->contention) : seen, cost, f->contention, caps);
    };
}

}  // namespace gradsync_plan
