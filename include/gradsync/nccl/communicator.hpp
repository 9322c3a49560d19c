// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <nccl.h>

#include <cassert>
#include <iterator>
#include <memory>
#include <thread>

#include "../collective/messages/message_engine.hpp"

#if NCCL_VERSION_CODE < NCCL_VERSION(2, 14, 0)
#error "gradsync needs NCCL 2.14 or later: older ones have no communicators that do not block"
#endif

namespace gradsync::inline v0_2::detail {

/// The first NCCL version that adds up 8-bit floats, and the compute capability that they need.
inline constexpr int nccl_with_float8 = NCCL_VERSION(2, 24, 3), capability_with_float8 = 90;

/// The NCCL type for reductions. Must not be called for 8-bit floats if NCCL has no such types.
inline ncclDataType_t nccl_type(DType dtype) noexcept {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 24, 3)
    if (is_float8(dtype)) return dtype == DType::f8e4m3 ? ncclFloat8e4m3 : ncclFloat8e5m2;
#endif
    constexpr ncclDataType_t types[] = {ncclInt8,   ncclUint8,   ncclInt32,    ncclUint32,  ncclInt64,
                                        ncclUint64, ncclFloat16, ncclBfloat16, ncclFloat32, ncclFloat64};
    assert(static_cast<std::size_t>(dtype) < std::size(types));
    return types[static_cast<std::size_t>(dtype)];
}
/// The NCCL type for moving data without reducing it, which works with any NCCL and device.
inline ncclDataType_t nccl_type_to_move(DType dtype) noexcept {
    return is_float8(dtype) ? ncclUint8 : nccl_type(dtype);
}

/// The NCCL operation of `op`; ncclSum for a mean, which is composed of sums.
inline ncclRedOp_t nccl_op(ReduceOp op) noexcept {
    constexpr ncclRedOp_t ops[] = {ncclSum, ncclMin, ncclMax, ncclProd, ncclSum};
    return ops[static_cast<std::size_t>(op)];
}

/// Calls `done()` repeatedly; returns whether it was true before the deadline.
template <class Done>
bool poll_until(std::chrono::steady_clock::time_point deadline, std::chrono::nanoseconds pause, Done&& done) {
    while (!done()) {
        if (std::chrono::steady_clock::now() >= deadline) return false;
        std::this_thread::sleep_for(pause);
    }
    return true;
}

/// An error that NCCL reported, perhaps because another rank is gone.
struct NcclError : Error {
    using Error::Error;
};

/// NCCL's own text for a failed call.
[[gnu::cold, gnu::noinline]] inline std::string nccl_message(ncclResult_t code, ncclComm_t comm) {
    const char* const last = ncclGetLastError(comm);
    return last == nullptr || *last == '\0' ? ncclGetErrorString(code) : text(ncclGetErrorString(code), ": ", last);
}

[[noreturn, gnu::cold, gnu::noinline]] inline void throw_nccl_error(ncclResult_t code, const char* call,
                                                                    ncclComm_t comm) {
    throw NcclError(Errc::device_failed, text(call, ": ", nccl_message(code, comm), "; NCCL_DEBUG=INFO tells more"),
                    {.operation = call});
}

/// One rank's side of an NCCL communicator. Its calls do not block: `settle` each call before the next one and before
/// work on its stream. Not thread-safe.
///
/// The destructor finalises and destroys the communicator in bounded time; after a few seconds it aborts it. It leaves
/// an attached communicator alone, unless it was aborted.
class NcclCommunicator {
    using Clock = std::chrono::steady_clock;

public:
    NcclCommunicator() = default;
    /// Wraps a communicator. Unless it takes ownership, the caller keeps it.
    NcclCommunicator(ncclComm_t comm, bool takes_ownership) noexcept : comm_(comm), owns_(takes_ownership) {}

