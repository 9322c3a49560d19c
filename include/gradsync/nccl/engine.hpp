// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../cuda/device_watch.hpp"
#include "channel.hpp"
#include "memory.hpp"

namespace gradsync::inline v0_2::detail {

/// A communicator whose data NCCL moves between device buffers, on a stream of its own.
///
/// With every collective, each rank tells each other rank what it has started (`control`, on the host; no device waits
/// for it). So mismatched, missing, leaving and dead ranks are detected and named, as on every other backend. NCCL's
/// work in flight is then aborted on every rank.
class NcclEngine final : public collective::Engine, public std::enable_shared_from_this<NcclEngine> {
    using Clock = std::chrono::steady_clock;
    using MessageEngine = message_passing::MessageEngine;

public:
    /// The most collectives in flight; a further start waits. Fewer than `control` takes, and at most what
    /// `Call::followers` can count.
    static constexpr std::size_t slots = 128;

    static constexpr std::chrono::seconds patience{10};  ///< how long to wait for aborted work
    /// How long to wait for the lost rank that may have caused NCCL's failure.
    static constexpr std::chrono::milliseconds grace{500};

    NcclEngine(Shared<MessageEngine> control, std::shared_ptr<DeviceWatch> watch, NcclCommunicator comm,
               NcclSettings settings)
        : Engine(control->world_ranks(), control->rank(), control->timeout()),
          control_(std::move(control)),
          watch_(std::move(watch)),
          settings_(settings),
          channel_(std::move(comm), rank(), size(), slots) {
        for (std::uint64_t place = 0; place < slots; ++place) {
            started_[place].begin = cuda::make_event();
            started_[place].end = cuda::make_event();
        }
        world().hooks().enlist(*this);
    }
    /// Waits for work on the stream, up to the time limit, then aborts it.
    ~NcclEngine() override {
        world().hooks().dismiss(*this);
        poll_until(Clock::now() + timeout(), std::chrono::microseconds(50), [this] {
            if (world().failed() || is_idle(channel_.stream())) return true;
            const std::lock_guard lock(mutex_);
            if (started_.first() != issued_) has_failed_in_nccl();
            return false;
        });
        const std::lock_guard lock(mutex_);
        if (world().failed() || !is_idle(channel_.stream())) channel_.communicator().abort();
    }

    collective::World& world() const noexcept override { return control_->world(); }
    const Shared<MessageEngine>& control() const noexcept { return control_; }

    void set_timeout(std::chrono::nanoseconds limit) noexcept override {
        Engine::set_timeout(limit);
        control_->set_timeout(limit);
    }

    cudaStream_t compute_stream() const noexcept { return compute_.load(std::memory_order_relaxed); }
    /// Collectives started earlier stay ordered after the previous compute stream.
    void set_compute_stream(cudaStream_t stream) noexcept {
        const std::lock_guard lock(mutex_);
        issue();
        compute_.store(stream, std::memory_order_relaxed);
    }

    void use_own_stream() {
        if (own_stream_.get() != nullptr) return;
        own_stream_ = cuda::make_stream(true);
        users_stream_ = compute_stream();
        set_compute_stream(own_stream_.get());
    }

    std::size_t group_bytes() const noexcept { return settings_.group_bytes; }
    /// Calls that start before `close_group()` are launched together there.
    void open_group() noexcept {
        const std::lock_guard lock(mutex_);
        ++open_groups_;
    }
    /// `left`: an exception ended the group. It is incomplete, so nothing is launched;
    /// its dropped Works fail the world.
    void close_group(bool left) noexcept {
        const std::lock_guard lock(mutex_);
        if (--open_groups_ == 0 && !left) issue();
    }

