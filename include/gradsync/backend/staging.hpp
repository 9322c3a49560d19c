// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "../collective/call.hpp"
#include "../collective/engine.hpp"
#include "../collective/engine_collectives.hpp"
#include "../collective/failures.hpp"
#include "../collective/progress_hooks.hpp"
#include "../core/backend.hpp"
#include "../core/clock.hpp"
#include "../core/collective_tag.hpp"
#include "../core/error.hpp"
#include "../core/math.hpp"
#include "../cuda/device_passes.hpp"
#include "../cuda/device_watch.hpp"
#include "../cuda/runtime.hpp"

namespace gradsync::inline v0_2 {

namespace detail {

/// Collectives of device buffers over a backend of host memory, piece by piece through pinned memory. While one piece travels to the host,
/// another is reduced there and a third travels back.
///
/// Pieces start on the host in the order of the collectives, so the order is the same on all ranks. A thread advances them, and so do
/// `test`, `wait` and `progress`. Thread-safe.
template <Backend Host>
class StagingEngine final : collective::ProgressHook {
    using Clock = std::chrono::steady_clock;
    using Call = collective::Call;
    using Operation = collective::Operation;

public:
    /// State that the communicators of one origin share.
    struct Watch {
        collective::ProgressHooks hooks;
        DeviceWatch thread;
        explicit Watch(int device) : thread(device, hooks) {}
    };

    StagingEngine(Host host, std::shared_ptr<Watch> watch, std::size_t piece_bytes, cudaStream_t compute)
        : host_(std::move(host)),
          watch_(std::move(watch)),
          piece_bytes_(piece_bytes),
          compute_(compute),
          down_(cuda::make_stream()),
          up_(cuda::make_stream()) {
        for (Slot& slot : slots_) slot.copied = cuda::make_event();
        watch_->hooks.enlist(*this);
    }
    ~StagingEngine() {
        watch_->hooks.dismiss(*this);
        settle_copies();
    }
    StagingEngine(const StagingEngine&) = delete;
    StagingEngine& operator=(const StagingEngine&) = delete;

    Host& host() noexcept { return host_; }
    std::chrono::nanoseconds timeout() const noexcept { return host_.timeout(); }
    std::size_t next_number() noexcept { return next_owner(host_); }
    const std::shared_ptr<Watch>& watch() const noexcept { return watch_; }
    std::size_t piece_bytes() const noexcept { return piece_bytes_; }

    cudaStream_t compute_stream() const noexcept { return compute_.load(std::memory_order_relaxed); }
    void set_compute_stream(cudaStream_t stream) noexcept { compute_.store(stream, std::memory_order_relaxed); }

    std::uint64_t start(const Call& call) {
        const std::lock_guard lock(mutex_);
        if (failed_) throw Error(*failed_);
        Started started{.call = call, .pieces = pieces_of(call)};
        started.ready = take_event();
        cuda::check(cudaEventRecord(started.ready.get(), compute_stream()), "cudaEventRecord");
        started_.push_back(std::move(started));
        ++next_;
        advance();
        watch_->thread.wake();
        return next_ - 1;
    }

    bool test(std::uint64_t n) {
        const std::lock_guard lock(mutex_);
        advance();
        if (n < first_) return true;
        if (failed_) throw Error(*failed_);
        return false;
    }

    /// Repeated tests time out in the host's backend, which knows the limit and which rank to name.
    void look(std::uint64_t n, collective::Deadline&) {
        const std::lock_guard lock(mutex_);
        if (n < first_ || failed_ || oldest_ == reducing_ || slot_of(oldest_).stage != Slot::Stage::reducing) return;
        on_host([&] { slot_of(oldest_).work.test(); });
    }

    void wait(std::uint64_t n) {
        wait_until([&] { return n < first_; });
    }

    /// Returns once the rest of collective n is on its way back to the device.
    void wait_on(std::uint64_t n, cudaStream_t stream) {
        wait_until([&] { return n < first_ || started(n).returning == started(n).pieces; });
        const std::lock_guard lock(mutex_);
        const cuda::Event event = cuda::make_event();
        cuda::order(up_.get(), stream, event);
    }

    void progress() noexcept { try_advance(); }

    void abandon(std::uint64_t n) noexcept {
        std::string what;
        {
            const std::lock_guard lock(mutex_);
            advance();
            if (n < first_ || (n < next_ && started(n).returning == started(n).pieces)) return;
            what = collective::name_of(started(n).call, n);
        }
        fail("dropped " + what + " before it was complete; keep the Work and wait() for it");
    }

