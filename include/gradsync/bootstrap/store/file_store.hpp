// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <dirent.h>

#include "../../core/clock.hpp"
#include "../../core/math.hpp"
#include "../../core/open_file.hpp"
#include "store.hpp"

namespace gradsync::inline v0_2 {

/// A Store in a folder that all processes see: of one machine, or in a file system that machines share. The folder must
/// exist, and only its owner may be able to write into it; whoever makes it removes it.
///
/// Each name is a file, and what stands before a '/' in it is a folder. A file appears with its whole content or not at
/// all, because it is written under a name of its own, and then linked to its place, which the system does for one
/// writer only. Over NFS, mount with `hard` (the default): calls then wait for a server that is away, without a time
/// limit.
class FileStore {
public:
    /// Throws Error(storage) if there is no such folder, and Error(invalid_argument) if it belongs to another user or
    /// others may write into it.
    explicit FileStore(std::string folder) : folder_(std::move(folder)) {
        struct stat about {};
        if (::stat(folder_.c_str(), &about) != 0) fail("cannot be opened", std::strerror(errno));
        if (!S_ISDIR(about.st_mode)) fail("cannot be opened", "it is no folder");
        if (about.st_uid != ::geteuid() || (about.st_mode & (S_IWGRP | S_IWOTH)) != 0)
            bootstrap::raise(Errc::invalid_argument, {.operation = "store"}, "the store ", folder_,
                             " belongs to another user, or others may write into it; choose a folder of your own");
    }

