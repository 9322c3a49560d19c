// SPDX-License-Identifier: BSL-1.0
#pragma once
// Sharded training: every rank keeps its shards of the optimizer's state (ZeRO stage 1), of the gradients too (2), and
// of the weights (3, FSDP). The calls are those of plain_synchroniser.hpp; the optimizer is the library's to call. On devices all of it is in
// their memory.

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <gradsync/bucket/any_buckets.hpp>
#include <gradsync/interop/pointer.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

#include "muon.hpp"
#include "options.hpp"
#include "synchroniser.hpp"

namespace gradsync_train {

/// While it lives, the gradients of `sharded` are not communicated; where they cannot outlive a backward pass, nothing.
template <bool pools, class Sharded>
auto hold_back(Sharded& sharded) {
    if constexpr (pools) return std::monostate{};
    else return sharded.no_sync();
}

/// What goes for every stage. `Sharded`: the library's class; `pools`: its gradients are sharded, too.
template <class Ops, class Backend, class Sharded, bool pools>
class ShardedSynchroniser : public BackendSynchroniser<Backend> {
public:
    float* gradient(std::size_t i) override { return idle_ ? unread_.data() : static_cast<float*>(sharded_.acquire_gradient(i).data); }
    void ready(std::size_t i) override {
        if (!idle_) sharded_.mark_ready(i);
    }

    void begin_backward(std::size_t micro_batch) override {
        last_ = micro_batch + 1 == micro_batches_;
        // With sharded gradients, the ranks reduce one micro-batch each at a time. In the last round some ranks may have none: they
        // compute along, as the others need their weights, but their gradients go nowhere.
        idle_ = pools && micro_batch >= micro_batches_;
        if (pools && micro_batch >= fewest_) (void)sharded_.begin_step(!idle_);
        if (idle_ && unread_.empty()) unread_ = ops_.floats(std::ranges::max(this->parameters_, {}, &Parameter::count).count);
        if (!last_) guard_.emplace(hold_back<pools>(sharded_));
    }
    void end_backward() override {
        guard_.reset();
        if (pools || last_) sharded_.finish();
    }
    void step(double learning_rate) override {
        double scale = 1;
        if (clip_ > 0) {
            if constexpr (Ops::on_device) sharded_.optimizer().scale_gradients_by(clip_factor());
            else scale = gradsync::clip_factor(sharded_.gradient_norm(), clip_);
        }
        sharded_.optimizer().set_learning_rate(learning_rate);
        sharded_.step(scale);
    }

    void collect(const Synchroniser::StateSink& sink) override {
        // A device goes on computing with what a lost rank has left: it is known here, before anything is kept.
        if constexpr (Ops::on_device) {
            sharded_.flush();
            this->comm_.barrier().wait();
        }
        sharded_.collect_state(0, [&](std::size_t i, std::size_t array, std::size_t first, gs::ConstBufferView piece) {
            sink({i, array, first}, {static_cast<const float*>(piece.data), piece.count});
        });
    }
    void restore(std::uint64_t steps, const Synchroniser::StateSource& source) override {
        sharded_.distribute_state(0, [&](std::size_t i, std::size_t array, std::size_t first, gs::BufferView piece) {
            source({i, array, first}, {static_cast<float*>(piece.data), piece.count});
        });
        sharded_.optimizer().set_steps(steps);
    }

    StateViews state_views() override {
        StateViews state{.is_replicated = false};
        sharded_.for_each_shard([&](std::size_t, std::size_t, std::size_t, gs::BufferView piece) { state.views.push_back(piece); });
        return state;
    }
    std::optional<gs::elastic::AnyShards> shards() override {
        if constexpr (Ops::on_device) return {};
        else return gs::elastic::AnyShards(sharded_);
    }
    void state_was_written(std::uint64_t steps) override {
        sharded_.publish();
        sharded_.optimizer().set_steps(steps);
    }

