// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

/// Functions on several ranks that are processes, whose findings are looked at afterwards, in the process of the test: nothing of
/// doctest is called on the ranks.

namespace gradsync_test {

/// What became of a rank's process.
struct Report {
    std::string text;    ///< what it returned, or "exception: " and what it threw
    int signal = 0;      ///< that ended it
    bool clean = false;  ///< it returned

    bool says(const std::string& words) const { return text.find(words) != std::string::npos; }
};

/// How many threads this process has, not counting the one of this id.
inline std::ptrdiff_t threads_of_process(pid_t without = 0) {
    std::ptrdiff_t threads = 0;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task"))
        if (task.path().filename() != std::to_string(without)) ++threads;
    return threads;
}

/// Main's, and those of libraries. ThreadSanitizer makes its own beside the first that the program makes.
inline const std::ptrdiff_t threads_at_start = [] {
    pid_t first = 0;
    std::thread([&] { first = ::gettid(); }).join();
    return threads_of_process(first);
}();

/// Waits until the threads of earlier test cases have ended; `others` may live on. Locks that a thread holds stay locked in a child for
/// ever, and ThreadSanitizer ends a child that starts threads if its parent had several.
inline void await_end_of_threads(std::ptrdiff_t others) {
    for (const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10); threads_of_process() > threads_at_start + others;
         std::this_thread::sleep_for(std::chrono::milliseconds(1)))
        if (std::chrono::steady_clock::now() > end) {
            std::fputs("forked() was called while other threads of the process live: join them, or pass other_threads\n", stderr);
            std::abort();
        }
}

/// Runs `f(rank)`, which returns a string, in `size` children of this process, and collects what they say. Memory of before is
/// theirs too, as it was. A child that hangs is ended by the test's own time limit. The process has `other_threads` beside the caller's.
template <class F>
std::vector<Report> forked(int size, F&& f, std::ptrdiff_t other_threads = 0) {
    await_end_of_threads(other_threads);
    struct Child {
        pid_t process;
        int pipe;
    };
    std::fflush(nullptr);  // or every child says it again
    std::vector<Child> children;
    for (int rank = 0; rank < size; ++rank) {
        int ends[2] = {-1, -1};
        if (::pipe(ends) != 0) std::abort();
        const pid_t process = ::fork();
        if (process < 0) std::abort();
        if (process == 0) {
            ::close(ends[0]);
            for (const Child& other : children) ::close(other.pipe);
            std::string text;
            try {
                text = f(rank);
            } catch (const std::exception& error) {
                text = std::string("exception: ") + error.what();
            } catch (...) {
                text = "exception: of a type that is not known";
            }
            [[maybe_unused]] const auto written = ::write(ends[1], text.data(), text.size());
            std::fflush(nullptr);
            ::_exit(0);
        }
        ::close(ends[1]);
        children.push_back({process, ends[0]});
    }
    std::vector<Report> reports;
    for (const Child& child : children) {
        Report report;
        char part[4096];
        for (ssize_t got; (got = ::read(child.pipe, part, sizeof part)) > 0;) report.text.append(part, static_cast<std::size_t>(got));
        ::close(child.pipe);
        int status = 0;
        ::waitpid(child.process, &status, 0);
        report.clean = WIFEXITED(status) && WEXITSTATUS(status) == 0;
        if (WIFSIGNALED(status)) report.signal = WTERMSIG(status);
        reports.push_back(report);
    }
    return reports;
}

}  // namespace gradsync_test
