// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

#include "../core/math.hpp"

namespace gradsync::inline v0_2::collective {

namespace detail {

/// Reads the beginning of a file; returns its length, 0 if the file cannot be read.
inline std::size_t read_beginning(const char* path, char* text, std::size_t size) noexcept {
    std::FILE* const file = std::fopen(path, "re");
    if (file == nullptr) return 0;
    const std::size_t length = std::fread(text, 1, size, file);
    std::fclose(file);
    return length;
}

/// Returns whether a process has died but its parent has not waited for it: it keeps its number until then.
inline bool is_zombie(std::int64_t process) noexcept {
    char path[48], text[256];
    std::snprintf(path, sizeof path, "/proc/%lld/stat", static_cast<long long>(process));
    const std::size_t length = read_beginning(path, text, sizeof text);
    // Format: "number (name) state ...". The name may contain anything, so the last parenthesis counts.
    std::size_t at = length;
    while (at > 0 && text[at - 1] != ')') --at;
    return at != 0 && at + 1 < length && (text[at + 1] == 'Z' || text[at + 1] == 'X');
}

}  // namespace detail

/// Identifies a process, so that others can see whether it is alive. Plain bytes, to be sent.
struct ProcessIdentity {
    std::uint64_t machine = 0;  ///< the running system: its cores and its clock; 0: unknown
    std::uint64_t system = 0;   ///< the same with the process namespace, in which numbers mean the same; 0: unknown
    std::int64_t number = 0;
    std::int64_t cores = 0;  ///< the machine's cores; 0: unknown

    static ProcessIdentity own() noexcept {
        ProcessIdentity identity;
        identity.cores = ::sysconf(_SC_NPROCESSORS_ONLN);
        identity.number = ::getpid();
        char text[128];
        const std::size_t length = detail::read_beginning("/proc/sys/kernel/random/boot_id", text, sizeof text);
        if (length == 0) return identity;
        identity.machine = gradsync::detail::fnv1a(text, length);
        const ssize_t linked = ::readlink("/proc/self/ns/pid", text, sizeof text);
        if (linked > 0) identity.system = gradsync::detail::fnv1a(text, static_cast<std::size_t>(linked), identity.machine);
        return identity;
    }

    /// False once it has died; true if this process cannot know.
    bool alive(const ProcessIdentity& self) const noexcept {
        if (system == 0 || system != self.system) return true;
        if (::kill(static_cast<pid_t>(number), 0) != 0 && errno == ESRCH) return false;
        return !detail::is_zombie(number);
    }
};

}  // namespace gradsync::inline v0_2::collective
