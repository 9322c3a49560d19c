// SPDX-License-Identifier: BSL-1.0
// ctest: COMPILE_OPTIONS -O1 LIBRARIES Eigen3::Eigen NOT_WITH thread
#include <gradsync/interop/eigen.hpp>

#include <algorithm>
#include <vector>

#include <doctest/doctest.h>

#include <Eigen/Core>

#include <gradsync/core/parameter.hpp>

#include "support/ranks.hpp"

namespace gs = gradsync;
using gradsync_test::outcome_of;

using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

TEST_CASE_TEMPLATE("a matrix is a view of all its elements, with its shape", M, Eigen::MatrixXf, RowMajor, Eigen::MatrixXd, Eigen::ArrayXXi,
                   Eigen::Matrix<float, 3, 4>, Eigen::Matrix<Eigen::half, Eigen::Dynamic, Eigen::Dynamic>,
                   Eigen::Matrix<Eigen::bfloat16, 3, 4, Eigen::RowMajor>) {
    M m(3, 4);
    CHECK(gs::buffer(m) == gs::BufferView{m.data(), 12, gs::dtype_of<typename M::Scalar>});
    CHECK(gs::const_buffer(std::as_const(m)) == gs::ConstBufferView{m.data(), 12, gs::dtype_of<typename M::Scalar>});
    CHECK(gs::parameter_view(m).shape == std::vector<std::size_t>{3, 4});
    CHECK(gs::parameter("m", m, m).shape == std::vector<std::size_t>{3, 4});
}

TEST_CASE("half and bfloat16 are ours, bit for bit") {
    const float numbers[] = {1.0f, -0.333f, 65504.0f, 1e-7f};
    for (const float x : numbers) {
        CHECK(Eigen::numext::bit_cast<std::uint16_t>(Eigen::half(x)) == Eigen::numext::bit_cast<std::uint16_t>(gs::Float16(x)));
        CHECK(Eigen::numext::bit_cast<std::uint16_t>(Eigen::bfloat16(x)) == Eigen::numext::bit_cast<std::uint16_t>(gs::BFloat16(x)));
    }
}

TEST_CASE("vectors have one dimension") {
    Eigen::VectorXf column(5);
    Eigen::RowVector3d row;
    CHECK(gs::parameter_view(column).shape == std::vector<std::size_t>{5});
    CHECK(gs::parameter_view(row).gradient == gs::BufferView{row.data(), 3, gs::DType::f64});
    Eigen::VectorXf none;
    CHECK(gs::buffer(none).count == 0);
}

TEST_CASE("maps show the memory that they map, constant ones read-only") {
    std::vector<float> memory(12);
    Eigen::Map<Eigen::MatrixXf> map(memory.data(), 3, 4);
    CHECK(gs::buffer(map) == gs::buffer(memory));
    CHECK(gs::buffer(Eigen::Map<RowMajor>(memory.data(), 3, 4)) == gs::buffer(memory));  // a map by value owns nothing
    const Eigen::Map<const Eigen::MatrixXf> constant(memory.data(), 3, 4);
    CHECK(gs::const_buffer(constant) == gs::const_buffer(memory));
    static_assert(std::is_same_v<decltype(gs::detail::view_of(constant)), gs::ConstBufferView>);
}

// Every block of a small matrix, against its definition: its elements lie side by side.
TEST_CASE_TEMPLATE("a block is taken if it is contiguous, refused in words if not", M, Eigen::MatrixXf, RowMajor) {
    M m(3, 4);
    int taken = 0, refused = 0;
    for (Eigen::Index top = 0; top < 3; ++top)
        for (Eigen::Index left = 0; left < 4; ++left)
            for (Eigen::Index rows = 1; top + rows <= 3; ++rows)
                for (Eigen::Index cols = 1; left + cols <= 4; ++cols) {
                    auto block = m.block(top, left, rows, cols);
                    std::vector<const float*> addresses;
                    for (Eigen::Index i = 0; i < rows; ++i)
                        for (Eigen::Index j = 0; j < cols; ++j) addresses.push_back(&block.coeffRef(i, j));
                    std::sort(addresses.begin(), addresses.end());
                    const bool contiguous = addresses.back() - addresses.front() + 1 == rows * cols;
                    INFO(rows, " x ", cols, " at ", top, ", ", left);
                    const auto outcome = outcome_of([&] {
                        const gs::BufferView view = gs::buffer(block);
                        CHECK(view.data == addresses.front());
                        CHECK(view.count == addresses.size());
                    });
                    CHECK(outcome.error.has_value() == !contiguous);
                    if (!contiguous)
                        CHECK(outcome.says("Eigen block of " + std::to_string(rows) + " x " + std::to_string(cols) + " is not contiguous"));
                    ++(contiguous ? taken : refused);
                }
    CHECK(taken > 0);
    CHECK(refused > 0);
    CHECK(outcome_of([&] { (void)gs::buffer(m.row(1)); }).error.has_value() == !M::IsRowMajor);
    CHECK(outcome_of([&] { (void)gs::buffer(m.col(1)); }).error.has_value() == M::IsRowMajor);
}
