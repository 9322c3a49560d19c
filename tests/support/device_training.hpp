// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <gradsync/bucket/any_buckets.hpp>
#include <gradsync/overlap/any_overlap.hpp>
#include <gradsync/overlap/overlap_backward.hpp>
#include <gradsync/overlap/overlap_forward.hpp>
#include <gradsync/reducer.hpp>

#include "support/device_engines.hpp"
#include "support/device_memory.hpp"

/// Some steps of a made-up training, on a backend of host or of device memory, that go through all that a Reducer does to memory.

namespace gradsync_test {

/// Numbers of a parameter, where the backend has its memory.
template <gradsync::Backend B>
class Numbers {
public:
    Numbers(std::size_t count, float value, gradsync::DType dtype = gradsync::DType::f32)
        : count_(count), dtype_(dtype), host_(bytes_of(std::vector<float>(count, value), dtype)), device_(on_device ? host_ : Bytes()) {}

    gradsync::BufferView view() {
        if constexpr (on_device) return {device_.data(), count_, dtype_, gradsync::MemorySpace::device};
        else return {host_.data(), count_, dtype_, gradsync::MemorySpace::host};
    }
    std::size_t size() const noexcept { return count_; }

    using Bytes = std::vector<std::byte>;
    static Bytes bytes_of(const std::vector<float>& values, gradsync::DType dtype) {
        Bytes bytes(values.size() * size_of(dtype));
        gradsync::kernel::copy(gradsync::const_buffer(values), {bytes.data(), values.size(), dtype, gradsync::MemorySpace::host});
        return bytes;
    }

private:
    static constexpr bool on_device = B::memory_space == gradsync::MemorySpace::device;
    std::size_t count_;
    gradsync::DType dtype_;
    Bytes host_;
    DeviceMemory device_;
};

/// Writes and reads what a view shows, in order on the backend's stream.
template <gradsync::Backend B>
void write(B& comm, gradsync::BufferView to, const std::vector<float>& values) {
    gradsync::detail::passes_of(comm).write(Numbers<B>::bytes_of(values, to.dtype).data(), to);
}
template <gradsync::Backend B>
std::vector<float> read(B& comm, gradsync::ConstBufferView from) {
    std::vector<float> values(from.count);
    gradsync::detail::read_as(comm, from, gradsync::buffer(values));
    return values;
}

struct TrainingOptions {
    gradsync::ReducerOptions reducer = {};
    bool clips = false;        ///< by norm, then by value
    bool accumulates = false;  ///< two micro-batches a step
    bool skips = false;        ///< some parameters are unused, on some ranks
    bool is_uneven = false;    ///< the last rank runs out of batches
    bool rebuilds = false;
};

/// All weights afterwards, and the norms.
template <class Overlap = gradsync::AnyOverlap, gradsync::Backend B>
std::vector<float> train(B comm, TrainingOptions options, const gradsync::AnyBuckets& buckets,
                         const Overlap& overlap = gradsync::OverlapBackward{}) {
    constexpr std::size_t parameters = 9;
    std::vector<std::unique_ptr<Numbers<B>>> weights, gradients;
    std::vector<gradsync::ParameterView> views;
    for (std::size_t i = 0; i < parameters; ++i) {
        weights.push_back(std::make_unique<Numbers<B>>(i * i * 400 + 7, comm.rank() == 0 ? 0.5f : 77.0f));
        gradients.push_back(std::make_unique<Numbers<B>>(weights.back()->size(), 0.0f));
        gradsync::BufferView gradient = gradients.back()->view();
        if (options.reducer.gradients == gradsync::GradientStorage::in_buckets) gradient.data = nullptr;
        views.push_back({.name = "p" + std::to_string(i), .value = weights.back()->view(), .gradient = gradient});
    }
    gradsync::Reducer sync(comm, views, options.reducer, buckets, overlap);
    sync.broadcast_parameters();
    std::vector<std::vector<float>> values;
    for (auto& w : weights) values.push_back(read(comm, w->view()));
    std::vector<float> norms;

    for (std::size_t step = 0; step < 4; ++step) {
        const bool has_batch = !options.is_uneven || comm.rank() + 1 < comm.size() || step < 2 || comm.size() == 1;
        if (options.is_uneven && !sync.begin_step(has_batch)) break;
        const auto backward = [&](std::size_t batch) {
            for (std::size_t i = parameters; i-- > 0;) {
                if (options.skips && (i + step + static_cast<std::size_t>(comm.rank() % 2)) % 3 == 0) continue;
                std::vector<float> gradient(values[i].size());
                const std::size_t seed = step * 7 + static_cast<std::size_t>(comm.rank()) * 101 + i + batch * 31;
                for (std::size_t k = 0; k < gradient.size(); ++k)
                    gradient[k] = (static_cast<float>((k * 13 + seed) % 997) * 0.01f - 4) * values[i][k];
                write(comm, sync.gradient_view(i), gradient);
                sync.mark_ready(i);
            }
        };
        if (has_batch) {
            if (options.accumulates) {
                const auto guard = sync.no_sync();
                backward(1);
            }
            backward(0);
        }
        (void)sync.finish();  // waits for averages that arrive later, too
        if (options.clips) {
            norms.push_back(static_cast<float>(sync.clip_gradients_by_norm(50)));
            sync.clip_gradients_by_value(0.3);
        }
        for (std::size_t i = 0; i < parameters; ++i) {
            const std::vector<float> gradient = read(comm, sync.gradient_view(i));
            for (std::size_t k = 0; k < gradient.size(); ++k) values[i][k] -= 0.01f * gradient[k];
        }
        if (options.rebuilds && step == 1) (void)sync.rebuild_buckets();
    }
    std::vector<float> all = norms;
    for (const auto& v : values) all.insert(all.end(), v.begin(), v.end());
    return all;
}

/// What is tried; each with a name.
inline std::vector<std::pair<const char*, TrainingOptions>> trainings() {
    using namespace gradsync;
    return {
        {"borrowed", {}},
        {"in buckets", {.reducer = {.gradients = GradientStorage::in_buckets}}},
        {"clipped", {.clips = true}},
        {"clipped, in buckets", {.reducer = {.gradients = GradientStorage::in_buckets}, .clips = true}},
        {"16 bits on the way", {.reducer = {.reduce_dtype = DType::bf16}}},
        {"micro-batches", {.reducer = {.accumulation = Accumulation::in_buckets}, .accumulates = true}},
        {"unused parameters", {.reducer = {.unused = UnusedParameters::find_unused}, .skips = true}},
        {"unused parameters, in buckets",
         {.reducer = {.gradients = GradientStorage::in_buckets, .unused = UnusedParameters::find_unused}, .skips = true}},
        {"uneven inputs", {.is_uneven = true}},
        {"rebuilt buckets", {.rebuilds = true}},
        {"rebuilt buckets, in buckets", {.reducer = {.gradients = GradientStorage::in_buckets}, .rebuilds = true}},
        {"plain sums", {.reducer = {.averaging = Averaging::sum}, .clips = true}},
    };
}

/// The largest distance of two trainings' results, relative to 1.
inline float distance(const std::vector<float>& a, const std::vector<float>& b) {
    if (a.size() != b.size()) return 1e30f;
    float largest = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        const float d = a[i] < b[i] ? b[i] - a[i] : a[i] - b[i], scale = 1 + (b[i] < 0 ? -b[i] : b[i]);
        if (!(d / scale <= largest)) largest = d / scale;
    }
    return largest;
}

}  // namespace gradsync_test
