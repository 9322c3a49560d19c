// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <sched.h>

#include <cmath>
#include <filesystem>
#include <future>
#include <optional>
#include <utility>
#include <vector>

#include <gradsync/overlap/overlap_forward.hpp>
#include <gradsync/shard/checkpoint.hpp>
#include <gradsync/shard/hybrid.hpp>

#include "oracle.hpp"
#include "support/temporary_directory.hpp"

namespace gradsync_test {

/// Steps of a training that one job makes.
struct Leg {
    int first = 0, last = 0;
    std::filesystem::path from = {}, to = {};  ///< checkpoints; "": none
};

/// How the trainer computes: in host memory, at once.
template <class B>
struct HostKernels {
    using Optimizer = AdamW;

    HostKernels(B&, const DrawnTraining&) {}
    /// The trainer's memory, which kernels and collectives use.
    void use(const gradsync::BufferView&) {}
    template <class F>
    void run(F&& kernel) {
        kernel();
    }
    void finish() {}  ///< returns when all kernels are over
    /// Disturbs the device at this place of a step. `in_flight`: the backward may have collectives in flight.
    void disturb(int /*step*/, int /*place*/, bool /*in_flight*/) {}
};

/// One rank of a training: a trainer that uses the API as the guides say. Sync: a Reducer, ShardedOptimizer or ShardedParameters. All that
/// reads or writes numbers is a kernel, which on devices runs later.
template <class Sync, class Kernels>
class Trainer {
    using Optimizer = typename Kernels::Optimizer;
    static constexpr bool is_reducer = !requires(Sync& s) { s.step(); };
    static constexpr bool gathers = requires(Sync& s) { s.gather(0); };
    static constexpr bool averages_later = is_reducer && requires(Sync& s) { s.finish().acquire(0); };

public:
    Trainer(Sync& sync, const DrawnTraining& t, const Leg& leg, std::vector<Tensor>& model, int rank, Kernels& kernels)
        : sync_(sync),
          t_(t),
          leg_(leg),
          model_(model),
          rank_(rank),
          kernels_(kernels),
          optimizer_((sync.broadcast_parameters(t.root), kernels.finish(), Optimizer{}), model) {}
    Trainer& operator=(Trainer&&) = delete;
    ~Trainer() { kernels_.finish(); }

    Trained train() {
        if constexpr (!is_reducer)
            if (!leg_.from.empty()) sync_.optimizer().steps = std::stoi(gradsync::load_shards(leg_.from, sync_));
        for (int s = leg_.first; s < leg_.last; ++s) {
            if constexpr (averages_later) finish_last(s - 1);
            thaw(s);
            step(s);
            forget_renewed();
        }
        if constexpr (averages_later) finish_last(leg_.last - 1);
        if constexpr (!is_reducer)
            if (!leg_.to.empty() && sync_.replica() == 0) gradsync::save_shards(leg_.to, sync_, std::to_string(sync_.optimizer().steps));
        return {weights(), norms_};
    }

private:
    using BufferView = gradsync::BufferView;

    /// Frees what gradients were before their last mark.
    void forget_renewed() {
        if (t_.renews) kernels_.finish();
        for (auto& memories : renewed_)
            if (memories.size() > 1) memories.erase(memories.begin(), memories.end() - 1);
    }

    std::vector<Bytes> weights() {
        std::vector<Bytes> result(model_.size());
        const auto read = [&](std::size_t i) { kernels_.run([&to = result[i], from = value(i)] { to = bytes_of(from); }); };
        if constexpr (!is_reducer) sync_.flush();
        for (std::size_t i = 0; i < model_.size(); ++i)
            if constexpr (gathers) {
                const auto use = sync_.gather(t_.unit_of(i));
                read(i);
            } else {
                read(i);
            }
        kernels_.finish();
        return result;
    }

    void thaw([[maybe_unused]] int s) {
        if constexpr (requires { sync_.unfreeze({}); }) {
            std::vector<std::size_t> which;
            for (std::size_t i = 0; i < model_.size(); ++i)
                if (s > 0 && t_.parameters[i].thaws == s) which.push_back(i);
            if (!which.empty()) sync_.unfreeze(which), rebuilt_ = false;
        }
    }

