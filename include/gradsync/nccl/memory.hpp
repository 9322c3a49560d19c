// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../cuda/runtime.hpp"
#include "communicator.hpp"

namespace gradsync::inline v0_2 {

/// The kind of memory that `NcclBackend::allocate` returns and that a Reducer's buckets use.
enum class NcclMemory : std::uint8_t {
    plain,  ///< from the CUDA runtime
    /// From NCCL, registered with the communicator (NCCL 2.19): NCCL may work in it without copies of its own.
    registered,
    /// From NCCL, mapped by all ranks as symmetric windows (NCCL 2.27.3): for its fastest kernels within a node.
    windows,
};

constexpr std::string_view name_of(NcclMemory memory) noexcept {
    return detail::name_in({"plain memory", "registered memory", "symmetric windows"}, memory);
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
    return text(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

constexpr NcclMemory best_nccl_memory(int version) noexcept {
    if (version >= NCCL_VERSION(2, 27, 3)) return NcclMemory::windows;
    return version >= NCCL_VERSION(2, 19, 0) ? NcclMemory::registered : NcclMemory::plain;
}

/// The kind of memory that the ranks of a communicator have agreed on.
struct NcclMemoryChoice {
    NcclMemory kind = NcclMemory::plain;
    std::string why = {};  ///< why it is less than requested; "" if it is not
};

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 19, 0)

/// Zeroed memory from NCCL and its registration, which ends with the communicator at the latest. Not thread-safe.
class RegisteredMemory {
public:
    explicit RegisteredMemory(std::size_t bytes) : bytes_(bytes) {
        void* data = nullptr;
        if (const ncclResult_t code = ncclMemAlloc(&data, bytes); code != ncclSuccess)
            throw_nccl_error(code, "ncclMemAlloc", nullptr);
        data_ = Owner(data);
        cuda::check(cudaMemset(data, 0, bytes), "cudaMemset");
        cuda::check(cudaStreamSynchronize(nullptr), "cudaMemset");
    }

    void* data() const noexcept { return data_.get(); }

    /// Registers the memory. `wanted()` returns false to give up. Throws Error(device_failed).
    template <class Wanted>
    void enlist(NcclCommunicator& comm, Wanted&& wanted) {
        comm.settle(ncclCommRegister(comm.get(), data(), bytes_, &registration_), "ncclCommRegister", wanted);
    }
    /// Registers the memory as a symmetric window; false if NCCL has none here. Collective, with the same number of
    /// bytes on all ranks.
    template <class Wanted>
    bool open_window([[maybe_unused]] NcclCommunicator& comm, [[maybe_unused]] Wanted&& wanted) {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 3)
        const ncclResult_t begun =
            ncclCommWindowRegister(comm.get(), data(), bytes_, &window_, NCCL_WIN_COLL_SYMMETRIC);
        if (begun == ncclInvalidArgument) return false;
        // It may return ncclSuccess while in progress: only the communicator's state tells when the window is written.
        comm.settle(begun == ncclSuccess ? ncclInProgress : begun, "ncclCommWindowRegister", wanted);
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
    using Owner = UniqueHandle<void*, &ncclMemFree>;
    Owner data_;
    std::size_t bytes_;
    void* registration_ = nullptr;
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 3)
    ncclWindow_t window_ = nullptr;
#endif
};

#endif

/// Allocates memory that is registered with an NCCL communicator, and frees it. The engine that owns
/// the communicator must provide:
///
/// - `control()`, `world()`, `world_rank(r)`, `own_world_rank()`, `timeout()`: the ranks, on the host
/// - `with_communicator(deadline, what, use)`: calls `use(comm, wanted)` while no other thread calls NCCL.
///   `wanted()`, for NCCL's calls, is false after a failure. At the deadline it is false too, and fails
///   the world with a time-out in `what`
/// - `fail_on_device(what, why)`: fails the world, unless it has failed already; called in an exception handler
/// - `become_quiet()`: after a failure, waits until nothing touches memory any more
/// - `is_idle()`: is all work on the streams complete?
/// - `Engine::patience`: how long to wait for the streams after a failure
/// - `shared_from_this()`: memory keeps the engine alive; if the communicator is the user's, only the engine can
///   deregister memory
template <class Engine>
class NcclAllocator {
    using Clock = std::chrono::steady_clock;

public:
    explicit NcclAllocator(NcclMemoryChoice choice) : choice_(std::move(choice)) {}