    /// Buffers of collectives are not touched afterwards.
    void fail(const std::string& what) noexcept {
        host_.fail(what);
        settle_copies();
    }

private:
    static constexpr std::size_t slot_count = 4;

    /// A collective; its pieces start and return in order.
    struct Started {
        Call call;
        std::size_t pieces = 1;
        std::size_t opened = 0;     ///< pieces that have left the device
        std::size_t returning = 0;  ///< pieces whose copies back have begun
        std::size_t over = 0;
        cuda::Event ready = {};  ///< marks the compute stream's earlier work
    };

    /// The host buffers and state of one piece.
    struct Slot {
        enum class Stage { free, leaving, reducing, returning };
        Stage stage = Stage::free;
        std::uint64_t number = 0;  ///< number of its collective
        Call call;                 ///< with the host's buffers
        void* out = nullptr;       ///< destination on the device
        cuda::PinnedMemory in_memory, out_memory;
        cuda::Event copied;
        typename Host::WorkType work;
    };

    static bool divides(Operation operation) noexcept {
        return operation == Operation::all_reduce || operation == Operation::reduce || operation == Operation::broadcast;
    }
    std::size_t elements_of_piece(const Call& call) const noexcept { return piece_bytes_ / size_of(call.dtype); }
    std::size_t pieces_of(const Call& call) const noexcept {
        const std::size_t each = elements_of_piece(call);
        return divides(call.operation) && call.in_count > each ? divide_up(call.in_count, each) : 1;
    }

    void try_advance() noexcept override {
        const std::unique_lock lock(mutex_, std::try_to_lock);
        if (lock) advance();
    }

    // All functions below require the mutex.

    Started& started(std::uint64_t n) noexcept { return started_[static_cast<std::size_t>(n - first_)]; }

    /// Pieces are numbered across collectives; the number selects the slot.
    Slot& slot_of(std::uint64_t piece) noexcept { return slots_[piece % slot_count]; }

    void advance() noexcept {
        if (failed_) return;
        try {
            host_.progress();
            while (oldest_ < reducing_ && comes_back(slot_of(oldest_))) ++oldest_;
            while (reducing_ < opened_ && cuda::is_over(slot_of(reducing_).copied)) start_on_host(slot_of(reducing_++));
            for (std::uint64_t p = oldest_; p < reducing_; ++p) return_to_device(slot_of(p));
            while (opened_ - oldest_ < slot_count && opening_ < next_) open(slot_of(opened_));
        } catch (const Error& error) {
            failed_ = std::make_unique<Error>(error);
            settle_copies();
        }
    }

    /// Sends the next piece off the device.
    void open(Slot& slot) {
        Started& whole = started(opening_);
        const Call& call = whole.call;
        const std::size_t width = size_of(call.dtype);
        slot.number = opening_;
        slot.call = call;
        std::size_t first = 0;
        if (divides(call.operation)) {
            const std::size_t each = elements_of_piece(call);
            first = whole.opened * each;
            slot.call.in_count = slot.call.out_count = call.in_count - first < each ? call.in_count - first : each;
        }
        const auto* const in = static_cast<const std::byte*>(call.in) + first * width;
        const bool in_place = divides(call.operation);
        const int rank = host_.rank();
        const bool reads = call.operation != Operation::broadcast || rank == call.root;
        const bool writes = (call.operation != Operation::reduce && call.operation != Operation::gather) || rank == call.root;
        const std::size_t in_bytes = slot.call.in_count * width, out_bytes = slot.call.out_count * width;
        make_room(slot.in_memory, in_bytes);
        if (!in_place) make_room(slot.out_memory, out_bytes);
        slot.call.in = slot.in_memory.data();
        slot.call.out = in_place ? slot.in_memory.data() : slot.out_memory.data();
        slot.out = writes && out_bytes != 0 ? static_cast<std::byte*>(call.out) + first * width : nullptr;
        if (whole.opened == 0) cuda::check(cudaStreamWaitEvent(down_.get(), whole.ready.get(), 0), "cudaStreamWaitEvent");
        if (reads && in_bytes != 0)
            cuda::check(cudaMemcpyAsync(slot.in_memory.data(), in, in_bytes, cudaMemcpyDeviceToHost, down_.get()), "cudaMemcpyAsync");
        cuda::check(cudaEventRecord(slot.copied.get(), down_.get()), "cudaEventRecord");
        slot.stage = Slot::Stage::leaving;
        ++opened_;
        if (++whole.opened == whole.pieces) ++opening_;
    }

