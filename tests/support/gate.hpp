// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <chrono>
#include <thread>

#include <gradsync/cuda/runtime.hpp>

namespace gradsync_test {

/// Nothing that is put on the stream afterwards starts before the gate is opened, or has been shut for ten seconds.
class Gate {
public:
    explicit Gate(cudaStream_t stream) : stream_(stream) {
        const auto wait = [](void* self) {
            auto& gate = *static_cast<Gate*>(self);
            for (int i = 0; i < 10'000 && !gate.open_; ++i) std::this_thread::sleep_for(std::chrono::milliseconds(1));
            gate.passed_ = true;
        };
        gradsync::cuda::check(cudaLaunchHostFunc(stream, wait, this), "cudaLaunchHostFunc");
    }
    Gate(const Gate&) = delete;
    Gate& operator=(const Gate&) = delete;
    ~Gate() {
        open_ = true;
        cudaStreamSynchronize(stream_);  // nobody looks at it any more, even if the device has failed
    }
    /// False: somebody waited for what is behind it.
    bool open() {
        const bool shut = !passed_;
        open_ = true;
        return shut;
    }

private:
    cudaStream_t stream_;
    std::atomic<bool> open_{false}, passed_{false};
};

}  // namespace gradsync_test
