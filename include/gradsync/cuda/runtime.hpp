// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstring>

#include "../core/error.hpp"
#include "../core/unique_handle.hpp"

/// Wrappers of the CUDA runtime: owners of its handles, and its errors as Error. Host code; does not need nvcc.

namespace gradsync::inline v0_2::cuda {

/// Throws Error(device_failed) if a runtime call has failed.
inline void check(cudaError_t code, const char* call) {
    if (code == cudaSuccess) return;
    detail::raise(Errc::device_failed, {.operation = call}, call, ": ", cudaGetErrorString(code));
}

inline int current_device() {
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    return device;
}

/// Starts a copy on `stream`.
inline void copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind direction, cudaStream_t stream) {
    check(cudaMemcpyAsync(to, from, bytes, direction, stream), "cudaMemcpyAsync");
}

using Stream = UniqueHandle<cudaStream_t, cudaStreamDestroy>;
using Event = UniqueHandle<cudaEvent_t, cudaEventDestroy>;

/// A stream that waits for other streams only if told to. If `urgent`, its kernels run before those of other streams.
inline Stream make_stream(bool urgent = false) {
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, urgent ? greatest : least),
          "cudaStreamCreateWithPriority");
    return Stream(stream);
}

/// An event. Only a `timed` one records its time; the others are cheaper.
inline Event make_event(bool timed = false) {
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, timed ? cudaEventDefault : cudaEventDisableTiming),
          "cudaEventCreateWithFlags");
    return Event(event);
}

/// The answer of a query. "Not ready" is no error, so it is cleared as the runtime's last error.
inline cudaError_t answer(cudaError_t code) noexcept {
    if (code == cudaErrorNotReady) (void)cudaGetLastError();
    return code;
}

/// Is all work before the event complete?
inline bool is_over(const Event& event) {
    const cudaError_t code = answer(cudaEventQuery(event.get()));
    if (code != cudaErrorNotReady) check(code, "cudaEventQuery");
    return code == cudaSuccess;
}

/// Orders future work on `later` after the work already on `earlier`. `event`: scratch.
inline void order(cudaStream_t earlier, cudaStream_t later, const Event& event) {
    check(cudaEventRecord(event.get(), earlier), "cudaEventRecord");
    check(cudaStreamWaitEvent(later, event.get(), 0), "cudaStreamWaitEvent");
}

/// Memory of `bytes` bytes, zeroed by default (on the device this waits for the default stream).
/// Freeing waits for the device.
template <bool is_device>
class Memory {
public:
    Memory() = default;
    explicit Memory(std::size_t bytes, bool zeroed = true) : bytes_(bytes) {
        if (bytes == 0) return;
        void* data = nullptr;
        if constexpr (is_device) check(cudaMalloc(&data, bytes), "cudaMalloc");
        else check(cudaMallocHost(&data, bytes), "cudaMallocHost");
        data_ = Owner(data);
        if (!zeroed) return;
        if constexpr (is_device) {
            check(cudaMemset(data, 0, bytes), "cudaMemset");
            check(cudaStreamSynchronize(nullptr), "cudaStreamSynchronize");
        } else {
            std::memset(data, 0, bytes);
        }
    }
    void* data() const noexcept { return data_.get(); }
    std::size_t bytes() const noexcept { return bytes_; }

private:
    using Owner = UniqueHandle<void*, is_device ? &cudaFree : &cudaFreeHost>;
    Owner data_;
    std::size_t bytes_ = 0;
};
using DeviceMemory = Memory<true>;
using PinnedMemory = Memory<false>;  ///< page-locked host memory, for asynchronous copies

/// The compute capability of the calling thread's device: 90 for 9.0.
inline int compute_capability() {
    int major = 0, minor = 0;
    const int device = current_device();
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
    return 10 * major + minor;
}

/// Makes `device` the calling thread's current device, until the end of this object.
class CurrentDevice {
public:
    explicit CurrentDevice(int device) {
        if (device != before_) check(cudaSetDevice(device), "cudaSetDevice");
    }
    CurrentDevice& operator=(CurrentDevice&&) = delete;
    ~CurrentDevice() { cudaSetDevice(before_); }

private:
    const int before_ = current_device();
};

}  // namespace gradsync::inline v0_2::cuda
