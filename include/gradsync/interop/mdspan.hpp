// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <vector>

#include "pointer.hpp"

/// @file
/// Multi-dimensional views with the interface of std::mdspan, such as the standard's own and Kokkos's for C++20.

namespace gradsync::inline v0_2 {

/// A view with extents and a mapping from indices to the elements of a pointer.
template <class M>
concept MdspanLike = requires(const M& m, typename M::rank_type r) {
    typename M::element_type;
    { M::rank() } -> std::convertible_to<std::size_t>;
    { m.extent(r) } -> std::convertible_to<std::size_t>;
    { m.mapping().is_exhaustive() } -> std::convertible_to<bool>;
    { m.mapping().required_span_size() } -> std::convertible_to<std::size_t>;
    m.data_handle();
};

/// Any layout without gaps works (layout_right, layout_left, permuted strides). All ranks must use the same one.
template <MdspanLike M>
struct buffer_traits<M> {
    static constexpr MemorySpace space = MemorySpace::host;

    /// Throws Error(invalid_argument) if the mapping has gaps.
    static auto view(const M& m) {
        using T = typename M::element_type;
        static_assert(std::convertible_to<decltype(m.data_handle()), T*>,
                      "gradsync: use an mdspan whose data_handle() is a pointer (default_accessor): other accessors "
                      "have no memory that can be sent");
        static_assert(Element<T>,
                      "gradsync: use float, double, Float16, BFloat16, Float8E4M3, Float8E5M2, or an integer of 1, 4 "
                      "or 8 bytes: this element type is not supported");
        if (!m.mapping().is_exhaustive())
            detail::raise(Errc::invalid_argument, "an mdspan of ", detail::joined(shape(m), " x "),
                          " elements is not contiguous (its mapping is not exhaustive): copy it into one "
                          "with layout_right, or pass the whole mdspan");
        return host_buffer(static_cast<T*>(m.data_handle()),
                           static_cast<std::size_t>(m.mapping().required_span_size()));
    }

    static std::vector<std::size_t> shape(const M& m) {
        std::vector<std::size_t> extents;
        for (typename M::rank_type r = 0; r < M::rank(); ++r) extents.push_back(static_cast<std::size_t>(m.extent(r)));
        return extents;
    }
    /// False for several dimensions whose strides are not known.
    static bool row_major(const M& m) {
        if constexpr (requires { m.stride(M::rank()); }) {
            std::size_t stride = 1;
            for (typename M::rank_type r = M::rank(); r-- > 0; stride *= static_cast<std::size_t>(m.extent(r)))
                if (m.extent(r) > 1 && static_cast<std::size_t>(m.stride(r)) != stride) return false;
            return true;
        } else {
            return M::rank() < 2;
        }
    }
};

}  // namespace gradsync::inline v0_2
