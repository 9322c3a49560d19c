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
#include <type_traits>
#include <utility>
#include <vector>

#include "../core/clock.hpp"
#include "deadline.hpp"
#include "engine.hpp"
#include "failures.hpp"
#include "messages/message_engine.hpp"
#include "shared_memory/process_engine.hpp"
#include "waiting.hpp"

namespace gradsync::inline v0_2::detail {

/// A communicator over several machines; on some of them several ranks share memory.
///
/// An all-reduce is a reduce-scatter among the ranks of a machine, an all-reduce of each shard among the ranks of all machines that have
/// it, and an all-gather on the machine. So every rank drives the network, and each element leaves a machine once. If machines have
/// different numbers of ranks, the smallest number (eight at most) is the number of shards, and the first ranks of each machine have them.
/// Sums are in rank order on each machine, then in the machines' order; types of 16 and 8 bits are rounded after each of the two.
///
/// All other collectives use messages. Every collective, all-reduces included, begins with messages among all ranks that say what each has
/// started.
class HierarchicalEngine final : public collective::Engine, collective::ProgressHook {
    using Call = collective::Call;
    using MessageEngine = message_passing::MessageEngine;
    using ProcessEngine = shared_memory::ProcessEngine;

public:
    /// Returns the best engine for the ranks of `flat`. `local`: an engine of those on this machine, in the same order. `machines`: by
    /// rank, the number of its machine. Collective over `flat`.
    static std::shared_ptr<collective::Engine> combine(std::shared_ptr<MessageEngine> flat, std::shared_ptr<ProcessEngine> local,
                                                       std::vector<int> machines) {
        const Spread spread(machines);
        if (spread.least == flat->size()) return local;
        if (spread.most == 1) return flat;
        return std::make_shared<HierarchicalEngine>(std::move(flat), std::move(local), std::move(machines));
    }

    HierarchicalEngine(std::shared_ptr<MessageEngine> flat, std::shared_ptr<ProcessEngine> local, std::vector<int> machines)
        : flat_(std::move(flat)),
          scatter_(std::move(local)),
          machines_(std::move(machines)),
          even_(Spread(machines_).even()),
          shards_(even_ ? scatter_->size() : std::min(Spread(machines_).least, max_shards)),
          across_(std::static_pointer_cast<MessageEngine>(flat_->split(counterparts()))),
          gather_(split_here(*flat_, *scatter_, all_of(*scatter_))),
          aside_(split_here(*flat_, *scatter_, all_of(*scatter_))),
          liveness_check_(machines_.size()),
          started_(even_ ? max_in_flight : std::min(max_in_flight, max_started_here / (static_cast<std::size_t>(shards_) + 1))) {
        hooks().enlist(*this);
    }
    ~HierarchicalEngine() override { hooks().dismiss(*this); }

    int rank() const noexcept override { return flat_->rank(); }
    int size() const noexcept override { return flat_->size(); }
    int world_rank(int rank) const noexcept override { return flat_->world_rank(rank); }
    collective::World& world() const noexcept override { return flat_->world(); }

    std::chrono::nanoseconds timeout() const noexcept override { return flat_->timeout(); }
    void set_timeout(std::chrono::nanoseconds limit) noexcept override {
        for (collective::Engine* engine : engines()) engine->set_timeout(limit);
    }
    std::size_t next_number() noexcept override { return flat_->next_number(); }

    std::uint64_t start(const Call& call) override {
        for (;;) {
            std::uint64_t oldest = 0;
            const auto begun = told([&]() -> std::optional<std::uint64_t> {
                std::lock_guard lock(mutex_);
                if (next_ - first_ < started_.size()) return begin(call);
                oldest = first_;
                return std::nullopt;
            });
            if (begun) return *begun;
            wait(oldest);
        }
    }

    void progress() noexcept override { try_advance(); }

    std::chrono::nanoseconds progress_time() const noexcept override {
        std::chrono::nanoseconds sum{};
        for (const collective::Engine* engine : engines()) sum += engine->progress_time();
        return sum;
    }

    bool test(std::uint64_t n) override { return advance_to(n); }

