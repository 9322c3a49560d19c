// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
// The 8-bit floating types in the kernels: against the oracle of their formats, in double.
#include <gradsync/kernel/convert.hpp>

#include <doctest/doctest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <vector>

#include <gradsync/kernel/reduce.hpp>

#include "kernel_test.hpp"
#include "support/float8_oracle.hpp"
#include "support/half_oracle.hpp"

namespace gs = gradsync;
using gradsync_test::Float8Oracle;

namespace {

template <class F>
std::vector<F> all_codes() {
    std::vector<F> result;
    for (unsigned code = 0; code < 256; ++code) result.push_back(F::from_bits(static_cast<std::uint8_t>(code)));
    return result;
}

/// Numbers around every value and midpoint of both formats, and a sample of all bit patterns.
template <class From>
std::vector<From> hard_numbers() {
    using U = std::conditional_t<sizeof(From) == 4, std::uint32_t, std::uint64_t>;
    std::vector<From> cases;
    const auto add = [&](U bits) {
        cases.push_back(std::bit_cast<From>(bits));
        cases.push_back(std::bit_cast<From>(static_cast<U>(bits | ~(~U{0} >> 1))));
    };
    for (const Float8Oracle* oracle : {&Float8Oracle::of<gs::Float8E4M3>(), &Float8Oracle::of<gs::Float8E5M2>()})
        for (unsigned code = 0; code < oracle->largest(); ++code)
            for (const double value : {oracle->value(code), (oracle->value(code) + oracle->value(code + 1)) / 2, oracle->value(code + 1)}) {
                const U center = std::bit_cast<U>(static_cast<From>(value));
                for (const U near : {center, U(center + 1), U(center == 0 ? 0 : center - 1)}) add(near);
            }
    U bits = 0;
    for (int i = 0; i < 100'000; ++i, bits += static_cast<U>(~U{0} / 100'000) | 1) add(bits);
    const U infinity = (~U{0} >> 1) >> (sizeof(From) == 4 ? 23 : 52) << (sizeof(From) == 4 ? 23 : 52);
    for (const U special : {infinity, U(infinity - 1), U(infinity + 1), U(~U{0} >> 1), U{1}}) add(special);
    return cases;
}

template <class F, class From>
int wrong_conversions(const std::vector<From>& from, bool flush) {
    std::vector<F> to(from.size());
    std::vector<std::uint8_t> expected;
    for (const From x : from) expected.push_back(Float8Oracle::of<F>().expected(x));
    {
#if GRADSYNC_X86_DISPATCH
        std::unique_ptr<gradsync_test::FlushToZero> guard;
        if (flush) guard = std::make_unique<gradsync_test::FlushToZero>();
#else
        (void)flush;
#endif
        gradsync_test::convert(from.data(), to.data(), from.size());
    }
    int wrong = 0;
    for (std::size_t i = 0; i < from.size(); ++i) wrong += to[i].bits() != expected[i];
    return wrong;
}

}  // namespace

TEST_CASE_TEMPLATE("8-bit floats are rounded once from float and double at every hard case, flushing to zero or not", F, gs::Float8E4M3,
                   gs::Float8E5M2) {
    for (const bool flush : {false, true}) {
        CAPTURE(flush);
        CHECK(wrong_conversions<F>(hard_numbers<float>(), flush) == 0);
        CHECK(wrong_conversions<F>(hard_numbers<double>(), flush) == 0);
    }
}

TEST_CASE_TEMPLATE("8-bit floats: from double by way of float they would be rounded twice", F, gs::Float8E4M3, gs::Float8E5M2) {
    const double above_tie = 1 + std::ldexp(1.0, -F::mantissa - 1) + 0x1p-40;
    F to{};
    gradsync_test::convert(&above_tie, &to, 1);
    CHECK(to == F(1.0f + std::ldexp(1.0f, -F::mantissa)));
    CHECK(F(static_cast<float>(above_tie)) == F(1.0f));
}

TEST_CASE_TEMPLATE("8-bit floats: all codes convert to all other types and back", F, gs::Float8E4M3, gs::Float8E5M2) {
    const auto codes = all_codes<F>();
    const auto to_and_back = [&]<class To>(To) {
        std::vector<To> wide(256);
        std::vector<F> back(256);
        gradsync_test::convert(codes.data(), wide.data(), 256);
        gradsync_test::convert(wide.data(), back.data(), 256);
        for (std::size_t i = 0; i < 256; ++i) {
            CAPTURE(i);
            const auto value = static_cast<float>(codes[i]);
            const double expected = static_cast<double>(value);
            const auto seen = static_cast<double>(gradsync_test::widened(wide[i]));
            CHECK((std::isnan(expected) ? std::isnan(seen) : seen == expected));
            CHECK(back[i] == F(value));
        }
    };
    to_and_back(gs::Float16{});
    to_and_back(gs::BFloat16{});
    to_and_back(float{});
    to_and_back(double{});
    std::vector<F> same(256);
    gs::kernel::convert(codes.data(), gs::dtype_of<F>, same.data(), gs::dtype_of<F>, 256);
    CHECK(same == codes);  // infinities and NaNs too
}

TEST_CASE("8-bit floats convert from one type to the other") {
    std::vector<gs::Float8E5M2> to(256);
    std::vector<gs::Float8E4M3> back(256);
    const auto e4m3 = all_codes<gs::Float8E4M3>();
    const auto e5m2 = all_codes<gs::Float8E5M2>();
    gradsync_test::convert(e4m3.data(), to.data(), 256);
    gradsync_test::convert(e5m2.data(), back.data(), 256);
    for (std::size_t i = 0; i < 256; ++i) {
        CAPTURE(i);
        CHECK(to[i] == gs::Float8E5M2(static_cast<float>(e4m3[i])));
        CHECK(back[i] == gs::Float8E4M3(static_cast<float>(e5m2[i])));
    }
}

