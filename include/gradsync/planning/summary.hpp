// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdarg>

#include "../observe/timeline.hpp"

namespace gradsync::inline v0_2 {

/// The spans of one kind, in seconds.
struct SpanSummary {
    std::string name;       ///< the activity's, or your scope's
    std::size_t count = 0;  ///< spans
    double total = 0;       ///< sum of all spans
    double least = 0;       ///< shortest span
    double most = 0;        ///< longest span

    /// Returns 0 if there are no spans.
    double mean() const noexcept { return count == 0 ? 0 : total / static_cast<double>(count); }
};

/// The collectives of one bucket. Times are means over these collectives, in seconds.
struct BucketSummary {
    std::size_t bytes = 0;       ///< of the bucket
    std::size_t parameters = 0;  ///< parameters in the bucket
    std::size_t count = 0;       ///< collectives
    double launch = 0;    ///< after the step's first ready gradient; mean over the collectives for which that is known
    double duration = 0;  ///< from launch to end
    double exposed = 0;   ///< the part of `duration` that held up the step
};

/// The numbers of a timeline, as `summarise` returns them.
struct TimelineSummary {
    std::size_t steps = 0;               ///< complete steps
    std::vector<SpanSummary> spans;      ///< the trainer's scopes, then the activities that occurred
    std::vector<BucketSummary> buckets;  ///< by bucket of the current plan
    double communication_seconds = 0;    ///< per step: time with at least one collective or gather in flight
    double exposed_seconds = 0;          ///< per step: time that it was held up, for any reason
    std::size_t dropped = 0;             ///< events that were overwritten
};

namespace detail {

inline double seconds_of(Observer::Time::duration duration) { return std::chrono::duration<double>(duration).count(); }

/// A union of disjoint time intervals.
class Intervals {
public:
    using Time = Observer::Time;

