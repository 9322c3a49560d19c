// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <gradsync/average.hpp>

#include "exchange.hpp"
#include "launcher.hpp"

namespace gradsync_test {

/// A sum over a group: right only if exactly its members took part, in its order.
template <class Memory, gradsync::Backend B>
std::string check_group_sum(B& group, std::uint64_t seed, bool one_order) {
    Collective c{.operation = Operation::all_reduce, .count = 33, .seed = seed};
    Exchange<Memory> part(c, group.rank(), group.size());
    part.start(group).wait();
    return part.verify(one_order);
}

/// Copies, duplicates and splits of a handle.
template <Launcher L>
void check_groups() {
    using Backend = typename L::Backend;
    using Memory = typename L::Memory;
    SUBCASE("a copy of a handle is the same rank, and outlives the original") {
        each_world<L>([&](Backend backend, Findings& findings) {
            const int size = backend.size();
            std::optional<Backend> original(backend);
            Backend copy(*original);
            findings.check(copy.rank() == backend.rank() && copy.size() == size, "a copy is another rank");
            for (std::uint64_t i = 0; i < 10; ++i) {
                Backend& either = backend.rank() % 2 == 0 ? backend : copy;
                const std::string wrong = check_group_sum<Memory>(either, i, L::one_order);
                findings.check(wrong.empty(), at(backend.rank(), size) + wrong);
            }
            original.reset();
            const std::string wrong = check_group_sum<Memory>(copy, 11, L::one_order);
            findings.check(wrong.empty(), at(backend.rank(), size) + wrong);
        });
    }
    SUBCASE("split: one group a colour, ordered by key, then rank") {
        each_world<L>([&](Backend backend, Findings& findings) {
            const int size = backend.size();
            const int rank = backend.rank();
            Backend parity = backend.split(rank % 2, -rank);  // reversed
            const int members = (size - rank % 2 + 1) / 2;
            const int place = members - 1 - rank / 2;
            findings.check(parity.size() == members && parity.rank() == place,
                           at(rank, size) + "became rank " + std::to_string(parity.rank()) + " of " + std::to_string(parity.size()));
            Backend same_key = backend.split(7, 0);
            findings.check(same_key.rank() == rank && same_key.size() == size, at(rank, size) + "equal keys do not keep the order");
            Backend alone = backend.split(rank, 0);
            findings.check(alone.rank() == 0 && alone.size() == 1, at(rank, size) + "is not alone");
            for (std::uint64_t i = 0; i < 5; ++i)
                for (Backend* group : {&parity, &same_key, &alone, &backend}) {
                    const std::string wrong = check_group_sum<Memory>(*group, i, L::one_order);
                    findings.check(wrong.empty(), at(rank, size) + wrong);
                }
        });
    }
    SUBCASE("groups of groups, while the parents go on") {
        each_world<L>([&](Backend backend, Findings& findings) {
            const int size = backend.size();
            const int rank = backend.rank();
            Backend inner = backend.split(rank < size / 2 ? 0 : 1, rank).duplicate().split(0, rank).duplicate();
            for (std::uint64_t i = 0; i < 5; ++i) {
                const std::string wrong =
                    check_group_sum<Memory>(inner, i, L::one_order) + check_group_sum<Memory>(backend, i + 9, L::one_order);
                findings.check(wrong.empty(), at(rank, size) + wrong);
            }
        });
    }
    SUBCASE("a duplicate has an order of its own") {
        each_world<L>([&](Backend backend, Findings& findings) {
            const int size = backend.size();
            Backend twin = backend.duplicate();
            findings.check(twin.rank() == backend.rank() && twin.size() == size, "a duplicate is another rank");
            for (std::uint64_t i = 0; i < 50; ++i) {
                Collective a{.operation = Operation::all_reduce, .count = 100, .seed = i};
                Collective b{.operation = Operation::all_reduce, .dtype = gradsync::DType::f64, .count = 50, .seed = i + 99};
                Exchange<Memory> in_backend(a, backend.rank(), size), in_twin(b, backend.rank(), size);
                typename Backend::WorkType first, second;
                if (backend.rank() % 2 == 0) {
                    first = in_backend.start(backend);
                    second = in_twin.start(twin);
                    first.wait();
                    second.wait();
                } else {
                    second = in_twin.start(twin);
                    first = in_backend.start(backend);
                    second.wait();
                    first.wait();
                }
                const std::string wrong = in_backend.verify(L::one_order) + in_twin.verify(L::one_order);
                findings.check(wrong.empty(), at(backend.rank(), size) + wrong);
            }
        });
    }
    SUBCASE("allocate: zeroed, aligned, and good for collectives") {
        each_world<L>([&](Backend backend, Findings& findings) {
            const int size = backend.size();
            for (const std::size_t bytes : {std::size_t{0}, std::size_t{4}, std::size_t{4000}, std::size_t{5} << 20}) {
                auto memory = backend.allocate(bytes);
                findings.check(reinterpret_cast<std::uintptr_t>(memory.data()) % 64 == 0, "not aligned to 64 bytes");
                if constexpr (Backend::memory_space == gradsync::MemorySpace::host) {
                    float* elements = static_cast<float*>(memory.data());
                    bool zero = true;
                    for (std::size_t i = 0; i < bytes / 4; ++i) zero = zero && elements[i] == 0;
                    findings.check(zero, "not zeroed");
                    for (std::size_t i = 0; i < bytes / 4; ++i) elements[i] = 1;
                    backend.all_reduce({elements, bytes / 4, gradsync::DType::f32, Backend::memory_space}, gradsync::ReduceOp::sum).wait();
                    bool summed = true;
                    for (std::size_t i = 0; i < bytes / 4; ++i) summed = summed && elements[i] == static_cast<float>(size);
                    findings.check(summed, "not summed");
                }
                backend.barrier().wait();
            }
        });
    }
    if constexpr (Backend::memory_space == gradsync::MemorySpace::host) {
        SUBCASE("memory of one group is good for collectives of others, whose ranks may not see it") {
            each_world<L>([&](Backend backend, Findings& findings) {
                constexpr std::size_t count = 40'000;
                const int rank = backend.rank();
                Backend pair = backend.split(rank / 2, rank), across = backend.split(rank % 2, rank);
                for (Backend* owner : {&pair, &across, &backend}) {
                    auto memory = owner->allocate(count * sizeof(float));
                    auto* const elements = static_cast<float*>(memory.data());
                    for (Backend* user : {&backend, &across, &pair}) {
                        for (std::size_t i = 0; i < count; ++i) elements[i] = static_cast<float>(rank + 1);
                        float expected = static_cast<float>(rank + 1);
                        gradsync::sum(*user, expected);
                        user->all_reduce({elements, count, gradsync::DType::f32, Backend::memory_space}, gradsync::ReduceOp::sum).wait();
                        for (std::size_t i = 0; i < count; ++i)
                            if (elements[i] != expected) return findings.check(false, at(rank, backend.size()) + "a wrong sum");
                        backend.barrier().wait();
                    }
                }
            });
        }
    }
    SUBCASE("the time limit is what was set, also in groups made from the handle") {
        each_world<L>([&](Backend backend, Findings& findings) {
            findings.check(backend.timeout() == ample, "another limit than the launcher's");
            backend.set_timeout(59s);
            findings.check(backend.timeout() == 59s, "set_timeout had no effect");
            findings.check(backend.duplicate().timeout() == 59s, "a duplicate has another limit");
        });
    }
}

}  // namespace gradsync_test
