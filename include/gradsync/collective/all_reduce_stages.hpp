// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "../core/shard_range.hpp"
#include "call.hpp"
#include "engine.hpp"
#include "failures.hpp"
#include "messages/message_engine.hpp"
#include "shared_memory/process_engine.hpp"

namespace gradsync::inline v0_2::detail {

/// The stages of an all-reduce over several machines: a reduce-scatter on each machine, an all-reduce of each shard among the ranks of all
/// machines that have it, and an all-gather on each machine. If machines have different numbers of ranks, the first and last stage are a
/// reduce and a broadcast for each shard. For one thread at a time.
class AllReduceStages {
    using Call = collective::Call;
    using Operation = collective::Operation;
    using MessageEngine = message_passing::MessageEngine;
    using ProcessEngine = shared_memory::ProcessEngine;

public:
    enum class Stage { meeting, scattering, crossing, gathering, complete };

    /// An all-reduce in a stage. `HierarchicalEngine` keeps its other collectives in this form too.
    struct Started {
        Call call;
        std::uint64_t met = 0;  ///< number of the collective in which all ranks say what they have started
        Stage stage = Stage::meeting;
        std::uint64_t number = 0;   ///< number of this stage's last collective
        std::uint64_t parts = 0;    ///< number of its collectives, which have consecutive numbers; 0 if this rank has no shard to send
        std::uint64_t weighed = 0;  ///< number of the collective that adds the machine's scales and weights
        double sums[2] = {};        ///< the sums of these scales and weights
    };

    /// `scatter` and `gather`: over the ranks of this machine. `across`: over the ranks with the same place on all machines. `even`: all
    /// machines have the same number of ranks. `shards`: those of a machine's sum.
    AllReduceStages(std::shared_ptr<ProcessEngine> scatter, std::shared_ptr<MessageEngine> across, std::shared_ptr<ProcessEngine> gather,
                    bool even, int shards) noexcept
        : scatter_(std::move(scatter)), across_(std::move(across)), gather_(std::move(gather)), even_(even), shards_(shards) {}

    /// Each stage begins in the order of the collectives: the stages that may begin, given the collectives already visited.
    struct Gates {
        bool scatter = true, cross = true, gather = true;
        void close_behind(Stage stage) noexcept {
            scatter &= stage > Stage::meeting;
            cross &= stage > Stage::scattering;
            gather &= stage > Stage::crossing;
        }
    };

    /// Makes all possible progress on an all-reduce; `met()`: have all ranks started it, and do their calls fit?
    template <class Met>
    void move(Started& started, const Gates& gates, Met&& met) {
        if (started.stage == Stage::meeting && gates.scatter && met()) scatter(started);
        if (started.stage == Stage::scattering && gates.cross && is_scattered(started)) cross(started);
        if (started.stage == Stage::crossing && gates.gather && are_over(*across_, started)) gather(started);
        if (started.stage == Stage::gathering && are_over(*gather_, started)) started.stage = Stage::complete;
    }

    /// The ranks that keep an all-reduce from leaving its stage, once all ranks have met.
    collective::Late late(const Started& started) {
        collective::Late who = started.stage == Stage::scattering ? late(*scatter_, started)
                               : started.stage == Stage::crossing ? late(*across_, started)
                                                                  : late(*gather_, started);
        who.did = collective::Late::Did::not_go_on;
        return who;
    }

private:
    /// The shard of the machine's sum that its rank `owner` has; there are none from `shards_` on.
    ElementRange shard(const Call& call, int owner) const noexcept {
        return owner < shards_ ? shard_range(call.out_count, shards_, owner) : ElementRange{};
    }
    static void set_in(Call& part, const void* whole, ElementRange range) noexcept {
        part.in = range.size() == 0 ? nullptr : static_cast<const std::byte*>(whole) + range.first * size_of(part.dtype);
        part.in_count = range.size();
    }
    static void set_out(Call& part, void* whole, ElementRange range) noexcept {
        part.out = range.size() == 0 ? nullptr : static_cast<std::byte*>(whole) + range.first * size_of(part.dtype);
        part.out_count = range.size();
    }

    /// Starts a stage on a machine: one collective of the whole buffer if there is a shard for each rank, otherwise one for each shard.
    /// `part(owner, range)`: the collective of that shard, or of the whole. If a start throws, `started` stays as it was.
    template <class Part>
    void enter(Started& started, Stage stage, ProcessEngine& engine, Part&& part) {
        const int parts = even_ ? 1 : shards_;
        std::uint64_t last = 0;
        for (int owner = 0; owner < parts; ++owner)
            last = engine.start(part(owner, even_ ? ElementRange{0, started.call.out_count} : shard(started.call, owner)));
        enter(started, stage, parts, last);
    }
    static void enter(Started& started, Stage stage, int parts, std::uint64_t last) noexcept {
        started.stage = stage;
        started.parts = static_cast<std::uint64_t>(parts);
        started.number = last;
    }
    /// Are all parts of this stage complete?
    static bool are_over(collective::Engine& engine, const Started& started) noexcept {
        std::uint64_t open = started.parts;
        while (open > 0 && !engine.advance_to(started.number + 1 - open)) --open;
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
        const Call& call = started.call;
        const bool mean = call.op == ReduceOp::mean;
        if (mean) {
            started.sums[0] = call.contribution.scale < 0 ? -call.contribution.scale : call.contribution.scale;
            started.sums[1] = call.contribution.weight;
            started.weighed = scatter_->start({.in = started.sums,
                                               .out = started.sums,
                                               .in_count = 2,
                                               .out_count = 2,
                                               .operation = Operation::all_reduce,
                                               .dtype = DType::f64});
        }
        // On the machine, compute a mean too, weighted by the scales: it is no larger than its inputs, so low precision does not overflow.
        const double weight = mean ? started.sums[0] : call.contribution.weight;
        enter(started, Stage::scattering, *scatter_, [&](int owner, ElementRange range) {
            Call part = call;
            part.operation = even_ ? Operation::reduce_scatter : Operation::reduce;
            part.root = owner;
            part.contribution.weight = weight;
            set_in(part, call.in, range);
            set_out(part, call.out, even_ || owner == scatter_->rank() ? shard(call, scatter_->rank()) : ElementRange{});
            return part;
        });
    }

    bool is_scattered(const Started& started) noexcept {
        return are_over(*scatter_, started) && (started.call.op != ReduceOp::mean || !scatter_->advance_to(started.weighed));
    }

    void cross(Started& started) {
        if (scatter_->rank() >= shards_) return enter(started, Stage::crossing, 0, 0);
        Call call = started.call;
        const ElementRange own = shard(call, scatter_->rank());
        set_out(call, call.out, own);
        set_in(call, started.call.out, own);
        if (call.op == ReduceOp::mean) call.contribution = {started.sums[0], started.sums[1]};
        enter(started, Stage::crossing, 1, across_->start(call));
    }

    void gather(Started& started) {
        enter(started, Stage::gathering, *gather_, [&](int owner, ElementRange range) {
            Call part{.root = owner, .operation = even_ ? Operation::all_gather : Operation::broadcast, .dtype = started.call.dtype};
            set_in(part, started.call.out, even_ ? shard(started.call, gather_->rank()) : range);
            set_out(part, started.call.out, range);
            return part;
        });
    }

    const std::shared_ptr<ProcessEngine> scatter_;
    const std::shared_ptr<MessageEngine> across_;
    const std::shared_ptr<ProcessEngine> gather_;
    const bool even_;
    const int shards_;  ///< one for each of the machine's ranks if even, otherwise one for each of its first ranks
};

}  // namespace gradsync::inline v0_2::detail
