// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/interop/mdspan.hpp>

#include <array>
#include <vector>

#include <doctest/doctest.h>

#include <gradsync/core/parameter.hpp>

#include "support/ranks.hpp"

namespace gs = gradsync;

namespace {

/// The part of std::mdspan's interface that is asked for, with strides. (g++ 12 has no <mdspan>.)
template <class T, std::size_t dimensions>
struct Strided {
    using element_type = T;
    using rank_type = std::size_t;

    struct Mapping {
        std::array<int, dimensions> extents, strides;
        std::size_t required_span_size() const {
            int last = 0;
            for (std::size_t r = 0; r < dimensions; ++r) {
                if (extents[r] == 0) return 0;
                last += (extents[r] - 1) * strides[r];
            }
            return static_cast<std::size_t>(last + 1);
        }
        bool is_exhaustive() const {
            int volume = 1;
            for (int e : extents) volume *= e;
            return required_span_size() == static_cast<std::size_t>(volume);
        }
    };

    T* data = nullptr;
    Mapping map;

    static constexpr rank_type rank() { return dimensions; }
    int extent(rank_type r) const { return map.extents[r]; }
    int stride(rank_type r) const { return map.strides[r]; }
    const Mapping& mapping() const { return map; }
    T* data_handle() const { return data; }
};
static_assert(gs::MdspanLike<Strided<float, 2>>);

}  // namespace

TEST_CASE("any layout without gaps is a view with a shape") {
    std::vector<float> memory(12);
    for (const std::array strides : {std::array{4, 1}, std::array{1, 3}}) {
        Strided<float, 2> m{memory.data(), {{3, 4}, strides}};
        CHECK(gs::buffer(m) == gs::buffer(memory));
        CHECK(gs::parameter_view(m).shape == std::vector<std::size_t>{3, 4});
        CHECK(gs::parameter("m", m, memory).row_major == (strides[1] == 1));
    }
    CHECK(gs::const_buffer(Strided<const float, 1>{memory.data(), {{12}, {1}}}) == gs::const_buffer(memory));
    CHECK(gs::buffer(Strided<float, 2>{memory.data(), {{0, 4}, {4, 1}}}).count == 0);
}

TEST_CASE("a layout with gaps is refused in words") {
    std::vector<float> memory(12);
    const auto outcome = gradsync_test::outcome_of([&] { (void)gs::buffer(Strided<float, 2>{memory.data(), {{3, 2}, {4, 1}}}); });
    CHECK(outcome.is(gs::Errc::invalid_argument));
    CHECK(outcome.says("an mdspan of 3 x 2 elements is not contiguous"));
}
