// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>
#include <charconv>

#include "../collective/process.hpp"
#include "../core/backend.hpp"
#include "../observe/timeline.hpp"

namespace gradsync::inline v0_2 {

namespace detail {

/// Writes events of the Trace Event Format (Google, "Trace Event Format", 2016), which Perfetto and chrome://tracing
/// read. A rank becomes a process of the trace; times are microseconds.
class TraceWriter {
public:
    enum Lane : std::size_t { trainer, ready, launch, progress };

    /// Times count from `zero`.
    TraceWriter(int rank, Observer::Time zero) : rank_(rank), zero_(zero) {
        event("M", "process_name", 0, arguments("name", quoted(text("rank ", rank))));
        event("M", "process_sort_index", 0, arguments("sort_index", text(rank)));
        for (std::size_t lane = 0; lane < lanes; ++lane) name_thread(lane, lane_names[lane]);
    }

    /// Adds a span to a lane. Spans that are nested or disjoint share a lane; others, which come from several threads,
    /// get more lanes below. Calls must be in the order of beginnings, longer spans first.
    void span(std::string_view name, Lane lane, const Timeline::Span& s) {
        std::vector<std::vector<Observer::Time>>& below_lane = open_[lane];
        std::size_t below = 0;
        for (;; ++below) {
            if (below == below_lane.size()) {
                below_lane.emplace_back();
                if (below != 0) name_thread(lane + lanes * below, text(lane_names[lane], " (", below + 1, ")"));
            }
            std::vector<Observer::Time>& ends = below_lane[below];
            while (!ends.empty() && ends.back() <= s.begin) ends.pop_back();
            if (ends.empty() || s.end <= ends.back()) break;
        }
        below_lane[below].push_back(s.end);
        const bool has_index = s.name == nullptr && s.index != Timeline::Span::no_index;
        event("X", name, lane + lanes * below,
              text(time("ts", s.begin - zero_), time("dur", s.end - s.begin),
                   has_index ? arguments("index", text(s.index)) : ""));
    }
    /// Adds a span that may overlap others in any way. Each gets its own track, by name and number.
    /// `bytes` is 0 if unknown.
    void overlapping_span(std::string_view name, std::size_t number, const Timeline::Span& s, std::size_t bytes) {
        const std::string track =
            text(",\"cat\":\"", s.activity, "\",\"id2\":{\"local\":\"", s.activity, number, "\"}");
        const std::string bucket = arguments("bucket", text(s.index, bytes != 0 ? text(",\"bytes\":", bytes) : ""));
        event("b", name, trainer, text(track, time("ts", s.begin - zero_), bucket));
        if (s.finished) event("e", name, trainer, text(track, time("ts", s.end - zero_), bucket));
    }
    void mark(std::string_view name, Observer::Time at) {
        event("i", name, ready, text(",\"s\":\"t\"", time("ts", at - zero_)));
    }

    std::string take() { return std::move(text_); }

private:
    static constexpr std::size_t lanes = 4;
    static constexpr std::array<const char*, lanes> lane_names = {"step", "gradients ready", "launches", "progress"};

    void name_thread(std::size_t thread, const std::string& name) {
        event("M", "thread_name", thread, arguments("name", quoted(name)));
    }
    /// Adds an event with further `fields`, each preceded by a comma.
    void event(const char* phase, std::string_view name, std::size_t lane, const std::string& fields) {
        text_ += text("{\"ph\":\"", phase, "\",\"name\":", quoted(name), ",\"pid\":", rank_, ",\"tid\":", lane, fields,
                      "},\n");
    }
    static std::string arguments(const char* key, const std::string& value) {
        return text(",\"args\":{\"", key, "\":", value, "}");
    }
    static std::string time(const char* key, Observer::Time::duration d) {
        const double microseconds = std::chrono::duration<double, std::micro>(d).count();
        std::array<char, 40> digits{};
        const auto end =
            std::to_chars(digits.data(), digits.data() + digits.size(), microseconds, std::chars_format::fixed, 3).ptr;
        return text(",\"", key, "\":", std::string_view(digits.data(), end));
    }
    /// A name in quotes. Bytes that are not UTF-8 become question marks.
    static std::string quoted(std::string_view s) {
        std::string text = "\"";
        for (std::size_t k = 0, n = 0; k < s.size(); k += n == 0 ? 1 : n) {
            n = utf8_length(s.substr(k));
            const char c = n == 0 ? '?' : s[k];
            if (n > 1) {
                text += s.substr(k, n);
            } else if (static_cast<unsigned char>(c) < 0x20) {
                char escape[8];
                std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(c));
                text += escape;
            } else {
                if (c == '"' || c == '\\') text += '\\';
                text += c;
            }
        }
        return text + '"';
    }

    /// The length of the character at the beginning of `s`; 0 if there is none.
    static std::size_t utf8_length(std::string_view s) noexcept {
        const auto byte = [&](std::size_t k) { return static_cast<unsigned char>(s[k]); };
        const std::size_t n = byte(0) < 0x80   ? 1
                              : byte(0) < 0xc2 ? 0
                              : byte(0) < 0xe0 ? 2
                              : byte(0) < 0xf0 ? 3
                              : byte(0) < 0xf5 ? 4
                                               : 0;
        if (n > s.size()) return 0;
        for (std::size_t k = 1; k < n; ++k)
            if ((byte(k) & 0xc0) != 0x80) return 0;
        return n;
    }

