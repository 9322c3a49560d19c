// SPDX-License-Identifier: BSL-1.0
// The passes of passes.hpp. nvcc compiles only this file of the library. Link the target gradsync::cuda,
// or compile it into a program:
//     nvcc -std=c++20 -arch=sm_90 -O3 -I include -c include/gradsync/cuda/passes.cu

#ifdef __CUDACC__
#pragma nv_diag_suppress 554  // a conversion that is never called, of a view to its own type
#endif
#include <gradsync/cuda/passes.hpp>
#include <gradsync/cuda/runtime.hpp>

#include <gradsync/cuda/kernels.cuh>

namespace gradsync::inline v0_2::cuda {

namespace {

[[noreturn]] void refuse(DType dtype, const char* pass) {
    detail::raise(Errc::invalid_argument, {.operation = pass}, "the device pass ", pass,
                  " is for floating types, not for ", dtype);
}

/// Calls `use` with a null pointer to the element type of a floating dtype. Without `float8` it refuses 8-bit types.
template <bool float8 = true, class Use>
void with_type(DType dtype, const char* pass, Use&& use) {
    if (!is_floating(dtype) || (!float8 && is_float8(dtype))) refuse(dtype, pass);
    kernels::with_element<double>(dtype, [&]<class T>(T* none) {
        if constexpr (float8 || !kernels::is_fp8<T>) use(none);
    });
}

bool is_aligned(const void* data, std::size_t bytes) { return reinterpret_cast<std::uintptr_t>(data) % bytes == 0; }

/// Starts a kernel.
template <class... P>
void launch(std::size_t blocks, const char* pass, cudaStream_t stream, void (*kernel)(P...),
            std::type_identity_t<P>... arguments) {
#ifdef __CUDACC__
    kernel<<<static_cast<unsigned>(blocks), kernels::threads, 0, stream>>>(arguments...);
    check(cudaGetLastError(), pass);
#else  // g++ compiles this file for a test, which includes tests/support/fake/kernels.hpp first
    (void)pass;
    gradsync_fake::launch(stream, static_cast<unsigned>(blocks), kernels::threads, [=] { kernel(arguments...); });
#endif
}

/// The number of thread blocks: enough to fill any device. Threads process several pieces if there are more.
std::size_t blocks_for(std::size_t pieces) {
    constexpr std::size_t most = 132 * 16;
    const std::size_t blocks = (pieces + kernels::threads - 1) / kernels::threads;
    return blocks < most ? blocks : most;
}

template <class To, class From, class F>
void transform(To* to, const From* from, std::size_t count, F f, const char* pass, cudaStream_t stream) {
    if (count == 0) return;
    constexpr std::size_t n = kernels::pack_size<To, From>;
    const std::size_t packs = is_aligned(to, n * sizeof(To)) && is_aligned(from, n * sizeof(From)) ? count / n : 0;
    if (packs != 0) launch(blocks_for(packs), pass, stream, kernels::transform_packs<To, From, F>, to, from, packs, f);
    if (const std::size_t done = packs * n; done != count)
        launch(blocks_for(count - done), pass, stream, kernels::transform_elements<To, From, F>, to + done, from + done,
               count - done, f);
}

template <class A>
void transform_packs_of_any(BufferView to, ConstBufferView from, bool adds, const char* pass, cudaStream_t stream) {
    constexpr std::size_t n = kernels::any_pack;
    const bool in_packs = is_aligned(to.data, n * size_of(to.dtype)) && is_aligned(from.data, n * size_of(from.dtype));
    const std::size_t packs = in_packs ? to.count / n : 0;
    const std::size_t done = packs * n, rest = to.count - done;
    if (packs != 0)
        launch(blocks_for(packs), pass, stream, kernels::transform_any<A, n>, to.data, to.dtype, from.data, from.dtype,
               packs, adds);
    if (rest != 0)
        launch(blocks_for(rest), pass, stream, kernels::transform_any<A, 1>,
               static_cast<std::byte*>(to.data) + done * size_of(to.dtype), to.dtype,
               static_cast<const std::byte*>(from.data) + done * size_of(from.dtype), from.dtype, rest, adds);
}

/// to[i] = f(from[i], to[i]), of any two floating types. F<To> makes elements of type To.
template <template <class> class F>
void transform_types(BufferView to, ConstBufferView from, const char* pass, cudaStream_t stream) {
    constexpr bool adds = F<float>::reads_to;
    if (is_float8(to.dtype) || is_float8(from.dtype)) {
        for (const DType dtype : {from.dtype, to.dtype})
            if (!is_floating(dtype)) refuse(dtype, pass);
        const bool in_double = to.dtype == DType::f64 || from.dtype == DType::f64;
        return in_double ? transform_packs_of_any<double>(to, from, adds, pass, stream)
                         : transform_packs_of_any<float>(to, from, adds, pass, stream);
    }
    with_type<false>(from.dtype, pass, [&]<class From>(From*) {
        with_type<false>(to.dtype, pass, [&]<class To>(To*) {
            transform(static_cast<To*>(to.data), static_cast<const From*>(from.data), to.count, F<To>{}, pass, stream);
        });
    });
}

/// buffer[i] = f(buffer[i]), for a transformation with a number.
template <template <class> class F>
void transform_in_place(BufferView buffer, double number, const char* pass, cudaStream_t stream) {
    with_type(buffer.dtype, pass, [&]<class T>(T*) {
        auto* const data = static_cast<T*>(buffer.data);
        transform(data, data, buffer.count, F<T>{{}, static_cast<kernels::Accumulator<T>>(number)}, pass, stream);
    });
}

/// Steps slices, as many in a launch as its arguments hold.
template <class Kernel, class Rule>
void step_slices(ListView<const DeviceSlice> slices, ListView<const Rule> rules, const float* factor, const char* pass,
                 cudaStream_t stream) {
    for (const DeviceSlice& slice : slices)  // before anything is stepped
        if (slice.master.dtype != DType::f32 || !is_floating(slice.gradient.dtype) ||
            slice.gradient.dtype == DType::f64)
            detail::raise(Errc::invalid_argument, {.operation = pass}, "the device pass ", pass,
                          " takes masters in f32, and gradients of floating types but f64, not ", slice.master.dtype,
                          " and ", slice.gradient.dtype);
    using Steps = kernels::TensorSteps<Kernel>;
    Steps steps;
    steps.factor = factor;
    int tensors = 0;
    steps.first_blocks[0] = 0;
    for (std::size_t k = 0; k < slices.size(); ++k) {
        const DeviceSlice& slice = slices[k];
        auto& tensor = steps.tensors[tensors];
        tensor = {Kernel{rules[k]},    slice.gradient.dtype, static_cast<float*>(slice.master.data), {},
                  slice.gradient.data, slice.master.count};
        for (int s = 0; s < Kernel::states; ++s)
            tensor.states[s] = static_cast<float*>(slice.state[static_cast<std::size_t>(s)]);
        const std::size_t blocks = (slice.master.count + kernels::step_chunk - 1) / kernels::step_chunk;
        steps.first_blocks[tensors + 1] = steps.first_blocks[tensors] + static_cast<unsigned>(blocks);
        if (++tensors != Steps::most && k + 1 != slices.size()) continue;
        if (const unsigned all = steps.first_blocks[tensors]; all != 0)
            launch(all, pass, stream, kernels::step_tensors<Kernel>, steps);
        tensors = 0;
    }
}

}  // namespace

void convert(ConstBufferView from, BufferView to, cudaStream_t stream) {
    if (from.dtype != to.dtype) return transform_types<kernels::Convert>(to, from, "convert", stream);
    if (to.bytes() != 0 && to.data != from.data)
        check(cudaMemcpyAsync(to.data, from.data, to.bytes(), cudaMemcpyDeviceToDevice, stream), "convert");
}

void add(BufferView to, ConstBufferView from, cudaStream_t stream) {
    transform_types<kernels::Add>(to, from, "add", stream);
}

void scale(BufferView buffer, double factor, cudaStream_t stream) {
    transform_in_place<kernels::Scale>(buffer, factor, "scale", stream);
}

void clamp(BufferView buffer, double limit, cudaStream_t stream) {
    transform_in_place<kernels::Clamp>(buffer, limit, "clamp", stream);
}

void scale_by(ConstBufferView from, BufferView to, const double* factor, cudaStream_t stream) {
    with_type(to.dtype, "scale_by", [&]<class T>(T*) {
        transform(static_cast<T*>(to.data), static_cast<const T*>(from.data), to.count, kernels::ScaleBy<T>{{}, factor},
                  "scale_by", stream);
    });
}

void sums_of_squares(const ConstBufferView* blocks, std::size_t count, double* sums, cudaStream_t stream) {
    if (count != 0) launch(count, "sums_of_squares", stream, kernels::sums_of_squares<>, blocks, sums);
}

void adamw(ListView<const DeviceSlice> slices, ListView<const AdamWRule> rules, const float* factor,
           cudaStream_t stream) {
    step_slices<kernels::AdamW<AdamWRule>>(slices, rules, factor, "adamw", stream);
}

void sgd(ListView<const DeviceSlice> slices, ListView<const SgdRule> rules, const float* factor, cudaStream_t stream) {
    step_slices<kernels::Sgd<SgdRule>>(slices, rules, factor, "sgd", stream);
}

void mean_factor(MeanFactor* cell, double scale, cudaStream_t stream) {
    launch(1, "mean_factor", stream, kernels::mean_factor<>, cell, scale);
}

}  // namespace gradsync::inline v0_2::cuda
