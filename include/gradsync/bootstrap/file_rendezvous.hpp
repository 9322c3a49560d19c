// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../core/clock.hpp"
#include "../core/error.hpp"
#include "rendezvous.hpp"

namespace gradsync::inline v0_2 {

struct FileRendezvousOptions {
    std::chrono::nanoseconds timeout = std::chrono::minutes(5);  ///< limit of the meeting, and of every exchange after it
};

/// Ranks meet in a folder that all of them see: on one machine, or in a file system that machines share.
///
/// Rank 0 makes the folder, which must not exist yet, and removes it when all ranks are done. Remove the folder of a killed job by hand; it
/// is never taken for this job's. Only its owner can access the folder.
class FileRendezvous {
    using Clock = std::chrono::steady_clock;

public:
    /// Collective. Throws Error if rank 0 finds that the folder exists, another rank does not find it in time, or not all ranks arrive in
    /// time; and Error(invalid_argument) for an invalid rank, size or time limit.
    FileRendezvous(std::string folder, int rank, int size, FileRendezvousOptions options = {})
        : folder_(std::move(folder)), rank_(rank), size_(size), options_(options) {
        if (size < 1 || rank < 0 || rank >= size)
            refuse(Errc::invalid_argument, "rank " + std::to_string(rank) + " is not one of " + std::to_string(size));
        if (options_.timeout <= std::chrono::nanoseconds::zero()) refuse(Errc::invalid_argument, "the time limit must be positive");
        options_.timeout = gradsync::detail::clamp_timeout(options_.timeout);
        if (size == 1) return;
        if (rank == 0) {
            if (::mkdir(folder_.c_str(), 0700) != 0)
                refuse(Errc::invalid_argument,
                       errno == EEXIST ? "the folder is there already, left by another run perhaps; remove it, or choose another name"
                                       : std::string("cannot make the folder: ") + std::strerror(errno));
            std::random_device random;
            job_ = (static_cast<std::uint64_t>(random()) << 32) | random();
        }
        try {
            meet();
        } catch (...) {
            if (rank == 0) remove_all();
            throw;
        }
        alive_ = true;
    }
    FileRendezvous(FileRendezvous&& other) noexcept
        : folder_(std::move(other.folder_)),
          rank_(other.rank_),
          size_(other.size_),
          options_(other.options_),
          job_(other.job_),
          next_(other.next_),
          alive_(std::exchange(other.alive_, false)) {}
    FileRendezvous& operator=(FileRendezvous&& other) noexcept {
        if (this == &other) return *this;
        std::destroy_at(this);
        return *std::construct_at(this, std::move(other));
    }
    /// Says good-bye; rank 0 waits up to a second for the others' good-byes.
    ~FileRendezvous() {
        if (!alive_) return;
        if (rank_ != 0) {
            write(good_bye, {});
            return;
        }
        const auto deadline = Clock::now() + std::chrono::seconds(1);
        for (int r = 1; r < size_; ++r)
            while (::access(path(good_bye, r).c_str(), F_OK) != 0 && Clock::now() < deadline) pause();
        remove_all();
    }

    int rank() const noexcept { return rank_; }
    int size() const noexcept { return size_; }

    /// See the concept `Rendezvous`.
    Blob broadcast(std::span<const std::byte> own) {
        if (rank_ == 0) bootstrap::check_blob(own.size(), "broadcast", 0);
        if (size_ == 1) return {own.begin(), own.end()};
        const std::string exchange = "broadcast-" + std::to_string(next_++);
        if (rank_ != 0) return await(exchange, 0, Clock::now() + options_.timeout);
        post(exchange, own);
        return {own.begin(), own.end()};
    }

    std::vector<Blob> all_gather(std::span<const std::byte> own) {
        bootstrap::check_blob(own.size(), "all_gather", rank_);
        std::vector<Blob> all(static_cast<std::size_t>(size_));
        const std::string exchange = "all_gather-" + std::to_string(next_++);
        if (size_ > 1) post(exchange, own);
        const auto deadline = Clock::now() + options_.timeout;
        for (int r = 0; r < size_; ++r) {
            Blob& blob = all[static_cast<std::size_t>(r)];
            if (r == rank_) blob.assign(own.begin(), own.end());
            else blob = await(exchange, r, deadline);
        }
        return all;
    }

private:
    struct Header {
        std::uint64_t magic = 0x31656c6966647267u;
        std::uint64_t job = 0;  ///< unique to the job
        std::uint64_t bytes = 0;
        std::uint32_t rank = 0, size = 0;
    };

    static constexpr const char* arrival = "arrival";
    static constexpr const char* good_bye = "good-bye";

    static void pause() { std::this_thread::sleep_for(std::chrono::milliseconds(2)); }

