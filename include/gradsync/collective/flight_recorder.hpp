// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <time.h>

#include <cstdlib>

#include "../core/clock.hpp"
#include "../core/collective_tag.hpp"
#include "../core/open_file.hpp"
#include "call.hpp"

namespace gradsync::inline v0_2::collective {

/// The last collectives that one rank has started in a communicator. Its errors quote them: what it waited for, and
/// what it had done. Costs two reads of the system's coarse clock per collective. Thread-safe.
class FlightRecorder {
public:
    /// `rank`: the world rank, for the debug log.
    explicit FlightRecorder(int rank) noexcept : rank_(rank) {}

    void start(std::uint64_t number, const Call& call) noexcept {
        Entry& entry = entries_[number % kept];
        entry.root = call.root;
        entry.operation = call.operation;
        entry.op = call.op;
        entry.dtype = call.dtype;
        entry.count = gradsync::detail::larger(call.in_count, call.out_count);
        entry.started = now();
        entry.ended = 0;
        entry.number = number + 1;
        if (traced_) [[unlikely]]
            gradsync::detail::debug(gradsync::detail::DebugLevel::trace, rank_, "starts ", name_of(entry));
    }
    void end(std::uint64_t number) noexcept {
        Entry& entry = entries_[number % kept];
        if (entry.number != number + 1) return;
        entry.ended = now();
        if (traced_) [[unlikely]]
            gradsync::detail::debug(
                gradsync::detail::DebugLevel::trace, rank_, "ended ", name_of(entry), " after ",
                gradsync::detail::format_duration(std::chrono::nanoseconds(entry.ended - entry.started)));
    }

    /// "; the last that ended here: ...; in flight here: ..."
    [[gnu::cold, gnu::noinline]] std::string summary() const {
        const Entry* last = nullptr;
        List<const Entry*> open;
        for (const Entry& entry : entries_) {
            if (entry.number == 0) continue;
            if (entry.ended == 0) open.push_back(&entry);
            else if (last == nullptr || entry.number > last->number) last = &entry;
        }
        std::string said = last == nullptr ? "" : "; the last that ended here: " + describe(*last);
        for (std::size_t i = 0; i < open.size() && i < 3; ++i)
            said += (i == 0 ? "; in flight here: " : ", ") + describe(*open[i]);
        if (open.size() > 3) said += text(", and ", open.size() - 3, " more");
        return said;
    }

    /// Writes all entries to the file PREFIX.RANK, once, if the environment has GRADSYNC_FLIGHT_RECORDER=PREFIX.
    [[gnu::cold, gnu::noinline]] void write(int rank) noexcept {
        const char* const prefix = std::getenv("GRADSYNC_FLIGHT_RECORDER");
        if (prefix == nullptr || *prefix == '\0' || written_.exchange(true)) return;
        try {
            const std::string name = text(prefix, ".", rank);
            std::FILE* const file = gradsync::detail::open_file(name, O_WRONLY | O_CREAT | O_APPEND, "a");
            if (file == nullptr)
                return gradsync::detail::write_debug_line(
                    gradsync::detail::DebugLevel::info, rank,
                    {"GRADSYNC_FLIGHT_RECORDER: cannot write ", name, ": ", gradsync::detail::open_problem(),
                     "; name a folder that you may write to"});
            for (const Entry& entry : entries_)
                if (entry.number != 0) std::fprintf(file, "%s\n", describe(entry).c_str());
            std::fclose(file);
        } catch (const std::exception&) {
            // Out of memory for the text.
        }
    }

private:
    static constexpr std::size_t kept = 64;

    template <class T>
    struct Field {  // may be read while written; a mixed-up entry only misleads a reader
        std::atomic<T> value{};
        void operator=(T other) noexcept { value.store(other, std::memory_order_relaxed); }
        operator T() const noexcept { return value.load(std::memory_order_relaxed); }
    };
    struct Entry {
        Field<std::uint64_t> number, count;  ///< number: that of the collective + 1; 0: no entry
        Field<int> root;
        Field<Operation> operation;
        Field<ReduceOp> op;
        Field<DType> dtype;
        Field<std::int64_t> started, ended;  ///< 0: in flight
    };

    std::int64_t now() const noexcept {
        timespec time{};
        ::clock_gettime(traced_ ? CLOCK_MONOTONIC : CLOCK_MONOTONIC_COARSE, &time);
        return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
    }

    [[gnu::cold]] static std::string name_of(const Entry& entry) {
        Call call{.root = entry.root, .operation = entry.operation, .op = entry.op, .dtype = entry.dtype};
        (call.operation == Operation::gather ? call.in_count : call.out_count) = entry.count;
        return text(
            "#", entry.number - 1, " ", collective::describe(call),
            is_rooted(call.operation) || call.root == 0 ? std::string() : " for " + CollectiveTag::text_of(call.root));
    }
    [[gnu::cold]] std::string describe(const Entry& entry) const {
        const auto ago = [&](std::int64_t at) {  // the coarse clock is no finer
            return gradsync::detail::format_duration(std::chrono::milliseconds((now() - at) / 1'000'000)) + " ago";
        };
        return text(name_of(entry), " (started ", ago(entry.started),
                    entry.ended == 0 ? ")" : ", ended " + ago(entry.ended) + ")");
    }

    const int rank_;
    const bool traced_ = gradsync::detail::debugs(gradsync::detail::DebugLevel::trace);
    Entry entries_[kept];
    std::atomic<bool> written_{false};
};

}  // namespace gradsync::inline v0_2::collective
