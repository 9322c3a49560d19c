// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <gradsync/cuda/passes.hpp>

#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <gradsync/kernel/convert.hpp>
#include <gradsync/kernel/elementwise.hpp>

#include "elements.hpp"
#include "optimizer_steps.hpp"
#include "support/device_memory.hpp"

/// The passes against the host's kernels, which have tests of their own. A file that includes this says before how many elements they
/// take: `counts`, and `largest_tensor` of an optimizer's step.

using gradsync::DType;
using gradsync::MemorySpace;
using gradsync_test::Bytes;
using gradsync_test::DeviceMemory;
using gradsync_test::elements_of;
using gradsync_test::floating;
using gradsync_test::same;

namespace {

/// A buffer whose elements begin `offset` elements behind an aligned address.
struct Buffer {
    DType dtype;
    std::size_t count, offset;
    DeviceMemory memory;
    Buffer(DType dtype_, std::size_t count_, std::size_t offset_, std::uint64_t seed)
        : dtype(dtype_), count(count_), offset(offset_), memory(elements_of(dtype_, count_ + offset_ + 1, seed)) {}
    gradsync::BufferView view() { return {memory.data() + offset * size_of(dtype), count, dtype, MemorySpace::device}; }
    /// Returns the bytes of the memory after the same pass on the host.
    template <class Pass>
    Bytes expected(Pass&& pass) {
        Bytes bytes = memory.read();
        pass(gradsync::BufferView{bytes.data() + offset * size_of(dtype), count, dtype, MemorySpace::host});
        return bytes;
    }
    Bytes now() {
        gradsync::cuda::check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
        return memory.read();
    }
};

/// `use(buffer)` for every floating type, count and misalignment.
template <class Use>
void each_buffer(Use&& use) {
    for (const DType dtype : floating)
        for (const std::size_t count : gradsync_test::counts)
            for (const std::size_t offset : {0u, 1u, 8u}) {
                CAPTURE(name_of(dtype));
                CAPTURE(count);
                CAPTURE(offset);
                use(Buffer(dtype, count, offset, count * 8 + offset));
            }
}

}  // namespace

TEST_CASE("device passes scale and clamp as the host does") {
    each_buffer([](Buffer buffer) {
        const Bytes scaled = buffer.expected([](gradsync::BufferView view) { gradsync::kernel::scale(view, 0.3); });
        gradsync::cuda::scale(buffer.view(), 0.3, nullptr);
        CHECK(same(buffer.dtype, buffer.now(), scaled));
        const Bytes clamped = buffer.expected([](gradsync::BufferView view) { gradsync::kernel::clamp(view, 0.7); });
        gradsync::cuda::clamp(buffer.view(), 0.7, nullptr);
        CHECK(same(buffer.dtype, buffer.now(), clamped));
    });
}

TEST_CASE("device passes: scale_by, in place and not; a factor of 0 reads nothing") {
    each_buffer([](Buffer buffer) {
        for (const double factor : {1.0, 1 / 3.0, 0.0}) {
            Buffer to(buffer.dtype, buffer.count, buffer.offset, 99);
            DeviceMemory cell(Bytes(reinterpret_cast<const std::byte*>(&factor), reinterpret_cast<const std::byte*>(&factor + 1)));
            const Bytes source = buffer.memory.read();
            const Bytes expected = to.expected([&](gradsync::BufferView view) {
                if (view.bytes() == 0) return;
                std::memcpy(view.data, source.data() + buffer.offset * size_of(buffer.dtype), view.bytes());
                if (factor == 0) std::memset(view.data, 0, view.bytes());
                else gradsync::kernel::scale(view, factor);
            });
            gradsync::cuda::scale_by(buffer.view(), to.view(), reinterpret_cast<const double*>(cell.data()), nullptr);
            CHECK(same(buffer.dtype, to.now(), expected));
        }
    });
}

TEST_CASE("device passes convert and add between all floating types") {
    each_buffer([](Buffer from) {
        for (const DType dtype : floating) {
            CAPTURE(name_of(dtype));
            const Bytes source = from.memory.read();
            const void* const elements = source.data() + from.offset * size_of(from.dtype);
            Buffer to(dtype, from.count, from.offset, 5);
            const Bytes sum = to.expected([&](gradsync::BufferView view) {
                gradsync::kernel::add(view, {elements, from.count, from.dtype, MemorySpace::host});
            });
            gradsync::cuda::add(to.view(), from.view(), nullptr);
            CHECK(same(dtype, to.now(), sum));
            const Bytes converted = to.expected([&](gradsync::BufferView view) {
                if (dtype != from.dtype) gradsync::kernel::convert(elements, from.dtype, view.data, dtype, view.count);
                else if (view.bytes() != 0) std::memcpy(view.data, elements, view.bytes());
            });
            gradsync::cuda::convert(from.view(), to.view(), nullptr);
            CHECK(same(dtype, to.now(), converted));
        }
    });
}

