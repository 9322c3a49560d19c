// SPDX-License-Identifier: BSL-1.0
// CudaOps: which kernels and matrix products an operation is. The one file of the trainer that nvcc compiles.

#ifdef __CUDACC__
#pragma nv_diag_suppress 554  // a conversion that is never called, of a view to its own type
#endif

#include "ops_cuda.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include <gradsync/core/error.hpp>
#include <gradsync/cuda/passes.hpp>

#include "attention.cuh"
#include "kernels.cuh"
#include "launch.cuh"
#include "layer_norm.cuh"
#include "matmul.hpp"

namespace gradsync_train {

namespace {

namespace gs = gradsync;
using Size = std::size_t;

constexpr Size most_blocks = 132 * 16;  // enough to fill every device; threads take more than one piece where there is more

unsigned count_of(Size things, Size each) { return static_cast<unsigned>((things + each - 1) / each); }
unsigned blocks_for(Size elements) {
    return static_cast<unsigned>(std::min<Size>(most_blocks, std::max(1u, count_of(elements, kernels::threads))));
}

/// Columns by rows, for threads that take `pack` columns; `most`: of pieces that rows are cut into.
dim3 grid_for(Size rows, Size columns, Size most, Size pack = 1) {
    const unsigned across = count_of(columns, pack * kernels::threads);
    const Size down = std::max<Size>(1, std::min({rows, most, most_blocks / std::min<Size>(across, most_blocks)}));
    return dim3(across, static_cast<unsigned>(down));
}
constexpr Size any_number = 65535;

/// Calls `use` with how many numbers of a row a kernel takes at a time, as a constant: `most`, if all rows begin where packs of so many
/// do, else 4 or 1.
template <int most, class Use>
void with_pack(Size columns, Use&& use) {
    if (columns % most == 0) use(std::integral_constant<int, most>());
    else if constexpr (most > 4) with_pack<4>(columns, use);
    else use(std::integral_constant<int, 1>());
}

/// For kernels that load a gain, and perhaps a bias, in packs: parameters may lie anywhere.
template <class Use>
void with_pack_of(Size columns, const float* gain, const float* bias, Use&& use) {
    const auto places = reinterpret_cast<std::uintptr_t>(gain) | reinterpret_cast<std::uintptr_t>(bias);
    with_pack<4>(places % 16 == 0 ? columns : 1, use);
}

}  // namespace

struct CudaOps::Context {
    /// Memory that grows to the largest size that was asked for.
    class Scratch {
    public:
        template <class T>
        T* get(Size n, cudaStream_t stream) {
            if (n * sizeof(T) > memory_.bytes()) {
                gs::cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
                memory_ = {};
                memory_ = gs::cuda::DeviceMemory(n * sizeof(T), false);
            }
            return static_cast<T*>(memory_.data());
        }

    private:
        gs::cuda::DeviceMemory memory_;
    };

    explicit Context(Precision precision_) : precision(precision_) {}
    ~Context() { cudaStreamSynchronize(stream.get()); }

    const Precision precision;
    gs::cuda::Stream stream = gs::cuda::make_stream();
    Matmul matmul;
    Scratch bias, pieces, hot, heads, scores, rounded_scores, head_gradients, dots;
    gs::cuda::DeviceMemory loss{sizeof(double)}, factor{sizeof(float)};
    std::vector<Loss> cells;
    Size next_cell = 0;
    std::vector<gs::ConstBufferView> norm_blocks;  // those on the device
    Scratch norm_memory;

    template <class... P, class... A>
    void launch(dim3 blocks, void (*kernel)(P...), A... arguments) {
        gradsync_train::launch(stream.get(), blocks, kernels::threads, kernel, static_cast<P>(arguments)...);
    }

    /// Calls `use` with a null pointer to the type of the factors of matrix products, and cuBLASLt's name for it.
    template <class Use>
    void with_factors(Use&& use) const {
        if (precision == Precision::bf16) use(static_cast<__nv_bfloat16*>(nullptr), CUDA_R_16BF);
        else use(static_cast<float*>(nullptr), CUDA_R_32F);
    }

