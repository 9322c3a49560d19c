// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <sys/mman.h>

#include <new>

#include "communicator.hpp"

namespace gradsync::inline v0_2::simulation {

/// One rank's side of a communicator, in virtual time. Only the rank's own thread may start, test, wait, split or let time pass.
class Engine final : public collective::Member {
public:
    Engine(std::shared_ptr<Communicator> communicator, int rank, std::chrono::nanoseconds timeout)
        : Member(communicator->world_ranks(), rank, timeout), communicator_(std::move(communicator)) {}
    ~Engine() {
        const auto lock = scheduler().lock();
        communicator_->leave(rank());
    }

    Simulation& world() const noexcept { return communicator_->simulation(); }

    std::uint64_t start(const Call& call) {
        const auto lock = locked_by_own_thread();
        if (world().failed()) throw_failure(call.operation);
        const std::uint64_t n = communicator_->arrive(rank(), call);
        if (world().failed()) throw_failure(call.operation);
        return n;
    }

    bool test(std::uint64_t n) {
        auto lock = locked_by_own_thread();
        if (!world().failed() && !communicator_->is_placed(n)) {
            // Other ranks may still act before the time of this rank's clock.
            if (!scheduler().settle(own()) && !world().failed()) scheduler().yield(lock, own());
            if (!world().failed()) scheduler().settle(own());
        }
        if (communicator_->is_through(n, rank())) {
            communicator_->retire(n);
            return true;
        }
        if (world().failed()) throw_failure(communicator_->name(n).operation);
        if (++polls_ < polls_of_a_spin) return false;
        // A rank that only polls is treated as waiting.
        polls_ = 0;
        if (communicator_->is_placed(n)) scheduler().advance_to(own(), communicator_->end(n));
        else communicator_->nap(lock, n, rank(), timeout());
        return false;
    }

    void wait(std::uint64_t n) {
        auto lock = locked_by_own_thread();
        if (!communicator_->is_through(n, rank())) {
            if (!communicator_->await(lock, n, rank(), timeout())) throw_failure(communicator_->name(n).operation);
            scheduler().advance_to(own(), communicator_->end(n));
            polls_ = 0;
        }
        communicator_->retire(n);
    }

    void abandon(std::uint64_t n) noexcept {
        const auto lock = scheduler().lock();
        if (communicator_->is_through(n, rank())) return communicator_->retire(n);
        if (!world().failed()) world().fail(collective::abandoned(name_of(communicator_->name(n), n), own()));
    }

    void fail(const collective::Failure& failure) noexcept {
        const auto lock = scheduler().lock();
        world().fail(failure);
    }

    void progress() noexcept {
        auto lock = scheduler().lock();
        if (scheduler().is_thread_of(own())) scheduler().yield(lock, own());
    }
    std::chrono::nanoseconds progress_time() const noexcept { return {}; }

    void set_timeout(std::chrono::nanoseconds limit) noexcept {
        const auto lock = scheduler().lock();
        Member::set_timeout(limit);
        world().set_limit(own(), limit);
    }

    std::shared_ptr<Engine> split(const collective::Group& group) {
        const auto lock = locked_by_own_thread();
        return std::make_shared<Engine>(communicator_->meet(group, world_ranks_of(group)), group.rank, timeout());
    }

    /// Zeroed memory that takes no physical memory until it is written, so that thousands of ranks can have buckets each.
    collective::Memory allocate(std::size_t bytes) {
        if (bytes == 0) return {};
        void* const data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (data == MAP_FAILED) throw std::bad_alloc();
        const auto take_back = [communicator = communicator_, bytes](void* region) {
            {
                const auto lock = communicator->simulation().scheduler.lock();
                communicator->simulation().remove_region(region);
            }
            ::munmap(region, bytes);
        };
        collective::Memory memory(std::shared_ptr<void>(data, take_back));
        const auto lock = scheduler().lock();
        world().add_region(data, bytes);
        return memory;
    }

    // ---------------------------------------------------------------------------------------------------- virtual time

    double now() const {
        const auto lock = scheduler().lock();
        return scheduler().now(own());
    }
    void pass(double seconds) {
        const auto lock = locked_by_own_thread();
        scheduler().advance_to(own(), scheduler().now(own()) + seconds);
        polls_ = 0;
    }

private:
    int own() const noexcept { return own_world_rank(); }
    Scheduler& scheduler() const noexcept { return communicator_->simulation().scheduler; }

    Scheduler::Lock locked_by_own_thread() const {
        auto lock = scheduler().lock();
        if (!scheduler().is_thread_of(own()))
            detail::raise(Errc::invalid_argument,
                          "a rank of a simulation has one thread, which run_simulated has started; let that one communicate "
                          "(Progress::polls, not Progress::thread)",
                          {.operation = "SimulatedBackend", .rank = own()});
        return lock;
    }

    [[noreturn]] void throw_failure(collective::Operation operation) const {
        collective::Failure failure = world().failure();
        if (failure.message.find(name_of(operation)) == std::string::npos) failure.message = detail::text(operation, ": ", failure.message);
        collective::raise_failure(failure, operation, own());
    }

    static constexpr int polls_of_a_spin = 100;

    std::shared_ptr<Communicator> communicator_;
    int polls_ = 0;  ///< unsuccessful polls since this rank's clock has moved
};

}  // namespace gradsync::inline v0_2::simulation
