// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "../core/clock.hpp"
#include "all_reduce_stages.hpp"
#include "deadline.hpp"
#include "engine.hpp"
#include "failures.hpp"
#include "in_flight.hpp"
#include "messages/message_engine.hpp"
#include "placement.hpp"
#include "shared_memory/process_engine.hpp"

namespace gradsync::inline v0_2::detail {

/// A communicator over several machines; on some of them several ranks share memory.
///
/// An all-reduce goes through the stages of AllReduceStages. So every rank drives the network, and each element leaves a machine once. If
/// machines have different numbers of ranks, the smallest number (eight at most) is the number of shards, and the first ranks of each
/// machine have them. Sums are in rank order on each machine, then in the machines' order; types of 16 and 8 bits are rounded after each of
/// the two.
///
/// All other collectives use messages. Every collective, all-reduces included, begins with messages among all ranks that say what each has
/// started.
class HierarchicalEngine final : public collective::Engine, collective::ProgressHook {
    using Call = collective::Call;
    using MessageEngine = message_passing::MessageEngine;
    using ProcessEngine = shared_memory::ProcessEngine;
    using Stage = AllReduceStages::Stage;
    using Started = AllReduceStages::Started;

public:
    /// Returns the best engine for the ranks of `flat`. `local`: an engine of those on this machine, in the same order. `machines`:
    /// those of its ranks. Collective over `flat`.
    static std::shared_ptr<collective::Engine> combine(std::shared_ptr<MessageEngine> flat, std::shared_ptr<ProcessEngine> local,
                                                       Machines machines) {
        if (machines.count() == 1) return local;
        if (machines.most() == 1) return flat;
        return std::make_shared<HierarchicalEngine>(std::move(flat), std::move(local), std::move(machines));
    }

    HierarchicalEngine(std::shared_ptr<MessageEngine> flat, std::shared_ptr<ProcessEngine> local, Machines machines)
        : Engine(flat->world_ranks(), flat->rank(), flat->timeout()),
          flat_(std::move(flat)),
          machines_(std::move(machines)),
          scatter_(std::move(local)),
          across_(std::static_pointer_cast<MessageEngine>(flat_->split(machines_.counterparts(rank())))),
          gather_(split_here(*flat_, *scatter_, collective::Group::of_all(scatter_->size(), scatter_->rank()))),
          aside_(split_here(*flat_, *scatter_, collective::Group::of_all(scatter_->size(), scatter_->rank()))),
          stages_(scatter_, across_, gather_, is_even(), shards()),
          started_(most_in_flight()) {
        world().hooks().enlist(*this);
    }
    ~HierarchicalEngine() override { world().hooks().dismiss(*this); }

    collective::World& world() const noexcept override { return flat_->world(); }

    void set_timeout(std::chrono::nanoseconds limit) noexcept override {
        Engine::set_timeout(limit);
        for (collective::Engine* engine : engines()) engine->set_timeout(limit);
    }

    std::uint64_t start(const Call& call) override {
        check_thread(call.operation);
        return start_in_turn(call.operation, [&](std::uint64_t& oldest) -> std::optional<std::uint64_t> {
            std::lock_guard lock(mutex_);
            oldest = started_.first();
            if (world().failed() || started_.size() == most_in_flight()) return std::nullopt;
            try {
                return begin(call);
            } catch (const Error&) {
                if (!world().failed()) throw;
                return std::nullopt;
            }
        });
    }

    void progress() noexcept override { try_advance(); }

    std::chrono::nanoseconds progress_time() const noexcept override {
        std::chrono::nanoseconds sum{};
        for (const collective::Engine* engine : engines()) sum += engine->progress_time();
        return sum;
    }

    std::optional<Call> advance_to(std::uint64_t n) noexcept override {
        std::lock_guard lock(mutex_);
        advance();
        return is_complete(n) ? std::nullopt : std::optional(started_[n].call);
    }

    void check_thread(collective::Operation operation) const override { flat_->check_thread(operation); }

    void look(std::uint64_t n, collective::Deadline& deadline) override {
        std::optional<std::uint64_t> met;
        {
            std::lock_guard lock(mutex_);
            if (is_complete(n) || world().failed()) return;
            if (started_[n].stage == Stage::meeting) met = started_[n].met;
        }
        if (met) return flat_->look(*met, deadline);  // finds out which ranks are missing
        deadline.look(
            timeout(), [&](std::chrono::nanoseconds by) { report_timeout(by); }, [&] { report_dead(); });
    }

    /// Fails all engines, so that none of them writes into buffers any more.
    void fail(const collective::Failure& failure) noexcept override {
        for (collective::Engine* engine : engines()) engine->fail(failure);
    }

    /// Memory that the machine's ranks share; messages need no copy from and to it.
    collective::Memory allocate(std::size_t bytes) override {
        return bytes == 0 ? collective::Memory() : flat_->lend(aside_->allocate(bytes), bytes);
    }

    std::string remark() const override { return aside_->remark(); }

    std::shared_ptr<collective::Engine> split(const collective::Group& group) override {
        auto flat = std::static_pointer_cast<MessageEngine>(flat_->split(group));  // one after the other, in the same order on all ranks
        auto local = split_here(*flat_, *aside_, machines_.here(group, rank()));
        return combine(std::move(flat), std::move(local), machines_.of(group));
    }

private:
    // Few enough that a stage never waits when it begins: collectives of all ranks, and those that they become on a machine.
    static constexpr std::size_t max_in_flight = 100, max_started_here = 250;
    static constexpr int max_shards = 8;  ///< if each shard is a collective of its own

