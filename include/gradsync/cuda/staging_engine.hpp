// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <memory>
#include <thread>

#include "../collective/deadline.hpp"
#include "../collective/failures.hpp"
#include "../collective/in_flight.hpp"
#include "../core/backend.hpp"
#include "../core/shared.hpp"
#include "device_watch.hpp"

namespace gradsync::inline v0_2::detail {

/// Collectives of device buffers over a backend of host memory, piece by piece through pinned memory. While one piece
/// travels to the host, another is reduced there and a third travels back.
///
/// Pieces start on the host in the order of the collectives, so the order is the same on all ranks. A thread advances
/// them, and so do `test`, `wait` and `progress`. Thread-safe.
template <Backend Host>
class StagingEngine final : collective::ProgressHook {
    using Clock = std::chrono::steady_clock;

public:
    /// The state that the communicators of one origin share.
    struct Watch {
        collective::ProgressHooks hooks;
        DeviceWatch thread;
        explicit Watch(int device) : thread(device, hooks) {}
    };

    StagingEngine(Host host, std::shared_ptr<Watch> watch, std::size_t piece_bytes, cudaStream_t compute)
        : host_(std::move(host)), watch_(std::move(watch)), piece_bytes_(piece_bytes), compute_(compute) {
        for (std::uint64_t place = 0; place < most_pieces; ++place) pieces_[place].copied = cuda::make_event();
        watch_->hooks.enlist(*this);
    }
    ~StagingEngine() {
        watch_->hooks.dismiss(*this);
        settle_copies();
        if (!stalled_) return;
        // A copy may still be in flight, and freeing would wait for it.
        for (std::uint64_t place = 0; place < most_pieces; ++place)
            for (auto* memory : {&pieces_[place].in_memory, &pieces_[place].out_memory})
                leak_until_exit(Shared<cuda::PinnedMemory>::make(std::move(*memory)));
    }
    StagingEngine& operator=(StagingEngine&&) = delete;

    int rank() const noexcept { return host_.rank(); }
    int size() const noexcept { return host_.size(); }
    int world_rank(int r) const { return named_rank(host_, r); }
    int own_world_rank() const { return named_rank(host_); }
    Host& host() noexcept { return host_; }
    std::chrono::nanoseconds timeout() const noexcept { return host_.timeout(); }
    std::size_t next_number() noexcept { return next_owner(host_); }
    const std::shared_ptr<Watch>& watch() const noexcept { return watch_; }
    std::size_t piece_bytes() const noexcept { return piece_bytes_; }

    cudaStream_t compute_stream() const noexcept { return compute_.load(std::memory_order_relaxed); }
    void set_compute_stream(cudaStream_t stream) noexcept { compute_.store(stream, std::memory_order_relaxed); }

    std::uint64_t start(const Call& call, ShardStep*) {
        const std::lock_guard lock(mutex_);
        if (failed_) throw Error(*failed_);
        const std::uint64_t n = started_.add([&](Started& started, std::uint64_t) {
            if (!started.ready) started.ready = cuda::make_event();
            cuda::check(cudaEventRecord(started.ready.get(), compute_stream()), "cudaEventRecord");
            started.call = call;
            const std::size_t each = elements_of_piece(call);
            started.pieces = !has_shards(call.operation) && call.in_count > each ? divide_up(call.in_count, each) : 1;
            started.opened = started.returning = started.over = 0;
        });
        advance();
        watch_->thread.wake();
        return n;
    }

    bool test(std::uint64_t n) {
        const std::lock_guard lock(mutex_);
        advance();
        if (started_.is_over(n)) return true;
        if (failed_) throw Error(*failed_);
        return false;
    }

    /// Repeated tests time out in the host's backend, which knows which rank to name, or here if a stream stalls.
    void look(std::uint64_t n, collective::Deadline& deadline) {
        const std::lock_guard lock(mutex_);
        if (!started_.is_over(n) && !failed_) look_for_delay(deadline);
    }

    void wait(std::uint64_t n) {
        wait_until([&] { return started_.is_over(n); });
    }

    /// Returns once the rest of collective n is on its way back to the device.
    void wait_on(std::uint64_t n, cudaStream_t stream) {
        wait_until([&] { return is_returning(n); });
        const std::lock_guard lock(mutex_);
        const cuda::Event event = cuda::make_event();
        cuda::order(up_.get(), stream, event);
    }

    void progress() noexcept override {
        const std::unique_lock lock(mutex_, std::try_to_lock);
        if (lock) advance();
    }

    void abandon(std::uint64_t n) noexcept {
        std::string what;
        {
            const std::lock_guard lock(mutex_);
            advance();
            if (started_.is_over(n)) return;
            if (is_returning(n)) return settle({&up_});
            what = collective::name_of(started_[n].call, n);
        }
        fail(text("dropped ", what, " before it was complete; keep the Work and wait() for it"));
    }