    /// See the concept `Store`.
    Blob create(std::string_view name, std::span<const std::byte> bytes) {
        bootstrap::check_entry(name, bytes.size(), "create");
        for (const auto until = std::chrono::steady_clock::now() + timeout_;; ::usleep(50'000)) {
            if (std::FILE* const there = open(name)) return content_of(there, name);
            const bool is_absent = errno == ENOENT;
            if (is_absent && put(name, bytes)) return Blob(bytes.begin(), bytes.end());
            const int error = errno;
            if (is_absent && error == EEXIST)
                if (std::FILE* const there = open(name)) return content_of(there, name);
            errno = error;
            if (!may_pass(error) || std::chrono::steady_clock::now() >= until)
                fail(is_absent ? "cannot take a name" : "cannot be read", problem());
        }
    }
    /// See the concept `Store`.
    std::optional<Blob> read(std::string_view name) {
        bootstrap::check_entry(name, 0, "read");
        if (std::FILE* const there = open(name)) return content_of(there, name);
        if (errno != ENOENT) fail("cannot be read", detail::open_problem());
        return std::nullopt;
    }
    /// See the concept `Store`.
    std::vector<std::string> names(std::string_view prefix) {
        std::vector<std::string> found;
        list(std::string(prefix.substr(0, prefix.rfind('/') + 1)), prefix, found);
        detail::sort_by(found, [](const std::string& one, const std::string& other) { return one < other; });
        return found;
    }

    /// Lets `create` try again for so long if the disk is full or fails, or if the system lacks descriptors or memory.
    /// Returns the previous limit. At first it is 0: such an error is thrown at once.
    std::chrono::nanoseconds set_timeout(std::chrono::nanoseconds limit) noexcept {
        return std::exchange(timeout_, detail::clamp_timeout(limit));
    }

private:
    struct Header {
        std::uint64_t magic = 0x31726f7473736467u;
        std::uint64_t bytes = 0;
        std::uint64_t digest = 0;  ///< of the bytes
    };
    static constexpr char mark = '+';  ///< ends the name of a folder, so that "a" and "a/b" are different files

    /// Returns whether another try may succeed.
    static bool may_pass(int error) noexcept {
        return error == ENOSPC || error == EDQUOT || error == EMFILE || error == ENFILE || error == ENOMEM ||
               error == EIO || error == ESTALE;
    }
    /// Returns null, with `errno`, if the name is absent or cannot be read.
    std::FILE* open(std::string_view name) const { return detail::open_file(path(name), O_RDONLY | O_NOFOLLOW, "rb"); }
    std::string path(std::string_view name) const {
        std::string file = folder_ + "/";
        for (const char c : name) {
            if (c == '/') file += mark;
            file += c;
        }
        return file;
    }
    /// Reads an open file, and closes it.
    Blob content_of(std::FILE* file, std::string_view name) const {
        Header header;
        Blob bytes;
        bool good = std::fread(&header, sizeof header, 1, file) == 1 && header.magic == Header().magic &&
                    header.bytes <= largest_blob;
        if (good) {
            bytes.resize(header.bytes);
            good = bytes.empty() || std::fread(bytes.data(), bytes.size(), 1, file) == 1;
        }
        std::fclose(file);
        if (!good || header.digest != detail::fnv1a(bytes.data(), bytes.size()))
            fail("holds invalid data",
                 bootstrap::text("file ", path(name), " is none of its own; let nothing else write into the folder"));
        return bytes;
    }
    /// Puts a name. Returns false, with `errno`, if it is taken, or if it cannot be put.
    bool put(std::string_view name, std::span<const std::byte> bytes) const {
        const std::string own = bootstrap::text(folder_, "/.", bootstrap::random_token());
        bool is_first = write(own, bytes) && link(own, path(name));
        if (!is_first && errno == ENOENT) is_first = make_folders_of(name) && link(own, path(name));
        const int error = errno;
        ::unlink(own.c_str());
        errno = error;
        return is_first;
    }
    /// Returns false, with `errno`, if it cannot.
    bool make_folders_of(std::string_view name) const {
        for (std::size_t end = name.find('/'); end != std::string_view::npos; end = name.find('/', end + 1)) {
            std::string folder = path(name.substr(0, end));
            if (::mkdir((folder += mark).c_str(), 0700) != 0 && errno != EEXIST) return false;
        }
        return true;
    }
    /// Adds the names in a folder, such as "gen/" or "", that begin with the prefix.
    void list(const std::string& in, std::string_view prefix, std::vector<std::string>& found) const {
        DIR* const folder = ::opendir(path(in).c_str());
        if (folder == nullptr && (errno != ENOENT || is_gone())) fail("cannot be read", problem());
        if (folder == nullptr) return;
        List<std::string> inner;
        while (const dirent* const entry = ::readdir(folder)) {
            std::string name = in + entry->d_name;
            if (entry->d_name[0] == '.') continue;
            const bool is_folder = name.back() == mark;
            if (is_folder) name.back() = '/';
            if (!name.starts_with(prefix)) continue;
            if (is_folder) inner.push_back(std::move(name));
            else found.push_back(std::move(name));
        }
        ::closedir(folder);
        for (const std::string& name : inner) list(name, prefix, found);
    }

    /// Returns false, with `errno`, if the file is not on the disk as a whole.
    static bool write(const std::string& name, std::span<const std::byte> bytes) noexcept {
        std::FILE* const file = detail::open_file(name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW, "wb", 0600);
        if (file == nullptr) return false;
        const Header header{.bytes = bytes.size(), .digest = detail::fnv1a(bytes.data(), bytes.size())};
        const bool written = std::fwrite(&header, sizeof header, 1, file) == 1 &&
                             (bytes.empty() || std::fwrite(bytes.data(), bytes.size(), 1, file) == 1) &&
                             std::fflush(file) == 0 && ::fsync(::fileno(file)) == 0;
        const int error = errno;
        const bool closed = std::fclose(file) == 0;
        if (!written) errno = error;
        return written && closed;
    }
    /// Links a file to a name that is absent. NFS may lose the answer, and say that the name is taken when it is taken
    /// by this file: the number of links tells (open(2), O_EXCL).
    static bool link(const std::string& own, const std::string& name) noexcept {
        if (::link(own.c_str(), name.c_str()) == 0) return true;
        const int error = errno;
        struct stat about {};
        const bool linked = ::stat(own.c_str(), &about) == 0 && about.st_nlink == 2;
        errno = error;
        return linked;
    }

    bool is_gone() const noexcept { return ::access(folder_.c_str(), F_OK) != 0 && errno == ENOENT; }
    /// Returns what `errno` says, unless the folder is gone.
    const char* problem() const noexcept {
        const int error = errno;
        if (is_gone())
            return "the folder was removed during the job. When a user logs out, systemd removes the user's files in "
                   "/dev/shm (RemoveIPC in logind.conf); call `loginctl enable-linger`, or choose another folder";
        errno = error;
        return detail::open_problem();
    }
    [[noreturn]] void fail(std::string_view what, std::string_view why) const {
        bootstrap::raise(Errc::storage, {.operation = "store"}, "the store ", folder_, " ", what, ": ", why);
    }

    std::string folder_;
    std::chrono::nanoseconds timeout_{0};
};

static_assert(Store<FileStore>);

}  // namespace gradsync::inline v0_2