    /// Throws Error(invalid_argument), on all ranks, if they cannot add up elements of this type.
    void check_reduces(DType dtype, const char* operation) const {
        if (!is_float8(dtype) || settings_.no_float8.empty()) return;
        raise(Errc::invalid_argument, {.operation = operation, .rank = own_world_rank()}, operation, ": NCCL adds up ",
              dtype, " from 2.24.3 on, on devices of compute capability 9.0 and later, but ", settings_.no_float8,
              "; let gradients travel in another type (ReducerOptions::reduce_dtype)");
    }

    std::uint64_t start(const Call& call, ShardStep* = nullptr) override {
        NcclChannel::check(call);
        if (collective::reduces(call.operation)) check_reduces(call.dtype, collective::name_of(call.operation).data());
        return start_in_turn(call.operation, [&](std::uint64_t& oldest) -> std::optional<std::uint64_t> {
            std::lock_guard lock(mutex_);
            if (started_.size() == slots) advance();
            oldest = started_.first();
            if (world().failed() || started_.size() == slots) return std::nullopt;
            const std::uint64_t n = started_.add([&](Started& started, std::uint64_t) { started.call = call; });
            if (open_groups_ == 0) issue();
            return n;
        });
    }

    void progress() noexcept override {
        {
            std::unique_lock lock(mutex_, std::try_to_lock);
            if (!lock) return control_->progress();
            advance();
            if (started_.first() != issued_) look_after_oldest();
            if (world().failed()) abort();
        }
        if (world().failed() && !told_.exchange(true, std::memory_order_relaxed)) control_->world().deliver();
    }
    std::chrono::nanoseconds progress_time() const noexcept override { return {}; }  // the host does no work

    bool test(std::uint64_t n) override {
        {
            std::lock_guard lock(mutex_);
            if (n >= issued_ && open_groups_ == 0) issue();  // an exception ended its group, but its Work was kept
        }
        return Engine::test(n);
    }

    std::optional<Call> advance_to(std::uint64_t n) noexcept override {
        std::lock_guard lock(mutex_);
        advance();
        return started_.is_over(n) ? std::nullopt : std::optional(started_[n].call);
    }

    void look(std::uint64_t n, collective::Deadline& deadline) override {
        std::uint64_t met;
        Call call;
        {
            std::lock_guard lock(mutex_);
            if (started_.is_over(n) || n >= issued_ || world().failed()) return;
            met = started_[n].met;
            call = started_[n].call;
        }
        control_->look(met, deadline);  // names the missing ranks; only then may a time-out be reported
        if (!control_->done(met)) return;
        deadline.look(timeout(), [&](std::chrono::nanoseconds) {
            fail(collective::timed_out(collective::name_of(call, n), {}, own_world_rank(), timeout()));
        });
    }

    /// Blocks the host. Launches an open group.
    void wait(std::uint64_t n) override {
        {
            std::lock_guard lock(mutex_);
            if (n >= issued_) issue();
        }
        Engine::wait(n);
    }

    /// Makes `stream` wait, not the host. The time limit still applies, from the moment at which the collective's turn
    /// comes on its own stream.
    void wait_on(std::uint64_t n, cudaStream_t stream) {
        std::unique_lock lock(mutex_);
        if (n >= issued_) issue();
        if (started_.is_over(n)) return;
        const collective::Operation operation = started_[n].call.operation;
        if (world().failed()) {
            lock.unlock();
            throw_failure(operation);
        }
        cuda::check(cudaStreamWaitEvent(stream, started_[started_[n].last].end.get(), 0), "cudaStreamWaitEvent");
    }

    void fail(const collective::Failure& failure) noexcept override {
        control_->fail(failure);
        become_quiet();
    }

    Shared<collective::Engine> split(const collective::Group& group) override {
        NcclSettings settings = settings_;
        // Not own_stream_, which dies with this object.
        settings.compute = compute_stream() == own_stream_.get() ? users_stream_ : compute_stream();
        {
            const std::lock_guard lock(mutex_);
            settings.memory = memory_.choice();
        }
        auto control = control_->split(group).as<MessageEngine>();
        NcclCommunicator comm = NcclCommunicator::make(*control, settings.max_ctas);
        return std::make_shared<NcclEngine>(std::move(control), watch_, std::move(comm), settings);
    }

