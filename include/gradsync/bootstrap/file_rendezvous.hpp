// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <dirent.h>
#include <sys/stat.h>

#include "../core/forked.hpp"
#include "../core/math.hpp"
#include "../core/open_file.hpp"
#include "rendezvous.hpp"

namespace gradsync::inline v0_2 {

/// Options of FileRendezvous; each rank has its own.
struct FileRendezvousOptions {
    std::chrono::nanoseconds timeout = std::chrono::minutes(5);  ///< limit of the meeting, and of every later exchange
};

/// A rendezvous in a folder that all ranks see: on one machine, or in a file system that machines share.
///
/// Rank 0 makes the folder, which must not exist yet, and removes it when all ranks are done. Remove the folder of a
/// killed job by hand: a folder that exists is refused. Only its owner can access the folder.
class FileRendezvous : public bootstrap::Participant {
    using Clock = std::chrono::steady_clock;

public:
    /// Throws Error if rank 0 finds that the folder exists, if another rank does not find it in time, or if not all
    /// ranks arrive in time. Throws Error(invalid_argument) for an invalid rank, size or time limit. Collective.
    FileRendezvous(std::string folder, int rank, int size, FileRendezvousOptions options = {})
        : Participant(rank, size, options.timeout, " in " + folder), folder_(std::move(folder)) {
        if (size == 1) return;
        if (rank == 0) {
            if (::mkdir(folder_.c_str(), 0700) != 0)
                refuse(Errc::invalid_argument,
                       errno == EEXIST
                           ? "the folder already exists, perhaps left by another run; remove it, or choose another name"
                           : bootstrap::text("cannot make the folder: ", std::strerror(errno)));
            job_ = bootstrap::random_token();
        }
        try {
            meet();
        } catch (...) {
            if (rank == 0) leave(std::chrono::seconds(1));  // gives others time to read why
            throw;
        }
    }
    FileRendezvous& operator=(FileRendezvous&&) = delete;
    /// Says good-bye. Rank 0 waits up to half a minute for the others' good-byes, because a late rank must still find
    /// the folder. If an exception is propagating, it waits at most a second.
    ~FileRendezvous() {
        if (size() > 1 && maker_.is_here())
            leave(std::chrono::seconds(std::uncaught_exceptions() != exceptions_ ? 1 : 30));
    }

    /// See the concept `Rendezvous`.
    std::vector<Blob> all_gather(std::span<const std::byte> own) { return all_gather(own, timeout()); }
    std::vector<Blob> all_gather(std::span<const std::byte> own, std::chrono::nanoseconds limit) {
        bootstrap::check_blob(own.size(), "all_gather", rank());
        std::vector<Blob> all(static_cast<std::size_t>(size()));
        const std::string exchange = bootstrap::text("all_gather-", next_++);
        if (size() > 1) post(exchange, own);
        collect(exchange, others(), all, gradsync::detail::clamp_timeout(limit));
        all[static_cast<std::size_t>(rank())].assign(own.begin(), own.end());
        return all;
    }

private:
    struct Header {
        std::uint64_t magic = 0x31656c6966647267u;
        std::uint64_t job = 0;  ///< a number unique to the job
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
            while (!is_gone() && ::access(path(good_bye, r).c_str(), F_OK) != 0 && Clock::now() < deadline)
                ::usleep(2'000);
        remove_all();
    }

    /// Tells the others the reason, unless rank 0 has not arrived: the folder may then be another user's.
    [[noreturn]] void fail(const bootstrap::Refusal& why) const {
        const std::string words = why.words();
        if (job_ != 0) write(failure, std::as_bytes(std::span(words)));
        refuse(why, -1);
    }

    /// Takes the number of rank 0's job. Rank 0 waits until all have it.
    void meet() {
        std::vector<Blob> nothing(static_cast<std::size_t>(size()));
        if (rank() != 0) {
            collect(arrival, {0}, nothing, timeout());
            struct stat about {};
            if (::lstat(folder_.c_str(), &about) != 0 || !S_ISDIR(about.st_mode) || about.st_uid != ::geteuid() ||
                (about.st_mode & (S_IWGRP | S_IWOTH)) != 0)
                refuse(Errc::invalid_argument,
                       "the folder belongs to another user, or others may write into it; choose a name in a folder "
                       "that is yours");
        }
        post(arrival, {});
        if (rank() == 0) collect(arrival, others(), nothing, timeout());
    }

    std::string path(const std::string& exchange, int rank) const {
        return bootstrap::text(folder_, "/", exchange, ".", rank);
    }

    void post(const std::string& exchange, std::span<const std::byte> bytes) {
        if (write(exchange, bytes)) return;
        const std::string problem = gradsync::detail::open_problem();
        refuse_if_gone();
        refuse(Errc::peer_failed,
               bootstrap::text("cannot write a file: ", problem, "; check that the folder exists and has space"));
    }

    bool is_gone() const noexcept { return ::access(folder_.c_str(), F_OK) != 0; }
    void refuse_if_gone() const {
        if (job_ != 0 && rank() != 0 && is_gone())
            refuse(Errc::peer_left,
                   "the folder is gone: rank 0 gave up, or somebody removed it; look at rank 0's output", 0);
    }
    static std::FILE* open(const std::string& name, int flags, const char* mode) noexcept {
        return gradsync::detail::open_file(name, flags | O_NOFOLLOW, mode, 0600);
    }