    bool is_even() const noexcept { return machines_.fewest() == machines_.most(); }
    /// Number of shards of a machine's sum.
    int shards() const noexcept { return is_even() ? scatter_->size() : std::min(machines_.fewest(), max_shards); }
    std::size_t most_in_flight() const noexcept {
        return is_even() ? max_in_flight : std::min(max_in_flight, max_started_here / (static_cast<std::size_t>(shards()) + 1));
    }

    std::array<collective::Engine*, 5> engines() const noexcept {
        return {flat_.get(), scatter_.get(), across_.get(), gather_.get(), aside_.get()};
    }

    /// Splits off a part of a machine's ranks. If that fails on one machine, all ranks throw. Collective over `flat`.
    static std::shared_ptr<ProcessEngine> split_here(MessageEngine& flat, ProcessEngine& local, const collective::Group& group) {
        std::shared_ptr<ProcessEngine> part;
        std::string problem;
        try {
            part = std::static_pointer_cast<ProcessEngine>(local.split(group));
        } catch (const Error& error) {
            if (flat.world().failed()) throw;
            problem = error.what();
        }
        const std::vector<std::uint8_t> good = flat.exchange(static_cast<std::uint8_t>(part != nullptr));
        for (int r = 0; r < flat.size(); ++r) {
            if (good[static_cast<std::size_t>(r)]) continue;
            const int culprit = flat.world_rank(r), self = flat.own_world_rank();
            if (problem.empty())
                problem = text("split on rank ", self, ": rank ", culprit, " has no shared memory for it; see what it says");
            raise(Errc::invalid_argument, problem, {.operation = "split", .rank = self, .peer = culprit});
        }
        return part;
    }

    // All functions below require the mutex, unless they say otherwise.

    bool is_complete(std::uint64_t n) const noexcept { return started_.is_over(n) || started_[n].stage == Stage::complete; }

    static bool has_stages(const Call& call) noexcept { return call.operation == collective::Operation::all_reduce; }

    std::uint64_t begin(const Call& call) {
        return started_.add([&](Started& started, std::uint64_t) {
            Call met = call;
            met.elsewhere = has_stages(call);
            started = {.call = call, .met = flat_->start(met)};
        });
    }

    /// Makes all possible progress.
    void advance() noexcept {
        if (flat_->world().transport().refusal() != nullptr) return;
        AllReduceStages::Gates gates;
        for (std::uint64_t n = started_.first(); n < started_.next(); ++n) {
            Started& started = started_[n];
            const auto met = [&] { return !flat_->advance_to(started.met); };
            if (!has_stages(started.call)) {
                if (started.stage == Stage::meeting && met()) started.stage = Stage::complete;
                continue;
            }
            try {
                stages_.move(started, gates, met);
            } catch (const std::exception& error) {
                // A start says that the world has failed, which waiting callers notice. After any other error the ranks would start
                // different collectives.
                const int self = own_world_rank();
                if (!world().failed()) world().fail({Errc::peer_failed, self, text("rank ", self, " cannot go on: ", error.what())});
            }
            gates.close_behind(started.stage);
        }
        started_.retire([](const Started& oldest) { return oldest.stage == Stage::complete; });
    }

    // All functions below must not hold the mutex.

    void try_advance() noexcept override {
        for (collective::Engine* engine : engines()) engine->progress();
        std::unique_lock lock(mutex_, std::try_to_lock);
        if (lock && !world().failed()) advance();  // a failure is reported to the waiting caller
    }

    void report_dead() {
        const int culprit = flat_->first_dead();
        if (culprit < 0) return;
        std::string what;
        {
            std::lock_guard lock(mutex_);
            if (started_.empty()) return;
            what = collective::name_of(started_.oldest().call, started_.first());
        }
        fail(collective::died(what, world_rank(culprit)));
    }

    /// Called repeatedly once the time limit has passed. A rank in a later stage may wait for one that waits itself for the rank that
    /// stopped. It therefore leaves ranks that know more, or began to wait a little later, some time to report first.
    void report_timeout(std::chrono::nanoseconds by) {
        collective::Late who;
        std::string what;
        {
            std::lock_guard lock(mutex_);
            if (started_.empty() || started_.oldest().stage == Stage::complete) return;
            const Started& oldest = started_.oldest();
            what = collective::name_of(oldest.call, started_.first());
            const int stages_before = oldest.stage == Stage::gathering ? 2 : oldest.stage == Stage::crossing ? 1 : 0;
            if (stages_before > 0 && collective::Deadline::too_early(by, timeout(), stages_before)) return;
            who = oldest.stage == Stage::meeting ? flat_->late(oldest.met) : stages_.late(oldest);
        }
        fail(collective::timed_out(what, who, own_world_rank(), timeout()));
    }

    const std::shared_ptr<MessageEngine> flat_;  ///< over all ranks
    const Machines machines_;
    const std::shared_ptr<ProcessEngine> scatter_;  ///< over the ranks of this machine
    const std::shared_ptr<MessageEngine> across_;   ///< over the ranks with the same place on all machines
    // Over this machine's ranks too, each with its own order: for gathers, and for objects that all ranks make at the same place.
    const std::shared_ptr<ProcessEngine> gather_, aside_;
    AllReduceStages stages_;

    std::mutex mutex_;
    collective::InFlight<Started> started_;  ///< never grows, because the sums of scales are buffers
};

}  // namespace gradsync::inline v0_2::detail
