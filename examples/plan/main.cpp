// SPDX-License-Identifier: BSL-1.0
// gradsync_plan: batch sizes, memory, buckets and scaling of a data-parallel run, before it is started. See --help.

#include <cstdio>
#include <exception>
#include <fstream>
#include <map>
#include <string>

#include <gradsync/core/error.hpp>

#include "command.hpp"

namespace {

using namespace gradsync_plan;

void write_json(const Json& json, const std::string& file) {
    const std::string text = json.dump(2) + "\n";
    if (file == "-") {
        std::fputs(text.c_str(), stdout);
        return;
    }
    std::ofstream out{file};
    if (!(out << text << std::flush)) throw UsageError("--json: cannot write " + file + "; check the folder and its permissions");
}

int run(int argc, char** argv) {
    CLI::App app{
        "What to expect of a data-parallel run before it is started.\n"
        "\n"
        "  gradsync_plan batch --global-tokens 4000000 --sequence 4000 --micro-batch 2 --devices 128\n"
        "  gradsync_plan memory --ffn-only --d-model 16384 --d-ff 53248 --blocks 126 --batch 1 --sequence 1\n"
        "  gradsync_plan buckets --gradients 150 --bytes 440000000 --backward-ms 80 --ranks 16 --latency-us 10 --bandwidth 12.5\n"
        "  gradsync_plan scale --gradients 150 --bytes 440000000 --backward-ms 80 --latency-us 10 --bandwidth 12.5 --plot scale.svg\n"};
    app.name("gradsync_plan")->require_subcommand(1);
    app.get_formatter()->column_width(34);
    for (const char* type : {"UINT", "INT", "FLOAT"}) app.get_formatter()->label(type, "N");

    std::string json, plot;
    std::map<const CLI::App*, Question> questions;
    const auto add = [&](const char* name, const char* what, Question (*make)(CLI::App&)) {
        CLI::App* const command = app.add_subcommand(name, what);
        command->option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
        questions[command] = make(*command);
        command->add_option("--json", json, "file for the answer as one JSON object; -: standard output, tables go to standard error")
            ->group("Output");
        command->add_option("--plot", plot, "file for a chart, SVG")->group("Output");
    };
    add("batch", "global batch = micro-batch x accumulation x devices, in whole numbers", add_batch);
    add("memory", "bytes of weights, gradients, optimizer and activations, for each ZeRO stage", add_memory);
    add("buckets", "which gradients should travel together: the optimum beside the usual rules", add_buckets);
    add("scale", "efficiency over the number of ranks, and where communication begins to dominate", add_scale);

    try {
        app.parse(argc, argv);
    } catch (const CLI::CallForHelp&) {
        std::fputs(app.help().c_str(), stdout);
        return 0;
    } catch (const CLI::ParseError& error) {
        throw UsageError(std::string(error.what()) + "; see --help");
    }
    const Answer answer = questions.at(app.get_subcommands().front())();
    if (!plot.empty() && answer.chart.curves.empty()) throw UsageError("--plot: this answer has nothing to draw; leave it out");
    if (!json.empty()) write_json(answer.json, json);
    for (const Table& table : answer.tables) table.print(json == "-" ? stderr : stdout);
    if (!plot.empty()) draw(answer.chart, plot);
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    try {
        return run(argc, argv);
    } catch (const UsageError& error) {
        std::fprintf(stderr, "gradsync_plan: %s\n", error.what());
        return 2;
    } catch (const gradsync::Error& error) {
        std::fprintf(stderr, "gradsync_plan: %s\n", error.what());
        return error.errc() == gradsync::Errc::invalid_argument ? 2 : 1;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "gradsync_plan: %s\n", error.what());
        return 1;
    }
}
