// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "exchange.hpp"
#include "launcher.hpp"

namespace gradsync_test {

/// What a rank throws in these tests: a type that the library does not know.
struct Boom : std::runtime_error {
    using std::runtime_error::runtime_error;
    int code = 42;
};

/// `f(backend, findings)` on worlds of `least` ranks and more. It catches what it expects; an error that it lets out is a finding.
template <Launcher L, class F>
void each_larger_world(std::chrono::nanoseconds limit, F&& f, int least = 2) {
    for (const int size : sizes_up_to(L::largest, least)) {
        Findings findings;
        const auto error = error_of([&] { L::run(size, limit, [&](typename L::Backend backend) { f(backend, findings); }); });
        findings.check(!error, std::string("an error left the rank that should have caught it: ") + (error ? error->what() : ""));
    }
}

/// After a failure every call that starts something throws, on every rank.
template <Launcher L>
void check_dead(typename L::Backend& backend, Findings& findings, const std::string& where) {
    for (int operation = 0; operation < operation_count; ++operation) {
        const Collective c{.operation = static_cast<Operation>(operation), .count = 8};
        Exchange<typename L::Memory> part(c, backend.rank(), backend.size());
        const auto error = error_of([&] { part.start(backend).wait(); });
        findings.check(error != nullptr, where + "after the failure this works still: " + c.describe());
    }
    findings.check(error_of([&] { backend.duplicate(); }) != nullptr, where + "duplicate() works still after the failure");
    findings.check(error_of([&] { backend.split(0, 0); }) != nullptr, where + "split() works still after the failure");
    backend.progress();
}

/// Invalid calls throw at once and communicate nothing: the next collective works.
template <Launcher L>
void check_invalid_arguments() {
    using gradsync::DType;
    using gradsync::ReduceOp;
    each_world<L>([](typename L::Backend backend, Findings& findings) {
        constexpr auto space = L::Backend::memory_space;
        const int size = backend.size();
        const std::string where = at(backend.rank(), size);
        typename L::Memory memory(Bytes(8 * 64));
        void* const data = memory.data();
        const auto view = [&](std::size_t count, DType dtype) { return gradsync::BufferView{data, count, dtype, space}; };
        const auto refused = [&](const char* what, auto call) {
            const auto error = error_of([&] { call().wait(); });
            findings.check(error && error->errc() == gradsync::Errc::invalid_argument,
                           where + what + (error ? std::string(": ") + error->what() : " is not refused"));
            if (error) findings.check(std::strlen(error->what()) > 20, where + what + ": no sentence: " + error->what());
        };
        refused("a mean of integers", [&] { return backend.all_reduce(view(4, DType::i32), ReduceOp::mean); });
        refused("a mean of integers", [&] { return backend.reduce(view(4, DType::u8), ReduceOp::mean, 0); });
        refused("a Contribution to a sum", [&] { return backend.all_reduce(view(4, DType::f32), ReduceOp::sum, {0.5, 1}); });
        refused("a root that is no rank", [&] { return backend.broadcast(view(4, DType::f32), size); });
        refused("a root that is no rank", [&] { return backend.broadcast(view(4, DType::f32), -1); });
        refused("a root that is no rank", [&] { return backend.reduce(view(4, DType::f32), ReduceOp::sum, size); });
        refused("a shard of the wrong size", [&] { return backend.all_gather(view(9, DType::f32), view(8, DType::f32)); });
        refused("a shard of the wrong size",
                [&] { return backend.reduce_scatter(view(8, DType::f32), view(9, DType::f32), ReduceOp::sum); });
        refused("two dtypes in one call", [&] {
            const auto shard = gradsync::shard_range(8, size, backend.rank()).size();
            return backend.all_gather(view(shard, DType::i32), view(8, DType::f32));
        });
        refused("elements without memory", [&] {
            return backend.all_reduce(gradsync::BufferView{nullptr, 4, DType::f32, space}, ReduceOp::sum);
        });
        refused("the wrong memory space", [&] {
            constexpr auto other = space == gradsync::MemorySpace::host ? gradsync::MemorySpace::device : gradsync::MemorySpace::host;
            return backend.all_reduce(gradsync::BufferView{data, 4, DType::f32, other}, ReduceOp::sum);
        });
        findings.check(error_of([&] { backend.set_timeout(0s); }) != nullptr, where + "a time limit of 0 is not refused");

        Exchange<typename L::Memory> part({.operation = Operation::all_reduce, .count = 5}, backend.rank(), size);
        part.start(backend).wait();
        const std::string wrong = part.verify(L::one_order);
        findings.check(wrong.empty(), where + "after refused calls: " + wrong);
    });
}

/// Ranks that start different collectives all learn it at once, and what the difference is.
template <Launcher L>
void check_mismatches() {
    using gradsync::DType;
    using gradsync::ReduceOp;
    const Collective common{.operation = Operation::all_reduce, .count = 1000};
    struct Case {
        Collective usual, odd;
        std::vector<std::string> words;
    };
    std::vector<Case> cases;
    const auto add = [&](auto change_usual, auto change_odd, std::vector<std::string> words) {
        Case c{common, common, std::move(words)};
        change_usual(c.usual);
        change_usual(c.odd);
        change_odd(c.odd);
        cases.push_back(std::move(c));
    };
    const auto nothing = [](Collective&) {};
    add(nothing, [](Collective& c) { c.count = 1001; }, {"all_reduce", "1000", "1001"});
    add(nothing, [](Collective& c) { c.count = 0; }, {"all_reduce", "1000"});
    // What is short travels otherwise than what is long. (In pieces, where it is staged: it is these that differ then.)
    struct Counts {
        std::size_t usual, odd;
    };
    for (const Counts n : {Counts{5000, 14'000}, {14'000, 5000}, {14'000, 15'000}, {1000, 300'000}, {300'000, 1000}})
        add([=](Collective& c) { c.count = n.usual; }, [=](Collective& c) { c.count = n.odd; }, {"all_reduce", "elements"});
    add(nothing, [](Collective& c) { c.dtype = DType::bf16; }, {"f32", "bf16"});
    add(nothing, [](Collective& c) { c.dtype = DType::i32; }, {"f32", "i32"});  // as many bytes
    add(nothing, [](Collective& c) { c.op = ReduceOp::max; }, {"sum", "max"});
    add(nothing, [](Collective& c) { c.operation = Operation::barrier; }, {"all_reduce", "barrier"});
    add(nothing, [](Collective& c) { c.operation = Operation::reduce_scatter; }, {"all_reduce", "reduce_scatter"});
    for (const Operation rooted : {Operation::broadcast, Operation::reduce, Operation::gather, Operation::scatter})
        add([=](Collective& c) { c.operation = rooted; }, [](Collective& c) { c.root = 1; }, {"root 0", "root 1"});
    for (const Operation operation : {Operation::broadcast, Operation::reduce, Operation::reduce_scatter, Operation::all_gather})
        add([=](Collective& c) { c.operation = operation; }, [](Collective& c) { c.count = 3000; }, {"1000", "3000"});
    // Ranks other than the root know only their shard: 1000 over n ranks, 3000 over n ranks.
    for (const Operation operation : {Operation::gather, Operation::scatter})
        add([=](Collective& c) { c.operation = operation; }, [](Collective& c) { c.count = 3000; },
            {operation == Operation::gather ? "gather" : "scatter", "1000"});

    for (const Case& c : cases)
        each_larger_world<L>(ample, [&](typename L::Backend backend, Findings& findings) {
            const int rank = backend.rank(), size = backend.size(), odd = size - 1;
            const std::string where = at(rank, size) + c.usual.describe() + " against " + c.odd.describe() + ": ";
            Exchange<typename L::Memory> part(rank == odd ? c.odd : c.usual, rank, size);
            expect_error(findings, where, gradsync::Errc::collective_mismatch, -1, c.words, [&] { part.start(backend).wait(); });
            check_dead<L>(backend, findings, where);
        });

    // What is equal but for what it is for.
    using gradsync::CollectiveTag;
    if constexpr (gradsync::abilities_of<typename L::Backend>.tags)
        for (const Operation operation : {Operation::all_reduce, Operation::reduce_scatter, Operation::all_gather})
            for (const std::size_t count : {std::size_t{1000}, std::size_t{300'000}})
                each_larger_world<L>(ample, [&](typename L::Backend backend, Findings& findings) {
                    const int rank = backend.rank(), size = backend.size();
                    Exchange<typename L::Memory> part({.operation = operation, .count = count}, rank, size), same = part;
                    backend.set_tag({CollectiveTag::Kind::bucket, 1, 3});
                    same.start(backend).wait();
                    if (rank == size - 1) backend.set_tag({CollectiveTag::Kind::unit, 2, 4});
                    expect_error(findings, at(rank, size) + "another tag: ", gradsync::Errc::collective_mismatch, -1,
                                 {"for bucket 3 of Reducer #1", "for unit 4 of ShardedParameters #2"}, [&] { part.start(backend).wait(); });
                });
}

/// A rank that fails, leaves, stays away or drops what it started: all others learn it, and which rank it was.
template <Launcher L>
void check_failures() {
    using Backend = typename L::Backend;
    using Memory = typename L::Memory;
    using Work = typename Backend::WorkType;
    using gradsync::Errc;

    SUBCASE("invalid calls throw, and the next collective works") { check_invalid_arguments<L>(); }
    SUBCASE("different collectives") { check_mismatches<L>(); }

    const auto reduce_something = [](Backend& backend, std::size_t count = 5000) {
        Exchange<Memory> part({.operation = Operation::all_reduce, .count = count}, backend.rank(), backend.size());
        part.start(backend).wait();
    };

    SUBCASE("a rank that throws: its exception reaches the caller, and the others are released") {
        for (const int size : sizes_up_to(L::largest))
            for (int culprit = 0; culprit < size; ++culprit) {
                Findings findings;
                bool caught = false;
                try {
                    L::run(size, ample, [&](Backend backend) {
                        if (backend.rank() == culprit) {
                            reduce_something(backend);
                            throw Boom("the disk is full");
                        }
                        const std::string where = at(backend.rank(), size);
                        expect_error(findings, where, Errc::peer_failed, culprit, {"rank " + std::to_string(culprit), "the disk is full"},
                                     [&] {
                                         reduce_something(backend);  // the culprit may be through, and have failed
                                         reduce_something(backend);
                                     });
                        check_dead<L>(backend, findings, where);
                    });
                } catch (const Boom& boom) {
                    caught = boom.code == 42 && std::string(boom.what()) == "the disk is full";
                }
                findings.check(caught == L::here(culprit), "the exception of rank " + std::to_string(culprit) + " was not rethrown");
            }
    }
    SUBCASE("a rank that throws something that is no std::exception") {
        for (const int size : sizes_up_to(L::largest, 2)) {
            Findings findings;
            int caught = 0;
            try {
                L::run(size, ample, [&](Backend backend) {
                    if (backend.rank() == 0) throw 7;
                    expect_error(findings, at(backend.rank(), size), Errc::peer_failed, 0, {"rank 0"}, [&] { reduce_something(backend); });
                });
            } catch (int value) {
                caught = value;
            }
            findings.check(caught == (L::here(0) ? 7 : 0), "the exception was not rethrown");
        }
    }
    SUBCASE("errors that ranks do not catch: the caller gets the cause, not an echo of it") {
        for (const int size : sizes_up_to(L::largest, 2))
            for (int culprit = 0; culprit < size; ++culprit) {
                Findings findings;
                std::string caught = "nothing";
                try {
                    L::run(size, ample, [&](Backend backend) {
                        if (backend.rank() == culprit) throw Boom("cause");
                        reduce_something(backend);
                    });
                } catch (const std::exception& error) {
                    caught = error.what();
                }
                findings.check(!L::here(culprit) || caught == "cause", "the caller caught: " + caught);
            }
    }
    SUBCASE("fail(): the same without an exception") {
        each_larger_world<L>(ample, [&](Backend backend, Findings& findings) {
            const int rank = backend.rank(), culprit = backend.size() - 1;
            const std::string where = at(rank, backend.size());
            const auto meet = [&] { backend.barrier().wait(); };  // afterwards nobody is in its constructor any more
            if (rank == culprit) {
                meet();
                backend.fail("out of memory");
            } else {
                expect_error(findings, where, Errc::peer_failed, culprit, {"rank " + std::to_string(culprit), "out of memory"}, [&] {
                    meet();  // the culprit may be through, and have failed
                    reduce_something(backend);
                });
            }
            check_dead<L>(backend, findings, where);
            backend.fail("twice");  // of no effect
        });
    }
    SUBCASE("fail() ends what the communicator descends from, and what descends from it") {
        each_larger_world<L>(ample, [&](Backend backend, Findings& findings) {
            const int rank = backend.rank();
            const std::string where = at(rank, backend.size());
            std::optional<Backend> twin, pair;
            expect_error(findings, where, Errc::peer_failed, 0, {"gone"}, [&] {
                twin.emplace(backend.duplicate());
                pair.emplace(backend.split(rank / 2, rank));
                if (rank == 0) twin->fail("gone");  // another rank may still be inside split()
                reduce_something(backend);
            });
            if (twin) expect_error(findings, where, Errc::peer_failed, 0, {"gone"}, [&] { reduce_something(*twin); });
            if (pair) expect_error(findings, where, Errc::peer_failed, 0, {"gone"}, [&] { reduce_something(*pair); });
        });
    }
    // The ranks that do not stay away wait for those that do until their limit, and say `words`.
    const auto stay_away_or_wait = [&](Backend& backend, bool stays_away, Findings& findings, const std::string& where, int peer,
                                       const std::string& words, bool polls = false) {
        reduce_something(backend);  // NCCL connects ranks when the first collective of a kind starts, which waits for all of them
        Backend twin = backend.duplicate(), alike = backend.split(stays_away, backend.rank());
        if (stays_away) {
            expect_error(findings, where, Errc::timeout, peer, {words, "all_reduce"}, [&] {
                twin.barrier().wait();
                std::this_thread::sleep_for(2 * scant);
                twin.barrier().wait();  // until it is told
            });
            return;
        }
        twin.barrier().wait();  // nobody is in split() any more
        Exchange<Memory> part({.operation = Operation::all_reduce, .count = 5000}, backend.rank(), backend.size());
        expect_error(findings, where, Errc::timeout, peer, {words, "all_reduce"}, [&] {
            Work work = part.start(backend);
            alike.barrier().wait();                                       // so that nobody's limit runs while another rank is merely slow
            backend.set_timeout(alike.rank() == 0 ? scant : 10 * scant);  // the others ask the first one, which must not be slow to answer
            while (polls && !work.test()) std::this_thread::sleep_for(std::chrono::microseconds(100));
            work.wait();
        });
    };
    SUBCASE("a rank that never calls: the others reach their time limit, and name it") {
        each_larger_world<L>(ample, [&](Backend backend, Findings& findings) {
            const int missing = backend.size() - 2;
            const std::string where = at(backend.rank(), backend.size());
            stay_away_or_wait(backend, backend.rank() == missing, findings, where, missing,
                              ": rank " + std::to_string(missing) + " did not start it");
            check_dead<L>(backend, findings, where);
        });
    }
    SUBCASE("a rank that never calls: so do others that test, and never wait") {
        if constexpr (requires { requires !L::tests_have_a_limit; }) return;
        each_larger_world<L>(
            ample,
            [&](Backend backend, Findings& findings) {
                const std::string where = at(backend.rank(), backend.size());
                stay_away_or_wait(backend, backend.rank() == 1, findings, where, 1, ": rank 1 did not start it", true);
                check_dead<L>(backend, findings, where);
            },
            3);
    }
    SUBCASE("no time limit: the longest that there is") {
        each_larger_world<L>(ample, [&](Backend backend, Findings&) {
            backend.set_timeout(std::chrono::nanoseconds::max());
            if (backend.rank() == 0) std::this_thread::sleep_for(30ms);
            reduce_something(backend);
        });
    }
    SUBCASE("ranks that never call are all named") {
        if (!sizes_up_to(L::largest, 4).empty()) {
            Findings findings;
            L::run(4, ample, [&](Backend backend) {
                stay_away_or_wait(backend, backend.rank() % 2 == 1, findings, at(backend.rank(), 4), -1, ": ranks 1, 3 did not start it");
            });
        }
    }
    SUBCASE("a rank that returns early: the others are told, long before their limit") {
        each_larger_world<L>(ample, [&](Backend backend, Findings& findings) {
            const int leaver = backend.size() / 2;
            if (backend.rank() == leaver) return reduce_something(backend);
            const std::string where = at(backend.rank(), backend.size());
            expect_error(findings, where, Errc::peer_left, leaver, {"rank " + std::to_string(leaver)}, [&] {
                reduce_something(backend);  // may be complete on some ranks only when one of them finds out about the next
                reduce_something(backend);
            });
            check_dead<L>(backend, findings, where);
        });
    }
    SUBCASE("a rank that returns early: so are others that test, and never wait") {
        each_larger_world<L>(ample, [&](Backend backend, Findings& findings) {
            if (backend.rank() == 0) return reduce_something(backend);
            const std::string where = at(backend.rank(), backend.size());
            expect_error(findings, where, Errc::peer_left, 0, {"rank 0"}, [&] {
                for (int k = 0; k < 3; ++k) {  // as above
                    Exchange<Memory> part({.operation = Operation::all_reduce, .count = 5000}, backend.rank(), backend.size());
                    Work work = part.start(backend);
                    while (!work.test()) std::this_thread::yield();
                }
            });
            check_dead<L>(backend, findings, where);
        });
    }
    SUBCASE("errors of a group number ranks as the first communicator does") {
        each_larger_world<L>(ample, [&](Backend backend, Findings& findings) {
            const int rank = backend.rank();
            Backend reversed = backend.split(0, -rank);  // here the leaver, rank 0, is the last
            if (rank == 0) return reduce_something(reversed);
            expect_error(findings, at(rank, backend.size()), Errc::peer_left, 0, {"rank 0"}, [&] {
                reduce_something(reversed);  // may be complete on some ranks only when one of them finds out about the next
                reduce_something(reversed);
            });
        });
    }
    SUBCASE("a handle that was moved from says so") {
        each_larger_world<L>(ample, [&](Backend backend, Findings& findings) {
            Backend other = std::move(backend);
            const std::string where = at(other.rank(), other.size());
            const auto refuses = [&](const char* what, auto&& call) {
                const auto error = error_of(call);
                findings.check(
                    error && error->errc() == Errc::invalid_argument && std::string(error->what()).find("moved from") != std::string::npos,
                    where + what + " is not refused");
            };
            refuses("rank", [&] { (void)backend.rank(); });
            refuses("size", [&] { (void)backend.size(); });
            refuses("barrier", [&] { (void)backend.barrier(); });
            refuses("all_reduce", [&] { (void)backend.all_reduce({}, gradsync::ReduceOp::sum); });
            refuses("all_gather", [&] { (void)backend.all_gather({}, {}); });
            refuses("gather", [&] { (void)backend.gather({}, {}, 0); });
            refuses("scatter", [&] { (void)backend.scatter({}, {}, 0); });
            refuses("reduce_scatter", [&] { (void)backend.reduce_scatter({}, {}, gradsync::ReduceOp::sum); });
            refuses("duplicate", [&] { backend.duplicate(); });
            refuses("set_timeout", [&] { backend.set_timeout(1s); });
            if constexpr (requires { backend.timeout(); }) refuses("timeout", [&] { (void)backend.timeout(); });
            if constexpr (requires { backend.failed(); }) refuses("failed", [&] { (void)backend.failed(); });
            if constexpr (requires { backend.next_owner(); }) refuses("next_owner", [&] { (void)backend.next_owner(); });
            if constexpr (requires { backend.progress_time(); }) refuses("progress_time", [&] { (void)backend.progress_time(); });
            backend.progress();
            backend.fail("what it cannot fail");
            backend = other;
            reduce_something(backend);
        });
    }
    SUBCASE("a rank that leaves after its last collective leaves nobody waiting") {
        for (int repeat = 0; repeat < repetitions; ++repeat)
            each_larger_world<L>(ample, [&](Backend backend, Findings&) {
                if (backend.rank() % 2) std::this_thread::yield();
                reduce_something(backend, static_cast<std::size_t>(repeat) * 100);
            });
    }
    SUBCASE("a Work that is dropped before it is complete") {
        each_larger_world<L>(ample, [&](Backend backend, Findings& findings) {
            const int rank = backend.rank();
            const std::string where = at(rank, backend.size());
            if (rank == 0) {
                Backend signal = backend.duplicate();
                Exchange<Memory> part({.operation = Operation::all_reduce, .count = 100}, 0, backend.size());
                (void)part.start(backend);  // dropped at once; nobody else has started it
            } else {
                const auto error = error_of([&] { backend.duplicate().barrier().wait(); });  // rank 0 never starts the barrier
                findings.check(error && (error->errc() == Errc::abandoned || error->errc() == Errc::peer_failed),
                               where + (error ? error->what() : "no error"));
                findings.check(error && error->context().peer == 0 && mentions(*error, "all_reduce"), where + (error ? error->what() : ""));
            }
            check_dead<L>(backend, findings, where);
        });
    }
    SUBCASE("a rank that unwinds with collectives under way: nobody touches its buffers afterwards") {
        for (std::size_t repeat = 0; repeat < static_cast<std::size_t>(repetitions); ++repeat)
            for (const int size : sizes_up_to(L::largest, 2)) {
                Findings findings;
                bool caught = false;
                try {
                    L::run(size, ample, [&](Backend backend) {
                        const std::size_t count = 50'000;
                        std::vector<Memory> buffers(8, Memory(Bytes(count * 4, std::byte{1})));
                        try {
                            std::vector<Work> works;
                            for (Memory& memory : buffers)
                                works.push_back(backend.all_reduce({memory.data(), count, gradsync::DType::f32, Backend::memory_space},
                                                                   gradsync::ReduceOp::max));
                            if (backend.rank() == static_cast<int>(repeat) % size) {
                                for (std::size_t i = 0; i < repeat * 3; ++i) works[i % 8].test();
                                throw Boom("unwinding");
                            }
                            for (Work& work : works) work.wait();
                            backend.barrier().wait();
                        } catch (...) {
                            // From here on the rank may free its buffers, or use them for something else.
                            if constexpr (Backend::memory_space == gradsync::MemorySpace::host) {
                                for (Memory& memory : buffers) std::memset(memory.data(), 0x77, count * 4);
                                std::this_thread::sleep_for(200us);
                                const Bytes scribbled(count * 4, std::byte{0x77});
                                for (const Memory& memory : buffers)
                                    findings.check(same(memory.read(), scribbled), "a buffer was written after its rank had failed");
                            }
                            throw;
                        }
                    });
                } catch (const Boom&) {
                    caught = true;
                }
                findings.check(caught || !L::here(static_cast<int>(repeat) % size), "the exception was not rethrown");
            }
    }
}

}  // namespace gradsync_test
