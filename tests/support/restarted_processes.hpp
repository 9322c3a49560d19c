// SPDX-License-Identifier: BSL-1.0
#pragma once

/// Ranks that are processes of a test, which starts them again and holds their memory, as gradsync_run does.

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <list>
#include <set>
#include <span>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <gradsync/bootstrap/store/file_store.hpp>
#include <gradsync/collective/shared_memory/segment.hpp>
#include <gradsync/elastic/membership.hpp>

#include "forked.hpp"
#include "temporary_directory.hpp"

namespace gradsync_test {

inline std::string content_of(const std::string& file) {
    std::ifstream in(file);
    return {std::istreambuf_iterator<char>(in), {}};
}

/// A job whose processes this one starts. `Joined`: what they make of the job.
template <class Joined>
class ProcessesOf {
public:
    using Run = std::function<void(Joined&, int start, const std::string& store)>;

    /// `least` and `most`: ranks of an ElasticJob.
    ProcessesOf(int size, Run run, int least = 0, int most = 0) : size_(size), run_(std::move(run)), least_(least), most_(most) {
        await_end_of_threads(0);
        for (int rank = 0; rank < size; ++rank) start(rank);
    }
    ~ProcessesOf() {
        for (const pid_t process : processes_) ::kill(process, SIGKILL);
        while (::wait(nullptr) > 0) {
        }
    }

    std::string file(const std::string& name) const { return folder_.file(name.c_str()); }
    gradsync::Job job(int rank) const {
        return {.rank = rank,
                .size = size_,
                .address = "127.0.0.1",
                .token = "of this test",
                .store = store_.path().string(),
                .min_ranks = least_,
                .max_ranks = most_};
    }
    void start(int rank) {
        if (processes_.size() <= static_cast<std::size_t>(rank)) processes_.resize(static_cast<std::size_t>(rank) + 1);
        const int number = ++starts_;
        most_started_ = std::max(most_started_, rank + 1);
        std::fflush(nullptr);
        const pid_t child = ::fork();
        if (child == 0) {
            std::string said = "done";
            try {
                Joined joined(job(rank));
                run_(joined, number, store_.path().string());
            } catch (const std::exception& error) {
                said = error.what();
            }
            std::ofstream(file("rank" + std::to_string(rank))) << said;
            ::_exit(0);
        }
        processes_[static_cast<std::size_t>(rank)] = child;
    }
    void send(int rank, int signal) const { ::kill(processes_[static_cast<std::size_t>(rank)], signal); }
    /// Kills a rank, and starts another one in its place.
    void replace(int rank) {
        send(rank, SIGKILL);
        ::waitpid(processes_[static_cast<std::size_t>(rank)], nullptr, 0);
        start(rank);
    }
    /// Holds what ranks keep (KeptState), so that it outlives them.
    void hold_memory() {
        using gradsync::shared_memory::Segment;
        gradsync::FileStore store(store_.path().string());
        for (const std::string& name : store.names("keep/")) {
            if (!offers_.insert(name).second) continue;
            Segment::IpcHandle handle;
            std::memcpy(&handle, store.read(name)->data(), sizeof handle);
            try {
                memory_.push_back(Segment::take_over(handle));
            } catch (const std::system_error&) {
                continue;  // its maker has died
            }
            (void)store.create("held/" + std::to_string(std::atoi(name.c_str() + 5)),
                               std::as_bytes(std::span(&memory_.back().ipc_handle(), 1)));
        }
    }
    template <class Condition>
    void until(Condition&& condition) {
        for (; !condition(); std::this_thread::sleep_for(std::chrono::milliseconds(1)))
            if (holds_) hold_memory();
    }
    void hold_nothing() { holds_ = false; }

    /// What each rank said at its end.
    std::vector<std::string> ends() {
        for (const pid_t process : processes_) until([&] { return ::waitpid(process, nullptr, WNOHANG) == process; });
        processes_.clear();
        std::vector<std::string> all;
        for (int rank = 0; rank < most_started_; ++rank) all.push_back(content_of(file("rank" + std::to_string(rank))));
        return all;
    }

private:
    int size_;
    Run run_;
    int least_, most_, most_started_ = 0;
    TemporaryDirectory folder_;
    // In memory: a store waits for the disk at each record.
    TemporaryDirectory store_{std::filesystem::exists("/dev/shm") ? "/dev/shm" : std::filesystem::temp_directory_path()};
    std::vector<pid_t> processes_;
    int starts_ = 0;
    bool holds_ = true;
    std::set<std::string> offers_;
    std::list<gradsync::shared_memory::Segment> memory_;
};
using Processes = ProcessesOf<gradsync::Membership>;

}  // namespace gradsync_test
