// SPDX-License-Identifier: BSL-1.0
#pragma once
// The operations on the CPU: OpenBLAS for matrix products, plain loops that vectorise for the rest.

#include <cblas.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <new>
#include <span>
#include <vector>

#include "ops.hpp"
#include "vector_math.hpp"

namespace gradsync_train {

/// Cache-line aligned memory: vector loads that straddle two lines cost twice.
template <class T>
struct AlignedAllocator {
    using value_type = T;
    static constexpr std::align_val_t alignment{64};

    AlignedAllocator() = default;
    template <class U>
    AlignedAllocator(const AlignedAllocator<U>&) {}

    T* allocate(std::size_t n) { return static_cast<T*>(::operator new(n * sizeof(T), alignment)); }
    void deallocate(T* p, std::size_t) { ::operator delete(p, alignment); }
    friend bool operator==(AlignedAllocator, AlignedAllocator) { return true; }
};

struct CpuOps {
    using Floats = std::vector<float, AlignedAllocator<float>>;
    using Factor = float;
    using Factors = Floats;
    using Byte = std::uint8_t;
    using Size = std::size_t;
    struct Bytes {};  // a batch can be read where it is
    using Loss = double;
    static constexpr bool on_device = false;

    /// Several ranks share this process, one thread each: a BLAS that starts threads of its own would fight with them.
    static void initialise() { openblas_set_num_threads(1); }

    // ---- memory

    static Floats floats(Size n) { return Floats(n); }
    static Factors factors(Size n) { return Factors(n); }
    static Factors rounding(Size) { return {}; }
    static const Factor* as_factors(Size, const float* x, Factors&) { return x; }
    static const Factor* rounded(const float* x, const Factors&) { return x; }
    static constexpr Size factor_bytes() { return sizeof(Factor); }
    static Bytes bytes(Size) { return {}; }
    static const Byte* load(std::span<const Byte> batch, Bytes&) { return batch.data(); }
    static const Byte* loaded(std::span<const Byte> batch, const Bytes&) { return batch.data(); }
    static std::span<const float> read(Size n, const float* from, std::vector<float>&) { return {from, n}; }
    template <class Fill>
    static void write(Size n, float* to, Fill&& fill) {
        fill(std::span<float>(to, n));
    }
    static double value(Loss loss) { return loss; }

    // ---- elementwise

    static void fill(Size n, float value, float* out) { std::fill_n(out, n, value); }

    static void add(Size n, const float* __restrict in, float* __restrict out) {
#pragma omp simd
        for (Size i = 0; i < n; ++i) out[i] += in[i];
    }

    static void adamw(Size n, const AdamWFactors& f, const float* __restrict gradient, float* __restrict value, float* __restrict first,
                      float* __restrict second) {
        const float scale = f.gradient_scale, beta1 = f.beta1, beta2 = f.beta2, step_size = f.step_size;
        const float correction = f.second_correction, epsilon = f.epsilon, shrink = f.shrink;
#pragma omp simd
        for (Size i = 0; i < n; ++i) {
            const float g = gradient[i] * scale;
            const float m = beta1 * first[i] + (1.0f - beta1) * g;
            const float v = beta2 * second[i] + (1.0f - beta2) * (g * g);
            first[i] = m;
            second[i] = v;
            value[i] = shrink * value[i] - step_size * m / (std::sqrt(v * correction) + epsilon);
        }
    }

    // ---- products of matrices, for Muon

    /// c[m, n] = a[m, k] b[k, n]
    static void product(Size m, Size n, Size k, const float* a, const float* b, float* c) {
        matmul(CblasNoTrans, CblasNoTrans, m, n, k, a, k, b, n, c, n);
    }
    /// c[small, small] = x x^T with x[small, large], or x^T x with x[large, small].
    static void gram(Size small, Size large, const float* x, bool wide, float* c) {
        if (wide) matmul(CblasNoTrans, CblasTrans, small, small, large, x, large, x, large, c, small);
        else matmul(CblasTrans, CblasNoTrans, small, small, large, x, small, x, small, c, small);
    }

    // ---- linear layers: weight[out, in]

    /// y[n, out] = x[n, in] weight^T (+ bias[out] (+ residual[n, out])): `residual`, or both, may be null.
    static void linear(Size n, Size in, Size out, const Factor* x, const Factor* weight, const float* bias, const float* residual,
                       float* y) {
        matmul(CblasNoTrans, CblasTrans, n, out, in, x, in, weight, in, y, out);
        if (residual != nullptr) return add_bias_residual(n, out, bias, residual, y);
        if (bias == nullptr) return;
        for (Size row = 0; row < n; ++row) add(out, bias, y + row * out);
    }

