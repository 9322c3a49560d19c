// SPDX-License-Identifier: BSL-1.0
// ctest: COST 50
// What hierarchical_engine.hpp does when a rank dies or stops, and where machines have different numbers of ranks, more than one each; the
// conformance suites over MpiBackend and TcpBackend show the rest.
#include <gradsync/bootstrap/tcp_rendezvous.hpp>
#include <gradsync/collective/connect.hpp>
#include <gradsync/collective/hierarchical_engine.hpp>
#include <gradsync/collective/messages/tcp_transport.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "support/attempts.hpp"
#include "support/forked.hpp"
#include "support/ports.hpp"
#include "support/slow_build.hpp"
#include "support/sum_tree.hpp"

namespace gs = gradsync;
using namespace std::chrono_literals;

namespace {

using gs::message_passing::Transport;

constexpr int ranks = 4;

/// `f(engine)` on processes of several machines, which find one another over TCP. `machines`: by rank, what names its machine.
/// `in_turns`: no two ranks may be able to add up first. `wrap`: what is to stand between the engine and the network.
template <class F>
std::vector<gradsync_test::Report> on_machines(const std::vector<int>& machines, F&& f, bool in_turns = false,
                                               std::unique_ptr<Transport> (*wrap)(std::unique_ptr<Transport>) = nullptr) {
    const std::uint16_t port = gradsync_test::free_port();
    const auto size = static_cast<int>(machines.size());
    return gradsync_test::forked(size, [&](int rank) -> std::string {
        gs::TcpRendezvous rendezvous({.rank = rank, .size = size, .port = port});
        const gs::detail::Placement placement(rendezvous, machines[static_cast<std::size_t>(rank)]);
        const auto connection = gs::detail::connect(rendezvous, placement, {.timeout = 60s, .shared_memory = true}, nullptr, [&] {
            auto tcp = gs::message_passing::make_tcp_transport(rendezvous, 10s);
            return wrap == nullptr ? std::move(tcp) : wrap(std::move(tcp));
        });
        if (!in_turns && connection.paths.describe().find("share memory") == std::string::npos) return connection.paths.describe();
        return f(*connection.engine);
    });
}
template <class F>
std::vector<gradsync_test::Report> on_two_machines(F&& f) {
    return on_machines({0, 0, 1, 1}, std::forward<F>(f));
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
        return (error.errc() == gs::Errc::timeout ? "time limit reached, rank " : "another rank failed, rank ") +
               std::to_string(error.context().peer) + ": " + error.what();
    }
    for (const float x : data)
        if (x != static_cast<float>(engine.size())) return "wrong";
    return "";
}

/// What rank r brings to element i.
double brought(std::size_t i, int r) { return static_cast<double>((i * 7 + static_cast<std::size_t>(r) * 13) % 101); }

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
        CHECK(std::chrono::steady_clock::now() - begun < 50s);
    }
}

