// SPDX-License-Identifier: BSL-1.0
#include "gradients.hpp"

#include <algorithm>
#include <fstream>
#include <limits>

#include <gradsync/planning/checked_size.hpp>

namespace gradsync_plan {

namespace {

/// The profile of gradsync_train's JSON: {"profile": {"fixed": s, "per_byte": s, "gradients": [{"ready": s, "bytes": n}, ...]}}
Json read_profile(const std::string& file) {
    std::ifstream in{file};
    if (!in) throw UsageError("--profile: cannot read " + file + "; check the name and its permissions");
    try {
        const Json json = Json::parse(in);
        const Json& profile = json.at("profile");
        const auto check = [&](const Json& number, bool is_amount) {
            if (!is_amount || !(number.get<double>() >= 0 && number.get<double>() <= 1e15))
                throw UsageError("--profile: " + file + " has " + number.dump() +
                                 " where a time, or a number of bytes, from 0 to 1e+15 is due");
        };
        for (const Json& g : profile.at("gradients")) {
            check(g.at("ready"), g.at("ready").is_number());
            check(g.at("bytes"), g.at("bytes").is_number_unsigned());
        }
        if (profile.at("gradients").empty()) throw UsageError("--profile: " + file + " has no gradients");
        for (const char* const cost : {"fixed", "per_byte"}) check(profile.at(cost), profile.at(cost).is_number());
        return profile;
    } catch (const Json::exception& error) {
        throw UsageError("--profile: " + file + " is no result of gradsync_train --buckets optimal --json FILE: " + error.what());
    }
}

/// Of a transformer with learned norms, biases and two tables, last layer first.
std::vector<std::uint64_t> transformer_elements(std::uint64_t d, std::uint64_t blocks, std::uint64_t vocabulary) {
    const auto times = [](std::uint64_t a, std::uint64_t b) { return (plan::CheckedSize(a) * b).value(); };
    const std::uint64_t square = times(d, d);
    std::vector<std::uint64_t> elements{times(vocabulary, d), d, d};
    for (std::uint64_t b = 0; b < blocks; ++b)
        for (const std::uint64_t n :
             {d, times(4, square), times(4, d), times(4, square), d, d, d, square, times(3, d), times(3, square), d, d})
            elements.push_back(n);
    elements.push_back(times(vocabulary, d));
    return elements;
}

}  // namespace

void GradientFlags::add(CLI::App& app) {
    const char* const group = "Gradients";
    app.add_option("--profile", profile, "of a run: the file of gradsync_train --buckets optimal --json FILE")->group(group);
    app.add_option("--d-model", d_model, "of a transformer: width,")->check(whole_number())->group(group);
    app.add_option("--blocks", blocks, "blocks,")->check(whole_number())->group(group);
    app.add_option("--vocabulary", vocabulary, "and tokens; in f32")->check(whole_number())->group(group);
    app.add_option("--gradients", count, "or so many equal ones")->check(whole_number())->group(group);
    app.add_option("--bytes", bytes, "of all of these together")->check(whole_number())->group(group);
    app.add_option("--backward-ms", backward_ms, "what the backward takes")->check(amount(true))->group(group);
}

std::vector<plan::ReadyGradient> GradientFlags::gradients() const {
    std::vector<plan::ReadyGradient> result;
    if (has_profile()) {
        const Json profile_of_run = read_profile(profile);
        for (const Json& g : profile_of_run.at("gradients"))
            result.push_back({g.at("ready").get<double>(), g.at("bytes").get<std::size_t>()});
        std::stable_sort(result.begin(), result.end(), [](const auto& a, const auto& b) { return a.ready < b.ready; });
        return result;
    }
    std::vector<std::uint64_t> sizes;
    if (d_model != 0 && blocks != 0 && vocabulary != 0) {
        check_blocks(blocks);
        for (const std::uint64_t n : transformer_elements(d_model, blocks, vocabulary)) sizes.push_back((plan::CheckedSize(n) * 4).value());
    } else if (count != 0 && bytes != 0) {
        if (count > 1'000'000)
            throw UsageError("--gradients " + std::to_string(count) + " is more than this can hold; 1000000 is the most");
        for (std::uint64_t i = 0; i < count; ++i) sizes.push_back(bytes / count + (i < bytes % count));
    } else {
        throw UsageError("which gradients? give --d-model, --blocks and --vocabulary, or --gradients and --bytes; see --help");
    }
    if (backward_ms == 0) throw UsageError("--backward-ms is needed: what the backward takes");
    plan::CheckedSize total = 0;
    for (const std::uint64_t n : sizes) total = total + n;
    double so_far = 0;
    for (const std::uint64_t n : sizes) {
        so_far += static_cast<double>(n);
        result.push_back({backward_ms * 1e-3 * so_far / static_cast<double>(total.value()), n});
    }
    return result;
}

plan::CallCost GradientFlags::profiled_cost() const {
    const Json profile_of_run = read_profile(profile);
    return {profile_of_run.at("fixed").get<double>(), profile_of_run.at("per_byte").get<double>()};
}

CLI::Option* ClusterFlags::add(CLI::App& app, bool with_ranks) {
    const char* const group = "Cluster";
    const auto algorithms = CLI::IsMember({"ring", "tree", "recursive-halving", "hierarchical"}).description("");
    if (with_ranks) app.add_option("--ranks", ranks, "how many")->check(whole_number())->capture_default_str()->group(group);
    app.add_option("--ranks-per-node", ranks_per_node, "that share a link to the other nodes")
        ->check(whole_number())
        ->capture_default_str()
        ->group(group);
    app.add_option("--latency-us", latency_us, "of a message between nodes")->check(amount())->capture_default_str()->group(group);
    auto* const option = app.add_option("--bandwidth", bandwidth, "of a node's link, GB/s")->check(amount(true))->group(group);
    app.add_option("--node-latency-us", node_latency_us, "of a message within a node [as between nodes]")->check(amount())->group(group);
    app.add_option("--node-bandwidth", node_bandwidth, "within a node, GB/s [as between nodes]")->check(amount(true))->group(group);
    app.add_option("--overhead-us", overhead_us, "of each call besides")->check(amount())->capture_default_str()->group(group);
    app.add_option("--algorithm", algorithm, "ring, tree, recursive-halving or hierarchical")
        ->check(algorithms)
        ->capture_default_str()
        ->group(group);
    app.add_option("--across", across, "of hierarchical, between nodes: ring, tree or recursive-halving")
        ->check(CLI::IsMember({"ring", "tree", "recursive-halving"}).description(""))
        ->capture_default_str()
        ->group(group);
    return option;
}

plan::Cluster ClusterFlags::cluster(std::uint64_t world) const {
    constexpr std::uint64_t most = 1 << 30;
    if (world > most || ranks_per_node > most)
        throw UsageError(std::to_string(std::max(world, ranks_per_node)) + " ranks are more than this can hold; 1073741824 is the most");
    const plan::Link between{latency_us * 1e-6, 1e-9 / bandwidth};
    plan::Link within = between;
    if (node_latency_us != 0) within.alpha = node_latency_us * 1e-6;
    if (node_bandwidth != 0) within.beta = 1e-9 / node_bandwidth;
    return {.ranks = static_cast<int>(world),
            .ranks_per_node = static_cast<int>(ranks_per_node),
            .between = between,
            .within = within,
            .call_overhead = overhead_us * 1e-6,
            .across = named(across)};
}

plan::Algorithm ClusterFlags::named(const std::string& name) {
    for (const plan::Algorithm a : {plan::Algorithm::tree, plan::Algorithm::recursive_halving, plan::Algorithm::hierarchical})
        if (name == name_of(a)) return a;
    return plan::Algorithm::ring;
}

}  // namespace gradsync_plan
