// SPDX-License-Identifier: BSL-1.0
// ctest: COST 17
// The engine over processes that share memory: segment.hpp, regions.hpp and process_engine.hpp under a Seat, and
// process_engine.hpp where ranks fail.
#include <gradsync/collective/shared_memory/process_engine.hpp>
#include <gradsync/collective/shared_memory/regions.hpp>
#include <gradsync/collective/shared_memory/seat.hpp>

#include <doctest/doctest.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/sum_tree.hpp"

namespace gs = gradsync;
namespace sm = gradsync::shared_memory;
using namespace std::chrono_literals;

namespace {

using ProcessSeat = sm::Seat<sm::RegionSpace>;

/// What one of the processes has.
struct Rank {
    int rank;
    int size;
    sm::Shared<sm::Regions> regions;
    ProcessSeat seat;
    float* own;  ///< this rank's part of a region that all have mapped, `elements` of them

    void wait(const sm::Call& call) { seat.wait(seat.start(call)); }
};

constexpr std::size_t elements = 100'003;

sm::Call all_reduce(void* data, std::size_t count, gs::ReduceOp op = gs::ReduceOp::sum) {
    sm::Call call;
    call.operation = sm::Operation::all_reduce;
    call.op = op;
    call.in = call.out = data;
    call.in_count = call.out_count = count;
    return call;
}

void expect(bool good, const std::string& what) {
    if (!good) throw std::runtime_error(what);
}
/// Of each element. A text for each would take most of the test's time.
void expect_element(bool good, std::size_t i, int step = 0) {
    if (!good) expect(false, "step " + std::to_string(step) + ", element " + std::to_string(i));
}

/// Runs `f(rank)` in `size` processes; returns how each of them ended: "ok", or the signal or failure.
std::vector<std::string> run_forked(int size, const std::function<void(int)>& f) {
    std::vector<pid_t> children;
    std::fflush(nullptr);  // or every child says it again
    for (int r = 0; r < size; ++r) {
        const pid_t child = ::fork();
        REQUIRE(child >= 0);
        if (child != 0) {
            children.push_back(child);
            continue;
        }
        int status = 1;
        try {
            f(r);
            status = 0;
        } catch (const std::exception& error) {
            std::fprintf(stderr, "rank %d of %d: %s\n", r, size, error.what());
        }
        ::_exit(status);
    }
    std::vector<std::string> ends;
    for (const pid_t child : children) {
        int status = 0;
        ::waitpid(child, &status, 0);
        ends.push_back(WIFSIGNALED(status) ? "signal " + std::to_string(WTERMSIG(status)) : WEXITSTATUS(status) == 0 ? "ok" : "failed");
    }
    return ends;
}

gradsync::List<int> first_ranks(int size) {
    gradsync::List<int> ranks(static_cast<std::size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
    return ranks;
}

/// Runs `f(Rank&)` in `size` processes.
template <class F>
std::vector<std::string> run_processes(int size, std::chrono::nanoseconds limit, F&& f) {
    const sm::Segment world = sm::ProcessWorld::create(size, sm::Board::bytes(static_cast<std::size_t>(size)));
    const sm::Segment data = sm::Segment::create(elements * sizeof(float) * static_cast<std::size_t>(size));
    return run_forked(size, [&](int r) {
        // Mapped anew, so at other addresses than the parent's and, after a rank-sized hole, than each other's.
        std::vector<sm::Segment> hole;
        for (int k = 0; k < r; ++k) hole.push_back(sm::Segment::create(1 << 20));
        const sm::Segment mapped = sm::Segment::open(data.ipc_handle());
        auto process_world = sm::Shared<sm::ProcessWorld>::make(sm::Segment::open(world.ipc_handle()), r, size, size);
        auto regions = sm::Shared<sm::Regions>::make();
        const auto ranks = sm::Regions::WorldRanks::make(first_ranks(size));
        regions->add(0, mapped.data(), mapped.bytes(), ranks);
        auto board = sm::Shared<sm::Board>::make(process_world, ranks, process_world->memory());
        Rank rank{r, size, regions, ProcessSeat(std::move(board), r, limit, sm::RegionSpace(regions, ranks)),
                  reinterpret_cast<float*>(mapped.data()) + static_cast<std::size_t>(r) * elements};
        f(rank);
    });
}

/// Runs `f(engine, repeat)` in `size` processes, `repeats` times, each in a world of its own, which `f` may end.
template <class F>
std::vector<std::string> run_engines(int size, int repeats, F&& f) {
    std::vector<sm::Segment> worlds;
    for (int repeat = 0; repeat < repeats; ++repeat)
        worlds.push_back(sm::ProcessWorld::create(size, sm::ProcessEngine::bytes(static_cast<std::size_t>(size))));
    return run_forked(size, [&](int rank) {
        for (int repeat = 0; repeat < repeats; ++repeat) {
            auto world = sm::Shared<sm::ProcessWorld>::make(sm::Segment::open(worlds[static_cast<std::size_t>(repeat)].ipc_handle()), rank,
                                                            size, size);
            sm::ProcessEngine engine(world, sm::Shared<sm::Regions>::make(), first_ranks(size), rank, world->memory(), 0, 30s);
            f(engine, repeat);
        }
    });
}

float value(int rank, std::size_t i, int step) {
    return static_cast<float>((i * 7 + static_cast<std::size_t>(rank * 31 + step)) % 1000) / 8 + 0.1f;
}

}  // namespace

TEST_CASE("SharedSegment: a rank whose creator has no memory is not to blame for it") {
    int exchanges = 0;
    const auto exchange = [&](const auto& own) {
        gs::List<std::decay_t<decltype(own)>> all(2);
        all[0] = own;  // rank 1, the creator, offers nothing, and says that it has none
        all[1] = {};
        if constexpr (sizeof own > 1) all[1].handle.descriptor = -1;
        ++exchanges;
        return all;
    };
    const auto shared = sm::SharedSegment::share(exchange, 0, 1, [] { return sm::Segment(); });
    CHECK(exchanges == 2);
    CHECK(shared.segment.data() == nullptr);
    CHECK(shared.without == 1);
}

TEST_CASE("processes add up in the order of the tree, collective after collective") {
    for (int size = 1; size <= 4; ++size) {
        const auto ends = run_processes(size, 30s, [](Rank& rank) {
            for (int step = 0; step < 20; ++step) {
                const std::size_t count = step % 3 == 0 ? elements : static_cast<std::size_t>(step * step);
                for (std::size_t i = 0; i < count; ++i) rank.own[i] = value(rank.rank, i, step);
                rank.wait(all_reduce(rank.own, count));
                for (std::size_t i = 0; i < count; ++i) {
                    const float sum = *gradsync_test::tree_sum(
                        0, static_cast<std::size_t>(rank.size),
                        [&](std::size_t r) { return std::optional(value(static_cast<int>(r), i, step)); },
                        [](float a, float b) { return std::optional(a + b); });
                    expect_element(rank.own[i] == sum, i, step);
                }
                rank.wait({});  // a barrier: the others may still compare
            }
        });
        CHECK(ends == std::vector<std::string>(static_cast<std::size_t>(size), "ok"));
    }
}

TEST_CASE("processes: more collectives than a board has slots can be started before one is waited for") {
    const auto ends = run_processes(2, 30s, [](Rank& rank) {
        constexpr std::size_t many = 3 * sm::Board::slots;
        for (std::size_t i = 0; i < many; ++i) rank.own[i] = 1;
        std::vector<std::uint64_t> numbers;
        for (std::size_t i = 0; i < many; ++i) numbers.push_back(rank.seat.start(all_reduce(rank.own + i, 1)));
        for (const std::uint64_t n : numbers) rank.seat.wait(n);
        for (std::size_t i = 0; i < many; ++i) expect_element(rank.own[i] == 2, i);
    });
    CHECK(ends == std::vector<std::string>(2, "ok"));
}

TEST_CASE("processes: a buffer that the others cannot reach is not touched, and every rank is told") {
    const auto ends = run_processes(3, 30s, [](Rank& rank) {
        std::vector<float> apart(100, 1.0f);
        rank.own[0] = 5;
        const std::uint64_t n = rank.seat.start(all_reduce(rank.rank == 1 ? apart.data() : rank.own, 100));
        while (!rank.seat.done(n)) rank.seat.progress();  // `wait` returns when there is nothing left to do, seen or not
        expect(rank.seat.elsewhere(n) == 100u, "not told");
        expect(apart[0] == 1 && rank.own[0] == 5, "touched");
        const std::uint64_t after = rank.seat.start(all_reduce(rank.own, 1));
        rank.seat.wait(after);
        while (!rank.seat.done(after)) rank.seat.progress();
        expect(!rank.seat.elsewhere(after) && rank.own[0] == 15, "the next collective is wrong");
    });
    CHECK(ends == std::vector<std::string>(3, "ok"));
}

TEST_CASE("processes: a rank that is killed is named by all others, long before their limit") {
    for (int size = 2; size <= 4; ++size) {
        const int victim = size - 2;
        const auto begin = std::chrono::steady_clock::now();
        const auto ends = run_processes(size, 60s, [&](Rank& rank) {
            rank.wait({});
            try {
                for (int step = 0;; ++step) {
                    if (rank.rank == victim && step == 5) ::kill(::getpid(), SIGKILL);
                    rank.wait(all_reduce(rank.own, elements, gs::ReduceOp::max));
                }
            } catch (const gs::Error& error) {
                expect(error.errc() == gs::Errc::peer_failed && error.context().peer == victim, error.what());
                expect(std::strstr(error.what(), "died") != nullptr && std::strstr(error.what(), "all_reduce") != nullptr, error.what());
            }
        });
        for (int r = 0; r < size; ++r) CHECK(ends[static_cast<std::size_t>(r)] == (r == victim ? "signal 9" : "ok"));
        CHECK(std::chrono::steady_clock::now() - begin < 30s);
    }
}

TEST_CASE("processes: a start that waits for a slot names the killed rank that holds it, long before the limit") {
    const auto ends = run_processes(2, 60s, [](Rank& rank) {
        for (std::size_t i = 0; i < sm::Board::slots; ++i) rank.seat.start({});
        if (rank.rank == 1) {  // once the other has done all without it
            while (!rank.seat.board().done(sm::Board::slots - 1)) ::usleep(1000);
            ::kill(::getpid(), SIGKILL);
        }
        try {
            rank.seat.start({});
            expect(false, "nothing was thrown");
        } catch (const gs::Error& error) {
            expect(error.errc() == gs::Errc::peer_failed && error.context().peer == 1, error.what());
        }
    });
    CHECK(ends == std::vector<std::string>{"ok", "signal 9"});
}

TEST_CASE("processes: a rank that stops is named at the time limit") {
    const auto ends = run_processes(3, 30s, [](Rank& rank) {
        const auto failed = [&] { return rank.seat.board().world().failed(); };
        rank.wait({});
        if (rank.rank == 1) {
            while (!failed()) ::usleep(1000);
            return;
        }
        const std::uint64_t n = rank.seat.start(all_reduce(rank.own, 10));
        while (!rank.seat.board().arrived(n, 2 - rank.rank) && !failed()) ::usleep(1000);  // the other one is not merely slow
        rank.seat.set_timeout(200ms);
        try {
            rank.seat.wait(n);
            expect(false, "nothing was thrown");
        } catch (const gs::Error& error) {
            expect(error.errc() == gs::Errc::timeout && error.context().peer == 1, error.what());
            expect(std::strstr(error.what(), ": rank 1 did not start it") != nullptr, error.what());
        }
    });
    CHECK(ends == std::vector<std::string>(3, "ok"));
}

TEST_CASE("processes: a rank that was paused itself, longer than its limit, does not blame the one that it waits for") {
    const auto ends = run_processes(2, 30s, [](Rank& rank) {
        rank.own[0] = static_cast<float>(::getpid());
        rank.wait({});
        if (rank.rank == 0) rank.seat.set_timeout(2s);
        if (rank.rank == 1) {
            const auto other = static_cast<pid_t>(*(rank.own - elements));
            ::usleep(100'000);  // it waits
            ::kill(other, SIGSTOP);
            ::usleep(3'000'000);
            ::kill(other, SIGCONT);
            ::usleep(200'000);
        }
        rank.wait({});
    });
    CHECK(ends == std::vector<std::string>(2, "ok"));
}

TEST_CASE("processes: a rank that stops in the middle of some work is named, whosever share it is") {
    const auto ends = run_processes(3, 30s, [](Rank& rank) {
        sm::Board& board = rank.seat.board();
        rank.wait({});
        const std::uint64_t n = rank.seat.start(all_reduce(rank.own, elements));
        while (!board.all_arrived(n)) ::usleep(100);
        if (rank.rank == 1) {  // as if it was stopped there: it has taken a chunk of rank 2's share
            board.presence(1).busy = 1;
            board.share(n, 2).next.fetch_add(1);
            while (!board.world().failed()) ::usleep(1000);
            board.presence(1).busy = 0;
            return;
        }
        while (board.share(n, 2).next.load() == 0) ::usleep(100);  // nobody works on it before a wait but rank 1
        rank.seat.set_timeout(300ms);
        try {
            rank.seat.wait(n);
            expect(false, "nothing was thrown");
        } catch (const gs::Error& error) {
            expect(error.errc() == gs::Errc::timeout && error.context().peer == 1, error.what());
            expect(std::strstr(error.what(), ": rank 1 started it like all others, but made no progress") != nullptr, error.what());
        }
    });
    CHECK(ends == std::vector<std::string>(3, "ok"));
}

TEST_CASE("processes: a rank that was stopped in the middle of some work, for good, delays the others once, however often they are told") {
    const auto ends = run_processes(3, 30s, [](Rank& rank) {
        sm::Board& board = rank.seat.board();
        rank.wait({});
        const std::uint64_t n = rank.seat.start(all_reduce(rank.own, elements));
        while (!board.all_arrived(n)) ::usleep(100);
        if (rank.rank == 1) {  // it lives, but never says that it has let go
            board.presence(1).busy = 1;
            board.share(n, 2).next.fetch_add(1);
            while (board.presence(0).busy.load() != -1 || board.presence(2).busy.load() != -1) ::usleep(1000);
            board.presence(1).busy = 0;
            return;
        }
        while (board.share(n, 2).next.load() == 0) ::usleep(100);
        rank.seat.set_timeout(300ms);
        try {
            rank.seat.wait(n);
            expect(false, "nothing was thrown");
        } catch (const gs::Error& error) {
            expect(error.errc() == gs::Errc::timeout && error.context().peer == 1, error.what());
        }
        rank.seat.set_timeout(60s);  // what each of these would wait
        for (int k = 0; k < 3; ++k) rank.seat.fail({gs::Errc::peer_failed, rank.rank, "again"});
        board.presence(rank.rank).busy = -1;  // for rank 1 to see
        while (board.presence(1).busy.load() != 0) ::usleep(1000);
        board.presence(rank.rank).busy = 0;
    });
    CHECK(ends == std::vector<std::string>(3, "ok"));
}

TEST_CASE("processes: a rank that is killed in the middle of another's share is named, long before the limit, also where its own is done") {
    const auto begin = std::chrono::steady_clock::now();
    const auto ends = run_processes(3, 60s, [](Rank& rank) {
        sm::Board& board = rank.seat.board();
        rank.wait({});
        const std::uint64_t n = rank.seat.start(all_reduce(rank.own, elements));
        while (!board.all_arrived(n)) ::usleep(100);
        if (rank.rank == 1) {
            board.presence(1).busy = 1;
            board.share(n, 2).next.fetch_add(1);
            while (board.share(n, 1).done.load() <= n) ::usleep(100);  // the others work on it
            ::kill(::getpid(), SIGKILL);
        }
        while (board.share(n, 2).next.load() == 0) ::usleep(100);
        try {
            rank.seat.wait(n);
            expect(false, "nothing was thrown");
        } catch (const gs::Error& error) {
            expect(error.errc() == gs::Errc::peer_failed && error.context().peer == 1, error.what());
            expect(std::strstr(error.what(), "the process of rank 1 died while all_reduce") != nullptr, error.what());
        }
    });
    CHECK(ends == std::vector<std::string>{"ok", "signal 9", "ok"});
    CHECK(std::chrono::steady_clock::now() - begin < 30s);
}

TEST_CASE("processes: a rank that stops between the pieces of a collective is named, and the collective is the one that was asked for") {
    const sm::Segment counts = sm::Segment::create(3 * sizeof(std::atomic<int>));
    auto* const started = reinterpret_cast<std::atomic<int>*>(counts.data());
    const auto ends = run_engines(3, 3, [&](sm::ProcessEngine& engine, int repeat) {
        std::vector<float> own(5'000'000, 1.0f);  // not reached by the others, so staged, in more pieces than are in flight
        engine.exchange(0);
        const std::uint64_t n = engine.start(all_reduce(own.data(), own.size()));
        if (engine.rank() == 1) {
            engine.test(n);
            ++started[repeat];
            while (!engine.world().failed()) ::usleep(1000);
            return;
        }
        while (started[repeat] == 0) ::usleep(1000);
        engine.set_timeout(1s);
        try {
            engine.wait(n);
            expect(false, "nothing was thrown");
        } catch (const gs::Error& error) {
            expect(error.errc() == gs::Errc::timeout && error.context().peer == 1, error.what());
            expect(std::strstr(error.what(), "5000000 elements), collective #1: rank 1 started it like all others, but made no progress") !=
                       nullptr,
                   error.what());
        }
    });
    CHECK(ends == std::vector<std::string>(3, "ok"));
}

TEST_CASE("processes: memory that cannot be shared is each rank's own, and the engine says so, and why") {
    const auto ends = run_engines(3, 2, [](sm::ProcessEngine& engine, int repeat) {
        expect(engine.remark().empty(), engine.remark());
        constexpr std::size_t bytes = 1'000'000;
        if (engine.rank() == 0 && repeat == 0) {  // and from then on
            ::signal(SIGXFSZ, SIG_IGN);
            const rlimit limit{bytes, bytes};  // as where memory for files is short
            ::setrlimit(RLIMIT_FSIZE, &limit);
        }
        const gs::collective::Memory memory = engine.allocate(bytes);
        const std::string reason = engine.rank() == 0 ? "cannot make shared memory of " : "see rank 0";
        expect(engine.remark().find(", but 1000000 bytes that were to be shared are copied: " + reason) == 0, engine.remark());
        float* const own = static_cast<float*>(memory.data());
        expect(own[0] == 0, "not zeroed");
        own[0] = 1;
        engine.wait(engine.start(all_reduce(own, 1)));
        expect(own[0] == 3, "another sum");
    });
    CHECK(ends == std::vector<std::string>(3, "ok"));
}

TEST_CASE("processes: what a rank has seen complete when it fails is complete for all ranks") {
    const auto ends = run_engines(3, 120, [](sm::ProcessEngine& engine, int repeat) {
        // Not reached by the others, so staged, in two pieces; or nothing to stage.
        std::vector<float> own(repeat % 2 == 0 ? 70'000 : 0, 1.0f);
        const std::uint64_t n = engine.start(own.empty() ? sm::Call() : all_reduce(own.data(), own.size()));
        while (repeat % 4 >= 2 && !engine.test(n)) std::this_thread::yield();
        engine.wait(n);
        engine.fail({.culprit = engine.rank(), .message = "the disk is full"});
        for (std::size_t i = 0; i < own.size(); ++i) expect_element(own[i] == 3, i);
    });
    CHECK(ends == std::vector<std::string>(3, "ok"));
}

TEST_CASE("processes: a failure is told by the name of what was asked for, and ends nothing that is complete") {
    const auto ends = run_engines(2, 20, [](sm::ProcessEngine& engine, int repeat) {
        float x = 1;
        const std::uint64_t before = engine.start(all_reduce(&x, 1));
        if (engine.rank() == 0) {
            engine.wait(before);
            return engine.fail({.culprit = 0, .message = "the disk is full"});
        }
        sm::Call call;
        call.operation = sm::Operation::broadcast;
        call.in = call.out = &x;
        call.in_count = call.out_count = 1;
        try {
            const std::uint64_t n = engine.start(call);
            while (repeat % 2 == 0 && !engine.test(n)) std::this_thread::yield();
            engine.wait(n);
            expect(false, "nothing was thrown");
        } catch (const gs::Error& error) {
            expect(error.errc() == gs::Errc::peer_failed && error.context().peer == 0, error.what());
            expect(error.context().operation == "broadcast", error.context().operation + ": " + error.what());
        }
        expect(engine.test(before) && x == 2, "what was complete is not");
    });
    CHECK(ends == std::vector<std::string>(2, "ok"));
}

TEST_CASE("processes: after a failure a start, too, says what its rank was in") {
    const auto ends = run_engines(2, 1, [](sm::ProcessEngine& engine, int) {
        engine.record_flights();
        float x = 1;
        const sm::Call call = all_reduce(&x, 1);
        const std::uint64_t n = engine.start(call);
        engine.flights()->start(n, call);
        engine.wait(n);
        engine.flights()->end(n);
        if (engine.rank() == 1) return engine.fail({.culprit = 1, .message = "the disk is full"});
        while (!engine.world().failed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        try {
            (void)engine.start(call);
            expect(false, "nothing was thrown");
        } catch (const gs::Error& error) {
            expect(std::string(error.what()).find("; the last that ended here: #0 all_reduce(sum, f32, 1 elements)") != std::string::npos,
                   error.what());
        }
    });
    CHECK(ends == std::vector<std::string>(2, "ok"));
}

TEST_CASE("processes: ranks that start different collectives get an error that names both") {
    const auto ends = run_processes(2, 30s, [](Rank& rank) {
        try {
            rank.wait(all_reduce(rank.own, rank.rank == 0 ? 10 : 11));
            expect(false, "nothing was thrown");
        } catch (const gs::Error& error) {
            expect(error.errc() == gs::Errc::collective_mismatch && std::strstr(error.what(), "11 elements") != nullptr, error.what());
        }
    });
    CHECK(ends == std::vector<std::string>(2, "ok"));
}

TEST_CASE("Segment opens by its handle, and is refused if it is not the one that was meant") {
    sm::Segment own = sm::Segment::create(1000);
    CHECK(own.bytes() == 1000);
    own.data()[999] = std::byte{7};
    sm::Segment again = sm::Segment::open(own.ipc_handle());
    CHECK(again.data() != own.data());
    CHECK(again.data()[999] == std::byte{7});
    CHECK(again.data()[0] == std::byte{0});

    sm::Segment::IpcHandle wrong = own.ipc_handle();
    wrong.token += 1;
    CHECK_THROWS_AS(sm::Segment::open(wrong), std::system_error);
    wrong = own.ipc_handle();
    wrong.bytes += 1;
    CHECK_THROWS_AS(sm::Segment::open(wrong), std::system_error);
    const sm::Segment::IpcHandle gone = sm::Segment::create(1000).ipc_handle();
    CHECK_THROWS_AS(sm::Segment::open(gone), std::system_error);

    own = {};
    again.data()[0] = std::byte{1};  // a mapping outlives its creator's
    CHECK(again.data()[999] == std::byte{7});
}

TEST_CASE("Segment: nobody can cut it, and one that could be cut is refused") {
    const sm::Segment own = sm::Segment::create(1000);
    const std::string path = "/proc/self/fd/" + std::to_string(own.ipc_handle().descriptor);
    CHECK(::truncate(path.c_str(), 0) != 0);
    CHECK(own.data()[999] == std::byte{0});

    const int other = ::memfd_create("gradsync", MFD_ALLOW_SEALING);
    sm::Segment::IpcHandle handle = own.ipc_handle();
    handle.descriptor = other;
    REQUIRE(::ftruncate(other, 1000 + 4096) == 0);
    REQUIRE(::pwrite(other, &handle.token, sizeof handle.token, 0) == sizeof handle.token);
    CHECK_THROWS_AS(sm::Segment::open(handle), std::system_error);
    ::close(other);
}

TEST_CASE("Segment asks for huge pages as long as it may, and no longer") {
    const auto huge = [](const sm::Segment& segment) {  // the kilobytes of it that are in huge pages
        std::FILE* const maps = std::fopen("/proc/self/smaps", "r");
        char line[512];
        unsigned long begin = 0, end = 0, kilobytes = 0, found = 0;
        const auto at = reinterpret_cast<unsigned long>(segment.data());
        while (std::fgets(line, sizeof line, maps) != nullptr) {
            unsigned long from = 0, to = 0;
            if (std::sscanf(line, "%lx-%lx ", &from, &to) == 2) begin = from, end = to;
            if (begin <= at && at < end && std::sscanf(line, "ShmemPmdMapped: %lu", &kilobytes) == 1) found = kilobytes;
        }
        std::fclose(maps);
        return found;
    };
    constexpr std::size_t bytes = 16 * sm::Segment::huge_page;
    if (huge(sm::Segment::create(bytes, 30s)) == 0) return;  // this system has none
    char mode[64] = {};
    std::FILE* const file = std::fopen("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "r");
    if (file == nullptr || std::fgets(mode, sizeof mode, file) == nullptr || std::strstr(mode, "[never]") == nullptr) return;
    std::fclose(file);
    CHECK(huge(sm::Segment::create(bytes, 0s)) == 0);
}

TEST_CASE("Regions: an address in a region of the largest size stays in it; a larger one is refused") {
    sm::Regions regions;
    auto* const base = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 44);  // of none that is touched
    const auto ranks = sm::Regions::WorldRanks::make(first_ranks(2));
    CHECK_THROWS_AS(regions.add(1, base, sm::Regions::largest + 1, ranks), gs::Error);
    regions.add(0, base, sm::Regions::largest, ranks);
    const void* published = nullptr;
    REQUIRE(regions.publish(base + sm::Regions::largest - 1, 1, *ranks, published));
    CHECK(regions.resolve(published) == base + sm::Regions::largest - 1);
}

TEST_CASE("Regions: an address is for ranks that have mapped its region, in any order") {
    sm::Regions regions;
    std::byte bytes[100], again[10];
    regions.add(3, bytes, sizeof bytes, sm::Regions::WorldRanks::make(first_ranks(3)));
    regions.add_alias(3, bytes + 20, again, sizeof again);
    const void* published = nullptr;
    const auto is_for = [&](const void* address, std::initializer_list<int> readers) {
        return regions.publish(address, 1, gs::ListView<const int>(readers.begin(), readers.size()), published);
    };
    for (const std::byte* address : {bytes + 7, again + 7}) {
        CHECK(is_for(address, {0, 1, 2}));
        CHECK(is_for(address, {2, 0}));
        CHECK_FALSE(is_for(address, {0, 3}));
        CHECK_FALSE(is_for(address, {3}));
    }
}