    /// The kind of memory that `allocate` returns from now on. It becomes a lesser kind if NCCL provides no window.
    /// Requires the engine's lock, as does `describe`.
    const NcclMemoryChoice& choice() const noexcept { return choice_; }
    /// "buckets in symmetric windows" or another kind, and why; "" for plain memory, if that was requested.
    std::string describe() const {
        if (choice_.kind == NcclMemory::plain && choice_.why.empty()) return "";
        return text("buckets in ", choice_.kind, choice_.why.empty() ? "" : ", as ", choice_.why);
    }

    /// Returns zeroed memory. For registered memory and windows: if the ranks ask for different sizes, all throw
    /// Error(parameter_mismatch) and may continue; a rank that has no memory or does not call it is fatal to the world.
    /// Plain memory is allocated without a check. Collective.
    collective::Memory allocate(Engine& engine, std::size_t bytes) {
        if (bytes == 0) return {};
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 19, 0)
        if (choice_.kind != NcclMemory::plain) return allocate_registered(engine, bytes);
#endif
        return collective::memory_of(cuda::DeviceMemory(bytes));
    }

private:
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 19, 0)
    static constexpr const char* return_name = "giving back memory";

    /// The ranks synchronise on the host first, because NCCL would wait for a missing rank without naming it.
    collective::Memory allocate_registered(Engine& engine, std::size_t bytes) {
        const std::string what = text("allocate(", bytes, " bytes)");
        std::shared_ptr<RegisteredMemory> memory;
        List<std::uint64_t> sizes;
        try {
            memory = std::make_shared<RegisteredMemory>(bytes);
            sizes = engine.control()->exchange(std::uint64_t{bytes});
            if (first_unlike(sizes) == 0) register_everywhere(engine, *memory, what);
        } catch (const std::exception& error) {
            engine.fail_on_device(what, error.what());
            const collective::Failure failure = engine.world().failure();
            engine.control()->fail(failure);  // tells the other ranks
            engine.become_quiet();            // NCCL may still use the memory
            const int self = engine.own_world_rank();
            const std::string where = failure.message.find(what) == std::string::npos ? text("in ", what, ": ") : "";
            raise(failure.code, {.operation = "allocate", .rank = self, .peer = failure.culprit}, "rank ", self, ": ",
                  where, failure.message);
        }
        if (const std::size_t r = first_unlike(sizes); r != 0) {
            const int other = engine.world_rank(static_cast<int>(r));
            raise(Errc::parameter_mismatch, {.operation = "allocate", .rank = engine.own_world_rank(), .peer = other},
                  "allocate: rank ", engine.world_rank(0), " asks for ", sizes[0], " bytes, rank ", other, " for ",
                  sizes[r], "; all ranks must allocate the same, in the same order");
        }
        void* const data = memory->data();
        return collective::Memory(std::shared_ptr<void>(
            data, [memory, owner = engine.shared_from_this()](void*) { take_back(*owner, memory); }));
    }

    /// The first rank whose number differs from rank 0's; 0 if there is none.
    static std::size_t first_unlike(const List<std::uint64_t>& numbers) noexcept {
        for (std::size_t r = 1; r < numbers.size(); ++r)
            if (numbers[r] != numbers[0]) return r;
        return 0;
    }

    void register_everywhere(Engine& engine, RegisteredMemory& memory, const std::string& what) {
        const auto deadline = Clock::now() + engine.timeout();
        if (choice_.kind == NcclMemory::windows) {
            bool opened = false;
            engine.with_communicator(deadline, what, [&](NcclCommunicator& comm, auto&& wanted) {
                if (!engine.world().failed()) opened = memory.open_window(comm, wanted);
            });
            bool all = true;
            for (const std::uint8_t other : engine.control()->exchange(static_cast<std::uint8_t>(opened)))
                all = all && other != 0;
            if (!all)
                engine.with_communicator(deadline, what, [&](NcclCommunicator& comm, auto&& wanted) {
                    memory.forget(comm, wanted);
                    choice_ = {NcclMemory::registered, "NCCL has no window for them here; NCCL_DEBUG=INFO tells why"};
                });
        }
        if (choice_.kind == NcclMemory::registered)
            engine.with_communicator(deadline, what, [&](NcclCommunicator& comm, auto&& wanted) {
                if (!engine.world().failed()) memory.enlist(comm, wanted);
            });
    }

    /// Unlike cudaFree, NCCL does not wait for the device, and work on a stream may still be running. If it does not
    /// end in time, the memory is leaked.
    static void take_back(Engine& engine, const std::shared_ptr<RegisteredMemory>& memory) noexcept {
        if (!wait_until_idle(engine)) return leak_until_exit(memory);
        try {
            const auto deadline = Clock::now() + engine.timeout();
            engine.with_communicator(deadline, return_name, [&](NcclCommunicator& comm, auto&& wanted) {
                // After a failure the communicator was aborted, which ends the registration.
                if (!engine.world().failed()) memory->forget(comm, wanted);
            });
        } catch (const std::exception& error) {
            engine.fail_on_device(return_name, error.what());
        }
    }

    /// Waits for the streams, up to the time limit, or for `patience` after a failure.
    /// Returns false if they are still not idle.
    static bool wait_until_idle(Engine& engine) noexcept {
        constexpr std::chrono::microseconds pause(50);
        const bool idle = poll_until(Clock::now() + engine.timeout(), pause,
                                     [&] { return engine.world().failed() || engine.is_idle(); });
        if (!engine.world().failed()) return idle;
        engine.become_quiet();
        return poll_until(Clock::now() + Engine::patience, pause, [&] { return engine.is_idle(); });
    }
