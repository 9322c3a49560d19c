// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstring>
#include <string>
#include <type_traits>

#include "../core/error.hpp"
#include "../core/unique_handle.hpp"

/// What the library needs of the CUDA runtime: owners of its handles, and its errors as ours. Host code: no nvcc is needed.

namespace gradsync::inline v0_2::cuda {

/// Throws Error(device_failed) where a call of the runtime has failed.
inline void check(cudaError_t code, const char* call) {
    if (code == cudaSuccess) return;
    throw Error(Errc::device_failed, std::string(call) + ": " + cudaGetErrorString(code), {.operation = call});
}

struct StreamTraits {
    using Handle = cudaStream_t;
    static constexpr Handle none = nullptr;
    static void close(Handle stream) noexcept { cudaStreamDestroy(stream); }
};
using Stream = UniqueHandle<StreamTraits>;

/// A stream that waits for no other but where it is told to; `urgent`: its kernels go before those of other streams.
inline Stream make_stream(bool urgent = false) {
    int least = 0, greatest = 0;
    check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, urgent ? greatest : least), "cudaStreamCreateWithPriority");
    return Stream(stream);
}

struct EventTraits {
    using Handle = cudaEvent_t;
    static constexpr Handle none = nullptr;
    static void close(Handle event) noexcept { cudaEventDestroy(event); }
};
using Event = UniqueHandle<EventTraits>;

/// An event that keeps no time, which makes it cheap.
inline Event make_event() {
    cudaEvent_t event = nullptr;
    check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreateWithFlags");
    return Event(event);
}

/// What a query says. That something is not over yet is no error: nobody is to find it as the runtime's last one.
inline cudaError_t answer(cudaError_t code) noexcept {
    if (code == cudaErrorNotReady) (void)cudaGetLastError();
    return code;
}

/// Has all that the event stands for been done?
inline bool is_over(const Event& event) {
    const cudaError_t code = answer(cudaEventQuery(event.get()));
    if (code != cudaErrorNotReady) check(code, "cudaEventQuery");
    return code == cudaSuccess;
}

/// What comes on `later` from here on waits for what is on `earlier` up to here. `event`: scratch.
inline void order(cudaStream_t earlier, cudaStream_t later, const Event& event) {
    check(cudaEventRecord(event.get(), earlier), "cudaEventRecord");
    check(cudaStreamWaitEvent(later, event.get(), 0), "cudaStreamWaitEvent");
}

struct DeviceMemoryTraits {
    using Handle = void*;
    static constexpr Handle none = nullptr;
    static void close(Handle memory) noexcept { cudaFree(memory); }
};
struct PinnedMemoryTraits {
    using Handle = void*;
    static constexpr Handle none = nullptr;
    static void close(Handle memory) noexcept { cudaFreeHost(memory); }
};

/// Memory of `bytes` bytes, zeroed if not told otherwise (which waits for the default stream). Freeing waits for the device.
template <class Traits>
class Memory {
public:
    Memory() = default;
    explicit Memory(std::size_t bytes, bool zeroed = true) : bytes_(bytes) {
        if (bytes == 0) return;
        void* data = nullptr;
        if constexpr (is_device) check(cudaMalloc(&data, bytes), "cudaMalloc");
        else check(cudaMallocHost(&data, bytes), "cudaMallocHost");
        data_ = UniqueHandle<Traits>(data);
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
    static constexpr bool is_device = std::is_same_v<Traits, DeviceMemoryTraits>;
    UniqueHandle<Traits> data_;
    std::size_t bytes_ = 0;
};
using DeviceMemory = Memory<DeviceMemoryTraits>;
using PinnedMemory = Memory<PinnedMemoryTraits>;  ///< of the host, for copies that run beside everything else

/// Of the calling thread's device: 90 for 9.0.
inline int compute_capability() {
    int device = 0, major = 0, minor = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device), "cudaDeviceGetAttribute");
    return 10 * major + minor;
}

/// Makes a device the calling thread's, until it goes.
class CurrentDevice {
public:
    explicit CurrentDevice(int device) {
        check(cudaGetDevice(&before_), "cudaGetDevice");
        if (device != before_) check(cudaSetDevice(device), "cudaSetDevice");
    }
    CurrentDevice(const CurrentDevice&) = delete;
    CurrentDevice& operator=(const CurrentDevice&) = delete;
    ~CurrentDevice() { cudaSetDevice(before_); }

private:
    int before_ = 0;
};

}  // namespace gradsync::inline v0_2::cuda
