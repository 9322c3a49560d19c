// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>

/// Files that are opened without waiting.

namespace gradsync::inline v0_2::detail {

/// Opens a file by the `flags` of open(2), as a stream of this `mode`. Refuses what may block for ever: reads regular
/// files only, and writes these and character devices. Returns null if that fails; `open_problem()` then says why.
[[gnu::cold]] inline std::FILE* open_file(const std::string& path, int flags, const char* mode,
                                          mode_t access = 0666) noexcept {
    const int descriptor = ::open(path.c_str(), flags | O_NONBLOCK | O_NOCTTY | O_CLOEXEC, access);
    if (descriptor < 0) return nullptr;
    struct stat about {};
    const bool regular = ::fstat(descriptor, &about) == 0 &&
                         (S_ISREG(about.st_mode) || (S_ISCHR(about.st_mode) && (flags & O_ACCMODE) != O_RDONLY));
    std::FILE* const file = regular ? ::fdopen(descriptor, mode) : nullptr;
    if (file != nullptr) return file;
    const int error = regular ? errno : ENXIO;  // open(2) sets it for a pipe that nobody reads
    ::close(descriptor);
    errno = error;
    return nullptr;
}

inline bool is_no_regular_file() noexcept { return errno == ENXIO; }
inline const char* open_problem() noexcept {
    return is_no_regular_file() ? "it is not a regular file" : std::strerror(errno);
}

}  // namespace gradsync::inline v0_2::detail
