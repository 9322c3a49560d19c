// SPDX-License-Identifier: BSL-1.0
#pragma once
// Starting processes, and ending all that they have started.

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace gradsync_run {

using Clock = std::chrono::steady_clock;

/// A file descriptor that is closed with its owner.
class Descriptor {
public:
    Descriptor() = default;
    explicit Descriptor(int number) : number_{number} {}
    Descriptor(Descriptor&& other) noexcept : number_{std::exchange(other.number_, -1)} {}
    Descriptor& operator=(Descriptor&& other) noexcept {
        std::swap(number_, other.number_);
        return *this;
    }
    ~Descriptor() {
        if (number_ >= 0) ::close(number_);
    }

    explicit operator bool() const { return number_ >= 0; }
    int get() const { return number_; }

private:
    int number_ = -1;
};

[[noreturn]] inline void fail(const std::string& what) { throw std::runtime_error(what + ": " + std::strerror(errno)); }

/// The ends to read from and to write to; programs that are started inherit neither.
inline std::pair<Descriptor, Descriptor> make_pipe() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) fail("cannot make a pipe");
    return {Descriptor{ends[0]}, Descriptor{ends[1]}};
}

/// Writes everything. Returns false, and sets `errno`, if that fails.
inline bool write_all(int descriptor, std::string_view text) {
    while (!text.empty()) {
        const ssize_t n = ::write(descriptor, text.data(), text.size());
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return false;
        text.remove_prefix(static_cast<std::size_t>(n));
    }
    return true;
}

/// Orphans of its descendants become children of this process, so that none is lost.
inline void adopt_orphans() { ::prctl(PR_SET_CHILD_SUBREAPER, 1); }

/// The process dies with its parent. Call it in the child; `parent`: the parent's number before the fork.
inline void die_with(pid_t parent) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != parent) ::_exit(128 + SIGKILL);  // it was dead before
}

/// Returns the state of a process, a letter as `ps` shows it, and its parent; 0 for a process that is gone.
inline std::pair<char, pid_t> state_and_parent(const std::string& process) {
    std::ifstream file("/proc/" + process + "/stat");
    std::string line;
    std::getline(file, line);
    const std::size_t name_end = line.rfind(')');  // a program's name may contain anything
    char state = 0;
    int parent = 0;
    if (name_end == std::string::npos || std::sscanf(line.c_str() + name_end + 1, " %c %d", &state, &parent) != 2) return {};
    return {state, parent};
}

/// All living descendants of this process: its children, theirs, and so on, in whatever session or group. `only_in`: those in this state only.
inline std::vector<pid_t> descendants(char only_in = 0) {
    std::multimap<pid_t, std::pair<pid_t, char>> children;
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
        const std::string name = entry.path().filename();
        pid_t process = 0;
        if (std::from_chars(name.data(), name.data() + name.size(), process).ec != std::errc{}) continue;
        const auto [state, parent] = state_and_parent(name);
        if (state != 0 && state != 'Z' && state != 'X') children.emplace(parent, std::pair(process, state));
    }
    std::vector<std::pair<pid_t, char>> all;
    const auto add = [&](pid_t parent) {
        for (auto [at, end] = children.equal_range(parent); at != end; ++at) all.push_back(at->second);
    };
    add(::getpid());
    for (std::size_t i = 0; i < all.size(); ++i) add(all[i].first);
    std::vector<pid_t> numbers;
    for (const auto& [process, state] : all)
        if (only_in == 0 || state == only_in) numbers.push_back(process);
    return numbers;
}

/// Was this process started with these variables, "NAME=value"?
inline bool has_variables(pid_t process, std::initializer_list<std::string> variables) {
    std::ifstream file("/proc/" + std::to_string(process) + "/environ", std::ios::binary);
    std::string all{'\0'};
    all.append(std::istreambuf_iterator<char>(file), {});
    for (const std::string& variable : variables)
        if (all.find('\0' + variable + '\0') == std::string::npos) return false;
    return true;
}

/// Kills all descendants. Returns false if some do not end within `limit` (they may wait for a disk that does not answer).
inline bool kill_descendants(std::chrono::milliseconds limit = std::chrono::seconds(10)) {
    const auto deadline = Clock::now() + limit;
    for (;;) {
        const std::vector<pid_t> all = descendants();
        for (const pid_t process : all) ::kill(process, SIGKILL);
        while (::waitpid(-1, nullptr, WNOHANG) > 0) {
        }
        if (all.empty()) return true;
        if (Clock::now() > deadline) return false;
        ::usleep(5'000);
    }
}

/// "ended with exit status 1", "was killed by signal 9 (Killed)"
inline std::string describe_end(int status) {
    if (WIFSIGNALED(status)) {
        const int signal = WTERMSIG(status);
        return "was killed by signal " + std::to_string(signal) + " (" + ::strsignal(signal) + ")";
    }
    return "ended with exit status " + std::to_string(WEXITSTATUS(status));
}

/// Not by a mistake of the program.
inline bool was_ended_from_outside(int status) {
    const int signal = WIFSIGNALED(status) ? WTERMSIG(status) : 0;
    return signal == SIGKILL || signal == SIGTERM || signal == SIGINT || signal == SIGHUP || signal == SIGQUIT;
}

/// Returns the exit status as a shell reports it.
inline int exit_status(int status) { return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status); }

}  // namespace gradsync_run