    /// Afterwards nothing touches the buffers of collectives, unless a stream has stalled for the time limit.
    void fail(const std::string& what) noexcept {
        host_.fail(what);  // without the mutex: it may wait for other ranks
        const std::lock_guard lock(mutex_);
        if (!failed_) keep_error([this] { host_.barrier().wait(); });  // throws the reason
    }

private:
    static constexpr std::size_t most_pieces = 4;  ///< pieces in flight

    /// A collective; its pieces start and return in order.
    struct Started {
        Call call;
        std::size_t pieces = 1;
        std::size_t opened = 0;     ///< pieces copied off the device, or in flight
        std::size_t returning = 0;  ///< pieces whose copies back have begun
        std::size_t over = 0;
        cuda::Event ready = {};  ///< marks the compute stream's earlier work
    };

    /// The host buffers and state of one piece.
    struct Piece {
        std::uint64_t number = 0;  ///< number of its collective
        Call call;                 ///< with the host's buffers
        void* out = nullptr;       ///< destination on the device
        bool returning = false;    ///< its copy back has begun
        cuda::PinnedMemory in_memory, out_memory;
        cuda::Event copied;
        typename Host::WorkType work;
    };

    std::size_t elements_of_piece(const Call& call) const noexcept { return piece_bytes_ / size_of(call.dtype); }

    // All functions below require the mutex.

    /// Is collective n complete, or is the rest of it on its way back to the device?
    bool is_returning(std::uint64_t n) const noexcept {
        return started_.is_over(n) || started_[n].returning == started_[n].pieces;
    }
    /// Is the oldest piece being reduced on the host?
    bool is_reducing() noexcept { return pieces_.first() < reducing_ && !pieces_.oldest().returning; }

    void advance() noexcept {
        if (failed_) return;
        keep_error([this] {
            host_.progress();
            pieces_.retire([this](Piece& oldest) { return comes_back(oldest); });
            while (reducing_ < pieces_.next() && cuda::is_over(pieces_[reducing_].copied))
                start_on_host(pieces_[reducing_++]);
            for (std::uint64_t p = pieces_.first(); p < reducing_; ++p) return_to_device(pieces_[p]);
            while (pieces_.size() < most_pieces && opening_ < started_.next())
                pieces_.add([this](Piece& piece, std::uint64_t) { open(piece); });
        });
    }
    /// Runs `f`, such as a test of the host's backend, which knows the time limit and the rank to name. Keeps an Error
    /// from it for later calls.
    template <class F>
    void keep_error(F&& f) {
        try {
            f();
        } catch (const Error& error) {
            failed_ = std::make_unique<Error>(error);
            settle_copies();
        }
    }

    /// Starts to copy the next piece off the device.
    void open(Piece& piece) {
        Started& whole = started_[opening_];
        const Call& call = whole.call;
        const std::size_t width = size_of(call.dtype), each = elements_of_piece(call), first = whole.opened * each;
        const bool in_place = !has_shards(call.operation);
        piece.number = opening_;
        piece.call = call;
        if (in_place) piece.call.in_count = piece.call.out_count = smaller(call.in_count - first, each);
        const bool reads = call.operation != Operation::broadcast || rank() == call.root;
        const bool writes =
            (call.operation != Operation::reduce && call.operation != Operation::gather) || rank() == call.root;
        const std::size_t in_bytes = piece.call.in_count * width, out_bytes = piece.call.out_count * width;
        make_room(piece.in_memory, in_bytes);
        if (!in_place) make_room(piece.out_memory, out_bytes);
        piece.call.in = piece.in_memory.data();
        piece.call.out = in_place ? piece.in_memory.data() : piece.out_memory.data();
        piece.out = writes && out_bytes != 0 ? static_cast<std::byte*>(call.out) + first * width : nullptr;
        if (whole.opened == 0)
            cuda::check(cudaStreamWaitEvent(down_.get(), whole.ready.get(), 0), "cudaStreamWaitEvent");
        if (reads && in_bytes != 0)
            cuda::copy(piece.in_memory.data(), static_cast<const std::byte*>(call.in) + first * width, in_bytes,
                       cudaMemcpyDeviceToHost, down_.get());
        cuda::check(cudaEventRecord(piece.copied.get(), down_.get()), "cudaEventRecord");
        piece.returning = false;
        if (++whole.opened == whole.pieces) ++opening_;
    }

    void start_on_host(Piece& piece) {
        const Call& call = piece.call;
        const auto out = typed_view(call.out, call.out_count, call.dtype);
        const auto in = typed_view<const void>(call.in, call.in_count, call.dtype);
        set_tag(host_, collective::is_rooted(call.operation) ? CollectiveTag() : CollectiveTag::from_code(call.root));
        switch (call.operation) {
            case Operation::all_reduce: piece.work = host_.all_reduce(out, call.op, call.contribution); break;
            case Operation::reduce: piece.work = host_.reduce(out, call.op, call.root, call.contribution); break;
            case Operation::reduce_scatter:
                piece.work = host_.reduce_scatter(in, out, call.op, call.contribution);
                break;
            case Operation::all_gather: piece.work = host_.all_gather(in, out); break;
            case Operation::broadcast: piece.work = host_.broadcast(out, call.root); break;
            case Operation::gather: piece.work = host_.gather(in, out, call.root); break;
            case Operation::scatter: piece.work = host_.scatter(in, out, call.root); break;
            case Operation::barrier: piece.work = host_.barrier(); break;
            case Operation::reduce_step: break;  // not an ability of this backend
        }
    }