    /// dx[n, in] = dy[n, out] weight
    static void linear_input_gradient(Size n, Size in, Size out, const Factor* dy, const Factor* weight, Factor* dx) {
        matmul(CblasNoTrans, CblasNoTrans, n, in, out, dy, out, weight, in, dx, in);
    }

    /// dweight[out, in] = dy^T x
    static void linear_weight_gradient(Size n, Size in, Size out, const Factor* dy, const Factor* x, float* dweight) {
        matmul(CblasTrans, CblasNoTrans, out, in, n, dy, out, x, in, dweight, in);
    }

    /// sums[columns] = the sum of the rows of x: the gradient of a bias
    static void column_sum(Size rows, Size columns, const float* __restrict x, float* __restrict sums) {
        std::fill_n(sums, columns, 0.0f);
        Size row = 0;
        for (; row + 4 <= rows; row += 4) {  // four rows a pass: the sums are loaded and stored a quarter as often
            const float* r = x + row * columns;
#pragma omp simd
            for (Size j = 0; j < columns; ++j) {
                sums[j] += (r[j] + r[j + columns]) + (r[j + 2 * columns] + r[j + 3 * columns]);
            }
        }
        for (; row < rows; ++row) add(columns, x + row * columns, sums);
    }

    /// y = gelu(x + bias)
    static void bias_gelu(Size rows, Size columns, const float* __restrict bias, const Factor* __restrict x, Factor* __restrict y) {
        for (Size row = 0; row < rows; ++row, x += columns, y += columns) {
#pragma omp simd
            for (Size j = 0; j < columns; ++j) y[j] = gelu(x[j] + bias[j]);
        }
    }

    /// dy *= gelu'(x + bias); dbias = the sum of its rows
    static void bias_gelu_backward(Size rows, Size columns, const float* __restrict bias, const Factor* __restrict x, Factor* __restrict dy,
                                   float* __restrict dbias) {
        std::fill_n(dbias, columns, 0.0f);
        for (Size row = 0; row < rows; ++row, x += columns, dy += columns) {
#pragma omp simd
            for (Size j = 0; j < columns; ++j) {
                dy[j] *= gelu_derivative(x[j] + bias[j]);
                dbias[j] += dy[j];
            }
        }
    }

    // ---- layer norm

    /// y = gain * (x - mean) / deviation + bias, row by row; mean[rows] and inverse[rows] (1 / deviation) serve the
    /// backward pass.
    static void layer_norm(Size rows, Size columns, const float* __restrict x, const float* __restrict gain, const float* __restrict bias,
                           Factor* __restrict y, float* __restrict mean, float* __restrict inverse) {
        const auto n = static_cast<float>(columns);
        for (Size row = 0; row < rows; ++row, x += columns, y += columns) {
            float sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
            for (Size j = 0; j < columns; ++j) sum += x[j];
            const float m = sum / n;
#pragma omp simd reduction(+ : squares)
            for (Size j = 0; j < columns; ++j) squares += (x[j] - m) * (x[j] - m);
            const float r = 1.0f / std::sqrt(squares / n + 1e-5f);
            mean[row] = m;
            inverse[row] = r;
#pragma omp simd
            for (Size j = 0; j < columns; ++j) y[j] = (x[j] - m) * r * gain[j] + bias[j];
        }
    }

    /// Adds to dx: the residual stream's gradient flows past the norm as well as through it. sums[columns] = the sum of dx's rows. The
    /// unnamed room gets dx as factors.
    static void layer_norm_backward_add(Size rows, Size columns, const float* __restrict x, const float* __restrict gain,
                                        const float* __restrict mean, const float* __restrict inverse, const Factor* __restrict dy,
                                        float* __restrict dx, Factors&, float* __restrict dgain, float* __restrict dbias,
                                        float* __restrict sums) {
        const auto n = static_cast<float>(columns);
        std::fill_n(dgain, columns, 0.0f);
        std::fill_n(dbias, columns, 0.0f);
        const float* const all = dx;
        for (Size row = 0; row < rows; ++row, x += columns, dy += columns, dx += columns) {
            const float m = mean[row], r = inverse[row];
            float sum = 0, projection = 0;
#pragma omp simd reduction(+ : sum, projection)
            for (Size j = 0; j < columns; ++j) {
                const float normalised = (x[j] - m) * r;
                const float d = dy[j] * gain[j];
                sum += d;
                projection += d * normalised;
                dgain[j] += dy[j] * normalised;
                dbias[j] += dy[j];
            }
            sum /= n;
            projection /= n;
#pragma omp simd
            for (Size j = 0; j < columns; ++j) dx[j] += r * (dy[j] * gain[j] - sum - (x[j] - m) * r * projection);
        }
        column_sum(rows, columns, all, sums);
    }