TEST_CASE(
    "HierarchicalEngine: a rank that stops between the machines' stage and its own machine's last is named by its neighbour, who alone needs "
    "it, and not the neighbour, for whom the others wait then") {
    constexpr int victim = 1, counterpart = 3;
    const auto reports = on_two_machines([&](gs::collective::Engine& engine) -> std::string {
        std::vector<float> data(1'000, 1.0f);
        if (const std::string said = outcome(engine, data); !said.empty()) return said;
        data.assign(data.size(), 1.0f);
        engine.set_timeout(5s);
        const std::uint64_t n = engine.start(all_reduce(data));
        const auto until = std::chrono::steady_clock::now() + (engine.rank() == victim ? 300ms : 2000ms);
        while (std::chrono::steady_clock::now() < until) {
            if (engine.rank() == counterpart) ::usleep(10'000);  // so long the victim cannot get through
            else if (!engine.test(n)) ::usleep(100);
        }
        if (engine.rank() == victim) {
            while (!engine.world().failed()) ::usleep(10'000);  // as if it was stopped by a signal
            return "";
        }
        try {
            engine.wait(n);
        } catch (const gs::Error& error) {
            return "rank " + std::to_string(error.context().peer) + ": " + error.what();
        }
        return "complete, then " + outcome(engine, data);  // what these needed the victim has sent with its first word
    });
    for (const int r : {0, 2, 3}) {
        const auto& report = reports[static_cast<std::size_t>(r)];
        CAPTURE(report.text);
        CHECK(report.says("rank 1: "));
        // The neighbour's limit ends a little before that of those who wait in the next collective; on busy cores perhaps after it.
        const bool by_neighbour = report.says("rank 1 started it like all others, but made no progress");
        CHECK((by_neighbour || report.says("rank 1 did not start it")));
    }
}

TEST_CASE(
    "HierarchicalEngine: a rank that learns of a failure among its machine's ranks tells the other machines before its program ends") {
    const auto reports = on_two_machines([&](gs::collective::Engine& engine) -> std::string {
        std::vector<float> data(100, 1.0f);
        gs::collective::Group here{.color = engine.rank() / 2};
        for (int r = 0; r < ranks; ++r)
            if (r / 2 == here.color) here.add(r, r == engine.rank());
        const auto local = engine.split(here);
        if (engine.rank() == 3) {
            ::usleep(4'000'000);  // as if it was stopped by a signal
            ::_exit(0);
        }
        local->set_timeout(1s);
        if (engine.rank() < 2) return outcome(engine, data);
        (void)outcome(*local, data);
        ::_exit(0);
    });
    for (const std::size_t r : {0u, 1u}) {
        CAPTURE(reports[r].text);
        CHECK(reports[r].says(", rank 3: "));
    }
}

TEST_CASE(
    "HierarchicalEngine: at the time limit a rank that started a collective and stopped is named, also where it keeps others that are waited for") {
    for (const int victim : {1, 2}) {
        for (const std::size_t count :
             {std::size_t{5'000'000}, std::size_t{1000}}) {  // it stops in a stage that takes long, or before the first
            CAPTURE(victim);
            CAPTURE(count);
            const std::string wrong = gradsync_test::wrong_each_time([&] {
                const auto reports = on_two_machines([&](gs::collective::Engine& engine) -> std::string {
                    std::vector<float> data(count, 1.0f), ready(1, 1.0f);
                    if (const std::string said = outcome(engine, ready); !said.empty())
                        return said;  // all begin to wait at about the same time
                    engine.set_timeout(5s);
                    if (engine.rank() != victim) return outcome(engine, data);
                    const std::uint64_t n = engine.start(all_reduce(data));
                    for (int looks = 0; looks < 3 && count > 1000; ++looks) engine.test(n);
                    while (!engine.world().failed()) ::usleep(10'000);  // as if it was stopped by a signal
                    return "";
                });
                const std::string name = "rank " + std::to_string(victim);
                std::string silent;
                for (int r = 0; r < ranks; ++r)
                    for (const std::string& words :
                         {"time limit reached, " + name + ": ", std::to_string(count) + " elements), collective #1: " + name +
                                                                    " started it like all others, but made no progress"})
                        if (r != victim) silent += gradsync_test::if_silent(r, reports[static_cast<std::size_t>(r)].text, words);
                return silent;
            });
            CHECK(wrong == "");
        }
    }
}

TEST_CASE("HierarchicalEngine: machines with different numbers of ranks get the right results, also with more in flight than it keeps") {
    for (const auto& machines : {std::vector{0, 0, 0, 1, 1}, std::vector{0, 0, 0, 0, 1, 1}, std::vector{1, 1, 0}}) {
        if (gradsync_test::slow_build && machines.size() == 6) continue;
        const auto reports = on_machines(machines, [&](gs::collective::Engine& engine) -> std::string {
            const int size = engine.size();
            for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{5}, std::size_t{100'003}}) {
                for (const gs::ReduceOp op : {gs::ReduceOp::sum, gs::ReduceOp::max, gs::ReduceOp::mean}) {
                    const std::size_t calls = count < 1000 ? 150 : 1;
                    std::vector<std::vector<double>> in(calls, std::vector<double>(count)), out(calls, std::vector<double>(count, -1));
                    std::vector<std::uint64_t> numbers;
                    for (std::size_t c = 0; c < calls; ++c) {
                        for (std::size_t i = 0; i < count; ++i) in[c][i] = brought(i + c, engine.rank());
                        gs::collective::Call call;
                        call.operation = gs::collective::Operation::all_reduce;
                        call.dtype = gs::DType::f64;
                        gs::kernel::register_kernels<gs::DType::f64>();
                        call.op = op;
                        // Rank r brings r samples, rank 0 none.
                        if (op == gs::ReduceOp::mean) call.contribution = {1.0 * engine.rank(), 1.0 * engine.rank()};
                        call.in = in[c].data();
                        call.out = out[c].data();
                        call.in_count = call.out_count = count;
                        numbers.push_back(engine.start(call));
                    }
                    for (const std::uint64_t n : numbers) engine.wait(n);
                    for (std::size_t c = 0; c < calls; ++c)
                        for (std::size_t i = 0; i < count; ++i) {
                            double sum = 0, most = 0, weighted = 0, weight = 0;
                            for (int r = 0; r < size; ++r) {
                                sum += brought(i + c, r);
                                most = std::max(most, brought(i + c, r));
                                weighted += r * brought(i + c, r);
                                weight += r;
                            }
                            const double expected = op == gs::ReduceOp::sum ? sum : op == gs::ReduceOp::max ? most : weighted / weight;
                            if (std::abs(out[c][i] - expected) > 1e-9)
                                return "element " + std::to_string(i) + " of " + std::to_string(count) + " in call " + std::to_string(c) +
                                       " of op " + std::to_string(static_cast<int>(op)) + ": " + std::to_string(out[c][i]) +
                                       " instead of " + std::to_string(expected);
                        }
                }
            }
            return "right";
        });
        for (const auto& report : reports) CHECK(report.text == "right");
    }
}

TEST_CASE("HierarchicalEngine: sums, and means with weights, have the bits of the tree, rounded once, wherever ranks and elements lie") {
    for (const auto& machines : {std::vector{0, 0, 1, 1}, std::vector{0, 0, 0, 1}, std::vector{5, 5, 5, 5, 2, 2},
                                 std::vector{0, 0, 0, 0, 1, 1, 1}, std::vector{1, 1, 0, 1, 2, 2}}) {
        constexpr std::size_t count = 1000;
        const auto value = [](std::size_t i, int r) {
            return 1.0f / static_cast<float>((i * 31 + static_cast<std::size_t>(r) * 17) % 1009 + 1);
        };
        const auto reports = on_machines(machines, [&](gs::collective::Engine& engine) -> std::string {
            const auto check = [&]<class T>(T, const char* name, bool mean) -> std::string {
                gs::kernel::register_kernels<gs::dtype_of<T>>();
                const auto scale = [&](int r) { return mean ? 0.1f * static_cast<float>(r % 3) : 1; };  // of some ranks 0
                std::vector<T> data(count);
                for (std::size_t i = 0; i < count; ++i) data[i] = T(value(i, engine.rank()));
                gs::collective::Call call{.in = data.data(), .out = data.data(), .in_count = count, .out_count = count};
                call.operation = gs::collective::Operation::all_reduce;
                call.dtype = gs::dtype_of<T>;
                if (mean) call.op = gs::ReduceOp::mean;
                if (mean) call.contribution = {static_cast<double>(scale(engine.rank())), 0.3 * engine.rank()};
                engine.wait(engine.start(call));
                const auto size = static_cast<std::size_t>(engine.size());
                const auto weight = [&](std::size_t r) { return std::optional(0.3 * static_cast<double>(r)); };
                const double weights = *gradsync_test::tree_sum(0, size, weight, [](double a, double b) { return std::optional(a + b); });
                for (std::size_t i = 0; i < count; ++i) {
                    const auto leaf = [&](std::size_t r) {
                        const float s = scale(static_cast<int>(r));
                        return s == 0 ? std::nullopt : std::optional(static_cast<float>(T(value(i, static_cast<int>(r)))) * s);
                    };
                    float sum = *gradsync_test::tree_sum(0, size, leaf, [](float a, float b) { return std::optional(a + b); });
                    if (mean) sum *= static_cast<float>(1 / weights);
                    if (static_cast<float>(data[i]) != static_cast<float>(T(sum)))
                        return std::string(name) + (mean ? ", mean: " : ", sum: ") + "element " + std::to_string(i) + " has other bits";
                }
                return "";
            };
            for (const bool mean : {false, true}) {
                const std::string wrong =
                    check(float(), "f32", mean) + check(gs::BFloat16(), "bf16", mean) + check(gs::Float16(), "f16", mean);
                if (!wrong.empty()) return wrong;
            }
            return "right";
        });
        for (const auto& report : reports) CHECK(report.text == "right");
    }
}

TEST_CASE("HierarchicalEngine: ranks of one machine that are split off share memory, whatever their teams were") {
    for (const auto& machines : {std::vector{0, 0, 0, 1}, std::vector{0, 1, 0, 1}}) {
        const auto reports = on_machines(
            machines,
            [&](gs::collective::Engine& engine) -> std::string {
                gs::collective::Group group;
                for (int r = 0; r < engine.size(); ++r) {
                    if (machines[static_cast<std::size_t>(r)] != machines[static_cast<std::size_t>(engine.rank())]) continue;
                    if (r == engine.rank()) group.rank = static_cast<int>(group.members.size());
                    group.members.push_back(r);
                }
                const auto own = engine.split(group);
                if (dynamic_cast<gs::shared_memory::ProcessEngine*>(own.get()) == nullptr) return "no shared memory";
                std::vector<float> data(100, 1.0f);
                const std::string said = outcome(*own, data);
                return said.empty() ? "right" : said;
            },
            true);
        for (const auto& report : reports) CHECK(report.text == "right");
    }
}

// The checks of an undefined-behaviour sanitizer need descriptors themselves.
#if defined(__has_feature)
#if __has_feature(undefined_behavior_sanitizer)
#define GRADSYNC_TEST_NEEDS_DESCRIPTORS
#endif
#endif
#ifndef GRADSYNC_TEST_NEEDS_DESCRIPTORS
TEST_CASE("HierarchicalEngine: where one rank gets no memory for a split, all blame that rank") {
    for (const int victim : {0, 1, 2}) {
        CAPTURE(victim);
        const auto reports = on_machines({0, 0, 1, 1}, [&](gs::collective::Engine& engine) -> std::string {
            if (engine.rank() == victim) {
                const rlimit limit{128, 128};
                ::setrlimit(RLIMIT_NOFILE, &limit);
                while (::open("/dev/null", O_RDONLY | O_CLOEXEC) >= 0) {
                }
            }
            try {
                engine.split(gs::collective::Group::of_all(engine.size(), engine.rank()));
            } catch (const gs::Error& error) {
                return "blames " + std::to_string(error.context().peer);
            }
            return "blames nobody";
        });
        for (const auto& report : reports) CHECK(report.text == "blames " + std::to_string(victim));
    }
}
#endif

TEST_CASE(
    "HierarchicalEngine names a rank that dies or stops, with a shard to send or without, if machines have different numbers of ranks") {
    const std::vector<int> machines{0, 0, 0, 0, 1, 1};
    for (const int victim : {0, 2, 4})  // rank 2 has no shard
        for (const bool dies : {true, false}) {
            CAPTURE(victim);
            CAPTURE(dies);
            const std::string wrong = gradsync_test::wrong_each_time(
                [&] {
                    const auto reports = on_machines(machines, [&](gs::collective::Engine& engine) -> std::string {
                        std::vector<float> data(300'001, 1.0f);
                        for (int step = 0; step < 3; ++step) {
                            data.assign(data.size(), 1.0f);
                            if (const std::string said = outcome(engine, data); !said.empty()) return said;
                        }
                        data.assign(data.size(), 1.0f);
                        engine.set_timeout(dies ? std::chrono::nanoseconds(60s) : std::chrono::nanoseconds(5s));
                        if (engine.rank() != victim) return outcome(engine, data);
                        if (dies) ::kill(::getpid(), SIGKILL);
                        const std::uint64_t n = engine.start(all_reduce(data));
                        for (int looks = 0; looks < 3; ++looks) engine.test(n);
                        while (!engine.world().failed()) ::usleep(10'000);  // as if it was stopped by a signal
                        return "";
                    });
                    const std::string words =
                        (dies ? "another rank failed, rank " : "time limit reached, rank ") + std::to_string(victim) + ": ";
                    std::string silent;
                    for (int r = 0; r < static_cast<int>(machines.size()); ++r)
                        if (r != victim) silent += gradsync_test::if_silent(r, reports[static_cast<std::size_t>(r)].text, words);
                    return silent;
                },
                dies ? 1 : 3);
            CHECK(wrong == "");
        }
}

namespace {

/// What ranks 0 and 2 contribute to each other's share goes where nobody asks for it.
class LosesContributions final : public Transport {
public:
    explicit LosesContributions(std::unique_ptr<Transport> tcp) : tcp_(std::move(tcp)) {
        rank_ = tcp_->rank(), size_ = tcp_->size(), last_stream_ = tcp_->last_stream();
    }
    const char* refusal() const noexcept override { return tcp_->refusal(); }
    std::mutex& mutex() noexcept override { return tcp_->mutex(); }
    bool sends_in_poll() const noexcept override { return tcp_->sends_in_poll(); }
    Ticket send(int to, int stream, const void* data, std::size_t bytes, bool known) override {
        const bool loses = bytes > 50'000 && rank() + to == 2 && to != 1;
        return tcp_->send(to, loses ? last_stream() : stream, data, bytes, known);
    }
    Ticket receive(int from, int stream, void* data, std::size_t room, std::size_t* came, std::size_t known) override {
        return tcp_->receive(from, stream, data, room, came, known);
    }
    bool poll() override { return tcp_->poll(); }
    bool finish(Ticket ticket) override { return tcp_->finish(ticket); }
    bool give_up(Ticket ticket) noexcept override { return tcp_->give_up(ticket); }
    bool release(const void* data, std::size_t bytes) noexcept override { return tcp_->release(data, bytes); }
    bool ends_alone() const noexcept override { return true; }

private:
    std::unique_ptr<Transport> tcp_;
};

}  // namespace

TEST_CASE("HierarchicalEngine: a rank that cannot tell who stopped leaves time to one that can") {
    const std::string wrong = gradsync_test::wrong_each_time([] {
        const auto reports = on_machines(
            {0, 0, 1, 1, 2},
            [&](gs::collective::Engine& engine) -> std::string {
                std::vector<float> data(300'000, 1.0f);
                engine.set_timeout(3s);
                if (engine.rank() != 0) return outcome(engine, data);
                const std::uint64_t n = engine.start(all_reduce(data));
                for (const auto until = std::chrono::steady_clock::now() + 500ms; std::chrono::steady_clock::now() < until;) engine.test(n);
                while (!engine.world().failed()) ::usleep(10'000);  // as if it was stopped by a signal
                return "";
            },
            false, [](std::unique_ptr<Transport> tcp) { return std::unique_ptr<Transport>(new LosesContributions(std::move(tcp))); });
        std::string silent;
        for (const int r : {1, 2, 3, 4})
            silent += gradsync_test::if_silent(r, reports[static_cast<std::size_t>(r)].text, "time limit reached, rank 0: ");
        return silent;
    });
    CHECK(wrong == "");
}
