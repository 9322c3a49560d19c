// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../../bootstrap/reception.hpp"

namespace gradsync::inline v0_2::message_passing {

/// Notices when a process on another machine dies in any state: its system then closes its connections. Every rank has a connection to the
/// two ranks after it, and so watches four others; all ranks learn what one sees.
///
/// Bytes travel only at the beginning and at the end, apart from the system's keep-alive probes after a few seconds of silence. So
/// firewalls that forget quiet connections keep these, and a machine that no longer answers is noticed. Without a connection, a death shows
/// by the time limit only. `lost` and `silent` are thread-safe.
class Lifeline {
public:
    Lifeline() = default;
    Lifeline& operator=(Lifeline&&) = delete;
    ~Lifeline() { close(); }

    /// Says good-bye; this rank watches no other any more.
    void close() noexcept {
        std::lock_guard lock(mutex_);
        for (const Line& line : lines_)
            if (line.socket) (void)!::send(line.socket.get(), &good_bye, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
        lines_.clear();
    }

    /// Begins to listen, at `bind` (see net::listen).
    net::Contact listen(const bootstrap::AnyRendezvous& meeting, const std::string& bind) {
        std::string problem;
        reception_ = net::Reception::open(meeting, bind, problem);
        return reception_.contact();
    }

    /// Connects this rank. Collective, over the ranks with these addresses. `apart(r)`: whether r is a rank that can only be watched this
    /// way. Takes up to `limit`, or a few times that if addresses lead nowhere. Returns the number of connections that there should be;
    /// `lines()` is the number that there are.
    template <class Apart>
    std::size_t connect(int rank, const List<net::Contact>& all, std::string_view secret, std::chrono::milliseconds limit, Apart&& apart) {
        const int size = static_cast<int>(all.size());
        List<int> after, before;
        for (int distance = 1; distance <= 2 && distance < size; ++distance) {
            const int next = (rank + distance) % size, previous = (rank + size - distance) % size;
            if (apart(next)) after.push_back(next);
            if (apart(previous)) before.push_back(previous);
        }
        for (net::Link& link : net::connect(reception_, all, rank, secret, after, before, limit, limit / 4)) {
            lines_.push_back({link.rank, link.channel.take_socket()});
            lines_.back().socket.keep_alive();
            (void)!::send(lines_.back().socket.get(), &is_here, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
        }
        reception_.close();
        return after.size() + before.size();
    }

    /// Has the process of this rank, which this one watches, died?
    bool lost(int rank) noexcept {
        std::lock_guard lock(mutex_);
        bool gone = false;
        for (Line& line : lines_) {
            if (line.rank != rank || !line.socket) continue;
            char word = 0;
            ssize_t got = 0;
            while ((got = ::recv(line.socket.get(), &word, 1, MSG_DONTWAIT)) == 1 && word == is_here) line.is_made = true;
            if (got < 0 && net::may_pass(errno)) continue;
            if (got == 1 || !line.is_made) {
                line.socket = {};
                continue;
            }
            line.silent |= got < 0 && net::is_silence(errno);
            gone = true;
        }
        return gone;
    }
    /// If it is lost: because its host no longer answers?
    bool silent(int rank) noexcept {
        std::lock_guard lock(mutex_);
        bool silent = false;
        for (const Line& line : lines_) silent |= line.rank == rank && line.silent;
        return silent;
    }
    std::size_t lines() const noexcept { return lines_.size(); }

private:
    static constexpr char is_here = 'h', good_bye = 'b';

    struct Line {
        int rank = -1;
        net::Socket socket = {};
        bool is_made = false;  ///< on both sides: the other has not given up before the welcome that this one sent
        bool silent = false;   ///< the system has given up on its host
    };

    net::Reception reception_;
    std::mutex mutex_;
    List<Line> lines_;
};

}  // namespace gradsync::inline v0_2::message_passing
