#pragma once

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "../core/backend.hpp"
#include "../core/clock.hpp"
#include "../core/error.hpp"
#include "observer.hpp"
#include "timeline.hpp"

namespace gradsync::inline v0 {

namespace detail {

/// Writes events of the Trace Event Format (Google, "Trace Event Format", 2016), which Perfetto and chrome://tracing read. One rank is a process
/// there; times are microseconds.
class TraceWriter {
public:
    /// Times are counted from `zero`.
    TraceWriter(int rank, Observer::Time zero) : rank_(rank), zero_(zero) {}

    enum Lane : int { trainer, ready, launch, progress };
    static constexpr int lanes = 4;

    void name_process(std::string_view name) {
        event("M", "process_name", 0);
        text_ += ",\"args\":{\"name\":";
        quote(name);
        text_ += "}},\n";
        event("M", "process_sort_index", 0);
        text_ += ",\"args\":{\"sort_index\":" + std::to_string(rank_) + "}},\n";
    }
    void name_lane(Lane lane, std::string_view name) {
        event("M", "thread_name", lane);
        text_ += ",\"args\":{\"name\":";
        quote(name);
        text_ += "}},\n";
    }
    /// Spans of the trainer's lane lie one within the other, or apart. In other lanes those that overlap, of several threads, get lanes below.
    void span(std::string_view name, Lane lane, const Timeline::Span& s) {
        std::size_t below = 0;
        if (lane != trainer) {
            std::vector<Observer::Time>& until = until_[lane];
            while (below < until.size() && s.begin < until[below]) ++below;
            if (below == until.size()) until.emplace_back();
            until[below] = s.end;
        }
        event("X", name, lane + lanes * static_cast<int>(below));
        time("ts", s.begin - zero_);
        time("dur", s.end - s.begin);
        arguments_of(s);
    }
    /// Spans that overlap as they like have a track each, by name and number.
    void overlapping_span(std::string_view name, std::string_view category, std::size_t number, const Timeline::Span& s, std::size_t bytes) {
        for (const bool first : {true, false}) {
            event(first ? "b" : "e", name, trainer);
            text_ += ",\"cat\":";
            quote(category);
            text_ += ",\"id2\":{\"local\":\"" + std::string(category) + std::to_string(number) + "\"}";
            time("ts", (first ? s.begin : s.end) - zero_);
            text_ += ",\"args\":{\"bucket\":" + std::to_string(s.index) + ",\"bytes\":" + std::to_string(bytes) + "}},\n";
        }
    }
    void mark(std::string_view name, Lane lane, Observer::Time at) {
        event("i", name, lane);
        text_ += ",\"s\":\"t\"";
        time("ts", at - zero_);
        text_ += "},\n";
    }

    std::string take() { return std::move(text_); }

private:
    void event(std::string_view phase, std::string_view name, int lane) {
        text_ += "{\"ph\":\"";
        text_ += phase;
        text_ += "\",\"name\":";
        quote(name);
        text_ += ",\"pid\":" + std::to_string(rank_) + ",\"tid\":" + std::to_string(lane);
    }
    void arguments_of(const Timeline::Span& s) {
        if (s.name == nullptr && s.index != Timeline::no_index) text_ += ",\"args\":{\"index\":" + std::to_string(s.index) + "}";
        text_ += "},\n";
    }
    void time(std::string_view key, Observer::Time::duration d) {
        const double microseconds = std::chrono::duration<double, std::micro>(d).count();
        std::array<char, 40> digits{};
        const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), microseconds, std::chars_format::fixed, 3).ptr;
        text_ += ",\"";
        text_ += key;
        text_ += "\":";
        text_.append(digits.data(), end);
    }
    void quote(std::string_view s) {
        text_ += '"';
        for (const char c : s) {
            if (c == '"' || c == '\\') {
                text_ += '\\';
                text_ += c;
            } else if (static_cast<unsigned char>(c) < 0x20) {
                char escape[8];
                std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(static_cast<unsigned char>(c)));
                text_ += escape;
            } else {
                text_ += c;
            }
        }
        text_ += '"';
    }

    int rank_;
    Observer::Time zero_;
    std::array<std::vector<Observer::Time>, lanes> until_;  ///< by lane and lane below, the end of its last span
    std::string text_;
};

/// The events of one rank, each with a comma and a line of its own.
inline std::string trace_events(const Timeline& timeline, int rank, Observer::Time zero) {
    TraceWriter writer(rank, zero);
    writer.name_process("rank " + std::to_string(rank));
    writer.name_lane(TraceWriter::trainer, "step");
    writer.name_lane(TraceWriter::ready, "gradients ready");
    writer.name_lane(TraceWriter::launch, "launches");
    writer.name_lane(TraceWriter::progress, "progress");
    const auto bytes = timeline.bucket_bytes();
    const auto names = timeline.parameter_names();
    const auto parameter = [&](std::uint32_t i) { return i < names.size() ? names[i] : "gradient " + std::to_string(i); };
    std::size_t number = 0;
    for (const Timeline::Span& s : timeline.spans()) {
        if (s.name != nullptr) {
            writer.span(s.name, TraceWriter::trainer, s);
            continue;
        }
        const std::string bucket = "bucket " + std::to_string(s.index);
        switch (s.activity) {
            case Activity::collective:
            case Activity::gather:
                writer.overlapping_span((s.activity == Activity::gather ? "gather of " : "") + bucket, s.activity == Activity::gather ? "gather" : "collective",
                                        number++, s, s.index < bytes.size() ? bytes[s.index] : 0);
                break;
            case Activity::launch: writer.span("launch " + bucket, TraceWriter::launch, s); break;
            case Activity::progress: writer.span("progress", TraceWriter::progress, s); break;
            case Activity::copy: writer.span("copy " + parameter(s.index), TraceWriter::ready, s); break;
            case Activity::wait:
            case Activity::optimizer: writer.span(std::string(name_of(s.activity)) + " " + bucket, TraceWriter::trainer, s); break;
            case Activity::finish: writer.span("finish", TraceWriter::trainer, s); break;
        }
    }
    for (const Timeline::Mark& m : timeline.marks()) writer.mark(parameter(m.parameter), TraceWriter::ready, m.at);
    return writer.take();
}

