// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/kernel/reduce.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include <gradsync/core/buffer_view.hpp>

#include "kernel_test.hpp"
#include "support/random.hpp"
#include "support/slow_build.hpp"
#include "support/sum_tree.hpp"

namespace gs = gradsync;
namespace kernel = gradsync::kernel;
using gs::DType;
using gs::ReduceOp;
using kernel::Isa;
using kernel::Reduction;
using namespace gradsync_test;

namespace {

constexpr int mantissa_bits(DType dtype) {
    return dtype == DType::f16      ? 10
           : dtype == DType::bf16   ? 7
           : dtype == DType::f32    ? 23
           : dtype == DType::f8e4m3 ? 3
           : dtype == DType::f8e5m2 ? 2
                                    : 52;
}

/// Mostly numbers around 1, whose sums must be rounded and are ties in many cases; NaNs, infinities, denormals, zeros
/// and the largest numbers of both signs, and any bits at all.
template <class T>
T some_value(Random& random) {
    const std::uint64_t bits = random();
    if constexpr (std::is_integral_v<T>) {
        const T edges[] = {0, 1, std::numeric_limits<T>::max(), std::numeric_limits<T>::min()};
        return bits % 8 == 0 ? edges[(bits >> 8) % 4] : static_cast<T>(bits >> 16);
    } else {
        constexpr int width = sizeof(T) * 8, mantissa = mantissa_bits(gs::dtype_of<T>);
        const std::uint64_t sign = (bits >> 8 & 1) << (width - 1);
        const std::uint64_t infinity = (std::uint64_t{1} << (width - 1)) - (std::uint64_t{1} << mantissa);
        const std::uint64_t edges[] = {0,
                                       1,
                                       (std::uint64_t{1} << mantissa) - 1,
                                       std::uint64_t{1} << mantissa,
                                       infinity - 1,
                                       infinity,
                                       infinity | 1,
                                       infinity | (std::uint64_t{1} << (mantissa - 1)) | 5};
        if (bits % 16 == 0) return from_bits<T>(sign | edges[(bits >> 9) % 8]);
        if (bits % 16 == 1) return from_bits<T>(bits >> (64 - width));
        const std::uint64_t one = (std::uint64_t{1} << (width - 2 - mantissa)) - 1;
        return from_bits<T>(sign | ((one - 4 + (bits >> 9) % 8) << mantissa) | (bits >> (64 - mantissa)));
    }
}

/// From the documentation of Reduction, one element. Products are volatile so that no compiler fuses them with sums.
template <class T>
T expected_element(const Reduction& r, std::size_t at) {
    using A = decltype(widened(T{}));
    const auto leaf = [&](std::size_t i) -> std::optional<A> {
        T element;
        std::memcpy(&element, static_cast<const std::byte*>(r.inputs[i]) + at * sizeof(T), sizeof(T));
        volatile A x = widened(element);
        if constexpr (std::is_floating_point_v<A>)
            if (!r.scales.empty()) x = x * static_cast<A>(r.scales[i]);
        return x;
    };
    const auto add = [&](A a, A b) -> std::optional<A> {
        if (r.op == ReduceOp::min) return is_nan(b) || b < a ? b : a;
        if (r.op == ReduceOp::max) return is_nan(b) || b > a ? b : a;
        if constexpr (std::is_integral_v<A>) {
            const auto x = static_cast<std::uint64_t>(a), y = static_cast<std::uint64_t>(b);
            return static_cast<A>(r.op == ReduceOp::product ? x * y : x + y);
        } else {
            return r.op == ReduceOp::product ? a * b : a + b;
        }
    };
    A result = *tree_sum(0, r.inputs.size(), leaf, add);
    if constexpr (std::is_floating_point_v<A>) result = result * static_cast<A>(r.factor);
    return static_cast<T>(result);
}

/// What a reduction can be run by: the library's choice, or one kernel on one instruction set.
struct Way {
    std::string name;
    void (*run)(const Reduction&);
    bool sums_only = false;
};

template <class T>
using Blocked = kernel::detail::BlockedReduce<kernel::accumulator_t<T>>;

template <class T>
auto conversions() {
    kernel::detail::Conversions<kernel::accumulator_t<T>> result;
    if constexpr (is_half<T>) {
        const kernel::Kernels& table = kernel::table_of<gs::dtype_of<T>>();
        result = {table.to_f32, table.from_f32};
    }
    return result;
}

template <class T>
std::vector<Way> ways() {
    kernel::register_kernels<gs::dtype_of<T>>();
    std::vector<Way> result{{"reduce", [](const Reduction& r) { kernel::reduce(r); }}};
    if constexpr (!std::is_integral_v<T>)  // integers go through unsigned ones of 64 bits
        result.push_back({"blocks, baseline", [](const Reduction& r) { kernel::run_baseline<Blocked<T>>(&r, conversions<T>()); }});
    if constexpr (!std::is_integral_v<T> && !gs::is_float8(gs::dtype_of<T>)) {
        using Sum = kernel::detail::RegisterSum<T>;
        const auto add = [&](const char* name, void (*run)(const Reduction&), bool sums_only = false) {
            result.push_back({name, run, sums_only});
        };
        add(
            "registers, baseline", [](const Reduction& r) { kernel::run_baseline<typename Sum::template With<16>>(&r); }, true);
#if GRADSYNC_X86_DISPATCH
        if (kernel::isa() >= Isa::avx2) {
            add("blocks, avx2", [](const Reduction& r) { kernel::run_avx2<Blocked<T>>(&r, conversions<T>()); });
            add(
                "registers, avx2", [](const Reduction& r) { kernel::run_avx2<typename Sum::template With<32>>(&r); }, true);
        }
        if (kernel::isa() >= Isa::avx512) {
            add("blocks, avx512", [](const Reduction& r) { kernel::run_avx512<Blocked<T>>(&r, conversions<T>()); });
            add(
                "registers, avx512", [](const Reduction& r) { kernel::run_avx512<typename Sum::template With<64>>(&r); }, true);
        }
#endif
    }
    return result;
}

enum class Placement { in_place, apart, one_input };

/// Buffers that start `offset` bytes after a multiple of 64, between guards.
class Memory {
public:
    static constexpr std::size_t guard = 64;
    Memory(std::size_t bytes, std::size_t offset) : offset_(guard + offset), bytes_(bytes) {
        storage_.assign(offset_ + bytes + guard + 64, std::byte{0x5a});
        const auto address = reinterpret_cast<std::uintptr_t>(storage_.data());
        offset_ += (64 - address % 64) % 64;
    }
    std::byte* data() { return storage_.data() + offset_; }
    bool guards_hold() const {
        const auto intact = [](std::byte b) { return b == std::byte{0x5a}; };
        return std::all_of(storage_.begin(), storage_.begin() + static_cast<std::ptrdiff_t>(offset_), intact) &&
               std::all_of(storage_.begin() + static_cast<std::ptrdiff_t>(offset_ + bytes_), storage_.end(), intact);
    }

private:
    std::size_t offset_, bytes_;
    std::vector<std::byte> storage_;
};

/// What `check` needs of an element type. All arrays have `count` elements.
struct ReducedType {
    gs::DType dtype;
    std::vector<Way> ways;
    void (*draw)(Random& random, std::byte* to, std::size_t count);
    void (*reduce)(const Reduction& r, std::byte* to);  ///< the oracle
    /// The first element that differs, in any bit or, if `loosely`, not only in its NaN; or `count`.
    std::size_t (*first_difference)(const std::byte* actual, const std::byte* expected, std::size_t count, bool loosely);
};

template <class T>
ReducedType reduced_type() {
    return {gs::dtype_of<T>, ways<T>(),
            [](Random& random, std::byte* to, std::size_t count) {
                for (std::size_t i = 0; i < count; ++i) {
                    const T x = some_value<T>(random);
                    std::memcpy(to + i * sizeof(T), &x, sizeof(T));
                }
            },
            [](const Reduction& r, std::byte* to) {
                for (std::size_t i = 0; i < r.count; ++i) {
                    const T x = expected_element<T>(r, i);
                    std::memcpy(to + i * sizeof(T), &x, sizeof(T));
                }
            },
            [](const std::byte* actual, const std::byte* expected, std::size_t count, bool loosely) {
                for (std::size_t i = 0; i < count; ++i) {
                    T a, b;
                    std::memcpy(&a, actual + i * sizeof(T), sizeof(T));
                    std::memcpy(&b, expected + i * sizeof(T), sizeof(T));
                    if (loosely ? !agrees(a, b) : bits_of(a) != bits_of(b)) return i;
                }
                return count;
            }};
}

struct Case {
    ReduceOp op;
    std::size_t inputs;
    bool scaled;
    double factor;
    Placement placement;
    std::size_t count;
    std::size_t offset;
};

void check(const Case& c, const ReducedType& type, Random& random) {
    const std::size_t size = size_of(type.dtype), bytes = c.count * size;
    std::vector<std::vector<std::byte>> values(c.inputs, std::vector<std::byte>(bytes));
    std::vector<const void*> pristine;
    for (auto& v : values) {
        type.draw(random, v.data(), c.count);
        pristine.push_back(v.data());
    }
    double scales[21];
    for (std::size_t i = 0; i < std::size(scales); ++i) scales[i] = std::array{0.75, 1.0, 3.0, -0.1, 0x1p-3}[i % 5];
    Reduction r;
    r.count = c.count;
    r.dtype = type.dtype;
    r.op = c.op;
    r.factor = c.factor;
    if (c.scaled) r.scales = std::span(scales).first(c.inputs);
    r.inputs = pristine;
    std::vector<std::byte> expected(bytes);
    type.reduce(r, expected.data());

    for (const Way& way : type.ways) {
        if (way.sums_only && (c.scaled || (c.op != ReduceOp::sum && c.op != ReduceOp::mean))) continue;
        std::vector<Memory> memory;
        const std::size_t outputs = c.placement == Placement::apart ? 2 : 0;
        for (std::size_t i = 0; i < c.inputs + outputs; ++i) memory.emplace_back(bytes, (c.offset + i * c.offset) * size % 64);
        std::vector<const void*> in;
        std::vector<void*> out;
        for (std::size_t i = 0; i < c.inputs; ++i) {
            if (bytes != 0) std::memcpy(memory[i].data(), values[i].data(), bytes);
            in.push_back(memory[i].data());
            if (c.placement == Placement::in_place || (c.placement == Placement::one_input && i == c.inputs / 2))
                out.push_back(memory[i].data());
        }
        for (std::size_t i = 0; i < outputs; ++i) out.push_back(memory[c.inputs + i].data());
        r.inputs = in;
        r.outputs = out;
        way.run(r);

        std::string problem;
        for (Memory& m : memory) {
            if (!m.guards_hold()) problem = "wrote beside a buffer";
            const bool is_output = std::find(out.begin(), out.end(), m.data()) != out.end();
            const auto which = static_cast<std::size_t>(&m - memory.data());
            const std::size_t wrong =
                type.first_difference(m.data(), is_output ? expected.data() : values[which].data(), c.count, is_output);
            if (wrong != c.count && problem.empty())
                problem = (is_output ? "wrong element " : "changed an input, element ") + std::to_string(wrong);
        }
        if (!problem.empty())
            FAIL_CHECK(way.name, ", ", name_of(r.dtype), " ", name_of(c.op), ", inputs ", c.inputs, ", scaled ", c.scaled, ", factor ",
                       c.factor, ", placement ", static_cast<int>(c.placement), ", count ", c.count, ", offset ", c.offset, ": ", problem);
    }
}

/// Every operation, number of inputs, placement and length.
void check_all(const ReducedType& type, bool floating) {
    constexpr std::size_t lengths[] = {0, 1, 15, 16, 17, 255, 256, 257, 1000};
    Random random(1);
    Thinned cases;
    for (const ReduceOp op : {ReduceOp::sum, ReduceOp::min, ReduceOp::max, ReduceOp::product, ReduceOp::mean})
        for (const std::size_t inputs : {1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u, 9u, 13u, 21u})
            for (const bool scaled : {false, true})
                for (const double factor : {1.0, 1.0 / 3})
                    for (const Placement placement : {Placement::in_place, Placement::apart, Placement::one_input})
                        for (const std::size_t count : lengths) {
                            if (!floating && (scaled || factor != 1 || op == ReduceOp::mean)) continue;
                            if (inputs > 5 && (count < 255 || placement == Placement::one_input)) continue;  // to save time
                            if (!cases.next()) continue;
                            const std::size_t offset = (count + inputs) % 3;  // elements
                            check({op, inputs, scaled, factor, placement, count, offset}, type, random);
                        }
}

}  // namespace

