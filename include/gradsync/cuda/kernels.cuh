// SPDX-License-Identifier: BSL-1.0
#pragma once

// For nvcc, and for the tests that run kernels on the host. passes.hpp documents the passes.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace gradsync::inline v0_2::cuda::kernels {

// ------------------------------------------------------------------------------------------------------------ elements

/// The type in which elements of type T are computed.
template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class T>
inline constexpr bool is_fp8 = std::is_same_v<T, __nv_fp8_e4m3> || std::is_same_v<T, __nv_fp8_e5m2>;

template <class A, class T>
__device__ A widen(T x) {
    if constexpr (is_fp8<T>) return static_cast<A>(static_cast<float>(x));
    else if constexpr (std::is_same_v<T, __half>) return static_cast<A>(__half2float(x));
    else if constexpr (std::is_same_v<T, __nv_bfloat16>) return static_cast<A>(__bfloat162float(x));
    else return static_cast<A>(x);
}

/// Rounds once, to nearest, even from double to 16 and 8 bits. In 8 bits a value out of
/// range becomes the largest number.
template <class T, class A>
__device__ T narrow(A x) {
    constexpr bool in_double = std::is_same_v<A, double>;
    if constexpr (std::is_same_v<T, __half> && in_double) return __double2half(x);
    else if constexpr (std::is_same_v<T, __half>) return __float2half_rn(x);
    else if constexpr (std::is_same_v<T, __nv_bfloat16> && in_double) return __double2bfloat16(x);
    else if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(x);
    else return T(x);
}

/// `n` elements that are loaded and stored at once.
template <class T, int n>
struct alignas(n * sizeof(T)) Pack {
    T elements[n];
};

/// Elements per load of a thread: 16 bytes of the wider type.
template <class A, class B>
inline constexpr int pack_size = 16 / (sizeof(A) > sizeof(B) ? sizeof(A) : sizeof(B));

inline constexpr int threads = 256;

// -------------------------------------------------------------------------------------------------- element by element

/// to[i] = f(from[i], to[i]), for packs and for single elements.
template <class To, class From, class F>
__global__ void __launch_bounds__(threads) transform_packs(To* to, const From* from, std::size_t packs, F f) {
    constexpr int n = pack_size<To, From>;
    auto* const to_packs = reinterpret_cast<Pack<To, n>*>(to);
    const auto* const from_packs = reinterpret_cast<const Pack<From, n>*>(from);
    f.prepare();
    for (std::size_t i = blockIdx.x * std::size_t{threads} + threadIdx.x; i < packs;
         i += gridDim.x * std::size_t{threads}) {
        Pack<To, n> out;
        if constexpr (F::reads_to) out = to_packs[i];
        if (f.reads_from()) {
            const Pack<From, n> in = from_packs[i];
#pragma unroll
            for (int k = 0; k < n; ++k) out.elements[k] = f(in.elements[k], out.elements[k]);
        } else {
#pragma unroll
            for (int k = 0; k < n; ++k) out.elements[k] = To();
        }
        to_packs[i] = out;
    }
}
template <class To, class From, class F>
__global__ void __launch_bounds__(threads) transform_elements(To* to, const From* from, std::size_t count, F f) {
    f.prepare();
    for (std::size_t i = blockIdx.x * std::size_t{threads} + threadIdx.x; i < count;
         i += gridDim.x * std::size_t{threads})
        to[i] = f.reads_from() ? f(from[i], to[i]) : To();
}

/// Defaults of a transformation.
struct Plain {
    static constexpr bool reads_to = false;
    __device__ void prepare() {}
    __device__ bool reads_from() const { return true; }
};

template <class To>
struct Convert : Plain {
    template <class From>
    __device__ To operator()(From x, To) const {
        return narrow<To>(widen<Accumulator<From>>(x));
    }
};

template <class To>
struct Add : Plain {
    static constexpr bool reads_to = true;
    using A = Accumulator<To>;
    template <class From>
    __device__ To operator()(From x, To y) const {
        return narrow<To>(widen<A>(y) + widen<A>(x));
    }
};

template <class T>
struct Scale : Plain {
    Accumulator<T> factor;
    __device__ T operator()(T x, T) const { return narrow<T>(widen<Accumulator<T>>(x) * factor); }
};

/// The factor is in device memory. Each thread reads it once.
template <class T>
struct ScaleBy : Scale<T> {
    const double* source;
    __device__ void prepare() { this->factor = static_cast<Accumulator<T>>(*source); }
    __device__ bool reads_from() const { return this->factor != 0; }
};

template <class T>
struct Clamp : Plain {
    Accumulator<T> limit;
    __device__ T operator()(T x, T) const {
        const auto value = widen<Accumulator<T>>(x);
        return value > limit ? narrow<T>(limit) : value < -limit ? narrow<T>(-limit) : x;  // a NaN fails both tests
    }
};

