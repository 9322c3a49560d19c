// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include <gradsync/core/requirements.hpp>

#include "exchange.hpp"
#include "launcher.hpp"

namespace gradsync_test {

/// Whether `value` is the same on all ranks. Collective.
template <Launcher L>
bool same_everywhere(typename L::Backend& backend, std::int64_t value) {
    std::int64_t both[2] = {value, -value};
    Bytes bytes(sizeof both);
    std::memcpy(bytes.data(), both, sizeof both);
    typename L::Memory memory(bytes);
    backend.all_reduce({memory.data(), 2, gradsync::DType::i64, L::Backend::memory_space}, gradsync::ReduceOp::max).wait();
    bytes = memory.read();
    std::memcpy(both, bytes.data(), sizeof both);
    return both[0] == -both[1];
}

/// Writes twice the sum, and a half for each rank, to all ranks as f64; fails in the block of element `fails_at`, if there is one.
struct TwiceTheSum final : gradsync::ShardStep {
    void step(gradsync::ElementRange range, gradsync::ConstBufferView sums, gradsync::ListView<void* const> outs) override {
        if (range.first <= fails_at && fails_at < range.last) throw std::runtime_error("no more");
        elements += range.size();
        const float* const sum = static_cast<const float*>(sums.data);
        for (std::size_t k = range.first; k < range.last; ++k)
            for (void* const out : outs) static_cast<double*>(out)[k] = 2 * static_cast<double>(sum[k - range.first]) + 0.5 * rank;
    }
    int rank = 0;
    std::size_t fails_at = static_cast<std::size_t>(-1);
    std::size_t elements = 0;
};

/// Every ability that the backend states (gradsync::BackendAbilities) does what it promises. Tags are checked with the failures.
template <Launcher L>
void check_abilities() {
    using Backend = typename L::Backend;
    using Memory = typename L::Memory;
    using Work = typename Backend::WorkType;
    using gradsync::DType;
    constexpr gradsync::BackendAbilities abilities = gradsync::abilities_of<Backend>;
    static_assert(gradsync::require_backend<Backend>());

    if constexpr (abilities.progress_thread) {
        SUBCASE("progress_thread: a thread that makes progress completes collectives, if the backend wants one") {
            each_world<L>([](Backend backend, Findings& findings) {
                const std::string where = at(backend.rank(), backend.size());
                const bool wanted = backend.wants_progress_thread();
                findings.check(same_everywhere<L>(backend, wanted), where + "the ranks want different things");
                if (!wanted) return;
                Exchange<Memory> part({.operation = Operation::all_reduce, .count = 5000}, backend.rank(), backend.size());
                std::atomic<bool> over = false;
                std::thread thread([&] {
                    while (!over) {
                        backend.progress();
                        std::this_thread::yield();
                    }
                });
                const auto error = error_of([&] { part.start(backend).wait(); });
                over = true;
                thread.join();
                findings.check(!error, where + (error ? error->what() : ""));
                const std::string wrong = part.verify(L::one_order);
                findings.check(wrong.empty(), where + wrong);
            });
        }
    }
    if constexpr (abilities.poll) {
        SUBCASE("poll: it never blocks, and makes progress until the collective is complete") {
            each_world<L>([](Backend backend, Findings& findings) {
                const std::string where = at(backend.rank(), backend.size());
                Backend signal = backend.duplicate();
                const Collective c{.operation = Operation::all_reduce, .count = 5000};
                // The first collective of a kind may wait for all ranks where it is started: NCCL connects them.
                signal.barrier().wait();
                Exchange<Memory>(c, backend.rank(), backend.size()).start(backend).wait();
                for (int late = 0; late < backend.size(); ++late) {
                    Exchange<Memory> part(c, backend.rank(), backend.size());
                    if (backend.rank() == late) signal.barrier().wait();  // the others have polled
                    Work work = part.start(backend), sent;
                    if (backend.rank() != late) {
                        for (int i = 0; i < 3; ++i) findings.check(!work.poll(), where + "poll() did not see that a rank is late");
                        sent = signal.barrier();
                    }
                    while (!work.poll()) std::this_thread::yield();
                    findings.check(work.poll() && work.test(), where + "a complete Work says that it is not");
                    sent.wait();
                    const std::string wrong = part.verify(L::one_order);
                    findings.check(wrong.empty(), where + wrong);
                }
                Work none;
                findings.check(none.poll(), where + "a default-constructed Work is not complete");
            });
        }
    }
    if constexpr (abilities.failed) {
        SUBCASE("failed: false at first, and true on every rank after a failure") {
            each_world<L>([](Backend backend, Findings& findings) {
                const std::string where = at(backend.rank(), backend.size());
                Backend twin = backend.duplicate();
                backend.barrier().wait();
                findings.check(!backend.failed() && !twin.failed(), where + "it has failed before anything did");
                // All have looked when rank 0 is through. The others may still be inside when it fails.
                const auto inside = error_of([&] { twin.barrier().wait(); });
                if (backend.rank() == 0) backend.fail("out of memory");
                else findings.check(inside || error_of([&] { backend.barrier().wait(); }), where + "a barrier after the failure");
                findings.check(backend.failed() && twin.failed(), where + "failed() does not say so");
            });
        }
    }
    if constexpr (abilities.tags) {
        SUBCASE("tags: owners have different numbers, the same on all ranks, and equal tags go together") {
            each_world<L>([](Backend backend, Findings& findings) {
                const std::string where = at(backend.rank(), backend.size());
                const std::size_t first = backend.next_owner(), second = backend.next_owner();
                findings.check(first != second, where + "two owners have one number");
                findings.check(same_everywhere<L>(backend, static_cast<std::int64_t>(second)), where + "an owner has several numbers");
                backend.set_tag({gradsync::CollectiveTag::Kind::bucket, first, 3});
                backend.barrier().wait();
            });
        }
    }
    if constexpr (abilities.check_reduces) {
        SUBCASE("check_reduces: it throws on all ranks or on none, and sums of the other types work") {
            each_world<L>([](Backend backend, Findings& findings) {
                const std::string where = at(backend.rank(), backend.size());
                for (int type = 0; type < static_cast<int>(gradsync::dtype_count); ++type) {
                    const auto dtype = static_cast<DType>(type);
                    const auto error = error_of([&] { std::as_const(backend).check_reduces(dtype); });
                    findings.check(same_everywhere<L>(backend, error != nullptr), where + "it throws on some ranks only");
                    findings.check(!error || error->errc() == gradsync::Errc::invalid_argument, where + "another code");
                    Exchange<Memory> part({.operation = Operation::all_reduce, .dtype = dtype, .count = 33, .any_order = !L::one_order},
                                          backend.rank(), backend.size());
                    const auto refusal = error_of([&] { part.start(backend).wait(); });
                    findings.check(!error == !refusal, where + "it does not say what a sum of " + std::string(name_of(dtype)) + " does");
                    const std::string wrong = refusal ? std::string() : part.verify(L::one_order);
                    findings.check(wrong.empty(), where + wrong);
                }
            });
        }
    }
    if constexpr (abilities.cheaper_alone) {
        SUBCASE("cheaper_alone: the same on all ranks") {
            each_world<L>([](Backend backend, Findings& findings) {
                const std::size_t least = std::as_const(backend).cheaper_alone_from(true);
                findings.check(least != 0, "a gradient of 0 bytes is not cheaper alone");
                findings.check(same_everywhere<L>(backend, static_cast<std::int64_t>(least)), "the ranks differ");
            });
        }
    }
    if constexpr (abilities.clock) {
        SUBCASE("clock: it does not go back") {
            each_world<L>([](Backend backend, Findings& findings) {
                const double before = backend.now();
                backend.barrier().wait();
                const double after = backend.now();
                findings.check(before <= after, at(backend.rank(), backend.size()) + "the clock went back");
            });
        }
    }
    if constexpr (abilities.groups) {
        SUBCASE("groups: collectives leave when the object goes, or one is waited for") {
            each_world<L>([](Backend backend, Findings& findings) {
                const std::string where = at(backend.rank(), backend.size());
                findings.check(same_everywhere<L>(backend, static_cast<std::int64_t>(std::as_const(backend).group_bytes())),
                               where + "the ranks differ in group_bytes()");
                for (const bool waits_inside : {false, true}) {
                    std::vector<Exchange<Memory>> parts;
                    std::vector<Work> works;
                    for (std::uint64_t seed = 0; seed < 5; ++seed)
                        parts.emplace_back(Collective{.operation = Operation::all_reduce, .count = 300, .seed = seed}, backend.rank(),
                                           backend.size());
                    auto group = backend.group();
                    for (auto& part : parts) works.push_back(part.start(backend));
                    findings.check(!works.front().test(), where + "it did not wait for its group");
                    if (waits_inside) works.back().wait();
                    group = {};
                    for (std::size_t i = 0; i < works.size(); ++i) {
                        works[i].wait();
                        const std::string wrong = parts[i].verify(L::one_order);
                        findings.check(wrong.empty(), where + wrong);
                    }
                }
            });
        }
    }
    if constexpr (abilities.steps_inside) {
        const auto reduce = [](Backend& backend, std::size_t count, TwiceTheSum& step, Findings& findings) {
            const std::string where = at(backend.rank(), backend.size());
            const auto in = backend.allocate(count * sizeof(float)), out = backend.allocate(count * sizeof(double));
            const gradsync::BufferView from{in.data(), count, DType::f32}, to{out.data(), count, DType::f64};
            if (!backend.steps_inside()) {
                expect_error(findings, where, gradsync::Errc::invalid_argument, -1, {"steps_inside()"},
                             [&] { backend.reduce_step(from, to, gradsync::ReduceOp::sum, {}, step).wait(); });
                return;
            }
            for (std::size_t k = 0; k < count; ++k)
                from.as<float>()[k] = static_cast<float>((k + static_cast<std::size_t>(backend.rank())) % 97);
            step.rank = backend.rank();
            backend.reduce_step(from, to, gradsync::ReduceOp::sum, {}, step).wait();
            findings.check(step.elements == gradsync::shard_range(count, backend.size(), backend.rank()).size(), where + "other elements");
            for (int owner = 0; owner < backend.size(); ++owner) {
                const gradsync::ElementRange shard = gradsync::shard_range(count, backend.size(), owner);
                for (std::size_t k = shard.first; k < shard.last; ++k) {
                    double sum = 0;
                    for (int r = 0; r < backend.size(); ++r) sum += static_cast<double>((k + static_cast<std::size_t>(r)) % 97);
                    findings.check(to.as<double>()[k] == 2 * sum + 0.5 * owner, where + "another result");
                }
            }
            backend.barrier().wait();  // the memory of others may not go before
        };
        SUBCASE("steps_inside: each rank gets the sums of its shard, and writes to the memory of all") {
            each_world<L>([&](Backend backend, Findings& findings) {
                findings.check(same_everywhere<L>(backend, backend.steps_inside()), "the ranks can do different things");
                for (const std::size_t count : {0u, 1u, 5u, 1000u, 70001u})
                    if (TwiceTheSum step; true) reduce(backend, count, step, findings);
            });
        }
        SUBCASE("steps_inside: a step that fails is the failure of its rank") {
            each_world<L>([&](Backend backend, Findings& findings) {
                if (!backend.steps_inside()) return;
                TwiceTheSum step;
                if (backend.rank() == 0) step.fails_at = 10;
                expect_error(findings, at(backend.rank(), backend.size()), gradsync::Errc::peer_failed, 0,
                             {"failed in the step of its shard: no more"}, [&] { reduce(backend, 100000, step, findings); });
            });
        }
    }
    if constexpr (abilities.device_passes) {
        SUBCASE("device_passes: bytes go to the backend's memory and back, and host() has the same ranks") {
            each_world<L>([](Backend backend, Findings& findings) {
                const std::string where = at(backend.rank(), backend.size());
                auto& host = backend.host();
                findings.check(host.rank() == backend.rank() && host.size() == backend.size(), where + "host() has other ranks");
                findings.check(std::remove_reference_t<decltype(host)>::memory_space == gradsync::MemorySpace::host, "not of host memory");
                host.barrier().wait();
                const auto passes = backend.passes();
                const std::vector<std::byte> sent(1000, std::byte{0x5a});
                std::vector<std::byte> got(sent.size());
                auto memory = backend.allocate(sent.size());
                const gradsync::BufferView view{memory.data(), sent.size(), DType::u8, Backend::memory_space};
                passes.write(sent.data(), view);
                passes.read(view, got.data());
                findings.check(got == sent, where + "what was written is not what is read");
            });
        }
    }
    if constexpr (abilities.own_stream) {
        SUBCASE("own_stream: two communicators work one after the other, and no host moves them on") {
            each_world<L>([](Backend backend, Findings& findings) {
                const std::string where = at(backend.rank(), backend.size());
                Backend second = backend.duplicate();
                const auto before = backend.stream();
                second.use_own_stream();
                findings.check(second.stream() != before && backend.stream() == before, where + "it has changed another stream");
                std::vector<float> numbers(50'000, 1);
                auto memory = backend.allocate(numbers.size() * sizeof(float));
                const gradsync::BufferView view{memory.data(), numbers.size(), DType::f32, Backend::memory_space};
                backend.passes().write(numbers.data(), view);
                for (int round = 0; round < 3; ++round) {
                    Work first = backend.all_reduce(view, gradsync::ReduceOp::sum);
                    first.wait_on(second.stream());
                    Work then = second.all_reduce(view, gradsync::ReduceOp::sum);
                    then.wait_on(backend.stream());
                }
                backend.passes().read(view, numbers.data());
                findings.check(numbers == std::vector<float>(numbers.size(), static_cast<float>(std::pow(backend.size(), 6))),
                               where + "a wrong sum of sums");
            });
        }
    }
    if constexpr (abilities.wait_on) {
        SUBCASE("wait_on: what follows on the stream sees the result, and the Work counts as complete") {
            each_world<L>([](Backend backend, Findings& findings) {
                const std::string where = at(backend.rank(), backend.size());
                std::vector<float> ones(1000, 1);
                auto memory = backend.allocate(ones.size() * sizeof(float));
                const gradsync::BufferView view{memory.data(), ones.size(), DType::f32, Backend::memory_space};
                const auto passes = backend.passes();
                passes.write(ones.data(), view);
                Work work = backend.all_reduce(view, gradsync::ReduceOp::sum);
                work.wait_on(backend.stream());
                findings.check(work.test(), where + "the Work is not complete");
                passes.read(view, ones.data());  // on that stream
                findings.check(ones == std::vector<float>(ones.size(), static_cast<float>(backend.size())), where + "not summed");
            });
        }
    }
}

}  // namespace gradsync_test
