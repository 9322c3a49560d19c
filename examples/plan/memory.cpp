// SPDX-License-Identifier: BSL-1.0
#include <gradsync/planning/memory.hpp>

#include <map>
#include <memory>

#include <gradsync/bucket/size_capped.hpp>
#include <gradsync/shard/whole_parameters.hpp>

#include "command.hpp"
#include "models.hpp"

namespace gradsync_plan {

namespace {

namespace plan = gradsync::plan;

struct Flags {
    bool ffn_only = false;
    std::vector<std::uint64_t> widths;
    FeedForward ffn;
    Transformer transformer;
    bool no_biases = false, recompute = false, activation_gradients = false;
    std::uint64_t batch = 1, sequence = 1, devices = 1, micro_batches = 0, activation_bytes = 0, quoted = 0;
    std::string precision = "f32";
};

struct Sizes {
    std::string what;
    std::uint64_t parameters, activations;
    Matrices matrices;
};

Sizes sizes_of(const Flags& f) {
    if (!f.widths.empty()) {
        if (f.widths.size() < 2) throw UsageError("--mlp: an MLP needs at least two widths, of its input and its output");
        const Mlp mlp{.widths = f.widths, .biases = false};
        return {"an MLP", mlp.parameters(), mlp.activations(f.batch), mlp.matrices()};
    }
    if (f.ffn_only) return {"feed-forward blocks", f.ffn.parameters(), f.ffn.activations(f.batch, f.sequence), f.ffn.matrices()};
    return {"a transformer", f.transformer.parameters(), f.transformer.activations(f.batch, f.sequence, f.recompute),
            f.transformer.matrices()};
}

/// Compares a figure from elsewhere with ours.
void compare(const Flags& f, std::uint64_t bytes_per_token, std::uint64_t each, Answer& a) {
    const std::uint64_t blocks = f.ffn.blocks;
    const bool whole = f.quoted % each == 0 && f.quoted / each % blocks == 0;
    const auto difference = static_cast<std::int64_t>(f.quoted) - static_cast<std::int64_t>(bytes_per_token);
    const std::string reason = difference == 0 ? "they are the same"
                               : whole
                                   ? "the quoted figure counts " + std::to_string(f.quoted / each / blocks) +
                                         " activations a block, not d_model + d_ff = " + std::to_string(f.ffn.d_model + f.ffn.d_ff)
                                   : "the quoted figure is no multiple of " + std::to_string(blocks) + " blocks x " + std::to_string(each) +
                                         " bytes, so that no number of activations a block makes it: a slip in its arithmetic";
    a.json["quoted"] = {{"bytes_per_token", f.quoted}, {"difference", difference}, {"reason", reason}};
    a.tables.push_back(
        {"Activations of a token:", {"", "bytes"}, {{"here", grouped(bytes_per_token)}, {"quoted", grouped(f.quoted)}}, {reason + "."}});
}

/// How evenly matrices that are not cut, as Muon needs them, can be dealt to the devices.
void deal_matrices(const Matrices& matrices, std::uint64_t devices, gradsync::DType dtype, Answer& a, Table& table) {
    constexpr std::uint64_t most_devices = 1024;
    if (devices < 2 || devices > most_devices || matrices.empty()) return;
    std::vector<gradsync::ParameterView> views;
    for (const auto& [rows, columns] : matrices) {
        const std::uint64_t count = (plan::CheckedSize(rows) * columns).value();
        views.push_back({.gradient = {nullptr, count, dtype, gradsync::MemorySpace::host}, .shape = {rows, columns}});
    }
    const gradsync::WholeBalance balance =
        gradsync::whole_balance(views, static_cast<int>(devices), gradsync::WholeParameters(), gradsync::SizeCappedBuckets());
    a.json["whole_matrices"] = {
        {"buckets", balance.buckets}, {"bucket_bytes", balance.bytes}, {"padding", balance.padding}, {"imbalance", balance.imbalance}};
    table.notes.push_back("Matrices that are not cut (for Muon, stages 1 and 2): " + grouped(balance.buckets) +
                          (balance.buckets == 1 ? " bucket" : " buckets") + " of up to " + binary_bytes(balance.bytes) + ", " +
                          digits(100 * balance.padding, 2) + " % of padding; the busiest device has " + digits(100 * balance.imbalance, 2) +
                          " % more work than the mean.");
}

Answer answer(const Flags& f) {
    const std::map<std::string, std::pair<plan::StateBytes, std::uint64_t>> precisions{
        {"f32", {plan::single_precision_adam, 4}}, {"mixed", {plan::mixed_precision_adam, 2}}, {"half", {plan::half_precision_adam, 2}}};
    const auto& [state_bytes, usual_bytes] = precisions.at(f.precision);
    const std::uint64_t each = f.activation_bytes != 0 ? f.activation_bytes : usual_bytes;
    const Sizes sizes = sizes_of(f);
    const std::uint64_t activation_bytes = (plan::CheckedSize(sizes.activations) * each * (f.activation_gradients ? 2 : 1)).value();
    const std::uint64_t weight_bytes = (plan::CheckedSize(sizes.parameters) * state_bytes.weights).value();

    Answer a;
    a.json = {
        {"parameters", sizes.parameters},
        {"precision", f.precision},
        {"weight_bytes", weight_bytes},
        {"activations", sizes.activations},
        {"activation_bytes", activation_bytes},
        {"weights_and_activations_mib", static_cast<double>((plan::CheckedSize(weight_bytes) + activation_bytes).value()) / (1 << 20)},
        {"devices", f.devices},
        {"stages", Json::array()}};
    const std::string of_batch = "a batch of " + grouped(f.batch) + (f.widths.empty() ? " x " + grouped(f.sequence) + " tokens" : "");
    a.tables.push_back({sizes.what + ":",
                        {},
                        {{"parameters", grouped(sizes.parameters)},
                         {"activations of " + of_batch + (f.recompute ? ", recomputed" : ""), grouped(sizes.activations)},
                         {"  in bytes, at " + std::to_string(each) + " each" + (f.activation_gradients ? ", and their gradients" : ""),
                          grouped(activation_bytes)},
                         {"weights + activations", binary_bytes((plan::CheckedSize(weight_bytes) + activation_bytes).value())}}});
    if (f.ffn_only) {
        const std::uint64_t per_token = (plan::CheckedSize(f.ffn.activations_per_token()) * each).value();
        a.json["activation_bytes_per_token"] = per_token;
        if (f.quoted != 0) compare(f, per_token, each, a);
    }

    const plan::ZeroStage stages[] = {plan::ZeroStage::none, plan::ZeroStage::optimizer, plan::ZeroStage::gradients,
                                      plan::ZeroStage::parameters};
    Table table{"A device of " + grouped(f.devices) + " holds, by what is split over them (ZeRO stages 0 to 3), " + f.precision + ":",
                {"split", "weights", "gradients", "optimizer", "state", "with activations"},
                {}};
    if (f.micro_batches != 0) table.header.insert(table.header.begin() + 4, "sums");
    a.chart = {"State of " + grouped(sizes.parameters) + " parameters, " + f.precision, "devices", "GiB a device", true, true};
    for (const plan::ZeroStage stage : stages) {
        const plan::StateMemory m = plan::state_memory(sizes.parameters, state_bytes, stage, f.devices, f.micro_batches);
        const std::uint64_t all = (plan::CheckedSize(m.total()) + activation_bytes).value();
        a.json["stages"].push_back({{"split", name_of(stage)},
                                    {"weight_bytes", m.weights},
                                    {"gradient_bytes", m.gradients},
                                    {"optimizer_bytes", m.optimizer},
                                    {"sum_bytes", m.sums},
                                    {"state_bytes", m.total()},
                                    {"bytes", all}});
        table.rows.push_back({std::string(name_of(stage)), binary_bytes(m.weights), binary_bytes(m.gradients), binary_bytes(m.optimizer),
                              binary_bytes(m.total()), binary_bytes(all)});
        if (f.micro_batches != 0) table.rows.back().insert(table.rows.back().begin() + 4, binary_bytes(m.sums));
        Curve curve{std::string(name_of(stage)), {}};
        for (std::uint64_t n = 1; n <= std::max<std::uint64_t>(f.devices, 64) && n != 0; n *= 2)
            curve.points.emplace_back(
                static_cast<double>(n),
                static_cast<double>(plan::state_memory(sizes.parameters, state_bytes, stage, n).total()) / (1u << 30));
        a.chart.curves.push_back(curve);
    }
    const std::uint64_t state = plan::state_memory(sizes.parameters, state_bytes, plan::ZeroStage::none, 1).total();
    const std::uint64_t everything = (plan::CheckedSize(state) + activation_bytes).value();
    const std::uint64_t share = everything / f.devices + (everything % f.devices != 0);
    a.json["bytes_with_activations_split"] = share;
    table.notes.push_back("With the activations split over them, too: " + binary_bytes(share) + ".");
    deal_matrices(sizes.matrices, f.devices, f.precision == "f32" ? gradsync::DType::f32 : gradsync::DType::bf16, a, table);
    a.tables.push_back(table);
    return a;
}

}  // namespace

Question add_memory(CLI::App& app) {
    const auto f = std::make_shared<Flags>();
    const auto count = [&](const char* name, std::uint64_t& value, const char* what, const char* group) {
        return app.add_option(name, value, what)->check(whole_number())->group(group);
    };
    auto* const mlp = app.add_option("--mlp", f->widths, "widths of an MLP, without biases: in,hidden,...,out")
                          ->check(whole_number())
                          ->delimiter(',')
                          ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
                          ->group("Model");
    auto* const ffn =
        app.add_flag("--ffn-only", f->ffn_only, "blocks of two linear layers and nothing else")->excludes(mlp)->group("Model");
    auto* const d_model = count("--d-model", f->transformer.d_model, "width of the residual stream", "Model")->excludes(mlp);
    auto* const blocks = count("--blocks", f->transformer.blocks, "blocks", "Model")->excludes(mlp);
    auto* const d_ff = count("--d-ff", f->transformer.d_ff, "width within the feed-forward layer [4 x d-model]", "Model")->excludes(mlp);
    auto* const vocabulary =
        count("--vocabulary", f->transformer.vocabulary, "tokens that there are", "Model")->excludes(mlp)->excludes(ffn);
    count("--heads", f->transformer.heads, "attention heads", "Model")->excludes(mlp)->excludes(ffn)->capture_default_str();
    count("--positions", f->transformer.learned_positions, "rows of a table of learned positions [none]", "Model")
        ->excludes(mlp)
        ->excludes(ffn);
    const auto flag = [&](const char* name, bool& value, const char* what) {
        app.add_flag(name, value, what)->excludes(mlp)->excludes(ffn)->group("Model");
    };
    flag("--gated", f->transformer.gated, "three matrices in the feed-forward layer");
    flag("--no-biases", f->no_biases, "linear layers and norms have none");
    app.add_flag("--activation-gradients", f->activation_gradients, "the backward keeps as much again")->group("Run");
    count("--kept-rows", f->transformer.kept_rows, "rows, d-model wide, that a block keeps of each token", "Run")
        ->excludes(mlp)
        ->excludes(ffn)
        ->capture_default_str();
    flag("--tied", f->transformer.tied, "output layer and embedding are one matrix");

    count("--batch", f->batch, "samples on a device at a time", "Run")->capture_default_str();
    count("--sequence", f->sequence, "tokens of a sample", "Run")->excludes(mlp)->capture_default_str();
    flag("--recompute", f->recompute, "blocks keep their input only");
    count("--devices", f->devices, "data-parallel ranks", "Run")->capture_default_str();
    count("--micro-batches", f->micro_batches, "of a step, on all devices, that the library adds up: its sums take memory [none]", "Run");
    app.add_option("--precision", f->precision, "f32: all; mixed: 16-bit weights and gradients, the rest f32; half: all 16-bit")
        ->check(CLI::IsMember({"f32", "mixed", "half"}).description(""))
        ->capture_default_str()
        ->group("Run");
    count("--activation-bytes", f->activation_bytes, "of an activation [as the weights]", "Run");
    count("--quoted-bytes-per-token", f->quoted, "somebody's figure for the activations of a token, to compare", "Run")->needs(ffn);
    return [=] {
        if (mlp->count() == 0) {
            const auto need = [](const CLI::Option* option) {
                if (option->count() == 0) throw UsageError(option->get_name() + " is needed (or --mlp with widths); see --help");
            };
            need(d_model);
            need(blocks);
            need(f->ffn_only ? d_ff : vocabulary);
            check_blocks(f->transformer.blocks);
        }
        f->transformer.biases = !f->no_biases;
        f->ffn = {f->transformer.d_model, f->transformer.d_ff, f->transformer.blocks};
        return answer(*f);
    };
}

}  // namespace gradsync_plan