TEST_CASE("device passes give sums of squares with the same bits each time") {
    std::vector<Bytes> contents;
    std::vector<DeviceMemory> memories;
    std::vector<gradsync::ConstBufferView> blocks;
    std::vector<double> expected;
    for (const DType dtype : floating)
        for (const std::size_t count : {0u, 1u, 5u, 1000u, 16384u})
            for (const std::size_t offset : {0u, 1u, 3u}) {
                contents.push_back(gradsync_test::random_elements(dtype, count + offset, count));
                memories.emplace_back(contents.back());
                blocks.push_back({memories.back().data() + offset * size_of(dtype), count, dtype});
                expected.push_back(
                    gradsync::kernel::sum_of_squares({contents.back().data() + offset * size_of(dtype), count, dtype, MemorySpace::host}));
            }
    const auto bytes = std::as_bytes(std::span(blocks));
    DeviceMemory table({bytes.begin(), bytes.end()}), sums(Bytes(blocks.size() * sizeof(double)));
    Bytes first;
    for (int repeat = 0; repeat < 3; ++repeat) {
        gradsync::cuda::sums_of_squares(reinterpret_cast<const gradsync::ConstBufferView*>(table.data()), blocks.size(),
                                        reinterpret_cast<double*>(sums.data()), nullptr);
        gradsync::cuda::check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
        const Bytes now = sums.read();
        if (repeat == 0) first = now;
        CHECK(now == first);
    }
    for (std::size_t i = 0; i < blocks.size(); ++i) {
        CAPTURE(i);
        double sum;
        std::memcpy(&sum, first.data() + i * sizeof sum, sizeof sum);
        CHECK(sum == doctest::Approx(expected[i]).epsilon(1e-12));
    }
}

TEST_CASE("device passes compute the factor of a mean") {
    for (const double weight : {0.0, 3.0, 1e300}) {
        gradsync::cuda::MeanFactor cell{weight, -1, -1};
        DeviceMemory memory(Bytes(reinterpret_cast<const std::byte*>(&cell), reinterpret_cast<const std::byte*>(&cell + 1)));
        gradsync::cuda::mean_factor(reinterpret_cast<gradsync::cuda::MeanFactor*>(memory.data()), 2.0, nullptr);
        gradsync::cuda::check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
        std::memcpy(&cell, memory.read().data(), sizeof cell);
        CHECK(cell.factor == (weight == 0 ? 0 : 2 / weight));
        CHECK(cell.factor32 == static_cast<float>(cell.factor));
    }
}

TEST_CASE("device passes refuse integers") {
    DeviceMemory memory(Bytes(64));
    const gradsync::BufferView integers{memory.data(), 4, DType::i32, MemorySpace::device};
    const gradsync::BufferView floats{memory.data() + 32, 4, DType::f8e4m3, MemorySpace::device};
    CHECK_THROWS_AS(gradsync::cuda::scale(integers, 2, nullptr), gradsync::Error);
    for (const auto& [from, to] : {std::pair(integers, floats), std::pair(floats, integers)}) {
        std::string text;
        try {
            gradsync::cuda::convert(from, to, nullptr);
        } catch (const gradsync::Error& error) {
            text = error.what();
        }
        CHECK(text.find("not for i32") != std::string::npos);
    }
}

TEST_CASE("optimizers step many tensors in one call, for gradients of every type but f64") {
    using namespace gradsync::cuda;
    const float one_half = 0.5f;
    const gradsync::cuda::DeviceMemory factor(sizeof one_half);
    gradsync::cuda::check(cudaMemcpy(factor.data(), &one_half, sizeof one_half, cudaMemcpyHostToDevice), "cudaMemcpy");
    for (const DType dtype : floating) {
        if (dtype == DType::f64) continue;
        CAPTURE(name_of(dtype));
        for (const bool scaled : {false, true}) {
            const auto prepare = [&](auto& optimizer) {
                optimizer.begin_step();
                optimizer.begin_step();
                if (scaled) optimizer.scale_gradients_by(static_cast<const float*>(factor.data()));
            };
            AdamW adamw({{.learning_rate = 0.01}, {.learning_rate = 0.02, .beta1 = 0.8, .weight_decay = 0.1}}, {0, 1, 0, 1, 1});
            prepare(adamw);
            gradsync_test::StepTest<AdamW> one(gradsync_test::tensor_sizes(gradsync_test::largest_tensor, 100), dtype);
            adamw.step(one.slices(), 1, nullptr);
            CHECK(one.adamw_distance(one, adamw, scaled ? 0.5 : 1) < 1e-5);
            for (const bool nesterov : {false, true}) {
                Sgd sgd({.learning_rate = 0.1, .momentum = 0.5, .weight_decay = 0.01, .nesterov = nesterov});
                prepare(sgd);
                gradsync_test::StepTest<Sgd> other(gradsync_test::tensor_sizes(70'001, 50), dtype);
                sgd.step(other.slices(), 1, nullptr);
                CHECK(other.sgd_distance(other, sgd, scaled ? 0.5 : 1) < 1e-5);
            }
        }
    }
    gradsync_test::StepTest<Sgd> doubles({10}, DType::f64);
    CHECK_THROWS_WITH_AS(
        Sgd().step(doubles.slices(), 1, nullptr),
        doctest::Contains("the device pass sgd takes masters in f32, and gradients of floating types but f64, not f32 and f64"),
        gradsync::Error);
}