inline std::string trace_text(std::string events) {
    if (!events.empty()) events.erase(events.size() - 2);  // the last comma
    return "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[\n" + events + "\n]}\n";
}

/// Of what is kept; the greatest there is if that is nothing.
inline Observer::Time first_moment(const Timeline& timeline) {
    Observer::Time first = Observer::Time::max();
    for (const Timeline::Span& s : timeline.spans()) first = std::min(first, s.begin);
    for (const Timeline::Mark& m : timeline.marks()) first = std::min(first, m.at);
    return first;
}

inline void write_trace_file(const std::string& text, int rank, const std::string& path) {
    std::FILE* const file = std::fopen(path.c_str(), "wb");
    const bool written = file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
    const int error = errno;
    if ((file != nullptr && std::fclose(file) != 0) || !written)
        throw Error(Errc::storage, "write_trace: cannot write '" + path + "': " + std::strerror(error) + "; name a file that you may write to",
                    {.operation = "write_trace", .rank = rank});
}

/// By how much this rank's steady clock is ahead of rank 0's: 0 where they are the same clock, as on one machine. To within what a
/// barrier's end differs among the ranks. Collective.
template <Backend B>
Observer::Time::duration clock_lead(B& comm) {
    using Duration = Observer::Time::duration;
    constexpr std::size_t rounds = 9;
    std::array<std::int64_t, rounds> leads{};
    std::vector<std::int64_t> times(static_cast<std::size_t>(comm.size()));
    for (std::int64_t& lead : leads) {
        comm.barrier().wait();
        std::int64_t own = std::chrono::steady_clock::now().time_since_epoch().count();
        comm.all_gather(const_buffer(std::span(&own, 1)), buffer(times)).wait();
        lead = own - times[0];
    }
    std::sort(leads.begin(), leads.end());
    const Duration lead(leads[rounds / 2]);
    // Clocks of two machines differ by the time between their starts.
    return lead < std::chrono::milliseconds(1) && lead > -std::chrono::milliseconds(1) ? Duration::zero() : lead;
}

}  // namespace detail

/// All ranks' timelines as one JSON text for Perfetto (ui.perfetto.dev) or chrome://tracing: a process a rank; lanes for the step, marks,
/// launches and progress, and a track for each collective. The root gets it, others nothing. Clocks of several machines are brought together
/// to within the time of a barrier. Collective.
template <Backend B>
std::string collect_trace(B& comm, const Timeline& timeline, int root = 0) {
    static_assert(B::memory_space == MemorySpace::host, "gradsync: a trace is collected by a backend of host memory: pass comm.host()");
    const auto lead = detail::clock_lead(comm);
    // Counted from the earliest moment of all ranks, as rank 0's clock has it.
    Observer::Time first = detail::first_moment(timeline);
    if (first != Observer::Time::max()) first -= lead;
    std::int64_t ticks = first.time_since_epoch().count();
    comm.all_reduce(buffer(std::span(&ticks, 1)), ReduceOp::min).wait();

    const std::string own = detail::trace_events(timeline, comm.rank(), Observer::Time(Observer::Time::duration(ticks)) + lead);
    const auto ranks = static_cast<std::size_t>(comm.size());
    std::uint64_t size = own.size();
    std::vector<std::uint64_t> sizes(ranks);
    comm.all_gather(const_buffer(std::span(&size, 1)), buffer(sizes)).wait();
    const std::uint64_t most = *std::max_element(sizes.begin(), sizes.end());
    std::vector<std::uint8_t> padded(most), all(comm.rank() == root ? most * ranks : 0);
    std::memcpy(padded.data(), own.data(), own.size());
    comm.gather(const_buffer(padded), buffer(all), root).wait();
    if (comm.rank() != root) return {};

    std::string events;
    for (std::size_t r = 0; r < ranks; ++r) events.append(reinterpret_cast<const char*>(all.data() + r * most), sizes[r]);
    return detail::trace_text(std::move(events));
}

/// The same into a file, which the root writes. Throws Error(storage) on the root where that is not possible. Collective.
template <Backend B>
void write_trace(B& comm, const Timeline& timeline, const std::string& path, int root = 0) {
    const std::string text = collect_trace(comm, timeline, root);
    if (comm.rank() == root) detail::write_trace_file(text, root, path);
}

/// One rank's timeline alone, where the others cannot be asked: after a failure. Throws Error(storage).
inline void write_trace(const Timeline& timeline, int rank, const std::string& path) {
    detail::write_trace_file(detail::trace_text(detail::trace_events(timeline, rank, detail::first_moment(timeline))), rank, path);
}

}  // namespace gradsync::inline v0