    const gs::Statistics& statistics() const override { return sharded_.statistics(); }
    double matrix_seconds() const override { return matrix_seconds_of(sharded_.optimizer()); }
    MemoryUse memory() const override {
        const gs::ShardMemory m = sharded_.memory();
        return {.parameters = m.parameters + m.master_weights,
                .gradients = m.gradients + (unread_.size() + (own_gradients_.empty() ? 0 : this->parameters_.count())) * sizeof(float),
                .optimizer = m.optimizer_state};
    }

protected:
    template <class... Arguments>
    ShardedSynchroniser(Ops ops, Backend comm, Parameters& parameters, Units units, const Options& o, Arguments&&... arguments)
        : BackendSynchroniser<Backend>{comm, parameters, std::move(units)},
          ops_{ops},
          micro_batches_{o.deal(comm.size()).count(comm.rank())},
          fewest_{o.deal(comm.size()).count(comm.size() - 1)},
          clip_{o.clip},
          sharded_{comm, views(o), make_optimizer<typename Sharded::Optimizer>(parameters, o), std::forward<Arguments>(arguments)...} {}

    /// Weights are not the trainer's, and gradients only if they are borrowed.
    std::vector<gs::ParameterView> views(const Options& o) {
        std::vector<gs::ParameterView> views;
        for (const auto& p : this->parameters_) {
            float* const gradient = o.gradients == "borrowed" ? own_gradients_.emplace_back(ops_.floats(p.count)).data() : nullptr;
            views.push_back(view_of(p, nullptr, gradient, Backend::memory_space));
        }
        return views;
    }

private:
    /// The ranks' sums meet on the device: over NCCL no host waits for the norm.
    const float* clip_factor()
        requires(Ops::on_device)
    {
        std::vector<gs::ConstBufferView> own;
        sharded_.for_each_gradient([&](const gs::DeviceSlice& slice, double) { own.push_back(slice.gradient); });
        return ops_.clip_factor(
            own, clip_, [&](double* sum) { this->comm_.all_reduce(gs::device_buffer(sum, 1), gs::ReduceOp::sum).wait_on(ops_.stream()); });
    }

    Ops ops_;
    std::size_t micro_batches_, fewest_;  // of this rank, of any
    double clip_;
    bool last_ = false;            // micro-batch of the step
    bool idle_ = false;            // the others have a micro-batch, and this rank has none
    typename Ops::Floats unread_;  // an idle rank's gradients, each over the one before
    std::vector<typename Ops::Floats> own_gradients_;

protected:
    Sharded sharded_;

private:
    std::optional<decltype(hold_back<pools>(std::declval<Sharded&>()))> guard_;
};

/// Inside a reduction gradients come in parts, so that no matrix can be stepped there.
template <class Ops, class Stage>
using StageOptimizer = std::conditional_t<std::same_as<Stage, gs::StepInside>, AdamW<Ops>, OptimizerOf<Ops>>;

/// Stages 1 and 2: the weights are whole, in the library's memory.
template <class Ops, class Backend, class Stage, class OverlapPolicy>
class OptimizerSharding final
    : public ShardedSynchroniser<Ops, Backend,
                                 gs::ShardedOptimizer<Backend, StageOptimizer<Ops, Stage>, Stage, gs::AnyBuckets, OverlapPolicy>,
                                 Stage::shards_gradients> {
    using Base =
        ShardedSynchroniser<Ops, Backend, gs::ShardedOptimizer<Backend, StageOptimizer<Ops, Stage>, Stage, gs::AnyBuckets, OverlapPolicy>,
                            Stage::shards_gradients>;
    using Base::sharded_, Base::units_;

public:
    /// `whole`: which parameters are not cut; none with StepInside.
    OptimizerSharding(Backend comm, Parameters& parameters, Units units, const Options& o, gs::Observer* observer, gs::AnyBuckets buckets,
                      OverlapPolicy overlap, Ops ops, auto... whole)
        : Base{ops,
               comm,
               parameters,
               std::move(units),
               o,
               options(o, comm.size(), observer),
               std::move(buckets),
               std::move(overlap),
               std::move(whole)...} {
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            float* const weights = static_cast<float*>(sharded_.parameter_value(i).data);
            if (!o.shared_weights || comm.rank() == 0)
                ops.write(parameters[i].count, weights, [&](std::span<float> out) { parameters.initialise(i, 0, out); });
            parameters.bind(i, weights);
        }
        sharded_.broadcast_parameters();
    }

