// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "messages/inboxes.hpp"
#include "messages/message_engine.hpp"
#include "placement.hpp"
#include "shared_memory/process_engine.hpp"

namespace gradsync::inline v0_2::detail {

/// A communicator of teams, some of which have several ranks that share memory. A team is on one machine, and is a node
/// of the tree of sums (core/math.hpp): the sum of its ranks is part of the sum of all. If ranks are numbered machine
/// by machine, and every machine has the same power of two of them, each machine is one team.
///
/// An all-reduce has three stages: a reduce-scatter in each team, an all-reduce of each shard among the ranks of all
/// teams that own it, and an all-gather in each team. So every rank drives the network, and each element leaves a team
/// once. If teams differ in size, the smallest size (at most eight) is the number of shards, the first ranks of each
/// team own them, and the first and last stage are a reduce and a broadcast for each shard. Types of 16 and 8 bits
/// travel as f32 and are rounded once, at the end.
///
/// All other collectives use messages. Every collective, all-reduces included, begins with messages among all ranks
/// that say what each has started.
class HierarchicalEngine final : public collective::Engine {
    using MessageEngine = message_passing::MessageEngine;
    using ProcessEngine = shared_memory::ProcessEngine;

public:
    /// Returns the best engine for the ranks of `flat`. `local`: an engine of those on this machine, in the same order.
    /// `machines`: the machines of all ranks. Collective over `flat`.
    static Shared<collective::Engine> combine(Shared<MessageEngine> flat, Shared<ProcessEngine> local,
                                              Machines machines) {
        if (machines.count() == 1) return local;
        if (machines.most() == 1) return flat;
        return Shared<HierarchicalEngine>::make(std::move(flat), std::move(local), std::move(machines));
    }

    [[gnu::cold]] HierarchicalEngine(Shared<MessageEngine> flat, Shared<ProcessEngine> local, Machines machines)
        : Engine(flat->world_ranks(), flat->rank(), flat->timeout()),
          flat_(std::move(flat)),
          machines_(std::move(machines)),
          aside_(std::move(local)) {
        if (!even_ && scatter_->rank() < shards_) across_->set_leaves(teams_.counts());
        world().hooks().enlist(*this);
    }
    ~HierarchicalEngine() override { world().hooks().dismiss(*this); }

    collective::World& world() const noexcept override { return flat_->world(); }

    void set_timeout(std::chrono::nanoseconds limit) noexcept override {
        Engine::set_timeout(limit);
        for (collective::Engine* engine : engines()) engine->set_timeout(limit);
    }

    std::uint64_t start(const Call& call, ShardStep* = nullptr) override {
        check_thread(call.operation);
        return start_in_turn(call.operation, [&](std::uint64_t& oldest) -> std::optional<std::uint64_t> {
            std::lock_guard lock(mutex_);
            oldest = started_.first();
            if (world().failed() || started_.size() == most_in_flight()) return std::nullopt;
            return begin(call);
        });
    }

    void progress() noexcept override {
        for (collective::Engine* engine : engines()) engine->progress();
        std::unique_lock lock(mutex_, std::try_to_lock);
        if (lock && !world().failed()) advance();  // the waiting caller reports a failure
    }

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
        const auto on_limit = [&](std::chrono::nanoseconds by) {
            if (!met) report_timeout(deadline, by);
            // Several ranks may all wait for one of them in an earlier collective.
            // Its team knows that one and reports first.
            else if (flat_->late(*met).ranks.size() < 2 || !collective::Deadline::too_early(by, timeout(), 3))
                flat_->look(*met, deadline);
        };
        deadline.look(
            timeout(), on_limit, [&] { met ? flat_->look_for_missing() : report_dead(); }, world().moved);
    }

    /// Fails all engines, this one included, so that none of them touches buffers any more.
    [[gnu::cold]] void fail(const collective::Failure& failure) noexcept override {
        for (collective::Engine* engine : engines()) engine->fail(failure);
        const std::lock_guard lock(mutex_);
        ended_ = true;
    }

    /// Memory that the machine's ranks share; messages from and to it need no copy.
    [[gnu::cold]] collective::Memory allocate(std::size_t bytes) override {
        return bytes == 0 ? collective::Memory() : flat_->lend(aside_->allocate(bytes), bytes);
    }

    [[gnu::cold]] collective::Memory adopt(std::span<std::byte> region) override {
        collective::Memory adopted = aside_->adopt(region);
        return adopted.data() == nullptr ? adopted : flat_->lend(std::move(adopted), region.size());
    }
    [[gnu::cold]] bool shares(const void* data, std::size_t bytes) const noexcept override {
        return aside_->shares(data, bytes);
    }

