// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../cuda/device_passes.hpp"
#include "../nccl/engine.hpp"
#include "tcp.hpp"

namespace gradsync::inline v0_2 {

namespace detail {

/// While it lives, collectives started on the engine are held back; they are launched as one group when it is
/// destroyed. A failure of that launch fails the collectives, as any other start does. If an exception destroys it,
/// nothing is launched. A default-constructed one does nothing.
class [[nodiscard]] NcclGroup {
public:
    NcclGroup() = default;
    explicit NcclGroup(Shared<NcclEngine> engine) noexcept : engine_(std::move(engine)) { engine_->open_group(); }
    NcclGroup(NcclGroup&&) noexcept = default;
    NcclGroup& operator=(NcclGroup other) noexcept {  // `other` then launches the group that this was
        engine_.swap(other.engine_);
        std::swap(exceptions_, other.exceptions_);
        return *this;
    }
    ~NcclGroup() {
        if (engine_) engine_->close_group(std::uncaught_exceptions() > exceptions_);
    }

private:
    Shared<NcclEngine> engine_;
    int exceptions_ = std::uncaught_exceptions();  ///< exceptions propagating at construction
};

}  // namespace detail

/// Options of `NcclBackend`.
struct NcclOptions {
    /// Limit of every wait and every collective; `set_timeout` changes it.
    std::chrono::nanoseconds timeout = std::chrono::minutes(5);
    cudaStream_t stream = nullptr;  ///< the stream that writes and reads buffers; `set_stream` changes it
    int device = -1;                ///< -1: the calling thread's
    int max_ctas = 0;               ///< limit for NCCL's kernels, to leave room for others; 0: NCCL decides
    /// Kind of memory from `allocate`; the same on all ranks. If they get a lesser kind,
    /// `describe()` names it and says why.
    NcclMemory memory = NcclMemory::plain;
    /// Consecutive buckets of a Reducer's backward are launched together if they have at most this many bytes
    /// in all (32 buckets at most), and so are their gathers (OverlapForward). 0: each bucket is launched
    /// on its own. The same on all ranks.
    std::size_t group_bytes = std::size_t{1} << 20;
    std::string bind = {};  ///< see ProcessOptions::bind; each rank has its own
};

/// Ranks have one device each; NCCL moves data between the devices.
///
/// - A collective reads and writes its buffers after all work that is on the compute stream (`set_stream`) when it is
///   started, or, in a group, when the group is launched. It runs on a stream of its own. `Work::wait()` blocks the
///   host until it is complete. `Work::wait_on(stream)` makes a stream wait, and returns at once: the Work then counts
///   as complete, and its buffers are in use until that stream gets there.
/// - Means are scaled in f32 (f64 for f64). The sum of the weights is computed on the device; no host waits for it.
///   Types of 16 and 8 bits are scaled before they are added up, and rounded both then and in NCCL's sum;
///   those of 8 bits need NCCL 2.24.3 and devices of compute capability 9.0. Sums are in NCCL's order, not in that
///   of the other backends; in `min` and `max` a NaN may lose. Means, and the Reducer, need the library's kernels:
///   link gradsync::cuda (nvcc compiles that one file).
/// - Beside the data, ranks tell one another over TCP what they start; nothing on a device waits for that. A rank that
///   starts something else, fails, leaves, dies or reaches its time limit is named on every other rank, as on the other
///   backends, and collectives in flight are aborted. `host()` is a backend over those connections, for host memory.
/// - Ranks should be processes. If they are threads of one process, NCCL may let them read one another's buffers: after
///   a failure, free no buffer before all ranks have stopped.
/// - Collectives that are started while a `group()` lives are launched as one NCCL group.
/// - A thread of the library checks progress and failures: every half millisecond, or every 20 ms once nothing has been
///   started for about a second. The device of a handle must be the calling thread's current device.
/// - CUDA graphs cannot capture its collectives yet.
///
/// docs/guides/gpus.md says which parts have run on which device.
class NcclBackend : public detail::EngineCollectives<NcclBackend, detail::NcclEngine, MemorySpace::device> {
public:
    static constexpr BackendAbilities abilities{.poll = true,
                                                .wait_on = true,
                                                .own_stream = true,
                                                .failed = true,
                                                .tags = true,
                                                .check_reduces = true,
                                                .groups = true,
                                                .device_passes = true};

