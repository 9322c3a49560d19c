// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "exchange.hpp"
#include "launcher.hpp"

namespace gradsync_test {

/// Every operation, dtype and reduction with `count` elements, or every `step`-th of them; the roots take turns.
inline std::vector<Collective> all_collectives(std::size_t count, int size, std::uint64_t step = 1) {
    using gradsync::DType;
    using gradsync::ReduceOp;
    std::vector<Collective> result;
    std::uint64_t seed = count * 8 + static_cast<std::uint64_t>(size);
    const auto add = [&](Collective c) {
        c.count = count;
        c.root = static_cast<int>(++seed % static_cast<std::uint64_t>(size));
        c.seed = seed;
        if (seed % (step * thinning) == 0) result.push_back(c);
    };
    for (int operation = 0; operation < operation_count; ++operation)
        for (int dtype = 0; dtype < static_cast<int>(gradsync::dtype_count); ++dtype) {
            Collective c;
            c.operation = static_cast<Operation>(operation);
            c.dtype = static_cast<DType>(dtype);
            const bool can_alias = c.operation == Operation::reduce_scatter || c.operation == Operation::all_gather;
            for (int in_place = 0; in_place <= (can_alias ? 1 : 0); ++in_place) {
                c.in_place = in_place != 0;
                c.op = ReduceOp::sum;
                if (!c.reduces()) {
                    add(c);
                    continue;
                }
                for (const ReduceOp op : {ReduceOp::sum, ReduceOp::min, ReduceOp::max, ReduceOp::product}) {
                    c.op = op;
                    add(c);
                }
                if (!is_floating(c.dtype)) continue;
                c.op = ReduceOp::mean;
                for (int shares = 0; shares < shares_count; ++shares) {
                    c.shares = static_cast<Shares>(shares);
                    add(c);
                }
                c.shares = Shares::even;
            }
        }
    return result;
}

/// Every collective has the result that the concept promises, and writes nothing else.
template <Launcher L>
void check_results() {
    const auto run_all = [](auto collectives_of_size) {
        each_world<L>([&](typename L::Backend backend, Findings& findings) {
            const int rank = backend.rank(), size = backend.size();
            for (Collective c : collectives_of_size(size)) {
                c.any_order = !L::one_order;
                Exchange<typename L::Memory> exchange(c, rank, size);
                exchange.start(backend).wait();
                const std::string wrong = exchange.verify(L::one_order);
                findings.check(wrong.empty(), at(rank, size) + wrong);
            }
        });
    };
    SUBCASE("no elements") {
        run_all([](int size) { return all_collectives(0, size); });
    }
    SUBCASE("one element") {
        run_all([](int size) { return all_collectives(1, size); });
    }
    SUBCASE("about as many elements as ranks") {
        for (const int more : {-1, 0, 1})
            run_all([more](int size) { return all_collectives(static_cast<std::size_t>(size + more), size); });
    }
    SUBCASE("127 elements") {
        run_all([](int size) { return all_collectives(127, size); });
    }
    SUBCASE("1000 elements") {
        run_all([](int size) { return all_collectives(1000, size); });
    }
    SUBCASE("65537 elements") {
        run_all([](int size) { return all_collectives(65537, size, slow_build ? 13 : 3); });
    }
    SUBCASE("a million elements") {
        run_all([](int size) {
            const std::size_t count = (std::size_t{1} << (slow_build ? 17 : 20)) + 5;
            std::vector<Collective> large;
            for (const Operation operation :
                 {Operation::all_reduce, Operation::reduce_scatter, Operation::all_gather, Operation::broadcast})
                large.push_back({.operation = operation, .count = count, .root = size - 1, .seed = 7});
            large.push_back(large[0]);
            large.back().dtype = gradsync::DType::bf16;
            large.back().op = gradsync::ReduceOp::mean;
            return large;
        });
    }
}

}  // namespace gradsync_test
