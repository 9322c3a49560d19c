// SPDX-License-Identifier: BSL-1.0
#pragma once
// Files that are read and written in pieces, and replaced whole.

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>

namespace gradsync_train {

/// An open file, from which several threads may read.
class File {
public:
    /// `last`: of what the last file is unchanged if this one cannot be written. Only regular files and folders are read: a pipe
    /// could block for ever.
    File(const std::filesystem::path& path, int flags, const char* last = "file")
        : path_{path}, last_{last}, descriptor_{open(path.c_str(), flags)} {}
    ~File() {
        if (descriptor_ >= 0) ::close(descriptor_);
    }
    File(File&& other) noexcept : path_{other.path_}, last_{other.last_}, descriptor_{std::exchange(other.descriptor_, -1)} {}
    File& operator=(File&&) = delete;

    explicit operator bool() const { return descriptor_ >= 0; }
    int descriptor() const { return descriptor_; }
    std::size_t size() const {
        struct stat about {};
        return ::fstat(descriptor_, &about) == 0 ? static_cast<std::size_t>(about.st_size) : 0;
    }

    void read(std::size_t at, void* data, std::size_t n) const {
        for (std::size_t done = 0; done < n;) {
            const auto got = ::pread(descriptor_, static_cast<char*>(data) + done, n - done, static_cast<off_t>(at + done));
            if (got < 0 && errno == EINTR) continue;
            if (got == 0) errno = ENODATA;  // it has become shorter
            if (got <= 0) fail("cannot read ");
            done += static_cast<std::size_t>(got);
        }
    }
    void write(std::size_t at, const void* data, std::size_t n) const {
        for (std::size_t done = 0; done < n;) {
            const auto put = ::pwrite(descriptor_, static_cast<const char*>(data) + done, n - done, static_cast<off_t>(at + done));
            if (put < 0 && errno == EINTR) continue;
            if (put < 0) fail_to_write();
            done += static_cast<std::size_t>(put);
        }
    }
    std::uint64_t word(std::size_t at) const {
        std::uint64_t x = 0;
        read(at, &x, sizeof x);
        return x;
    }

    /// Everything is on disk afterwards.
    void sync() const {
        if (::fsync(descriptor_) != 0) fail_to_write();
    }
    /// The same, and closes the file.
    void finish() {
        if (::fsync(descriptor_) != 0 || ::close(std::exchange(descriptor_, -1)) != 0) fail_to_write();
    }

    [[noreturn]] void fail(const std::string& what) const {
        throw std::system_error(errno, std::generic_category(), what + path_.string());
    }
    [[noreturn]] void fail_to_write() const { fail(std::string("the last ") + last_ + " is unchanged; cannot write "); }

private:
    static int open(const char* path, int flags) {
        if ((flags & (O_ACCMODE | O_DIRECTORY)) != O_RDONLY) return ::open(path, flags, 0666);
        const int descriptor = ::open(path, flags | O_NONBLOCK);
        struct stat about {};
        if (descriptor < 0 || (::fstat(descriptor, &about) == 0 && S_ISREG(about.st_mode))) return descriptor;
        ::close(descriptor);
        return -1;
    }

    std::filesystem::path path_;
    const char* last_;
    int descriptor_;
};

/// A file that is gone again unless it was renamed.
struct Temporary {
    std::filesystem::path path;
    ~Temporary() {
        std::error_code ignored;
        std::filesystem::remove(path, ignored);
    }
};

/// Readers see the old file or the new one; syncing the directory makes the new name itself durable.
inline void replace(const std::filesystem::path& temporary, const std::filesystem::path& file) {
    std::filesystem::rename(temporary, file);
    const auto folder = file.has_parent_path() ? file.parent_path() : std::filesystem::path(".");
    if (const File opened{folder, O_RDONLY | O_DIRECTORY}; opened) ::fsync(opened.descriptor());
}

}  // namespace gradsync_train