TEST_CASE_TEMPLATE("8-bit floats: kernels take every length and misalignment, and write nothing beside", F, gs::Float8E4M3,
                   gs::Float8E5M2) {
    const auto run = [&]<class From, class To>(From, To) {
        std::vector<float> numbers(4000);
        for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<float>(i % 331) * 0.37f - 40.0f;
        std::vector<From> from(numbers.size());
        gradsync_test::convert(numbers.data(), from.data(), from.size());
        int wrong = 0;
        for (const std::size_t length : {0u, 1u, 2u, 63u, 64u, 65u, 200u, 1023u, 1024u, 1025u, 2048u, 3001u})
            for (std::size_t offset = 0; offset < 17; offset += 3) {
                std::vector<To> to(length + offset + 70);
                std::memset(static_cast<void*>(to.data()), 0x5a, to.size() * sizeof(To));
                const std::vector<To> before = to;
                gradsync_test::convert(from.data() + offset, to.data() + offset, length);
                for (std::size_t i = 0; i < to.size(); ++i) {
                    const bool inside = i >= offset && i < offset + length;
                    To expected = before[i];
                    if (inside) {
                        if constexpr (sizeof(To) == 1) expected = To(static_cast<float>(from[i]));
                        else expected = static_cast<To>(static_cast<float>(from[i]));
                    }
                    wrong += std::memcmp(&to[i], &expected, sizeof expected) != 0;
                }
            }
        CHECK(wrong == 0);
    };
    run(float{}, F{});
    run(double{}, F{});
    run(gs::BFloat16{}, F{});
    run(F{}, float{});
    run(F{}, double{});
    run(F{}, gs::BFloat16{});
}

TEST_CASE_TEMPLATE("8-bit floats: the sum, product, least and largest of any two are those of the oracle", F, gs::Float8E4M3,
                   gs::Float8E5M2) {
    std::vector<F> a, b;
    for (const F x : all_codes<F>())
        for (const F y : all_codes<F>()) {
            a.push_back(x);
            b.push_back(y);
        }
    const auto& oracle = Float8Oracle::of<F>();
    for (const gs::ReduceOp op : {gs::ReduceOp::sum, gs::ReduceOp::product, gs::ReduceOp::min, gs::ReduceOp::max, gs::ReduceOp::mean}) {
        CAPTURE(name_of(op));
        std::vector<F> out(a.size());
        const void* in[] = {a.data(), b.data()};
        void* result[] = {out.data()};
        gs::kernel::Reduction r;
        r.inputs = in;
        r.outputs = result;
        r.count = a.size();
        r.dtype = gs::dtype_of<F>;
        gs::kernel::register_kernels<gs::dtype_of<F>>();
        r.op = op;
        if (op == gs::ReduceOp::mean) r.factor = 0.5;
        gs::kernel::reduce(r);
        int wrong = 0;
        for (std::size_t i = 0; i < a.size(); ++i) {
            const auto x = static_cast<double>(static_cast<float>(a[i])), y = static_cast<double>(static_cast<float>(b[i]));
            // Exact in double, and in f32: sums of these formats have no more than 24 significant bits but for e5m2's extremes.
            double expected = op == gs::ReduceOp::product ? x * y
                              : op == gs::ReduceOp::min   ? std::fmin(x, y)
                              : op == gs::ReduceOp::max   ? std::fmax(x, y)
                                                          : x + y;
            if (op == gs::ReduceOp::mean) expected /= 2;
            if (std::isnan(x) || std::isnan(y) || std::isnan(expected)) {
                wrong += !std::isnan(static_cast<float>(out[i]));
            } else if (x == y && (op == gs::ReduceOp::min || op == gs::ReduceOp::max)) {
                wrong += (out[i].bits() & 0x7f) != (oracle.expected(expected) & 0x7f);  // of zeros, either
            } else {
                wrong += out[i].bits() != oracle.expected(static_cast<double>(static_cast<float>(expected)));
            }
        }
        CHECK(wrong == 0);
    }
}

TEST_CASE_TEMPLATE("8-bit floats: sums of several are rounded once, and only the mean has to fit", F, gs::Float8E4M3, gs::Float8E5M2) {
    const float ulp = std::ldexp(1.0f, 4 - F::mantissa), top = static_cast<float>(F::from_bits(F::largest));
    const auto reduced = [](std::vector<std::vector<F>> values, double factor) {
        std::vector<const void*> in;
        for (auto& v : values) in.push_back(v.data());
        void* out[] = {values[1].data()};  // one of the inputs
        gs::kernel::Reduction r;
        r.inputs = in;
        r.outputs = out;
        r.count = values[0].size();
        r.dtype = gs::dtype_of<F>;
        gs::kernel::register_kernels<gs::dtype_of<F>>();
        r.factor = factor;
        gs::kernel::register_kernels<gs::dtype_of<F>>();
        gs::kernel::reduce(r);
        return values[1];
    };
    const auto all = [](float x) { return std::vector<F>(2500, F(x)); };
    // 16 + half a step + half a step: one step more, but 16 where each sum is rounded.
    CHECK(reduced({all(16), all(ulp / 2), all(ulp / 2)}, 1) == all(16 + ulp));
    CHECK(reduced({all(top), all(top), all(top), all(top)}, 0.25) == all(top));
    CHECK(reduced({all(top), all(top)}, 1) == all(top));  // saturated
}