    void step(int s) {
        written_.assign(model_.size(), 0);
        kernels_.disturb(s, 0, false);
        if constexpr (requires { sync_.record_order(); })
            if (t_.rebuilds && t_.draw(2, 20, s) == 0) sync_.record_order(1);
        if constexpr (requires { sync_.no_sync(); })
            if (t_.interrupts && !t_.pooled() && !t_.counted() && t_.draw(2, 21, s) == 0) {  // a micro-batch that goes wrong
                {
                    const auto guard = sync_.no_sync();
                    pass(s, 50);
                }
                sync_.discard();
                written_.assign(model_.size(), 0);
            }
        if (t_.finds_unused() && !t_.pooled())
            for (std::size_t i = 0; i < model_.size(); ++i)
                if (t_.is_trained(s, i)) fill(gradient(i), 0);
        const int rounds = t_.pooled() ? t_.turns(0) : 1;
        for (int round = 0; round < rounds; ++round) this->round(s, round);
        kernels_.disturb(s, 1, false);
        end_step(s);
        if (t_.rebuilds && t_.draw(2, 22, s) == 0 && !averages_later) rebuild();
        if constexpr (requires { sync_.publish(); })
            if (t_.interrupts && t_.draw(4, 23, s) == 0) sync_.publish();
    }

    /// The micro-batches up to a finish(), and that.
    void round(int s, int round) {
        const bool has_batch = t_.has_batch(s, round, rank_);
        const bool ends_unevenly = t_.counted() && t_.pooled() && t_.turns(0) != t_.turns(t_.ranks - 1) && round + 1 == t_.turns(0);
        if (t_.joins || ends_unevenly) (void)sync_.begin_step(has_batch);
        if (t_.weighted() && has_batch) sync_.set_weight(t_.weight(s, round, rank_));
        // In stage 3 a rank with fewer micro-batches takes part in the gathers of the others.
        for (int turn = t_.turns(rank_); gathers && !t_.pooled() && turn < t_.turns(0); ++turn) pass(s, turn, false);
        const int first = t_.pooled() ? round : 0, last = t_.pooled() ? round + 1 : t_.turns(rank_);
        for (int turn = first; turn < last; ++turn) {
            std::optional<gradsync::NoSync> guard;
            if (turn + 1 < last) guard.emplace(sync_.no_sync());
            if (turn + 1 == last && !t_.pooled() && t_.rebuilds && t_.draw(4, 24, s) == 0) rebuild();
            pass(s, turn, has_batch || t_.eager);
        }
        kernels_.disturb(s, 2 + round, true);
        if constexpr (!is_reducer) sync_.flush();
        if constexpr (averages_later) {
            averages_ = sync_.finish();
        } else {
            if constexpr (requires { sync_.try_finish(); })
                if (t_.polls)
                    while (!sync_.try_finish()) ::sched_yield();
            if (!is_reducer || !t_.polls) sync_.finish();
        }
    }

    void rebuild() {
        if constexpr (requires { sync_.rebuild_buckets(); }) (void)sync_.rebuild_buckets(), rebuilt_ = true;
    }

