// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

/// Kernels without a device: what nvcc compiles for one, g++ compiles with this before it, as it is. A block's threads are fibers of the
/// stream's own thread; blocks come one after another. All threads take part in shuffles and barriers: if some of
/// them do not come, the program says so and aborts. What one thread writes and another reads without a barrier is not noticed.

#undef __shared__
#define __shared__ static thread_local
#undef __launch_bounds__
#define __launch_bounds__(...)

namespace gradsync_fake {

/// What kernels ask for by these names.
struct Place {
    uint3 thread{0, 0, 0}, block{0, 0, 0};
    dim3 threads{1, 1, 1}, blocks{1, 1, 1};
};
Place& place();

/// All threads of `blocks`, on a stream. `threads`: of a block, whole warps.
void launch(cudaStream_t stream, dim3 blocks, unsigned threads, std::function<void()> kernel);

/// Waits for all threads of the block.
void await_block();
/// Waits for all threads of the warp, and returns what each has given, by lane.
const unsigned long long* exchange(unsigned long long own);

template <class T>
T shuffle(T own, unsigned lane) {
    static_assert(sizeof(T) <= sizeof(unsigned long long) && std::is_trivially_copyable_v<T>);
    unsigned long long bits = 0;
    std::memcpy(&bits, &own, sizeof own);
    bits = exchange(bits)[lane];
    std::memcpy(&own, &bits, sizeof own);
    return own;
}

/// mma.m16n8k16 and ldmatrix, by what the PTX ISA says of where their elements are.
void multiply_add(float (&c)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1);
void load_matrices(std::uint32_t (&to)[4], const std::uint16_t* row, bool transposed);

/// cp.async: what a copy goes to is NaNs until the thread waits for its group.
void start_copy(void* to, const void* from, unsigned bytes, bool there);
void end_copies();
void await_copies(unsigned pending);

/// As devices do where a T is loaded or stored; the host would let it pass.
void refuse_misaligned(const void* address, std::size_t alignment);
template <class T>
void check_aligned(const void* address) {
    refuse_misaligned(address, alignof(T));
}

}  // namespace gradsync_fake

#define threadIdx (gradsync_fake::place().thread)
#define blockIdx (gradsync_fake::place().block)
#define blockDim (gradsync_fake::place().threads)
#define gridDim (gradsync_fake::place().blocks)

inline void __syncthreads() { gradsync_fake::await_block(); }
inline void __syncwarp() {}  // fibers of a warp see what others have written as soon as it is

template <class T>
T __shfl_xor_sync(unsigned, T own, unsigned distance) {
    return gradsync_fake::shuffle(own, (threadIdx.x % 32) ^ distance);
}
template <class T>
T __shfl_down_sync(unsigned, T own, int distance) {
    const unsigned lane = threadIdx.x % 32, from = lane + static_cast<unsigned>(distance);
    return gradsync_fake::shuffle(own, from < 32 ? from : lane);
}
inline float __fdividef(float a, float b) { return a / b; }
