// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <vector>

#include "../core/shared.hpp"
#include "passes.hpp"
#include "runtime.hpp"

namespace gradsync::inline v0_2::detail {

/// The passes of a Reducer over device memory (see kernel/passes.hpp), on an engine's compute stream. The constructor
/// throws Error(invalid_argument) if the program has no kernels.
template <class Engine>
class DevicePasses {
public:
    explicit DevicePasses(Shared<const Engine> engine) : engine_(std::move(engine)) {
        if (!cuda::linked())
            raise(Errc::invalid_argument, {.operation = "Reducer"}, "gradients in device memory need the library's ",
                  "kernels; link gradsync::cuda, or compile gradsync/cuda/passes.cu with nvcc into the program");
    }

    void copy(ConstBufferView from, BufferView to) const {
        if (from.data != to.data && to.count != 0) cuda::convert(from, to, stream());
    }
    void add(BufferView to, ConstBufferView from) const { cuda::add(to, from, stream()); }
    void scale(BufferView buffer, double factor) const { cuda::scale(buffer, factor, stream()); }
    void clamp(BufferView buffer, double limit) const { cuda::clamp(buffer, limit, stream()); }
    void clear(BufferView buffer) const {
        if (buffer.bytes() != 0)
            cuda::check(cudaMemsetAsync(buffer.data, 0, buffer.bytes(), stream()), "cudaMemsetAsync");
    }
    void read(ConstBufferView from, void* to) const {
        transfer(to, from.data, from.bytes(), cudaMemcpyDeviceToHost, stream());
    }
    void write(const void* from, BufferView to) const {
        transfer(to.data, from, to.bytes(), cudaMemcpyHostToDevice, stream());
    }

    static cuda::DeviceMemory allocate(std::size_t bytes) { return cuda::DeviceMemory(bytes); }

    /// Sums all blocks in one kernel; `finish()` waits for it on the host.
    class SquareSums {
    public:
        explicit SquareSums(cudaStream_t stream) noexcept : stream_(stream) {}

        void add(ConstBufferView elements, double& sum) {
            blocks_.push_back(elements);
            results_.push_back(&sum);
        }
        void finish() {
            if (blocks_.empty()) return;
            const cuda::DeviceMemory memory(blocks_.size() * (sizeof(ConstBufferView) + sizeof(double)), false);
            auto* const sums = static_cast<double*>(memory.data());
            auto* const blocks = reinterpret_cast<ConstBufferView*>(sums + blocks_.size());
            std::vector<double> values(blocks_.size());
            cuda::copy(blocks, blocks_.data(), blocks_.size() * sizeof(ConstBufferView), cudaMemcpyHostToDevice,
                       stream_);
            cuda::sums_of_squares(blocks, blocks_.size(), sums, stream_);
            transfer(values.data(), sums, values.size() * sizeof(double), cudaMemcpyDeviceToHost, stream_);
            for (std::size_t i = 0; i < values.size(); ++i) *results_[i] = values[i];
        }

    private:
        cudaStream_t stream_;
        std::vector<ConstBufferView> blocks_;
        std::vector<double*> results_;
    };
    /// Time stamps on the compute stream. `set(i)` is thread-safe for different i.
    class Stamps {
    public:
        explicit Stamps(Shared<const Engine> engine) noexcept : engine_(std::move(engine)) {}

        void resize(std::size_t count) { events_ = List<cuda::Event>(count); }
        void set(std::size_t i) {
            if (events_[i].get() == nullptr) events_[i] = cuda::make_event(true);
            cuda::check(cudaEventRecord(events_[i].get(), engine_->compute_stream()), "cudaEventRecord");
        }
        /// Waits for the device.
        double seconds_between(std::size_t first, std::size_t i) {
            float milliseconds = 0;
            cuda::check(cudaEventSynchronize(events_[first].get()), "cudaEventSynchronize");
            cuda::check(cudaEventSynchronize(events_[i].get()), "cudaEventSynchronize");
            cuda::check(cudaEventElapsedTime(&milliseconds, events_[first].get(), events_[i].get()),
                        "cudaEventElapsedTime");
            return static_cast<double>(milliseconds) * 1e-3;
        }

    private:
        Shared<const Engine> engine_;
        List<cuda::Event> events_;
    };
    Stamps stamps() const { return Stamps(engine_); }
    SquareSums square_sums() const noexcept { return SquareSums(stream()); }

private:
    cudaStream_t stream() const noexcept { return engine_->compute_stream(); }
    static void transfer(void* to, const void* from, std::size_t bytes, cudaMemcpyKind direction, cudaStream_t stream) {
        if (bytes == 0) return;
        cuda::copy(to, from, bytes, direction, stream);
        cuda::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    }

    Shared<const Engine> engine_;
};

}  // namespace gradsync::inline v0_2::detail
