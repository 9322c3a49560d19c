// SPDX-License-Identifier: BSL-1.0
#pragma once
// Small matrix products of a warp in bf16, whose sums are f32: what the lanes hold of a matrix is as the PTX ISA says of
// mma.m16n8k16 ("Matrix Fragments for mma.m16n8k16 with floating point type"). Lane l has to do with row, or column, l / 4 and
// its like 8 further on, and with the pair of columns, or rows, 2 (l % 4).

#include <cuda_bf16.h>

#include <cstdint>
#include <cstring>

namespace gradsync_train::kernels {

/// Two bf16; the first is in the lower half.
using Pair = std::uint32_t;

__device__ inline Pair pair_of(float first, float second) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(first, second);
    Pair bits;
    memcpy(&bits, &both, sizeof bits);
    return bits;
}

#ifdef __CUDACC__

/// c[16, 8] += a[16, 16] b[16, 8]
__device__ inline void multiply_add(float (&c)[4], const Pair (&a)[4], Pair b0, Pair b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// Four matrices of 8 x 8 bf16 in shared memory; lane 8 m + r gives the address of row r of matrix m, 16 bytes. Of matrix m lane l
/// gets the elements (l / 4, 2 (l % 4)) and the next in the row; transposed: (2 (l % 4), l / 4) and the next in the column.
__device__ inline void load_matrices(Pair (&to)[4], const std::uint16_t* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row)))
                 : "memory");
}
__device__ inline void load_transposed_matrices(Pair (&to)[4], const std::uint16_t* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row)))
                 : "memory");
}

#else  // for the tests: see tests/support/fake/kernels.hpp, which comes before

inline void multiply_add(float (&c)[4], const Pair (&a)[4], Pair b0, Pair b1) { gradsync_fake::multiply_add(c, a, b0, b1); }
inline void load_matrices(Pair (&to)[4], const std::uint16_t* row) { gradsync_fake::load_matrices(to, row, false); }
inline void load_transposed_matrices(Pair (&to)[4], const std::uint16_t* row) { gradsync_fake::load_matrices(to, row, true); }

#endif

}  // namespace gradsync_train::kernels