    /// Makes a backend of the ranks that meet at `rendezvous`, which may be destroyed afterwards. Collective. Throws
    /// Error, on every rank.
    template <Rendezvous R>
    explicit NcclBackend(R& rendezvous, NcclOptions options = {})
        : NcclBackend(connect(rendezvous, options), options, nullptr) {}

    /// The same over an existing communicator of the same ranks in the same order. Make it with `config.blocking = 0`:
    /// a blocking communicator's calls ignore the time limit and failures. You keep the ownership, and it must
    /// outlive the backend. A failure aborts and destroys it. Throws Error(invalid_argument) if `comm` and
    /// `rendezvous` differ.
    template <Rendezvous R>
    static NcclBackend attach(R& rendezvous, ncclComm_t comm, NcclOptions options = {}) {
        return adopt(rendezvous, comm, options, false);
    }
    /// The same, but the backend owns `comm` from now on.
    template <Rendezvous R>
    static NcclBackend take_ownership(R& rendezvous, ncclComm_t comm, NcclOptions options = {}) {
        return adopt(rendezvous, comm, options, true);
    }

    /// Makes a backend of the job that the environment describes (see `Job::from_environment`), each rank on the device
    /// of its local rank.
    static NcclBackend from_environment(NcclOptions options = {}) {
        const Job job = Job::from_environment();
        int devices = 0;
        cuda::check(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
        if (options.device < 0) options.device = job.local_rank % devices;
        cuda::check(cudaSetDevice(options.device), "cudaSetDevice");
        TcpRendezvous rendezvous(job, {.timeout = collective::limit_or(options.timeout, TcpRendezvousOptions().timeout),
                                       .bind = options.bind});
        return NcclBackend(rendezvous, options);
    }

    std::string describe() const {
        const std::string memory = engine().describe_memory();
        return detail::text(size(), size() == 1 ? " device" : " devices", " over NCCL ",
                            detail::nccl_version_text(detail::nccl_version()), memory.empty() ? "" : ", ", memory);
    }

    /// Sets the compute stream: collectives that are started from now on come after its work. You keep the ownership;
    /// it must live until another one is set, or until this backend and all memory from `allocate` are destroyed.
    void set_stream(cudaStream_t stream) { engine().set_compute_stream(stream); }
    cudaStream_t stream() const { return engine().compute_stream(); }  ///< Returns the compute stream.
    /// See BackendAbilities::own_stream. A HybridReduceScatter calls it for its replicas.
    void use_own_stream() { engine().use_own_stream(); }

    /// Groups collectives: those that are started while the object lives are launched together when it is destroyed, as
    /// one NCCL group. This is much cheaper if they are small. All ranks must form the same groups; otherwise an error
    /// names the rank that differs. Collectives of a group must not depend on one another. A wait inside the group
    /// launches the collectives started so far. So does starting one more with 128 in flight, which blocks the host
    /// until the oldest is complete, as outside of groups. If an exception destroys the object, nothing is launched;
    /// the dropped Works fail the communicator on all ranks. Use it from one thread at a time.
    ///
    ///     {
    ///         const auto group = comm.group();
    ///         for (auto& b : buffers) works.push_back(comm.all_reduce(b, gs::ReduceOp::sum));
    ///     }
    ///     for (auto& work : works) work.wait_on(stream);
    detail::NcclGroup group() {
        check_handle();
        return detail::NcclGroup(engine_);
    }
    std::size_t group_bytes() const { return engine().group_bytes(); }  ///< Returns NcclOptions::group_bytes.

    void set_timeout(std::chrono::nanoseconds limit) {
        EngineCollectives::set_timeout(limit);
        host_.set_timeout(limit);
    }

    /// Throws Error(invalid_argument), with the same text on all ranks, if they cannot add up elements of this type. A
    /// Reducer calls it at construction.
    void check_reduces(DType dtype) const { engine().check_reduces(dtype, "Reducer"); }

    /// The passes that a Reducer makes over device memory, on the compute stream.
    detail::DevicePasses<detail::NcclEngine> passes() const {
        check_handle();
        return detail::DevicePasses<detail::NcclEngine>(engine_);
    }

    /// A backend of the same ranks for host memory. It has the same origin: if one fails, both do.
    TcpBackend& host() noexcept { return host_; }

    /// Returns device memory in which collectives are fastest; see the concept. The memory keeps the communicator
    /// alive. Its destruction blocks the host, up to the time limit, until all collectives and the work on the compute
    /// stream are complete. Other streams that waited for a Work (`wait_on`) must have finished with the memory.
    collective::Memory allocate(std::size_t bytes) { return engine().allocate(bytes); }

private:
    friend EngineCollectives;

    NcclBackend(const detail::Connection& control, const NcclOptions& options, detail::NcclCommunicator* adopted)
        : NcclBackend(make_engine(control.engine.as<message_passing::MessageEngine>(), options, adopted),
                      control.paths) {}
    NcclBackend(detail::Shared<detail::NcclEngine> engine, detail::Paths paths)
        : EngineCollectives(std::move(engine)),
          host_(TcpBackend({engine_->control()->split(collective::Group::of_all(size(), rank())), std::move(paths)})) {
        if (detail::debugs()) announce(describe());
    }

    /// Connects the ranks by messages alone.
    template <Rendezvous R>
    static detail::Connection connect(R& rendezvous, const NcclOptions& options) {
        detail::Connection connection =
            TcpBackend::connect(rendezvous, {.timeout = options.timeout, .shared_memory = false, .bind = options.bind},
                                "NcclBackend", "NcclOptions");
        connection.paths.problem = "they serve NCCL";
        return connection;
    }

    static detail::Shared<detail::NcclEngine> make_engine(const detail::Shared<message_passing::MessageEngine>& control,
                                                          NcclOptions options, detail::NcclCommunicator* adopted) {
        if (options.device < 0) options.device = cuda::current_device();
        const cuda::CurrentDevice current(options.device);
        detail::NcclSettings settings{.compute = options.stream,
                                      .max_ctas = options.max_ctas,
                                      .memory = {options.memory},
                                      .group_bytes = options.group_bytes};
        detail::agree(*control, settings);
        auto watch = std::make_shared<detail::DeviceWatch>(options.device, control->world().hooks());
        detail::NcclCommunicator comm =
            adopted != nullptr ? std::move(*adopted) : detail::NcclCommunicator::make(*control, settings.max_ctas);
        return std::make_shared<detail::NcclEngine>(control, std::move(watch), std::move(comm), settings);
    }

    template <Rendezvous R>
    static NcclBackend adopt(R& rendezvous, ncclComm_t comm, const NcclOptions& options, bool takes_ownership) {
        const int rank = rendezvous.rank(), size = rendezvous.size();
        int own_rank = -1, own_size = -1;
        if (comm == nullptr || ncclCommUserRank(comm, &own_rank) != ncclSuccess ||
            ncclCommCount(comm, &own_size) != ncclSuccess || own_rank != rank || own_size != size)
            detail::refuse({"NcclBackend", rank}, "the communicator is of rank ", own_rank, " of ", own_size,
                           ", the rendezvous of rank ", rank, " of ", size,
                           "; both must have the same ranks in the same order");
        detail::NcclCommunicator adopted(comm, takes_ownership);
        return NcclBackend(connect(rendezvous, options), options, &adopted);
    }

    NcclBackend join(const collective::Group& group) {
        return NcclBackend(engine_->split(group).as<detail::NcclEngine>(), host_.paths_->of(group));
    }

    TcpBackend host_;
};

static_assert(Backend<NcclBackend>);

}  // namespace gradsync::inline v0_2
