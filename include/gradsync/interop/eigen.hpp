// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <Eigen/Core>

#include <array>

#include "pointer.hpp"

/// @file
/// Eigen's dense matrices, arrays, vectors and maps, row- and column-major, of fixed and dynamic size. Blocks must be
/// contiguous, such as `m.middleCols(2, 3)` of a column-major matrix.

namespace gradsync::inline v0_2 {

namespace detail {

template <class Derived>
void takes_dense(const Eigen::DenseBase<Derived>&);
template <class Derived>
void takes_storage(const Eigen::PlainObjectBase<Derived>&);

template <class T>
concept EigenDense = requires(const T& t) { takes_dense(t); };
template <class T>
concept EigenStorage = requires(const T& t) { takes_storage(t); };

}  // namespace detail

template <detail::EigenDense T>
struct buffer_traits<T> {
    static constexpr MemorySpace space = MemorySpace::host;
    static constexpr bool owns = detail::EigenStorage<T>;

    static auto shape(const T& t) {
        if constexpr (T::IsVectorAtCompileTime) return std::array{static_cast<std::size_t>(t.size())};
        else return std::array{static_cast<std::size_t>(t.rows()), static_cast<std::size_t>(t.cols())};
    }

    static constexpr bool row_major(const T&) noexcept { return T::IsRowMajor || T::IsVectorAtCompileTime; }

    /// The view is read-only if Eigen gives a pointer to const. Throws Error(invalid_argument)
    /// if a block or map has gaps.
    template <class Dense>
    static auto view(Dense& t) {
        using Scalar = typename T::Scalar;
        constexpr bool has_memory = (Eigen::internal::traits<T>::Flags & Eigen::DirectAccessBit) != 0;
        static_assert(has_memory,
                      "gradsync: evaluate this Eigen expression into a matrix first: it has no memory of its own");
        static_assert(Element<Scalar>,
                      "gradsync: use float, double, Eigen::half, Eigen::bfloat16, or an integer of 1, 4 or 8 bytes: "
                      "this scalar type is not supported");
        if constexpr (has_memory && Element<Scalar>) {
            if (!is_contiguous(t))
                detail::raise(Errc::invalid_argument, "an Eigen block of ", t.rows(), " x ", t.cols(),
                              " is not contiguous (inner stride ", t.innerStride(), ", outer stride ", t.outerStride(),
                              "): copy it into a matrix, or pass the whole matrix");
            return host_buffer(t.data(), static_cast<std::size_t>(t.size()));
        } else {
            return BufferView{};
        }
    }

private:
    static bool is_contiguous(const T& t) {
        const Eigen::Index inner = t.innerSize(), outer = t.outerSize();
        if (t.size() <= 1) return true;
        if (inner == 1) return t.outerStride() == 1;
        return t.innerStride() == 1 && (outer == 1 || t.outerStride() == inner);
    }
};

}  // namespace gradsync::inline v0_2