    void start_on_host(Slot& slot) {
        const Call& call = slot.call;
        const BufferView out{call.out, call.out_count, call.dtype, MemorySpace::host};
        const ConstBufferView in{call.in, call.in_count, call.dtype, MemorySpace::host};
        set_tag(host_, collective::is_rooted(call.operation) ? CollectiveTag() : CollectiveTag::from_code(call.root));
        switch (call.operation) {
            case Operation::all_reduce: slot.work = host_.all_reduce(out, call.op, call.contribution); break;
            case Operation::reduce: slot.work = host_.reduce(out, call.op, call.root, call.contribution); break;
            case Operation::reduce_scatter: slot.work = host_.reduce_scatter(in, out, call.op, call.contribution); break;
            case Operation::all_gather: slot.work = host_.all_gather(in, out); break;
            case Operation::broadcast: slot.work = host_.broadcast(out, call.root); break;
            case Operation::gather: slot.work = host_.gather(in, out, call.root); break;
            case Operation::scatter: slot.work = host_.scatter(in, out, call.root); break;
            case Operation::barrier: slot.work = host_.barrier(); break;
        }
        slot.stage = Slot::Stage::reducing;
    }

    void return_to_device(Slot& slot) {
        if (slot.stage != Slot::Stage::reducing || !poll_work(slot.work)) return;
        if (slot.out != nullptr)
            cuda::check(
                cudaMemcpyAsync(slot.out, slot.call.out, slot.call.out_count * size_of(slot.call.dtype), cudaMemcpyHostToDevice, up_.get()),
                "cudaMemcpyAsync");
        cuda::check(cudaEventRecord(slot.copied.get(), up_.get()), "cudaEventRecord");
        slot.stage = Slot::Stage::returning;
        ++started(slot.number).returning;
    }

    /// Returns whether the piece is back on the device.
    bool comes_back(Slot& slot) {
        if (slot.stage != Slot::Stage::returning || !cuda::is_over(slot.copied)) return false;
        slot.stage = Slot::Stage::free;
        Started& whole = started(slot.number);
        if (++whole.over == whole.pieces) {
            spare_events_.push_back(std::move(whole.ready));
            started_.pop_front();  // its pieces are the oldest
            ++first_;
        }
        return true;
    }

    template <class Predicate>
    void wait_until(Predicate&& over) {
        constexpr int spins = 200;
        for (int idle = 0;; ++idle) {
            {
                const std::lock_guard lock(mutex_);
                const std::uint64_t before = oldest_ + reducing_ + opened_;
                advance();
                if (over()) return;
                if (failed_) throw Error(*failed_);
                if (oldest_ + reducing_ + opened_ != before) idle = 0;
                if (idle >= spins && oldest_ < reducing_ && slot_of(oldest_).stage == Slot::Stage::reducing)
                    on_host([&] { slot_of(oldest_).work.wait(); });
            }
            if (idle < spins) std::this_thread::yield();
            else std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
    }

    /// The host's backend knows how to wait, for how long, and which rank to name.
    template <class F>
    void on_host(F&& f) {
        try {
            f();
        } catch (const Error& error) {
            failed_ = std::make_unique<Error>(error);
            settle_copies();
        }
    }

    void settle_copies() noexcept {
        cudaStreamSynchronize(down_.get());
        cudaStreamSynchronize(up_.get());
    }

    static void make_room(cuda::PinnedMemory& memory, std::size_t bytes) {
        if (memory.bytes() < bytes) memory = cuda::PinnedMemory(bytes);
    }

    cuda::Event take_event() {
        if (spare_events_.empty()) return cuda::make_event();
        cuda::Event event = std::move(spare_events_.back());
        spare_events_.pop_back();
        return event;
    }

    Host host_;
    const std::shared_ptr<Watch> watch_;
    const std::size_t piece_bytes_;

    std::atomic<cudaStream_t> compute_;
    std::mutex mutex_;
    cuda::Stream down_, up_;
    std::array<Slot, slot_count> slots_;
    std::deque<Started> started_;  ///< collectives first_ to next_
    std::vector<cuda::Event> spare_events_;
    std::uint64_t first_ = 0, next_ = 0;
    std::uint64_t opening_ = 0;                             ///< the collective whose pieces leave
    std::uint64_t oldest_ = 0, reducing_ = 0, opened_ = 0;  ///< first pieces that are not back, not started on the host, and not off the
                                                            ///< device yet
    std::unique_ptr<Error> failed_;
};

}  // namespace detail

/// Options of `StagingBackend`, the same on all ranks.
struct StagingOptions {
    cudaStream_t stream = nullptr;                   ///< the stream that writes and reads buffers; `set_stream` changes it
    std::size_t piece_bytes = std::size_t{4} << 20;  ///< size of one copy
};

/// Device buffers over a backend that reads host memory only (ThreadBackend, MpiBackend, TcpBackend). Buffers are copied to the host,
/// reduced there and copied back, in pieces that overlap. For machines whose devices NCCL does not connect, and for the host backend's
/// bits.
///
/// - A collective reads its buffers after all work that is on the compute stream when it is started. A thread of the library advances the
///   copies and the host's collectives during the backward. If the host's messages are MPI's, MPI must allow calls from any thread
///   (MPI_THREAD_MULTIPLE).
/// - `Work::wait_on(stream)` blocks the host until the result is on its way back, and makes the stream wait for the rest.
/// - The device of a handle must be the calling thread's current device.
template <Backend Host>
class StagingBackend : public detail::EngineCollectives<StagingBackend<Host>, detail::StagingEngine<Host>, MemorySpace::device> {
    using Engine = detail::StagingEngine<Host>;
    using Base = detail::EngineCollectives<StagingBackend, Engine, MemorySpace::device>;

public:
    static constexpr BackendAbilities abilities{.poll = true, .wait_on = true, .tags = abilities_of<Host>.tags, .device_passes = true};

