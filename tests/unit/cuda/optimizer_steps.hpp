// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cmath>
#include <cstddef>
#include <cstring>
#include <deque>
#include <vector>

#include <gradsync/cuda/optimizers.hpp>
#include <gradsync/kernel/elementwise.hpp>

#include "support/device_memory.hpp"

/// Tensors for a step of gs::cuda::AdamW or Sgd, and what the step makes of them by a loop on the host.

namespace gradsync_test {

/// Sizes around those of packs, blocks and chunks, empty tensors, and more tensors than a launch takes.
inline std::vector<std::size_t> tensor_sizes(std::size_t largest, std::size_t tensors) {
    const std::size_t sizes[] = {0, 1, 3, 4, 5, 255, 1024, 4095, 4096, 4097, largest};
    std::vector<std::size_t> result;
    for (std::size_t i = 0; i < tensors; ++i) result.push_back(sizes[i % std::size(sizes)]);
    return result;
}

template <class Optimizer>
class StepTest {
public:
    static constexpr std::size_t states = Optimizer::state_count();

    StepTest(const std::vector<std::size_t>& sizes, gradsync::DType gradient_type) {
        for (std::size_t i = 0; i < sizes.size(); ++i) {
            const std::size_t n = sizes[i], offset = i % 3;  // elements behind an aligned address
            Tensor& tensor = tensors_.emplace_back();
            const auto add = [&](gradsync::DType dtype, auto&& number) {
                tensor.host.emplace_back((n + offset) * size_of(dtype));
                std::vector<float> numbers(n + offset);
                for (std::size_t k = 0; k < numbers.size(); ++k) numbers[k] = number(k);
                gradsync::kernel::copy(gradsync::const_buffer(numbers), on_host(tensor.host.back().data(), numbers.size(), dtype));
                tensor.device.emplace_back(tensor.host.back());
                return gradsync::BufferView{tensor.device.back().data() + offset * size_of(dtype), n, dtype, gradsync::MemorySpace::device};
            };
            gradsync::DeviceSlice& slice = slices_.emplace_back();
            slice.parameter = i;
            slice.master = add(gradsync::DType::f32, [&](std::size_t k) { return static_cast<float>((k * 7 + i) % 23) * 0.1f - 1; });
            slice.gradient = add(gradient_type, [&](std::size_t k) { return static_cast<float>((k * 5 + i) % 17) * 0.25f - 2; });
            for (std::size_t s = 0; s < states; ++s)
                tensor.pointers.push_back(
                    add(gradsync::DType::f32, [&](std::size_t k) { return static_cast<float>((k + s) % 5) * 0.05f; }).data);
            slice.state = tensor.pointers;
            offsets_.push_back(offset);
        }
    }

    const std::vector<gradsync::DeviceSlice>& slices() const noexcept { return slices_; }

    /// The largest distance, relative to 1, of what is on the device from step(rule, gradient, master, state) for every element.
    template <class Step>
    double distance(const Optimizer& optimizer, double factor, Step&& step) {
        double largest = 0;
        for (std::size_t i = 0; i < slices_.size(); ++i) {
            Tensor& tensor = tensors_[i];
            const auto rule = optimizer.rule(i, 1);
            const std::size_t n = slices_[i].master.count;
            std::vector<float> gradient(n);
            gradsync::kernel::copy(
                on_host(tensor.host[1].data() + offsets_[i] * size_of(slices_[i].gradient.dtype), n, slices_[i].gradient.dtype),
                gradsync::buffer(gradient));
            std::vector<std::vector<std::byte>> there;
            for (const DeviceMemory& memory : tensor.device) there.push_back(memory.read());
            const auto number = [&](std::vector<std::byte>& bytes, std::size_t k) -> float& {
                return reinterpret_cast<float*>(bytes.data())[k];
            };
            for (std::size_t k = offsets_[i]; k < n + offsets_[i]; ++k)
                step(rule, gradient[k - offsets_[i]] * static_cast<float>(factor), number(tensor.host[0], k),
                     [&](std::size_t s) -> float& { return number(tensor.host[2 + s], k); });
            for (std::size_t array = 0; array < there.size(); ++array)
                for (std::size_t k = 0; k < n + offsets_[i] && array != 1; ++k) {  // what lies before a tensor, too
                    const double a = static_cast<double>(number(there[array], k)), b = static_cast<double>(number(tensor.host[array], k));
                    const double d = std::abs(a - b) / (1 + std::abs(b));
                    if (!(d <= largest)) largest = d;
                }
        }
        return largest;
    }

    static double adamw_distance(StepTest& test, const Optimizer& optimizer, double factor) {
        return test.distance(optimizer, factor, [](const auto& rule, float g, float& w, auto&& state) {
            float &m = state(0), &v = state(1);
            m = rule.beta1 * m + (1 - rule.beta1) * g;
            v = rule.beta2 * v + (1 - rule.beta2) * (g * g);
            w = rule.shrink * w - rule.step_size * m / (std::sqrt(v * rule.second_correction) + rule.epsilon);
        });
    }
    static double sgd_distance(StepTest& test, const Optimizer& optimizer, double factor) {
        return test.distance(optimizer, factor, [](const auto& rule, float g, float& w, auto&& state) {
            g += rule.decay * w;
            state(0) = rule.momentum * state(0) + g;
            w -= rule.rate * (rule.nesterov ? g + rule.momentum * state(0) : state(0));
        });
    }

private:
    static gradsync::BufferView on_host(void* data, std::size_t count, gradsync::DType dtype) {
        return {data, count, dtype, gradsync::MemorySpace::host};
    }

    struct Tensor {
        std::vector<std::vector<std::byte>> host;  ///< masters, gradients, states
        std::vector<DeviceMemory> device;
        std::vector<void*> pointers;
    };
    std::deque<Tensor> tensors_;
    std::vector<std::size_t> offsets_;
    std::vector<gradsync::DeviceSlice> slices_;
};

}  // namespace gradsync_test
