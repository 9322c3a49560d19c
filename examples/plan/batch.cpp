// SPDX-License-Identifier: BSL-1.0
#include <gradsync/planning/batch.hpp>

#include <memory>

#include "command.hpp"

namespace gradsync_plan {

namespace {

namespace plan = gradsync::plan;

std::string explain(const plan::BatchChoice& c) {
    const auto text = [](std::uint64_t n) { return std::to_string(n); };
    switch (c.rounding) {
        case plan::BatchRounding::none: return "as wanted";
        case plan::BatchRounding::fewer_steps: return "accumulate less, a smaller batch";
        case plan::BatchRounding::more_steps:
            return c.accumulate == 1 ? "no accumulation, a larger batch" : "accumulate more, a larger batch";
        case plan::BatchRounding::uneven_steps:
            return text(c.devices_with_one_less) + " devices accumulate " + text(c.accumulate - 1) + ", the others " + text(c.accumulate);
        case plan::BatchRounding::fewer_devices: return "leave devices idle";
        case plan::BatchRounding::smaller_micro_batch: return "smaller micro-batches";
    }
    return {};
}

Answer answer(const plan::BatchTarget& target) {
    const plan::BatchPlan p = plan::plan_batch(target);
    Answer a;
    a.json = {{"global_tokens", target.global_tokens},
              {"sequence", target.sequence},
              {"micro_batch", target.micro_batch},
              {"devices", target.devices},
              {"global_samples", p.samples},
              {"accumulate_exact", p.accumulate_exact},
              {"devices_for_no_accumulation", p.devices_for_no_accumulation},
              {"devices_for_no_accumulation_exact", p.devices_for_no_accumulation_exact},
              {"more_devices_than_work", p.more_devices_than_work},
              {"choices", Json::array()}};
    Table table{"Whole numbers, the nearest to the target first:",
                {"", "micro-batch", "accumulate", "devices", "samples", "tokens", "off by", "sums"},
                {}};
    for (const plan::BatchChoice& c : p.choices) {
        a.json["choices"].push_back({{"rounding", name_of(c.rounding)},
                                     {"micro_batch", c.micro_batch},
                                     {"accumulate", c.accumulate},
                                     {"devices", c.devices},
                                     {"devices_with_one_less", c.devices_with_one_less},
                                     {"samples", c.samples},
                                     {"tokens", c.tokens},
                                     {"relative_error", c.relative_error},
                                     {"sums", c.sums}});
        table.rows.push_back({explain(c), grouped(c.micro_batch), grouped(c.accumulate), grouped(c.devices), grouped(c.samples),
                              grouped(c.tokens), digits(100 * c.relative_error, 3) + " %", digits(c.sums, 3)});
    }
    table.notes.push_back(
        "sums: those that a device sends in a step, on average, where the library adds up the micro-batches in one order.");
    if (target.global_tokens % target.sequence != 0)
        table.notes.push_back("The sequence length does not divide the tokens: no whole number of samples is exact.");
    a.tables.push_back({"A global batch of " + grouped(target.global_tokens) + " tokens is " + digits(p.samples, 10) + " samples of " +
                            grouped(target.sequence) + ".",
                        {},
                        {{"accumulation on " + grouped(target.devices) + " devices, exactly", digits(p.accumulate_exact, 10)},
                         {"devices for no accumulation", grouped(p.devices_for_no_accumulation)}},
                        p.more_devices_than_work ? std::vector<std::string>{"There are more devices than micro-batches of this size."}
                                                 : std::vector<std::string>{}});
    a.tables.push_back(table);
    return a;
}

}  // namespace

Question add_batch(CLI::App& app) {
    struct Flags {
        std::uint64_t tokens = 0, samples = 0;
        plan::BatchTarget target;
    };
    const auto flags = std::make_shared<Flags>();
    auto* const batch = app.add_option_group("Target", "one of them");
    batch->add_option("--global-tokens", flags->tokens, "tokens of one optimizer step")->check(whole_number());
    batch->add_option("--global-samples", flags->samples, "samples of one optimizer step")->check(whole_number());
    batch->require_option(1);
    app.add_option("--sequence", flags->target.sequence, "tokens of a sample")->check(whole_number())->capture_default_str();
    app.add_option("--micro-batch", flags->target.micro_batch, "samples that fit into a device at a time")
        ->check(whole_number())
        ->required();
    app.add_option("--devices", flags->target.devices, "data-parallel ranks")->check(whole_number())->required();
    return [flags] {
        plan::BatchTarget target = flags->target;
        target.global_tokens = flags->samples != 0 ? (plan::CheckedSize(flags->samples) * target.sequence).value() : flags->tokens;
        return answer(target);
    };
}

}  // namespace gradsync_plan
