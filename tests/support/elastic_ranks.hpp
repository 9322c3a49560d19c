// SPDX-License-Identifier: BSL-1.0
#pragma once

/// Tools for tests of elastic jobs: processes that leave when they are asked to, and files in which they write down events for the test.

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <string>
#include <thread>

#include <gradsync/elastic/elastic_job.hpp>

#include "restarted_processes.hpp"

namespace gradsync_test {

using ElasticRanks = ProcessesOf<gradsync::ElasticJob>;

/// While it lives, SIGUSR1 asks this process to leave.
class Listening {
public:
    explicit Listening(gradsync::ElasticJob& job) {
        leaving_ = &job;
        std::signal(SIGUSR1, [](int) { leaving_->request_leave(); });
    }
    Listening(const Listening&) = delete;
    ~Listening() { std::signal(SIGUSR1, SIG_IGN); }

private:
    inline static gradsync::ElasticJob* leaving_ = nullptr;
};

/// Writes down what happens, for the test.
inline void note(const std::string& file, const std::string& line) { std::ofstream(file, std::ios::app) << line << "\n"; }
inline std::size_t lines_in(const std::string& file) {
    const std::string text = content_of(file);
    return static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
}
template <class Condition>
void await(Condition&& condition) {
    while (!condition()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}
/// A step takes so long.
inline void nap(gradsync::TcpBackend&, std::uint64_t) { std::this_thread::sleep_for(std::chrono::milliseconds(5)); }
/// And so long while others have still to come or to go: they have to before the last step, also on a machine with other work.
inline void slow_nap() { std::this_thread::sleep_for(std::chrono::milliseconds(100)); }

}  // namespace gradsync_test