    // ---- causal attention

    // Query i sees the keys 0 .. i, so the weights are a lower triangle. Products go tile by tile and skip those above
    // the diagonal: a tile of queries takes the keys up to its end, a tile of keys the queries from its beginning.

    /// What attention keeps for its backward pass, in numbers: weights[sequence, head, query, key].
    static Size attention_memory(const AttentionShape& s) { return s.sequences * s.heads * s.length * s.length; }
    /// What the backward pass needs besides.
    static Size attention_scratch(const AttentionShape& s) { return s.length * s.length; }

    /// qkv[tokens, 3, heads, head_size] -> out[tokens, heads, head_size]
    static void attention(const AttentionShape& s, const Factor* qkv, float* weights, Factor* out) {
        const Size width = s.width(), length = s.length, row = 3 * width;
        for_each_head(s, [&](Size token, Size head) {
            const float* q = qkv + token * row + head * s.head_size;
            const float* k = q + width;
            const float* v = k + width;
            float* o = out + token * width + head * s.head_size;
            for_each_tile(length, [&](Size begin, Size end) {
                matmul(CblasNoTrans, CblasTrans, end - begin, end, s.head_size, q + begin * row, row, k, row, weights + begin * length,
                       length);
                causal_softmax(begin, end, length, s.scale(), weights);
                matmul(CblasNoTrans, CblasNoTrans, end - begin, s.head_size, end, weights + begin * length, length, v, row,
                       o + begin * width, width);
            });
            weights += length * length;
        });
    }

    /// `weights`: what `attention` kept, and `out` what it computed. sums[3, heads, head_size] = the sum of dqkv's rows.
    static void attention_backward(const AttentionShape& s, const Factor* qkv, const float* weights, const Factor*, const Factor* dout,
                                   Factor* dqkv, float* sums, float* scratch) {
        const Size width = s.width(), length = s.length, row = 3 * width;
        for_each_head(s, [&](Size token, Size head) {
            const Size at = token * row + head * s.head_size;
            const float* q = qkv + at;
            const float* k = q + width;
            const float* v = k + width;
            float* dq = dqkv + at;
            float* dk = dq + width;
            float* dv = dk + width;
            const float* o = dout + token * width + head * s.head_size;
            for_each_tile(length, [&](Size begin, Size end) {
                matmul(CblasNoTrans, CblasTrans, end - begin, end, s.head_size, o + begin * width, width, v, row, scratch + begin * length,
                       length);
                causal_softmax_backward(begin, end, length, s.scale(), weights, scratch);
                matmul(CblasNoTrans, CblasNoTrans, end - begin, s.head_size, end, scratch + begin * length, length, k, row,
                       dq + begin * row, row);
            });
            for_each_tile(length, [&](Size begin, Size end) {
                const Size diagonal = begin * length + begin;
                matmul(CblasTrans, CblasNoTrans, end - begin, s.head_size, length - begin, weights + diagonal, length, o + begin * width,
                       width, dv + begin * row, row);
                matmul(CblasTrans, CblasNoTrans, end - begin, s.head_size, length - begin, scratch + diagonal, length, q + begin * row, row,
                       dk + begin * row, row);
            });
            weights += length * length;
        });
        column_sum(s.sequences * length, row, dqkv, sums);
    }

    // ---- the two ends: bytes in, loss out

    /// out[tokens, width] = table[token] (+ positions[place in its sequence], unless null)
    static void embed(Size tokens, Size length, Size width, const Byte* bytes, const float* table, const float* positions, float* out) {
        for (Size t = 0; t < tokens; ++t) {
            std::copy_n(table + bytes[t] * width, width, out + t * width);
            if (positions != nullptr) add(width, positions + t % length * width, out + t * width);
        }
    }

    /// Adds to dtable: bytes repeat, and a tied table already holds the output layer's share.
    static void embed_backward_add(Size tokens, Size width, const Byte* bytes, const Factor* dout, float* dtable) {
        for (Size t = 0; t < tokens; ++t) add(width, dout + t * width, dtable + bytes[t] * width);
    }

