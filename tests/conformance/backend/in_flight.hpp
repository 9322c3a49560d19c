// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "exchange.hpp"
#include "launcher.hpp"

namespace gradsync_test {

inline Collective random_collective(Random& random, int size, bool one_order) {
    Collective c;
    c.any_order = !one_order;
    c.operation = static_cast<Operation>(random.below(operation_count));
    c.dtype = static_cast<gradsync::DType>(random.below(gradsync::dtype_count));
    c.op = static_cast<gradsync::ReduceOp>(random.below(is_floating(c.dtype) ? 5 : 4));
    c.shares = static_cast<Shares>(random.below(shares_count));
    c.count = random.below(std::size_t{1} << random.below(14));
    c.root = static_cast<int>(random.below(static_cast<std::size_t>(size)));
    c.in_place = random.below(2) == 0;
    c.seed = random() >> 8;
    return c;
}

/// Collectives are asynchronous: started in one order, they may be under way in any number, and be waited for in any
/// other order.
template <Launcher L>
void check_in_flight() {
    using Work = typename L::Backend::WorkType;
    using Part = std::unique_ptr<Exchange<typename L::Memory>>;

    SUBCASE("two thousand started before the first wait; waited for in reverse") {
        each_world<L>([&](typename L::Backend backend, Findings& findings) {
            const int size = backend.size();
            std::vector<Part> parts;
            std::vector<Work> works;
            for (std::uint64_t i = 0; i < 2000 / thinning; ++i) {
                Collective c{.operation = static_cast<Operation>(i % operation_count), .count = (i * 37) % 300, .seed = i};
                c.root = static_cast<int>(i % static_cast<std::uint64_t>(size));
                parts.push_back(std::make_unique<Exchange<typename L::Memory>>(c, backend.rank(), size));
                works.push_back(parts.back()->start(backend));
            }
            while (!works.empty()) {
                works.back().wait();
                const std::string wrong = parts.back()->verify(L::one_order);
                findings.check(wrong.empty(), at(backend.rank(), size) + wrong);
                works.pop_back();
                parts.pop_back();
            }
        });
    }
    SUBCASE("memory is allocated, and groups are made, while some are under way") {
        each_world<L>([&](typename L::Backend backend, Findings& findings) {
            const int size = backend.size();
            for (std::uint64_t round = 0; round < 20; ++round) {
                std::vector<Part> parts;
                std::vector<Work> works;
                const auto start = [&](std::uint64_t seed) {
                    const Collective c{.operation = Operation::all_reduce, .op = gradsync::ReduceOp::mean, .count = 1000, .seed = seed};
                    parts.push_back(std::make_unique<Exchange<typename L::Memory>>(c, backend.rank(), size));
                    works.push_back(parts.back()->start(backend));
                };
                start(3 * round);
                const auto memory = backend.allocate(1000 * sizeof(float));
                findings.check(memory.data() != nullptr, at(backend.rank(), size) + "no memory");
                start(3 * round + 1);
                {
                    auto group = backend.split(backend.rank() % 2, backend.rank());
                    group.barrier().wait();
                }
                start(3 * round + 2);
                for (std::size_t k = 0; k < works.size(); ++k) {
                    works[k].wait();
                    const std::string wrong = parts[k]->verify(L::one_order);
                    findings.check(wrong.empty(), at(backend.rank(), size) + wrong);
                }
            }
        });
    }
    SUBCASE("random sequences, waited for by wait() and test(), in random order") {
        for (const std::uint64_t seed : {1u, 2u, 3u, 4u})
            each_world<L>([&](typename L::Backend backend, Findings& findings) {
                const int size = backend.size();
                const int rank = backend.rank();
                Random shared{seed}, own{seed * 100 + static_cast<std::uint64_t>(rank)};  // one order; waits of one's own
                std::vector<std::pair<Part, Work>> under_way;
                const auto finish_one = [&] {
                    const std::size_t i = own.below(under_way.size());
                    auto& [part, work] = under_way[i];
                    if (own.below(2) == 0)
                        while (!work.test()) std::this_thread::yield();
                    work.wait();
                    findings.check(work.test(), at(rank, size) + "a complete Work says that it is not");
                    const std::string wrong = part->verify(L::one_order);
                    findings.check(wrong.empty(), at(rank, size) + wrong);
                    std::swap(under_way[i], under_way.back());
                    under_way.pop_back();
                };
                for (std::size_t i = 0; i < 400 / thinning; ++i) {
                    const Collective c = random_collective(shared, size, L::one_order);
                    auto part = std::make_unique<Exchange<typename L::Memory>>(c, rank, size);
                    Work work = part->start(backend);
                    under_way.emplace_back(std::move(part), std::move(work));
                    if (own.below(8) == 0) backend.progress();
                    while (under_way.size() > own.below(40)) finish_one();
                }
                while (!under_way.empty()) finish_one();
            });
    }
    SUBCASE("a barrier is complete when every rank has started it, and not before") {
        each_world<L>([&](typename L::Backend backend, Findings& findings) {
            const int size = backend.size();
            typename L::Backend signal = backend.duplicate();
            for (int i = 0; i < 20; ++i) {
                const int late = i % size;
                if (backend.rank() == late) {
                    signal.barrier().wait();  // the others have started the other one
                    backend.barrier().wait();
                } else {
                    Work work = backend.barrier();
                    findings.check(!work.test(), at(backend.rank(), size) + "the barrier did not wait for the last rank");
                    Work sent = signal.barrier();
                    work.wait();
                    sent.wait();
                }
            }
        });
    }
    SUBCASE("a Work that was moved from, or never started anything, is complete") {
        each_world<L>([&](typename L::Backend backend, Findings& findings) {
            const int size = backend.size();
            Work none;
            none.wait();
            findings.check(none.test(), "a default-constructed Work is not complete");
            Collective c{.operation = Operation::all_reduce, .count = 10};
            Exchange<typename L::Memory> part(c, backend.rank(), size);
            Work first = part.start(backend);
            Work second = std::move(first);
            none = std::move(second);
            none.wait();
            none.wait();  // again, of no effect
            const std::string wrong = part.verify(L::one_order);
            findings.check(wrong.empty(), at(backend.rank(), size) + wrong);
        });
    }
}

}  // namespace gradsync_test
