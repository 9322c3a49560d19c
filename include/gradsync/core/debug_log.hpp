// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <time.h>
#include <unistd.h>

#include <cstdlib>

#include "text.hpp"

/// The debug log, as NCCL_DEBUG is for NCCL. With GRADSYNC_DEBUG=info in the environment, each rank writes to standard
/// error what it found and decided: its job, whom it met, how ranks reach one another, time limits, settings, plans,
/// errors. With `trace` it also writes each bucket of a plan, and each collective's start and end.

namespace gradsync::inline v0_2::detail {

enum class DebugLevel : std::uint8_t { off, info, trace };

/// Writes "12:34:56.789 gradsync info: rank 2 (node1, process 4711): ...", as one line and in one call, so that lines
/// of several threads and processes do not mix. `rank`: negative if it is not known yet.
[[gnu::cold, gnu::noinline]] inline void write_debug_line(DebugLevel level, int rank,
                                                          std::initializer_list<TextPart> parts) noexcept {
    try {
        timespec now{};
        tm local{};
        char time[32] = {}, host[256] = {};
        ::clock_gettime(CLOCK_REALTIME, &now);
        ::localtime_r(&now.tv_sec, &local);
        const std::size_t length = ::strftime(time, sizeof time, "%H:%M:%S", &local);
        std::snprintf(time + length, sizeof time - length, ".%03d", static_cast<int>(now.tv_nsec / 1'000'000));
        if (::gethostname(host, sizeof host - 1) != 0) host[0] = '\0';
        const std::string line =
            text(time, " gradsync ",
                 level == DebugLevel::trace ? "trace: " : "info: ", rank < 0 ? "" : text("rank ", rank, " "), "(", host,
                 ", process ", ::getpid(), "): ", join(parts), "\n");
        static_cast<void>(::write(STDERR_FILENO, line.data(), line.size()) + 1);
    } catch (const std::bad_alloc&) {
        // There is no memory for a line: the program matters more.
    }
}

[[gnu::cold, gnu::noinline]] inline DebugLevel read_debug_level() noexcept {
    const char* const value = std::getenv("GRADSYNC_DEBUG");
    if (value == nullptr || *value == '\0') return DebugLevel::off;
    const std::string_view name(value);
    if (name == "info") return DebugLevel::info;
    if (name == "trace") return DebugLevel::trace;
    write_debug_line(DebugLevel::info, -1, {"GRADSYNC_DEBUG=", value, " is no level; set it to info or trace"});
    return DebugLevel::off;
}

/// The level that the environment names. It is read once.
inline DebugLevel debug_level() noexcept {
    static const DebugLevel level = read_debug_level();
    return level;
}
/// Does the log hold lines of this level? For parts of a line that take time to find out.
inline bool debugs(DebugLevel level = DebugLevel::info) noexcept { return debug_level() >= level; }

/// Writes a line to the log, if it holds lines of this level. `rank`: the world rank; negative if it is not known yet.
template <class... Parts>
void debug(DebugLevel level, int rank, const Parts&... parts) noexcept {
    if (debugs(level)) write_debug_line(level, rank, {TextPart(parts)...});
}

}  // namespace gradsync::inline v0_2::detail
