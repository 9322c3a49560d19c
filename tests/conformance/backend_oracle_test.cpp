// SPDX-License-Identifier: BSL-1.0
// The oracle for backends that add up in any order: 8-bit results, and some of 16 bits, are the same in any order, rounded after every
// addition, and a wrong result is noticed.
#include <doctest/doctest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "conformance/backend/exchange.hpp"

using namespace gradsync_test;
using gradsync::Contribution;
using gradsync::DType;
using gradsync::ReduceOp;

namespace {

/// As NCCL does it: elements are scaled and rounded, then combined one rank after another, the last one first, and rounded each time.
template <class T>
Bytes rounded_each_time(const Collective& c, int size, double factor) {
    Bytes result(c.count * sizeof(T));
    T* const out = reinterpret_cast<T*>(result.data());
    for (int r = size; r-- > 0;) {
        const Bytes input = c.input(r, size);
        const T* const in = reinterpret_cast<const T*>(input.data());
        const auto scale = static_cast<float>(c.op == ReduceOp::mean ? c.contribution(r, size).scale * factor : 1);
        for (std::size_t i = 0; i < c.count; ++i) {
            const T own = scale == 0 ? T(0.0f) : T(static_cast<float>(in[i]) * scale);
            const auto a = static_cast<float>(out[i]), x = static_cast<float>(own);
            out[i] = r + 1 == size ? own : c.op == ReduceOp::product ? T(a * x) : T(a + x);
        }
    }
    return result;
}

}  // namespace

TEST_CASE("the backends' oracle: results of 8 bits, and some of 16, have the same bits in any order, and nothing else has them") {
    for (const DType dtype : {DType::f8e4m3, DType::f8e5m2, DType::bf16, DType::f16})
        for (const ReduceOp op : {ReduceOp::sum, ReduceOp::mean, ReduceOp::product})
            for (int shares = 0; shares < (op == ReduceOp::mean ? shares_count : 1); ++shares)
                for (int size = 1; size <= 4; ++size) {
                    Collective c{.operation = Operation::all_reduce, .dtype = dtype, .op = op, .count = 1000, .seed = 5};
                    c.shares = static_cast<Shares>(shares);
                    c.any_order = true;
                    CAPTURE(c.describe());
                    CAPTURE(size);
                    std::vector<Bytes> inputs;
                    std::vector<Contribution> contributions;
                    double weight = 0;
                    int with_data = 0;
                    for (int r = 0; r < size; ++r) {
                        inputs.push_back(c.input(r, size));
                        contributions.push_back(c.contribution(r, size));
                        weight += contributions.back().weight;
                        with_data += contributions.back().scale != 0 ? 1 : 0;
                    }
                    const Bytes expected = reduce_by_hand(dtype, op, inputs, contributions);
                    const double factor = weight == 0 ? 0 : 1 / weight;
                    const Bytes other = with_element_type(dtype, [&]<class T>(T) -> Bytes {
                        if constexpr (!gradsync::is_low_precision(gradsync::dtype_of<T>)) return {};
                        else return rounded_each_time<T>(c, size, factor);
                    });
                    CHECK(difference(dtype, other, expected, c.is_representable(), size) == "");
                    if (op == ReduceOp::sum) {  // the rest of a vector that counts twice
                        std::vector<Bytes> twice = inputs;
                        twice.push_back(inputs[0]);
                        Bytes wrong = expected;
                        const Bytes more = reduce_by_hand(dtype, op, twice, std::vector<Contribution>(twice.size()));
                        std::copy_n(more.end() - 2, 2, wrong.end() - 2);
                        CHECK(difference(dtype, wrong, expected, c.is_representable(), size) != "");
                    }
                    if (weight == 0 || with_data == 0) continue;
                    CHECK(difference(dtype, Bytes(expected.size()), expected, c.is_representable(), size) != "");
                    if (with_data == 1) continue;  // whose elements may be the result
                    for (const Bytes& untouched : inputs) CHECK(difference(dtype, untouched, expected, c.is_representable(), size) != "");
                }
}
