// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <dirent.h>
#include <sys/stat.h>

#include "../core/forked.hpp"
#include "../core/math.hpp"
#include "rendezvous.hpp"

namespace gradsync::inline v0_2 {

struct FileRendezvousOptions {
    std::chrono::nanoseconds timeout = std::chrono::minutes(5);  ///< limit of the meeting, and of every exchange after it
};

/// Ranks meet in a folder that all of them see: on one machine, or in a file system that machines share.
///
/// Rank 0 makes the folder, which must not exist yet, and removes it when all ranks are done. Remove the folder of a killed job by hand; it
/// is never taken for this job's. Only its owner can access the folder.
class FileRendezvous : public bootstrap::Participant {
    using Clock = std::chrono::steady_clock;

public:
    /// Collective. Throws Error if rank 0 finds that the folder exists, another rank does not find it in time, or not all ranks arrive in
    /// time; and Error(invalid_argument) for an invalid rank, size or time limit.
    FileRendezvous(std::string folder, int rank, int size, FileRendezvousOptions options = {})
        : Participant(rank, size, options.timeout, " in " + folder), folder_(std::move(folder)) {
        if (size == 1) return;
        if (rank == 0) {
            if (::mkdir(folder_.c_str(), 0700) != 0)
                refuse(Errc::invalid_argument,
                       errno == EEXIST ? "the folder is there already, left by another run perhaps; remove it, or choose another name"
                                       : bootstrap::text("cannot make the folder: ", std::strerror(errno)));
            job_ = bootstrap::random_token();
        }
        try {
            meet();
        } catch (...) {
            if (rank == 0) leave(std::chrono::seconds(1));  // others read why
            throw;
        }
    }
    FileRendezvous& operator=(FileRendezvous&&) = delete;
    /// Says good-bye. Rank 0 waits for the others' good-byes, up to half a minute: a rank that is late must find the folder. It waits no
    /// more than a second if an exception is propagating.
    ~FileRendezvous() {
        if (size() > 1 && maker_.is_here()) leave(std::chrono::seconds(std::uncaught_exceptions() != exceptions_ ? 1 : 30));
    }

    /// See the concept `Rendezvous`.
    std::vector<Blob> all_gather(std::span<const std::byte> own) {
        bootstrap::check_blob(own.size(), "all_gather", rank());
        std::vector<Blob> all(static_cast<std::size_t>(size()));
        const std::string exchange = bootstrap::text("all_gather-", next_++);
        if (size() > 1) post(exchange, own);
        collect(exchange, others(), all);
        all[static_cast<std::size_t>(rank())].assign(own.begin(), own.end());
        return all;
    }

private:
    struct Header {
        std::uint64_t magic = 0x31656c6966647267u;
        std::uint64_t job = 0;  ///< unique to the job
        std::uint64_t bytes = 0;
        std::uint32_t rank = 0, size = 0;
    };

    static constexpr const char *arrival = "arrival", *good_bye = "good-bye", *failure = "failure";