    /// dpositions[length, width] = the sum over sequences of dout
    static void positions_backward(Size tokens, Size length, Size width, const float* dout, float* dpositions) {
        std::copy_n(dout, length * width, dpositions);
        for (Size t = length; t < tokens; t += length) add(length * width, dout + t * width, dpositions);
    }

    /// The mean of -log softmax(logits)[target] over the rows, in nats; the logits become its gradient. The unnamed room gets it as factors.
    static Loss cross_entropy(Size rows, Size classes, const Byte* targets, float* logits, Factors&) {
        double loss = 0;
        const auto share = 1.0f / static_cast<float>(rows);
        for (Size row = 0; row < rows; ++row, logits += classes) {
            const float top = maximum(classes, logits);
            const float target = logits[targets[row]];
            const float sum = exponentials(classes, top, 1.0f, logits);
            loss += static_cast<double>(std::log(sum)) + static_cast<double>(top) - static_cast<double>(target);
            const float scale = share / sum;
#pragma omp simd
            for (Size j = 0; j < classes; ++j) logits[j] *= scale;
            logits[targets[row]] -= share;
        }
        return loss / static_cast<double>(rows);
    }

private:
    /// y += bias + residual
    static void add_bias_residual(Size rows, Size columns, const float* __restrict bias, const float* __restrict residual,
                                  float* __restrict y) {
        for (Size row = 0; row < rows; ++row, residual += columns, y += columns) {
#pragma omp simd
            for (Size j = 0; j < columns; ++j) y[j] += bias[j] + residual[j];
        }
    }

    /// c[m, n] = op(a) op(b). Always overwrites: a micro-batch's gradient must not depend on what was there before it.
    static void matmul(CBLAS_TRANSPOSE op_a, CBLAS_TRANSPOSE op_b, Size m, Size n, Size k, const float* a, Size lda, const float* b,
                       Size ldb, float* c, Size ldc) {
        const auto narrow = [](Size x) { return static_cast<blasint>(x); };
        cblas_sgemm(CblasRowMajor, op_a, op_b, narrow(m), narrow(n), narrow(k), 1.0f, a, narrow(lda), b, narrow(ldb), 0.0f, c, narrow(ldc));
    }

    template <class F>
    static void for_each_head(const AttentionShape& s, F f) {
        for (Size sequence = 0; sequence < s.sequences; ++sequence) {
            for (Size head = 0; head < s.heads; ++head) f(sequence * s.length, head);
        }
    }

    template <class F>
    static void for_each_tile(Size length, F f) {
        constexpr Size tile = 64;
        for (Size begin = 0; begin < length; begin += tile) f(begin, std::min(begin + tile, length));
    }

    static float maximum(Size n, const float* x) {
        float top = x[0];
#pragma omp simd reduction(max : top)
        for (Size j = 0; j < n; ++j) top = x[j] > top ? x[j] : top;
        return top;
    }

    /// x = exp(scale * (x - top)); returns the sum
    static float exponentials(Size n, float top, float scale, float* x) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (Size j = 0; j < n; ++j) {
            x[j] = fast_exp(scale * (x[j] - top));
            sum += x[j];
        }
        return sum;
    }

    /// The scores of queries begin .. end become weights, with zeros from the diagonal to the tile's edge.
    static void causal_softmax(Size begin, Size end, Size length, float scale, float* scores) {
        for (Size i = begin; i < end; ++i) {
            float* row = scores + i * length;
            const float normaliser = 1.0f / exponentials(i + 1, maximum(i + 1, row), scale, row);
#pragma omp simd
            for (Size j = 0; j <= i; ++j) row[j] *= normaliser;
            std::fill(row + i + 1, row + end, 0.0f);
        }
    }

    /// The gradient of the weights becomes that of the unscaled scores.
    static void causal_softmax_backward(Size begin, Size end, Size length, float scale, const float* weights, float* gradient) {
        for (Size i = begin; i < end; ++i) {
            const float* __restrict w = weights + i * length;
            float* __restrict g = gradient + i * length;
            float dot = 0;
#pragma omp simd reduction(+ : dot)
            for (Size j = 0; j <= i; ++j) dot += w[j] * g[j];
#pragma omp simd
            for (Size j = 0; j <= i; ++j) g[j] = scale * w[j] * (g[j] - dot);
            std::fill(g + i + 1, g + end, 0.0f);
        }
    }
};

}  // namespace gradsync_train
