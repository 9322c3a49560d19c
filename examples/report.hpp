// SPDX-License-Identifier: BSL-1.0
#pragma once
// What the user sees: a line while training; at the end a table and, for programs, a JSON object.

#include <sys/ioctl.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "digest.hpp"
#include "options.hpp"

namespace gradsync_train {

[[gnu::format(printf, 1, 2)]] inline std::string formatted(const char* format, ...) {
    std::array<char, 256> line{};
    std::va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(line.data(), line.size(), format, arguments);
    va_end(arguments);
    return line.data();
}

/// 1234567 -> "1.23 M"
inline std::string rounded(double x) {
    return x >= 1e9   ? formatted("%.2f G", x / 1e9)
           : x >= 1e6 ? formatted("%.2f M", x / 1e6)
           : x >= 1e4 ? formatted("%.1f k", x / 1e3)
                      : formatted(x >= 100 ? "%.0f" : "%.3g", x);
}

/// One step of one rank.
struct StepRecord {
    double seconds, communication_seconds, exposed_seconds, loss;
};

/// One line, rewritten in place on a terminal; a line every twentieth of the run elsewhere.
class ProgressLine {
public:
    ProgressLine(std::FILE* out, bool terminal, std::uint64_t first, std::uint64_t last, std::size_t samples_per_step,
                 std::size_t tokens_per_sample)
        : out_{out},
          terminal_{terminal},
          first_{first},
          last_{last},
          every_{std::max<std::uint64_t>(1, (last - first) / 20)},
          samples_{static_cast<double>(samples_per_step)},
          tokens_{static_cast<double>(tokens_per_sample)} {}

    ~ProgressLine() {
        if (terminal_ && shown_) std::fputc('\n', out_);
    }
    ProgressLine(const ProgressLine&) = delete;
    ProgressLine& operator=(const ProgressLine&) = delete;

    /// `step` counts from 1.
    void update(std::uint64_t step, const StepRecord& record) {
        const double keep = step == first_ + 1 ? 0.0 : 0.9;  // a running mean: single steps jitter
        loss_ = keep * loss_ + (1.0 - keep) * record.loss;
        seconds_ = keep * seconds_ + (1.0 - keep) * record.seconds;
        exposed_ = keep * exposed_ + (1.0 - keep) * record.exposed_seconds;

        const auto now = std::chrono::steady_clock::now();
        const bool due = terminal_ ? now - printed_ > std::chrono::milliseconds(100) : (step - first_) % every_ == 0;
        if (!due && step != last_) return;
        printed_ = now;
        const auto left = static_cast<long>(std::lround(seconds_ * static_cast<double>(last_ - step)));
        const std::string bar =
            terminal_ ? " [" + std::string(20 * step / last_, '#') + std::string(20 - 20 * step / last_, '.') + "]" : "";
        const std::string line =
            fitting(formatted("step %*llu/%llu%s  loss %.3f  %s tokens/s  %ld:%02ld left  %s samples/s  exposed %.2f ms",
                              static_cast<int>(std::to_string(last_).size()), static_cast<unsigned long long>(step),
                              static_cast<unsigned long long>(last_), bar.c_str(), loss_, rounded(samples_ * tokens_ / seconds_).c_str(),
                              left / 60, left % 60, rounded(samples_ / seconds_).c_str(), exposed_ * 1e3));
        std::fprintf(out_, terminal_ ? "\r%s\x1b[K" : "%s\n", line.c_str());
        std::fflush(out_);
        shown_ = true;
    }

