// SPDX-License-Identifier: BSL-1.0
#pragma once

/// Members of etcd that a test starts, stops and kills; and a server that stands in for one.

#include <doctest/doctest.h>

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gradsync/bootstrap/store/etcd_store.hpp>

#include "ports.hpp"
#include "temporary_directory.hpp"

namespace gradsync_test {

/// Says so if a program is not installed.
inline bool is_missing(const std::string& program) {
    const char* const path = std::getenv("PATH");
    std::string folders = std::string(path == nullptr ? "" : path) + ":";
    for (std::size_t end; (end = folders.find(':')) != std::string::npos; folders.erase(0, end + 1))
        if (::access((folders.substr(0, end) + "/" + program).c_str(), X_OK) == 0) return false;
    MESSAGE("left out: ", program, " is not installed");
    return true;
}

/// Runs a program, and returns its process.
inline pid_t start_program(const std::vector<std::string>& words, const std::string& log) {
    std::vector<char*> arguments;
    for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    const pid_t parent = ::getpid(), process = ::fork();
    if (process != 0) return process;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    const int out = ::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0600);
    if (::getppid() != parent || out < 0) ::_exit(1);
    ::dup2(out, 1);
    ::dup2(out, 2);
    ::execvp(arguments[0], arguments.data());
    ::_exit(1);
}

/// A cluster of this machine. `more`: options of each member.
class Etcd {
public:
    explicit Etcd(std::size_t members = 1, std::vector<std::string> more = {}, std::string scheme = "http")
        : more_(std::move(more)), scheme_(std::move(scheme)) {
        for (std::size_t m = 0; m < members; ++m) members_.push_back({free_port(), free_port()});
        for (std::size_t m = 0; m < members; ++m) start(m);
    }
    Etcd(const Etcd&) = delete;
    ~Etcd() {
        for (std::size_t m = 0; m < members_.size(); ++m) kill(m);
    }

    void start(std::size_t m) {
        std::string all;
        for (std::size_t i = 0; i < members_.size(); ++i)
            all += (i == 0 ? "" : ",") + name_of(i) + "=http://127.0.0.1:" + std::to_string(members_[i].peers);
        const std::string clients = scheme_ + "://127.0.0.1:" + std::to_string(port(m)),
                          peers = "http://127.0.0.1:" + std::to_string(members_[m].peers);
        std::vector<std::string> words{"etcd", "--name", name_of(m), "--data-dir", folder_.file(name_of(m).c_str())};
        for (const auto& [option, value] : std::vector<std::pair<std::string, std::string>>{{"--listen-client-urls", clients},
                                                                                            {"--advertise-client-urls", clients},
                                                                                            {"--listen-peer-urls", peers},
                                                                                            {"--initial-advertise-peer-urls", peers},
                                                                                            {"--initial-cluster", all},
                                                                                            {"--heartbeat-interval", "50"},
                                                                                            {"--election-timeout", "500"},
                                                                                            {"--bcrypt-cost", "4"}})
            words.insert(words.end(), {option, value});
        words.insert(words.end(), more_.begin(), more_.end());
        members_[m].process = start_program(words, folder_.file("log"));
    }
    void send(std::size_t m, int signal) const { ::kill(members_[m].process, signal); }
    void kill(std::size_t m) {
        if (members_[m].process <= 0) return;
        send(m, SIGKILL);
        ::waitpid(std::exchange(members_[m].process, 0), nullptr, 0);
    }
    std::uint16_t port(std::size_t m = 0) const { return members_[m].port; }
    std::string address(const std::string& prefix) const {
        std::string hosts;
        for (const Member& member : members_) hosts += (hosts.empty() ? "" : ",") + ("127.0.0.1:" + std::to_string(member.port));
        return (scheme_ == "http" ? "etcd://" : "etcds://") + hosts + prefix;
    }
    /// The member that leads, once there is one.
    std::size_t leader() const;

private:
    struct Member {
        std::uint16_t port, peers;
        pid_t process = 0;
    };
    static std::string name_of(std::size_t m) { return "member" + std::to_string(m); }

