// SPDX-License-Identifier: BSL-1.0
// ctest: COST 20
// Processes that meet in generations. This test starts them again, as gradsync_run does.
#include <gradsync/elastic/membership.hpp>

#include <doctest/doctest.h>

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/restarted_processes.hpp"
#include "support/says.hpp"
#include "support/temporary_directory.hpp"

using namespace std::chrono_literals;
using gradsync::Errc;
using gradsync::Error;
using gradsync::Job;
using gradsync::Membership;
using gradsync::TcpBackend;
using gradsync_test::content_of;
using gradsync_test::Processes;
using gradsync_test::says;

namespace {

/// Sums in steps that every rank writes down, so that a job that is started again goes on with the last one that all have. `at(step, rank)`:
/// what happens in a step.
template <class At>
void run(Membership& job, const std::string& folder, int steps, At&& at) {
    while (!job.is_over()) try {
            TcpBackend comm = job.connect({.timeout = 20s});
            const std::string own = folder + "/step-of-" + std::to_string(comm.rank());
            std::vector<int> done(static_cast<std::size_t>(comm.size()));
            done[static_cast<std::size_t>(comm.rank())] = std::atoi(content_of(own).c_str());
            comm.all_reduce(gradsync::buffer(done), gradsync::ReduceOp::sum).wait();
            for (int step = *std::min_element(done.begin(), done.end()); step < steps;) {
                at(step, comm);
                int sum = comm.rank() + 1;
                comm.all_reduce(gradsync::BufferView(&sum, 1), gradsync::ReduceOp::sum).wait();
                if (sum != comm.size() * (comm.size() + 1) / 2) throw std::runtime_error("a wrong sum: " + std::to_string(sum));
                std::ofstream(own) << ++step;
            }
            job.end(comm);
        } catch (const Error& error) {
            if (!job.goes_on(error)) throw;
        }
}

/// Each rank says in `folder` when it begins.
void step_for_a_second(Membership& job, const gradsync_test::TemporaryDirectory& folder) {
    for (bool again = true; again;) try {
            TcpBackend comm = job.connect({.timeout = 2s});
            std::ofstream(folder.path() / ("here-" + std::to_string(comm.rank())));
            for (int step = 0; step < 200; ++step) {
                std::this_thread::sleep_for(5ms);
                comm.barrier().wait();
            }
            again = false;
        } catch (const Error& error) {
            if (!job.goes_on(error)) throw;
        }
}
void until_both_step(const gradsync_test::TemporaryDirectory& folder) {
    for (const char* const name : {"here-0", "here-1"})
        while (!std::filesystem::exists(folder.file(name))) std::this_thread::sleep_for(1ms);
}

}  // namespace

TEST_CASE("a rank that is killed and started again meets the others, which have not ended") {
    for (const int size : {1, 2, 3, 4}) {
        CAPTURE(size);
        const gradsync_test::TemporaryDirectory folder;
        Processes ranks(size, [&](Membership& job, int, const std::string&) {
            run(job, folder.path().string(), 60, [&](int step, TcpBackend& comm) {
                if (comm.rank() == 0) std::ofstream(folder.path() / ("at-" + std::to_string(step))) << job.generation();
                std::this_thread::sleep_for(5ms);
            });
        });
        for (int fault = 0; fault < 4; ++fault) {
            while (!std::filesystem::exists(folder.path() / ("at-" + std::to_string(10 * fault + 5)))) std::this_thread::sleep_for(1ms);
            ranks.replace(fault % size);
        }
        for (const std::string& end : ranks.ends()) CHECK(end == "done");
        CHECK(content_of(folder.file("step-of-0")) == "60");
    }
}

TEST_CASE("two ranks that are killed at once, and all of them") {
    const gradsync_test::TemporaryDirectory folder;
    Processes ranks(3, [&](Membership& job, int, const std::string&) {
        run(job, folder.path().string(), 40, [&](int step, TcpBackend&) {
            std::ofstream(folder.path() / ("at-" + std::to_string(step)));
            std::this_thread::sleep_for(5ms);
        });
    });
    for (const auto& [step, lost] : {std::pair{5, std::vector{0, 2}}, {15, std::vector{0, 1, 2}}}) {
        while (!std::filesystem::exists(folder.path() / ("at-" + std::to_string(step)))) std::this_thread::sleep_for(1ms);
        for (const int rank : lost) ranks.send(rank, SIGKILL);
        for (const int rank : lost) ranks.replace(rank);
    }
    for (const std::string& end : ranks.ends()) CHECK(end == "done");
}

TEST_CASE("a rank that dies while the others meet is replaced in the next meeting") {
    const gradsync_test::TemporaryDirectory folder;
    Processes ranks(3, [&](Membership& job, int start, const std::string& store) {
        // The first replacement dies between the proposal and the meeting, when it is asked where it listens.
        if (start == 4) {
            std::thread([store] {
                while (!std::filesystem::exists(store + "/gen+/0000000002")) std::this_thread::sleep_for(100us);
                ::_exit(1);
            }).detach();
        }
        run(job, folder.path().string(), 20, [&](int, TcpBackend&) {
            std::ofstream(folder.file("steps"));
            std::this_thread::sleep_for(5ms);
        });
    });
    while (!std::filesystem::exists(folder.file("steps"))) std::this_thread::sleep_for(1ms);
    ranks.replace(1);
    ranks.replace(1);
    for (const std::string& end : ranks.ends()) CHECK(end == "done");
}

