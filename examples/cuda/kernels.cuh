// SPDX-License-Identifier: BSL-1.0
#pragma once
// The kernels of CudaOps but attention's, which are in attention.cuh (ops_cuda.cu says what is launched when). They are plain:
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

/// GELU by the error function; the CPU's (vector_math.hpp) agrees to 2e-7.
__device__ inline float normal_cumulative(float x) { return 0.5f * erfcf(-0.70710678f * x); }
__device__ inline float gelu_derivative(float x) { return normal_cumulative(x) + x * 0.39894228f * expf(-0.5f * x * x); }

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
        for (int e = 0; e < n; ++e) {
            const float before = values[e] + b[e];
            values[e] = before * normal_cumulative(before);
        }
        store_pack(y + row * columns + j, values);
    });
}

/// Sums over rows in two steps: each block leaves those of its rows, [gridDim.y, columns], and `add_pieces` adds them up.
/// `term.get(row, j, i, values)` is asked once for the elements from column j on, which are those from i on in all.
template <int n, class Term>
__global__ void __launch_bounds__(threads) column_sum(Size rows, Size columns, Term term, float* sums) {
    const Size j = element_index() * n;
    if (j >= columns) return;
    float sum[n] = {};
    rows_of(rows, [&](Size row) {
        float values[n];
        term.get(row, j, row * columns + j, values);
#pragma unroll
        for (int e = 0; e < n; ++e) sum[e] += values[e];
    });
#pragma unroll
    for (int e = 0; e < n; ++e) sums[blockIdx.y * columns + j + e] = sum[e];
}

/// A lane for each column, and a warp for every eighth piece.
template <class = void>
__global__ void __launch_bounds__(threads) add_pieces(Size pieces, Size columns, const float* of_pieces, float* sums) {
    __shared__ float of_warps[warps][warp];
    const Size j = Size{blockIdx.x} * warp + lane();
    const unsigned own = threadIdx.x / warp;
    float sum = 0;
    if (j < columns)
        for (Size piece = own; piece < pieces; piece += warps) sum += of_pieces[piece * columns + j];
    of_warps[own][lane()] = sum;
    __syncthreads();
    if (own != 0 || j >= columns) return;
    for (unsigned w = 1; w < warps; ++w) sum += of_warps[w][lane()];
    sums[j] = sum;
}

template <class T>
struct PlainTerm {
    const T* x;
    template <int n>
    __device__ void get(Size, Size, Size i, float (&values)[n]) const {
        load_pack(x + i, values);
    }
};

/// dy *= gelu'(x + bias), on the way.
template <class T>
struct GeluBackwardTerm {
    const float* bias;
    const T* x;
    T* dy;
    template <int n>
    __device__ void get(Size, Size j, Size i, float (&values)[n]) const {
        float before[n];
        load_pack(x + i, before);
        load_pack(dy + i, values);
#pragma unroll
        for (int e = 0; e < n; ++e) values[e] *= gelu_derivative(before[e] + bias[j + e]);
        store_pack(dy + i, values);
    }
};

/// Of the gain of a layer norm.
template <class T>
struct GainTerm {
    const float *x, *mean, *inverse;
    const T* dy;
    template <int n>
    __device__ void get(Size row, Size, Size i, float (&values)[n]) const {
        float before[n];
        load_pack(x + i, before);
        load_pack(dy + i, values);
#pragma unroll
        for (int e = 0; e < n; ++e) values[e] *= (before[e] - mean[row]) * inverse[row];
    }
};

// ---- rows: a warp for each

template <int n, class T>
__global__ void __launch_bounds__(threads)
    layer_norm(Size rows, Size columns, const float* x, const float* gain, const float* bias, T* y, float* mean, float* inverse) {
    const Size row = warp_row();
    if (row >= rows) return;
    x += row * columns;
    y += row * columns;
    float sum = 0, squares = 0, values[n];
    for (Size j = lane() * n; j < columns; j += warp * n) {
        load_pack(x + j, values);
#pragma unroll
        for (int e = 0; e < n; ++e) sum += values[e];
    }
    const float m = warp_sum(sum) / static_cast<float>(columns);
    for (Size j = lane() * n; j < columns; j += warp * n) {
        load_pack(x + j, values);
#pragma unroll
        for (int e = 0; e < n; ++e) squares += (values[e] - m) * (values[e] - m);
    }
    const float r = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(columns) + 1e-5f);
    if (lane() == 0) {
        mean[row] = m;
        inverse[row] = r;
    }
    for (Size j = lane() * n; j < columns; j += warp * n) {
        load_pack(x + j, values);
#pragma unroll
        for (int e = 0; e < n; ++e) values[e] = (values[e] - m) * r * gain[j + e] + bias[j + e];
        store_pack(y + j, values);
    }
}