    collective::Memory allocate(std::size_t bytes) override { return memory_.allocate(*this, bytes); }
    std::string describe_memory() {
        const std::lock_guard lock(mutex_);
        return memory_.describe();
    }

    // ------------------------------------------------------------------------------------ for NcclAllocator; see there

    template <class Use>
    void with_communicator(Clock::time_point deadline, const std::string& what, Use&& use) {
        const std::lock_guard lock(mutex_);
        use(channel_.communicator(), [&] {
            look_after_ranks();
            if (Clock::now() >= deadline) world().fail(collective::timed_out(what, {}, own_world_rank(), timeout()));
            return !world().failed();
        });
    }
    void fail_on_device(const std::string& what, const std::string& why) noexcept {
        const std::lock_guard lock(mutex_);
        hold_back();
        if (!world().failed()) fail_device(what, why);
    }
    /// After a failure of the world: waits until nothing on the device touches the buffers
    /// of collectives, at most for `patience`.
    void become_quiet() noexcept {
        poll_until(Clock::now() + patience, std::chrono::microseconds(100), [this] {
            std::lock_guard lock(mutex_);
            abort();
            return channel_.communicator().aborted() && is_idle(channel_.stream());
        });
    }
    bool is_idle() const noexcept { return is_idle(compute_stream()) && is_idle(channel_.stream()); }

private:
    struct Started {
        Call call;
        std::uint64_t met = 0;   ///< number of the `control` call in which ranks say what they have started
        std::uint64_t last = 0;  ///< last collective of its launch, which holds the launch's events
        cuda::Event begin, end;
        Clock::time_point begun_at{};  ///< when its turn on the stream was seen to have come
    };

    static bool is_idle(cudaStream_t stream) noexcept {
        return cuda::answer(cudaStreamQuery(stream)) != cudaErrorNotReady;
    }

    // Everything below requires the mutex.

    /// Enqueues started collectives on the stream, as one launch. No-op after a failure.
    void issue() noexcept {
        if (issued_ == started_.next() || world().failed()) return;
        const std::uint64_t first = issued_, last = started_.next() - 1;
        Started& group = started_[last];
        group.begun_at = {};
        try {
            for (std::uint64_t n = first; n <= last; ++n) {
                Started& started = started_[n];
                started.last = last;
                started.call.followers = (last - n) & 0x7f;
                Call met = started.call;
                met.elsewhere = true;
                started.met = control_->start(met);
            }
        } catch (const std::exception& error) {
            if (!world().failed()) fail_device(name_of(first), error.what());
            return;
        }
        issued_ = last + 1;
        try {
            cuda::order(compute_stream(), channel_.stream(), ready_);
            cuda::check(cudaEventRecord(group.begin.get(), channel_.stream()), "cudaEventRecord");
            for (std::uint64_t n = first; n <= last; ++n) channel_.add(started_[n].call, n % slots);
            // NCCL may have to wait for other ranks, to connect with them.
            channel_.launch([this, first, deadline = Clock::now() + timeout()] {
                look_after_ranks();
                if (Clock::now() >= deadline) world().fail(timed_out(first));
                return !world().failed();
            });
            cuda::check(cudaEventRecord(group.end.get(), channel_.stream()), "cudaEventRecord");
        } catch (const std::exception& error) {
            const bool had_failed = reported_at_ != Clock::time_point{};
            const std::uint64_t culprit = first + channel_.culprit();
            hold_back();
            fail_device(name_of(had_failed ? started_.first() : culprit <= last ? culprit : first), error.what());
        }
        watch_->wake();
    }

    std::string name_of(std::uint64_t n) { return collective::name_of(started_[n].call, n); }

