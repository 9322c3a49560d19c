// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "../collective/engine.hpp"
#include "../collective/failures.hpp"
#include "../core/clock.hpp"
#include "../core/error.hpp"
#include "communicator.hpp"
#include "lazy_memory.hpp"
#include "simulation.hpp"

namespace gradsync::inline v0_2::simulation {

/// One rank's side of a communicator, in virtual time. Only the rank's own thread may start, test, wait, split or let time pass.
class Engine final : public collective::Engine {
public:
    Engine(std::shared_ptr<Communicator> communicator, int rank, std::chrono::nanoseconds timeout)
        : communicator_(std::move(communicator)), rank_(rank), timeout_(timeout) {}
    ~Engine() override {
        const auto lock = scheduler().lock();
        communicator_->leave(rank_);
    }

    int rank() const noexcept override { return rank_; }
    int size() const noexcept override { return communicator_->size(); }
    int world_rank(int rank) const noexcept override { return communicator_->world_rank(rank); }
    Simulation& world() const noexcept override { return communicator_->simulation(); }

    std::uint64_t start(const Call& call) override {
        const auto lock = locked_by_own_thread();
        if (world().failed()) throw_failure(call.operation);
        const std::uint64_t n = communicator_->arrive(rank_, call);
        if (world().failed()) throw_failure(call.operation);
        return n;
    }

    bool test(std::uint64_t n) override {
        auto lock = locked_by_own_thread();
        if (!world().failed() && !is_known(n)) {
            // Other ranks may still act before the time of this rank's clock.
            if (!scheduler().settle(own()) && !world().failed()) scheduler().yield(lock, own());
            if (!world().failed()) scheduler().settle(own());
        }
        if (communicator_->is_through(n, rank_)) {
            communicator_->retire(n);
            return true;
        }
        if (world().failed()) throw_failure(communicator_->name(n).operation);
        if (++polls_ < polls_of_a_spin) return false;
        // A rank that only polls is treated as waiting.
        polls_ = 0;
        if (is_known(n)) scheduler().advance_to(own(), communicator_->end(n));
        else communicator_->nap(lock, n, rank_, timeout_);
        return false;
    }

    void look(std::uint64_t, collective::Deadline&) override {}  // testing takes no virtual time

    void wait(std::uint64_t n) override {
        auto lock = locked_by_own_thread();
        if (!communicator_->is_through(n, rank_)) {
            if (!communicator_->await(lock, n, rank_, timeout_)) throw_failure(communicator_->name(n).operation);
            scheduler().advance_to(own(), communicator_->end(n));
            polls_ = 0;
        }
        communicator_->retire(n);
    }

    void abandon(std::uint64_t n) noexcept override {
        const auto lock = scheduler().lock();
        if (communicator_->is_through(n, rank_)) return communicator_->retire(n);
        if (!world().failed()) world().fail(collective::abandoned(name_of(communicator_->name(n), n), own()));
    }

    void fail(const collective::Failure& failure) noexcept override {
        const auto lock = scheduler().lock();
        world().fail(failure);
    }

    void progress() noexcept override {
        auto lock = scheduler().lock();
        if (scheduler().is_thread_of(own())) scheduler().yield(lock, own());
    }
    std::chrono::nanoseconds progress_time() const noexcept override { return {}; }

    std::chrono::nanoseconds timeout() const noexcept override { return timeout_; }
    void set_timeout(std::chrono::nanoseconds limit) noexcept override {
        const auto lock = scheduler().lock();
        timeout_ = limit;
        world().set_limit(own(), limit);
    }

    std::size_t next_number() noexcept override { return numbers_++; }
    std::shared_ptr<collective::Engine> split(const collective::Group& group) override {
        const auto lock = locked_by_own_thread();
        return std::make_shared<Engine>(communicator_->meet(group), group.rank, timeout_);
    }

    collective::Memory allocate(std::size_t bytes) override {
        auto memory = std::make_unique<LazyMemory>(bytes);
        void* const data = memory->data();
        std::shared_ptr<Simulation> simulation = communicator_->shared_simulation();
        {
            const auto lock = scheduler().lock();
            simulation->add_region(data, bytes);
        }
        // The last owner removes the region.
        return collective::Memory(
            std::shared_ptr<void>(data, [kept = std::shared_ptr<LazyMemory>(std::move(memory)), simulation](void* region) {
                const auto lock = simulation->scheduler.lock();
                simulation->remove_region(region);
            }));
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
    int own() const noexcept { return communicator_->world_rank(rank_); }
    Scheduler& scheduler() const noexcept { return communicator_->simulation().scheduler; }

    Scheduler::Lock locked_by_own_thread() const {
        auto lock = scheduler().lock();
        if (!scheduler().is_thread_of(own()))
            throw Error(
                Errc::invalid_argument,
                "a rank of a simulation has one thread, which run_simulated has started; let that one communicate (Progress::polls, not Progress::thread)",
                {.operation = "SimulatedBackend", .rank = own()});
        return lock;
    }

    /// Are the times of collective n known?
    bool is_known(std::uint64_t n) const { return communicator_->is_placed(n); }

    [[noreturn]] void throw_failure(collective::Operation operation) const {
        collective::Failure failure = world().failure();
        const std::string name(name_of(operation));
        if (failure.message.find(name) == std::string::npos) failure.message = name + ": " + failure.message;
        throw collective::as_error(failure, operation, own());
    }

    static constexpr int polls_of_a_spin = 100;

    std::shared_ptr<Communicator> communicator_;
    int rank_;
    std::chrono::nanoseconds timeout_;
    std::size_t numbers_ = 0;
    int polls_ = 0;  ///< unsuccessful polls since this rank's clock has moved
};

}  // namespace gradsync::inline v0_2::simulation
