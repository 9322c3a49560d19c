// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../collective/engine.hpp"
#include "../collective/engine_collectives.hpp"
#include "../cuda/device_passes.hpp"
#include "../cuda/staging_engine.hpp"

namespace gradsync::inline v0_2 {

/// Options of `StagingBackend`, the same on all ranks.
struct StagingOptions {
    cudaStream_t stream = nullptr;  ///< the stream that writes and reads buffers; `set_stream` changes it
    std::size_t piece_bytes = std::size_t{4} << 20;  ///< size of one copy
};

/// Device buffers over a backend that reads host memory only (ThreadBackend, MpiBackend, TcpBackend). Buffers are
/// copied to the host, reduced there and copied back, in pieces that overlap. For machines whose devices NCCL does not
/// connect, and to get the host backend's bits.
///
/// - A collective reads its buffers after all work that is on the compute stream when it is started. A thread of the
///   library advances the copies and the host's collectives during the backward. If the host's messages are MPI's, MPI
///   must allow calls from any thread (MPI_THREAD_MULTIPLE).
/// - `Work::wait_on(stream)` blocks the host until the result is on its way back, and makes
///   the stream wait for the rest.
/// - The device of a handle must be the calling thread's current device.
template <Backend Host>
class StagingBackend
    : public detail::EngineCollectives<StagingBackend<Host>, detail::StagingEngine<Host>, MemorySpace::device> {
    using Engine = detail::StagingEngine<Host>;
    using Base = detail::EngineCollectives<StagingBackend, Engine, MemorySpace::device>;

public:
    static constexpr BackendAbilities abilities{
        .poll = true, .wait_on = true, .tags = abilities_of<Host>.tags, .device_passes = true};

    /// Duplicates `host`, twice: collective. Uses the calling thread's current device. Throws Error(invalid_argument)
    /// if `piece_bytes` is less than 64.
    explicit StagingBackend(Host host, StagingOptions options = {})
        : StagingBackend(host, options, std::make_shared<typename Engine::Watch>(cuda::current_device())) {
        if (options.piece_bytes < 64)
            detail::raise(Errc::invalid_argument, "StagingBackend: pieces must have 64 bytes at least");
    }

    std::string describe() const { return std::string(host_.describe()) + ", device buffers copied through the host"; }

    /// Sets the compute stream; see StagingOptions.
    void set_stream(cudaStream_t stream) { this->engine().set_compute_stream(stream); }
    cudaStream_t stream() const { return this->engine().compute_stream(); }  ///< Returns the compute stream.

    /// The passes that a Reducer makes over device memory, on the compute stream.
    detail::DevicePasses<Engine> passes() const {
        this->check_handle();
        return detail::DevicePasses<Engine>(engine_);
    }

    /// A backend of the same ranks for host memory.
    Host& host() noexcept { return host_; }

    std::chrono::nanoseconds timeout() const { return host_.timeout(); }
    void set_timeout(std::chrono::nanoseconds limit) {
        host_.set_timeout(limit);  // first: throws if this was moved from
        engine_->host().set_timeout(limit);
    }
    std::chrono::nanoseconds progress_time() const { return this->engine().host().progress_time(); }
    void fail(const std::string& what) noexcept {
        if (engine_) engine_->fail(what);
    }

    StagingBackend split(int color, int key) {
        Host host = host_.split(color, key);
        return StagingBackend(host, {engine_->compute_stream(), engine_->piece_bytes()}, engine_->watch());
    }
    StagingBackend duplicate() { return split(0, 0); }

    collective::Memory allocate(std::size_t bytes) { return collective::memory_of(cuda::DeviceMemory(bytes)); }

private:
    friend Base;

    StagingBackend(Host& host, StagingOptions options, std::shared_ptr<typename Engine::Watch> watch)
        : Base(std::make_shared<Engine>(host.duplicate(), std::move(watch), options.piece_bytes, options.stream)),
          host_(host.duplicate()) {}

    using Base::engine_;
    Host host_;
};

}  // namespace gradsync::inline v0_2