/// dx += what flows through the norm; the gain's and the bias's gradients are column sums.
template <int n, class T>
__global__ void __launch_bounds__(threads) layer_norm_backward_add(Size rows, Size columns, const float* x, const float* gain,
                                                                   const float* mean, const float* inverse, const T* dy, float* dx) {
    const Size row = warp_row();
    if (row >= rows) return;
    x += row * columns;
    dy += row * columns;
    dx += row * columns;
    const float m = mean[row], r = inverse[row];
    float sum = 0, projection = 0, before[n], gradient[n], result[n];
    for (Size j = lane() * n; j < columns; j += warp * n) {
        load_pack(x + j, before);
        load_pack(dy + j, gradient);
#pragma unroll
        for (int e = 0; e < n; ++e) {
            const float d = gradient[e] * gain[j + e];
            sum += d;
            projection += d * ((before[e] - m) * r);
        }
    }
    sum = warp_sum(sum) / static_cast<float>(columns);
    projection = warp_sum(projection) / static_cast<float>(columns);
    for (Size j = lane() * n; j < columns; j += warp * n) {
        load_pack(x + j, before);
        load_pack(dy + j, gradient);
        load_pack(dx + j, result);
#pragma unroll
        for (int e = 0; e < n; ++e) result[e] += r * (gradient[e] * gain[j + e] - sum - (before[e] - m) * r * projection);
        store_pack(dx + j, result);
    }
}

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

/// losses[row] = -log softmax(logits)[target]; the logits become the gradient of the rows' mean.
template <class = void>
__global__ void __launch_bounds__(threads)
    cross_entropy(Size rows, Size classes, const std::uint8_t* targets, float* logits, float* losses) {
    const Size row = warp_row();
    if (row >= rows) return;
    logits += row * classes;
    const Size target = targets[row];
    const float target_score = logits[target];
    float top = logits[0];
    for (Size j = lane(); j < classes; j += warp) top = logits[j] > top ? logits[j] : top;
    top = warp_maximum(top);
    __syncwarp();  // no lane reads what another one writes from here on
    float sum = 0;
    for (Size j = lane(); j < classes; j += warp) {
        const float e = expf(logits[j] - top);
        logits[j] = e;
        sum += e;
    }
    sum = warp_sum(sum);
    const float share = 1.0f / static_cast<float>(rows), scale = share / sum;
    for (Size j = lane(); j < classes; j += warp) logits[j] = logits[j] * scale - (j == target ? share : 0.0f);
    if (lane() == 0) losses[row] = logf(sum) + top - target_score;
}

/// *result = the mean of `losses`. One block.
template <class = void>
__global__ void __launch_bounds__(threads) mean(Size n, const float* losses, double* result) {
    double own = 0;
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

/// table[byte] += the rows of dout whose byte it is, in order: block y looks for byte y, 256 at a time.
template <class T>
__global__ void __launch_bounds__(threads)
    embed_backward_add(Size tokens, Size width, const std::uint8_t* bytes, const T* dout, float* dtable) {
    __shared__ unsigned found[warps];  // a bit for each
    const Size j = element_index();
    const unsigned byte = blockIdx.y;
    float sum = j < width ? dtable[byte * width + j] : 0.0f;
    for (Size begin = 0; begin < tokens; begin += threads) {
        const Size own = begin + threadIdx.x;
        const unsigned matches = __ballot_sync(0xffffffffu, own < tokens && bytes[own] == byte);
        if (lane() == 0) found[threadIdx.x / warp] = matches;
        __syncthreads();
        for (unsigned w = 0; w < warps; ++w) {
            for (unsigned left = found[w]; left != 0; left &= left - 1) {
                const Size t = begin + w * warp + static_cast<unsigned>(__ffs(static_cast<int>(left)) - 1);
                if (j < width) sum += load(dout + t * width + j);
            }
        }
        __syncthreads();
    }
    if (j < width) dtable[byte * width + j] = sum;
}

}  // namespace gradsync_train::kernels