#endif

    NcclMemoryChoice choice_;
};

/// The settings of an NCCL communicator.
struct NcclSettings {
    cudaStream_t compute = nullptr;  ///< the stream on which buffers are written and read
    int max_ctas = 0;                ///< the most CTAs of an NCCL kernel; 0: NCCL decides
    NcclMemoryChoice memory = {};    ///< the kind of memory from `allocate`
    std::size_t group_bytes = 0;     ///< the most bytes of a Reducer's buckets that are launched together
    std::string no_float8 = {};      ///< why the ranks cannot add up 8-bit floats; "" if they can
};

/// Agrees on `settings`. Throws Error(parameter_mismatch), the same on all ranks, if their requests differ. Afterwards
/// `memory` and `no_float8` say what all ranks can have. Collective.
inline void agree(message_passing::MessageEngine& control, NcclSettings& settings) {
    struct Wish {
        std::uint64_t group_bytes;
        std::int32_t memory, version;  ///< the lower of the NCCL versions at compile time and at run time
        std::int32_t capability;       ///< of the current device
    };
    const auto all = control.exchange(Wish{settings.group_bytes, static_cast<std::int32_t>(settings.memory.kind),
                                           smaller(nccl_version(), NCCL_VERSION_CODE), cuda::compute_capability()});
    const auto has = [&](std::size_t r) {
        return text("rank ", control.world_rank(static_cast<int>(r)), " has ", static_cast<NcclMemory>(all[r].memory),
                    " and group_bytes ", all[r].group_bytes);
    };
    for (std::size_t r = 0; r < all.size(); ++r) {
        const int rank = control.world_rank(static_cast<int>(r));
        if (all[r].memory != all[0].memory || all[r].group_bytes != all[0].group_bytes)
            raise(Errc::parameter_mismatch,
                  {.operation = "NcclBackend", .rank = control.own_world_rank(), .peer = rank},
                  "the NcclOptions differ: ", has(0), ", ", has(r), "; they must be the same on all ranks");
        const std::string old =
            text("rank ", rank, " has, or was compiled for, NCCL ", nccl_version_text(all[r].version));
        if (settings.no_float8.empty() && all[r].version < nccl_with_float8) settings.no_float8 = old;
        else if (settings.no_float8.empty() && all[r].capability < capability_with_float8)
            settings.no_float8 = text("rank ", rank, " has a device of compute capability ", all[r].capability / 10,
                                      ".", all[r].capability % 10);
        if (const NcclMemory best = best_nccl_memory(all[r].version); best < settings.memory.kind)
            settings.memory = {best, old};
    }
}

}  // namespace detail

}  // namespace gradsync::inline v0_2
