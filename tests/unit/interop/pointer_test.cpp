// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/interop/pointer.hpp>

#include <vector>

#include <doctest/doctest.h>

#include <gradsync/core/parameter.hpp>

namespace gs = gradsync;

TEST_CASE("a pointer and a count are a view; the function says where it points to") {
    double x[4] = {};
    CHECK(gs::host_buffer(x, 4) == gs::BufferView{x, 4, gs::DType::f64, gs::MemorySpace::host});
    CHECK(gs::device_buffer(x, 4) == gs::BufferView{x, 4, gs::DType::f64, gs::MemorySpace::device});
    const double* constant = x;
    static_assert(std::is_same_v<decltype(gs::device_buffer(constant, 4)), gs::ConstBufferView>);
    CHECK(gs::parameter("x", gs::host_buffer(x, 4), gs::host_buffer(x, 4)).gradient == gs::host_buffer(x, 4));
    std::vector<gs::BufferView> views{gs::host_buffer(x, 4)};
    static_assert(gs::Parameter<gs::BufferView>);  // a range of views is a range of parameters
    CHECK(gs::parameter_view(views[0]).gradient == views[0]);
}
