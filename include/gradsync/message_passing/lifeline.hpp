#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <random>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "../core/clock.hpp"

#if defined(__linux__)
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#endif

namespace gradsync::inline v0::message_passing {

/// Notices when a process on another machine dies, whatever it was doing: its system closes its connections then. Every
/// rank has one to the two ranks after it, and so sees four others; what one sees all hear of.
///
/// No byte travels but at the beginning and the end. Where no connection is to be had, a death shows by the time limit only.
/// `lost` is for concurrent use.
class Lifeline {
public:
    /// Where a rank listens. Plain bytes, to be sent to all.
    struct Address {
        std::uint64_t token = 0;  ///< proves who calls whom: the same address may mean another machine elsewhere
        std::uint16_t port = 0;   ///< 0: nowhere
        std::uint16_t count = 0;
        std::array<std::uint32_t, 8> hosts{};  ///< IPv4, in network order
    };

    Lifeline() = default;
    Lifeline(const Lifeline&) = delete;
    Lifeline& operator=(const Lifeline&) = delete;

#if defined(__linux__)
    ~Lifeline() {
        for (Line& line : lines_) hang_up(line);
        close(listener_);
    }

    /// Begins to listen, on all of this machine's networks.
    Address listen() {
        Address address;
        const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        sockaddr_in any{};
        any.sin_family = AF_INET;
        socklen_t size = sizeof any;
        auto* const name = reinterpret_cast<sockaddr*>(&any);
        if (socket < 0 || ::bind(socket, name, size) != 0 || ::listen(socket, 16) != 0 || ::getsockname(socket, name, &size) != 0) {
            close(socket);
            return address;
        }
        listener_ = socket;
        std::random_device random;
        own_token_ = address.token = (static_cast<std::uint64_t>(random()) << 32) | random();
        address.port = any.sin_port;
        add_hosts(address);
        return address;
    }

    /// Connects this rank: collective, over the ranks whose addresses these are. `apart(r)`: whether r is a rank that can
    /// only be watched so. Takes `limit` at most, or a few times that where addresses lead nowhere.
    template <class Apart>
    void connect(int rank, std::span<const Address> all, std::chrono::milliseconds limit, Apart&& apart) {
        const int size = static_cast<int>(all.size());
        std::vector<int> after, before;
        for (int distance = 1; distance <= 2 && distance < size; ++distance) {
            const int next = (rank + distance) % size, previous = (rank + size - distance) % size;
            if (apart(next)) after.push_back(next);
            if (apart(previous)) before.push_back(previous);
        }
        std::vector<Line> heard;
        const auto deadline = Clock::now() + limit;
        std::thread answering([&] { heard = answer(before, deadline); });
        for (const int other : after)
            if (const int socket = call(rank, all[static_cast<std::size_t>(other)], limit / 4); socket >= 0) lines_.push_back({other, socket});
        answering.join();
        lines_.insert(lines_.end(), heard.begin(), heard.end());
        close(std::exchange(listener_, -1));
    }

    /// Has a process that this one watches died?
    bool lost(int rank) noexcept {
        std::lock_guard lock(mutex_);
        bool gone = std::find(lost_.begin(), lost_.end(), rank) != lost_.end();
        for (Line& line : lines_) {
            if (line.rank != rank || line.socket < 0) continue;
            char word = 0;
            const ssize_t got = ::recv(line.socket, &word, 1, MSG_DONTWAIT);
            if (got < 0 && (errno == EAGAIN || errno == EINTR)) continue;
            if (got != 1) {
                lost_.push_back(rank);
                gone = true;
            }
            close(std::exchange(line.socket, -1));  // a word: it has said good-bye
        }
        return gone;
    }

    std::size_t lines() const noexcept { return lines_.size(); }

private:
    using Clock = std::chrono::steady_clock;

    struct Line {
        int rank;
        int socket;
    };
    struct Greeting {
        std::uint64_t token;
        std::int64_t rank;
    };