// ---------------------------------------------------------------------------------------- types known at run time only

/// Calls `use` with a null pointer to the element type of a floating dtype; Double stands for f64.
#pragma nv_exec_check_disable
template <class Double, class Use>
__host__ __device__ void with_element(DType dtype, Use&& use) {
    switch (dtype) {
        case DType::f16: return use(static_cast<__half*>(nullptr));
        case DType::bf16: return use(static_cast<__nv_bfloat16*>(nullptr));
        case DType::f8e4m3: return use(static_cast<__nv_fp8_e4m3*>(nullptr));
        case DType::f8e5m2: return use(static_cast<__nv_fp8_e5m2*>(nullptr));
        case DType::f64: return use(static_cast<Double*>(nullptr));
        default: return use(static_cast<float*>(nullptr));
    }
}

/// Loads `n` elements of a floating type, which must be aligned as a whole. f64 needs an A of double.
template <int n, class A>
__device__ void load(const void* data, DType dtype, std::size_t place, A* values) {
    with_element<A>(dtype, [&]<class T>(T*) {
        const Pack<T, n> pack = static_cast<const Pack<T, n>*>(data)[place];
#pragma unroll
        for (int k = 0; k < n; ++k) values[k] = widen<A>(pack.elements[k]);
    });
}
template <int n, class A>
__device__ void store(void* data, DType dtype, std::size_t place, const A* values) {
    with_element<A>(dtype, [&]<class T>(T*) {
        Pack<T, n> pack;
#pragma unroll
        for (int k = 0; k < n; ++k) pack.elements[k] = narrow<T>(values[k]);
        static_cast<Pack<T, n>*>(data)[place] = pack;
    });
}

/// Elements per load of a thread of `transform_any`.
inline constexpr int any_pack = 4;

/// to[i] = from[i], or to[i] += from[i], for `packs` of `n` elements. Serves the pairs of types that include an 8-bit
/// type: separate kernels for them would double the number of kernels. A is double if one side is f64; otherwise float,
/// which holds all other types and which devices convert to 8 bits in one instruction.
template <class A, int n>
__global__ void __launch_bounds__(threads)
    transform_any(void* to, DType to_type, const void* from, DType from_type, std::size_t packs, bool adds) {
    const bool in_double = to_type == DType::f64;
    const std::size_t stride = gridDim.x * std::size_t{threads};
    for (std::size_t i = blockIdx.x * std::size_t{threads} + threadIdx.x; i < packs; i += stride) {
        A x[n];
        load<n>(from, from_type, i, x);
        if (adds) {
            A y[n];
            load<n>(to, to_type, i, y);
#pragma unroll
            for (int k = 0; k < n; ++k)
                x[k] = in_double ? y[k] + x[k] : static_cast<A>(static_cast<float>(y[k]) + static_cast<float>(x[k]));
        }
        store<n>(to, to_type, i, x);
    }
}

// ---------------------------------------------------------------------------------------------------------- optimizers

/// A tensor in a step of several. It has `Rule::states` arrays of state.
template <class Rule>
struct TensorStep {
    Rule rule;
    DType gradient_type;
    float* master;
    float* states[Rule::states];
    const void* gradient;
    std::size_t count;
};
/// The arguments of a launch, limited to 4 KiB.
template <class Rule>
struct TensorSteps {
    static constexpr int most = 44;
    const float* factor;
    unsigned first_blocks[most + 1];  ///< first block of each tensor, then one past the last
    TensorStep<Rule> tensors[most];
};

/// The elements of a tensor that one block steps.
inline constexpr std::size_t step_chunk = std::size_t{threads} * 16;

template <class Base>
struct AdamW : Base {
    static constexpr int states = 2;
    __device__ void operator()(float g, float& w, float (&state)[2]) const {
        state[0] = this->beta1 * state[0] + (1.0f - this->beta1) * g;
        state[1] = this->beta2 * state[1] + (1.0f - this->beta2) * (g * g);
        w = this->shrink * w - this->step_size * state[0] / (sqrtf(state[1] * this->second_correction) + this->epsilon);
    }
};
template <class Base>
struct Sgd : Base {
    static constexpr int states = 1;
    __device__ void operator()(float g, float& w, float (&state)[1]) const {
        g += this->decay * w;
        state[0] = this->momentum * state[0] + g;
        w -= this->rate * (this->nesterov ? g + this->momentum * state[0] : state[0]);
    }
};