    /// `n` numbers as factors: where they are, or rounded into `room`.
    const Factor* factors(Size n, const float* x, void* room) {
        if (precision == Precision::f32) return reinterpret_cast<const Factor*>(x);
        launch(blocks_for(count_of(n, 4)), kernels::to_bfloat16<>, n, x, static_cast<__nv_bfloat16*>(room));
        return static_cast<const Factor*>(room);
    }

    /// A bias as a product of `type` adds it, aligned as matrices are.
    const void* bias_for(cudaDataType_t type, Size n, const float* x) {
        if (x == nullptr || (type == CUDA_R_32F && reinterpret_cast<std::uintptr_t>(x) % 16 == 0)) return x;
        const auto copied = [&]<class T>(T* to) {
            launch(blocks_for(n), kernels::copy<T>, n, x, to);
            return static_cast<const void*>(to);
        };
        return type == CUDA_R_16BF ? copied(bias.get<__nv_bfloat16>(n, stream.get())) : copied(bias.get<float>(n, stream.get()));
    }

    /// c[m, n] = op(a) op(b), for matrices without gaps.
    template <class C>
    void product(Size m, Size n, Size k, const Factor* a, bool a_transposed, const Factor* b, bool b_transposed, C* c,
                 const float* added_bias = nullptr, const float* addend = nullptr) {
        with_factors([&](auto*, cudaDataType_t type) {
            const cudaDataType_t c_type = std::is_same_v<C, float> ? CUDA_R_32F : type;
            matmul(type, {m, n, k}, {a, a_transposed ? m : k, a_transposed}, {b, b_transposed ? k : n, b_transposed},
                   {.data = c, .type = c_type, .leading = n, .bias = bias_for(c_type, n, added_bias), .addend = addend}, stream.get());
        });
    }

    /// Pieces of rows whose sums are added up in a second step.
    static Size pieces_of(Size rows) { return std::min<Size>(256, count_of(rows, 32)); }

    /// sums[columns]: what a kernel, `start(grid, pack, to)`, has added up for each piece in to[grid.y, columns].
    template <class Start>
    void sum_columns(Size rows, Size columns, float* sums, Start&& start) {
        with_pack<8>(columns, [&](auto pack) {
            const dim3 grid = grid_for(rows, columns, pieces_of(rows), pack);
            float* const to = grid.y == 1 ? sums : pieces.get<float>(grid.y * columns, stream.get());
            start(grid, pack, to);
            if (grid.y > 1) add_pieces<1>(grid.y, columns, to, {sums});
        });
    }
    template <Size parts>
    void add_pieces(Size count, Size columns, const float* of_pieces, kernels::Sums<parts> sums) {
        launch(count_of(parts * columns, kernels::warp), kernels::add_pieces<parts>, count, columns, of_pieces, sums);
    }

