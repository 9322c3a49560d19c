// ctest: TIMEOUT 60 PROCESSORS 2
// What hierarchical_engine.hpp does when a rank dies or stops; the conformance suite over MpiBackend shows the rest.
#include <gradsync/backend/hierarchical_engine.hpp>
#include <gradsync/bootstrap/mesh.hpp>
#include <gradsync/bootstrap/tcp_rendezvous.hpp>
#include <gradsync/message_passing/tcp_transport.hpp>

#include <doctest/doctest.h>

#include <chrono>
#include <csignal>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

#include "support/forked.hpp"
#include "support/ports.hpp"

namespace gs = gradsync;
namespace mp = gradsync::message_passing;
namespace sm = gradsync::shared_memory;
using namespace std::chrono_literals;

namespace {

constexpr int ranks = 4, ranks_here = 2;

/// `f(engine)` on two machines of two processes each, which find one another over TCP.
template <class F>
std::vector<gradsync_test::Report> on_two_machines(F&& f) {
    const std::uint16_t port = gradsync_test::free_port();
    std::vector<sm::Segment> segments;
    for (int machine = 0; machine < ranks / ranks_here; ++machine)
        segments.push_back(sm::ProcessWorld::create(ranks, sm::ProcessEngine::bytes(ranks_here)));
    return gradsync_test::forked(ranks, [&](int rank) -> std::string {
        const int machine = rank / ranks_here;
        gs::TcpRendezvous rendezvous({.rank = rank, .size = ranks, .port = port});
        auto processes = gs::bootstrap::exchange(rendezvous, gs::collective::ProcessIdentity::own());
        auto transport = std::make_unique<mp::TcpTransport>(gs::bootstrap::connect_mesh(rendezvous, 10s), rank);
        auto here =
            sm::ProcessWorld::join(sm::Segment::open(segments[static_cast<std::size_t>(machine)].ticket()), rank, ranks, ranks_here);
        auto everywhere =
            mp::MessageWorld::make(std::move(transport), std::move(processes), ranks_here, here->shared_state(), here->chores());
        auto flat = std::make_shared<mp::MessageEngine>(everywhere, std::vector<int>{0, 1, 2, 3}, rank, 0,
                                                        std::make_shared<mp::KnownMemory>(), 30s);
        auto local = std::make_shared<sm::ProcessEngine>(here, std::make_shared<sm::Regions>(),
                                                         std::vector<int>{machine * 2, machine * 2 + 1}, rank % 2, here->memory(), 0, 30s);
        const auto engine = gs::detail::HierarchicalEngine::combine(std::move(flat), std::move(local), {0, 0, 2, 2});
        return f(*engine);
    });
}

gs::collective::Call all_reduce(std::vector<float>& data) {
    gs::collective::Call call;
    call.operation = gs::collective::Operation::all_reduce;
    call.in = call.out = data.data();
    call.in_count = call.out_count = data.size();
    return call;
}

/// What a wait for an all-reduce of ones says; "" where it succeeds with the right sum.
std::string outcome(gs::collective::Engine& engine, std::vector<float>& data) {
    try {
        engine.wait(engine.start(all_reduce(data)));
    } catch (const gs::Error& error) {
        return error.code().message() + ", rank " + std::to_string(error.context().peer) + ": " + error.what();
    }
    for (const float x : data)
        if (x != ranks) return "wrong";
    return "";
}

}  // namespace

TEST_CASE(
    "HierarchicalEngine: a process that is killed is named by all others, on its machine and on the other one, long before the limit") {
    for (const int victim : {0, 3}) {
        const auto begun = std::chrono::steady_clock::now();
        const auto reports = on_two_machines([&](gs::collective::Engine& engine) -> std::string {
            for (int step = 0;; ++step) {
                if (engine.rank() == victim && step == 5) ::kill(::getpid(), SIGKILL);
                std::vector<float> data(300'001, 1.0f);
                if (const std::string said = outcome(engine, data); !said.empty()) return said;
            }
        });
        for (int r = 0; r < ranks; ++r) {
            const auto& report = reports[static_cast<std::size_t>(r)];
            CAPTURE(report.text);
            if (r == victim) CHECK(report.signal == SIGKILL);
            else CHECK(report.says("another rank failed, rank " + std::to_string(victim) + ": "));
            if (r != victim) CHECK(report.says("the process of rank " + std::to_string(victim) + " died while all_reduce("));
        }
        CHECK(std::chrono::steady_clock::now() - begun < 20s);
    }
}

TEST_CASE(
    "HierarchicalEngine: a rank that stops between the machines' stage and its own machine's last is named by its neighbour, who alone needs it") {
    constexpr int victim = 1, counterpart = 3;
    const auto reports = on_two_machines([&](gs::collective::Engine& engine) -> std::string {
        std::vector<float> data(1'000, 1.0f);
        if (const std::string said = outcome(engine, data); !said.empty()) return said;
        data.assign(data.size(), 1.0f);
        engine.set_timeout(3s);
        const std::uint64_t n = engine.start(all_reduce(data));
        const auto until = std::chrono::steady_clock::now() + (engine.rank() == counterpart ? 2000ms : 300ms);
        if (engine.rank() == counterpart)  // so long the victim cannot get through
            while (std::chrono::steady_clock::now() < until) ::usleep(10'000);
        if (engine.rank() == victim) {
            while (std::chrono::steady_clock::now() < until) engine.test(n);
            while (!engine.world().failed()) ::usleep(10'000);  // as if it was stopped by a signal
            return "";
        }
        try {
            engine.wait(n);
            return "complete";
        } catch (const gs::Error& error) {
            while (!engine.world().failed()) ::usleep(10'000);
            return error.what();
        }
    });
    const std::string named = "rank 1 started it, as all did, but did not go on";
    CAPTURE(reports[0].text);
    CHECK(reports[0].says(named));
    for (const int r : {2, 3}) {  // what they need the victim has sent with its first word
        const auto& report = reports[static_cast<std::size_t>(r)];
        CAPTURE(report.text);
        CHECK((report.says("complete") || report.says(named)));
    }
}

TEST_CASE(
    "HierarchicalEngine: at the time limit a rank that started a collective and stopped is named, also where it keeps others that are waited for") {
    for (const int victim : {1, 2}) {
        for (const std::size_t count :
             {std::size_t{5'000'000}, std::size_t{1000}}) {  // it stops in a stage that takes long, or before the first
            CAPTURE(victim);
            CAPTURE(count);
            const auto reports = on_two_machines([&](gs::collective::Engine& engine) -> std::string {
                std::vector<float> data(count, 1.0f), ready(1, 1.0f);
                if (const std::string said = outcome(engine, ready); !said.empty())
                    return said;  // all begin to wait at about the same time
                engine.set_timeout(3s);
                if (engine.rank() != victim) return outcome(engine, data);
                const std::uint64_t n = engine.start(all_reduce(data));
                for (int looks = 0; looks < 3 && count > 1000; ++looks) engine.test(n);
                while (!engine.world().failed()) ::usleep(10'000);  // as if it was stopped by a signal
                return "";
            });
            for (int r = 0; r < ranks; ++r) {
                const auto& report = reports[static_cast<std::size_t>(r)];
                CAPTURE(report.text);
                if (r == victim) continue;
                CHECK(report.says("time limit reached, rank " + std::to_string(victim) + ": "));
                CHECK(report.says(std::to_string(count) + " elements), collective #1: rank " + std::to_string(victim) +
                                  " started it, as all did, but did not go on"));
            }
        }
    }
}