TEST_CASE_TEMPLATE("reduce: every kernel agrees with the oracle on every operation, number of inputs, placement and length", T, std::int8_t,
                   std::uint8_t, std::int32_t, std::uint32_t, std::int64_t, std::uint64_t, gs::Float16, gs::BFloat16, float, double,
                   gs::Float8E4M3, gs::Float8E5M2) {
    check_all(reduced_type<T>(), !std::is_integral_v<T>);
}

TEST_CASE_TEMPLATE("reduce takes every misalignment of every buffer", T, std::uint8_t, gs::Float16, gs::BFloat16, float, double) {
    const ReducedType all = reduced_type<T>();
    Random random(2);
    for (std::size_t offset = 0; offset < 64 / sizeof(T); ++offset)
        for (const Placement placement : {Placement::in_place, Placement::apart})
            for (const std::size_t count : {std::size_t{15}, std::size_t{130}})
                check({ReduceOp::sum, 3, false, 1, placement, count, offset}, all, random);
}

TEST_CASE_TEMPLATE("reduce: all kernels give the same bits", T, gs::Float16, gs::BFloat16, float, double) {
    // With at most one NaN an element, sums of infinities included: of two, either may come out.
    constexpr std::size_t count = number_of_cases(20'000);
    const auto all_ways = ways<T>();
    Random random(3);
    for (const std::size_t inputs : {1u, 2u, 3u, 4u, 5u, 6u, 7u, 8u, 11u, 24u})
        for (const double factor : {1.0, 1.0 / 3}) {
            std::vector<std::vector<T>> values(inputs, std::vector<T>(count));
            for (std::size_t i = 0; i < count; ++i) {
                bool large = false;
                for (auto& v : values) {
                    const auto is_large = [&] { return !(widened(v[i]) < 100 && widened(v[i]) > -100); };
                    do v[i] = some_value<T>(random);
                    while (large && is_large());
                    large = large || is_large();
                    if (!is_nan(v[i])) continue;
                    // Compilers do not promise to keep signalling NaNs of their own types.
                    if (!is_half<T>) v[i] = from_bits<T>(bits_of(v[i]) | std::uint64_t{1} << (mantissa_bits(gs::dtype_of<T>) - 1));
                }
            }
            std::vector<const void*> in;
            for (const auto& v : values) in.push_back(v.data());
            std::vector<T> reference(count), result(count);
            Reduction r;
            r.inputs = in;
            r.count = count;
            r.dtype = gs::dtype_of<T>;
            r.factor = factor;
            void* out = reference.data();
            r.outputs = {&out, 1};
            kernel::run_baseline<Blocked<T>>(&r, conversions<T>());
            out = result.data();
            for (const Way& way : all_ways) {
                way.run(r);
                CHECK_MESSAGE(std::memcmp(result.data(), reference.data(), count * sizeof(T)) == 0, way.name, ", inputs ", inputs);
            }
        }
}

TEST_CASE_TEMPLATE("reduce: the sum of any two halves is rounded once", T, gs::Float16, gs::BFloat16) {
    // All of the first, each with as many different ones of the second as there are strides.
    constexpr std::size_t count = 0x10000;
    std::vector<T> a(count), b(count), out(count);
    const void* in[] = {a.data(), b.data()};
    void* const result = out.data();
    for (const Way& way : ways<T>())
        for (const std::uint32_t stride : {1u, 0x8001u, 0x1235u, 0x3fffu}) {
            for (std::uint32_t i = 0; i < count; ++i) {
                a[i] = from_bits<T>(i);
                b[i] = from_bits<T>(i * stride + 0x3c01u);
            }
            Reduction r;
            r.inputs = in;
            r.outputs = {&result, 1};
            r.count = count;
            r.dtype = gs::dtype_of<T>;
            way.run(r);
            std::size_t wrong = 0;
            for (std::size_t i = 0; i < count; ++i) wrong += !agrees(out[i], T(static_cast<float>(a[i]) + static_cast<float>(b[i])));
            CHECK_MESSAGE(wrong == 0, way.name, ", stride ", stride);
        }
}

TEST_CASE_TEMPLATE("reduce: a NaN stays, quiet", T, gs::Float16, gs::BFloat16) {
    const std::uint16_t infinity = std::is_same_v<T, gs::Float16> ? 0x7c00 : 0x7f80;
    const std::uint16_t quiet = std::is_same_v<T, gs::Float16> ? 0x0200 : 0x0040;
    for (const Way& way : ways<T>()) {
        std::vector<T> a(70, T(1.0f)), b(70, T(2.0f));
        a[3] = T::from_bits(static_cast<std::uint16_t>(infinity | 5));  // signalling
        b[66] = T::from_bits(static_cast<std::uint16_t>(0x8000 | infinity | 1));
        a[40] = T::from_bits(infinity);
        b[40] = T::from_bits(static_cast<std::uint16_t>(0x8000 | infinity));
        const void* in[] = {a.data(), b.data()};
        void* out[] = {a.data(), b.data()};
        Reduction r;
        r.inputs = in;
        r.outputs = out;
        r.count = 70;
        r.dtype = gs::dtype_of<T>;
        way.run(r);
        CHECK_MESSAGE(a[3].bits() == (infinity | quiet | 5), way.name);
        CHECK_MESSAGE(b[66].bits() == (0x8000 | infinity | quiet | 1), way.name);
        CHECK_MESSAGE(is_nan(a[40]), way.name);
        CHECK(a == b);
    }
}

TEST_CASE("reduce: without inputs the outputs become zero; without elements nothing is touched") {
    std::vector<float> a(20, 3.0f), b(20, 4.0f);
    void* out[] = {a.data(), b.data()};
    Reduction r;
    r.outputs = out;
    r.count = 19;
    kernel::reduce(r);
    CHECK(a[18] == 0);
    CHECK(b[0] == 0);
    CHECK(a[19] == 3);

    const void* nothing[] = {nullptr, nullptr};
    void* nowhere[] = {nullptr, nullptr};
    r.inputs = nothing;
    r.outputs = nowhere;
    r.count = 0;
    kernel::reduce(r);
}

TEST_CASE_TEMPLATE("reduce takes no outputs, or many inputs", T, gs::BFloat16, float) {
    std::vector<T> a(300, T(1.0f));
    std::vector<const void*> in(100, a.data());
    Reduction r;
    r.inputs = in;
    r.count = 300;
    r.dtype = gs::dtype_of<T>;
    for (const Way& way : ways<T>()) {
        r.outputs = {};
        way.run(r);
        CHECK(widened(a[299]) == 1);
        std::vector<T> sum(300);
        void* out = sum.data();
        r.outputs = {&out, 1};
        way.run(r);
        CHECK(widened(sum[0]) == 100);
        CHECK(widened(sum[299]) == 100);
    }
}

TEST_CASE("reduce: a type whose loops are not in the program is refused with a sentence that says what brings them") {
    // Nothing else in this process may have registered the type: the test takes its table away.
    auto& table = kernel::detail::tables[static_cast<std::size_t>(gs::DType::f8e5m2)];
    const kernel::Kernels* const before = table.exchange(nullptr);
    std::uint8_t a = 1, b = 2;
    const void* in[] = {&a, &b};
    void* out[] = {&a};
    Reduction r;
    r.inputs = in;
    r.outputs = out;
    r.count = 1;
    r.dtype = gs::DType::f8e5m2;
    CHECK_THROWS_WITH_AS(kernel::reduce(r),
                         "no code for elements of f8e5m2 is in this program: give their type where a view of them is made, as in "
                         "gs::BufferView{pointer, count, gs::DType::f8e5m2}, not afterwards in its member dtype",
                         gs::Error);
    const gs::BufferView view{&a, 1, r.dtype};
    kernel::reduce(r);
    CHECK(a ==
          static_cast<std::uint8_t>(
              gs::Float8E5M2(static_cast<float>(gs::Float8E5M2::from_bits(1)) + static_cast<float>(gs::Float8E5M2::from_bits(2))).bits()));
    table = before;
}

TEST_CASE("reduce: the library's own sums of f64 need no loops of f64") {
    auto& table = kernel::detail::tables[static_cast<std::size_t>(gs::DType::f64)];
    const kernel::Kernels* const before = table.exchange(nullptr);
    double a[] = {1, 2}, b[] = {0x1p-52, 5};
    const void* in[] = {a, b};
    void* out[] = {a, b};
    Reduction r;
    r.inputs = in;
    r.outputs = out;
    r.count = 2;
    r.dtype = gs::DType::f64;
    kernel::reduce(r);
    CHECK(a[0] == 1 + 0x1p-52);
    CHECK(b[1] == 7);
    r.op = ReduceOp::max;
    CHECK_THROWS_AS(kernel::reduce(r), gs::Error);
    table = before;
}
