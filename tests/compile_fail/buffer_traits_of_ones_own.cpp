// SPDX-License-Identifier: BSL-1.0
// expect 1: gradsync: return or pass a std::span.pointer, count. of this tensor's elements, or specialise gradsync::buffer_traits
// expect 2: gradsync: return a BufferView, or of a constant tensor a ConstBufferView, from view\(\) in buffer_traits of this type
// expect 3: gradsync: pass a mutable range
// expect 4: gradsync: dtype_traits: name a DType of this type's size
// expect 5: gradsync: return or pass a reference to this tensor
// expect 6: gradsync: dtype_traits: give the specialisation for this type a member static constexpr DType value
// expect 7: gradsync: dtype_traits: give the specialisation for this type a member static constexpr DType value
// expect 8: gradsync: dtype_traits: give the specialisation for this type a member static constexpr DType value
// errors: 1
#include <cstdint>
#include <vector>

#include <gradsync/core/buffer_view.hpp>

#ifndef GRADSYNC_EXPECT_FAILURE
#define GRADSYNC_EXPECT_FAILURE 0
#endif

struct Half {
    std::uint16_t bits;
};

struct Matrix {
    std::vector<Half> elements;
};

template <>
struct gradsync::dtype_traits<Half> {
#if GRADSYNC_EXPECT_FAILURE == 4
    static constexpr DType value = DType::f32;
#elif GRADSYNC_EXPECT_FAILURE == 6
    static constexpr DType dtype = DType::f16;  // another name
#elif GRADSYNC_EXPECT_FAILURE == 7
    static constexpr int value = 6;
#elif GRADSYNC_EXPECT_FAILURE == 8
    static constexpr DType value() { return DType::f16; }
#else
    static constexpr DType value = DType::f16;
#endif
};

template <>
struct gradsync::buffer_traits<Matrix> {
    static constexpr bool owns = true;
#if GRADSYNC_EXPECT_FAILURE == 1
    static BufferView get(Matrix& m) { return buffer(m.elements); }  // another name
#elif GRADSYNC_EXPECT_FAILURE == 2
    static std::span<Half> view(Matrix& m) { return m.elements; }
#elif GRADSYNC_EXPECT_FAILURE == 3
    static ConstBufferView view(const Matrix& m) { return const_buffer(m.elements); }
#else
    static BufferView view(Matrix& m) { return buffer(m.elements); }
#endif
};

void f(Matrix& m) {
#if GRADSYNC_EXPECT_FAILURE == 5
    (void)gradsync::buffer(Matrix(m));
#else
    (void)gradsync::buffer(m);
#endif
}