    std::string remark() const override { return aside_->remark(); }

    [[gnu::cold]] Shared<collective::Engine> split(const collective::Group& group) override {
        auto flat = flat_->split(group).as<MessageEngine>();  // one after the other, in the same order on all ranks
        auto local = split_here(*flat_, *aside_, machines_.here(group, rank()));
        return combine(std::move(flat), std::move(local), machines_.of(group));
    }

private:
    // Small enough that a stage never waits when it begins: collectives of all ranks,
    // and those that they become in a team.
    static constexpr std::size_t max_in_flight = 100, max_started_here = 250;
    static constexpr int max_shards = 8;  ///< if each shard is a separate collective

    std::size_t most_in_flight() const noexcept {
        return even_ ? max_in_flight
                     : smaller(max_in_flight, max_started_here / (static_cast<std::size_t>(shards_) + 1));
    }

    enum class Stage { meeting, scattering, crossing, gathering, complete };

    /// An all-reduce in a stage. Other collectives are kept in this form too.
    struct Started {
        Call call;
        std::uint64_t met = 0;  ///< number of the collective in which ranks say what they have started
        Stage stage = Stage::meeting;
        collective::Engine* engine = nullptr;  ///< of this stage
        std::uint64_t number = 0;              ///< number of this stage's last collective
        /// Number of its collectives, which have consecutive numbers; 0 if this rank has no shard to send.
        std::uint64_t parts = 0;
        std::uint64_t weighed = 0;  ///< number of the collective that adds up the team's weights
        double sums[2] = {};        ///< how many of the team contribute, and the sum of their weights
        Call work = {};             ///< the call whose buffers are reduced: `call`, or the same in f32
        kernel::HostBuffer wide;    ///< its buffer, if it is in f32
    };

    std::array<collective::Engine*, 5> engines() const noexcept {
        return {flat_.get(), scatter_.get(), across_.get(), gather_.get(), aside_.get()};
    }

    /// Splits off a part of a machine's ranks. If that fails on one machine, all ranks throw. Collective over `flat`.
    [[gnu::cold]] static Shared<ProcessEngine> split_here(MessageEngine& flat, ProcessEngine& local,
                                                          const collective::Group& group) {
        Shared<ProcessEngine> part;
        std::string problem;
        int culprit = -1, self = flat.own_world_rank();
        try {
            part = local.split(group).as<ProcessEngine>();
        } catch (const Error& error) {
            problem = error.what();
            culprit = error.context().peer < 0 ? self : error.context().peer;
        }
        for (const int other :
             flat.exchange(culprit)) {  // throws if the world has failed, and tells the other machines
            if (other < 0) continue;
            if (problem.empty())
                problem =
                    text("split on rank ", self, ": rank ", other, " has no shared memory for it; see what it says");
            raise(Errc::invalid_argument, {.operation = "split", .rank = self, .peer = other}, problem);
        }
        return part;
    }

    // All functions below require the mutex, unless stated otherwise.

    bool is_complete(std::uint64_t n) const noexcept {
        return started_.is_over(n) || started_[n].stage == Stage::complete;
    }

    bool has_stages(const Call& call) const noexcept {
        return call.operation == Operation::all_reduce && teams_.most() > 1;
    }

    std::uint64_t begin(const Call& call) {
        return started_.add([&](Started& started, std::uint64_t) {
            Call met = call;
            met.elsewhere = has_stages(call);
            started = {.call = call, .met = flat_->start(met), .work = call, .wide = {}};
        });
    }

    /// Makes all possible progress.
    void advance() noexcept {
        if (ended_ || flat_->world().transport().refusal() != nullptr) return;
        Stage before = Stage::complete;  // of the all-reduce before; each stage begins in their order
        for (std::uint64_t n = started_.first(); n < started_.next(); ++n) {
            Started& started = started_[n];
            const auto met = [&] { return !flat_->advance_to(started.met); };
            if (!has_stages(started.call)) {
                if (started.stage == Stage::meeting && met()) started.stage = Stage::complete;
                continue;
            }
            try {
                move(started, before, met);
            } catch (const std::exception& error) {
                // If the world has failed, waiting callers notice. After any other error the ranks would start
                // different collectives.
                const int self = own_world_rank();
                if (!world().failed())
                    world().fail({Errc::peer_failed, self, text("rank ", self, " cannot go on: ", error.what())});
            }
            before = started.stage;
        }
        started_.retire([](const Started& oldest) { return oldest.stage == Stage::complete; });
    }

