// SPDX-License-Identifier: BSL-1.0
#pragma once
// The kernels of CudaOps but those in attention.cuh and layer_norm.cuh (ops_cuda.cu says what is launched when). They are plain:
// arrays in device memory, row-major, one pass each; factors are of type T, f32 or bf16, all else and every sum is f32. Sums are added up
// in one order, so that a step gives the same bits every time.
//
// Three shapes of kernels: one thread for an element; one thread for a few columns, going down their rows (`rows_of`); one
// warp for a row, whose lanes go along it. Those with a parameter `n` take so many numbers at a time, 4 where rows are
// multiples of that, else 1. Every thread of a block reaches every shuffle and every barrier.
//
// nvcc compiles them for a device, and g++ for the tests, where threads are fibers (tests/support/fake/kernels.hpp).

#include <cuda_bf16.h>

#include <cstddef>
#include <cstdint>

#include "../ops.hpp"

namespace gradsync_train::kernels {

using Size = std::size_t;

inline constexpr unsigned threads = 256;  // of a block
inline constexpr unsigned warp = 32;
inline constexpr unsigned warps = threads / warp;

// ---- what threads do together

__device__ inline Size element_index() { return Size{blockIdx.x} * threads + threadIdx.x; }
__device__ inline Size element_stride() { return Size{gridDim.x} * threads; }
__device__ inline unsigned lane() { return threadIdx.x % warp; }
/// The row of this thread's warp; rows beyond the last are to be skipped by whole warps.
__device__ inline Size warp_row() { return Size{blockIdx.x} * warps + threadIdx.x / warp; }

/// On every lane.
__device__ inline float warp_sum(float x) {
    for (unsigned distance = warp / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}
__device__ inline float warp_maximum(float x) {
    for (unsigned distance = warp / 2; distance > 0; distance /= 2) {
        const float other = __shfl_xor_sync(0xffffffffu, x, distance);
        x = other > x ? other : x;
    }
    return x;
}

/// On thread 0: over all threads of the block, in one order.
__device__ inline double block_sum(double x) {
    __shared__ double of_threads[threads];
    of_threads[threadIdx.x] = x;
    for (unsigned half = threads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) of_threads[threadIdx.x] += of_threads[threadIdx.x + half];
    }
    return of_threads[0];
}

__device__ inline float load(const float* from) { return *from; }
__device__ inline float load(const __nv_bfloat16* from) { return __bfloat162float(*from); }
__device__ inline void store(float* to, float x) { *to = x; }
__device__ inline void store(__nv_bfloat16* to, float x) { *to = __float2bfloat16_rn(x); }

/// `n` numbers that are loaded and stored at once: they are aligned as a whole.
template <class T, int n>
struct alignas(n * sizeof(T)) Pack {
    T elements[n];
};
#ifdef __CUDACC__
template <class T>
__device__ void check_aligned(const void*) {}  // the device does
#else
using gradsync_fake::check_aligned;
#endif
template <int n, class T>
__device__ void load_pack(const T* from, float (&to)[n]) {
    check_aligned<Pack<T, n>>(from);
    const Pack<T, n> pack = *reinterpret_cast<const Pack<T, n>*>(from);
#pragma unroll
    for (int e = 0; e < n; ++e) to[e] = load(&pack.elements[e]);
}
template <int n, class T>
__device__ void store_pack(T* to, const float (&from)[n]) {
    Pack<T, n> pack;
#pragma unroll
    for (int e = 0; e < n; ++e) store(&pack.elements[e], from[e]);
    check_aligned<Pack<T, n>>(to);
    *reinterpret_cast<Pack<T, n>*>(to) = pack;
}

// ---- elements

template <class = void>
__global__ void __launch_bounds__(threads) fill(Size n, float value, float* out) {
    for (Size i = element_index(); i < n; i += element_stride()) out[i] = value;
}

template <class = void>
__global__ void __launch_bounds__(threads) add(Size n, const float* in, float* out) {
    for (Size i = element_index(); i < n; i += element_stride()) out[i] += in[i];
}

/// For few numbers, which may lie anywhere.
template <class T>
__global__ void __launch_bounds__(threads) copy(Size n, const float* in, T* out) {
    for (Size i = element_index(); i < n; i += element_stride()) store(out + i, in[i]);
}

/// Four at a time; what is left over, one by one. Both arrays are aligned to four elements.
template <class = void>
__global__ void __launch_bounds__(threads) to_bfloat16(Size n, const float* in, __nv_bfloat16* out) {
    const Size packs = n / 4;
    for (Size i = element_index(); i < packs; i += element_stride()) {
        float x[4];
        load_pack(in + 4 * i, x);
        store_pack(out + 4 * i, x);
    }
    const Size last = 4 * packs + element_index();
    if (last < n) store(out + last, in[last]);
}

/// *sum = terms[0] + ... One block.
template <class = void>
__global__ void __launch_bounds__(threads) sum(Size n, const double* terms, double* sum) {
    double own = 0;
    for (Size i = threadIdx.x; i < n; i += threads) own += terms[i];
    const double all = block_sum(own);
    if (threadIdx.x == 0) *sum = all;
}

/// *factor: by what gradients are multiplied whose squares add up to sums[0] + ... so that their norm is at most `most`.
/// One block.
template <class = void>
__global__ void __launch_bounds__(threads) clip_factor(Size n, const double* sums, double most, float* factor) {
    double own = 0;
    for (Size i = threadIdx.x; i < n; i += threads) own += sums[i];
    const double squares = block_sum(own);
    if (threadIdx.x != 0) return;
    const double norm = sqrt(squares);
    *factor = norm > most && norm < 1e300 ? static_cast<float>(most / norm) : 1.0f;  // as gradsync::clip_factor
}

// ---- columns: a thread for n of them, and blocks for pieces of their rows

/// use(row) for the rows that are this block's.
template <class Use>
__device__ void rows_of(Size rows, Use&& use) {
    const Size each = (rows + gridDim.y - 1) / gridDim.y, begin = blockIdx.y * each;
    const Size end = begin + each < rows ? begin + each : rows;
    for (Size row = begin; row < end; ++row) use(row);
}

/// GELU by the error function, as the CPU's (vector_math.hpp): the normal distribution at x by Abramowitz and Stegun 7.1.26, to 2e-7.
struct Normal {
    float density, cumulative;
};
__device__ inline Normal normal(float x) {
    const float gaussian = exp2f(-0.72134752f * x * x);
    const float t = __fdividef(1.0f, 1.0f + 0.23164189f * fabsf(x));
    const float polynomial = (((1.061405429f * t - 1.453152027f) * t + 1.421413741f) * t - 0.284496736f) * t + 0.254829592f;
    const float tail = 0.5f * polynomial * t * gaussian;
    return {0.39894228f * gaussian, x < 0.0f ? tail : 1.0f - tail};
}
__device__ inline float gelu(float x) { return x * normal(x).cumulative; }
__device__ inline float gelu_derivative(float x) {
    const Normal at = normal(x);
    return at.cumulative + x * at.density;
}

/// y = gelu(x + bias)
template <int n, class T>
__global__ void __launch_bounds__(threads) bias_gelu(Size rows, Size columns, const float* bias, const T* x, T* y) {
    const Size j = element_index() * n;
    if (j >= columns) return;
    float b[n];
#pragma unroll
    for (int e = 0; e < n; ++e) b[e] = bias[j + e];
    rows_of(rows, [&](Size row) {
        float values[n];
        load_pack(x + row * columns + j, values);
#pragma unroll
        for (int e = 0; e < n; ++e) values[e] = gelu(values[e] + b[e]);
        store_pack(y + row * columns + j, values);
    });
}

/// Sums over rows in two steps: each block leaves those of its rows, sums[gridDim.y, columns], and `add_pieces` adds them up.
template <int n, class T>
__global__ void __launch_bounds__(threads) column_sum(Size rows, Size columns, const T* x, float* sums) {
    const Size j = element_index() * n;
    if (j >= columns) return;
    float sum[n] = {};
    rows_of(rows, [&](Size row) {
        float values[n];
        load_pack(x + row * columns + j, values);
#pragma unroll
        for (int e = 0; e < n; ++e) sum[e] += values[e];
    });
#pragma unroll
    for (int e = 0; e < n; ++e) sums[blockIdx.y * columns + j + e] = sum[e];
}

/// dy *= gelu'(x + bias); sums as `column_sum` of the result.
template <int n, class T>
__global__ void __launch_bounds__(threads) bias_gelu_backward(Size rows, Size columns, const float* bias, const T* x, T* dy, float* sums) {
    const Size j = element_index() * n;
    if (j >= columns) return;
    float b[n], sum[n] = {};
#pragma unroll
    for (int e = 0; e < n; ++e) b[e] = bias[j + e];
    rows_of(rows, [&](Size row) {
        float before[n], values[n];
        load_pack(x + row * columns + j, before);
        load_pack(dy + row * columns + j, values);
#pragma unroll
        for (int e = 0; e < n; ++e) {
            values[e] *= gelu_derivative(before[e] + b[e]);
            sum[e] += values[e];
        }
        store_pack(dy + row * columns + j, values);
    });
#pragma unroll
    for (int e = 0; e < n; ++e) sums[blockIdx.y * columns + j + e] = sum[e];
}

/// The memory for the column sums of `parts` arrays.
template <Size parts>
struct Sums {
    float* to[parts];
};

/// of_pieces[pieces, parts, columns]: a lane for each column, and a warp for every eighth piece.
template <Size parts>
__global__ void __launch_bounds__(threads) add_pieces(Size pieces, Size columns, const float* of_pieces, Sums<parts> sums) {
    __shared__ float of_warps[warps][warp];
    const Size j = Size{blockIdx.x} * warp + lane();
    const unsigned own = threadIdx.x / warp;
    float sum = 0;
    if (j < parts * columns) {
#pragma unroll 8
        for (Size piece = own; piece < pieces; piece += warps) sum += of_pieces[piece * parts * columns + j];
    }
    of_warps[own][lane()] = sum;
    __syncthreads();
    if (own != 0 || j >= parts * columns) return;
    for (unsigned w = 1; w < warps; ++w) sum += of_warps[w][lane()];
#pragma unroll
    for (Size part = 0; part < parts; ++part)
        if (j / columns == part) sums.to[part][j % columns] = sum;
}

// ---- rows: a warp for each

/// A warp's row, n numbers at a time. The lanes keep its first 256 n numbers; each call of `each` reads the others again.
template <int n>
struct Row {
    static constexpr unsigned packs = 8;  // that a lane keeps