    int rank_;
    Observer::Time zero_;
    /// By lane and lane below: the ends of the open spans.
    std::array<std::vector<std::vector<Observer::Time>>, lanes> open_;
    std::string text_;
};

/// The events of one rank, one per line, each followed by a comma.
inline std::string trace_events(const Timeline& timeline, int rank, Observer::Time zero) {
    TraceWriter writer(rank, zero);
    const auto bytes = timeline.bucket_bytes();
    const auto names = timeline.parameter_names();
    const auto parameter = [&](std::uint32_t i) { return i < names.size() ? names[i] : text("gradient ", i); };
    std::size_t number = 0;
    for (const Timeline::Span& s : timeline.spans(true)) {
        if (s.name != nullptr) {
            writer.span(s.name, TraceWriter::trainer, s);
            continue;
        }
        const char* const state = s.finished ? "" : " (unfinished)";
        const std::string bucket =
            text(s.index == Timeline::Span::no_index ? "for memory" : text("bucket ", s.index), state);
        switch (s.activity) {
            case Activity::collective:
            case Activity::gather:
                writer.overlapping_span(text(s.activity == Activity::gather ? "gather of " : "", bucket), number++, s,
                                        s.of_this_plan && s.index < bytes.size() ? bytes[s.index] : 0);
                break;
            case Activity::launch: writer.span(text("launch ", bucket), TraceWriter::launch, s); break;
            case Activity::progress: writer.span("progress", TraceWriter::progress, s); break;
            case Activity::copy: writer.span(text("copy ", parameter(s.index)), TraceWriter::ready, s); break;
            case Activity::finish: writer.span(text("finish", state), TraceWriter::trainer, s); break;
            default: writer.span(text(s.activity, " ", bucket), TraceWriter::trainer, s);
        }
    }
    for (const Timeline::Mark& m : timeline.marks()) writer.mark(parameter(m.parameter), m.at);
    return writer.take();
}

inline std::string trace_text(std::string events) {
    if (!events.empty()) events.erase(events.size() - 2);  // the last comma
    return text("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n", events, "\n]}\n");
}

/// The time of the first event kept; Time::max() if there is none.
inline Observer::Time first_moment(const Timeline& timeline) {
    Observer::Time first = Observer::Time::max();
    for (const Timeline::Span& s : timeline.spans(true)) first = std::min(first, s.begin);
    for (const Timeline::Mark& m : timeline.marks()) first = std::min(first, m.at);
    return first;
}

inline void write_trace_file(const std::string& text, int rank, const std::string& path) {
    std::FILE* const file = std::fopen(path.c_str(), "wb");
    const bool written = file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
    const int error = errno;
    const bool closed = file != nullptr && std::fclose(file) == 0;  // a full disk may show only here
    if (!written || !closed)
        raise(Errc::storage, {.operation = "write_trace", .rank = rank}, "write_trace: cannot write '", path,
              "': ", std::strerror(written ? errno : error), "; name a file that you may write to");
}

/// How far this rank's clock is ahead of rank 0's. It is 0 if both share a clock, as on one machine and in a
/// simulation. The error is at most the difference between the ranks' ends of a barrier. Collective.
template <Backend B>
Observer::Time::duration clock_lead(B& comm) {
    if constexpr (abilities_of<B>.clock) return {};
    constexpr std::size_t rounds = 9;
    std::array<std::int64_t, rounds> leads{};
    const std::uint64_t machine = collective::ProcessIdentity::own().machine;
    const bool is_near = gather_values(comm, {&machine, 1})[0] == machine && machine != 0;
    for (std::int64_t& lead : leads) {
        comm.barrier().wait();
        const std::int64_t own = std::chrono::steady_clock::now().time_since_epoch().count();
        lead = own - gather_value(comm, own)[0];
    }
    if (is_near) return {};
    std::sort(leads.begin(), leads.end());
    return Observer::Time::duration(leads[rounds / 2]);
}

}  // namespace detail

/// The timelines of all ranks as one JSON text for Perfetto (ui.perfetto.dev) or chrome://tracing.
/// Each rank is a process, with lanes for the step, marks, launches and progress, and a track for each collective.
/// The root gets the text, other ranks an empty one. Clocks of different machines are aligned to within
/// the time of a barrier. Collective.
template <Backend B>
std::string collect_trace(B& comm, const Timeline& timeline, int root = 0) {
    static_assert(B::memory_space == MemorySpace::host,
                  "gradsync: a trace is collected by a backend of host memory: pass comm.host()");
    const auto lead = detail::clock_lead(comm);
    // Times count from the earliest event of all ranks, on rank 0's clock.
    Observer::Time first = detail::first_moment(timeline);
    if (first != Observer::Time::max()) first -= lead;
    std::int64_t ticks = first.time_since_epoch().count();
    comm.all_reduce(buffer(std::span(&ticks, 1)), ReduceOp::min).wait();

    const Observer::Time zero{Observer::Time::duration(ticks)};
    const std::string own =
        detail::trace_events(timeline, comm.rank(), zero == Observer::Time::max() ? zero : zero + lead);
    std::string events;
    for (const std::string& of_rank : detail::gather_texts(comm, own, root)) events += of_rank;
    return comm.rank() == root ? detail::trace_text(std::move(events)) : "";
}

/// Writes the text of `collect_trace` to a file on the root. Throws Error(storage) there if that fails. Collective.
template <Backend B>
void write_trace(B& comm, const Timeline& timeline, const std::string& path, int root = 0) {
    const std::string text = collect_trace(comm, timeline, root);
    if (comm.rank() == root) detail::write_trace_file(text, root, path);
}

/// Writes the timeline of one rank, for use after a failure. Does not communicate. Throws Error(storage) if that fails.
inline void write_trace(const Timeline& timeline, int rank, const std::string& path) {
    detail::write_trace_file(detail::trace_text(detail::trace_events(timeline, rank, detail::first_moment(timeline))),
                             rank, path);
}

}  // namespace gradsync::inline v0_2
