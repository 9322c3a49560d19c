// SPDX-License-Identifier: BSL-1.0
// What handles do in a forked child of a rank: nothing that the other ranks notice.
#include <gradsync/backend/tcp.hpp>
#include <gradsync/backend/thread_backend.hpp>
#include <gradsync/bootstrap/tcp_rendezvous.hpp>
#include <gradsync/bucket/per_parameter.hpp>
#include <gradsync/collective/messages/tcp_transport.hpp>
#include <gradsync/overlap/overlap_backward.hpp>
#include <gradsync/reducer.hpp>

#include <doctest/doctest.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "support/attempts.hpp"
#include "support/forked.hpp"
#include "support/ports.hpp"

namespace gs = gradsync;
using namespace std::chrono_literals;

namespace {

/// What `f()` says on a forked child, which then exits as programs do.
template <class F>
pid_t in_child(F&& f) {
    const pid_t child = ::fork();
    if (child == 0) std::exit(f() ? 0 : 1);
    return child;
}
bool went_well(pid_t child) {
    int status = 0;
    return ::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

template <class F>
bool refused(F&& f) {
    try {
        f();
    } catch (const gs::Error& error) {
        return error.errc() == gs::Errc::invalid_argument &&
               std::string(error.what()).find("this communicator belongs to process " + std::to_string(::getppid())) == 0;
    }
    return false;
}

}  // namespace

TEST_CASE("fork: a rank's child that exits, with all destructors, ends nothing, in the middle of a step or between two") {
    for (const bool shared_memory : {true, false}) {
        const std::uint16_t port = gradsync_test::free_port();
        const auto reports = gradsync_test::forked(3, [&](int rank) -> std::string {
            std::optional<gs::TcpBackend> comm;
            {
                gs::TcpRendezvous rendezvous({.rank = rank, .size = 3, .port = port});
                comm.emplace(rendezvous, gs::TcpOptions{.timeout = 20s, .shared_memory = shared_memory});
            }
            std::vector<std::vector<float>> gradients(2, std::vector<float>(10'000));
            std::vector<gs::ParameterView> parameters;
            for (auto& gradient : gradients) parameters.push_back({.name = "w", .gradient = gs::buffer(gradient)});
            using Reducer = gs::Reducer<gs::TcpBackend, gs::PerParameter, gs::OverlapBackward>;
            std::optional<Reducer> sync(std::in_place, *comm, parameters, gs::OverlapBackward(gs::Progress::thread));
            const gs::collective::Memory memory = comm->allocate(100'000);
            std::vector<pid_t> children;
            const auto fork_one = [&] {
                children.push_back(in_child([&] {
                    sync.reset();
                    comm.reset();
                    return true;
                }));
            };
            for (int step = 0; step < 10; ++step) {
                for (auto& gradient : gradients) gradient.assign(gradient.size(), static_cast<float>(rank + step));
                if (step % 4 == 1) fork_one();
                sync->mark_ready(1);
                if (step % 4 == 3) fork_one();
                sync->mark_ready(0);
                sync->finish();
                for (const auto& gradient : gradients)
                    if (gradient[77] != static_cast<float>(1 + step)) return "a wrong mean";
            }
            for (const pid_t child : children)
                if (!went_well(child)) return "a child that did not end well";
            return "right";
        });
        for (const auto& report : reports) CHECK(report.text == "right");
    }
}

TEST_CASE("fork: every call on a child's copy of a communicator throws, and says why") {
    for (const bool shared_memory : {true, false}) {
        const std::uint16_t port = gradsync_test::free_port();
        const auto reports = gradsync_test::forked(2, [&](int rank) -> std::string {
            gs::TcpRendezvous rendezvous({.rank = rank, .size = 2, .port = port});
            gs::TcpBackend comm(rendezvous, {.timeout = 20s, .shared_memory = shared_memory});
            float x = 1;
            auto work = comm.all_reduce(gs::BufferView{&x, 1, gs::DType::f32}, gs::ReduceOp::sum);
            const pid_t child = in_child([&] {
                comm.progress();
                comm.fail("what a child cannot decide");
                return refused([&] { work.wait(); }) && refused([&] { work.test(); }) && refused([&] { comm.barrier().wait(); }) &&
                       refused([&] { (void)comm.duplicate(); }) && refused([&] { (void)comm.allocate(100); });
            });
            work.wait();
            comm.barrier().wait();
            return went_well(child) && x == 2 ? "right" : "wrong";
        });
        for (const auto& report : reports) CHECK(report.text == "right");
    }
    const auto right = gs::run_threads(2, [](gs::ThreadBackend comm) {
        const pid_t child = ::fork();
        if (child == 0) ::_exit(refused([&] { comm.barrier().wait(); }) ? 0 : 1);
        comm.barrier().wait();
        return went_well(child);
    });
    CHECK(right == std::vector<bool>(2, true));
}

TEST_CASE("fork: a child that outlives its killed parent does not keep the connections, whose end tells the other ranks") {
    const std::uint16_t port = gradsync_test::free_port();
    int alive[2] = {-1, -1};  // the child lives as long as this process holds the second end
    REQUIRE(::pipe(alive) == 0);
    const auto reports = gradsync_test::forked(2, [&](int rank) -> std::string {
        gs::TcpRendezvous rendezvous({.rank = rank, .size = 2, .port = port});
        const auto transport = gs::message_passing::make_tcp_transport(rendezvous, 10s);
        if (rank == 1) {
            if (::fork() == 0) {
                for (int descriptor = 3; descriptor < 256; ++descriptor)  // also those by which `forked` waits
                    if (descriptor != alive[0]) {
                        char type[64];
                        const std::string path = "/proc/self/fd/" + std::to_string(descriptor);
                        const auto length = ::readlink(path.c_str(), type, sizeof type);
                        if (length > 4 && std::string(type, 4) == "pipe") ::close(descriptor);
                    }
                char byte;
                while (::read(alive[0], &byte, 1) < 0) {
                }
                ::_exit(0);
            }
            ::kill(::getpid(), SIGKILL);
        }
        const auto until = std::chrono::steady_clock::now() + 10s;
        while (!transport->lost(1) && std::chrono::steady_clock::now() < until) {
            const std::lock_guard lock(transport->mutex());
            transport->poll();
        }
        return transport->lost(1) ? "lost" : "not lost";
    });
    ::close(alive[0]);
    ::close(alive[1]);
    CHECK(reports[0].text == "lost");
    CHECK(reports[1].signal == SIGKILL);
}

TEST_CASE("fail: a rank that passes on an Error leaves its culprit to blame; any other exception is its own") {
    for (const int culprit : {2, -1}) {
        int blamed = -1;
        gs::run_threads(3, [&](gs::ThreadBackend comm) {
            if (comm.rank() != 1) {
                while (comm.rank() == 2 && !comm.failed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
                if (comm.rank() == 2) return;
                try {
                    throw gs::Error(gs::Errc::storage, "a disk is full", {.peer = culprit});
                } catch (const gs::Error& error) {
                    comm.fail(error.what());
                }
                return;
            }
            try {
                comm.barrier().wait();
            } catch (const gs::Error& error) {
                blamed = error.context().peer;
            }
        });
        CHECK(blamed == (culprit == 2 ? 2 : 0));
    }
}

TEST_CASE("time limit: of several ranks that are late, the one that the others wait for is named") {
    const std::string wrong = gradsync_test::wrong_each_time([] {
        int blamed[] = {-1, -1};
        gs::run_threads(3, [&](gs::ThreadBackend comm) {
            gs::ThreadBackend part = comm.split(comm.rank() == 0 ? 0 : 1, comm.rank());
            comm.set_timeout(1s);
            part.set_timeout(1050ms);
            while (comm.rank() == 2 && !comm.failed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
            if (comm.rank() == 2) return;
            try {
                (comm.rank() == 0 ? comm : part).barrier().wait();
            } catch (const gs::Error& error) {
                blamed[comm.rank()] = error.context().peer;
            }
        });
        return blamed[0] == 2 && blamed[1] == 2 ? "" : "blamed: " + std::to_string(blamed[0]) + ", " + std::to_string(blamed[1]);
    });
    CHECK(wrong == "");
}