    /// A cell that nobody waits for.
    Loss free_cell() {
        for (Size looked = 0; looked < cells.size(); ++looked) {
            Loss& cell = cells[next_cell++ % cells.size()];
            if (cell.use_count() == 1) return cell;
        }
        return cells.emplace_back(std::make_shared<LossCell>());
    }
};

CudaOps::CudaOps(Precision precision) : context_(std::make_shared<Context>(precision)) {}

cudaStream_t CudaOps::stream() const { return context_->stream.get(); }

void CudaOps::finish() const { gs::cuda::check(cudaStreamSynchronize(stream()), "cudaStreamSynchronize"); }

// ---- memory

CudaOps::Bytes::Bytes(Size n) : device_(n) {
    for (Passage& passage : passages_) {
        passage.memory = gs::cuda::PinnedMemory(n);
        passage.left = gs::cuda::make_event();
    }
}

const CudaOps::Byte* CudaOps::load(std::span<const Byte> batch, Bytes& room) const {
    Bytes::Passage& passage = room.passages_[room.next_++ % room.passages_.size()];
    if (passage.used) gs::cuda::check(cudaEventSynchronize(passage.left.get()), "cudaEventSynchronize");
    std::memcpy(passage.memory.data(), batch.data(), batch.size());
    gs::cuda::check(cudaMemcpyAsync(room.device_.data(), passage.memory.data(), batch.size(), cudaMemcpyHostToDevice, stream()),
                    "cudaMemcpyAsync");
    gs::cuda::check(cudaEventRecord(passage.left.get(), stream()), "cudaEventRecord");
    passage.used = true;
    return loaded(batch, room);
}

std::span<const float> CudaOps::read(Size n, const float* from, std::vector<float>& own) const {
    own.resize(n);
    gs::cuda::check(cudaMemcpyAsync(own.data(), from, n * sizeof(float), cudaMemcpyDeviceToHost, stream()), "cudaMemcpyAsync");
    gs::cuda::check(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
    return own;
}

void CudaOps::copy_to_device(Size n, const float* from, float* to) const {
    gs::cuda::check(cudaMemcpyAsync(to, from, n * sizeof(float), cudaMemcpyHostToDevice, stream()), "cudaMemcpyAsync");
    gs::cuda::check(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
}

const CudaOps::Factor* CudaOps::as_factors(Size n, const float* x, Factors& room) const { return context_->factors(n, x, room.data()); }

CudaOps::Size CudaOps::factor_bytes() const { return context_->precision == Precision::bf16 ? sizeof(__nv_bfloat16) : sizeof(float); }

// Factors cross over for tests only: they are rounded on the host.

std::span<const float> CudaOps::read(Size n, const Factor* from, std::vector<float>& own) const {
    context_->with_factors([&]<class T>(T*, cudaDataType_t) {
        std::vector<T> copied(n);
        gs::cuda::check(cudaMemcpyAsync(copied.data(), from, n * sizeof(T), cudaMemcpyDeviceToHost, stream()), "cudaMemcpyAsync");
        gs::cuda::check(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
        own.clear();
        for (const T& x : copied) own.push_back(static_cast<float>(x));
    });
    return own;
}

void CudaOps::copy_to_device(Size n, const float* from, Factor* to) const {
    context_->with_factors([&]<class T>(T*, cudaDataType_t) {
        std::vector<T> rounded;
        for (Size i = 0; i < n; ++i) rounded.push_back(static_cast<T>(from[i]));
        gs::cuda::check(cudaMemcpyAsync(to, rounded.data(), n * sizeof(T), cudaMemcpyHostToDevice, stream()), "cudaMemcpyAsync");
        gs::cuda::check(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
    });
}

double CudaOps::value(const Loss& loss) const {
    gs::cuda::check(cudaEventSynchronize(loss->written.get()), "cudaEventSynchronize");
    return *static_cast<const double*>(loss->memory.data());
}

// ---- elementwise

void CudaOps::fill(Size n, float value, float* out) const { context_->launch(blocks_for(n), kernels::fill<>, n, value, out); }

void CudaOps::add(Size n, const float* in, float* out) const { context_->launch(blocks_for(n), kernels::add<>, n, in, out); }

const float* CudaOps::clip_factor(std::span<const gs::ConstBufferView> gradients, double most,
                                  const std::function<void(double* sum)>& add_up) const {
    constexpr Size block = 1 << 16;
    std::vector<gs::ConstBufferView> blocks;
    for (const auto& gradient : gradients) {
        for (Size at = 0; at < gradient.count; at += block) blocks.push_back(gradient.subview(at, std::min(block, gradient.count - at)));
    }
    Context& c = *context_;
    const Size block_bytes = blocks.size() * sizeof(gs::ConstBufferView);
    auto* const sum = c.norm_memory.get<double>(1 + blocks.size() + block_bytes / sizeof(double), stream());
    auto* const sums = sum + 1;
    auto* const listed = reinterpret_cast<gs::ConstBufferView*>(sums + blocks.size());
    const auto same = [](const gs::ConstBufferView& a, const gs::ConstBufferView& b) { return a.data == b.data && a.count == b.count; };
    if (!std::equal(blocks.begin(), blocks.end(), c.norm_blocks.begin(), c.norm_blocks.end(), same)) {  // buckets have moved
        gs::cuda::check(cudaMemcpyAsync(listed, blocks.data(), block_bytes, cudaMemcpyHostToDevice, stream()), "cudaMemcpyAsync");
        gs::cuda::check(cudaStreamSynchronize(stream()), "cudaStreamSynchronize");
        c.norm_blocks = std::move(blocks);
    }
    gs::cuda::sums_of_squares(listed, c.norm_blocks.size(), sums, stream());
    auto* const factor = static_cast<float*>(c.factor.data());
    if (add_up) {
        c.launch(1, kernels::sum<>, c.norm_blocks.size(), sums, sum);
        add_up(sum);
        c.launch(1, kernels::clip_factor<>, Size{1}, sum, most, factor);
    } else {
        c.launch(1, kernels::clip_factor<>, c.norm_blocks.size(), sums, most, factor);
    }
    return factor;
}

// ---- linear layers

void CudaOps::linear(Size n, Size in, Size out, const Factor* x, const Factor* weight, const float* bias, const float* residual,
                     float* y) const {
    context_->product(n, out, in, x, false, weight, true, y, bias, residual);
}

void CudaOps::linear(Size n, Size in, Size out, const Factor* x, const Factor* weight, const float* bias, std::nullptr_t, Factor* y) const {
    context_->product(n, out, in, x, false, weight, true, y, bias);
}

void CudaOps::linear_input_gradient(Size n, Size in, Size out, const Factor* dy, const Factor* weight, Factor* dx) const {
    context_->product(n, in, out, dy, false, weight, false, dx);
}

void CudaOps::linear_weight_gradient(Size n, Size in, Size out, const Factor* dy, const Factor* x, float* dweight) const {
    context_->product(out, in, n, dy, true, x, false, dweight);
}

void CudaOps::column_sum(Size rows, Size columns, const float* x, float* sums) const {
    context_->sum_columns(rows, columns, sums, [&](dim3 grid, auto pack, float* to) {
        context_->launch(grid, kernels::column_sum<pack, float>, rows, columns, x, to);
    });
}

void CudaOps::column_sum(Size rows, Size columns, const Factor* x, float* sums) const {
    context_->with_factors([&]<class T>(T*, cudaDataType_t) {
        context_->sum_columns(rows, columns, sums, [&](dim3 grid, auto pack, float* to) {
            context_->launch(grid, kernels::column_sum<pack, T>, rows, columns, reinterpret_cast<const T*>(x), to);
        });
    });
}

void CudaOps::bias_gelu(Size rows, Size columns, const float* bias, const Factor* x, Factor* y) const {
    context_->with_factors([&]<class T>(T*, cudaDataType_t) {
        with_pack<8>(columns, [&](auto pack) {
            context_->launch(grid_for(rows, columns, any_number, pack), kernels::bias_gelu<pack, T>, rows, columns, bias,
                             reinterpret_cast<const T*>(x), reinterpret_cast<T*>(y));
        });
    });
}

void CudaOps::bias_gelu_backward(Size rows, Size columns, const float* bias, const Factor* x, Factor* dy, float* dbias) const {
    context_->with_factors([&]<class T>(T*, cudaDataType_t) {
        context_->sum_columns(rows, columns, dbias, [&](dim3 grid, auto pack, float* to) {
            context_->launch(grid, kernels::bias_gelu_backward<pack, T>, rows, columns, bias, reinterpret_cast<const T*>(x),
                             reinterpret_cast<T*>(dy), to);
        });
    });
}

// ---- layer norm

void CudaOps::layer_norm(Size rows, Size columns, const float* x, const float* gain, const float* bias, Factor* y, float* mean,
                         float* inverse) const {
    context_->with_factors([&]<class T>(T*, cudaDataType_t) {
        with_pack_of(columns, gain, bias, [&](auto pack) {
            context_->launch(count_of(rows, kernels::warps), kernels::layer_norm<pack, T>, rows, columns, x, gain, bias,
                             reinterpret_cast<T*>(y), mean, inverse);
        });
    });
}

void CudaOps::layer_norm_backward_add(Size rows, Size columns, const float* x, const float* gain, const float* mean, const float* inverse,
                                      const Factor* dy, float* dx, Factors& rounded, float* dgain, float* dbias, float* sums) const {
    Context& c = *context_;
    const Size pieces = Context::pieces_of(rows);
    float* const of_pieces = c.pieces.get<float>(pieces * 3 * columns, stream());
    c.with_factors([&]<class T>(T*, cudaDataType_t) {
        with_pack_of(columns, gain, nullptr, [&](auto pack) {
            const Size needed = count_of(columns, pack * kernels::warp) * kernels::warp;
            launch(stream(), dim3(1, static_cast<unsigned>(pieces)), static_cast<unsigned>(std::min<Size>(kernels::threads, needed)),
                   kernels::layer_norm_backward_add<pack, T>, rows, columns, x, gain, mean, inverse, reinterpret_cast<const T*>(dy), dx,
                   reinterpret_cast<T*>(rounded.data()), of_pieces);
        });
    });
    c.add_pieces<3>(pieces, columns, of_pieces, {dgain, dbias, sums});
}

// ---- attention

namespace {

/// The sizes of attention's matrices; there is one of each for every head of every sequence.
struct AttentionSizes {
    explicit AttentionSizes(const AttentionShape& s)
        : batch(s.sequences * s.heads),
          length(s.length),
          head(s.head_size),
          tokens(s.sequences * s.length),
          part((tokens * s.width() + 7) / 8 * 8),
          square(length * length),
          scale(s.scale()) {}

    Size batch, length, head, tokens;
    Size part;    // all queries, all keys or all values, and what keeps the next aligned
    Size square;  // one head's scores
    float scale;  // of scores
};

/// Are there kernels for such heads that keep weights to themselves? (All else is for f32, and for larger heads.)
bool is_fused(Precision precision, const AttentionShape& s) { return precision == Precision::bf16 && s.head_size <= 128; }

/// Calls `use` with the size that heads of this size are computed in.
template <class Use>
void with_head_size(Size head_size, Use&& use) {
    if (head_size <= 16) use(std::integral_constant<unsigned, 16>());
    else if (head_size <= 32) use(std::integral_constant<unsigned, 32>());
    else if (head_size <= 64) use(std::integral_constant<unsigned, 64>());
    else use(std::integral_constant<unsigned, 128>());
}

kernels::AttentionPlace place_of(const AttentionShape& s) {
    return {static_cast<unsigned>(s.heads), static_cast<unsigned>(s.length), static_cast<unsigned>(s.head_size), s.scale()};
}
unsigned attention_blocks(const AttentionShape& s) {
    return static_cast<unsigned>(s.sequences * s.heads) * count_of(s.length, kernels::tile);
}

}  // namespace

CudaOps::Size CudaOps::attention_memory(const AttentionShape& s) const {
    return s.sequences * s.heads * s.length * (is_fused(context_->precision, s) ? 1 : s.length);
}

void CudaOps::attention(const AttentionShape& s, const Factor* qkv, float* kept, Factor* out) const {
    Context& c = *context_;
    if (is_fused(c.precision, s))
        return with_head_size(s.head_size, [&](auto size) {
            launch(stream(), attention_blocks(s), kernels::attention_threads, kernels::attention_forward<size>, place_of(s),
                   reinterpret_cast<const __nv_bfloat16*>(qkv), kept, reinterpret_cast<__nv_bfloat16*>(out));
        });
    const AttentionSizes z(s);
    c.with_factors([&]<class T>(T*, cudaDataType_t type) {
        T* const q = c.heads.get<T>(3 * z.part, stream());
        T* const k = q + z.part;
        T* const v = k + z.part;
        c.launch(grid_for(z.tokens, 3 * s.width(), any_number), kernels::split_heads<T>, kernels::HeadPlace{s, z.part}, 3 * s.width(),
                 reinterpret_cast<const T*>(qkv), q);
        const Size rows = z.length * z.head;  // of one head's queries, in numbers
        c.matmul(type, {z.length, z.length, z.head, z.batch}, {q, z.head, false, rows}, {k, z.head, true, rows},
                 {kept, CUDA_R_32F, z.length, z.square}, stream());
        T* rounded = nullptr;
        if constexpr (std::is_same_v<T, float>) rounded = kept;
        else rounded = c.rounded_scores.get<T>(z.batch * z.square, stream());
        c.launch(count_of(z.batch * z.length, kernels::warps), kernels::causal_softmax<T>, z.batch * z.length, z.length, z.scale, kept,
                 rounded);
        float* const attended = c.head_gradients.get<float>(z.part, stream());
        c.matmul(type, {z.length, z.head, z.length, z.batch}, {rounded, z.length, false, z.square}, {v, z.head, false, rows},
                 {attended, CUDA_R_32F, z.head, rows}, stream());
        c.launch(grid_for(z.tokens, s.width(), any_number), kernels::join_heads<T>, kernels::HeadPlace{s, z.part}, s.width(), attended,
                 reinterpret_cast<T*>(out));
    });
}

void CudaOps::attention_backward(const AttentionShape& s, const Factor* qkv, const float* kept, const Factor* out, const Factor* dout,
                                 Factor* dqkv, float* sums, float*) const {
    Context& c = *context_;
    if (is_fused(c.precision, s)) {
        const auto as_bfloat16 = [](const Factor* x) { return reinterpret_cast<const __nv_bfloat16*>(x); };
        float* const dots = c.dots.get<float>(s.sequences * s.length * s.heads, stream());
        const Size pieces = s.sequences * count_of(s.length, kernels::tile);
        float* const of_pieces = c.pieces.get<float>(pieces * 3 * s.width(), stream());
        auto* const to = reinterpret_cast<__nv_bfloat16*>(dqkv);
        with_head_size(s.head_size, [&](auto size) {
            launch(stream(), attention_blocks(s), kernels::attention_threads, kernels::attention_backward_queries<size>, place_of(s),
                   as_bfloat16(qkv), kept, as_bfloat16(out), as_bfloat16(dout), dots, to, of_pieces);
            launch(stream(), attention_blocks(s), kernels::attention_threads, kernels::attention_backward_keys<size>, place_of(s),
                   as_bfloat16(qkv), kept, static_cast<const float*>(dots), as_bfloat16(dout), to, of_pieces);
        });
        return c.add_pieces<1>(pieces, 3 * s.width(), of_pieces, {sums});
    }
    const AttentionSizes z(s);
    c.with_factors([&]<class T>(T*, cudaDataType_t type) {
        T* const q = c.heads.get<T>(4 * z.part, stream());
        T* const k = q + z.part;
        T* const v = k + z.part;
        T* const d = v + z.part;
        c.launch(grid_for(z.tokens, 3 * s.width(), any_number), kernels::split_heads<T>, kernels::HeadPlace{s, z.part}, 3 * s.width(),
                 reinterpret_cast<const T*>(qkv), q);
        c.launch(grid_for(z.tokens, s.width(), any_number), kernels::split_heads<T>, kernels::HeadPlace{s, z.part}, s.width(),
                 reinterpret_cast<const T*>(dout), d);
        float* const dq = c.head_gradients.get<float>(3 * z.part, stream());
        float* const dk = dq + z.part;
        float* const dv = dk + z.part;
        const Size rows = z.length * z.head;

        T* rounded = nullptr;
        if constexpr (!std::is_same_v<T, float>) rounded = c.rounded_scores.get<T>(z.batch * z.square, stream());
        const Matrix w{c.factors(z.batch * z.square, kept, rounded), z.length, true, z.square};
        c.matmul(type, {z.length, z.head, z.length, z.batch}, w, {d, z.head, false, rows}, {dv, CUDA_R_32F, z.head, rows}, stream());

        float* const dscores = c.scores.get<float>(z.batch * z.square, stream());
        c.matmul(type, {z.length, z.length, z.head, z.batch}, {d, z.head, false, rows}, {v, z.head, true, rows},
                 {dscores, CUDA_R_32F, z.length, z.square}, stream());
        if constexpr (std::is_same_v<T, float>) rounded = dscores;  // else after the weights, which are done with
        c.launch(count_of(z.batch * z.length, kernels::warps), kernels::causal_softmax_backward<T>, z.batch * z.length, z.length, z.scale,
                 kept, dscores, rounded);
        c.matmul(type, {z.length, z.head, z.length, z.batch}, {rounded, z.length, false, z.square}, {k, z.head, false, rows},
                 {dq, CUDA_R_32F, z.head, rows}, stream());
        c.matmul(type, {z.length, z.head, z.length, z.batch}, {rounded, z.length, true, z.square}, {q, z.head, false, rows},
                 {dk, CUDA_R_32F, z.head, rows}, stream());
        c.launch(grid_for(z.tokens, 3 * s.width(), any_number), kernels::join_heads<T>, kernels::HeadPlace{s, z.part}, 3 * s.width(), dq,
                 reinterpret_cast<T*>(dqkv));
    });
    column_sum(z.tokens, 3 * s.width(), dqkv, sums);
}

// ---- the two ends

void CudaOps::embed(Size tokens, Size length, Size width, const Byte* bytes, const float* table, const float* positions, float* out) const {
    context_->launch(grid_for(tokens, width, any_number), kernels::embed<float>, tokens, length, width, bytes, table, positions, out);
}
void CudaOps::embed(Size tokens, Size length, Size width, const Byte* bytes, const float* table, const float* positions,
                    Factor* out) const {
    context_->with_factors([&]<class T>(T*, cudaDataType_t) {
        context_->launch(grid_for(tokens, width, any_number), kernels::embed<T>, tokens, length, width, bytes, table, positions,
                         reinterpret_cast<T*>(out));
    });
}

/// A matrix product, so that each row of dout is read once, however often its byte comes.
void CudaOps::embed_backward_add(Size tokens, Size width, const Byte* bytes, const Factor* dout, float* dtable) const {
    Context& c = *context_;
    c.with_factors([&]<class T>(T*, cudaDataType_t) {
        T* const hot = c.hot.get<T>(tokens * 256, stream());
        c.launch(blocks_for(tokens * 32), kernels::one_hot<T>, tokens, bytes, hot);
        c.product(256, width, tokens, reinterpret_cast<const Factor*>(hot), true, dout, false, dtable, nullptr, dtable);
    });
}

void CudaOps::positions_backward(Size tokens, Size length, Size width, const float* dout, float* dpositions) const {
    column_sum(tokens / length, length * width, dout, dpositions);
}

CudaOps::Loss CudaOps::cross_entropy(Size rows, Size classes, const Byte* targets, float* logits, Factors& rounded) const {
    Context& c = *context_;
    float* const losses = c.pieces.get<float>(rows, stream());
    auto* const mean = static_cast<double*>(c.loss.data());
    with_pack<4>(classes, [&](auto pack) {
        c.launch(count_of(rows, kernels::warps), kernels::cross_entropy<pack>, rows, classes, targets, logits,
                 reinterpret_cast<__nv_bfloat16*>(rounded.data()), losses);
    });
    c.launch(1, kernels::mean<>, rows, losses, mean);
    Loss loss = c.free_cell();
    gs::cuda::check(cudaMemcpyAsync(loss->memory.data(), mean, sizeof *mean, cudaMemcpyDeviceToHost, stream()), "cudaMemcpyAsync");
    gs::cuda::check(cudaEventRecord(loss->written.get(), stream()), "cudaEventRecord");
    return loss;
}

}  // namespace gradsync_train