    /// Writes a file that appears with its whole content or not at all.
    bool write(const std::string& exchange, std::span<const std::byte> bytes) const noexcept {
        const std::string name = path(exchange, rank()), unfinished = name + ".new";
        std::FILE* const file = open(unfinished, O_WRONLY | O_CREAT | O_TRUNC, "wb");
        if (file == nullptr) return false;
        const Header header{.job = job_,
                            .bytes = bytes.size(),
                            .rank = static_cast<std::uint32_t>(rank()),
                            .size = static_cast<std::uint32_t>(size())};
        const bool written = std::fwrite(&header, sizeof header, 1, file) == 1 &&
                             (bytes.empty() || std::fwrite(bytes.data(), bytes.size(), 1, file) == 1);
        return (std::fclose(file) == 0) & written && std::rename(unfinished.c_str(), name.c_str()) == 0;
    }

    /// Returns false while the file does not exist.
    bool read(const std::string& exchange, int rank, Blob& blob) {
        std::FILE* const file = open(path(exchange, rank), O_RDONLY, "rb");
        if (file == nullptr && !gradsync::detail::is_no_regular_file()) {
            if (errno != ENOENT)
                trouble_ = bootstrap::text("cannot open ", path(exchange, rank), ": ", std::strerror(errno));
            return false;
        }
        Header header;
        bool good = file != nullptr && std::fread(&header, sizeof header, 1, file) == 1 &&
                    header.magic == Header().magic && header.rank == static_cast<std::uint32_t>(rank) &&
                    header.bytes <= largest_blob;
        if (good) {
            blob.resize(header.bytes);
            good = header.bytes == 0 || std::fread(blob.data(), blob.size(), 1, file) == 1;
        }
        if (file != nullptr) std::fclose(file);
        if (!good)
            refuse(Errc::peer_failed,
                   bootstrap::text("file ", path(exchange, rank),
                                   " holds invalid data; let nothing else write into the folder"),
                   rank);
        if (header.size != static_cast<std::uint32_t>(size()))
            refuse(Errc::parameter_mismatch,
                   bootstrap::text("rank ", rank, " was told that there are ", header.size,
                                   " ranks, this one that there are ", size(), "; give all the same number"),
                   rank);
        if (job_ == 0) job_ = header.job;  // rank 0's arrival is the first file that a rank reads
        if (header.job != job_)
            refuse(Errc::parameter_mismatch,
                   bootstrap::text("file ", path(exchange, rank),
                                   " is of another job; remove the folder, or choose another name"),
                   rank);
        return true;
    }

    /// Waits for the files of the `missing` ranks, and reads them into `all`.
    void collect(const std::string& exchange, List<int> missing, std::vector<Blob>& all,
                 std::chrono::nanoseconds limit) {
        // Rank 0 names missing ranks before another rank has to. It may still wait for arrivals when
        // others come to the first exchange.
        constexpr std::chrono::seconds moment{2};
        auto deadline = Clock::now() + limit + (rank() == 0 || exchange == arrival ? moment * 0 : moment);
        for (bool leader_is_here = rank() == 0;; ::usleep(2'000)) {
            const auto looked = Clock::now();  // after a stop since then, look again before naming others
            trouble_.clear();
            missing.erase_if([&](int r) {
                Blob words;
                if (read(failure, r, words)) refuse(bootstrap::Refusal::read(bootstrap::text_of(words)), r);
                // Read before its file: a rank may post and then leave.
                const bool left = exchange != arrival && read(good_bye, r, words);
                if (read(exchange, r, all[static_cast<std::size_t>(r)])) {
                    if (r == 0 && !std::exchange(leader_is_here, true)) deadline = Clock::now() + limit + moment;
                    return true;
                }
                if (left)
                    fail({Errc::peer_left, r,
                          bootstrap::text("rank ", r, " left before ", exchange,
                                          "; all ranks must make the same calls in the same order")});
                return false;
            });
            if (missing.empty()) return;
            if (Blob words; rank() != 0 && read(failure, 0, words))
                refuse(bootstrap::Refusal::read(bootstrap::text_of(words)), 0);
            refuse_if_gone();
            if (looked >= deadline && !trouble_.empty())  // no other rank is to blame
                fail({Errc::peer_failed, rank(),
                      bootstrap::text(
                          trouble_,
                          "; check whose the folder is, and how many files this process may open (ulimit -n)")});
            if (looked >= deadline)
                fail({Errc::timeout, missing.front(),
                      bootstrap::text(
                          bootstrap::list_ranks(missing),
                          exchange == arrival ? " did not arrive" : " did not come to " + exchange, " within ",
                          bootstrap::format_duration(limit),
                          "; look at the output of each missing rank, and check that they see the same folder")});
        }
    }

    void remove_all() const noexcept {
        for (int tries = 0; tries < 100; ++tries) {
            DIR* const folder = ::opendir(folder_.c_str());
            if (folder == nullptr) return;
            while (const dirent* entry = ::readdir(folder))
                if (entry->d_name[0] != '.') ::unlink((folder_ + "/" + entry->d_name).c_str());
            ::closedir(folder);
            // Another rank that is giving up may have added its good-bye meanwhile. It does so only once.
            if (::rmdir(folder_.c_str()) == 0 || (errno != ENOTEMPTY && errno != EEXIST)) return;
        }
    }

    const std::string folder_;
    std::uint64_t job_ = 0;
    std::uint64_t next_ = 0;  ///< number of the next exchange
    std::string trouble_;     ///< why a file could not be opened, since `collect` last looked
    int exceptions_ = std::uncaught_exceptions();
    gradsync::detail::Maker maker_;
};

static_assert(Rendezvous<FileRendezvous>);

}  // namespace gradsync::inline v0_2
