// SPDX-License-Identifier: BSL-1.0
#pragma once
// Causal attention in bf16 without score matrices in memory: a block takes 64 queries of a head past its keys, 64 at a time, and
// keeps scores and weights in registers (Dao, FlashAttention-2, arXiv:2307.08691, algorithms 1 and 2). Forward it leaves the
// logarithm of each query's normaliser; from that the backward pass computes the weights once more: in one kernel for the
// queries' gradients, and one for those of keys and values, so that every sum has one owner and one order.
//
// A block has four warps, of which each has sixteen of the block's rows.

#include <cuda_bf16.h>

#include <cmath>
#include <cstdint>

#include "kernels.cuh"
#include "tensor_cores.cuh"

namespace gradsync_train::kernels {

inline constexpr unsigned tile = 64;  // queries, or keys
inline constexpr unsigned attention_threads = tile / 16 * warp;

/// Where the rows of one head are, and which of them are a block's. D: the head's size, or the next one that there are kernels for.
struct AttentionPlace {
    unsigned heads, length, head_size;
    float scale;  // of scores

    __device__ unsigned tiles() const { return (length + tile - 1) / tile; }
    /// Of all sequences; a block's.
    __device__ unsigned head() const { return blockIdx.x / tiles(); }
    __device__ Size width() const { return Size{heads} * head_size; }
    /// The head's first row in [tokens, parts, heads, head_size].
    __device__ Size first(unsigned parts) const {
        return Size{head() / heads} * length * parts * width() + Size{head() % heads} * head_size;
    }
    /// The first of the head's columns in sums[sequences, tiles, parts, heads, head_size], for tile `own`.
    __device__ Size sums_of(unsigned own) const {
        return (Size{head() / heads} * tiles() + own) * 3 * width() + Size{head() % heads} * head_size;
    }
    /// exp2(score * this) is exp(score * scale).
    __device__ float exponent() const { return scale * 1.44269504f; }
};

/// A tile in shared memory; what lies between the rows puts neighbours into different banks.
template <unsigned D>
struct alignas(16) Rows {
    std::uint16_t at[tile][D + 8];
};

/// Starts to copy rows first_row to first_row + 63 of `from`; zeros beyond the last, and beyond the head. By all threads of the block.
template <unsigned D>
__device__ void load_rows(Rows<D>& to, const __nv_bfloat16* from, Size stride, const AttentionPlace& p, unsigned first_row) {
    if (p.head_size == D) {
        for (unsigned i = threadIdx.x; i < tile * D / 8; i += attention_threads) {
            const unsigned row = i / (D / 8), column = i % (D / 8) * 8;
            const bool there = first_row + row < p.length;
            start_copy<16>(&to.at[row][column], from + (there ? (Size{first_row} + row) * stride + column : 0), there);
        }
    } else {
        for (unsigned i = threadIdx.x; i < tile * D; i += attention_threads) {
            const unsigned row = i / D, column = i % D;
            std::uint16_t value = 0;
            if (first_row + row < p.length && column < p.head_size)
                memcpy(&value, from + (Size{first_row} + row) * stride + column, sizeof value);
            to.at[row][column] = value;
        }
    }
}

/// Tiles in shared memory at a time. If there is room for two, the next one is copied while the block computes with the first.
template <unsigned D>
inline constexpr unsigned buffers = D <= 64 ? 2 : 1;

/// Comes before a loop over tiles from `begin` on. load(t) starts to copy tile t to buffer t % buffers. Waits for all copies; those that the
/// block has started itself may be in buffer (begin + 1) % buffers.
template <unsigned D, class Load>
__device__ void begin_tiles(unsigned begin, Load&& load) {
    if (buffers<D> > 1) load(begin);
    end_copies();
    await_copies<0>();
    __syncthreads();
}
/// Waits for tile t, and starts the next one.
template <unsigned D, class Load>
__device__ void await_tile(unsigned t, unsigned end, Load&& load) {
    __syncthreads();  // the last tile was read
    if (const unsigned next = t + buffers<D> - 1; next < end) load(next);
    end_copies();
    await_copies<buffers<D> - 1>();
    __syncthreads();
}

/// Sixteen rows of a tile, the first factor of a product.
template <unsigned D>
struct Sixteen {
    Pair pairs[D / 16][4];

