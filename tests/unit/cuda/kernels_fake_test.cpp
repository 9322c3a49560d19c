// SPDX-License-Identifier: BSL-1.0
// ctest: LIBRARIES gradsync_fake_nccl gradsync_fake_kernels COMPILE_OPTIONS -O2 -Wno-unknown-pragmas NOT_WITH address thread
// Kernels of 8-bit floats as g++ compiles them, with threads as fibers, and cuda_fp8.h's conversions, which have host versions, against
// the host's kernels. Without a device; passes_test.cpp does it on one.
#include <doctest/doctest.h>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <type_traits>
#include <vector>

#include <gradsync/cuda/passes.hpp>
#include <gradsync/kernel/convert.hpp>
#include <gradsync/kernel/elementwise.hpp>

#include "elements.hpp"
#include "optimizer_steps.hpp"
#include "support/fake/fake.hpp"
#include "support/fake/kernels.hpp"  // last but for the kernels: it has macros

#include <gradsync/cuda/kernels.cuh>

using gradsync::DType;
using gradsync::MemorySpace;
using gradsync_test::Bytes;
using gradsync_test::elements_of;
using gradsync_test::floating;
using gradsync_test::same;

namespace {

/// `elements` at a time by a thread, of which there are fewer than pieces.
template <class A, int elements>
void run(Bytes& to, DType to_type, const Bytes& from, DType from_type, bool adds) {
    namespace kernels = gradsync::cuda::kernels;
    const std::size_t pieces = from.size() / size_of(from_type) / elements;
    gradsync_fake::launch(nullptr, dim3(2), kernels::threads,
                          [&, pieces] { kernels::transform_any<A, elements>(to.data(), to_type, from.data(), from_type, pieces, adds); });
    cudaStreamSynchronize(nullptr);
}

}  // namespace

TEST_CASE("kernels of 8-bit floats convert and add one element at a time or several") {
    constexpr std::size_t count = 4096;
    for (const DType from_type : floating)
        for (const DType to_type : floating)
            for (const bool adds : {false, true}) {
                if (!is_float8(from_type) && !is_float8(to_type)) continue;
                if (from_type == to_type && !adds) continue;  // that is a copy, and no kernel
                CAPTURE(name_of(from_type));
                CAPTURE(name_of(to_type));
                CAPTURE(adds);
                const Bytes from = elements_of(from_type, count, 1), before = elements_of(to_type, count, 77);
                Bytes expected = before;
                const gradsync::ConstBufferView in{from.data(), count, from_type, MemorySpace::host};
                if (adds) gradsync::kernel::add({expected.data(), count, to_type, MemorySpace::host}, in);
                else gradsync::kernel::copy(in, {expected.data(), count, to_type, MemorySpace::host});
                Bytes one = before, several = before;
                if (from_type == DType::f64 || to_type == DType::f64) {
                    run<double, 1>(one, to_type, from, from_type, adds);
                    run<double, gradsync::cuda::kernels::any_pack>(several, to_type, from, from_type, adds);
                } else {
                    run<float, 1>(one, to_type, from, from_type, adds);
                    run<float, gradsync::cuda::kernels::any_pack>(several, to_type, from, from_type, adds);
                }
                CHECK(same(to_type, one, expected));
                CHECK(same(to_type, several, expected));
            }
}

TEST_CASE_TEMPLATE("8-bit floats: the library rounds as cuda_fp8.h does", F, gradsync::Float8E4M3, gradsync::Float8E5M2) {
    using Theirs = std::conditional_t<std::is_same_v<F, gradsync::Float8E4M3>, __nv_fp8_e4m3, __nv_fp8_e5m2>;
    std::size_t wrong = 0;
    for (std::uint64_t bits = 0; bits < std::uint64_t{1} << 32; bits += 1021) {  // 4 million of all floats
        const auto value = std::bit_cast<float>(static_cast<std::uint32_t>(bits));
        const std::uint8_t ours = F(value).bits(), theirs = Theirs(value).__x;
        wrong += ours != theirs && !(std::isnan(value) && std::isnan(static_cast<float>(F::from_bits(theirs))) &&
                                     std::isnan(static_cast<float>(F::from_bits(ours))));
    }
    CHECK(wrong == 0);
    for (unsigned code = 0; code < 256; ++code) {
        Theirs theirs;
        theirs.__x = static_cast<std::uint8_t>(code);
        const auto ours = static_cast<float>(F::from_bits(static_cast<std::uint8_t>(code))), other = static_cast<float>(theirs);
        CAPTURE(code);
        CHECK((ours == other || (std::isnan(ours) && std::isnan(other))));
    }
}

namespace {

/// One launch of the kernel, as passes.cu makes it.
template <class Kernel, class Optimizer>
void step_on_fibers(gradsync_test::StepTest<Optimizer>& test, const Optimizer& optimizer, const float* factor) {
    namespace kernels = gradsync::cuda::kernels;
    kernels::TensorSteps<Kernel> steps;
    REQUIRE(test.slices().size() <= static_cast<std::size_t>(steps.most));
    static_assert(sizeof steps <= 4096);
    steps.factor = factor;
    steps.first_blocks[0] = 0;
    int tensors = 0;
    for (const gradsync::DeviceSlice& slice : test.slices()) {
        auto& tensor = steps.tensors[tensors];
        tensor = {Kernel{optimizer.rule(slice.parameter, 1)},
                  slice.gradient.dtype,
                  static_cast<float*>(slice.master.data),
                  {},
                  slice.gradient.data,
                  slice.master.count};
        for (int s = 0; s < Kernel::states; ++s) tensor.states[s] = static_cast<float*>(slice.state[static_cast<std::size_t>(s)]);
        const std::size_t blocks = (slice.master.count + kernels::step_chunk - 1) / kernels::step_chunk;
        steps.first_blocks[tensors + 1] = steps.first_blocks[tensors] + static_cast<unsigned>(blocks);
        ++tensors;
    }
    gradsync_fake::launch(nullptr, dim3(steps.first_blocks[tensors]), kernels::threads, [&] { kernels::step_tensors(steps); });
    cudaStreamSynchronize(nullptr);
}

}  // namespace

TEST_CASE("kernels of optimizers step several tensors") {
    namespace kernels = gradsync::cuda::kernels;
    using namespace gradsync::cuda;
    const float one_half = 0.5f;
    for (const DType dtype : {DType::f32, DType::bf16, DType::f16, DType::f8e4m3})
        for (const float* factor : {static_cast<const float*>(nullptr), &one_half}) {
            CAPTURE(name_of(dtype));
            AdamW adamw({{.learning_rate = 0.01}, {.learning_rate = 0.02, .weight_decay = 0.1}}, {0, 1, 0, 1, 1});
            adamw.begin_step();
            gradsync_test::StepTest<AdamW> one(gradsync_test::tensor_sizes(9'000, 44), dtype);
            step_on_fibers<kernels::AdamW<AdamWRule>>(one, adamw, factor);
            CHECK(one.adamw_distance(one, adamw, factor == nullptr ? 1 : 0.5) < 1e-6);
            for (const bool nesterov : {false, true}) {
                Sgd sgd({.learning_rate = 0.1, .momentum = 0.5, .weight_decay = 0.01, .nesterov = nesterov});
                gradsync_test::StepTest<Sgd> other(gradsync_test::tensor_sizes(5'000, 22), dtype);
                step_on_fibers<kernels::Sgd<SgdRule>>(other, sgd, factor);
                CHECK(other.sgd_distance(other, sgd, factor == nullptr ? 1 : 0.5) < 1e-6);
            }
        }
}