    __device__ Row(const float* x_, Size columns_) : x(x_), columns(columns_) {
#pragma unroll
        for (unsigned p = 0; p < packs; ++p)
            if (const Size j = (p * warp + lane()) * n; j < columns) load_pack(x + j, kept[p]);
    }
    /// Calls use(j, values) for all numbers of this lane: n from column j on.
    template <class Use>
    __device__ void each(Use&& use) const {
#pragma unroll
        for (unsigned p = 0; p < packs; ++p)
            if (const Size j = (p * warp + lane()) * n; j < columns) use(j, kept[p]);
        for (Size j = (packs * warp + lane()) * n; j < columns; j += warp * n) {
            float values[n];
            load_pack(x + j, values);
            use(j, values);
        }
    }

    const float* x;
    Size columns;
    float kept[packs][n];
};

/// Scores become weights: row `row` is that of query row % length, which sees the keys up to its own; the others get 0.
/// `copy`: where the weights go once more, for matrix products; may be `scores` itself.
template <class T>
__global__ void __launch_bounds__(threads) causal_softmax(Size rows, Size length, float scale, float* scores, T* copy) {
    const Size row = warp_row();
    if (row >= rows) return;
    const Size seen = row % length + 1;
    scores += row * length;
    copy += row * length;
    float top = scores[0];
    for (Size j = lane(); j < seen; j += warp) top = scores[j] > top ? scores[j] : top;
    top = warp_maximum(top);
    __syncwarp();  // no lane reads what another one writes from here on
    float sum = 0;
    for (Size j = lane(); j < seen; j += warp) {
        const float e = expf(scale * (scores[j] - top));
        scores[j] = e;
        sum += e;
    }
    const float normaliser = 1.0f / warp_sum(sum);
    for (Size j = lane(); j < length; j += warp) {
        const float weight = j < seen ? scores[j] * normaliser : 0.0f;
        scores[j] = weight;
        store(copy + j, weight);
    }
}

/// The gradient of the weights becomes that of the unscaled scores, in `out`, which may be `gradient` itself.
template <class T>
__global__ void __launch_bounds__(threads)
    causal_softmax_backward(Size rows, Size length, float scale, const float* weights, const float* gradient, T* out) {
    const Size row = warp_row();
    if (row >= rows) return;
    const Size seen = row % length + 1;
    weights += row * length;
    gradient += row * length;
    out += row * length;
    float dot = 0;
    for (Size j = lane(); j < seen; j += warp) dot += weights[j] * gradient[j];
    dot = warp_sum(dot);
    for (Size j = lane(); j < length; j += warp) store(out + j, j < seen ? scale * weights[j] * (gradient[j] - dot) : 0.0f);
}

/// losses[row] = -log softmax(logits)[target]; the logits become the gradient of the rows' mean, also stored in `rounded` unless that is
/// null.
template <int n>
__global__ void __launch_bounds__(threads)
    cross_entropy(Size rows, Size classes, const std::uint8_t* targets, float* logits, __nv_bfloat16* rounded, float* losses) {
    const Size row = warp_row();
    if (row >= rows) return;
    const Row<n> own(logits + row * classes, classes);
    float top = -3.4e38f, sum = 0;
    own.each([&](Size, const float(&values)[n]) {
#pragma unroll
        for (int e = 0; e < n; ++e) top = values[e] > top ? values[e] : top;
    });
    top = warp_maximum(top);
    own.each([&](Size, const float(&values)[n]) {
#pragma unroll
        for (int e = 0; e < n; ++e) sum += expf(values[e] - top);
    });
    sum = warp_sum(sum);
    const float share = 1.0f / static_cast<float>(rows), scale = share / sum;
    const Size target = targets[row];
    own.each([&](Size j, const float(&values)[n]) {
        float gradient[n];
#pragma unroll
        for (int e = 0; e < n; ++e) {
            const bool hit = j + e == target;
            gradient[e] = expf(values[e] - top) * scale - (hit ? share : 0.0f);
            if (hit) losses[row] = logf(sum) + top - values[e];
        }
        store_pack(logits + row * classes + j, gradient);
        if (rounded != nullptr) store_pack(rounded + row * classes + j, gradient);
    });
}

/// *result = the mean of `losses`. One block.
template <class = void>
__global__ void __launch_bounds__(threads) mean(Size n, const float* losses, double* result) {
    double own = 0;
#pragma unroll 8
    for (Size i = threadIdx.x; i < n; i += threads) own += static_cast<double>(losses[i]);
    const double sum = block_sum(own);
    if (threadIdx.x == 0) *result = sum / static_cast<double>(n);
}

// ---- attention's arrays, where whole weights are kept: [tokens, parts, heads, head_size] outside, [parts, sequences, heads, length,
// head_size] inside,
// ---- where each head's matrices lie in one piece

/// The place inside of column j of a token's row: `column(j) + row(token)`.
struct HeadPlace {
    AttentionShape s;
    Size part_stride;  // from one part to the next