    /// Adds an interval. Calls must be in the order of `begin`.
    void add(Time begin, Time end) {
        if (!intervals_.empty() && begin <= intervals_.back().end)
            intervals_.back().end = std::max(intervals_.back().end, end);
        else intervals_.push_back({begin, end});
    }
    double seconds() const { return seconds_within(Time::min(), Time::max()); }
    /// The seconds within [begin, end].
    double seconds_within(Time begin, Time end) const {
        double sum = 0;
        auto i = std::lower_bound(intervals_.begin(), intervals_.end(), begin,
                                  [](const Interval& x, Time t) { return x.end < t; });
        for (; i != intervals_.end() && i->begin < end; ++i)
            sum += seconds_of(std::min(end, i->end) - std::max(begin, i->begin));
        return sum;
    }

private:
    struct Interval {
        Time begin, end;
    };
    std::vector<Interval> intervals_;
};

/// The steps of a timeline.
struct StepTimes {
    std::vector<Observer::Time> finishes;     ///< by step
    std::vector<Observer::Time> first_ready;  ///< by step: its first ready gradient; Time::max() if no mark is kept
    Intervals exposed, communication;         ///< of all steps
};

inline StepTimes step_times(const std::vector<Timeline::Span>& spans, const std::vector<Timeline::Mark>& marks) {
    StepTimes times;
    for (const Timeline::Span& s : spans) {
        if (s.name != nullptr) continue;
        if (s.activity == Activity::finish) times.finishes.push_back(s.end);
        if (is_exposed(s.activity)) times.exposed.add(s.begin, s.end);
        if (s.activity == Activity::collective || s.activity == Activity::gather)
            times.communication.add(s.begin, s.end);
    }
    std::size_t m = 0;
    for (const Observer::Time finish : times.finishes) {
        const bool marked = m < marks.size() && marks[m].at <= finish;
        times.first_ready.push_back(marked ? marks[m].at : Observer::Time::max());
        while (m < marks.size() && marks[m].at <= finish) ++m;
    }
    return times;
}

inline std::vector<SpanSummary> summarise_spans(const std::vector<Timeline::Span>& spans) {
    std::vector<SpanSummary> rows;
    const auto count = [&](const Timeline::Span& s, std::string_view name) {
        auto row = std::find_if(rows.begin(), rows.end(), [&](const SpanSummary& known) { return known.name == name; });
        if (row == rows.end()) row = rows.insert(row, SpanSummary{std::string(name)});
        const double d = seconds_of(s.end - s.begin);
        row->least = row->count == 0 ? d : std::min(row->least, d);
        row->most = std::max(row->most, d);
        row->total += d;
        ++row->count;
    };
    for (const Timeline::Span& s : spans)
        if (s.name != nullptr) count(s, s.name);
    for (std::size_t a = 0; a < activity_count; ++a)
        for (const Timeline::Span& s : spans)
            if (s.name == nullptr && s.activity == static_cast<Activity>(a)) count(s, name_of(s.activity));
    return rows;
}

inline std::vector<BucketSummary> summarise_buckets(const Timeline& timeline, const std::vector<Timeline::Span>& spans,
                                                    const StepTimes& times) {
    std::vector<BucketSummary> buckets(timeline.bucket_bytes().size());
    std::vector<std::size_t> launched(buckets.size());
    for (const Timeline::Span& s : spans) {
        if (s.name != nullptr || s.activity != Activity::collective || !s.of_this_plan || s.index >= buckets.size())
            continue;
        BucketSummary& bucket = buckets[s.index];
        ++bucket.count;
        bucket.duration += seconds_of(s.end - s.begin);
        bucket.exposed += times.exposed.seconds_within(s.begin, s.end);
        const auto step = static_cast<std::size_t>(
            std::lower_bound(times.finishes.begin(), times.finishes.end(), s.begin) - times.finishes.begin());
        if (step == times.finishes.size() || times.first_ready[step] > s.begin) continue;
        bucket.launch += seconds_of(s.begin - times.first_ready[step]);
        ++launched[s.index];
    }
    for (std::size_t b = 0; b < buckets.size(); ++b) {
        BucketSummary& bucket = buckets[b];
        bucket.bytes = timeline.bucket_bytes()[b];
        bucket.parameters = timeline.plan().bucket(b).size();
        if (bucket.count == 0) continue;
        bucket.duration /= static_cast<double>(bucket.count);
        bucket.exposed /= static_cast<double>(bucket.count);
        if (launched[b] != 0) bucket.launch /= static_cast<double>(launched[b]);
    }
    return buckets;
}

}  // namespace detail

/// A timeline in numbers: how many collectives there were, how long each took, how much of it held up the step. A step
/// ends with `finish()`, so micro-batches that are reduced one by one (stages 2 and 3 of sharding) count as steps.
/// Buckets are those of the current plan. All gathers count, including those for validation.
inline TimelineSummary summarise(const Timeline& timeline) {
    const std::vector<Timeline::Span> spans = timeline.spans();
    const detail::StepTimes times = detail::step_times(spans, timeline.marks());
    TimelineSummary summary;
    summary.steps = times.finishes.size();
    summary.spans = detail::summarise_spans(spans);
    summary.buckets = detail::summarise_buckets(timeline, spans, times);
    const double steps = summary.steps == 0 ? 1 : static_cast<double>(summary.steps);
    summary.communication_seconds = times.communication.seconds() / steps;
    summary.exposed_seconds = times.exposed.seconds() / steps;
    summary.dropped = timeline.dropped();
    return summary;
}

namespace detail {

[[gnu::format(printf, 1, 2)]] inline std::string format_line(const char* format, ...) {
    char text[256];
    std::va_list values;
    va_start(values, format);
    std::vsnprintf(text, sizeof text, format, values);
    va_end(values);
    return text;
}

}  // namespace detail

/// A table for human readers.
inline std::string describe(const TimelineSummary& summary) {
    using detail::format_line;
    std::string text =
        format_line("%-16s %8s %12s %12s %12s %12s\n", "activity", "calls", "total, ms", "each, ms", "least", "most");
    for (const SpanSummary& s : summary.spans)
        text += format_line("%-16.60s %8zu %12.3f %12.4f %12.4f %12.4f\n", s.name.c_str(), s.count, s.total * 1e3,
                            s.mean() * 1e3, s.least * 1e3, s.most * 1e3);
    text += format_line("\n%-8s %10s %12s %8s %14s %12s %12s\n", "bucket", "KiB", "gradients", "calls", "launched, ms",
                        "each, ms", "exposed, ms");
    for (std::size_t b = 0; b < summary.buckets.size(); ++b) {
        const BucketSummary& s = summary.buckets[b];
        text += format_line("%-8zu %10.1f %12zu %8zu %14.3f %12.4f %12.4f\n", b, static_cast<double>(s.bytes) / 1024,
                            s.parameters, s.count, s.launch * 1e3, s.duration * 1e3, s.exposed * 1e3);
    }
    text += format_line("\n%zu steps; a step: communication %.3f ms, exposed %.3f ms\n", summary.steps,
                        summary.communication_seconds * 1e3, summary.exposed_seconds * 1e3);
    if (summary.dropped != 0) text += format_line("%zu earlier events were not kept\n", summary.dropped);
    return text;
}

}  // namespace gradsync::inline v0_2
