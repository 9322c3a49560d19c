// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <gradsync/core/buffer_view.hpp>
#include <gradsync/core/parameter.hpp>

#include "random.hpp"

namespace gradsync_test {

using Bytes = std::vector<std::byte>;

/// A tensor whose type is known at run time, as a trainer may have it.
struct Tensor {
    std::string name;
    gradsync::DType dtype = gradsync::DType::f32;
    std::vector<std::size_t> shape;
    Bytes value;
    Bytes gradient;
    bool requires_grad = true;
    std::uint32_t uses = 1;

    Tensor(std::string name_, gradsync::DType dtype_, std::vector<std::size_t> shape_)
        : name(std::move(name_)), dtype(dtype_), shape(std::move(shape_)), value(count() * size_of(dtype)), gradient(value.size()) {}

    std::size_t count() const { return std::accumulate(shape.begin(), shape.end(), std::size_t{1}, std::multiplies<>()); }
    gradsync::BufferView value_view() { return {value.data(), count(), dtype, gradsync::MemorySpace::host}; }
    gradsync::BufferView gradient_view() { return {gradient.data(), count(), dtype, gradsync::MemorySpace::host}; }
};

/// Tensors p0, p1, ... of these sizes.
inline std::vector<Tensor> tensors(const std::vector<std::size_t>& counts, gradsync::DType dtype = gradsync::DType::f32) {
    std::vector<Tensor> result;
    for (const std::size_t count : counts) result.emplace_back("p" + std::to_string(result.size()), dtype, std::vector<std::size_t>{count});
    return result;
}

/// Tensors of types that alternate and sizes that are odd, as lie badly one behind another.
inline std::vector<Tensor> mixed_tensors() {
    using enum gradsync::DType;
    std::vector<Tensor> result;
    for (const gradsync::DType dtype : {bf16, f64, f32, bf16, f64, f32, bf16, f32, f64})
        for (const std::size_t count : {1u, 7u, 33u})
            result.emplace_back("p" + std::to_string(result.size()), dtype, std::vector<std::size_t>{count});
    return result;
}

/// Calls `use` with a null pointer to the element type.
template <class Use>
decltype(auto) with_type(gradsync::DType dtype, Use&& use) {
    using enum gradsync::DType;
    switch (dtype) {
        case i8: return use(static_cast<std::int8_t*>(nullptr));
        case u8: return use(static_cast<std::uint8_t*>(nullptr));
        case i32: return use(static_cast<std::int32_t*>(nullptr));
        case u32: return use(static_cast<std::uint32_t*>(nullptr));
        case i64: return use(static_cast<std::int64_t*>(nullptr));
        case u64: return use(static_cast<std::uint64_t*>(nullptr));
        case f16: return use(static_cast<gradsync::Float16*>(nullptr));
        case bf16: return use(static_cast<gradsync::BFloat16*>(nullptr));
        case f64: return use(static_cast<double*>(nullptr));
        case f8e4m3: return use(static_cast<gradsync::Float8E4M3*>(nullptr));
        case f8e5m2: return use(static_cast<gradsync::Float8E5M2*>(nullptr));
        default: return use(static_cast<float*>(nullptr));
    }
}

template <class T>
T element_of(double x) {
    if constexpr (gradsync::is_low_precision(gradsync::dtype_of<T>)) return T(static_cast<float>(x));
    else return static_cast<T>(x);
}
template <class T>
double number_of(T x) {
    if constexpr (gradsync::is_low_precision(gradsync::dtype_of<T>)) return static_cast<double>(static_cast<float>(x));
    else return static_cast<double>(x);
}

inline Bytes bytes_of(gradsync::ConstBufferView view) {
    const auto* data = static_cast<const std::byte*>(view.data);
    return {data, data + view.bytes()};
}
inline void write(gradsync::BufferView view, const Bytes& bytes) {
    if (!bytes.empty()) std::memcpy(view.data, bytes.data(), bytes.size());
}
/// Does it begin where an element of its type may lie?
inline bool is_aligned(gradsync::ConstBufferView view) { return reinterpret_cast<std::uintptr_t>(view.data) % size_of(view.dtype) == 0; }
inline bool holds(gradsync::ConstBufferView view, const Bytes& bytes) {
    return view.bytes() == bytes.size() && (bytes.empty() || std::memcmp(view.data, bytes.data(), bytes.size()) == 0);
}

/// Every element the same.
Bytes constant_bytes(gradsync::DType dtype, std::size_t count, double x);

std::vector<double> numbers(gradsync::ConstBufferView view);

/// The gradient of parameter `i` that `rank` computes from micro-batch `batch`: of both signs, over several orders of
/// magnitude, so that the order of a sum shows in its bits.
Bytes random_gradient(gradsync::DType dtype, std::size_t count, int rank, int batch, std::size_t i);

inline Bytes random_gradient(const Tensor& t, int rank, int batch, std::size_t i) {
    return random_gradient(t.dtype, t.count(), rank, batch, i);
}

/// 0, 1, ..., n-1 shuffled; another order for every seed.
inline std::vector<std::size_t> shuffled(std::size_t n, std::uint32_t seed) {
    std::vector<std::size_t> order(n);
    std::iota(order.begin(), order.end(), std::size_t{0});
    Random random(seed);
    for (std::size_t k = n; k > 1; --k) std::swap(order[k - 1], order[random() % k]);
    return order;
}

}  // namespace gradsync_test

template <>
struct gradsync::parameter_traits<gradsync_test::Tensor> {
    using Tensor = gradsync_test::Tensor;
    static constexpr MemorySpace space = MemorySpace::host;
    static BufferView gradient(Tensor& t) { return t.gradient_view(); }
    static BufferView value(Tensor& t) { return t.value_view(); }
    static bool may_be_empty(const Tensor&) { return true; }
    static std::string name(Tensor& t) { return t.name; }
    static const std::vector<std::size_t>& shape(Tensor& t) { return t.shape; }
    static bool requires_grad(Tensor& t) { return t.requires_grad; }
    static std::uint32_t uses(Tensor& t) { return t.uses; }
};