    /// A forward, and a backward that marks gradients or not.
    void pass(int s, int turn, bool marks = true) {
        std::vector<std::size_t> all;
        for (std::size_t i = 0; i < model_.size(); ++i)
            if (t_.is_trained(s, i)) all.push_back(i);
        if constexpr (gathers) {
            const auto units = shuffled(sync_.unit_count(), static_cast<std::uint32_t>(t_.draw(1u << 30, 25, t_.order == 0 ? 0 : s)));
            for (const std::size_t u : units) const auto use = sync_.gather(u);
            const bool by_parameter = t_.device && t_.pooled();  // in reverse order of registration
            for (auto i = all.rbegin(); by_parameter && i != all.rend(); ++i) {
                const auto use = sync_.gather(t_.unit_of(*i));
                if (marks) backward(s, turn, t_.mark_order(s, turn, rank_, {*i}));
            }
            for (auto u = units.rbegin(); !by_parameter && u != units.rend(); ++u) {
                const auto use = sync_.gather(*u);
                std::vector<std::size_t> own;
                for (const std::size_t i : all)
                    if (t_.unit_of(i) == *u) own.push_back(i);
                if (marks) backward(s, turn, t_.mark_order(s, turn, rank_, own));
            }
        } else if (t_.kind == Kind::step_in_backward || (t_.device && t_.pooled() && rebuilt_)) {  // they want the order of the plan
            std::vector<std::size_t> planned;
            for (std::size_t b = 0; b < sync_.plan().size(); ++b)
                for (const std::size_t i : sync_.plan().bucket(b))
                    if (t_.uses(s, turn, rank_, i)) planned.insert(planned.end(), t_.marks(s, turn, rank_, i), i);
            if (marks) backward(s, turn, planned);
        } else if (marks) {
            backward(s, turn, t_.mark_order(s, turn, rank_, all));
        }
    }
    void backward(int s, int turn, const std::vector<std::size_t>& order) {
        std::vector<std::size_t> mine, others;
        for (const std::size_t i : order) (t_.threads && i % 2 == 1 ? others : mine).push_back(i);
        std::future<void> other;
        if (!others.empty()) other = std::async(std::launch::async, [&] { mark(s, turn, others); });
        mark(s, turn, mine);
        if (!others.empty()) other.get();
    }
    void mark(int s, int turn, const std::vector<std::size_t>& order) {
        for (std::size_t k = 0; k < order.size(); ++k) {
            const std::size_t i = order[k];
            kernels_.disturb(s, 100 * (turn + 1) + static_cast<int>(k), true);
            if constexpr (requires { sync_.wait_parameter(i); }) sync_.wait_parameter(i);
            const bool adds = written_[i] && !t_.pooled() && t_.options.accumulation == gradsync::Accumulation::in_gradients;
            const bool is_final = std::find(order.begin() + static_cast<std::ptrdiff_t>(k) + 1, order.end(), i) == order.end();
            BufferView to = gradient(i);
            if (t_.renews && is_final) {
                renewed_[i].emplace_back((to.count + 1) * size_of(to.dtype));
                to.data = renewed_[i].back().data();
                kernels_.use(to);
            }
            if (is_final && t_.poisoned(s)) fill(to, std::nan(""));
            else if (is_final)
                kernels_.run(
                    [=, from = value(i), rank = rank_, batch = t_.batch(s, turn)] { write_gradient(to, from, rank, batch, i, adds); });
            else if (!adds) fill(to, 1000);  // what must not leave yet
            if (is_final) written_[i] = 1;
            if constexpr (is_reducer)
                if (t_.renews && is_final) {
                    sync_.mark_ready(i, to);
                    continue;
                }
            sync_.mark_ready(i);
        }
    }
    void fill(BufferView to, double x) {
        kernels_.run([=] { write(to, constant_bytes(to.dtype, to.count, x)); });
    }
    BufferView gradient(std::size_t i) {
        if constexpr (is_reducer) return sync_.gradient_view(i);
        else return sync_.acquire_gradient(i);
    }
    gradsync::ConstBufferView value(std::size_t i) {
        if constexpr (is_reducer) return model_[i].value_view();
        else return sync_.parameter_value(i);
    }

