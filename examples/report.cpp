// SPDX-License-Identifier: BSL-1.0
#include "report.hpp"

#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "digest.hpp"
#include "profile_json.hpp"

namespace gradsync_train {

namespace {

/// The flags of a run, for its report.
nlohmann::json flags(const Options& o) {
    nlohmann::json config{{"model", o.model},
                          {"d_model", o.d_model},
                          {"context", o.context},
                          {"seed", o.seed},
                          {"micro_batch", o.micro_batch},
                          {"micro_batches", o.micro_batches},
                          {"lr", o.lr},
                          {"warmup", o.warmup},
                          {"optimizer", o.optimizer},
                          {"weight_decay", o.weight_decay},
                          {"clip", o.clip},
                          {"device", o.device},
                          {"backend", o.backend},
                          {"buckets", o.buckets},
                          {"overlap", o.overlap},
                          {"gradients", o.gradients},
                          {"reduce_dtype", o.reduce_dtype},
                          {"compress", o.compress},
                          {"shard", o.shard},
                          {"independent", o.independent},
                          {"no_shared_memory", o.no_shared_memory}};
    if (o.buckets == "capped") config.update({{"bucket_mib", o.bucket_mib}, {"first_bucket_mib", o.first_bucket_mib}});
    if (o.compress != "none") config["compress_after"] = o.compress_after;
    if (o.compress == "power-sgd") config["compress_rank"] = o.compress_rank;
    if (o.compress == "quantize") config["compress_bits"] = o.compress_bits;
    if (o.shard == "parameters")
        config.update({{"prefetch", o.prefetch}, {"no_reshard", o.no_reshard}, {"replicate_below", o.replicate_below}});
    if (o.device == "cuda") config["precision"] = o.precision;
    if (o.model == "mlp") config["hidden"] = o.hidden;
    else config.update({{"blocks", o.blocks}, {"heads", o.heads}, {"tied", o.tied}, {"recompute", o.recompute}});
    return config;
}

/// Nats a byte of a model that knows nothing but how often each byte occurs: a baseline to stay well below.
double unigram_entropy(const std::vector<std::uint8_t>& bytes) {
    std::array<double, 256> counts{};
    for (std::uint8_t b : bytes) ++counts[b];
    double sum = 0;
    for (double c : counts) sum -= c > 0 ? c * std::log(c / static_cast<double>(bytes.size())) : 0;
    return sum / static_cast<double>(bytes.size());
}

/// The results. Step times are the slowest rank's; losses and communication the ranks' mean; bytes the largest of a rank.
nlohmann::json to_json(const Options& o, const Results& results, std::size_t tokens_per_sample) {
    const auto& ranks = results.ranks;
    const auto& slowest =
        *std::max_element(ranks.begin(), ranks.end(), [](const auto& a, const auto& b) { return a.median_ms < b.median_ms; });
    const auto mean = [&](double RankSummary::*member) {
        double sum = 0;
        for (const auto& rank : ranks) sum += rank.*member;
        return sum / static_cast<double>(ranks.size());
    };
    const auto largest = [&](auto part) {
        std::uint64_t bytes = 0;
        for (const auto& rank : ranks) bytes = std::max(bytes, part(rank));
        return bytes;
    };
    const auto samples = static_cast<double>(o.samples_per_step());
    const double communication = mean(&RankSummary::communication_ms), exposed = mean(&RankSummary::exposed_ms);
    const double samples_per_second = slowest.mean_ms > 0 ? samples * 1e3 / slowest.mean_ms : 0.0;
    nlohmann::json result{
        {"parameters", ranks.front().parameters},
        {"world_size", o.ranks},
        {"transport", results.transport},
        {"global_batch", o.samples_per_step()},
        {"steps", o.last_step()},
        {"tokens_per_second", samples_per_second * static_cast<double>(tokens_per_sample)},
        {"samples_per_second", samples_per_second},
        {"step_ms", {{"median", slowest.median_ms}, {"min", slowest.min_ms}, {"max", slowest.max_ms}}},
        {"comm_ms", communication},
        {"exposed_comm_ms", exposed},
        {"bucket_bytes", results.bucket_bytes},
        {"comm_bytes", results.communicated_bytes},
        {"overlap_ratio", communication > 0 ? std::clamp(1 - exposed / communication, 0.0, 1.0) : 0.0},
        {"bytes_parameters", largest([](const RankSummary& r) { return r.memory.parameters; })},
        {"bytes_gradients", largest([](const RankSummary& r) { return r.memory.gradients; })},
        {"bytes_optimizer", largest([](const RankSummary& r) { return r.memory.optimizer; })},
        {"bytes_activations", largest([](const RankSummary& r) { return r.memory.activations; })},
        {"matrix_cpu_s", std::ranges::max(ranks, {}, &RankSummary::matrix_seconds).matrix_seconds},
        {"peak_rss_bytes", largest([](const RankSummary& r) { return r.peak_rss_bytes; })},
        {"train_loss", mean(&RankSummary::train_loss)},
        {"validation_loss", mean(&RankSummary::validation_loss)},
        {"params_digest", hexadecimal(ranks.front().digest)},
        {"config", flags(o)},
    };
    if (!results.profile.ready.empty()) result["profile"] = json_of(results.profile);
    return result;
}

void print_table(std::FILE* out, const Options& o, const nlohmann::json& r, double unigram) {
    const auto row = [&](const char* name, const std::string& value) { std::fprintf(out, "  %-18s %s\n", name, value.c_str()); };
    const auto number = [&](const char* name) { return r.at(name).get<double>(); };
    const auto& step = r.at("step_ms");
    std::fputc('\n', out);
    row("model", o.model + ", " + rounded(number("parameters")) + " parameters");
    row("ranks", r.at("transport").get<std::string>() + (o.independent ? " (independent)" : ""));
    if (o.device == "cuda") row("device", "cuda, matrix products of " + o.precision);
    row("batch", formatted("%zu samples a step", o.samples_per_step()));
    row("policies", o.buckets + " buckets, overlap " + o.overlap + ", gradients " + o.gradients +
                        (o.reduce_dtype == "f32" ? "" : ", sent in " + o.reduce_dtype));
    if (o.compress != "none") row("compressed", o.compress + formatted(": %s bytes a step", rounded(number("comm_bytes")).c_str()));
    row("sharded", o.shard == "none"        ? "nothing"
                   : o.shard == "optimizer" ? "optimizer"
                   : o.shard == "gradients" ? "optimizer, gradients"
                                            : "optimizer, gradients, parameters");
    row("step", formatted("%.1f ms (median; %.1f to %.1f)", step.at("median").get<double>(), step.at("min").get<double>(),
                          step.at("max").get<double>()));
    row("throughput", rounded(number("samples_per_second")) + " samples/s, " + rounded(number("tokens_per_second")) + " tokens/s");
    row("communication", formatted("%.2f ms a step, %.2f ms of it exposed%s", number("comm_ms"), number("exposed_comm_ms"),
                                   o.device == "cuda" ? " (of the host's time, not the device's)" : ""));
    const auto mib = [&](const char* name) { return number(name) / (1024 * 1024); };
    row("memory of a rank", formatted("%.1f MiB weights, %.1f gradients, %.1f optimizer, %.1f activations", mib("bytes_parameters"),
                                      mib("bytes_gradients"), mib("bytes_optimizer"), mib("bytes_activations")));
    row("peak memory",
        formatted("%.0f MiB, of %s", mib("peak_rss_bytes"),
                  o.backend == "threads" ? "the process: all ranks together" : "the largest rank's process, what it shares included"));
    row("training loss", formatted("%.3f nats a byte", number("train_loss")));
    row("validation loss", formatted("%.3f nats a byte (byte frequencies alone: %.3f)", number("validation_loss"), unigram));
    row("parameters digest", r.at("params_digest").get<std::string>());
    std::fflush(out);
}

void write_json(const std::string& file, const nlohmann::json& r) {
    if (file == "-") {
        std::cout << r.dump(2) << std::endl;
        return;
    }
    std::ofstream out{file};
    out << r.dump(2) << std::endl;
    if (!out) throw std::runtime_error("cannot write all of " + file + ", named by --json");
}

}  // namespace

std::uint64_t peak_rss_bytes() {
    rusage usage{};
    ::getrusage(RUSAGE_SELF, &usage);
    return static_cast<std::uint64_t>(usage.ru_maxrss) * 1024;
}

void report(std::FILE* out, const Options& o, const Results& results, std::size_t tokens_per_sample, const Text& text) {
    const nlohmann::json r = to_json(o, results, tokens_per_sample);
    std::fprintf(out, "%s", loss_chart(results.losses, results.first_step).c_str());
    print_table(out, o, r, unigram_entropy(text.training));
    if (!results.timeline.empty()) std::fprintf(out, "\n%s", results.timeline.c_str());
    if (!o.json.empty()) write_json(o.json, r);
}

}  // namespace gradsync_train
