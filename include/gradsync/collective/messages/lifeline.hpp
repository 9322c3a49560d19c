// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <mutex>

#include "../../bootstrap/reception.hpp"
#include "../../core/clock.hpp"
#include "../../core/list.hpp"

namespace gradsync::inline v0_2::message_passing {

/// Notices when a process on another machine dies in any state: its system then closes its connections. Every rank has a connection to the
/// two ranks after it, and so watches four others; all ranks learn what one sees.
///
/// Bytes travel only at the beginning and at the end, apart from the system's keep-alive probes after half a minute of silence. So
/// firewalls that forget quiet connections keep these, and a machine that lost its power is noticed. Without a connection, a death shows by
/// the time limit only. `lost` is thread-safe.
class Lifeline {
public:
    using Address = net::Contact;  ///< the address at which a rank listens

    Lifeline() = default;
    Lifeline(const Lifeline&) = delete;
    Lifeline& operator=(const Lifeline&) = delete;
    ~Lifeline() { close(); }

    /// Says good-bye; this rank watches no other any more.
    void close() noexcept {
        std::lock_guard lock(mutex_);
        const char word = 'b';
        for (const Line& line : lines_)
            if (line.socket) (void)!::send(line.socket.get(), &word, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
        lines_.clear();
    }

    /// Begins to listen, at `bind` (see net::listen).
    Address listen(const bootstrap::AnyRendezvous& meeting, const std::string& bind) {
        std::string problem;
        reception_ = net::Reception::open(meeting, bind, problem);
        return reception_.contact();
    }

    /// Connects this rank. Collective, over the ranks with these addresses. `apart(r)`: whether r is a rank that can only be watched this
    /// way. Takes up to `limit`, or a few times that if addresses lead nowhere. Returns the number of connections that there should be;
    /// `lines()` is the number that there are.
    template <class Apart>
    std::size_t connect(int rank, const List<Address>& all, std::string_view secret, std::chrono::milliseconds limit, Apart&& apart) {
        const int size = static_cast<int>(all.size());
        List<int> after, before;
        for (int distance = 1; distance <= 2 && distance < size; ++distance) {
            const int next = (rank + distance) % size, previous = (rank + size - distance) % size;
            if (apart(next)) after.push_back(next);
            if (apart(previous)) before.push_back(previous);
        }
        for (net::Link& link : net::connect(reception_, all, rank, secret, after, before, limit, limit / 4)) {
            lines_.push_back({link.rank, link.channel.take_socket()});
            lines_.back().socket.keep_alive(std::chrono::seconds(30));
        }
        reception_.close();
        return after.size() + before.size();
    }

    /// Has the process of this rank, which this one watches, died?
    bool lost(int rank) noexcept {
        std::lock_guard lock(mutex_);
        bool gone = false;
        for (const int one : lost_) gone |= one == rank;
        for (Line& line : lines_) {
            if (line.rank != rank || !line.socket) continue;
            char word = 0;
            const ssize_t got = ::recv(line.socket.get(), &word, 1, MSG_DONTWAIT);
            if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
            if (got != 1) {
                lost_.push_back(rank);
                gone = true;
            }
            line.socket = {};  // a byte is a good-bye
        }
        return gone;
    }

    std::size_t lines() const noexcept { return lines_.size(); }

private:
    struct Line {
        int rank = -1;
        net::Socket socket;
    };

    net::Reception reception_;
    std::mutex mutex_;
    List<Line> lines_;
    List<int> lost_;
};

}  // namespace gradsync::inline v0_2::message_passing