    void end_step(int s) {
        double scale = 1;
        if (t_.max_norm > 0) {
            if constexpr (requires { sync_.clip_gradients_by_norm(t_.max_norm); })
                if (t_.in_place) norms_.push_back(sync_.clip_gradients_by_norm(t_.max_norm));
            if (!is_reducer || !t_.in_place) {
                norms_.push_back(sync_.gradient_norm());
                scale = gradsync::clip_factor(norms_.back(), t_.max_norm);
            }
        }
        if constexpr (is_reducer) {
            if (!averages_later && !t_.skips(s) && sync_.statistics().last.skipped == 0) {
                kernels_.run([this] { optimizer_.begin_step(); });
                for (std::size_t i = 0; i < model_.size(); ++i) step_parameter(s, i, sync_.gradient_view(i), scale);
            }
        } else if (t_.skips(s)) {
            sync_.discard();
        } else {
            sync_.step(scale);
        }
    }
    void step_parameter(int s, std::size_t i, BufferView average, double scale = 1) {
        if (t_.is_trained(s, i) && sync_.was_used(i))
            kernels_.run([=, this] { optimizer_.step(i, average, scale, model_[i].value_view()); });
    }
    /// With OverlapForward: the averages of step s arrive.
    void finish_last(int s) {
        if (s < 0) return;
        if (!t_.skips(s)) kernels_.run([this] { optimizer_.begin_step(); });
        for (const std::size_t i : shuffled(model_.size(), static_cast<std::uint32_t>(t_.draw(1u << 30, 26, s, 0, rank_)))) {
            const BufferView average = averages_.acquire(i);
            if (!t_.skips(s)) step_parameter(s, i, average);
        }
        averages_ = {};
    }

    struct Nothing {};
    template <bool later>
    static auto averages_type() {
        if constexpr (later) return std::type_identity<decltype(std::declval<Sync&>().finish())>();
        else return std::type_identity<Nothing>();
    }