    void wait(std::uint64_t n) override {
        if (advance_to(n)) return;
        std::uint64_t met;
        {
            std::lock_guard lock(mutex_);
            if (is_complete(n)) return;
            met = at(n).met;
        }
        told([&] { flat_->wait(met); });  // finds out which ranks are missing
        collective::Backoff backoff = new_backoff();
        std::uint64_t arrivals = flat_->world().arrivals();
        collective::Deadline deadline;
        for (;;) {
            if (advance_to(n)) return;
            if (backoff.patient() || deadline.begun()) {
                hooks().try_advance();
                deadline.look(
                    timeout(), [&](std::chrono::nanoseconds by) { report_timeout(by); }, [&] { report_dead(); });
            }
            if (std::exchange(arrivals, flat_->world().arrivals()) != arrivals) backoff = new_backoff();
            backoff.wait_a_little(world().wait_queue, [&] { return world().failed(); });
        }
    }

    void look(std::uint64_t n, collective::Deadline& deadline) override {
        std::optional<std::uint64_t> met;
        {
            std::lock_guard lock(mutex_);
            if (is_complete(n) || world().failed()) return;
            if (at(n).stage == Stage::meeting) met = at(n).met;
        }
        if (met) flat_->look(*met, deadline);
        else
            deadline.look(
                timeout(), [&](std::chrono::nanoseconds by) { report_timeout(by); }, [&] { report_dead(); });
    }

    void abandon(std::uint64_t n) noexcept override {
        try_advance();
        std::string what;
        {
            std::lock_guard lock(mutex_);
            if (is_complete(n)) return;
            what = collective::name_of(at(n).call, n);
        }
        fail(collective::abandoned(what, world_rank(rank())));
    }

    void fail(const collective::Failure& failure) noexcept override {
        for (collective::Engine* engine : engines()) engine->fail(failure);
    }

    /// Memory that the machine's ranks share; messages need no copy from and to it.
    collective::Memory allocate(std::size_t bytes) override {
        return bytes == 0 ? collective::Memory() : flat_->lend(aside_->allocate(bytes), bytes);
    }

    std::string remark() const override { return aside_->remark(); }

    std::shared_ptr<collective::Engine> split(const collective::Group& group) override {
        collective::Group here{.split = group.split, .color = group.color};
        std::vector<int> machines;
        for (const int member : group.members) {
            machines.push_back(machine_of(member));
            if (machine_of(member) != machine_of(rank())) continue;
            if (member == rank()) here.rank = static_cast<int>(here.members.size());
            here.members.push_back(local_rank(member));
        }
        auto flat = std::static_pointer_cast<MessageEngine>(flat_->split(group));  // one after the other, in the same order on all ranks
        auto local = split_here(*flat_, *aside_, here);
        return combine(std::move(flat), std::move(local), std::move(machines));
    }

private:
    // Few enough that a stage never waits when it begins: collectives of all ranks, and those that they become on a machine.
    static constexpr std::size_t max_in_flight = 100, max_started_here = 250;
    static constexpr int max_shards = 8;  ///< if each shard is a collective of its own

    collective::Backoff new_backoff() const noexcept {
        return collective::Backoff(world().cores_are_shared, std::chrono::microseconds(50));
    }

    /// The numbers of ranks on the machine with the fewest, and on that with the most.
    struct Spread {
        int least, most = 0;
        explicit Spread(const std::vector<int>& machines) : least(static_cast<int>(machines.size())) {
            for (const int machine : machines) {
                const auto ranks = static_cast<int>(std::count(machines.begin(), machines.end(), machine));
                least = std::min(least, ranks);
                most = std::max(most, ranks);
            }
        }
        bool even() const noexcept { return least == most; }
    };

    enum class Stage { meeting, scattering, crossing, gathering, complete };

    struct Started {
        Call call;
        std::uint64_t met = 0;      ///< number of the collective in which all ranks say what they have started
        std::uint64_t number = 0;   ///< number of this stage's last collective
        std::uint64_t parts = 0;    ///< number of its collectives, which have consecutive numbers; 0 if this rank has no shard to send
        std::uint64_t weighed = 0;  ///< number of the collective that adds the machine's scales and weights
        double sums[2] = {};        ///< the sums of these scales and weights
        Stage stage = Stage::meeting;
    };

