// SPDX-License-Identifier: BSL-1.0
// expect 1: gradsync: name the type of these elements, as in BufferView.pointer, count, DType::f32.
// expect 2: gradsync: pass a mutable range: .* \(buffer\(\) takes a mutable one, const_buffer\(\) makes a read-only view\)
// expect 3: gradsync: return or pass a reference to this tensor
// expect 4: gradsync: give this range a name: a collective reads it when the temporary is gone
// expect 5: gradsync: use float, double, .* this element type is not supported
// expect 6: gradsync: return or pass a reference to this tensor
// expect 7: gradsync: pass a mutable range
// expect 8: gradsync: return or pass a std::span.pointer, count. if this tensor's elements are contiguous
// errors: 1
#include <array>
#include <iterator>
#include <span>
#include <vector>

#include <gradsync/backend/thread_backend.hpp>

#ifndef GRADSYNC_EXPECT_FAILURE
#define GRADSYNC_EXPECT_FAILURE 0
#endif

using namespace gradsync;

extern std::vector<float> values;
extern const std::vector<float> constant;
extern void* memory;

/// As Armadillo's matrices: pointers as iterators, and no data().
struct Matrix {
    float* memptr();
    float* begin();
    const float* begin() const;
    float* end();
    const float* end() const;
};
/// As its columns and rows.
struct Slice {
    std::reverse_iterator<float*> begin();
    std::reverse_iterator<float*> end();
};
extern Matrix matrix;
extern Slice slice;

void f(ThreadBackend comm) {
#if GRADSYNC_EXPECT_FAILURE == 1
    comm.all_reduce(BufferView{memory, 3}, ReduceOp::sum).wait();
#elif GRADSYNC_EXPECT_FAILURE == 2
    comm.all_reduce(constant, ReduceOp::sum).wait();
#elif GRADSYNC_EXPECT_FAILURE == 3
    comm.all_reduce(std::vector<float>(3), ReduceOp::sum).wait();
#elif GRADSYNC_EXPECT_FAILURE == 4
    comm.all_gather(std::vector<float>(3), values).wait();
#elif GRADSYNC_EXPECT_FAILURE == 5
    std::vector<short> numbers(3);
    comm.all_reduce(numbers, ReduceOp::sum).wait();
#elif GRADSYNC_EXPECT_FAILURE == 6
    comm.all_reduce(Matrix(), ReduceOp::sum).wait();
#elif GRADSYNC_EXPECT_FAILURE == 7
    const Matrix& result = matrix;
    comm.all_reduce(result, ReduceOp::sum).wait();
#elif GRADSYNC_EXPECT_FAILURE == 8
    comm.all_reduce(buffer(slice), ReduceOp::sum).wait();
#else
    comm.all_reduce(BufferView{memory, 3, DType::f32}, ReduceOp::sum).wait();
    comm.all_reduce(BufferView{values.data(), 3}, ReduceOp::sum).wait();
    comm.all_reduce(values, ReduceOp::sum).wait();
    comm.all_gather(constant, std::span(values)).wait();
    comm.all_reduce(matrix, ReduceOp::sum).wait();
    std::array<double, 3> three{};
    std::int64_t numbers[3] = {};
    comm.all_reduce(three, ReduceOp::sum).wait();
    comm.all_reduce(numbers, ReduceOp::sum).wait();
#endif
}