    /// Makes a communicator of the ranks of `control`. Throws Error(device_failed), or the error of the rank that
    /// failed first. Collective over these ranks.
    static NcclCommunicator make(message_passing::MessageEngine& control, [[maybe_unused]] int max_ctas) {
        const int self = control.own_world_rank();
        ncclUniqueId id{};
        if (control.rank() == 0)
            if (const ncclResult_t code = ncclGetUniqueId(&id); code != ncclSuccess) {
                const std::string what = text("ncclGetUniqueId: ", ncclGetErrorString(code));
                control.fail({Errc::device_failed, self, what});
                raise(Errc::device_failed, {.operation = "NcclBackend", .rank = self, .peer = self}, what);
            }
        id = control.exchange(id).front();
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = 0;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 17, 0)
        if (max_ctas > 0) {
            config.maxCTAs = max_ctas;
            config.minCTAs = 1;
        }
#endif
        const auto deadline = Clock::now() + control.timeout();
        try {
            NcclCommunicator made;
            const ncclResult_t code = ncclCommInitRankConfig(&made.comm_, control.size(), id, control.rank(), &config);
            made.settle(code, "ncclCommInitRankConfig", [&] {
                control.progress();
                return !control.world().failed() && Clock::now() < deadline;
            });
            return made;
        } catch (const Error& error) {
            control.fail({Errc::device_failed, self,
                          text("rank ", self, " cannot create an NCCL communicator: ", error.what())});
            const collective::Failure failure = control.world().failure();
            raise(failure.code, {.operation = "NcclBackend", .rank = self, .peer = failure.culprit}, "rank ", self,
                  ": ", failure.message);
        }
    }

    NcclCommunicator(NcclCommunicator&& other) noexcept
        : comm_(std::exchange(other.comm_, nullptr)), owns_(other.owns_), aborting_(std::move(other.aborting_)) {}
    NcclCommunicator& operator=(NcclCommunicator&&) = delete;
    ~NcclCommunicator() {
        if (comm_ != nullptr && owns_) {
            if (finalise()) ncclCommDestroy(comm_);
            else abort();
        }
        poll_until(Clock::now() + patience, std::chrono::milliseconds(1), [this] { return !is_aborting(); });
    }

    ncclComm_t get() const noexcept { return comm_; }

    /// Waits until the call that returned `code` is no longer in progress. Throws NcclError if it failed, and
    /// Error(device_failed) if `wanted()` is false.
    template <class Wanted>
    void settle(ncclResult_t code, const char* call, Wanted&& wanted) {
        while (code == ncclInProgress) {
            if (!wanted()) raise(Errc::device_failed, {.operation = call}, call, " was given up");
            std::this_thread::yield();
            if (ncclCommGetAsyncError(comm_, &code) != ncclSuccess) code = ncclInternalError;
        }
        if (code != ncclSuccess) throw_nccl_error(code, call, comm_);
    }

    /// The asynchronous error of the communicator, or "".
    std::string problem() {
        ncclResult_t code = ncclSuccess;
        if (comm_ == nullptr ||
            (ncclCommGetAsyncError(comm_, &code) == ncclSuccess && (code == ncclSuccess || code == ncclInProgress)))
            return {};
        return nccl_message(code, comm_);
    }

    /// Aborts all work on this rank and empties this object. Returns at once, because NCCL's own call may hang.
    void abort() noexcept {
        if (comm_ == nullptr) return;
        try {
            auto over = std::make_shared<std::atomic<bool>>(false);
            std::thread([comm = comm_, over] {
                ncclCommAbort(comm);
                over->store(true, std::memory_order_release);
            }).detach();
            aborting_ = std::move(over);
        } catch (...) {  // no thread: the end of the process aborts it
        }
        comm_ = nullptr;
    }
    bool aborted() const noexcept { return comm_ == nullptr && !is_aborting(); }

private:
    static constexpr std::chrono::seconds patience{5};

    /// Waits a while until all work is complete, here and in NCCL's threads. Returns true if it is.
    bool finalise() noexcept {
        ncclResult_t code = ncclCommFinalize(comm_);
        poll_until(Clock::now() + patience, std::chrono::microseconds(10),
                   [&] { return code != ncclInProgress || ncclCommGetAsyncError(comm_, &code) != ncclSuccess; });
        return code == ncclSuccess;
    }
    bool is_aborting() const noexcept { return aborting_ && !aborting_->load(std::memory_order_acquire); }

    ncclComm_t comm_ = nullptr;
    bool owns_ = true;
    std::shared_ptr<std::atomic<bool>> aborting_;  ///< true once NCCL has returned
};

}  // namespace gradsync::inline v0_2::detail