    void return_to_device(Piece& piece) {
        if (piece.returning || !poll_work(piece.work)) return;
        if (piece.out != nullptr)
            cuda::copy(piece.out, piece.call.out, piece.call.out_count * size_of(piece.call.dtype),
                       cudaMemcpyHostToDevice, up_.get());
        cuda::check(cudaEventRecord(piece.copied.get(), up_.get()), "cudaEventRecord");
        piece.returning = true;
        ++started_[piece.number].returning;
    }

    /// Returns whether the piece is back on the device.
    bool comes_back(Piece& piece) {
        if (!piece.returning || !cuda::is_over(piece.copied)) return false;
        ++started_[piece.number].over;
        started_.retire([](const Started& oldest) { return oldest.over == oldest.pieces; });
        return true;
    }

    /// Grows with each step of a piece.
    std::uint64_t moves() const noexcept { return pieces_.first() + reducing_ + pieces_.next(); }

    template <class Predicate>
    void wait_until(Predicate&& over) {
        constexpr int spins = 200;
        collective::Deadline deadline;
        for (int idle = 0;; ++idle) {
            {
                const std::lock_guard lock(mutex_);
                const std::uint64_t before = moves();
                advance();
                if (over()) return;
                if (failed_) throw Error(*failed_);
                if (moves() != before) idle = 0;
                if (idle == 0) deadline = {};
                // A wait on the host also serves this rank's other communicators.
                if (idle >= spins && is_reducing()) keep_error([this] { pieces_.oldest().work.wait(); });
                else if (idle >= spins) look_for_delay(deadline);
            }
            if (idle < spins) std::this_thread::yield();
            else std::this_thread::sleep_for(std::chrono::microseconds(20));
        }
    }

    /// The oldest piece has not moved: has its time limit passed, on the host or on a stream?
    void look_for_delay(collective::Deadline& deadline) {
        if (is_reducing()) keep_error([this] { pieces_.oldest().work.test(); });
        else deadline.look(timeout(), [this](std::chrono::nanoseconds) { report_stall(); });
    }
    /// Fails because the oldest piece has made no progress within the time limit.
    [[gnu::cold]] void report_stall() {
        const Piece& oldest = pieces_.oldest();
        const Started& started = started_[oldest.number];
        const char* const where = oldest.returning               ? "its copies back to the device"
                                  : cuda::is_over(started.ready) ? "its copies to the host"
                                                                 : "the earlier work on the compute stream";
        stalled_ = true;
        const std::string what = text(collective::name_of(started.call, oldest.number), ": ", where,
                                      " did not end within ", format_duration(timeout()),
                                      "; find out what its stream waits for, or raise the limit with set_timeout()");
        host_.fail(what);
        failed_ = std::make_unique<Error>(
            Errc::timeout, text("rank ", own_world_rank(), ": ", what),
            ErrorContext{.operation = name_of(started.call.operation).data(), .rank = own_world_rank()});
    }

    /// Waits for the copies, up to the time limit, unless a stream has stalled before.
    void settle_copies() noexcept { settle({&down_, &up_}); }
    void settle(std::initializer_list<const cuda::Stream*> streams) noexcept {
        const auto until = Clock::now() + (stalled_ ? std::chrono::nanoseconds::zero() : timeout());
        for (const cuda::Stream* stream : streams)
            while (cuda::answer(cudaStreamQuery(stream->get())) == cudaErrorNotReady &&
                   !(stalled_ = Clock::now() >= until))
                std::this_thread::sleep_for(std::chrono::microseconds(20));
    }

    static void make_room(cuda::PinnedMemory& memory, std::size_t bytes) {
        if (memory.bytes() < bytes) memory = cuda::PinnedMemory(bytes);
    }

    Host host_;
    const std::shared_ptr<Watch> watch_;
    const std::size_t piece_bytes_;

    std::atomic<cudaStream_t> compute_;
    std::mutex mutex_;
    cuda::Stream down_ = cuda::make_stream(), up_ = cuda::make_stream();
    collective::InFlight<Started> started_;
    collective::InFlight<Piece> pieces_{most_pieces};  ///< numbered across collectives
    std::uint64_t opening_ = 0;                        ///< the collective whose pieces are being copied off the device
    std::uint64_t reducing_ = 0;                       ///< the first piece not yet started on the host
    std::unique_ptr<Error> failed_;
    std::atomic<bool> stalled_{false};  ///< a stream's work did not end within the time limit
};

}  // namespace gradsync::inline v0_2::detail