    void leave(std::chrono::nanoseconds most) noexcept {
        if (rank() != 0) {
            write(good_bye, {});
            return;
        }
        const auto deadline = Clock::now() + gradsync::detail::smaller(timeout(), most);
        for (const int r : others())
            while (!is_gone() && ::access(path(good_bye, r).c_str(), F_OK) != 0 && Clock::now() < deadline) ::usleep(2'000);
        remove_all();
    }

    /// The others find the reason, unless rank 0 has not arrived: the folder may be another user's.
    [[noreturn]] void fail(const bootstrap::Refusal& why) const {
        const std::string words = why.words();
        if (job_ != 0) write(failure, std::as_bytes(std::span(words)));
        refuse(why, -1);
    }

    /// The others take the number of rank 0's job; rank 0 waits until they have it.
    void meet() {
        std::vector<Blob> nothing(static_cast<std::size_t>(size()));
        if (rank() != 0) {
            collect(arrival, {0}, nothing);
            struct stat about {};
            if (::lstat(folder_.c_str(), &about) != 0 || !S_ISDIR(about.st_mode) || about.st_uid != ::geteuid() ||
                (about.st_mode & (S_IWGRP | S_IWOTH)) != 0)
                refuse(Errc::invalid_argument,
                       "the folder is another user's, or others may write into it; give rank 0 a name in a folder that is yours");
        }
        post(arrival, {});
        if (rank() == 0) collect(arrival, others(), nothing);
    }

    std::string path(const std::string& exchange, int rank) const { return bootstrap::text(folder_, "/", exchange, ".", rank); }

    void post(const std::string& exchange, std::span<const std::byte> bytes) {
        if (!write(exchange, bytes))
            refuse(Errc::peer_failed,
                   bootstrap::text("cannot write a file: ", std::strerror(errno), "; look for space, and for the folder"));
    }

    bool is_gone() const noexcept { return ::access(folder_.c_str(), F_OK) != 0; }
    /// Never through a link, and without waiting for whoever may be at the other end of a pipe.
    static std::FILE* open(const std::string& name, int flags, const char* mode) noexcept {
        const int descriptor = ::open(name.c_str(), flags | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC, 0600);
        return descriptor < 0 ? nullptr : ::fdopen(descriptor, mode);
    }

    /// Writes a file that appears with its whole content, or not at all.
    bool write(const std::string& exchange, std::span<const std::byte> bytes) const noexcept {
        const std::string name = path(exchange, rank()), unfinished = name + ".new";
        std::FILE* const file = open(unfinished, O_WRONLY | O_CREAT | O_TRUNC, "wb");
        if (file == nullptr) return false;
        const Header header{
            .job = job_, .bytes = bytes.size(), .rank = static_cast<std::uint32_t>(rank()), .size = static_cast<std::uint32_t>(size())};
        const bool written =
            std::fwrite(&header, sizeof header, 1, file) == 1 && (bytes.empty() || std::fwrite(bytes.data(), bytes.size(), 1, file) == 1);
        return (std::fclose(file) == 0) & written && std::rename(unfinished.c_str(), name.c_str()) == 0;
    }

    /// Returns false while the file does not exist.
    bool read(const std::string& exchange, int rank, Blob& blob) {
        std::FILE* const file = open(path(exchange, rank), O_RDONLY, "rb");
        if (file == nullptr) return false;
        Header header;
        bool good = std::fread(&header, sizeof header, 1, file) == 1 && header.magic == Header().magic &&
                    header.rank == static_cast<std::uint32_t>(rank) && header.bytes <= largest_blob;
        if (good) {
            blob.resize(header.bytes);
            good = header.bytes == 0 || std::fread(blob.data(), blob.size(), 1, file) == 1;
        }
        std::fclose(file);
        if (!good)
            refuse(Errc::peer_failed, bootstrap::text("file ", path(exchange, rank), " holds nonsense; who else writes into the folder?"),
                   rank);
        if (header.size != static_cast<std::uint32_t>(size()))
            refuse(Errc::parameter_mismatch,
                   bootstrap::text("rank ", rank, " was told that there are ", header.size, " ranks, this one that there are ", size(),
                                   "; give all the same number"),
                   rank);
        if (job_ == 0) job_ = header.job;  // rank 0's arrival is the first file that a rank reads
        if (header.job != job_)
            refuse(Errc::parameter_mismatch,
                   bootstrap::text("file ", path(exchange, rank), " is of another job; remove the folder, or choose another name"), rank);
        return true;
    }

    /// Waits for the files of the `missing` ranks, and reads them into `all`.
    void collect(const std::string& exchange, List<int> missing, std::vector<Blob>& all) {
        // Rank 0 says who is missing before another rank has to. It may still wait for the arrivals when others come to the first exchange.
        constexpr std::chrono::seconds moment{2};
        auto deadline = Clock::now() + timeout() + (rank() == 0 || exchange == arrival ? moment * 0 : moment);
        for (bool leader_is_here = rank() == 0;; ::usleep(2'000)) {
            const auto looked = Clock::now();  // a process that was stopped since then has to look again before it names others
            missing.erase_if([&](int r) {
                Blob words;
                if (read(failure, r, words)) refuse(bootstrap::Refusal::read(bootstrap::text_of(words)), r);
                const bool left = exchange != arrival && read(good_bye, r, words);  // before the look: it may post, and then leave
                if (read(exchange, r, all[static_cast<std::size_t>(r)])) {
                    if (r == 0 && !std::exchange(leader_is_here, true)) deadline = Clock::now() + timeout() + moment;
                    return true;
                }
                if (left)
                    fail(
                        {Errc::peer_left, r,
                         bootstrap::text("rank ", r, " left before ", exchange, "; all ranks must make the same calls in the same order")});
                return false;
            });
            if (missing.empty()) return;
            if (Blob words; rank() != 0 && read(failure, 0, words)) refuse(bootstrap::Refusal::read(bootstrap::text_of(words)), 0);
            if (job_ != 0 && rank() != 0 && is_gone())
                refuse(Errc::peer_left, "the folder is gone: rank 0 has given up, or somebody has removed it", 0);
            if (looked >= deadline)
                fail({Errc::timeout, missing.front(),
                      bootstrap::text(bootstrap::list_ranks(missing),
                                      exchange == arrival ? " did not arrive" : " did not come to " + exchange, " within ",
                                      bootstrap::format_duration(timeout()),
                                      "; look at their output, and whether they see the same folder")});
        }
    }

    void remove_all() const noexcept {
        for (int tries = 0; tries < 100; ++tries) {
            DIR* const folder = ::opendir(folder_.c_str());
            if (folder == nullptr) return;
            while (const dirent* entry = ::readdir(folder))
                if (entry->d_name[0] != '.') ::unlink((folder_ + "/" + entry->d_name).c_str());
            ::closedir(folder);
            // Another rank that gives up just now may have put its good-bye there meanwhile; it does so only once.
            if (::rmdir(folder_.c_str()) == 0 || (errno != ENOTEMPTY && errno != EEXIST)) return;
        }
    }

    const std::string folder_;
    std::uint64_t job_ = 0;
    std::uint64_t next_ = 0;  ///< number of the next exchange
    int exceptions_ = std::uncaught_exceptions();
    gradsync::detail::Maker maker_;
};

static_assert(Rendezvous<FileRendezvous>);

}  // namespace gradsync::inline v0_2