    /// Makes all possible progress on an all-reduce. `met()`: have all ranks started it, with calls that fit?
    template <class Met>
    void move(Started& started, Stage before, Met&& met) {
        if (started.stage == Stage::meeting && before > Stage::meeting && met()) scatter(started);
        if (started.stage == Stage::scattering && before > Stage::scattering && is_scattered(started)) cross(started);
        if (started.stage == Stage::crossing && before > Stage::crossing && are_over(started)) gather(started);
        if (started.stage == Stage::gathering && are_over(started)) {
            narrow(started);
            started.stage = Stage::complete;
        }
    }

    /// Reduces a call of a 16- or 8-bit type in f32, so that it is rounded once.
    void widen(Started& started) {
        const Call& call = started.call;
        if (!is_low_precision(call.dtype)) return;
        started.wide = spare_.take(call.out_count * sizeof(float));
        started.work.in = started.work.out = started.wide.data();
        started.work.dtype = DType::f32;
        if (collective::contributes(call, rank(), rank()))
            kernel::convert(call.in, call.dtype, started.work.out, DType::f32, call.in_count);
    }
    void narrow(Started& started) {
        const Call& call = started.call;
        if (!is_low_precision(call.dtype)) return;
        kernel::convert(started.work.out, DType::f32, call.out, call.dtype, call.out_count);
        spare_.keep(std::move(started.wide));
    }

    /// The ranks that hold up an all-reduce in its stage, once all ranks have met: in its first incomplete part.
    static collective::Late late_in_stage(const Started& started) {
        collective::Late who;
        for (std::uint64_t open = started.parts; open > 0 && who.ranks.empty(); --open)
            who = started.engine->late(started.number + 1 - open);
        who.did = collective::Late::Did::not_go_on;
        return who;
    }

    /// The shard of the team's sum that rank `owner` of the team owns; empty from `shards_` on.
    ElementRange shard(const Call& call, int owner) const noexcept {
        return owner < shards_ ? shard_range(call.out_count, shards_, owner) : ElementRange{};
    }
    /// Sets the buffers of a call to parts of two whole buffers.
    static void set_buffers(Call& part, const void* in, ElementRange from, void* out, ElementRange to) noexcept {
        const std::size_t width = size_of(part.dtype);
        part.in = from.size() == 0 ? nullptr : static_cast<const std::byte*>(in) + from.first * width;
        part.out = to.size() == 0 ? nullptr : static_cast<std::byte*>(out) + to.first * width;
        part.in_count = from.size();
        part.out_count = to.size();
    }

    /// Starts a stage in a team: one collective of the whole buffer if every rank owns a shard,
    /// otherwise one for each shard. `part(owner, range)`: the collective of that shard, or of the whole.
    /// If a start throws, `started` is unchanged.
    template <class Part>
    void enter(Started& started, Stage stage, ProcessEngine& engine, Part&& part) {
        const int parts = even_ ? 1 : shards_;
        std::uint64_t last = 0;
        for (int owner = 0; owner < parts; ++owner)
            last =
                engine.start(part(owner, even_ ? ElementRange{0, started.work.out_count} : shard(started.work, owner)));
        enter(started, stage, engine, parts, last);
    }
    static void enter(Started& started, Stage stage, collective::Engine& engine, int parts,
                      std::uint64_t last) noexcept {
        started.stage = stage;
        started.engine = &engine;
        started.parts = static_cast<std::uint64_t>(parts);
        started.number = last;
    }
    /// Are all parts of this stage complete?
    static bool are_over(const Started& started) noexcept {
        std::uint64_t open = started.parts;
        while (open > 0 && !started.engine->advance_to(started.number + 1 - open)) --open;
        return open == 0;
    }
    void scatter(Started& started) {
        widen(started);
        const Call& call = started.work;
        const bool mean = call.op == ReduceOp::mean;
        if (mean) {
            started.sums[0] = call.contribution.scale != 0;
            started.sums[1] = call.contribution.weight;
            Call sums{.operation = Operation::all_reduce, .dtype = DType::f64};
            set_buffers(sums, started.sums, {0, 2}, started.sums, {0, 2});
            started.weighed = scatter_->start(sums);
        }
        enter(started, Stage::scattering, *scatter_, [&](int owner, ElementRange range) {
            Call part = call;
            part.operation = even_ ? Operation::reduce_scatter : Operation::reduce;
            part.root = owner;
            // A sum of scaled elements is a mean whose weights add up to 1.
            part.contribution.weight = scatter_->rank() == 0;
            const bool keeps = even_ || owner == scatter_->rank();
            set_buffers(part, call.in, range, call.out, keeps ? shard(call, scatter_->rank()) : ElementRange{});
            return part;
        });
    }