    __device__ Size column(Size j) const {
        const Size width = s.heads * s.head_size;
        const Size part = j / width, head = j % width / s.head_size, e = j % s.head_size;
        return part * part_stride + head * s.length * s.head_size + e;
    }
    __device__ Size row(Size token) const {
        // Devices divide numbers of 32 bits much faster.
        const auto t = static_cast<unsigned>(token), length = static_cast<unsigned>(s.length);
        return (t / length * s.heads * s.length + t % length) * s.head_size;
    }
};

template <class T>
__global__ void __launch_bounds__(threads) split_heads(HeadPlace place, Size columns, const T* in, T* out) {
    const Size j = element_index();
    if (j >= columns) return;
    const Size column = place.column(j);
    rows_of(place.s.sequences * place.s.length, [&](Size token) { out[place.row(token) + column] = in[token * columns + j]; });
}

template <class T>
__global__ void __launch_bounds__(threads) join_heads(HeadPlace place, Size columns, const float* in, T* out) {
    const Size j = element_index();
    if (j >= columns) return;
    const Size column = place.column(j);
    rows_of(place.s.sequences * place.s.length, [&](Size token) { store(out + token * columns + j, in[place.row(token) + column]); });
}

// ---- bytes in

/// `positions` may be null.
template <class T>
__global__ void __launch_bounds__(threads)
    embed(Size tokens, Size length, Size width, const std::uint8_t* bytes, const float* table, const float* positions, T* out) {
    const Size j = element_index();
    if (j >= width) return;
    rows_of(tokens, [&](Size t) {
        float x = table[bytes[t] * width + j];
        if (positions != nullptr) x += positions[Size{static_cast<unsigned>(t) % static_cast<unsigned>(length)} * width + j];
        store(out + t * width + j, x);
    });
}

/// out[tokens, 256]: 1 at each token's byte, else 0.
template <class T>
__global__ void __launch_bounds__(threads) one_hot(Size tokens, const std::uint8_t* bytes, T* out) {
    for (Size i = element_index(); i < tokens * 32; i += element_stride()) {
        float x[8];
#pragma unroll
        for (unsigned e = 0; e < 8; ++e) x[e] = bytes[i / 32] == i % 32 * 8 + e ? 1.0f : 0.0f;
        store_pack(out + 8 * i, x);
    }
}

}  // namespace gradsync_train::kernels
