// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/core/buffer_view.hpp>

#include <doctest/doctest.h>

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

namespace gs = gradsync;

namespace {

/// As Armadillo's matrices: pointers as iterators, and no `data()`.
struct Matrix {
    std::vector<float> elements = std::vector<float>(6);

    float* memptr() { return elements.data(); }
    float* begin() { return elements.data(); }
    const float* begin() const { return elements.data(); }
    float* end() { return elements.data() + elements.size(); }
    const float* end() const { return elements.data() + elements.size(); }
};

}  // namespace

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

TEST_CASE("BufferView: a contiguous range converts, as it does to std::span; a pointer brings its type") {
    const auto same = [](gs::BufferView view, gs::BufferView expected) { return view == expected; };
    const auto same_constant = [](gs::ConstBufferView view, gs::ConstBufferView expected) { return view == expected; };
    std::vector<double> vector(3);
    const std::vector<float> fixed(7);
    std::array<gs::BFloat16, 4> array{};
    std::int32_t c_array[5] = {};
    CHECK(same(vector, gs::buffer(vector)));
    CHECK(same(array, gs::buffer(array)));
    CHECK(same(c_array, gs::buffer(c_array)));
    CHECK(same(std::span(vector).first(2), {vector.data(), 2, gs::DType::f64}));  // a temporary that owns nothing
    CHECK(same_constant(fixed, gs::const_buffer(fixed)));
    CHECK(same_constant(vector, gs::const_buffer(vector)));
    CHECK(same_constant(std::span(fixed), gs::const_buffer(fixed)));
    CHECK(gs::BufferView{c_array, 5} == gs::buffer(c_array));
    CHECK(gs::ConstBufferView{array.data(), 4, gs::MemorySpace::device}.space == gs::MemorySpace::device);
    static_assert(std::is_trivially_copyable_v<gs::BufferView>);
    static_assert(!std::is_convertible_v<std::vector<std::vector<float>>&, gs::BufferView>);
    static_assert(!std::is_convertible_v<std::vector<gs::BufferView>&, gs::BufferView>);
}

TEST_CASE("buffer: a contiguous range needs no member data()") {
    Matrix matrix;
    const Matrix& constant = matrix;
    const auto converted = [](gs::ConstBufferView view) { return view; };
    CHECK(gs::buffer(matrix) == gs::BufferView{matrix.memptr(), 6, gs::DType::f32, gs::MemorySpace::host});
    CHECK(gs::const_buffer(constant) == gs::ConstBufferView(gs::buffer(matrix)));
    CHECK(converted(constant) == gs::const_buffer(matrix));
    static_assert(gs::detail::owns_memory<Matrix>());
}

TEST_CASE("BufferView: subviews count in elements") {
    std::vector<std::int64_t> v(10);
    const gs::BufferView view = gs::buffer(v).subview(3, 4);
    CHECK(view.data == &v[3]);
    CHECK(view.count == 4);
    CHECK(view.dtype == gs::DType::i64);
    CHECK(gs::ConstBufferView(gs::buffer(v)).subview(10, 0).data == v.data() + 10);
}

TEST_CASE("BufferView: a number that DType does not name is refused") {
    float x[3] = {};
    for (const int number : {12, 77, 255}) {
        std::string said;
        try {
            (void)gs::BufferView(x, 3, static_cast<gs::DType>(number));
        } catch (const gs::Error& error) {
            if (error.errc() == gs::Errc::invalid_argument) said = error.what();
        }
        CHECK(said == "BufferView: DType(" + std::to_string(number) + ") is not an element type; pass one that DType names");
    }
    CHECK(gs::ConstBufferView(x, 3, gs::DType::f8e5m2).dtype == gs::DType::f8e5m2);
}

TEST_CASE("BufferView is empty by default") {
    const gs::BufferView none;
    CHECK(none.data == nullptr);
    CHECK(none.bytes() == 0);
    CHECK(none.subview(0, 0) == none);
    std::vector<float> empty;
    CHECK(gs::buffer(empty).count == 0);
}
