// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "../cuda/runtime.hpp"
#include "communicator.hpp"

namespace gradsync::inline v0_2 {

/// The kind of memory that `NcclBackend::allocate` returns, and that a Reducer's buckets have.
enum class NcclMemory : std::uint8_t {
    plain,       ///< from the CUDA runtime
    registered,  ///< from NCCL, registered with the communicator (NCCL 2.19): NCCL may work in it without copies of its own
    windows,     ///< from NCCL, mapped by all ranks as symmetric windows (NCCL 2.27.3): for its fastest kernels within a node
};

constexpr std::string_view name_of(NcclMemory memory) noexcept {
    constexpr std::string_view names[] = {"plain memory", "registered memory", "symmetric windows"};
    return names[static_cast<std::size_t>(memory)];
}

namespace detail {

/// The NCCL version that this program runs with.
inline int nccl_version() noexcept {
    int version = 0;
    ncclGetVersion(&version);
    return version;
}
/// The version as text, such as "2.28.9".
inline std::string nccl_version_text(int version) {
    return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." + std::to_string(version % 100);
}

constexpr NcclMemory best_nccl_memory(int version) noexcept {
    if (version >= NCCL_VERSION(2, 27, 3)) return NcclMemory::windows;
    return version >= NCCL_VERSION(2, 19, 0) ? NcclMemory::registered : NcclMemory::plain;
}

/// The kind of memory that the ranks of a communicator agreed on.
struct NcclMemoryChoice {
    NcclMemory kind = NcclMemory::plain;
    std::string why = {};  ///< why it is a lesser kind than requested; "" if it is not
};

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 19, 0)

/// Zeroed memory from NCCL and its registration, which ends with the communicator at the latest. For one thread at a time.
class RegisteredMemory {
public:
    explicit RegisteredMemory(std::size_t bytes) : bytes_(bytes) {
        if (const ncclResult_t code = ncclMemAlloc(&data_, bytes); code != ncclSuccess) throw_nccl_error(code, "ncclMemAlloc", nullptr);
        const cudaError_t set = cudaMemset(data_, 0, bytes);
        const cudaError_t done = set == cudaSuccess ? cudaStreamSynchronize(nullptr) : set;
        if (done == cudaSuccess) return;
        ncclMemFree(data_);
        cuda::check(done, "cudaMemset");
    }
    RegisteredMemory(const RegisteredMemory&) = delete;
    RegisteredMemory& operator=(const RegisteredMemory&) = delete;
    ~RegisteredMemory() { ncclMemFree(data_); }

    void* data() const noexcept { return data_; }

    /// Registers the memory. `wanted()` returns false to give up. Throws Error(device_failed).
    template <class Wanted>
    void enlist(NcclCommunicator& comm, Wanted&& wanted) {
        comm.settle(ncclCommRegister(comm.get(), data_, bytes_, &registration_), "ncclCommRegister", wanted);
    }
    /// Registers the memory as a symmetric window; false if NCCL has none here. Collective, with the same number of bytes on all ranks.
    template <class Wanted>
    bool open_window([[maybe_unused]] NcclCommunicator& comm, [[maybe_unused]] Wanted&& wanted) {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 3)
        const char* const call = "ncclCommWindowRegister";
        const ncclResult_t begun = ncclCommWindowRegister(comm.get(), data_, bytes_, &window_, NCCL_WIN_COLL_SYMMETRIC);
        if (begun == ncclInvalidArgument) return false;
        // It may return ncclSuccess while in progress: only the communicator's state tells when the window is written.
        comm.settle(begun == ncclSuccess ? ncclInProgress : begun, call, wanted);
        return window_ != nullptr;
#else
        return false;
#endif
    }
    /// Ends the registration. No work in flight may use the memory: NCCL does not wait for the device.
    template <class Wanted>
    void forget(NcclCommunicator& comm, Wanted&& wanted) {
        if (void* const known = std::exchange(registration_, nullptr))
            comm.settle(ncclCommDeregister(comm.get(), known), "ncclCommDeregister", wanted);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 3)
        if (const ncclWindow_t known = std::exchange(window_, nullptr))
            comm.settle(ncclCommWindowDeregister(comm.get(), known), "ncclCommWindowDeregister", wanted);
#endif
    }

private:
    void* data_ = nullptr;
    std::size_t bytes_;
    void* registration_ = nullptr;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 3)
    ncclWindow_t window_ = nullptr;
#endif
};

#endif

}  // namespace detail

}  // namespace gradsync::inline v0_2