TEST_CASE("who does not answer in time is named in the store, for the one that started it") {
    const gradsync_test::TemporaryDirectory folder;
    Processes ranks(2, [&](Membership& job, int, const std::string&) { step_for_a_second(job, folder); });
    until_both_step(folder);
    ranks.send(1, SIGSTOP);
    gradsync::FileStore store_of_job(ranks.job(0).store);
    while (store_of_job.names("out/").empty()) std::this_thread::sleep_for(1ms);
    ranks.replace(1);
    for (const std::string& end : ranks.ends()) CHECK(end == "done");
    CHECK(store_of_job.names("out/").size() == 1);
}

TEST_CASE("who is stopped while it waits for a lost rank is named by the new one, which waits on") {
    const gradsync_test::TemporaryDirectory folder;
    Processes ranks(2, [&](Membership& job, int, const std::string&) { step_for_a_second(job, folder); });
    until_both_step(folder);
    gradsync::FileStore store_of_job(ranks.job(0).store);
    ranks.send(1, SIGKILL);
    while (store_of_job.names("back/1-").empty()) std::this_thread::sleep_for(1ms);
    ranks.send(0, SIGSTOP);
    ranks.replace(1);
    while (store_of_job.names("out/").empty() && content_of(ranks.file("rank1")).empty()) std::this_thread::sleep_for(1ms);
    ranks.replace(0);
    for (const std::string& end : ranks.ends()) CHECK(end == "done");
    CHECK(store_of_job.names("out/").size() == 1);
}

TEST_CASE("an error of the members before does not accuse those that have met since") {
    const gradsync_test::TemporaryDirectory store;
    const Job place{.rank = 0, .size = 1, .address = "127.0.0.1", .store = store.path().string()};
    Membership late(place);
    (void)late.connect({.timeout = 5s});
    gradsync::FileStore names(store.path().string());
    // The others have met again, with another member in the place of rank 0.
    gradsync::elastic::Member other;
    other.id = 4711;
    names.create("gen/0000000002", std::as_bytes(std::span(&other, 1)));
    CHECK(late.goes_on(Error(Errc::timeout, "rank 0 is late", {.peer = 0})));
    CHECK(names.names("out/").empty());
    CHECK(names.names("back/1-").size() == 1);
}

TEST_CASE("a job that was ended, ranks that do not come, and a store of something else are errors that say so") {
    const gradsync_test::TemporaryDirectory folder;
    const Job alone{.rank = 0, .size = 2, .address = "127.0.0.1", .store = folder.path().string()};
    {
        Membership job(alone);
        CHECK_THROWS_WITH_AS((void)job.connect({.timeout = 2s}), doctest::Contains("the job needs 2 ranks, and 1 process is there"), Error);
    }
    gradsync::FileStore store(folder.path().string());
    const std::string reason = "no restart is left";
    store.create("end", std::as_bytes(std::span(reason)));
    {
        Membership job(alone);
        try {
            (void)job.connect({.timeout = 100ms});
            FAIL("nothing was thrown");
        } catch (const Error& error) {
            CHECK(says(error.what(), "the job was ended: no restart is left"));
            CHECK(!job.goes_on(error));
        }
    }
    store.create("gen/0000000001", std::as_bytes(std::span(reason)));
    Membership job(alone);
    CHECK_THROWS_WITH_AS((void)job.connect({.timeout = 100ms}), doctest::Contains("holds something else under gen/0000000001"), Error);
    CHECK_THROWS_WITH_AS(Membership({.store = "etcd://host:2379"}),
                         doctest::Contains("this program cannot open a store of the kind etcd://; let it include gradsync/"), Error);
    CHECK_THROWS_WITH_AS(Membership({.store = folder.file("no-such")}), doctest::Contains("cannot be opened"), Error);
}

TEST_CASE("in a job of a fixed size the time limit starts anew when a process comes") {
    const gradsync_test::TemporaryDirectory folder;
    Membership job({.rank = 0, .size = 20, .address = "127.0.0.1", .store = folder.path().string()});
    std::thread others([&] {
        gradsync::FileStore store(folder.path().string());
        gradsync::elastic::Member one{.process = gradsync::collective::ProcessIdentity::own()};
        for (one.id = 1; one.id <= 15; ++one.id) {  // one by one, for longer than the limit
            std::this_thread::sleep_for(100ms);
            store.create(gradsync::elastic::name_of("join/", one.id), std::as_bytes(std::span(&one, 1)));
        }
    });
    CHECK_THROWS_WITH_AS((void)job.connect({.timeout = 1s}), doctest::Contains("the job needs 20 ranks, and 16 processes are there"),
                         Error);
    others.join();
}

TEST_CASE("without a store the ranks meet once, and a failure ends the job") {
    Membership job(Job{});
    TcpBackend comm = job.connect();
    CHECK(comm.size() == 1);
    CHECK(job.generation() == 1);
    CHECK(!job.goes_on(Error(Errc::peer_failed, "rank 1 is gone")));
    job.end(comm);
    CHECK(job.is_over());
}

TEST_CASE("what is wrong with this process itself is no reason to go on") {
    const gradsync_test::TemporaryDirectory folder;
    Membership job({.store = folder.path().string()});
    TcpBackend comm = job.connect({.timeout = 5s});
    CHECK(!job.goes_on(Error(Errc::invalid_argument, "wrong")));
    CHECK(!job.goes_on(Error(Errc::storage, "full")));
    CHECK(job.goes_on(Error(Errc::peer_failed, "rank 1 is gone")));
    CHECK(job.connect({.timeout = 5s}).size() == 1);
    CHECK(job.generation() == 2);
}

TEST_CASE("the longest time limit is none") {
    const gradsync_test::TemporaryDirectory folder;
    Membership job({.store = folder.path().string()});
    CHECK(job.connect({.timeout = std::chrono::nanoseconds::max()}).size() == 1);
}
