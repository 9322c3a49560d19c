// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <regex.h>

#include <cstddef>
#include <cstdio>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>

#include "measure.hpp"

namespace bench {

/// Reports a measurement that is already made: the median as the time, the extremes as counters.
inline void report(benchmark::State& state, const Summary& seconds, double handoff) {
    for ([[maybe_unused]] auto _ : state) state.SetIterationTime(seconds.median);
    state.counters["time_min"] = seconds.min;
    state.counters["time_max"] = seconds.max;
    state.counters["samples"] = static_cast<double>(seconds.count);
    state.counters["handoff_ns"] = handoff;
}

/// Reports something else, with its quartiles: NAME, NAME_q1, NAME_q3.
inline void report(benchmark::State& state, const std::string& name, const Summary& summary) {
    state.counters[name] = summary.median;
    state.counters[name + "_q1"] = summary.lower_quartile;
    state.counters[name + "_q3"] = summary.upper_quartile;
}

/// Reports a series of fractions, for whoever reads the JSON: "NAME A/B A/B ..." in the benchmark's label, where several
/// series are parted by semicolons.
inline void report(benchmark::State& state, std::string& label, std::string_view name, std::span<const Fraction> series) {
    if (series.empty()) return;
    label += (label.empty() ? "" : ";") + std::string(name);
    for (const Fraction& each : series) {
        char text[48];
        std::snprintf(text, sizeof text, " %.5g/%.5g", each.above, each.below);
        label += text;
    }
    state.SetLabel(label);
}

/// Registers a measurement that reports itself, or says why it cannot.
inline void add_benchmark(const std::string& name, benchmark::TimeUnit unit, std::function<void(benchmark::State&)> measure) {
    benchmark::RegisterBenchmark(name.c_str(),
                                 [measure = std::move(measure)](benchmark::State& state) {
                                     try {
                                         measure(state);
                                     } catch (const std::exception& e) {
                                         state.SkipWithError(e.what());
                                     }
                                 })
        ->UseManualTime()
        ->Iterations(1)
        ->Unit(unit);
}

/// Does the user's filter select the benchmark of this name? As Google Benchmark decides it. Once it runs them.
inline bool selected(const std::string& name) {
    std::string filter = benchmark::GetBenchmarkFilter();
    if (filter.empty() || filter == "all") return true;
    const bool excludes = filter[0] == '-';
    regex_t pattern;
    if (regcomp(&pattern, filter.c_str() + excludes, REG_EXTENDED | REG_NOSUB) != 0) return true;
    const bool matches = regexec(&pattern, name.c_str(), 0, nullptr, 0) == 0;
    regfree(&pattern);
    return matches != excludes;
}

/// Leaves the names of benchmarks as they were registered: Google Benchmark adds "/iterations:1/manual_time". Without
/// `labels`, which are long, where people read.
class PlainNames final : public benchmark::BenchmarkReporter {
public:
    static constexpr const char* suffix = "/iterations:1/manual_time";

    explicit PlainNames(std::unique_ptr<benchmark::BenchmarkReporter> reporter, bool labels)
        : reporter_(std::move(reporter)), labels_(labels) {}

    bool ReportContext(const Context& context) override {
        reporter_->SetOutputStream(&GetOutputStream());
        reporter_->SetErrorStream(&GetErrorStream());
        return reporter_->ReportContext(context);
    }
    void ReportRuns(const std::vector<Run>& runs) override {
        std::vector<Run> plain = runs;
        for (Run& run : plain) {
            failed_ |= run.error_occurred;
            if (!labels_) run.report_label.clear();
            run.run_name.iterations.clear();
            run.run_name.repetitions.clear();
            run.run_name.time_type.clear();
        }
        reporter_->ReportRuns(plain);
    }
    void Finalize() override { reporter_->Finalize(); }

    /// Has a benchmark said that it could not measure?
    bool failed() const { return failed_; }

private:
    bool failed_ = false;
    std::unique_ptr<benchmark::BenchmarkReporter> reporter_;
    bool labels_;
};

/// Of a process that measures with another one, which reports.
class Silence final : public benchmark::BenchmarkReporter {
public:
    bool ReportContext(const Context&) override { return true; }
    void ReportRuns(const std::vector<Run>&) override {}
};

/// The rest of main(): runs what is registered. One process of several `reports`. Returns the exit code: 1 if a
/// benchmark could not measure, 2 if a flag is wrong or the filter selects nothing.
inline int run_benchmarks(int argc, char** argv, bool reports = true) {
    int kept = 1;
    bool to_file = false;
    for (int i = 1; i < argc; ++i) {
        const bool names_file = std::string_view(argv[i]).starts_with("--benchmark_out=");
        if (!names_file || reports) argv[kept++] = argv[i];
        to_file |= names_file && reports;
    }
    argc = kept;
    benchmark::Initialize(&argc, argv);
    // A filter that ends in $ means the end of the plain name.
    std::string filter = benchmark::GetBenchmarkFilter();
    if (!filter.empty() && filter.back() == '$') filter.insert(filter.size() - 1, PlainNames::suffix);
    if (filter.empty()) filter = ".";
    if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
    char handoff[32];
    std::snprintf(handoff, sizeof handoff, "%.0f", handoff_latency());
    benchmark::AddCustomContext("handoff_ns", handoff);
    PlainNames display{std::unique_ptr<benchmark::BenchmarkReporter>(reports ? benchmark::CreateDefaultDisplayReporter() : new Silence),
                       false};
    PlainNames json{std::make_unique<benchmark::JSONReporter>(), true};
    const std::size_t count = benchmark::RunSpecifiedBenchmarks(&display, to_file ? &json : nullptr, filter);
    benchmark::Shutdown();
    return count == 0 ? 2 : display.failed() ? 1 : 0;
}

}  // namespace bench
