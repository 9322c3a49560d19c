// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../../bootstrap/reception.hpp"

namespace gradsync::inline v0_2::message_passing {

/// Detects the death of processes on other machines, in any state: their system then closes their connections. Every
/// rank connects to the two ranks after it, and so watches four others; all ranks learn what one sees.
///
/// Bytes travel only at the beginning and at the end, apart from the system's keep-alive probes after a few seconds of
/// silence. These probes keep firewalls from dropping quiet connections, and detect a machine that no longer answers.
/// Without a connection, only the time limit reveals a death. `lost` and `silent` are thread-safe.
class Lifeline {
public:
    Lifeline() = default;
    Lifeline& operator=(Lifeline&&) = delete;
    ~Lifeline() { close(); }

    /// Says good-bye. Afterwards this rank watches no other, and cannot be called.
    void close() noexcept {
        reception_.close();
        std::lock_guard lock(mutex_);
        for (const Line& line : lines_)
            if (line.socket) (void)!::send(line.socket.get(), &good_bye, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
        lines_.clear();
    }

    /// Starts to listen at `bind` (see net::listen).
    net::Contact listen(const bootstrap::AnyRendezvous& meeting, const std::string& bind) {
        std::string problem;
        reception_ = net::Reception::open(meeting, bind, problem);
        return reception_.contact();
    }

    /// Connects this rank with others. `all`: the addresses by rank. `apart(r)`: can only a connection watch rank r?
    /// Takes up to `limit`. Returns the number of connections that should exist; `lines()`
    /// is the number that do. Collective.
    template <class Apart>
    std::size_t connect(int rank, const List<net::Contact>& all, std::string_view secret,
                        std::chrono::milliseconds limit, Apart&& apart) {
        const int size = static_cast<int>(all.size());
        List<int> after, before;
        for (int distance = 1; distance <= 2 && distance < size; ++distance) {
            const int next = (rank + distance) % size, previous = (rank + size - distance) % size;
            if (apart(next)) after.push_back(next);
            if (apart(previous)) before.push_back(previous);
        }
        for (net::Link& link : net::connect(reception_, all, rank, secret, after, before, limit)) {
            lines_.push_back({link.rank, link.channel.take_socket()});
            lines_.back().socket.keep_alive();
            (void)!::send(lines_.back().socket.get(), &is_here, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
        }
        reception_.close();
        return after.size() + before.size();
    }

    /// Has this rank's process, which is watched from here, died?
    bool lost(int rank) noexcept {
        std::lock_guard lock(mutex_);
        bool gone = false;
        for (Line& line : lines_) {
            if (line.rank != rank || !line.socket) continue;
            char word = 0;
            ssize_t got = 0;
            while ((got = ::recv(line.socket.get(), &word, 1, MSG_DONTWAIT)) == 1 && word == is_here)
                line.is_made = true;
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
    /// If it is lost: did its host stop answering?
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
        bool is_made = false;  ///< on both sides: the other had not given up when this rank's welcome arrived
        bool silent = false;   ///< the system has given up on its host: no answers
    };

    net::Reception reception_;
    std::mutex mutex_;
    List<Line> lines_;
};

}  // namespace gradsync::inline v0_2::message_passing