    void note(const std::string& text) {
        std::fprintf(out_, terminal_ && shown_ ? "\r%s\x1b[K\n" : "%s\n", text.c_str());
        std::fflush(out_);
    }

private:
    /// Leaves out the last parts of a line that is too long for the terminal: it could not be rewritten in place.
    std::string fitting(std::string line) const {
        winsize size{};
        if (!terminal_ || ::ioctl(::fileno(out_), TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return line;
        while (line.size() >= size.ws_col && line.rfind("  ") != std::string::npos) line.erase(line.rfind("  "));
        return line;
    }

    std::FILE* out_;
    bool terminal_, shown_ = false;
    std::uint64_t first_, last_, every_;
    double samples_, tokens_;
    double loss_ = 0, seconds_ = 0, exposed_ = 0;
    std::chrono::steady_clock::time_point printed_{};
};

/// Bytes of one rank, the library's and the trainer's together.
struct MemoryUse {
    std::uint64_t parameters = 0;  // weights, whole or in shards, and copies of them
    std::uint64_t gradients = 0;
    std::uint64_t optimizer = 0;
    std::uint64_t activations = 0;  // and their gradients
};

/// One rank's view of a run. Plain bytes: it travels through an all-gather.
struct RankSummary {
    double median_ms = 0, min_ms = 0, max_ms = 0, mean_ms = 0;  // of a step, after the warm-up
    double communication_ms = 0, exposed_ms = 0;
    double train_loss = 0, validation_loss = 0;
    std::uint64_t digest = 0;
    std::uint64_t parameters = 0;  // scalars
    MemoryUse memory;
    std::uint64_t peak_rss_bytes = 0;  // of its process
    double matrix_seconds = 0;         // of a processor, in the steps of whole matrices
};

/// Throws where the weights of some ranks are not those of the others: what was trained is not one model then.
inline void expect_equal_digests(std::span<const RankSummary> ranks) {
    for (std::size_t r = 1; r < ranks.size(); ++r) {
        if (ranks[r].digest == ranks[0].digest) continue;
        throw std::runtime_error("the ranks' parameters differ after the last step: digest " + hexadecimal(ranks[r].digest) + " on rank " +
                                 std::to_string(r) + ", " + hexadecimal(ranks[0].digest) + " on rank 0");
    }
}

/// What optimal buckets were planned from; what `gradsync_plan buckets --profile` reads.
struct BucketProfile {
    double fixed = 0, per_byte = 0;  // seconds of a collective, and of each of its bytes
    std::vector<double> ready = {};  // seconds after the first gradient, by parameter
    std::vector<std::size_t> bytes = {};
};

struct Results {
    std::vector<RankSummary> ranks;         // of all ranks that trained together
    std::string transport;                  // how they reached one another
    std::vector<std::size_t> bucket_bytes;  // in the order of launch
    std::size_t communicated_bytes = 0;     // handed to collectives in the last step
    BucketProfile profile;                  // with --buckets optimal
    std::vector<double> losses;             // of rank 0, by step
    std::uint64_t first_step = 0;           // done before these steps
    std::string timeline;                   // its summary, with --trace
    std::string sample;                     // rank 0 only
    bool changes = false;                   // the ranks do: then nothing else counts
};

std::uint64_t peak_rss_bytes();

/// So many of these first steps are not counted: memory and caches warm up.
constexpr std::size_t warm_up_steps(std::size_t steps) { return std::min<std::size_t>(5, steps / 5); }

/// Fills in what follows from the steps.
inline void summarise_steps(const std::vector<StepRecord>& all, RankSummary& summary) {
    if (all.empty()) return;
    const std::span steps = std::span(all).subspan(warm_up_steps(all.size()));
    const auto mean = [](std::span<const StepRecord> records, double StepRecord::*member) {
        double sum = 0;
        for (const auto& record : records) sum += record.*member;
        return sum / static_cast<double>(records.size());
    };
    std::vector<double> ms;
    for (const auto& step : steps) ms.push_back(step.seconds * 1e3);
    std::sort(ms.begin(), ms.end());
    summary.median_ms = (ms[(ms.size() - 1) / 2] + ms[ms.size() / 2]) / 2;
    summary.min_ms = ms.front();
    summary.max_ms = ms.back();
    summary.mean_ms = mean(steps, &StepRecord::seconds) * 1e3;
    summary.communication_ms = mean(steps, &StepRecord::communication_seconds) * 1e3;
    summary.exposed_ms = mean(steps, &StepRecord::exposed_seconds) * 1e3;
    summary.train_loss = mean(steps.last(std::min<std::size_t>(10, steps.size())), &StepRecord::loss);  // single batches jitter
}

/// Returns a chart of the losses, a bar in each of eight rows; empty if there are fewer. `first`: steps before them.
inline std::string loss_chart(std::span<const double> losses, std::uint64_t first) {
    constexpr std::size_t rows = 8, width = 40;
    if (losses.size() < rows) return {};
    const std::size_t smoothed = losses.size() / 20 + 1;
    const auto digits = static_cast<int>(std::to_string(first + losses.size()).size());
    std::string chart = "\n  training loss, nats a byte\n";
    double longest = 0;
    for (std::size_t row = 0; row < rows; ++row) {
        const std::size_t step = 1 + row * (losses.size() - 1) / (rows - 1);  // counts from 1
        const auto near = losses.first(step).last(std::min(step, smoothed));
        const double loss = std::accumulate(near.begin(), near.end(), 0.0) / static_cast<double>(near.size());
        const bool drawn = std::isfinite(loss) && loss > 0;
        if (drawn) longest = std::max(longest, loss);
        const auto bar = drawn ? static_cast<std::size_t>(std::lround(loss / longest * width)) : 0;
        chart +=
            formatted("  step %*llu  %6.3f  ", digits, static_cast<unsigned long long>(first + step), loss) + std::string(bar, '#') + "\n";
    }
    return chart;
}

/// Prints the chart and the table, and writes the JSON object, if asked for.
void report(std::FILE* out, const Options& o, const Results& results, std::size_t tokens_per_sample, const Text& text);

}  // namespace gradsync_train
