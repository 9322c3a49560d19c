// SPDX-License-Identifier: BSL-1.0
// The device passes, on fake streams: the host's kernels do the work.
#include <gradsync/cuda/passes.hpp>

#include <cmath>
#include <cstring>
#include <vector>

#include <gradsync/kernel/convert.hpp>
#include <gradsync/kernel/elementwise.hpp>

#include "fake.hpp"

namespace gradsync::inline v0_2::cuda {

namespace {

BufferView on_host(BufferView view) { return {view.data, view.count, view.dtype, MemorySpace::host}; }
ConstBufferView on_host(ConstBufferView view) { return {view.data, view.count, view.dtype, MemorySpace::host}; }
void expect_on_device(auto... views) { (gradsync_fake::expect_on_device(views.data, views.bytes(), "a pass"), ...); }

}  // namespace

void convert(ConstBufferView from, BufferView to, cudaStream_t stream) {
    expect_on_device(from, to);
    gradsync_fake::enqueue(stream, [=] { kernel::convert(from.data, from.dtype, to.data, to.dtype, to.count); });
}
void add(BufferView to, ConstBufferView from, cudaStream_t stream) {
    expect_on_device(from, to);
    gradsync_fake::enqueue(stream, [=] { kernel::add(on_host(to), on_host(from)); });
}
void scale(BufferView buffer, double factor, cudaStream_t stream) {
    expect_on_device(buffer);
    gradsync_fake::enqueue(stream, [=] { kernel::scale(on_host(buffer), factor); });
}
void scale_by(ConstBufferView from, BufferView to, const double* factor, cudaStream_t stream) {
    expect_on_device(from, to);
    gradsync_fake::expect_on_device(factor, sizeof *factor, "a pass");
    gradsync_fake::enqueue(stream, [=] {
        std::memmove(to.data, from.data, to.bytes());
        if (*factor == 0) std::memset(to.data, 0, to.bytes());
        else kernel::scale(on_host(to), *factor);
    });
}
void clamp(BufferView buffer, double limit, cudaStream_t stream) {
    expect_on_device(buffer);
    gradsync_fake::enqueue(stream, [=] { kernel::clamp(on_host(buffer), limit); });
}
void sums_of_squares(const ConstBufferView* blocks, std::size_t count, double* sums, cudaStream_t stream) {
    gradsync_fake::expect_on_device(blocks, count * sizeof *blocks, "a pass");
    gradsync_fake::expect_on_device(sums, count * sizeof *sums, "a pass");
    gradsync_fake::enqueue(stream, [=] {
        for (std::size_t i = 0; i < count; ++i)
            sums[i] = kernel::sum_of_squares({const_cast<void*>(blocks[i].data), blocks[i].count, blocks[i].dtype, MemorySpace::host});
    });
}
namespace {

/// What step(rule, gradient, master, state) makes of every element.
template <class Rule, class Step>
void step_slices(ListView<const DeviceSlice> slices, ListView<const Rule> rules, const float* factor, cudaStream_t stream, Step step) {
    for (std::size_t k = 0; k < slices.size(); ++k) {
        expect_on_device(slices[k].master, slices[k].gradient);
        for (void* const array : slices[k].state) gradsync_fake::expect_on_device(array, slices[k].master.bytes(), "a pass");
        gradsync_fake::enqueue(
            stream, [=, slice = slices[k], rule = rules[k], state = std::vector<void*>(slices[k].state.begin(), slices[k].state.end())] {
                std::vector<float> gradient(slice.master.count);
                kernel::convert(slice.gradient.data, slice.gradient.dtype, gradient.data(), DType::f32, gradient.size());
                const float scale = factor == nullptr ? rule.gradient_scale : rule.gradient_scale * *factor;
                for (std::size_t i = 0; i < gradient.size(); ++i)
                    step(rule, gradient[i] * scale, static_cast<float*>(slice.master.data)[i],
                         [&](std::size_t a) -> float& { return static_cast<float*>(state[a])[i]; });
            });
    }
}

}  // namespace

void adamw(ListView<const DeviceSlice> slices, ListView<const AdamWRule> rules, const float* factor, cudaStream_t stream) {
    step_slices(slices, rules, factor, stream, [](const AdamWRule& rule, float g, float& w, auto state) {
        float &m = state(0), &v = state(1);
        m = rule.beta1 * m + (1 - rule.beta1) * g;
        v = rule.beta2 * v + (1 - rule.beta2) * (g * g);
        w = rule.shrink * w - rule.step_size * m / (std::sqrt(v * rule.second_correction) + rule.epsilon);
    });
}
void sgd(ListView<const DeviceSlice> slices, ListView<const SgdRule> rules, const float* factor, cudaStream_t stream) {
    step_slices(slices, rules, factor, stream, [](const SgdRule& rule, float g, float& w, auto state) {
        float& m = state(0);
        g += rule.decay * w;
        m = rule.momentum * m + g;
        w -= rule.rate * (rule.nesterov ? g + rule.momentum * m : m);
    });
}
void mean_factor(MeanFactor* cell, double scale, cudaStream_t stream) {
    gradsync_fake::enqueue(stream, [=] {
        cell->factor = cell->weight == 0 ? 0 : scale / cell->weight;
        cell->factor32 = static_cast<float>(cell->factor);
    });
}

}  // namespace gradsync::inline v0_2::cuda