    Sync& sync_;
    const DrawnTraining& t_;
    const Leg& leg_;
    std::vector<Tensor>& model_;
    int rank_;
    Kernels& kernels_;
    WholeOptimizer<Optimizer> optimizer_;  ///< beside a Reducer
    typename decltype(averages_type<averages_later>())::type averages_;
    std::vector<char> written_;  ///< by parameter: has a gradient of this step
    bool rebuilt_ = false;       ///< the plan's order is no longer that of the registration
    std::vector<std::vector<Bytes>> renewed_ = std::vector<std::vector<Bytes>>(model_.size());
    std::vector<double> norms_;
};

/// Runs this rank of the training, or of a leg of it.
template <template <class> class Kernels = HostKernels, class B>
Trained run_rank(B world, const DrawnTraining& t, const Leg& leg) {
    using namespace gradsync;
    using O = typename Kernels<B>::Optimizer;
    constexpr MemorySpace space = B::memory_space;
    const int rank = world.rank();
    std::vector<Tensor> model = initial_model(t);
    std::vector<ParameterView> views;
    std::size_t end = 0, arena_bytes = 0;  // the latter are the same on all ranks
    std::vector<std::size_t> offsets(model.size());
    const auto seed = static_cast<std::uint32_t>(t.layout == 2 ? rank : 1000);
    for (const std::size_t i : shuffled(model.size(), seed)) {
        const std::size_t size = size_of(t.parameters[i].gradient);
        offsets[i] = (end + size - 1) / size * size;
        end = offsets[i] + model[i].count() * size;
        arena_bytes += model[i].count() * size + sizeof(double);
    }
    const auto arena = world.allocate(arena_bytes);
    for (std::size_t i = 0; i < model.size(); ++i) {
        Tensor& p = model[i];
        const int thaws = t.parameters[i].thaws;
        const bool is_trained = thaws == 0 || thaws < leg.first;
        if (rank != t.root || (is_trained && !leg.from.empty())) p.value = random_gradient(p, rank, 78, i);
        p.gradient.resize((1 + p.count()) * size_of(t.parameters[i].gradient));  // none without an address, which would mean no gradient
        views.push_back({.name = p.name,
                         .value = {p.value.data(), p.count(), p.dtype, space},
                         .gradient = {t.layout == 0 ? p.gradient.data() : static_cast<std::byte*>(arena.data()) + offsets[i], p.count(),
                                      t.parameters[i].gradient, space},
                         .requires_grad = is_trained,
                         .uses = t.parameters[i].uses,
                         .may_be_empty = true});
    }
    const AnyBuckets buckets = t.bucket_policy();
    const AnyOverlap overlap = t.overlap_policy();
    using Hybrid = HybridReduceScatter<B>;
    std::optional<HybridGroups<B>> groups;
    if (t.per_group != 0) groups.emplace(hybrid_groups(world, t.per_group));
    Kernels<B> kernels(groups ? groups->group : world, t);
    for (const ParameterView& p : views) {
        kernels.use(p.value);
        if (t.layout == 0) kernels.use(p.gradient);
    }
    const auto train = [&](auto&& sync) { return Trainer(sync, t, leg, model, rank, kernels).train(); };
    const ShardingOptions sharding{.reducer = t.options, .parameters = t.storage};

    if (t.kind == Kind::reducer && t.forward)
        return train(Reducer<B, AnyBuckets, OverlapForward>(world, views, t.options, buckets, OverlapForward()));
    if (t.kind == Kind::reducer) return train(Reducer<B, AnyBuckets, AnyOverlap>(world, views, t.options, buckets, overlap));
    if (t.kind == Kind::zero1 && groups)
        return train(ShardedOptimizer<B, O, Zero1, AnyBuckets, AnyOverlap, Hybrid>(groups->group, views, O{}, sharding, buckets, overlap,
                                                                                   Hybrid(groups->replicas)));
    if (t.kind == Kind::zero1)
        return train(ShardedOptimizer<B, O, Zero1, AnyBuckets, AnyOverlap>(world, views, O{}, sharding, buckets, overlap));
    if (t.kind == Kind::zero2 && groups)
        return train(ShardedOptimizer<B, O, Zero2, AnyBuckets, AnyOverlap, Hybrid>(groups->group, views, O{}, sharding, buckets, overlap,
                                                                                   Hybrid(groups->replicas)));
    if (t.kind == Kind::zero2 && t.forward)
        return train(ShardedOptimizer<B, O, Zero2, AnyBuckets, OverlapForward>(world, views, O{}, sharding, buckets, OverlapForward()));
    if (t.kind == Kind::zero2)
        return train(ShardedOptimizer<B, O, Zero2, AnyBuckets, AnyOverlap>(world, views, O{}, sharding, buckets, overlap));
    if constexpr (space == MemorySpace::host) {
        if (t.kind == Kind::step_inside) return train(ShardedOptimizer<B, O, StepInside, AnyBuckets>(world, views, O{}, sharding, buckets));
        if (t.kind == Kind::step_in_backward)
            return train(ShardedOptimizer<B, O, StepInBackward, AnyBuckets, AnyOverlap>(world, views, O{}, sharding, buckets, overlap));
    }

    std::vector<std::size_t> unit_of;
    for (std::size_t i = 0; i < model.size(); ++i) unit_of.push_back(t.unit_of(i));
    const Units units(unit_of);
    if (groups)
        return train(
            ShardedParameters<B, O, AnyOverlap, Hybrid>(groups->group, views, O{}, units, t.stage3, overlap, Hybrid(groups->replicas)));
    return train(ShardedParameters<B, O, AnyOverlap>(world, views, O{}, units, t.stage3, overlap));
}

/// Runs the training, in two jobs if it is saved, and describes its first fault; returns "" if there is none. `run(t, leg)` returns the
/// results of all ranks.
template <class O = AdamW, class Run>
std::string run_legs(const DrawnTraining& t, Run&& run) {
    if (t.saved_after == 0) return difference<O>(t, run(t, Leg{0, t.steps}));
    const TemporaryDirectory saved, moved;
    const std::vector<Trained> before = run(t, Leg{0, t.saved_after, {}, saved.path()});
    (void)run(t.between(), Leg{t.saved_after, t.saved_after, saved.path(), moved.path()});
    std::vector<Trained> after = run(t.resumed(), Leg{t.saved_after, t.steps, moved.path(), {}});
    for (std::size_t r = 0; r < after.size(); ++r)
        after[r].norms.insert(after[r].norms.begin(), before[r].norms.begin(), before[r].norms.end());
    return difference<O>(t, after);
}

}  // namespace gradsync_test