    /// With OverlapForward weights arrive under the next forward pass.
    void enter(std::size_t unit) override {
        for (std::size_t i : units_[unit]) sharded_.wait_parameter(i);
    }
    void leave(std::size_t) override {}
    void flush() override { sharded_.flush(); }

private:
    static gs::ShardingOptions options(const Options& o, int size, gs::Observer* observer) {
        return {.reducer = {.gradients = Stage::shards_gradients     ? gs::GradientStorage::automatic
                                         : o.gradients == "borrowed" ? gs::GradientStorage::borrowed
                                                                     : gs::GradientStorage::in_buckets,
                            .accumulation = gs::Accumulation::in_buckets,
                            .micro_batches = o.deal(size).micro_batches,
                            .reduce_dtype = reduce_dtype(o),
                            .observer = observer},
                .parameters = o.shared_weights ? gs::ParameterStorage::shared : gs::ParameterStorage::in_buckets};
    }
};

/// Stage 3: the weights of a unit are there while it is in use.
template <class Ops, class Backend, class OverlapPolicy>
class ParameterSharding final
    : public ShardedSynchroniser<Ops, Backend, gs::ShardedParameters<Backend, OptimizerOf<Ops>, OverlapPolicy>, true> {
    using Base = ShardedSynchroniser<Ops, Backend, gs::ShardedParameters<Backend, OptimizerOf<Ops>, OverlapPolicy>, true>;
    using Base::sharded_, Base::units_, Base::parameters_;

public:
    ParameterSharding(Backend comm, Parameters& parameters, Units units, const Options& o, gs::Observer* observer, OverlapPolicy overlap,
                      Ops ops)
        : Base{ops,
               comm,
               parameters,
               units,
               o,
               gs::Units{first_units(parameters, units)},
               options(o, comm.size(), observer),
               std::move(overlap),
               whole_parameters(o)} {
        // No rank ever has all weights, not even at first.
        sharded_.for_each_shard([&](std::size_t i, std::size_t array, std::size_t first, gs::BufferView shard) {
            if (array == 0)
                ops.write(shard.count, static_cast<float*>(shard.data),
                          [&](std::span<float> out) { parameters.initialise(i, first, out); });
        });
        sharded_.publish();
        for (const auto& unit : units_) {
            auto& gathered = gathered_.emplace_back();
            for (std::size_t i : unit) {
                const std::size_t u = sharded_.unit_of(i);
                if (std::find(gathered.begin(), gathered.end(), u) == gathered.end()) gathered.push_back(u);
            }
        }
    }

    void enter(std::size_t unit) override {
        for (std::size_t u : gathered_[unit]) sharded_.acquire(u);
        for (std::size_t i : units_[unit]) parameters_.bind(i, static_cast<const float*>(sharded_.parameter_value(i).data));
    }
    void leave(std::size_t unit) override {
        for (std::size_t i : units_[unit]) parameters_.bind(i, nullptr);
        for (std::size_t u : gathered_[unit]) sharded_.release(u);
    }
    void flush() override {}
    bool computes_together() const override { return true; }
    bool weights_stay() const override { return false; }

private:
    /// A tied weight belongs to the first of the units that use it, and is gathered with that for the others.
    static std::vector<std::size_t> first_units(const Parameters& parameters, const Units& units) {
        std::vector<std::size_t> unit_of(parameters.size());
        for (std::size_t u = units.size(); u-- > 0;)
            for (std::size_t i : units[u]) unit_of[i] = u;
        return unit_of;
    }
    static gs::ShardedParametersOptions options(const Options& o, int size, gs::Observer* observer) {
        return {.reducer = {.accumulation = gs::Accumulation::in_buckets,
                            .micro_batches = o.deal(size).micro_batches,
                            .reduce_dtype = reduce_dtype(o),
                            .observer = observer},
                .prefetch = o.prefetch,
                .reshard_after_forward = !o.no_reshard,
                .replicate_below = o.replicate_below};
    }

    std::vector<std::vector<std::size_t>> gathered_;  // by unit: the library's units that it needs
};

}  // namespace gradsync_train