    collective::ProgressHooks& hooks() const noexcept { return flat_->world().hooks(); }
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
        const auto bad = std::find(good.begin(), good.end(), 0);
        if (bad == good.end()) return part;
        const int culprit = flat.world_rank(static_cast<int>(bad - good.begin())), rank = flat.world_rank(flat.rank());
        throw Error(Errc::invalid_argument,
                    problem.empty() ? "split on rank " + std::to_string(rank) + ": rank " + std::to_string(culprit) +
                                          " has no shared memory for it; see what it says"
                                    : problem,
                    {.operation = "split", .rank = rank, .peer = culprit});
    }

    int machine_of(int rank) const noexcept { return machines_[static_cast<std::size_t>(rank)]; }
    /// Place of a rank among those of its machine.
    int local_rank(int rank) const noexcept {
        return static_cast<int>(std::count(machines_.begin(), machines_.begin() + rank, machine_of(rank)));
    }

    static collective::Group all_of(const collective::Engine& engine) {
        collective::Group group{.rank = engine.rank()};
        for (int r = 0; r < engine.size(); ++r) group.members.push_back(r);
        return group;
    }
    /// The ranks that have the same place on their machines, in the machines' order: shards are summed in that order.
    collective::Group counterparts() const {
        collective::Group group;
        for (int r = 0; r < size(); ++r)
            if (local_rank(r) == local_rank(rank())) group.members.push_back(r);
        std::sort(group.members.begin(), group.members.end(), [&](int a, int b) { return machine_of(a) < machine_of(b); });
        group.rank = static_cast<int>(std::find(group.members.begin(), group.members.end(), rank()) - group.members.begin());
        return group;
    }

    // All functions below require the mutex.

    Started& at(std::uint64_t n) noexcept { return started_[n % started_.size()]; }
    bool is_complete(std::uint64_t n) noexcept { return n < first_ || at(n).stage == Stage::complete; }

    static bool has_stages(const Call& call) noexcept { return call.operation == collective::Operation::all_reduce; }

    std::uint64_t begin(const Call& call) {
        Call met = call;
        met.elsewhere = has_stages(call);
        Started started;
        started.call = call;
        started.met = flat_->start(met);
        at(next_) = started;
        return next_++;
    }

    bool has_shard() const noexcept { return scatter_->rank() < shards_; }
    /// The shard of the machine's sum that its rank `owner` has; `owner` is less than `shards_`.
    ElementRange shard(const Call& call, int owner) const noexcept { return shard_range(call.out_count, shards_, owner); }
    static void* element(const Call& call, std::size_t index) noexcept {
        return static_cast<std::byte*>(call.out) + index * size_of(call.dtype);
    }

    /// Starts `part(owner)` for the shard of each owner; returns the number of the last.
    template <class Part>
    std::uint64_t start_parts(ProcessEngine& engine, Part&& part) {
        std::uint64_t last = 0;
        for (int owner = 0; owner < shards_; ++owner) last = engine.start(part(owner));
        return last;
    }
    /// Records that all collectives of a stage have started: if a start throws, `started` stays as it was.
    static void enter(Started& started, Stage stage, int parts, std::uint64_t last) noexcept {
        started.stage = stage;
        started.parts = static_cast<std::uint64_t>(parts);
        started.number = last;
    }
    /// Are all parts of this stage complete?
    static bool test_parts(collective::Engine& engine, const Started& started) {
        std::uint64_t open = started.parts;
        while (open > 0 && engine.test(started.number + 1 - open)) --open;
        return open == 0;
    }
    /// The ranks that are late in the first incomplete part of this stage.
    template <class E>
    static collective::Late late(E& engine, const Started& started) {
        collective::Late who;
        for (std::uint64_t open = started.parts; open > 0 && who.ranks.empty(); --open) who = engine.late(started.number + 1 - open);
        return who;
    }

