// SPDX-License-Identifier: BSL-1.0
#pragma once
// Small matrix products of a warp in bf16, whose sums are f32: what the lanes hold of a matrix is as the PTX ISA says of
// mma.m16n8k16 ("Matrix Fragments for mma.m16n8k16 with floating point type"). Lane l has to do with row, or column, l / 4 and
// its like 8 further on, and with the pair of columns, or rows, 2 (l % 4).

#include <cuda_bf16.h>

#include <cmath>
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

/// The product of the first two plus that of the second two.
__device__ inline float dot_of(Pair a, Pair b) {
    const auto number = [](Pair bits) {
        float x;
        memcpy(&x, &bits, sizeof x);
        return x;
    };
    return number(a << 16) * number(b << 16) + number(a & 0xffff0000u) * number(b & 0xffff0000u);
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

/// Starts a copy of `bytes`, 4 or 16, to shared memory; stores zeros unless `there`. The address must be valid even then.
template <unsigned bytes>
__device__ void start_copy(void* to, const void* from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 :
                 : "r"(static_cast<unsigned>(__cvta_generic_to_shared(to))), "l"(__cvta_generic_to_global(from)), "n"(bytes),
                   "r"(there ? bytes : 0u)
                 : "memory");
}
/// Ends a group: the copies that this thread has started since the last group.
__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" : : : "memory"); }
/// Waits for all groups of this thread but the last `pending`.
template <unsigned pending>
__device__ void await_copies() {
    asm volatile("cp.async.wait_group %0;" : : "n"(pending) : "memory");
}

/// 2^x, to two units in the last place; 0 if that is below 2^-126.
__device__ inline float power_of_two(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}

#else  // for the tests: see tests/support/fake/kernels.hpp, which comes before

inline void multiply_add(float (&c)[4], const Pair (&a)[4], Pair b0, Pair b1) { gradsync_fake::multiply_add(c, a, b0, b1); }
inline void load_matrices(Pair (&to)[4], const std::uint16_t* row) { gradsync_fake::load_matrices(to, row, false); }
inline void load_transposed_matrices(Pair (&to)[4], const std::uint16_t* row) { gradsync_fake::load_matrices(to, row, true); }
template <unsigned bytes>
void start_copy(void* to, const void* from, bool there) {
    gradsync_fake::start_copy(to, from, bytes, there);
}
inline void end_copies() { gradsync_fake::end_copies(); }
template <unsigned pending>
void await_copies() {
    gradsync_fake::await_copies(pending);
}
inline float power_of_two(float x) { return std::exp2(x); }

#endif

}  // namespace gradsync_train::kernels