    __device__ void load(const Rows<D>& rows, unsigned first_row) {
        const std::uint16_t* const row = &rows.at[first_row + lane() % 16][lane() / 16 * 8];
#pragma unroll
        for (unsigned k = 0; k < D / 16; ++k) load_matrices(pairs[k], row + 16 * k);
    }
};

/// A product's 16 rows and 16 columns: the two halves of the columns, as `multiply_add` has them.
using Square = float[2][4];
__device__ inline unsigned row_of(int element) { return lane() / 4 + (element >= 2 ? 8 : 0); }
__device__ inline unsigned column_of(int half, int element) {
    return static_cast<unsigned>(half) * 8 + 2 * (lane() % 4) + static_cast<unsigned>(element % 2);
}

/// products[i, j] = row i of `a` times row first_row + j of `rows`.
template <unsigned D>
__device__ void dot(Square& products, const Sixteen<D>& a, const Rows<D>& rows, unsigned first_row) {
    const std::uint16_t* const row = &rows.at[first_row + lane() / 16 * 8 + lane() % 8][lane() / 8 % 2 * 8];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int e = 0; e < 4; ++e) products[half][e] = 0;
#pragma unroll
    for (unsigned k = 0; k < D / 16; ++k) {
        Pair b[4];
        load_matrices(b, row + 16 * k);
        multiply_add(products[0], a.pairs[k], b[0], b[1]);
        multiply_add(products[1], a.pairs[k], b[2], b[3]);
    }
}

/// sums[i, :] += the sum over j of weights[i, j], rounded to bf16, times row first_row + j of `rows`.
template <unsigned D>
__device__ void accumulate(float (&sums)[D / 8][4], const Square& weights, const Rows<D>& rows, unsigned first_row) {
    const Pair a[4] = {pair_of(weights[0][0], weights[0][1]), pair_of(weights[0][2], weights[0][3]), pair_of(weights[1][0], weights[1][1]),
                       pair_of(weights[1][2], weights[1][3])};
    const std::uint16_t* const row = &rows.at[first_row + lane() % 16][lane() / 16 * 8];
#pragma unroll
    for (unsigned k = 0; k < D / 16; ++k) {
        Pair b[4];
        load_transposed_matrices(b, row + 16 * k);
        multiply_add(sums[2 * k], a, b[0], b[1]);
        multiply_add(sums[2 * k + 1], a, b[2], b[3]);
    }
}

/// The warp's sixteen rows, from first_row on, to memory. `factors`: by which each of a lane's two rows is multiplied.
template <unsigned D>
__device__ void store_rows(__nv_bfloat16* to, Size stride, const AttentionPlace& p, unsigned first_row, const float (&sums)[D / 8][4],
                           float factor0, float factor1) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const unsigned row = first_row + row_of(2 * half);
        if (row >= p.length) continue;
        const float factor = half == 0 ? factor0 : factor1;
#pragma unroll
        for (unsigned n = 0; n < D / 8; ++n) {
            const unsigned column = n * 8 + 2 * (lane() % 4);
            __nv_bfloat16* const place = to + Size{row} * stride + column;
            const float both[2] = {sums[n][2 * half] * factor, sums[n][2 * half + 1] * factor};
            if (p.head_size == D) {
                store_pack(place, both);
            } else {
                if (column < p.head_size) store(place, both[0]);
                if (column + 1 < p.head_size) store(place + 1, both[1]);
            }
        }
    }
}