    /// The others take the number of rank 0's job; rank 0 waits until they have it.
    void meet() {
        const auto deadline = Clock::now() + options_.timeout;
        if (rank_ == 0) {
            post(arrival, {});
            std::vector<int> missing;
            for (int r = 1; r < size_; ++r) missing.push_back(r);
            for (Blob nothing; !missing.empty(); pause()) {
                std::erase_if(missing, [&](int r) { return read(arrival, r, nothing); });
                if (!missing.empty() && Clock::now() >= deadline)
                    refuse(Errc::timeout,
                           bootstrap::list_ranks(missing) + " did not arrive within " + bootstrap::format_duration(options_.timeout) +
                               "; look at their output, and whether they see the same folder",
                           missing.front());
            }
            return;
        }
        (void)await(arrival, 0, deadline);
        post(arrival, {});
    }

    std::string path(const std::string& exchange, int rank) const { return folder_ + "/" + exchange + "." + std::to_string(rank); }

    void post(const std::string& exchange, std::span<const std::byte> bytes) {
        if (!write(exchange, bytes))
            refuse(Errc::peer_failed, std::string("cannot write a file: ") + std::strerror(errno) + "; look for space, and for the folder");
    }

    /// Writes a file that appears with its whole content, or not at all.
    bool write(const std::string& exchange, std::span<const std::byte> bytes) const noexcept {
        const std::string name = path(exchange, rank_), unfinished = name + ".new";
        std::FILE* const file = std::fopen(unfinished.c_str(), "wbe");
        if (file == nullptr) return false;
        const Header header{
            .job = job_, .bytes = bytes.size(), .rank = static_cast<std::uint32_t>(rank_), .size = static_cast<std::uint32_t>(size_)};
        const bool written =
            std::fwrite(&header, sizeof header, 1, file) == 1 && (bytes.empty() || std::fwrite(bytes.data(), bytes.size(), 1, file) == 1);
        return (std::fclose(file) == 0) & written && std::rename(unfinished.c_str(), name.c_str()) == 0;
    }

    /// Returns false while the file does not exist.
    bool read(const std::string& exchange, int rank, Blob& blob) {
        std::FILE* const file = std::fopen(path(exchange, rank).c_str(), "rbe");
        if (file == nullptr) return false;
        const Header expected;
        Header header;
        bool good = std::fread(&header, sizeof header, 1, file) == 1 && header.magic == expected.magic &&
                    header.rank == static_cast<std::uint32_t>(rank) && header.bytes <= largest_blob;
        if (good) {
            blob.resize(header.bytes);
            good = header.bytes == 0 || std::fread(blob.data(), blob.size(), 1, file) == 1;
        }
        std::fclose(file);
        if (!good) refuse(Errc::peer_failed, "file " + path(exchange, rank) + " holds nonsense; who else writes into the folder?", rank);
        if (header.size != static_cast<std::uint32_t>(size_))
            refuse(Errc::parameter_mismatch,
                   "rank " + std::to_string(rank) + " was told that there are " + std::to_string(header.size) +
                       " ranks, this one that there are " + std::to_string(size_) + "; give all the same number",
                   rank);
        if (job_ == 0) job_ = header.job;  // rank 0's arrival is the first file that a rank reads
        if (header.job != job_)
            refuse(Errc::parameter_mismatch,
                   "file " + path(exchange, rank) + " is of another job; remove the folder, or choose another name", rank);
        return true;
    }

    Blob await(const std::string& exchange, int rank, Clock::time_point deadline) {
        for (Blob blob;; pause()) {
            if (read(exchange, rank, blob)) return blob;
            Blob nothing;
            if (exchange != arrival && read(good_bye, rank, nothing)) {
                if (read(exchange, rank, blob)) return blob;  // written just before its good-bye
                refuse(
                    Errc::peer_left,
                    "rank " + std::to_string(rank) + " left before " + exchange + "; all ranks must make the same calls in the same order",
                    rank);
            }
            if (Clock::now() >= deadline)
                refuse(Errc::timeout,
                       "rank " + std::to_string(rank) + " did not come to " + exchange + " within " +
                           bootstrap::format_duration(options_.timeout) + "; look at its output, and whether it sees the same folder",
                       rank);
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

    [[noreturn]] void refuse(Errc code, const std::string& what, int peer = -1) const {
        throw Error(code, "rendezvous of rank " + std::to_string(rank_) + " in " + folder_ + ": " + what,
                    {.operation = "rendezvous", .rank = rank_, .peer = peer});
    }

    std::string folder_;
    int rank_, size_;
    FileRendezvousOptions options_;
    std::uint64_t job_ = 0;
    std::uint64_t next_ = 0;  ///< number of the next exchange
    bool alive_ = false;
};

static_assert(Rendezvous<FileRendezvous>);

}  // namespace gradsync::inline v0_2