    bool is_scattered(const Started& started) noexcept {
        return are_over(started) && (started.call.op != ReduceOp::mean || !scatter_->advance_to(started.weighed));
    }

    void cross(Started& started) {
        if (scatter_->rank() >= shards_) return enter(started, Stage::crossing, *across_, 0, 0);
        Call call = started.work;
        const ElementRange own = shard(call, scatter_->rank());
        set_buffers(call, call.out, own, call.out, own);
        if (call.op == ReduceOp::mean) call.contribution = {started.sums[0] != 0 ? 1.0 : 0.0, started.sums[1]};
        enter(started, Stage::crossing, *across_, 1, across_->start(call));
    }

    void gather(Started& started) {
        enter(started, Stage::gathering, *gather_, [&](int owner, ElementRange range) {
            Call part{.root = owner,
                      .operation = even_ ? Operation::all_gather : Operation::broadcast,
                      .dtype = started.work.dtype};
            set_buffers(part, started.work.out, even_ ? shard(started.work, gather_->rank()) : range, started.work.out,
                        range);
            return part;
        });
    }

    // Call the functions below without the mutex.

    [[gnu::cold]] void report_dead() {
        const int culprit = flat_->consult([](auto&, auto& detector) { return detector.first_dead(); });
        std::unique_lock lock(mutex_);
        if (started_.empty() || started_.oldest().stage == Stage::complete) return;
        if (flat_->consult([](auto& world, auto&) { return world.is_asked(); }))
            flat_->consult(
                [&, who = late_in_stage(started_.oldest())](auto&, auto& detector) { detector.answer(who); });
        if (culprit < 0) return;
        const std::string what = collective::name_of(started_.oldest().call, started_.first());
        lock.unlock();
        fail(flat_->consult([&](auto& world, auto&) { return world.end_of(culprit, what); }));
    }

    /// Called repeatedly once the time limit has passed. In a later stage a rank may wait for one that waits for the
    /// rank that stopped, so it gives better informed ranks time to report first.
    [[gnu::cold]] void report_timeout(collective::Deadline& deadline, std::chrono::nanoseconds by) {
        collective::Late who;
        std::string what;
        {
            std::lock_guard lock(mutex_);
            if (started_.empty() || started_.oldest().stage == Stage::complete) return;
            const Started& oldest = started_.oldest();
            what = collective::name_of(oldest.call, started_.first());
            const int stages_before = oldest.stage == Stage::gathering ? 2 : oldest.stage == Stage::crossing ? 1 : 0;
            if (stages_before > 0 && collective::Deadline::too_early(by, timeout(), stages_before)) return;
            who = oldest.stage == Stage::meeting ? flat_->late(oldest.met) : late_in_stage(oldest);
            if (who.ranks.empty() && collective::Deadline::too_early(by, timeout(), collective::Deadline::most_stages))
                return;
            if (!who.ranks.empty() && deadline.is_recent_suspect(who.ranks.front(), timeout())) return;
            const auto ask = [&](auto&, auto& detector) { return detector.ask(who, started_.first(), timeout()); };
            if ((stages_before > 0 || !who.certain) && !flat_->consult(ask)) return;
        }
        fail(collective::timed_out(what, who, own_world_rank(), timeout()));
    }

    const Shared<MessageEngine> flat_;  ///< over all ranks
    const Machines machines_, teams_ = machines_.teams();
    /// Over the ranks of this machine, for objects that all create at the same place.
    const Shared<ProcessEngine> aside_;
    /// Over the ranks of this team.
    const Shared<ProcessEngine> scatter_ =
        split_here(*flat_, *aside_, machines_.here(teams_.neighbourhood(rank()), rank()));
    /// Over the ranks with the same index in all teams.
    const Shared<MessageEngine> across_ = flat_->split(teams_.counterparts(rank())).as<MessageEngine>();
    /// Over the ranks of this team, with an order of its own.
    const Shared<ProcessEngine> gather_ =
        split_here(*flat_, *aside_, machines_.here(teams_.neighbourhood(rank()), rank()));
    const bool even_ = teams_.fewest() == teams_.most();  ///< all teams have the same number of ranks
    /// The shards of a team's sum: one for each rank if `even_`, otherwise one for each of its first ranks.
    const int shards_ = even_ ? scatter_->size() : smaller(teams_.fewest(), max_shards);

    std::mutex mutex_;
    bool ended_ = false;
    collective::InFlight<Started> started_{most_in_flight()};  ///< must not grow: the sums of scales are buffers
    message_passing::SpareMemory<kernel::HostBuffer, max_in_flight> spare_;  ///< of completed collectives
};

}  // namespace gradsync::inline v0_2::detail
