// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <nccl.h>

#include <atomic>
#include <cassert>
#include <cstddef>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "../core/clock.hpp"
#include "../core/dtype.hpp"
#include "../core/error.hpp"
#include "../core/reduce_op.hpp"

#if NCCL_VERSION_CODE < NCCL_VERSION(2, 14, 0)
#error "gradsync needs NCCL 2.14 or later: older ones have no communicators that do not block"
#endif

namespace gradsync::inline v0_2::detail {

/// The first NCCL that adds up 8-bit floats, on devices of this compute capability.
inline constexpr int nccl_with_float8 = NCCL_VERSION(2, 24, 3), capability_with_float8 = 90;

/// For what is added up. 8-bit floats are only by an NCCL that knows them; where it does not, nobody may ask for
/// theirs.
inline ncclDataType_t nccl_type(DType dtype) noexcept {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 24, 3)
    if (is_float8(dtype)) return dtype == DType::f8e4m3 ? ncclFloat8e4m3 : ncclFloat8e5m2;
#endif
    constexpr ncclDataType_t types[] = {ncclInt8,   ncclUint8,   ncclInt32,    ncclUint32,  ncclInt64,
                                        ncclUint64, ncclFloat16, ncclBfloat16, ncclFloat32, ncclFloat64};
    assert(static_cast<std::size_t>(dtype) < std::size(types));
    return types[static_cast<std::size_t>(dtype)];
}
/// The same for what is moved, and not added up: any NCCL and device can do it.
inline ncclDataType_t nccl_type_to_move(DType dtype) noexcept { return is_float8(dtype) ? ncclUint8 : nccl_type(dtype); }

/// Not for means, which are made of sums.
inline ncclRedOp_t nccl_op(ReduceOp op) noexcept {
    constexpr ncclRedOp_t ops[] = {ncclSum, ncclMin, ncclMax, ncclProd, ncclSum};
    return ops[static_cast<std::size_t>(op)];
}

/// That NCCL said so, perhaps because another rank is gone.
struct NcclError : Error {
    using Error::Error;
};

[[noreturn]] inline void throw_nccl_error(ncclResult_t code, const char* call, ncclComm_t comm) {
    std::string what = std::string(call) + ": " + ncclGetErrorString(code);
    const char* const last = ncclGetLastError(comm);
    if (last != nullptr && *last != '\0') (what += ": ") += last;
    throw NcclError(Errc::device_failed, what + "; NCCL_DEBUG=INFO tells more", {.operation = call});
}

/// One rank's side of a communicator of NCCL. Its calls do not block: `settle` after each of them, before the next and before
/// work on its stream. For one thread at a time.
///
/// It is finalised and destroyed with the object, in bounded time: a few seconds at most, after which it is aborted. An attached
/// one is left alone, unless it was aborted.
class NcclCommunicator {
    using Clock = std::chrono::steady_clock;

public:
    NcclCommunicator() = default;

    /// Collective over the `size` ranks that have `id`. `wanted()`: false to give up.
    template <class Wanted>
    static NcclCommunicator make(const ncclUniqueId& id, int rank, int size, int max_ctas, Wanted&& wanted) {
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = 0;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 17, 0)
        if (max_ctas > 0) {
            config.maxCTAs = max_ctas;
            config.minCTAs = 1;
        }
#else
        (void)max_ctas;
#endif
        NcclCommunicator made;
        const ncclResult_t code = ncclCommInitRankConfig(&made.comm_, size, id, rank, &config);
        made.settle(code, "ncclCommInitRankConfig", wanted);
        return made;
    }

    /// One that stays yours.
    static NcclCommunicator attach(ncclComm_t comm) noexcept {
        NcclCommunicator attached;
        attached.comm_ = comm;
        attached.owns_ = false;
        return attached;
    }
    /// One that is this object's from now on.
    static NcclCommunicator take_ownership(ncclComm_t comm) noexcept {
        NcclCommunicator taken;
        taken.comm_ = comm;
        return taken;
    }

    NcclCommunicator(NcclCommunicator&& other) noexcept
        : comm_(std::exchange(other.comm_, nullptr)), owns_(other.owns_), aborting_(std::move(other.aborting_)) {}
    NcclCommunicator& operator=(NcclCommunicator&&) = delete;
    ~NcclCommunicator() {
        if (comm_ == nullptr || !owns_) return;
        if (finalise()) ncclCommDestroy(comm_);
        else abort();
        wait_for_abort(patience);
    }

    ncclComm_t get() const noexcept { return comm_; }

    /// Returns when a call that gave `code` is under way, and how it went. Throws Error(device_failed) where it is not wanted any more.
    template <class Wanted>
    ncclResult_t outcome(ncclResult_t code, const char* call, Wanted&& wanted) {
        while (code == ncclInProgress) {
            if (!wanted()) throw Error(Errc::device_failed, std::string(call) + " was given up", {.operation = call});
            std::this_thread::yield();
            if (ncclCommGetAsyncError(comm_, &code) != ncclSuccess) code = ncclInternalError;
        }
        return code;
    }
    /// The same; throws where it failed, too.
    template <class Wanted>
    void settle(ncclResult_t code, const char* call, Wanted&& wanted) {
        code = outcome(code, call, wanted);
        if (code != ncclSuccess) throw_nccl_error(code, call, comm_);
    }

    /// What went wrong on the way, or "".
    std::string problem() {
        ncclResult_t code = ncclSuccess;
        if (comm_ == nullptr || (ncclCommGetAsyncError(comm_, &code) == ncclSuccess && (code == ncclSuccess || code == ncclInProgress)))
            return {};
        const char* const last = ncclGetLastError(comm_);
        return std::string(ncclGetErrorString(code)) + (last != nullptr && *last != '\0' ? std::string(": ") + last : "");
    }

    /// Ends what is under way, on this rank; the object holds nothing any more. Returns at once: NCCL's own call may hang.
    void abort() noexcept {
        if (comm_ == nullptr) return;
        try {
            auto over = std::make_shared<std::atomic<bool>>(false);
            std::thread([comm = comm_, over] {
                ncclCommAbort(comm);
                over->store(true, std::memory_order_release);
            }).detach();
            aborting_ = std::move(over);
        } catch (...) {  // no thread is to be had: then the process ends it
        }
        comm_ = nullptr;
    }
    bool aborted() const noexcept { return comm_ == nullptr && (!aborting_ || aborting_->load(std::memory_order_acquire)); }

private:
    static constexpr std::chrono::seconds patience{5};

    /// All that is under way is over, here and in NCCL's own threads? Waits a while for it.
    bool finalise() noexcept {
        ncclResult_t code = ncclCommFinalize(comm_);
        for (const auto deadline = Clock::now() + patience; code == ncclInProgress && Clock::now() < deadline;) {
            std::this_thread::yield();
            if (ncclCommGetAsyncError(comm_, &code) != ncclSuccess) return false;
        }
        return code == ncclSuccess;
    }
    void wait_for_abort(std::chrono::seconds limit) const noexcept {
        for (const auto deadline = Clock::now() + limit;
             aborting_ && !aborting_->load(std::memory_order_acquire) && Clock::now() < deadline;)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }

    ncclComm_t comm_ = nullptr;
    bool owns_ = true;
    std::shared_ptr<std::atomic<bool>> aborting_;  ///< true once NCCL has come back
};

}  // namespace gradsync::inline v0_2::detail