    void scatter(Started& started) {
        Call call = started.call;
        if (call.op == ReduceOp::mean) {
            // On the machine, compute a mean too, weighted by the scales: it is no larger than its inputs, so low precision does not
            // overflow.
            const double scale = call.contribution.scale < 0 ? -call.contribution.scale : call.contribution.scale;
            started.sums[0] = scale;
            started.sums[1] = call.contribution.weight;
            call.contribution.weight = scale;
            Call weigh;
            weigh.operation = collective::Operation::all_reduce;
            weigh.in = weigh.out = started.sums;
            weigh.in_count = weigh.out_count = 2;
            weigh.dtype = DType::f64;
            started.weighed = scatter_->start(weigh);
        }
        const auto deliver_to = [&](int owner) {  // the result is that shard, on that rank
            const ElementRange range = owner == scatter_->rank() ? shard(call, owner) : ElementRange{};
            Call part = call;
            part.out = range.size() == 0 ? nullptr : element(call, range.first);
            part.out_count = range.size();
            return part;
        };
        if (even_) {
            Call whole = deliver_to(scatter_->rank());
            whole.operation = collective::Operation::reduce_scatter;
            enter(started, Stage::scattering, 1, scatter_->start(whole));
        } else {
            const auto last = start_parts(*scatter_, [&](int owner) {
                const ElementRange range = shard(call, owner);
                Call part = deliver_to(owner);
                part.operation = collective::Operation::reduce;
                part.root = owner;
                part.in = static_cast<const std::byte*>(call.in) + range.first * size_of(call.dtype);
                part.in_count = range.size();
                return part;
            });
            enter(started, Stage::scattering, shards_, last);
        }
    }

    bool is_scattered(const Started& started) {
        return test_parts(*scatter_, started) && (started.call.op != ReduceOp::mean || scatter_->test(started.weighed));
    }

    void cross(Started& started) {
        if (!has_shard()) return enter(started, Stage::crossing, 0, 0);
        const ElementRange own = shard(started.call, scatter_->rank());
        Call call = started.call;
        call.in = call.out = element(call, own.first);
        call.in_count = call.out_count = own.size();
        if (call.op == ReduceOp::mean) call.contribution = {started.sums[0], started.sums[1]};
        enter(started, Stage::crossing, 1, across_->start(call));
    }

    void gather(Started& started) {
        const auto copy = [&](collective::Operation operation, ElementRange in, ElementRange out) {
            Call call;
            call.operation = operation;
            call.dtype = started.call.dtype;
            call.in = element(started.call, in.first);
            call.in_count = in.size();
            call.out = element(started.call, out.first);
            call.out_count = out.size();
            return call;
        };
        if (even_) {
            const Call whole = copy(collective::Operation::all_gather, shard(started.call, gather_->rank()), {0, started.call.out_count});
            enter(started, Stage::gathering, 1, gather_->start(whole));
        } else {
            const auto last = start_parts(*gather_, [&](int owner) {
                const ElementRange range = shard(started.call, owner);
                Call part = copy(collective::Operation::broadcast, range, range);
                part.root = owner;
                return part;
            });
            enter(started, Stage::gathering, shards_, last);
        }
    }

    /// True if collective n is complete; throws Error if it is not and the world has failed.
    bool advance_to(std::uint64_t n) {
        std::exception_ptr failure;
        {
            std::lock_guard lock(mutex_);
            failure = advance();
            if (is_complete(n)) return true;
        }
        if (failure) told([&] { std::rethrow_exception(failure); });
        return false;
    }

    /// Runs `f`. If it throws because the world has failed, fails all engines before rethrowing, so that none of them writes into buffers
    /// any more, no matter which one noticed.
    template <class F>
    std::invoke_result_t<F> told(F&& f) {
        try {
            return f();
        } catch (...) {
            if (world().failed()) fail(world().failure());
            throw;
        }
    }

    /// Makes all possible progress. If the world has failed, returns the exception that stopped one collective; those behind it may be
    /// complete.
    std::exception_ptr advance() noexcept {
        std::exception_ptr failure;
        Gates gates;
        for (std::uint64_t n = first_; n < next_; ++n) {
            Started& started = at(n);
            try {
                move(started, gates);
            } catch (...) {
                if (!failure) failure = std::current_exception();
            }
            if (has_stages(started.call)) gates.close_behind(started.stage);
        }
        while (first_ < next_ && at(first_).stage == Stage::complete) ++first_;
        return failure;
    }