    /// Counts complete collectives. They end in the order of their start, on one stream. Those that ended before a
    /// failure count, unless NCCL was aborted or reports an error.
    void advance() noexcept {
        try {
            started_.retire([this](const Started& oldest) {
                return started_.first() < issued_ && channel_.communicator().get() != nullptr &&
                       cuda::is_over(started_[oldest.last].end) && !has_failed_in_nccl() &&
                       !control_->advance_to(oldest.met);
            });
        } catch (const Error& error) {
            if (!world().failed()) return fail_device("the device's work", error.what());
        }
        if (world().failed()) abort();
    }

    /// Detects failures and time-outs that a non-waiting host would miss.
    void look_after_oldest() noexcept {
        look_after_ranks();
        if (world().failed()) return;
        if (has_failed_in_nccl()) return;
        Started& group = started_[started_.oldest().last];
        if (cuda::answer(cudaEventQuery(group.begin.get())) != cudaSuccess)
            return;  // its turn has not come; the device still computes
        const auto now = Clock::now();
        if (group.begun_at == Clock::time_point{}) group.begun_at = now;
        if (now - group.begun_at >= timeout()) world().fail(timed_out(started_.first()));
    }

    void look_after_ranks() noexcept {
        control_->progress();
        const auto now = Clock::now();
        if (now < next_look_) return;
        next_look_ = now + std::chrono::milliseconds(5);
        control_->look_for_missing();
    }

    collective::Failure timed_out(std::uint64_t n) {
        return collective::timed_out(name_of(n), control_->late(started_[n].met), own_world_rank(), timeout());
    }

    /// NCCL has reported a failure, perhaps because another rank is gone whose host connections have not closed yet.
    /// NCCL cannot name the rank; the connections can. Checks them, and returns true if it must check again.
    bool seek_culprit() noexcept {
        look_after_ranks();
        const auto now = Clock::now();
        if (reported_at_ == Clock::time_point{}) reported_at_ = now;
        return size() > 1 && !world().failed() && now - reported_at_ < grace;
    }

    /// Call it in an exception handler. After an NCCL error it waits until the lost rank is named, or `grace` is over.
    void hold_back() noexcept {
        try {
            throw;
        } catch (const NcclError&) {
            while (seek_culprit()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        } catch (...) {
        }
    }
    /// Has NCCL reported an error while collectives are in flight? The world then fails, after other
    /// ranks had a moment to be named.
    bool has_failed_in_nccl() noexcept {
        const std::string problem = channel_.communicator().problem();
        if (problem.empty()) return false;
        if (!seek_culprit()) fail_device(name_of(started_.first()), problem);
        return true;
    }

    void fail_device(const std::string& what, const std::string& why) noexcept {
        const int self = own_world_rank();
        world().fail({Errc::device_failed, self, text("rank ", self, ": ", what, " failed on its device: ", why)});
        abort();
    }

    void abort() noexcept { channel_.communicator().abort(); }

    const Shared<MessageEngine> control_;
    const std::shared_ptr<DeviceWatch> watch_;
    const NcclSettings settings_;
    std::atomic<cudaStream_t> compute_{settings_.compute};
    cuda::Stream own_stream_;
    cudaStream_t users_stream_ = nullptr;  ///< before `own_stream_`

    std::mutex mutex_;
    NcclAllocator<NcclEngine> memory_{settings_.memory};
    NcclChannel channel_;
    cuda::Event ready_ = cuda::make_event();
    collective::InFlight<Started> started_{slots};
    std::uint64_t issued_ = 0;  ///< all lower numbers are on the stream
    int open_groups_ = 0;
    Clock::time_point next_look_{};
    Clock::time_point reported_at_{};  ///< when NCCL was seen to have failed
    std::atomic<bool> told_{false};    ///< the other ranks know of the failure
};

}  // namespace gradsync::inline v0_2::detail
