// SPDX-License-Identifier: BSL-1.0
#pragma once
// The operations on a CUDA device: cuBLASLt for matrix products, kernels of our own (*.cuh) for the rest. ops_cpu.hpp says
// what each computes. All of it comes in order on one stream; nothing waits for it but `read`, `write`,
// `value`, and a `load` that is several batches ahead.
//
// For g++ as well as nvcc: what launches kernels is in ops_cuda.cu.

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <gradsync/core/buffer_view.hpp>
#include <gradsync/cuda/runtime.hpp>

#include "../ops.hpp"

namespace gradsync_train {

/// The type of what matrix products take, and of activations and their gradients; weights, their gradients, the residual stream and all
/// sums are f32.
enum class Precision { f32, bf16 };

class CudaOps {
public:
    using Byte = std::uint8_t;
    using Size = std::size_t;
    static constexpr bool on_device = true;

    /// f32 or bf16, by the precision.
    struct Factor;
    class Factors {
    public:
        Factors() = default;
        explicit Factors(Size bytes) : memory_(bytes) {}
        Factor* data() { return static_cast<Factor*>(memory_.data()); }
        const Factor* data() const { return static_cast<const Factor*>(memory_.data()); }

    private:
        gradsync::cuda::DeviceMemory memory_;
    };

    /// Numbers in device memory, zeros at first.
    class Floats {
    public:
        Floats() = default;
        explicit Floats(Size n) : memory_(n * sizeof(float)), size_(n) {}
        float* data() { return static_cast<float*>(memory_.data()); }
        const float* data() const { return static_cast<const float*>(memory_.data()); }
        Size size() const { return size_; }
        bool empty() const { return size_ == 0; }

    private:
        gradsync::cuda::DeviceMemory memory_;
        Size size_ = 0;
    };

    /// Bytes on the device, and pinned copies of the last few batches, on their way there.
    class Bytes {
    public:
        explicit Bytes(Size n);

    private:
        friend CudaOps;
        struct Passage {
            gradsync::cuda::PinnedMemory memory;
            gradsync::cuda::Event left;
            bool used = false;
        };
        gradsync::cuda::DeviceMemory device_;
        std::array<Passage, 4> passages_;
        Size next_ = 0;
    };

    /// A number in pinned memory, and when it is there.
    struct LossCell {
        gradsync::cuda::PinnedMemory memory{sizeof(double)};
        gradsync::cuda::Event written = gradsync::cuda::make_event();
    };
    using Loss = std::shared_ptr<LossCell>;

    /// On the calling thread's device, which it has to stay. For one thread at a time.
    explicit CudaOps(Precision precision);

    cudaStream_t stream() const;
    /// Waits for all of it.
    void finish() const;

    // ---- memory

    Floats floats(Size n) const { return Floats(n); }
    Factors factors(Size n) const { return Factors(n * factor_bytes()); }
    Size factor_bytes() const;
    Factors rounding(Size n) const { return factor_bytes() == sizeof(float) ? Factors() : factors(n); }
    const Factor* as_factors(Size n, const float* x, Factors& room) const;
    const Factor* rounded(const float* x, const Factors& room) const {
        return factor_bytes() == sizeof(float) ? reinterpret_cast<const Factor*>(x) : room.data();
    }
    Bytes bytes(Size n) const { return Bytes(n); }
    const Byte* load(std::span<const Byte> batch, Bytes& room) const;
    const Byte* loaded(std::span<const Byte>, const Bytes& room) const { return static_cast<const Byte*>(room.device_.data()); }
    std::span<const float> read(Size n, const float* from, std::vector<float>& own) const;
    std::span<const float> read(Size n, const Factor* from, std::vector<float>& own) const;
    template <class T, class Fill>
    void write(Size n, T* to, Fill&& fill_host) const {
        std::vector<float> own(n);
        fill_host(std::span<float>(own));
        copy_to_device(n, own.data(), to);
    }
    double value(const Loss& loss) const;

    // ---- elementwise

    void fill(Size n, float value, float* out) const;
    void add(Size n, const float* in, float* out) const;
    /// Returns the factor that limits the norm of `gradients` to `most`. It lies on the device and is valid until the next call. If the
    /// gradients are only this rank's slices, `add_up(sum)` adds the sums of squares of all ranks, on the stream; `sum` points to a double
    /// on the device.
    const float* clip_factor(std::span<const gradsync::ConstBufferView> gradients, double most,
                             const std::function<void(double* sum)>& add_up = {}) const;

    // ---- linear layers

    void linear(Size n, Size in, Size out, const Factor* x, const Factor* weight, const float* bias, const float* residual, float* y) const;
    /// There is no residual.
    void linear(Size n, Size in, Size out, const Factor* x, const Factor* weight, const float* bias, std::nullptr_t, Factor* y) const;
    void linear_input_gradient(Size n, Size in, Size out, const Factor* dy, const Factor* weight, Factor* dx) const;
    void linear_weight_gradient(Size n, Size in, Size out, const Factor* dy, const Factor* x, float* dweight) const;
    void column_sum(Size rows, Size columns, const float* x, float* sums) const;
    void column_sum(Size rows, Size columns, const Factor* x, float* sums) const;
    void bias_gelu(Size rows, Size columns, const float* bias, const Factor* x, Factor* y) const;
    void bias_gelu_backward(Size rows, Size columns, const float* bias, const Factor* x, Factor* dy, float* dbias) const;

    // ---- layer norm

    void layer_norm(Size rows, Size columns, const float* x, const float* gain, const float* bias, Factor* y, float* mean,
                    float* inverse) const;
    void layer_norm_backward_add(Size rows, Size columns, const float* x, const float* gain, const float* mean, const float* inverse,
                                 const Factor* dy, float* dx, Factors& rounded, float* dgain, float* dbias, float* sums) const;

    // ---- causal attention, all heads at once. In bf16, for heads of up to 128, weights are never in memory:
    // ---- what is kept is a number for each query and head. Else all weights are, and what is above the diagonal too.

    Size attention_memory(const AttentionShape& s) const;
    static Size attention_scratch(const AttentionShape&) { return 0; }
    void attention(const AttentionShape& s, const Factor* qkv, float* kept, Factor* out) const;
    void attention_backward(const AttentionShape& s, const Factor* qkv, const float* kept, const Factor* out, const Factor* dout,
                            Factor* dqkv, float* sums, float* scratch) const;

    // ---- the two ends

    void embed(Size tokens, Size length, Size width, const Byte* bytes, const float* table, const float* positions, float* out) const;
    void embed(Size tokens, Size length, Size width, const Byte* bytes, const float* table, const float* positions, Factor* out) const;
    void embed_backward_add(Size tokens, Size width, const Byte* bytes, const Factor* dout, float* dtable) const;
    void positions_backward(Size tokens, Size length, Size width, const float* dout, float* dpositions) const;
    Loss cross_entropy(Size rows, Size classes, const Byte* targets, float* logits, Factors& rounded) const;

private:
    struct Context;

    void copy_to_device(Size n, const float* from, float* to) const;
    void copy_to_device(Size n, const float* from, Factor* to) const;

    std::shared_ptr<Context> context_;
};

}  // namespace gradsync_train
