// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../core/math.hpp"

namespace gradsync::inline v0_2::collective {

namespace detail {

/// Reads the beginning of a file and returns its length; 0 if the file cannot be read.
inline std::size_t read_beginning(const char* path, char* text, std::size_t size) noexcept {
    std::FILE* const file = std::fopen(path, "re");
    if (file == nullptr) return 0;
    const std::size_t length = std::fread(text, 1, size, file);
    std::fclose(file);
    return length;
}

/// The start time of a process, in ticks of the system. 0: all its threads have ended, but its parent has not waited
/// for it (it keeps its number until then). -1: unknown.
inline std::int64_t start_of(pid_t process) noexcept {
    char path[48], text[512];
    std::snprintf(path, sizeof path, "/proc/%d/stat", process);
    const std::size_t length = read_beginning(path, text, sizeof text - 1);
    text[length] = '\0';
    // Format: "number (name) state ...", with the number of threads in the 18th field from the state, and the start in
    // the 20th. The name may contain anything, so the last parenthesis counts.
    const char* at = std::strrchr(text, ')');
    if (at == nullptr || at[1] == '\0') return -1;
    const bool has_ended = at[2] == 'Z' || at[2] == 'X';  // its main thread
    for (int field = 0; field < 20 && at != nullptr; ++field) {
        at = std::strchr(at + 1, ' ');
        if (field == 17 && has_ended && (at == nullptr || std::atoi(at) <= 1)) return 0;
    }
    return at == nullptr ? -1 : std::strtoll(at, nullptr, 10);
}

}  // namespace detail

/// Identifies a process, so that others can see whether it is alive. Plain bytes, to be sent.
struct ProcessIdentity {
    std::uint64_t machine = 0;  ///< the running system: its cores and its clock; 0: unknown
    std::uint64_t system = 0;   ///< the machine and the process namespace in which `number` is valid; 0: unknown
    std::int64_t number = 0;    ///< process number, and above `number_bits` its start, because numbers are reused
    std::int64_t cores = 0;     ///< the machine's cores; 0: unknown

    static ProcessIdentity own() noexcept {
        ProcessIdentity identity;
        identity.cores = ::sysconf(_SC_NPROCESSORS_ONLN);
        identity.number = ::getpid() | gradsync::detail::larger<std::int64_t>(detail::start_of(::getpid()), 0)
                                           << number_bits;
        char text[128];
        const std::size_t length = detail::read_beginning("/proc/sys/kernel/random/boot_id", text, sizeof text);
        if (length == 0) return identity;
        identity.machine = gradsync::detail::fnv1a(text, length);
        const auto within = [&](const char* space, std::uint64_t outer) -> std::uint64_t {
            const ssize_t linked = ::readlink(space, text, sizeof text);
            return linked > 0 ? gradsync::detail::fnv1a(text, static_cast<std::size_t>(linked), outer) : 0;
        };
        // The clock that start times refer to.
        const std::uint64_t clock = within("/proc/self/ns/time", identity.machine);
        identity.system = within("/proc/self/ns/pid", clock != 0 ? clock : identity.machine);
        return identity;
    }

    pid_t process() const noexcept { return static_cast<pid_t>(number & ((std::int64_t{1} << number_bits) - 1)); }

    /// False once it has died; true if this process cannot tell.
    bool alive(const ProcessIdentity& self) const noexcept {
        if (system == 0 || system != self.system) return true;
        const pid_t process = this->process();
        if (process == 0 || (::kill(process, 0) != 0 && errno == ESRCH)) return false;
        const std::int64_t start = detail::start_of(process), known = number >> number_bits;
        return start != 0 && (start < 0 || known == 0 || start == known);
    }

private:
    static constexpr int number_bits = 22;  ///< Linux process numbers have no more bits
};

}  // namespace gradsync::inline v0_2::collective