    std::vector<std::string> more_;
    std::string scheme_;
    // In memory: a disk that is slow to write elects new leaders.
    TemporaryDirectory folder_{std::filesystem::exists("/dev/shm") ? "/dev/shm" : std::filesystem::temp_directory_path()};
    std::vector<Member> members_;
};

/// Sends bytes to a port of this machine, and returns all that comes back, until the other side closes.
inline std::string converse(std::uint16_t port, const std::string& request) {
    using gradsync::net::Clock;
    const auto socket = stranger(port);
    const auto deadline = Clock::now() + std::chrono::seconds(5);
    std::string answer;
    if (!socket || !socket.send_all(request.data(), request.size(), deadline)) return answer;
    for (char part[4096]; socket.await(POLLIN, deadline);) {
        const ssize_t got = ::recv(socket.get(), part, sizeof part, 0);
        if (got <= 0) break;
        answer.append(part, static_cast<std::size_t>(got));
    }
    return answer;
}
/// Returns the answer of etcd's gateway, with its header.
inline std::string post(std::uint16_t port, const std::string& path, const std::string& body, const std::string& header = "") {
    return converse(port, "POST " + path + " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n" + header +
                              "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body);
}

inline std::size_t Etcd::leader() const {
    for (int tries = 0; tries < 1000; ++tries, ::usleep(10'000))
        for (std::size_t m = 0; m < members_.size(); ++m) {
            const std::string answer = post(port(m), "/v3/maintenance/status", "{}");
            const auto number_after = [&](const std::string& words) {
                const std::size_t at = answer.find(words);
                return at == std::string::npos ? std::string()
                                               : answer.substr(at + words.size(), answer.find('"', at + words.size()) - at - words.size());
            };
            if (const std::string leader = number_after("\"leader\":\""); !leader.empty() && leader == number_after("\"member_id\":\""))
                return m;
        }
    throw std::runtime_error("etcd has no leader");
}

/// A server in a thread. `answer(request)` returns the bytes of an answer, or none to close the connection.
class FakeServer {
public:
    explicit FakeServer(std::function<std::string(const std::string&)> answer) : answer_(std::move(answer)) {
        listener_ = gradsync::net::Socket::of_family(AF_INET);
        const gradsync::net::Address any = loopback(0);
        if (::bind(listener_.get(), any.get(), any.size()) != 0 || ::listen(listener_.get(), 16) != 0) throw std::runtime_error("no port");
        port_ = gradsync::net::address_of(listener_).port();
        thread_ = std::thread([this] {
            while (!stops_)
                if (listener_.await(POLLIN, gradsync::net::Clock::now() + std::chrono::milliseconds(20))) serve();
        });
    }
    ~FakeServer() {
        stops_ = true;
        thread_.join();
    }
    std::uint16_t port() const { return port_; }
    std::string address(const std::string& prefix) const { return "etcd://127.0.0.1:" + std::to_string(port_) + prefix; }
    /// An answer in HTTP.
    static std::string http(const std::string& body, const std::string& status = "200 OK") {
        return "HTTP/1.1 " + status + "\r\nContent-Length: " + std::to_string(body.size()) + "\r\nConnection: close\r\n\r\n" + body;
    }

private:
    void serve() {
        const gradsync::net::Socket caller(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
        std::string request;
        for (char part[65536]; caller && !is_whole(request);) {
            const ssize_t got = ::recv(caller.get(), part, sizeof part, 0);
            if (got <= 0) return;
            request.append(part, static_cast<std::size_t>(got));
        }
        const std::string answer = answer_(request);
        for (std::size_t sent = 0; sent < answer.size();) {
            const ssize_t more = ::send(caller.get(), answer.data() + sent, answer.size() - sent, MSG_NOSIGNAL);
            if (more <= 0) return;
            sent += static_cast<std::size_t>(more);
        }
    }
    static bool is_whole(const std::string& request) {
        const std::size_t end = request.find("\r\n\r\n"), length = request.find("Content-Length: ");
        return end != std::string::npos && length < end && request.size() >= end + 4 + std::stoul(request.substr(length + 16));
    }

    std::function<std::string(const std::string&)> answer_;
    gradsync::net::Socket listener_;
    std::uint16_t port_ = 0;
    std::atomic<bool> stops_ = false;
    std::thread thread_;
};

}  // namespace gradsync_test