/// Steps `n` elements from element n * i on, which are aligned as a whole.
template <int n, class G, class Rule>
__device__ void step_pack(const TensorStep<Rule>& tensor, float scale, std::size_t i) {
    const auto gradient = static_cast<const Pack<G, n>*>(tensor.gradient)[i];
    auto& masters = reinterpret_cast<Pack<float, n>*>(tensor.master)[i];
    Pack<float, n> master = masters, states[Rule::states];
#pragma unroll
    for (int s = 0; s < Rule::states; ++s) states[s] = reinterpret_cast<Pack<float, n>*>(tensor.states[s])[i];
#pragma unroll
    for (int k = 0; k < n; ++k) {
        float state[Rule::states];
#pragma unroll
        for (int s = 0; s < Rule::states; ++s) state[s] = states[s].elements[k];
        tensor.rule(widen<float>(gradient.elements[k]) * scale, master.elements[k], state);
#pragma unroll
        for (int s = 0; s < Rule::states; ++s) states[s].elements[k] = state[s];
    }
    masters = master;
#pragma unroll
    for (int s = 0; s < Rule::states; ++s) reinterpret_cast<Pack<float, n>*>(tensor.states[s])[i] = states[s];
}

template <class Rule>
__global__ void __launch_bounds__(threads) step_tensors(const TensorSteps<Rule> steps) {
    int t = 0;
    while (blockIdx.x >= steps.first_blocks[t + 1]) ++t;
    const TensorStep<Rule>& tensor = steps.tensors[t];
    const std::size_t begin = (blockIdx.x - steps.first_blocks[t]) * step_chunk;
    const std::size_t end = begin + step_chunk < tensor.count ? begin + step_chunk : tensor.count;
    const float scale =
        steps.factor == nullptr ? tensor.rule.gradient_scale : tensor.rule.gradient_scale * *steps.factor;
    with_element<float>(tensor.gradient_type, [&]<class G>(G*) {
        const auto is_aligned = [](const void* data, std::size_t bytes) {
            return reinterpret_cast<std::uintptr_t>(data) % bytes == 0;
        };
        bool aligned = is_aligned(tensor.gradient, 4 * sizeof(G)) && is_aligned(tensor.master, 16);
        for (int s = 0; s < Rule::states; ++s) aligned = aligned && is_aligned(tensor.states[s], 16);
        const std::size_t packed = aligned ? begin + (end - begin) / 4 * 4 : begin;  // begin is a multiple of 4
        for (std::size_t i = begin / 4 + threadIdx.x; i < packed / 4; i += threads) step_pack<4, G>(tensor, scale, i);
        for (std::size_t i = packed + threadIdx.x; i < end; i += threads) step_pack<1, G>(tensor, scale, i);
    });
}

// --------------------------------------------------------------------------------------------------------------- norms

/// The sum over all threads of a block, in a fixed order; valid on thread 0.
__device__ inline double block_sum(double value) {
    __shared__ double of_warps[threads / 32];
    for (int distance = 16; distance > 0; distance /= 2) value += __shfl_down_sync(0xffffffffu, value, distance);
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = value;
    __syncthreads();
    double sum = 0;
    if (threadIdx.x == 0)
        for (int w = 0; w < threads / 32; ++w) sum += of_warps[w];
    __syncthreads();
    return sum;
}

template <class T>
__device__ double thread_sum(const void* data, std::size_t count) {
    const T* const elements = static_cast<const T*>(data);
    constexpr int n = pack_size<T, T>;
    // Single elements up to the first aligned pack, then packs, then single elements.
    const std::size_t ragged = (16 - reinterpret_cast<std::uintptr_t>(data) % 16) % 16 / sizeof(T),
                      before = ragged < count ? ragged : count;
    const std::size_t packs = (count - before) / n, after = before + packs * n;
    const auto square = [](T x) {
        const double value = widen<double>(x);
        return value * value;
    };
    double sum = 0;
    if (threadIdx.x < before) sum += square(elements[threadIdx.x]);
    const auto* const whole = reinterpret_cast<const Pack<T, n>*>(elements + before);
    for (std::size_t i = threadIdx.x; i < packs; i += threads) {
        const Pack<T, n> pack = whole[i];
#pragma unroll
        for (int k = 0; k < n; ++k) sum += square(pack.elements[k]);
    }
    if (after + threadIdx.x < count) sum += square(elements[after + threadIdx.x]);
    return sum;
}

/// One thread block per block of elements.
template <class = void>  // a template, so that several files may include it
__global__ void __launch_bounds__(threads) sums_of_squares(const ConstBufferView* blocks, double* sums) {
    const ConstBufferView block = blocks[blockIdx.x];
    double sum = 0;
    with_element<double>(block.dtype, [&]<class T>(T*) { sum = thread_sum<T>(block.data, block.count); });
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

template <class = void>
__global__ void mean_factor(MeanFactor* cell, double scale) {
    if (threadIdx.x != 0) return;
    const double factor = cell->weight == 0 ? 0 : scale / cell->weight;
    cell->factor = factor;
    cell->factor32 = static_cast<float>(factor);
}

}  // namespace gradsync::inline v0_2::cuda::kernels
