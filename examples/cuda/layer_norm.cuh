// SPDX-License-Identifier: BSL-1.0
#pragma once
// Layer norm. Each pass reads and writes every array once.

#include "kernels.cuh"

namespace gradsync_train::kernels {

/// y = gain * (x - mean) / deviation + bias; inverse = 1 / deviation. A warp for each row.
template <int n, class T>
__global__ void __launch_bounds__(threads)
    layer_norm(Size rows, Size columns, const float* x, const float* gain, const float* bias, T* y, float* mean, float* inverse) {
    const Size row = warp_row();
    if (row >= rows) return;
    const Row<n> own(x + row * columns, columns);
    float sum = 0, squares = 0;
    own.each([&](Size, const float(&values)[n]) {
#pragma unroll
        for (int e = 0; e < n; ++e) sum += values[e];
    });
    const float m = warp_sum(sum) / static_cast<float>(columns);
    own.each([&](Size, const float(&values)[n]) {
#pragma unroll
        for (int e = 0; e < n; ++e) squares += (values[e] - m) * (values[e] - m);
    });
    const float r = 1.0f / sqrtf(warp_sum(squares) / static_cast<float>(columns) + 1e-5f);
    if (lane() == 0) {
        mean[row] = m;
        inverse[row] = r;
    }
    own.each([&](Size j, const float(&values)[n]) {
        float gains[n], result[n];
        load_pack(gain + j, gains);
        load_pack(bias + j, result);
#pragma unroll
        for (int e = 0; e < n; ++e) result[e] += (values[e] - m) * r * gains[e];
        store_pack(y + row * columns + j, result);
    });
}

/// Adds to dx what flows through the norm, and stores dx as factors in `rounded` unless that is null. Each block leaves three sums of its
/// rows for `add_pieces`, sums[gridDim.y, 3, columns]: the gradients of gain and bias, and dx.
///
/// A block takes four rows at a time, and a thread the same columns of each. It goes right to add up each row, and back left to write dx.
/// In between it keeps the columns it loaded last; these are all of its columns if a row has 1,024 numbers or fewer.
template <int n, class T>
__global__ void __launch_bounds__(threads)
    layer_norm_backward_add(Size rows, Size columns, const float* x, const float* gain, const float* mean, const float* inverse,
                            const T* dy, float* dx, T* rounded, float* sums) {
    constexpr int together = 4;
    __shared__ float of_warps[2][warps][2 * together];  // used in turn: one barrier is enough
    const Size first = threadIdx.x * Size{n}, step = blockDim.x * Size{n};
    const Size last = first < columns ? first + (columns - 1 - first) / step * step : first;
    sums += blockIdx.y * 3 * columns;
    for (Size j = first; j < last; j += step)
        for (int e = 0; e < n; ++e) sums[j + e] = sums[columns + j + e] = sums[2 * columns + j + e] = 0;
    float totals[3][n] = {};  // of the last columns; `sums` holds the others
    unsigned turn = 0;

    rows_of((rows + together - 1) / together, [&](Size group) {
        const Size top = group * together;
        float m[together], r[together], normalised[together][n], gradient[together][n], result[together][n];
#pragma unroll
        for (int k = 0; k < together; ++k) {
            m[k] = top + k < rows ? mean[top + k] : 0.0f;
            r[k] = top + k < rows ? inverse[top + k] : 0.0f;
        }
        const auto load_columns = [&](Size j, bool for_good) {
#pragma unroll
            for (int k = 0; k < together; ++k) {
                const Size at = (top + k) * columns + j;
#pragma unroll
                for (int e = 0; e < n; ++e) normalised[k][e] = gradient[k][e] = result[k][e] = 0;
                if (top + k >= rows) continue;
                load_pack(x + at, normalised[k]);
                load_pack(dy + at, gradient[k]);
                if (for_good) load_pack(dx + at, result[k]);
            }
#pragma unroll
            for (int k = 0; k < together; ++k)
#pragma unroll
                for (int e = 0; e < n; ++e) normalised[k][e] = (normalised[k][e] - m[k]) * r[k];
        };

        float of_rows[2 * together] = {}, gains[n] = {};
        for (Size j = first; j < columns; j += step) {
            load_columns(j, j == last);
            load_pack(gain + j, gains);
#pragma unroll
            for (int k = 0; k < together; ++k)
#pragma unroll
                for (int e = 0; e < n; ++e) {
                    const float d = gradient[k][e] * gains[e];
                    of_rows[2 * k] += d;
                    of_rows[2 * k + 1] += d * normalised[k][e];
                }
        }
        turn ^= 1;
#pragma unroll
        for (int i = 0; i < 2 * together; ++i) {
            of_rows[i] = warp_sum(of_rows[i]);
            if (lane() == 0) of_warps[turn][threadIdx.x / warp][i] = of_rows[i];
            of_rows[i] = 0;
        }
        __syncthreads();
        for (unsigned w = 0; w < blockDim.x / warp; ++w)
#pragma unroll
            for (int i = 0; i < 2 * together; ++i) of_rows[i] += of_warps[turn][w][i];
#pragma unroll
        for (float& x_mean : of_rows) x_mean *= 1.0f / static_cast<float>(columns);

        if (first >= columns) return;
        for (Size j = last;; j -= step) {
            if (j != last) {
                load_columns(j, true);
                load_pack(gain + j, gains);
            }
            float added[3][n] = {};
#pragma unroll
            for (int k = 0; k < together; ++k) {
#pragma unroll
                for (int e = 0; e < n; ++e) {
                    const float through = gradient[k][e] * gains[e] - of_rows[2 * k] - normalised[k][e] * of_rows[2 * k + 1];
                    result[k][e] += r[k] * through;
                    added[0][e] += gradient[k][e] * normalised[k][e];
                    added[1][e] += gradient[k][e];
                    added[2][e] += result[k][e];
                }
                if (top + k >= rows) continue;
                store_pack(dx + (top + k) * columns + j, result[k]);
                if (rounded != nullptr) store_pack(rounded + (top + k) * columns + j, result[k]);
            }
#pragma unroll
            for (int part = 0; part < 3; ++part)
#pragma unroll
                for (int e = 0; e < n; ++e)
                    if (j == last) totals[part][e] += added[part][e];
                    else sums[part * columns + j + e] += added[part][e];
            if (j == first) break;
        }
    });
    if (first >= columns) return;
#pragma unroll
    for (int part = 0; part < 3; ++part)
#pragma unroll
        for (int e = 0; e < n; ++e) sums[part * columns + last + e] = totals[part][e];
}

}  // namespace gradsync_train::kernels
