// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "store/file_store.hpp"
#include "tcp_rendezvous.hpp"

namespace gradsync::inline v0_2 {

/// Options of FileRendezvous; each rank has its own. `bind` is that of rank 0; if it is empty, all networks.
using FileRendezvousOptions = TcpRendezvousOptions;

/// A TcpRendezvous for ranks that all see a folder, on one machine or in a file system that machines share. The ranks
/// need neither an address nor a token: rank 0 writes its addresses and a random secret into the folder.
///
/// Rank 0 makes the folder with access for its owner only, and removes it when all ranks have met. The folder must not
/// exist before: remove that of a killed job by hand.
class FileRendezvous : public TcpRendezvous {
public:
    /// Throws Error(invalid_argument) if rank 0 cannot make the folder or it exists, if another rank finds that it
    /// belongs to another user or that others may write into it, and for an invalid rank, size or time limit;
    /// Error(storage) if it cannot be read. Otherwise see TcpRendezvous. Collective.
    FileRendezvous(std::string folder, int rank, int size, FileRendezvousOptions options = {})
        : FileRendezvous(Meeting(std::move(folder), rank, size, options), options) {}

private:
    /// Knows where rank 0 listens. Rank 0's removes the folder in the end.
    class Meeting : public bootstrap::Participant {
    public:
        Meeting(std::string folder, int rank, int size, const FileRendezvousOptions& options)
            : Participant(rank, size, options.timeout, " in " + folder), folder_(std::move(folder)) {
            if (size == 1) return;
            if (rank == 0) publish(options.bind);
            else find();
        }
        Meeting(const Meeting&) = delete;
        ~Meeting() {
            if (has_folder()) remove();
        }

        Job job() const { return {.rank = rank(), .size = size(), .token = contact_.token.text()}; }
        net::MeetingPlace place() const {
            return {.contact = contact_, .listener = has_folder() ? &listener_ : nullptr};
        }

    private:
        static constexpr const char* name = "rank-0";

        /// This rank has made the folder.
        bool has_folder() const noexcept { return rank() == 0 && size() > 1; }
        void remove() const noexcept {
            ::unlink((folder_ + "/" + name).c_str());
            ::rmdir(folder_.c_str());
        }

        void publish(const std::string& bind) {
            std::string problem;
            listener_ = net::listen(bind, contact_, problem);
            if (!listener_)
                refuse(Errc::invalid_argument, {}, "cannot listen at ", bind.empty() ? "any address" : "'" + bind + "'",
                       ": ", problem);
            if (::mkdir(folder_.c_str(), 0700) != 0)
                refuse(Errc::invalid_argument, {},
                       errno == EEXIST
                           ? "the folder already exists, perhaps left by another run; remove it, or choose another name"
                           : bootstrap::text("cannot make the folder: ", std::strerror(errno)));
            try {
                (void)FileStore(folder_).create(name, std::as_bytes(std::span(&contact_, 1)));
            } catch (...) {  // the destructor of an object that was not made does not run
                remove();
                throw;
            }
        }

        void find() {
            const auto deadline = net::Clock::now() + timeout();
            for (;; ::usleep(2'000)) {
                const bool is_late = net::Clock::now() >= deadline;
                if (::access(folder_.c_str(), F_OK) == 0)
                    if (const auto found = FileStore(folder_).read(name)) {
                        if (found->size() != sizeof contact_)
                            refuse(Errc::parameter_mismatch, {.peer = 0},
                                   "rank 0 runs another version of gradsync; give all ranks the same");
                        std::memcpy(&contact_, found->data(), sizeof contact_);
                        return;
                    }
                if (is_late)
                    refuse(Errc::timeout, {.peer = 0}, "rank 0 did not arrive within ",
                           bootstrap::format_duration(timeout()),
                           "; look at its output, and check that it sees the same folder");
            }
        }

        std::string folder_;
        net::Contact contact_;
        net::Socket listener_;
    };

    FileRendezvous(const Meeting& meeting, const FileRendezvousOptions& options)
        : TcpRendezvous(meeting.job(), {.timeout = options.timeout}, meeting.place()) {}
};

static_assert(Rendezvous<FileRendezvous>);

}  // namespace gradsync::inline v0_2