    /// Duplicates `host`, twice: collective. Uses the calling thread's current device. Throws Error(invalid_argument) if `piece_bytes` is
    /// less than 64.
    explicit StagingBackend(Host host, StagingOptions options = {})
        : StagingBackend(host, options, std::make_shared<typename Engine::Watch>(current_device())) {}

    int rank() const noexcept { return host_.rank(); }
    int size() const noexcept { return host_.size(); }
    std::string describe() const { return std::string(host_.describe()) + ", device buffers copied through the host"; }

    void set_stream(cudaStream_t stream) noexcept { engine_->set_compute_stream(stream); }
    cudaStream_t stream() const noexcept { return engine_->compute_stream(); }

    /// The passes that a Reducer makes over device memory, on the compute stream.
    detail::DevicePasses<Engine> passes() const { return detail::DevicePasses<Engine>(engine_); }

    /// A backend of the same ranks, for what they exchange in host memory.
    Host& host() noexcept { return host_; }

    std::chrono::nanoseconds timeout() const noexcept { return host_.timeout(); }
    void set_timeout(std::chrono::nanoseconds limit) {
        host_.set_timeout(limit);  // first: throws if this was moved from
        engine_->host().set_timeout(limit);
    }
    std::chrono::nanoseconds progress_time() const noexcept { return engine_->host().progress_time(); }
    void fail(const std::string& what) noexcept { engine_->fail(what); }

    StagingBackend split(int color, int key) {
        Host host = host_.split(color, key);
        return StagingBackend(host, {engine_->compute_stream(), engine_->piece_bytes()}, engine_->watch());
    }
    StagingBackend duplicate() { return split(0, 0); }

    collective::Memory allocate(std::size_t bytes) {
        return bytes == 0 ? collective::Memory() : collective::Memory::of(cuda::DeviceMemory(bytes));
    }

private:
    friend Base;

    StagingBackend(Host& host, StagingOptions options, std::shared_ptr<typename Engine::Watch> watch)
        : engine_(std::make_shared<Engine>(host.duplicate(), std::move(watch), checked(options.piece_bytes), options.stream)),
          host_(host.duplicate()) {}

    static std::size_t checked(std::size_t piece_bytes) {
        if (piece_bytes < 64) throw Error(Errc::invalid_argument, "StagingBackend: pieces must have 64 bytes at least");
        return piece_bytes;
    }
    static int current_device() {
        int device = 0;
        cuda::check(cudaGetDevice(&device), "cudaGetDevice");
        return device;
    }

    int world_rank() const noexcept { return rank(); }
    const std::shared_ptr<Engine>& shared_engine() const noexcept { return engine_; }

    std::shared_ptr<Engine> engine_;
    Host host_;
};

}  // namespace gradsync::inline v0_2
