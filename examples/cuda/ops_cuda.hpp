#pragma once
// The operations on a CUDA device: cuBLASLt for matrix products, kernels of our own (kernels.cuh) for the rest. What each
// computes is said in ops_cpu.hpp. All of it comes in order on one stream; nothing waits for it but `read`, `write`,
// `value`, and a `load` that is several batches ahead.
//
// For g++ as well as nvcc: what launches kernels is in ops_cuda.cu.

#include <cuda_runtime_api.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <gradsync/cuda/runtime.hpp>

#include "../ops.hpp"

namespace gradsync_train {

/// What the factors of matrix products are rounded to; sums and all else are f32.
enum class Precision { f32, bf16 };

class CudaOps {
public:
    using Byte = std::uint8_t;
    using Size = std::size_t;
    static constexpr bool on_device = true;

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
    Bytes bytes(Size n) const { return Bytes(n); }
    const Byte* load(std::span<const Byte> batch, Bytes& room) const;
    const Byte* loaded(std::span<const Byte>, const Bytes& room) const { return static_cast<const Byte*>(room.device_.data()); }
    std::span<const float> read(Size n, const float* from, std::vector<float>& own) const;
    template <class Fill>
    void write(Size n, float* to, Fill&& fill_host) const {
        std::vector<float> own(n);
        fill_host(std::span<float>(own));
        copy_to_device(n, own.data(), to);
    }
    double value(const Loss& loss) const;

    // ---- elementwise

    void fill(Size n, float value, float* out) const;
    void add(Size n, const float* in, float* out) const;
    void adamw(Size n, const AdamWFactors& f, const float* gradient, float* value, float* first, float* second) const;
    /// What to multiply all of `gradients` by so that their norm is at most `most`; lies on the device until the next call.
    const float* clip_factor(std::span<const std::span<const float>> gradients, double most) const;

    // ---- linear layers

    void linear(Size n, Size in, Size out, const float* x, const float* weight, float* y) const;
    void linear_input_gradient(Size n, Size in, Size out, const float* dy, const float* weight, float* dx) const;
    void linear_weight_gradient(Size n, Size in, Size out, const float* dy, const float* x, float* dweight) const;
    void column_sum(Size rows, Size columns, const float* x, float* sums) const;
    void add_bias(Size rows, Size columns, const float* bias, float* x) const;
    void add_bias_residual(Size rows, Size columns, const float* bias, const float* residual, float* y) const;
    void bias_gelu(Size rows, Size columns, const float* bias, float* x, float* y) const;
    void bias_gelu_backward(Size rows, Size columns, const float* x, float* dy, float* dbias) const;

    // ---- layer norm

    void layer_norm(Size rows, Size columns, const float* x, const float* gain, const float* bias, float* y, float* mean,
                    float* inverse) const;
    void layer_norm_backward_add(Size rows, Size columns, const float* x, const float* gain, const float* mean,
                                 const float* inverse, const float* dy, float* dx, float* dgain, float* dbias) const;

    // ---- causal attention. All heads at once, and what is above the diagonal too; the scratch is not used.

    void attention(const AttentionShape& s, const float* qkv, float* weights, float* out) const;
    void attention_backward(const AttentionShape& s, const float* qkv, const float* weights, const float* dout, float* dqkv,
                            float* scratch) const;

    // ---- the two ends

    void embed(Size tokens, Size length, Size width, const Byte* bytes, const float* table, const float* positions,
               float* out) const;
    void embed_backward_add(Size tokens, Size width, const Byte* bytes, const float* dout, float* dtable) const;
    void positions_backward(Size tokens, Size length, Size width, const float* dout, float* dpositions) const;
    Loss cross_entropy(Size rows, Size classes, const Byte* targets, float* logits) const;

private:
    struct Context;

    void copy_to_device(Size n, const float* from, float* to) const;

    std::shared_ptr<Context> context_;
};

}  // namespace gradsync_train