/// to[head_size] = factor times the sum of the block's rows. Rows beyond the last are zeros.
template <unsigned D>
__device__ void store_sums(float* to, const AttentionPlace& p, const float (&rows)[D / 8][4], float factor) {
    __shared__ float of_warps[tile / 16][D];
#pragma unroll
    for (unsigned n = 0; n < D / 8; ++n)
#pragma unroll
        for (unsigned e = 0; e < 2; ++e) {
            float sum = rows[n][e] + rows[n][2 + e];
            for (unsigned distance = 4; distance < warp; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
            if (lane() < 4) of_warps[threadIdx.x / warp][n * 8 + 2 * lane() + e] = sum;
        }
    __syncthreads();
    for (unsigned column = threadIdx.x; column < p.head_size; column += attention_threads) {
        float sum = 0;
        for (unsigned w = 0; w < tile / 16; ++w) sum += of_warps[w][column];
        to[column] = factor * sum;
    }
    __syncthreads();
}

/// Over the four lanes that share rows; on each of them.
__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}
__device__ inline float quad_maximum(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

/// qkv[tokens, 3, heads, head_size] -> out[tokens, heads, head_size]; logarithms[heads of all sequences, length], to the base 2.
template <unsigned D>
__global__ void __launch_bounds__(attention_threads)
    attention_forward(AttentionPlace p, const __nv_bfloat16* qkv, float* logarithms, __nv_bfloat16* out) {
    __shared__ Rows<D> keys[buffers<D>], values[buffers<D>];
    const unsigned own = p.tiles() - 1 - blockIdx.x % p.tiles();  // those with most to do come first
    const unsigned first_row = threadIdx.x / warp * 16;           // of the warp's, in its tile
    const Size stride = 3 * p.width();
    const __nv_bfloat16* const q = qkv + p.first(3);
    const __nv_bfloat16 *const k = q + p.width(), *const v = k + p.width();
    const auto load = [&](unsigned t) {
        load_rows(keys[t % buffers<D>], k, stride, p, t * tile);
        load_rows(values[t % buffers<D>], v, stride, p, t * tile);
    };
    load_rows(keys[1 % buffers<D>], q, stride, p, own * tile);  // the queries pass through memory that is not in use yet
    begin_tiles<D>(0, load);
    Sixteen<D> queries;
    queries.load(keys[1 % buffers<D>], first_row);

    float sums[D / 8][4] = {}, top[2] = {-INFINITY, -INFINITY}, normaliser[2] = {0, 0};
    for (unsigned t = 0; t <= own; ++t) {
        await_tile<D>(t, own + 1, load);
        Square scores[tile / 16];
#pragma unroll
        for (unsigned c = 0; c < tile / 16; ++c) {
            dot(scores[c], queries, keys[t % buffers<D>], c * 16);
            if (t != own) continue;
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    if (c * 16 + column_of(half, e) > first_row + row_of(e)) scores[c][half][e] = -INFINITY;
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {  // of the lane's rows
            float largest = top[r];
#pragma unroll
            for (unsigned c = 0; c < tile / 16; ++c)
#pragma unroll
                for (int half = 0; half < 2; ++half) largest = fmaxf(largest, fmaxf(scores[c][half][2 * r], scores[c][half][2 * r + 1]));
            largest = quad_maximum(largest);  // every query sees the first key
            const float shrink = power_of_two((top[r] - largest) * p.exponent());
            top[r] = largest;
            normaliser[r] *= shrink;
#pragma unroll
            for (unsigned n = 0; n < D / 8; ++n) {
                sums[n][2 * r] *= shrink;
                sums[n][2 * r + 1] *= shrink;
            }
            const float offset = largest * p.exponent();
#pragma unroll
            for (unsigned c = 0; c < tile / 16; ++c)
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                    for (int e = 2 * r; e < 2 * r + 2; ++e) {
                        scores[c][half][e] = power_of_two(scores[c][half][e] * p.exponent() - offset);
                        normaliser[r] += scores[c][half][e];
                    }
        }
#pragma unroll
        for (unsigned c = 0; c < tile / 16; ++c) accumulate<D>(sums, scores[c], values[t % buffers<D>], c * 16);
    }
    for (int r = 0; r < 2; ++r) normaliser[r] = quad_sum(normaliser[r]);
    store_rows<D>(out + p.first(1), p.width(), p, own * tile + first_row, sums, 1 / normaliser[0], 1 / normaliser[1]);
    if (lane() % 4 != 0) return;
    for (int r = 0; r < 2; ++r)
        if (const unsigned row = own * tile + first_row + row_of(2 * r); row < p.length)
            logarithms[Size{p.head()} * p.length + row] = top[r] * p.exponent() + log2f(normaliser[r]);
}

/// The queries' part of dqkv, which is as qkv is, and of its sums (`AttentionPlace::sums_of`). dots[heads of all sequences, length]: of each
/// query's output and its gradient.
template <unsigned D>
__global__ void __launch_bounds__(attention_threads)
    attention_backward_queries(AttentionPlace p, const __nv_bfloat16* qkv, const float* logarithms, const __nv_bfloat16* out,
                               const __nv_bfloat16* dout, float* dots, __nv_bfloat16* dqkv, float* dqkv_sums) {
    __shared__ Rows<D> keys[buffers<D>], values[buffers<D>];
    const unsigned own = p.tiles() - 1 - blockIdx.x % p.tiles();
    const unsigned first_row = threadIdx.x / warp * 16;
    const Size stride = 3 * p.width();
    const __nv_bfloat16* const q = qkv + p.first(3);
    const __nv_bfloat16 *const k = q + p.width(), *const v = k + p.width();
    const auto load = [&](unsigned t) {
        load_rows(keys[t % buffers<D>], k, stride, p, t * tile);
        load_rows(values[t % buffers<D>], v, stride, p, t * tile);
    };
    Rows<D>&free_keys = keys[1 % buffers<D>], &free_values = values[1 % buffers<D>];  // until the loop begins
    load_rows(free_keys, out + p.first(1), p.width(), p, own * tile);
    load_rows(free_values, dout + p.first(1), p.width(), p, own * tile);
    begin_tiles<D>(0, load);
    Sixteen<D> queries, gradients;
    queries.load(free_keys, first_row);  // the output at first
    gradients.load(free_values, first_row);
    float logarithm[2] = {}, own_dot[2] = {};
#pragma unroll
    for (unsigned d = 0; d < D / 16; ++d)
#pragma unroll
        for (int i = 0; i < 4; ++i) own_dot[i % 2] += dot_of(queries.pairs[d][i], gradients.pairs[d][i]);
    for (int r = 0; r < 2; ++r) {
        own_dot[r] = quad_sum(own_dot[r]);
        const unsigned row = own * tile + first_row + row_of(2 * r);
        if (row >= p.length) continue;
        logarithm[r] = logarithms[Size{p.head()} * p.length + row];
        if (lane() % 4 == 0) dots[Size{p.head()} * p.length + row] = own_dot[r];
    }
    __syncthreads();
    load_rows(free_keys, q, stride, p, own * tile);
    end_copies();
    await_copies<0>();
    __syncthreads();
    queries.load(free_keys, first_row);

    float sums[D / 8][4] = {};
    for (unsigned t = 0; t <= own; ++t) {
        await_tile<D>(t, own + 1, load);
#pragma unroll
        for (unsigned c = 0; c < tile / 16; ++c) {
            if (t == own && c * 16 > first_row) continue;  // the whole warp: no query of it sees any of these keys
            Square scores, dweights;
            dot(scores, queries, keys[t % buffers<D>], c * 16);
            dot(dweights, gradients, values[t % buffers<D>], c * 16);
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const bool seen = t != own || c * 16 + column_of(half, e) <= first_row + row_of(e);
                    const float weight = seen ? power_of_two(scores[half][e] * p.exponent() - logarithm[e / 2]) : 0.0f;
                    scores[half][e] = weight * (dweights[half][e] - own_dot[e / 2]);
                }
            accumulate<D>(sums, scores, keys[t % buffers<D>], c * 16);
        }
    }
    store_rows<D>(dqkv + p.first(3), stride, p, own * tile + first_row, sums, p.scale, p.scale);
    store_sums<D>(dqkv_sums + p.sums_of(own), p, sums, p.scale);
}

/// The keys' and the values' parts: the same with rows and columns changed over. Comes after the queries' part, which leaves `dots`.
template <unsigned D>
__global__ void __launch_bounds__(attention_threads)
    attention_backward_keys(AttentionPlace p, const __nv_bfloat16* qkv, const float* logarithms, const float* dots,
                            const __nv_bfloat16* dout, __nv_bfloat16* dqkv, float* dqkv_sums) {
    __shared__ Rows<D> queries[buffers<D>], gradients[buffers<D>];
    __shared__ float logarithm[buffers<D>][tile], own_dot[buffers<D>][tile];
    const unsigned own = blockIdx.x % p.tiles();
    const unsigned first_row = threadIdx.x / warp * 16;
    const Size stride = 3 * p.width();
    const __nv_bfloat16* const q = qkv + p.first(3);
    const auto load = [&](unsigned t) {
        const unsigned to = t % buffers<D>;
        load_rows(queries[to], q, stride, p, t * tile);
        load_rows(gradients[to], dout + p.first(1), p.width(), p, t * tile);
        if (threadIdx.x >= tile) return;
        const bool there = t * tile + threadIdx.x < p.length;
        const Size place = Size{p.head()} * p.length + (there ? t * tile + threadIdx.x : 0);
        start_copy<4>(&logarithm[to][threadIdx.x], logarithms + place, there);
        start_copy<4>(&own_dot[to][threadIdx.x], dots + place, there);
    };
    const unsigned spare = (own + 1) % buffers<D>;  // the keys and the values pass through memory that is not in use yet
    load_rows(queries[spare], q + p.width(), stride, p, own * tile);
    load_rows(gradients[spare], q + 2 * p.width(), stride, p, own * tile);
    begin_tiles<D>(own, load);
    Sixteen<D> keys, values;
    keys.load(queries[spare], first_row);
    values.load(gradients[spare], first_row);

    float dkeys[D / 8][4] = {}, dvalues[D / 8][4] = {};
    for (unsigned t = own; t < p.tiles(); ++t) {
        await_tile<D>(t, p.tiles(), load);
        const unsigned in = t % buffers<D>;
#pragma unroll
        for (unsigned c = 0; c < tile / 16; ++c) {
            if (t == own && c * 16 + 15 < first_row) continue;  // the whole warp: none of these queries sees any key of it
            Square weights, dscores;
            dot(weights, keys, queries[in], c * 16);
            dot(dscores, values, gradients[in], c * 16);
#pragma unroll
            for (int half = 0; half < 2; ++half)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const unsigned query = c * 16 + column_of(half, e);
                    const bool seen = t != own || query >= first_row + row_of(e);  // beyond the last are zeros
                    weights[half][e] = seen ? power_of_two(weights[half][e] * p.exponent() - logarithm[in][query]) : 0.0f;
                    dscores[half][e] = weights[half][e] * (dscores[half][e] - own_dot[in][query]);
                }
            accumulate<D>(dvalues, weights, gradients[in], c * 16);
            accumulate<D>(dkeys, dscores, queries[in], c * 16);
        }
    }
    __nv_bfloat16* const dk = dqkv + p.first(3) + p.width();
    store_rows<D>(dk, stride, p, own * tile + first_row, dkeys, p.scale, p.scale);
    store_rows<D>(dk + p.width(), stride, p, own * tile + first_row, dvalues, 1, 1);
    store_sums<D>(dqkv_sums + p.sums_of(own) + p.width(), p, dkeys, p.scale);
    store_sums<D>(dqkv_sums + p.sums_of(own) + 2 * p.width(), p, dvalues, 1);
}

}  // namespace gradsync_train::kernels
