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

/// What `NcclBackend::allocate` gives, and with it a Reducer's buckets are.
enum class NcclMemory : std::uint8_t {
    plain,       ///< the CUDA runtime's
    registered,  ///< NCCL's own, registered with the communicator (NCCL 2.19): it may work there without copies of its own
    windows,     ///< NCCL's own, which all ranks map, as symmetric windows (NCCL 2.27.3): for its fastest kernels within a node
};

constexpr std::string_view name_of(NcclMemory memory) noexcept {
    constexpr std::string_view names[] = {"plain memory", "registered memory", "symmetric windows"};
    return names[static_cast<std::size_t>(memory)];
}

namespace detail {

/// Of the library that this program runs with.
inline int nccl_version() noexcept {
    int version = 0;
    ncclGetVersion(&version);
    return version;
}
/// "2.28.9"
inline std::string nccl_version_text(int version) {
    return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." + std::to_string(version % 100);
}

constexpr NcclMemory best_nccl_memory(int version) noexcept {
    if (version >= NCCL_VERSION(2, 27, 3)) return NcclMemory::windows;
    return version >= NCCL_VERSION(2, 19, 0) ? NcclMemory::registered : NcclMemory::plain;
}

/// What the ranks of a communicator have agreed on.
struct NcclMemoryChoice {
    NcclMemory kind = NcclMemory::plain;
    std::string why = {};  ///< it is less than was wished for; "" where it is not
};

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 19, 0)

/// Zeroed memory of NCCL's own, and what a communicator knows of it, which goes with the communicator at the latest. For one
/// thread at a time.
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

    /// `wanted()`: false to give up. Throws Error(device_failed).
    template <class Wanted>
    void enlist(NcclCommunicator& comm, Wanted&& wanted) {
        comm.settle(ncclCommRegister(comm.get(), data_, bytes_, &registration_), "ncclCommRegister", wanted);
    }
    /// The same as a symmetric window; false where NCCL has none here. Collective, with as many bytes on all ranks.
    template <class Wanted>
    bool open_window([[maybe_unused]] NcclCommunicator& comm, [[maybe_unused]] Wanted&& wanted) {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 3)
        const char* const call = "ncclCommWindowRegister";
        const ncclResult_t begun = ncclCommWindowRegister(comm.get(), data_, bytes_, &window_, NCCL_WIN_COLL_SYMMETRIC);
        if (begun == ncclInvalidArgument) return false;
        // It returns ncclSuccess while it is still at it: only the communicator's state tells when the window has been written.
        comm.settle(begun == ncclSuccess ? ncclInProgress : begun, call, wanted);
        return window_ != nullptr;
#else
        return false;
#endif
    }
    /// Nothing that is under way may use it: NCCL waits for no device.
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
