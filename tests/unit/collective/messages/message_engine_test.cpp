// SPDX-License-Identifier: BSL-1.0
// ctest: COST 45
// What the suite of backends does not reach: many rounds, known memory, a transport that fails or refuses the thread.
#include <gradsync/collective/messages/message_engine.hpp>
#include <gradsync/collective/messages/tcp_transport.hpp>

#include <doctest/doctest.h>

#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <ranges>
#include <span>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include <gradsync/kernel/host_buffer.hpp>

#include "support/attempts.hpp"
#include "support/loopback_transport.hpp"

namespace gs = gradsync;
namespace mp = gradsync::message_passing;
using gradsync_test::if_silent;
using gradsync_test::LoopbackNetwork;
using gradsync_test::LoopbackTransport;
using gradsync_test::wrong_each_time;
using gs::collective::Call;
using gs::collective::Operation;
using gs::collective::Shared;
using namespace std::chrono_literals;

namespace {

Shared<mp::MessageEngine> engine(std::unique_ptr<mp::Transport> transport, std::chrono::nanoseconds limit = 30s,
                                 gs::List<gs::collective::ProcessIdentity> processes = {}) {
    const int rank = transport->rank(), size = transport->size();
    gs::List<int> ranks(static_cast<std::size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
    processes.resize(ranks.size());
    auto world = mp::MessageWorld::make(std::move(transport), std::move(processes), size);
    return Shared<mp::MessageEngine>::make(std::move(world), std::move(ranks), rank, 0, Shared<mp::KnownMemory>::make(), limit);
}

/// Runs `f(engine)` on a thread a rank; the texts of what they threw, "" where nothing.
std::vector<std::string> run(const std::shared_ptr<LoopbackNetwork>& network, std::chrono::nanoseconds limit,
                             const std::function<void(mp::MessageEngine&)>& f, gs::collective::ProcessIdentity process = {}) {
    std::vector<std::string> errors(static_cast<std::size_t>(network->size));
    std::vector<std::thread> threads;
    std::atomic<int> there{0};
    for (int rank = 0; rank < network->size; ++rank)
        threads.emplace_back([&, rank] {
            const auto own = engine(std::unique_ptr<mp::Transport>(new LoopbackTransport(network, rank)), limit,
                                    gs::List<gs::collective::ProcessIdentity>(static_cast<std::size_t>(network->size), process));
            for (++there; there < network->size;) std::this_thread::yield();  // they begin together
            try {
                f(*own);
            } catch (const std::exception& error) {
                errors[static_cast<std::size_t>(rank)] = error.what();
            }
        });
    for (std::thread& thread : threads) thread.join();
    return errors;
}

Call all_reduce(void* data, std::size_t count) {
    Call call;
    call.operation = Operation::all_reduce;
    call.in = call.out = data;
    call.in_count = call.out_count = count;
    return call;
}

const std::vector<std::string> none(3);

/// Counts the ranks whose wait has ended, with an error or without.
struct GivesUp {
    std::atomic<int>& count;
    ~GivesUp() { ++count; }
};

/// A transport that does not let the thread in.
class LockedTransport : public mp::Transport {
public:
    LockedTransport() { size_ = 2; }
    const char* refusal() const noexcept override { return closed ? "ask for a key" : nullptr; }
    std::mutex& mutex() noexcept override { return mutex_; }
    Ticket send(int, int, const void*, std::size_t, bool) override { return 0; }
    Ticket receive(int, int, void*, std::size_t, std::size_t*, std::size_t) override { return 1; }
    bool poll() override {
        CHECK(!closed);
        return false;
    }
    bool finish(Ticket) override { return false; }
    bool give_up(Ticket) noexcept override { return true; }

    std::atomic<bool> closed{false};

private:
    std::mutex mutex_;
};

}  // namespace

TEST_CASE("messages: a buffer of many rounds is summed in registered memory and in other memory") {
    constexpr std::size_t count = 6'000'001;  // several pieces of each share, the last ones shorter
    for (const int size : {2, 3})
        for (const bool known : {true, false}) {
            const auto errors = run(std::make_shared<LoopbackNetwork>(size), 30s, [&](mp::MessageEngine& own) {
                gs::collective::Memory lent = own.allocate(known ? count * sizeof(float) : 0);
                std::vector<float> apart(known ? 0 : count);
                auto* const data = known ? static_cast<float*>(lent.data()) : apart.data();
                for (std::size_t i = 0; i < count; ++i) data[i] = static_cast<float>(i % 1000 + static_cast<std::size_t>(own.rank()));
                own.wait(own.start(all_reduce(data, count)));
                std::size_t wrong = 0;
                const auto ranks = static_cast<std::size_t>(own.size());
                for (std::size_t i = 0; i < count; ++i)
                    wrong += data[i] != static_cast<float>(ranks * (i % 1000) + ranks * (ranks - 1) / 2);
                if (wrong != 0) throw std::runtime_error(std::to_string(wrong) + " elements are wrong");
            });
            CHECK(errors == std::vector<std::string>(static_cast<std::size_t>(size)));
        }
}

namespace {

/// `known`: what follows a hello leaves from the memory that the result goes to.
void check_little_data(gs::collective::ProcessIdentity process, bool known) {
    CAPTURE(known);
    const auto network = std::make_shared<LoopbackNetwork>(3);
    network->quick_bytes = 1000;
    const auto errors = run(
        network, 30s,
        [&](mp::MessageEngine& own) {
            const auto rank = static_cast<std::size_t>(own.rank());
            constexpr std::size_t most = 600;
            std::vector<std::span<float>> data;
            std::vector<std::uint64_t> numbers;
            const gs::collective::Memory lent = own.allocate(known ? most * most * sizeof(float) : 0);
            std::vector<float> apart(known ? 0 : most * most);
            const std::span<float> memory(known ? static_cast<float*>(lent.data()) : apart.data(), most * most);
            for (std::size_t count = 0; count <= most; count += 7) {  // the hello is one message to 232 elements
                data.push_back(memory.subspan(data.size() * most, count));
                std::ranges::fill(data.back(), static_cast<float>(count + rank));
                Call call = all_reduce(data.back().data(), count);
                if (count % 2 == 1) {  // rank 1 brings nothing
                    call.op = gs::ReduceOp::mean;
                    if (rank == 1) call.contribution = {0, 0};
                } else if (count % 4 == 2) {
                    call.operation = Operation::broadcast;
                    call.root = 2;
                } else if (count % 8 == 4) {
                    call.operation = Operation::reduce;
                    call.root = 1;
                    if (rank != 1) call.out = nullptr, call.out_count = 0;
                }
                numbers.push_back(own.start(call));
            }
            Call barrier;
            own.wait(own.start(barrier));
            for (const std::uint64_t n : numbers) own.wait(n);
            for (const std::span<float> values : data) {
                const auto count = static_cast<float>(values.size());
                const bool keeps_own = values.size() % 8 == 4 && rank != 1;
                const float expected = values.size() % 2 == 1   ? count + 1
                                       : values.size() % 4 == 2 ? count + 2
                                       : keeps_own              ? count + static_cast<float>(rank)
                                                                : 3 * count + 3;
                if (std::ranges::count(values, expected) != std::ssize(values))
                    throw std::runtime_error(std::to_string(values.size()) + " elements are wrong");
            }
        },
        process);
    CHECK(errors == none);
}

/// Three of these have to take turns: little data goes by way of rank 0.
constexpr gs::collective::ProcessIdentity on_two_cores{.machine = 1, .cores = 2};

}  // namespace

TEST_CASE("messages: little data travels with the hello, or follows it") {
    for (const bool known : {false, true}) check_little_data({}, known);
}
TEST_CASE("messages: little data travels by way of one rank where ranks share cores") {
    for (const bool known : {false, true}) check_little_data(on_two_cores, known);
}

TEST_CASE("messages: what a quick hello has no room for follows in one message") {
    const auto sent = [](std::size_t count, gs::collective::ProcessIdentity process = {}) {
        const auto network = std::make_shared<LoopbackNetwork>(3);
        network->quick_bytes = 1000;
        std::vector<std::vector<float>> data(3, std::vector<float>(count, 1.0f));
        const auto errors = run(
            network, 30s,
            [&](mp::MessageEngine& own) {
                std::vector<float>& values = data[static_cast<std::size_t>(own.rank())];
                own.wait(own.start(all_reduce(values.data(), values.size())));
            },
            process);
        CHECK(errors == none);
        return network->sent.load();
    };
    CHECK(sent(0) == 6);  // from each of three ranks to each
    CHECK(sent(200) == 6);
    CHECK(sent(300) == 12);
    CHECK(sent(600) == 12);
    CHECK(sent(2700) == 12);
    CHECK(sent(0, on_two_cores) == 4);  // to rank 0, and back
    CHECK(sent(200, on_two_cores) == 4);
    CHECK(sent(300, on_two_cores) == 8);
    CHECK(sent(2700, on_two_cores) == 8);
}

TEST_CASE("messages: calls that differ are named, however long each one's hello is") {
    const auto changed = [](Call call, int how, std::size_t count) {
        call.in_count = call.out_count = count;
        if (how == 1) call.op = gs::ReduceOp::max;
        if (how == 2) call.dtype = gs::DType::i32;
        if (how == 3) call.operation = Operation::broadcast;
        return call;
    };
    std::vector<std::vector<float>> buffers(3, std::vector<float>(300'000));  // of the largest: rounds beside hellos
    const std::size_t counts[] = {1, 300, 600, 300'000};                      // in one message, in two, and without data, beside rounds
    for (const auto& process : {gs::collective::ProcessIdentity{}, on_two_cores})
        for (const std::size_t count : counts)
            for (const std::size_t other : counts)
                for (const int how : {0, 1, 2, 3}) {
                    if (how == 0 && other == count) continue;
                    const auto network = std::make_shared<LoopbackNetwork>(3);
                    network->quick_bytes = 1000;
                    const auto errors = run(
                        network, 30s,
                        [&](mp::MessageEngine& own) {
                            const Call call = all_reduce(buffers[static_cast<std::size_t>(own.rank())].data(), count);
                            own.wait(own.start(own.rank() == 1 ? changed(call, how, other) : call));
                        },
                        process);
                    CAPTURE(count);
                    CAPTURE(other);
                    CAPTURE(how);
                    for (const std::string& error : errors) {
                        CHECK(error.find("collective #0 differs: rank 0 started all_reduce(sum, f32, " + std::to_string(count) +
                                         " elements), rank 1 started ") != std::string::npos);
                        CHECK(error.find(std::to_string(other) + " elements") != std::string::npos);
                    }
                }
}

TEST_CASE("messages: what a rank has seen complete when it fails is complete for the other one, however long its hello is") {
    for (const std::size_t count : {std::size_t{1}, std::size_t{300}}) {
        CAPTURE(count);
        const auto network = std::make_shared<LoopbackNetwork>(2);
        network->quick_bytes = 1000;
        const auto zero = engine(std::unique_ptr<mp::Transport>(new LoopbackTransport(network, 0))),
                   one = engine(std::unique_ptr<mp::Transport>(new LoopbackTransport(network, 1)));
        std::vector<float> own(count, 1.0f), others(count, 2.0f);
        const std::uint64_t number = zero->start(all_reduce(own.data(), count));
        one->wait(one->start(all_reduce(others.data(), count)));
        one->fail({gs::Errc::peer_failed, 1, "rank 1 has had enough"});
        CHECK_NOTHROW(zero->wait(number));
        CHECK(own == std::vector<float>(count, 3.0f));
        CHECK_THROWS_AS(zero->wait(zero->start(all_reduce(own.data(), count))), gs::Error);
    }
}

TEST_CASE("messages: what came before the news of a failure is complete also where another communicator has taken in both") {
    for (const bool waits : {true, false}) {
        CAPTURE(waits);
        const auto network = std::make_shared<LoopbackNetwork>(2);
        const auto world = [&](int rank) {
            return mp::MessageWorld::make(std::unique_ptr<mp::Transport>(new LoopbackTransport(network, rank)),
                                          gs::List<gs::collective::ProcessIdentity>(2), 2);
        };
        const auto communicator = [](const auto& of, int rank, int number) {
            return Shared<mp::MessageEngine>::make(of, gs::List<int>{0, 1}, rank, number, Shared<mp::KnownMemory>::make(), 30s);
        };
        const auto zeros = world(0);
        const auto zero = communicator(zeros, 0, 0), other = communicator(zeros, 0, 1), one = communicator(world(1), 1, 0);
        float own = 1, others = 2, next = 3;
        const std::uint64_t number = zero->start(all_reduce(&own, 1)), second = zero->start(all_reduce(&next, 1));
        one->wait(one->start(all_reduce(&others, 1)));
        one->fail({gs::Errc::peer_failed, 1, "rank 1 has had enough"});
        other->progress();
        REQUIRE(zero->world().failed());
        if (waits) CHECK_NOTHROW(zero->wait(number));
        else CHECK(zero->test(number));
        CHECK(own == 3);
        CHECK_THROWS_AS(zero->wait(second), gs::Error);
    }
}

TEST_CASE("messages: once a rank was told of a failure nothing is written into its buffers, whatever comes") {
    const auto network = std::make_shared<LoopbackNetwork>(3);
    std::vector<Shared<mp::MessageEngine>> ranks;
    for (int r = 0; r < 3; ++r) ranks.push_back(engine(std::unique_ptr<mp::Transport>(new LoopbackTransport(network, r))));
    std::vector<float> values{1, 2, 4};
    const std::uint64_t number = ranks[0]->start(all_reduce(&values[0], 1));
    ranks[2]->start(all_reduce(&values[2], 1));
    ranks[2]->fail({gs::Errc::peer_failed, 2, "rank 2 has had enough"});
    CHECK_THROWS_AS(ranks[0]->wait(number), gs::Error);
    values[0] = 100;                             // it is somebody else's by now
    ranks[1]->start(all_reduce(&values[1], 1));  // it has not heard yet
    ranks[0]->abandon(number);
    ranks[0]->progress();
    ranks[0]->world().fail({gs::Errc::peer_failed, 0, "again"});
    CHECK_THROWS_AS(ranks[0]->test(number), gs::Error);
    CHECK(values[0] == 100);
}

TEST_CASE("messages: at the time limit only ranks that did not start are named, also if hellos are followed by more") {
    const std::string wrong = wrong_each_time([] {
        const auto network = std::make_shared<LoopbackNetwork>(3);
        network->quick_bytes = 300;
        const auto errors = run(network, 1s, [&](mp::MessageEngine& own) {
            std::vector<float> values(500);
            if (own.rank() == 2) {
                while (!own.world().failed()) own.progress();
            } else {
                own.wait(own.start(all_reduce(values.data(), values.size())));
            }
        });
        return if_silent(0, errors[0], "rank 2 did not start it") + if_silent(1, errors[1], "rank 2 did not start it");
    });
    CHECK(wrong == "");
}

TEST_CASE("messages: at the time limit a rank that started it and stopped is named, with the collective that it keeps") {
    for (const std::size_t count : {std::size_t{100'000}, std::size_t{1'000'000}}) {  // one round, many
        CAPTURE(count);
        const std::string wrong = wrong_each_time([&] {
            const auto network = std::make_shared<LoopbackNetwork>(3);
            network->quick_bytes = 300;
            std::atomic<int> given_up{0};
            const auto errors = run(network, 1s, [&](mp::MessageEngine& own) {
                std::vector<float> values(count), more(count), last(1);
                float first = 1;
                own.wait(own.start(all_reduce(&first, 1)));
                const std::uint64_t stuck = own.start(all_reduce(values.data(), count));
                own.start(all_reduce(more.data(), count));
                own.start(all_reduce(last.data(), 1));
                while (own.rank() == 1 && given_up < 2) std::this_thread::sleep_for(1ms);
                const GivesUp gives_up{given_up};
                own.wait(stuck);
            });
            std::string silent;
            for (const int rank : {0, 2})
                for (const char* const words : {"rank 1 started it like all others, but made no progress", "#1"})
                    silent += if_silent(rank, errors[static_cast<std::size_t>(rank)], words);
            return silent;
        });
        CHECK(wrong == "");
    }
}

namespace {

/// What ranks 0 and 1 contribute to each other's share is on its way for ever, so that rank 1 stops before its share is reduced.
class LosesContributions : public LoopbackTransport {
public:
    using LoopbackTransport::LoopbackTransport;
    Ticket send(int to, int stream, const void* data, std::size_t bytes, bool known) override {
        return LoopbackTransport::send(to, rank() + to == 1 && bytes > 10'000 ? last_stream() : stream, data, bytes, known);
    }
};

}  // namespace

TEST_CASE("messages: a rank that cannot tell who stopped leaves time to one that can, though that one's limit ends later") {
    const std::string wrong = wrong_each_time([] {
        const auto network = std::make_shared<LoopbackNetwork>(3);
        std::string errors[3];
        std::atomic<int> given_up{0};
        std::vector<std::thread> threads;
        for (int rank = 0; rank < 3; ++rank)
            threads.emplace_back([&, rank] {
                const auto own = engine(std::unique_ptr<mp::Transport>(new LosesContributions(network, rank)), rank == 0 ? 1500ms : 1000ms);
                std::vector<float> values(100'000);
                const std::uint64_t stuck = own->start(all_reduce(values.data(), values.size()));
                const auto stop = std::chrono::steady_clock::now() + 500ms;
                while (rank == 1 && given_up < 2)
                    std::chrono::steady_clock::now() < stop ? own->progress() : std::this_thread::sleep_for(1ms);
                const GivesUp gives_up{given_up};
                try {
                    own->wait(stuck);
                } catch (const gs::Error& error) {
                    errors[rank] = error.what();
                }
            });
        for (std::thread& thread : threads) thread.join();
        std::string silent;
        for (const int rank : {0, 2}) silent += if_silent(rank, errors[rank], "rank 1 started it like all others, but made no progress");
        return silent;
    });
    CHECK(wrong == "");
}

TEST_CASE("messages: where one rank reduces for all, it alone knows who stopped, and the others leave it time to say so") {
    for (const int victim : {0, 1, 2}) {
        CAPTURE(victim);
        const std::string wrong = wrong_each_time([&] {
            const auto network = std::make_shared<LoopbackNetwork>(3);
            network->quick_bytes = 300;
            std::atomic<int> given_up{0};
            const auto errors = run(
                network, 1s,
                [&](mp::MessageEngine& own) {
                    std::vector<float> values(20'000);
                    const std::uint64_t stuck = own.start(all_reduce(values.data(), values.size()));
                    while (own.rank() == victim && given_up < 2) std::this_thread::sleep_for(1ms);
                    const GivesUp gives_up{given_up};
                    own.wait(stuck);
                },
                on_two_cores);
            std::string silent;
            for (int rank = 0; rank < 3; ++rank) {
                const std::string& error = errors[static_cast<std::size_t>(rank)];
                if (rank == victim || (rank != 0 && victim != 0 && error.empty())) continue;  // who has its result needs nobody any more
                silent += if_silent(rank, error,
                                    victim == 0 ? "rank 0 did not answer while"
                                                : "rank " + std::to_string(victim) + " started it like all others, but made no progress");
            }
            return silent;
        });
        CHECK(wrong == "");
    }
}

TEST_CASE("messages: where little data goes by way of one rank, it alone knows who did not start, and the others leave it time to say so") {
    for (const int victim : {0, 1}) {
        for (const bool starts : {false, true}) {
            if (starts && victim != 0) continue;  // that is all that others need of it
            CAPTURE(victim);
            const std::string wrong = wrong_each_time([&] {
                std::atomic<int> given_up{0};
                const auto errors = run(
                    std::make_shared<LoopbackNetwork>(3), 1s,
                    [&](mp::MessageEngine& own) {
                        float value = 1;
                        own.wait(own.start(Call{}));  // they begin together
                        const bool is_victim = own.rank() == victim;
                        const std::uint64_t n = is_victim && !starts ? 0 : own.start(all_reduce(&value, 1));
                        while (is_victim && given_up < 2) std::this_thread::sleep_for(1ms);
                        if (is_victim && !starts) return;
                        const GivesUp gives_up{given_up};
                        own.wait(n);
                    },
                    on_two_cores);
                std::string silent;
                for (int rank = 0; rank < 3; ++rank)
                    if (rank != victim)
                        silent += if_silent(rank, errors[static_cast<std::size_t>(rank)],
                                            victim == 0 ? "rank 0 did not answer while" : "rank 1 did not start it");
                return silent;
            });
            CHECK(wrong == "");
        }
    }
}

TEST_CASE("messages: where little data goes by way of one rank, it tells those that ask whom it waits for") {
    const std::string wrong = wrong_each_time([] {
        std::atomic<bool> given_up{false};
        std::atomic<int> blamed{-1};
        const auto errors = run(
            std::make_shared<LoopbackNetwork>(3), 1s,
            [&](mp::MessageEngine& own) {
                float value = 1;
                own.wait(own.start(Call{}));  // they begin together
                if (own.rank() == 0) own.set_timeout(30s);
                while (own.rank() == 2 && !given_up) std::this_thread::sleep_for(1ms);
                if (own.rank() == 2) return;
                try {
                    own.wait(own.start(all_reduce(&value, 1)));
                } catch (const gs::Error& error) {
                    given_up = true;
                    blamed = error.context().peer;
                    throw;
                }
            },
            on_two_cores);
        return if_silent(1, errors[1], "rank 2 did not start it while rank 1 waited") + (blamed == 2 ? "" : "another rank is blamed");
    });
    CHECK(wrong == "");
}

TEST_CASE("messages: a late rank that waits elsewhere for one that has stopped is not to blame; one that all wait for in turn is") {
    // Rank 0 starts the collective of all. Rank 1 does not: it waits for rank 0 in another communicator.
    for (const bool stops : {true, false}) {
        CAPTURE(stops);
        const std::string wrong = wrong_each_time([&] {
            std::atomic<int> given_up{0};
            const auto errors = run(std::make_shared<LoopbackNetwork>(3), 1s, [&](mp::MessageEngine& own) {
                const int rank = own.rank();
                gs::collective::Group group{.color = rank / 2};
                for (int r = 0; r < 3; ++r)
                    if (r / 2 == rank / 2) group.add(r, r == rank);
                const auto part = own.split(group);
                part->set_timeout(30s);
                if (rank == 0 && !stops) own.set_timeout(30s);
                float value = 1, other = 1;
                own.wait(own.start(Call{}));  // they begin together
                const GivesUp gives_up{given_up};
                if (rank == 1) return part->wait(part->start(all_reduce(&other, 1)));
                const std::uint64_t n = own.start(all_reduce(&value, 1));
                while (rank == 0 && stops && given_up < 2) std::this_thread::sleep_for(1ms);
                own.wait(n);
            });
            const char* const words = stops ? "rank 0 did not answer while rank 2" : "rank 1 did not start it while rank 2";
            return if_silent(1, errors[1], words) + if_silent(2, errors[2], words);
        });
        CHECK(wrong == "");
    }
}

TEST_CASE("messages: a rank that dies between its hello and what follows it is named") {
    const auto network = std::make_shared<LoopbackNetwork>(2);
    network->quick_bytes = 1000;
    auto gone = gs::collective::ProcessIdentity::own();
    const auto self = gone;
    gone.number = 1 << 30;  // no system has so many
    const auto own = engine(std::unique_ptr<mp::Transport>(new LoopbackTransport(network, 0)), 30s, {self, gone});
    std::vector<float> values(300);
    const Call call = all_reduce(values.data(), values.size());
    network->send(1, 0, 1, &call, sizeof call);  // its beginning is enough
    try {
        own->wait(own->start(call));
        FAIL("nothing was thrown");
    } catch (const gs::Error& error) {
        CHECK(error.context().peer == 1);
        CHECK(std::string(error.what()).find("the process of rank 1 died while all_reduce") != std::string::npos);
    }
}

TEST_CASE("messages: more collectives than there are slots can be started before one is waited for") {
    constexpr std::size_t many = 3 * mp::MessageEngine::slots;
    for (const auto& process : {gs::collective::ProcessIdentity{}, on_two_cores}) {
        const auto errors = run(
            std::make_shared<LoopbackNetwork>(3), 30s,
            [&](mp::MessageEngine& own) {
                std::vector<float> data(many, 1.0f);
                std::vector<std::uint64_t> numbers;
                for (float& element : data) numbers.push_back(own.start(all_reduce(&element, 1)));
                for (const std::uint64_t n : numbers) own.wait(n);
                if (data != std::vector<float>(many, 3.0f)) throw std::runtime_error("wrong");
            },
            process);
        CHECK(errors == none);
    }
}

TEST_CASE("messages: where the transport fails, every rank gets an error that says so") {
    for (const auto& process : {gs::collective::ProcessIdentity{}, on_two_cores})
        for (const int who : {0, 2}) {
            const auto network = std::make_shared<LoopbackNetwork>(3);
            const auto errors = run(
                network, 30s,
                [&](mp::MessageEngine& own) {
                    float x = 1;
                    own.wait(own.start(all_reduce(&x, 1)));
                    own.wait(own.start(Call{}));  // all have the result of the first one
                    if (own.rank() == who) network->broken = true;
                    own.wait(own.start(all_reduce(&x, 1)));
                },
                process);
            for (const std::string& error : errors) CHECK(error.find("the cable is cut") != std::string::npos);
        }
}

TEST_CASE("messages: collectives by way of one rank and others may be in flight together") {
    const auto network = std::make_shared<LoopbackNetwork>(3);
    network->quick_bytes = 1000;
    const auto errors = run(
        network, 30s,
        [&](mp::MessageEngine& own) {
            const auto rank = static_cast<float>(own.rank());
            std::vector<std::vector<float>> data;
            std::vector<float> expected;
            std::vector<std::uint64_t> numbers;
            for (int round = 0; round < 10; ++round)
                for (const std::size_t count :
                     {std::size_t{1}, std::size_t{round % 4 == 0 ? 300'000u : 3'000u}, std::size_t{20'000}, std::size_t{30}}) {
                    const auto add = [&](Operation operation, int root, float result) {
                        data.emplace_back(count, rank + 1);
                        Call call = all_reduce(data.back().data(), count);
                        call.operation = operation;
                        call.root = root;
                        if (operation == Operation::reduce && own.rank() != root) call.out = nullptr, call.out_count = 0, result = rank + 1;
                        if (operation == Operation::all_gather) {
                            const auto shard = gs::shard_range(count, 3, own.rank());
                            call.in = data.back().data() + shard.first;
                            call.in_count = shard.size();
                            result = 0;  // by shard
                        }
                        expected.push_back(result);
                        numbers.push_back(own.start(call));
                    };
                    add(Operation::all_reduce, 0, 6);
                    add(Operation::reduce, 1, 6);
                    add(Operation::all_gather, 0, 0);
                    add(Operation::broadcast, 2, 3);
                    Call mean = all_reduce(data.emplace_back(count, rank + 1).data(), count);
                    mean.op = gs::ReduceOp::mean;
                    if (own.rank() == 0) mean.contribution = {0, 0};
                    expected.push_back(2.5f);
                    numbers.push_back(own.start(mean));
                    numbers.push_back(own.start(Call{}));
                    data.emplace_back(), expected.push_back(0);
                }
            for (const std::uint64_t n : numbers) own.wait(n);
            for (std::size_t k = 0; k < data.size(); ++k)
                for (std::size_t i = 0; i < data[k].size(); ++i) {
                    float result = expected[k];
                    for (int r = 0; r < 3 && expected[k] == 0; ++r)
                        if (const auto shard = gs::shard_range(data[k].size(), 3, r); shard.first <= i && i < shard.last)
                            result = static_cast<float>(r + 1);
                    if (data[k][i] != result)
                        throw std::runtime_error("element " + std::to_string(i) + " of collective " + std::to_string(k) + " is wrong");
                }
        },
        on_two_cores);
    CHECK(errors == none);
}

TEST_CASE("messages: answers that are on their way arrive if the rank that relays them leaves or fails") {
    for (const bool fails : {false, true}) {
        CAPTURE(fails);
        const auto errors = run(
            std::make_shared<LoopbackNetwork>(3), 30s,
            [&](mp::MessageEngine& own) {
                float first = 1, second = 1;
                const std::uint64_t a = own.start(all_reduce(&first, 1));
                if (own.rank() != 0) own.start(all_reduce(&second, 1));
                own.wait(a);
                if (first != 3) throw std::runtime_error("wrong");
                if (own.rank() != 0) return own.wait(a + 1);
                if (fails) own.fail({gs::Errc::peer_failed, 0, "rank 0 has had enough"});
            },
            on_two_cores);
        CHECK(errors[0] == "");
        for (const int rank : {1, 2})
            CHECK(errors[static_cast<std::size_t>(rank)].find(fails ? "rank 0 has had enough"
                                                                    : "rank 0 left without starting all_reduce") != std::string::npos);
    }
}

TEST_CASE("messages: a process that is gone is named long before the limit, also where a call of the transport fails because it is gone") {
    for (const bool call_fails : {false, true}) {
        CAPTURE(call_fails);
        const auto network = std::make_shared<LoopbackNetwork>(2);
        auto gone = gs::collective::ProcessIdentity::own();
        const auto self = gone;
        gone.number = 1 << 30;  // no system has so many
        const auto own = engine(std::unique_ptr<mp::Transport>(new LoopbackTransport(network, 0)), 30s, {self, gone});
        network->broken = call_fails;
        const auto begun = std::chrono::steady_clock::now();
        float x = 1;
        try {
            own->wait(own->start(all_reduce(&x, 1)));
            FAIL("nothing was thrown");
        } catch (const gs::Error& error) {
            CHECK(error.errc() == gs::Errc::peer_failed);
            CHECK(error.context().peer == 1);
            const char* const text =
                call_fails ? "the process of rank 1 died while a collective" : "the process of rank 1 died while all_reduce";
            CHECK(std::string(error.what()).find(text) != std::string::npos);
        }
        CHECK(std::chrono::steady_clock::now() - begun < 20s);
    }
}

TEST_CASE("messages: a thread that the transport does not let in gets its reason; a handle may go there") {
    auto* const transport = new LockedTransport;
    auto& closed = transport->closed;
    auto own = engine(std::unique_ptr<mp::Transport>(transport));
    float x = 1;
    const std::uint64_t n = own->start(all_reduce(&x, 1));
    closed = true;
    for (const auto& call : {std::function<void()>([&] { own->start(all_reduce(&x, 1)); }), std::function<void()>([&] { own->wait(n); }),
                             std::function<void()>([&] { own->test(n); })})
        CHECK_THROWS_WITH_AS(call(), "all_reduce: ask for a key", gs::Error);
    own->progress();
    own->fail({gs::Errc::peer_failed, 0, "over"});
    own.reset();
}

TEST_CASE("messages: a communicator that is gone leaves nothing, so that worlds can be made again and again") {
    for (int repeat = 0; repeat < 50; ++repeat) {
        const auto errors = run(std::make_shared<LoopbackNetwork>(3), 30s, [&](mp::MessageEngine& own) {
            const gs::collective::Group half{.members = own.rank() == 2 ? gs::List<int>{2} : gs::List<int>{1, 0},
                                             .rank = own.rank() == 0 ? 1 : 0};
            const auto part = own.split(half);
            float x = static_cast<float>(own.rank() + 1);
            part->wait(part->start(all_reduce(&x, 1)));
            if (x != 3) throw std::runtime_error("wrong");
        });
        CHECK(errors == none);
    }
}

TEST_CASE("messages: a hello that is no call, or is too short, is an error that names the rank") {
    struct Case {
        const char* what;
        std::size_t bytes;
        void (*change)(Call&);
    };
    std::vector<float> data(4, 1.0f);
    const Case cases[] = {
        {"an invalid call", 3, [](Call&) {}},
        {"an invalid call", sizeof(Call) + 16, [](Call& call) { call.operation = static_cast<Operation>(77); }},
        {"an invalid call", sizeof(Call) + 16, [](Call& call) { call.op = static_cast<gs::ReduceOp>(200); }},
        {"an invalid call", sizeof(Call) + 16, [](Call& call) { call.dtype = static_cast<gs::DType>(99); }},
        {"an invalid call", sizeof(Call) + 16,
         [](Call& call) {
             call.operation = Operation::gather;
             call.root = 1'000'000;
         }},
        {"bytes where", sizeof(Call) + 12, [](Call&) {}},  // an element is missing
    };
    for (const Case& one : cases) {
        CAPTURE(one.what);
        CAPTURE(one.bytes);
        const auto network = std::make_shared<LoopbackNetwork>(2);
        const auto zero = engine(std::unique_ptr<mp::Transport>(new LoopbackTransport(network, 0)), 10s);
        const std::uint64_t number = zero->start(all_reduce(data.data(), data.size()));
        Call call = all_reduce(nullptr, data.size());
        one.change(call);
        std::vector<std::byte> hello(sizeof(Call) + 16);
        std::memcpy(hello.data(), &call, sizeof call);
        network->send(1, 0, 1 + mp::Route::hellos, hello.data(), one.bytes);
        try {
            zero->wait(number);
            FAIL_CHECK("nothing was thrown");
        } catch (const gs::Error& error) {
            CHECK(error.context().peer == 1);
            CHECK(std::string(error.what()).find(std::string("rank 1 sent ")) != std::string::npos);
            CHECK(std::string(error.what()).find(one.what) != std::string::npos);
        }
    }
}

namespace {

std::pair<gs::net::Socket, gs::net::Socket> connected() {
    int ends[2] = {-1, -1};
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0);
    return {gs::net::Socket(ends[0]), gs::net::Socket(ends[1])};
}

/// Two ends of a slow network.
class SlowLink {
public:
    gs::net::Socket one, other;

    SlowLink() {
        auto [a, b] = connected();
        auto [c, d] = connected();
        one = std::move(a), other = std::move(d);
        pump_ = std::thread([this, in = std::move(b), out = std::move(c)] {
            const auto pass = [](const gs::net::Socket& from, const gs::net::Socket& to) {
                std::byte bytes[16 * 1024];
                ssize_t got = ::recv(from.get(), bytes, sizeof bytes, MSG_DONTWAIT);
                for (const std::byte* at = bytes; got > 0; std::this_thread::sleep_for(1ms))
                    if (const ssize_t sent = ::send(to.get(), at, static_cast<std::size_t>(got), MSG_DONTWAIT | MSG_NOSIGNAL); sent > 0)
                        at += sent, got -= sent;
                    else if (errno != EAGAIN) return;
            };
            for (; !over_; std::this_thread::sleep_for(10ms)) pass(in, out), pass(out, in);
        });
    }
    ~SlowLink() {
        over_ = true;
        pump_.join();
    }

private:
    std::atomic<bool> over_ = false;
    std::thread pump_;
};

}  // namespace

TEST_CASE("a sum may take longer than the time limit while its data moves") {
    SlowLink slow;
    auto [zero, two] = connected();
    auto [one, also_two] = connected();
    gs::List<gs::net::Socket> ends[3] = {gs::List<gs::net::Socket>(3), gs::List<gs::net::Socket>(3), gs::List<gs::net::Socket>(3)};
    ends[0][1] = std::move(slow.one), ends[1][0] = std::move(slow.other);
    ends[0][2] = std::move(zero), ends[2][0] = std::move(two);
    ends[1][2] = std::move(one), ends[2][1] = std::move(also_two);
    std::vector<std::string> errors(3);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 3; ++rank)
        threads.emplace_back([&, rank] {
            try {
                const auto own = engine(std::make_unique<mp::TcpTransport>(std::move(ends[rank]), rank), 1500ms);
                std::vector<float> sums(1'800'000, 1);  // 7.2 MB, of which the slow link takes three seconds or more
                own->wait(own->start({.in = sums.data(),
                                      .out = sums.data(),
                                      .in_count = sums.size(),
                                      .out_count = sums.size(),
                                      .operation = Operation::all_reduce,
                                      .dtype = gs::DType::f32}));
                if (sums != std::vector<float>(sums.size(), 3)) errors[static_cast<std::size_t>(rank)] = "a wrong sum";
            } catch (const std::exception& error) {
                errors[static_cast<std::size_t>(rank)] = error.what();
            }
        });
    for (std::thread& thread : threads) thread.join();
    for (const std::string& error : errors) CHECK(error == "");
}

TEST_CASE("a rank that waits with a longer limit does not hold up those with a shorter one, though data has moved a while ago") {
    gs::List<gs::net::Socket> ends[3] = {gs::List<gs::net::Socket>(3), gs::List<gs::net::Socket>(3), gs::List<gs::net::Socket>(3)};
    for (std::size_t a = 0; a < 3; ++a)
        for (std::size_t b = a + 1; b < 3; ++b) std::tie(ends[a][b], ends[b][a]) = connected();
    std::vector<std::string> errors(3);
    std::atomic<int> given_up{0};
    bool in_time = false;
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 3; ++rank)
        threads.emplace_back([&, rank] {
            try {
                const auto own = engine(std::make_unique<mp::TcpTransport>(std::move(ends[rank]), rank), 60s);
                const auto part_with = [&](const auto& color_of) {
                    gs::collective::Group group{.color = color_of(rank)};
                    for (int r = 0; r < 3; ++r)
                        if (color_of(r) == color_of(rank)) group.add(r, r == rank);
                    return own->split(group);
                };
                const auto first = part_with([](int r) { return r / 2; }), last = part_with([](int r) { return (r + 1) / 2; });
                float value = 1;
                own->wait(own->start(all_reduce(&value, 1)));
                const GivesUp gives_up{given_up};
                if (rank == 0) return first->set_timeout(400ms), first->wait(first->start(all_reduce(&value, 1)));
                if (rank == 1) return last->wait(last->start(all_reduce(&value, 1)));
                for (int k = 0; k < 500 && !in_time; ++k, std::this_thread::sleep_for(10ms)) in_time = given_up != 0;
            } catch (const std::exception& error) {
                errors[static_cast<std::size_t>(rank)] = error.what();
            }
        });
    for (std::thread& thread : threads) thread.join();
    CAPTURE(errors[0]);
    CHECK(in_time);
    CHECK(errors[0].find("rank 2 did not") != std::string::npos);
    CHECK(errors[1] != "");
}

TEST_CASE("messages: the data of another communicator hides a rank that has stopped for sixteen limits at most") {
    gs::List<gs::net::Socket> ends[3] = {gs::List<gs::net::Socket>(3), gs::List<gs::net::Socket>(3), gs::List<gs::net::Socket>(3)};
    for (std::size_t a = 0; a < 3; ++a)
        for (std::size_t b = a + 1; b < 3; ++b) std::tie(ends[a][b], ends[b][a]) = connected();
    std::vector<std::string> errors(3);
    std::vector<std::thread> threads;
    const auto begin = std::chrono::steady_clock::now();
    for (int rank = 0; rank < 3; ++rank)
        threads.emplace_back([&, rank] {
            const auto own = engine(std::make_unique<mp::TcpTransport>(std::move(ends[rank]), rank), 60s);
            const auto other = own->split(gs::collective::Group::of_all(3, rank));
            own->set_timeout(100ms);
            std::thread metrics([&] {
                try {
                    for (float value = 1; std::chrono::steady_clock::now() - begin < 20s; std::this_thread::sleep_for(5ms))
                        other->wait(other->start(all_reduce(&value, 1)));
                } catch (const std::exception&) {  // of the world
                }
            });
            try {
                float value = 1;
                if (rank != 2) own->wait(own->start(all_reduce(&value, 1)));
            } catch (const std::exception& error) {
                errors[static_cast<std::size_t>(rank)] = error.what();
            }
            metrics.join();
        });
    for (std::thread& thread : threads) thread.join();
    CHECK(std::chrono::steady_clock::now() - begin < 15s);
    for (const std::size_t r : {0u, 1u}) {
        CAPTURE(errors[r]);
        CHECK(errors[r].find("rank 2 did not start it") != std::string::npos);
    }
}
