// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include <gradsync/kernel/elementwise.hpp>

#include "support/tensor.hpp"

using namespace gradsync;
using namespace gradsync_test;

TEST_CASE("all_finite finds each infinity and NaN, wherever it is, and nothing else") {
    for (const DType dtype : {DType::f16, DType::bf16, DType::f32, DType::f64, DType::f8e4m3, DType::f8e5m2})
        for (const std::size_t count : {0u, 1u, 7u, 64u, 1023u, 1024u, 5000u}) {
            CAPTURE(name_of(dtype));
            CAPTURE(count);
            const double largest = dtype == DType::f16      ? 65504.0
                                   : dtype == DType::f8e4m3 ? 448.0
                                   : dtype == DType::f8e5m2 ? 57344.0
                                                            : std::numeric_limits<float>::max() * 0.99;
            for (const double value : {0.0, -0.0, 1.0, largest, -largest}) {
                const Bytes bytes = constant_bytes(dtype, count, value);
                CHECK(kernel::all_finite({bytes.data(), count, dtype, MemorySpace::host}));
            }
            for (const double bad : {std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity(),
                                     std::numeric_limits<double>::quiet_NaN()}) {
                if (is_float8(dtype) && std::isinf(bad)) continue;  // conversions saturate
                const Bytes one = constant_bytes(dtype, 1, bad);
                for (std::size_t at = 0; at < count; at += 1 + count / 97) {
                    Bytes bytes = constant_bytes(dtype, count, 1.0);
                    std::memcpy(bytes.data() + at * size_of(dtype), one.data(), size_of(dtype));
                    CHECK_FALSE(kernel::all_finite({bytes.data(), count, dtype, MemorySpace::host}));
                }
            }
        }
    const std::uint8_t infinity[] = {0x3c, 0x7c, 0x3c};
    CHECK_FALSE(kernel::all_finite({infinity, 3, DType::f8e5m2, MemorySpace::host}));
    const std::vector<std::uint32_t> integers(10, 0xffffffffu);
    CHECK(kernel::all_finite(const_buffer(integers)));
}