    static void close(int descriptor) noexcept {
        if (descriptor >= 0) ::close(descriptor);
    }
    static void hang_up(Line& line) noexcept {
        if (line.socket < 0) return;
        const char word = 'b';
        (void)!::send(line.socket, &word, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
        close(std::exchange(line.socket, -1));
    }

    static void add_hosts(Address& address) {
        ifaddrs* first = nullptr;
        if (::getifaddrs(&first) != 0) return;
        for (const ifaddrs* it = first; it != nullptr && address.count < address.hosts.size(); it = it->ifa_next) {
            if (it->ifa_addr == nullptr || it->ifa_addr->sa_family != AF_INET || !(it->ifa_flags & IFF_UP) || (it->ifa_flags & IFF_LOOPBACK)) continue;
            address.hosts[address.count++] = reinterpret_cast<const sockaddr_in*>(it->ifa_addr)->sin_addr.s_addr;
        }
        if (address.count == 0) address.hosts[address.count++] = htonl(INADDR_LOOPBACK);
        ::freeifaddrs(first);
    }

    /// True once the socket is ready for `events`.
    static bool await(int socket, short events, Clock::time_point deadline) noexcept {
        const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now());
        pollfd waiting{socket, events, 0};
        return ::poll(&waiting, 1, std::max(0, static_cast<int>(left.count()))) == 1;
    }
    static bool receive(int socket, void* data, std::size_t bytes, Clock::time_point deadline) noexcept {
        return await(socket, POLLIN, deadline) && ::recv(socket, data, bytes, MSG_DONTWAIT) == static_cast<ssize_t>(bytes);
    }

    /// A connection to a rank, or -1.
    static int call(int rank, const Address& other, std::chrono::milliseconds limit) {
        for (std::size_t i = 0; i < other.count && other.port != 0; ++i) {
            const auto deadline = Clock::now() + limit;  // of its own: one that leads nowhere leaves the others theirs
            const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
            sockaddr_in name{};
            name.sin_family = AF_INET;
            name.sin_port = other.port;
            name.sin_addr.s_addr = other.hosts[i];
            int error = 0;
            socklen_t size = sizeof error;
            const Greeting greeting{other.token, rank};
            char answer = 0;
            if (socket >= 0 && (::connect(socket, reinterpret_cast<const sockaddr*>(&name), sizeof name) == 0 || errno == EINPROGRESS) &&
                await(socket, POLLOUT, deadline) && ::getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &size) == 0 && error == 0 &&
                ::send(socket, &greeting, sizeof greeting, MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof greeting) && receive(socket, &answer, 1, deadline) &&
                answer == 'y')
                return socket;
            close(socket);
        }
        return -1;
    }

    /// The connections of those who call.
    std::vector<Line> answer(const std::vector<int>& expected, Clock::time_point deadline) const {
        std::vector<Line> heard;
        while (heard.size() < expected.size() && listener_ >= 0 && await(listener_, POLLIN, deadline)) {
            const int socket = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
            if (socket < 0) continue;
            Greeting greeting{};
            const char word = 'y';
            if (receive(socket, &greeting, sizeof greeting, Clock::now() + std::chrono::milliseconds(500)) && greeting.token == own_token_ &&
                std::find(expected.begin(), expected.end(), greeting.rank) != expected.end() && ::send(socket, &word, 1, MSG_NOSIGNAL) == 1)
                heard.push_back({static_cast<int>(greeting.rank), socket});
            else close(socket);
        }
        return heard;
    }

    int listener_ = -1;
    std::uint64_t own_token_ = 0;
    std::mutex mutex_;
    std::vector<Line> lines_;
    std::vector<int> lost_;
#else
    Address listen() { return {}; }
    template <class Apart>
    void connect(int, std::span<const Address>, std::chrono::milliseconds, Apart&&) {}
    bool lost(int) noexcept { return false; }
    std::size_t lines() const noexcept { return 0; }
#endif
};

}  // namespace gradsync::inline v0::message_passing