    /// Each stage begins in the order of the collectives: the stages that may begin, given the collectives already visited.
    struct Gates {
        bool scatter = true, cross = true, gather = true;
        void close_behind(Stage stage) noexcept {
            scatter &= stage > Stage::meeting;
            cross &= stage > Stage::scattering;
            gather &= stage > Stage::crossing;
        }
    };

    void move(Started& started, const Gates& gates) {
        if (!has_stages(started.call)) {
            if (started.stage == Stage::meeting && flat_->test(started.met)) started.stage = Stage::complete;
            return;
        }
        if (started.stage == Stage::meeting && gates.scatter && flat_->test(started.met)) scatter(started);  // the calls fit
        if (started.stage == Stage::scattering && gates.cross && is_scattered(started)) cross(started);
        if (started.stage == Stage::crossing && gates.gather && test_parts(*across_, started)) gather(started);
        if (started.stage == Stage::gathering && test_parts(*gather_, started)) started.stage = Stage::complete;
    }

    void try_advance() noexcept override {
        for (collective::Engine* engine : engines()) engine->progress();
        std::unique_lock lock(mutex_, std::try_to_lock);
        if (lock && !world().failed()) advance();  // a failure is reported to the waiting caller
    }

    void report_dead() {
        int culprit = -1;
        std::string what;
        {
            std::lock_guard lock(mutex_);
            if (first_ == next_) return;
            what = collective::name_of(at(first_).call, first_);
            const auto is_dead = [&](int r) {
                std::lock_guard messages(flat_->world().mutex());
                return liveness_check_.is_dead(world(), r, world_rank(r));
            };
            for (int r = 0; r < size() && culprit < 0; ++r)
                if (r != rank() && is_dead(r) && !flat_->has_left(r)) culprit = world_rank(r);
        }
        if (culprit >= 0) fail(collective::died(what, culprit));
    }

    /// Called repeatedly once the time limit has passed. A rank in a later stage may wait for one that waits itself for the rank that
    /// stopped. It therefore leaves ranks that know more, or began to wait a little later, some time to report first.
    void report_timeout(std::chrono::nanoseconds by) {
        using collective::Deadline;
        collective::Late who;
        std::string what;
        {
            std::lock_guard lock(mutex_);
            if (first_ == next_) return;
            const Started& oldest = at(first_);
            what = collective::name_of(oldest.call, first_);
            switch (oldest.stage) {
                case Stage::meeting: who = flat_->late(oldest.met); break;
                case Stage::scattering: who = late(*scatter_, oldest); break;
                case Stage::crossing:
                    if (Deadline::too_early(by, timeout())) return;
                    who = late(*across_, oldest);
                    break;
                case Stage::gathering:
                    if (Deadline::too_early(by, timeout(), 2)) return;
                    who = late(*gather_, oldest);
                    break;
                case Stage::complete: return;
            }
            if (oldest.stage != Stage::meeting) who.did = collective::Late::Did::not_go_on;
        }
        fail(collective::timed_out(what, who, world_rank(rank()), timeout()));
    }

    const std::shared_ptr<MessageEngine> flat_;     ///< over all ranks
    const std::shared_ptr<ProcessEngine> scatter_;  ///< over the ranks of this machine
    const std::vector<int> machines_;
    const bool even_;   ///< all machines have the same number of ranks
    const int shards_;  ///< shards of a machine's sum: one for each of its ranks if even, otherwise one for each of its first ranks
    const std::shared_ptr<MessageEngine> across_;
    // Over this machine's ranks too, each with its own order: for gathers, and for objects that all ranks make at the same place.
    const std::shared_ptr<ProcessEngine> gather_, aside_;
    collective::LivenessCheck liveness_check_;

    std::mutex mutex_;
    std::vector<Started> started_;  ///< numbers first_ to next_, each at its number modulo the size
    std::uint64_t first_ = 0;       ///< all below are complete
    std::uint64_t next_ = 0;
};

}  // namespace gradsync::inline v0_2::detail
