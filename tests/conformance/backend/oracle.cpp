// SPDX-License-Identifier: BSL-1.0
#include "conformance/backend/oracle.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <type_traits>

#include "support/sum_tree.hpp"

namespace gradsync_test {
namespace {

/// Elements that show mistakes: integers of all sizes, which wrap around; floats over seven binades, so that sums
/// round, and depend on their order.
template <class T>
T random_element(Random& random) {
    const std::uint64_t bits = random();
    if constexpr (std::is_integral_v<T>) return static_cast<T>(bits >> (8 * (8 - sizeof(T))));
    else {
        const std::uint64_t sign = bits << 63, exponent = 1023 - 4 + (bits >> 1) % 7, mantissa = bits >> 12;
        const auto value = std::bit_cast<double>(sign | exponent << 52 | mantissa);
        if constexpr (std::is_same_v<T, double>) return value;
        else return T(static_cast<float>(value));
    }
}

/// One operation on two accumulators. Integers wrap around.
template <class A>
A combine(gradsync::ReduceOp op, A a, A x) {
    using gradsync::ReduceOp;
    if (op == ReduceOp::min) return std::min(a, x);
    if (op == ReduceOp::max) return std::max(a, x);
    if constexpr (std::is_integral_v<A>)
        return static_cast<A>(op == ReduceOp::product ? static_cast<std::uint64_t>(a) * static_cast<std::uint64_t>(x)
                                                      : static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(x));
    else return op == ReduceOp::product ? a * x : a + x;
}

/// Elements are cut from a pool, whose length is a prime so that its period meets no block or shard size; making every element
/// anew takes most of the suite's time.
template <class T, class Make>
std::vector<T> make_pool(Make&& make) {
    std::vector<T> elements(16381);
    Random random{1};
    for (T& element : elements) element = make(random);
    return elements;
}
template <class T>
Bytes cut_from(const std::vector<T>& pool, std::size_t count, std::uint64_t seed) {
    Bytes bytes(count * sizeof(T));
    std::size_t from = Random{seed}.below(pool.size());
    for (std::size_t done = 0; done < count; from = 0) {
        const std::size_t n = std::min(count - done, pool.size() - from);
        std::memcpy(bytes.data() + done * sizeof(T), pool.data() + from, n * sizeof(T));
        done += n;
    }
    return bytes;
}

/// Plus or minus one of the first `magnitudes` of 1, 1/2, 2.
template <class T>
T power_of_two(Random& random, std::size_t magnitudes) {
    constexpr float powers[] = {1, 0.5f, 2};
    const float magnitude = powers[random.below(magnitudes)];
    return T(random.below(2) == 0 ? magnitude : -magnitude);
}

}  // namespace

Bytes random_elements(gradsync::DType dtype, std::size_t count, std::uint64_t seed) {
    return with_element_type(dtype, [&]<class T>(T) {
        static const std::vector<T> pool = make_pool<T>([](Random& random) { return random_element<T>(random); });
        return cut_from(pool, count, seed);
    });
}

Bytes representable_elements(gradsync::DType dtype, gradsync::ReduceOp op, std::size_t count, std::uint64_t seed) {
    return with_element_type(dtype, [&]<class T>(T) -> Bytes {
        if constexpr (gradsync::is_low_precision(gradsync::dtype_of<T>)) {
            static const auto pool_of = [](std::size_t magnitudes) {
                return make_pool<T>([=](Random& random) { return power_of_two<T>(random, magnitudes); });
            };
            static const std::vector<T> of_means = pool_of(1), of_sums = pool_of(2), of_products = pool_of(3);
            using gradsync::ReduceOp;
            return cut_from(op == ReduceOp::mean ? of_means : op == ReduceOp::sum ? of_sums : of_products, count, seed);
        } else {
            return {};
        }
    });
}

Bytes reduce_by_hand(gradsync::DType dtype, gradsync::ReduceOp op, const std::vector<Bytes>& inputs,
                     const std::vector<gradsync::Contribution>& contributions) {
    Bytes result(inputs[0].size());
    double weight = 0;
    for (const gradsync::Contribution& c : contributions) weight += c.weight;
    with_element_type(dtype, [&]<class T>(T) {
        constexpr bool low = gradsync::is_low_precision(gradsync::dtype_of<T>);
        using A = std::conditional_t<low, float, T>;
        T* out = reinterpret_cast<T*>(result.data());
        using Terms = std::vector<A>;
        const bool mean = op == gradsync::ReduceOp::mean;
        const auto leaf = [&](std::size_t r) -> std::optional<Terms> {
            if (mean && (weight == 0 || contributions[r].scale == 0)) return std::nullopt;
            const T* in = reinterpret_cast<const T*>(inputs[r].data());
            Terms terms(result.size() / sizeof(T));
            // Products and sums in loops of their own, so that no compiler fuses them into one rounding.
            for (std::size_t i = 0; i < terms.size(); ++i) terms[i] = static_cast<A>(in[i]);
            if constexpr (std::is_floating_point_v<A>)
                if (mean)
                    for (A& term : terms) term *= static_cast<A>(contributions[r].scale);
            return terms;
        };
        const auto add = [&](const Terms& a, const Terms& b) -> std::optional<Terms> {
            Terms both(a.size());
            for (std::size_t i = 0; i < a.size(); ++i) both[i] = combine(op, a[i], b[i]);
            return both;
        };
        Terms sums = tree_sum(0, inputs.size(), leaf, add).value_or(Terms(result.size() / sizeof(T)));
        if constexpr (std::is_floating_point_v<A>)
            if (op == gradsync::ReduceOp::mean && weight != 0)
                for (A& sum : sums) sum *= static_cast<A>(1 / weight);
        for (std::size_t i = 0; i < sums.size(); ++i) out[i] = static_cast<T>(sums[i]);
    });
    return result;
}

std::string difference(gradsync::DType dtype, ConstBytes actual, ConstBytes expected, bool exact, int size) {
    if (same(actual, expected)) return {};
    return with_element_type(dtype, [&]<class T>(T) -> std::string {
        using A = std::conditional_t<gradsync::is_low_precision(gradsync::dtype_of<T>), float, T>;
        const T* a = reinterpret_cast<const T*>(actual.data());
        const T* e = reinterpret_cast<const T*>(expected.data());
        for (std::size_t i = 0; i < expected.size() / sizeof(T); ++i) {
            if (std::memcmp(a + i, e + i, sizeof(T)) == 0) continue;
            const auto x = static_cast<double>(static_cast<A>(a[i])), y = static_cast<double>(static_cast<A>(e[i]));
            if (!exact && gradsync::is_floating(dtype) && !gradsync::is_float8(dtype)) {
                const double epsilon = dtype == gradsync::DType::f64   ? 0x1p-52
                                       : dtype == gradsync::DType::f32 ? 0x1p-23
                                       : dtype == gradsync::DType::f16 ? 0x1p-10
                                                                       : 0x1p-7;
                if (std::abs(x - y) <= 2 * size * epsilon * std::max(8.0 * size, std::abs(y))) continue;
            }
            return "element " + std::to_string(i) + " is " + std::to_string(x) + ", not " + std::to_string(y);
        }
        return {};
    });
}

}  // namespace gradsync_test
