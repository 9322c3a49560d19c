// SPDX-License-Identifier: BSL-1.0
#include <gradsync/core/buffer_view.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <span>
#include <type_traits>
#include <vector>

namespace gs = gradsync;

static_assert(std::is_convertible_v<gs::BufferView, gs::ConstBufferView>);
static_assert(!std::is_convertible_v<gs::ConstBufferView, gs::BufferView>);

TEST_CASE("buffer: contiguous ranges become views") {
    std::vector<double> vector(3);
    std::array<gs::BFloat16, 4> array{};
    std::int32_t c_array[5] = {};
    CHECK(gs::buffer(vector) == gs::BufferView{vector.data(), 3, gs::DType::f64, gs::MemorySpace::host});
    CHECK(gs::buffer(array) == gs::BufferView{array.data(), 4, gs::DType::bf16, gs::MemorySpace::host});
    CHECK(gs::buffer(c_array) == gs::BufferView{c_array, 5, gs::DType::i32, gs::MemorySpace::host});
    CHECK(gs::buffer(std::span(vector).subspan(1)).data == &vector[1]);
    CHECK(gs::buffer(vector).bytes() == 24);
}

TEST_CASE("const_buffer: read-only ranges, and mutable ones") {
    const std::vector<float> fixed(7);
    std::vector<float> open(2);
    CHECK(gs::const_buffer(fixed) == gs::ConstBufferView{fixed.data(), 7, gs::DType::f32, gs::MemorySpace::host});
    CHECK(gs::const_buffer(open) == gs::ConstBufferView(gs::buffer(open)));
}

TEST_CASE("BufferView: subviews count in elements") {
    std::vector<std::int64_t> v(10);
    const gs::BufferView view = gs::buffer(v).subview(3, 4);
    CHECK(view.data == &v[3]);
    CHECK(view.count == 4);
    CHECK(view.dtype == gs::DType::i64);
    CHECK(gs::ConstBufferView(gs::buffer(v)).subview(10, 0).data == v.data() + 10);
}

TEST_CASE("BufferView: the empty view") {
    const gs::BufferView none;
    CHECK(none.data == nullptr);
    CHECK(none.bytes() == 0);
    CHECK(none.subview(0, 0) == none);
    std::vector<float> empty;
    CHECK(gs::buffer(empty).count == 0);
}
