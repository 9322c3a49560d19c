// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include <gradsync/bucket/any_buckets.hpp>
#include <gradsync/bucket/units.hpp>
#include <gradsync/gradsync.hpp>
#include <gradsync/overlap/any_overlap.hpp>
#include <gradsync/overlap/no_overlap.hpp>
#include <gradsync/planning/optimal_buckets.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

#include "support/sharding.hpp"

/// A training that is drawn from a seed: what the API allows, and nothing else.

namespace gradsync_test {

enum class Kind : std::uint8_t { reducer, zero1, zero2, step_inside, stage3 };

struct DrawnTraining {
    explicit DrawnTraining(std::uint64_t seed);

    struct Drawn {
        std::size_t count = 0;
        gradsync::DType value = gradsync::DType::f32, gradient = gradsync::DType::f32;
        std::uint32_t uses = 1;
        int thaws = 0;  ///< trained from this step on; `steps` or more: always frozen
    };

    std::uint64_t seed;
    Kind kind = Kind::reducer;
    int ranks = 1, steps = 3, root = 0;
    int per_group = 0;  ///< ranks of a group of hybrid sharding; 0: none
    bool tcp = false, shared_memory = true;
    int per_host = 4;  ///< over TCP: ranks of one pretended host
    std::vector<Drawn> parameters;
    int buckets = 0, overlap = 0, order = 0;
    bool forward = false;     ///< OverlapForward
    bool joins = false;       ///< begin_step() in each step, and ranks without a batch
    bool eager = false;       ///< ranks without a batch mark all the same
    bool polls = false;       ///< try_finish()
    bool threads = false;     ///< two threads mark
    bool renews = false;      ///< each gradient is marked in memory of its own: mark_ready(i, gradient)
    bool poisons = false;     ///< gradients of some steps are no numbers (NonFinite::skip)
    int layout = 0;           ///< gradients lie 0: apart, 1: one behind the other, 2: in another order on each rank
    bool in_place = false;    ///< clip_gradients_by_norm()
    bool rebuilds = false;    ///< some steps are recorded, and buckets are planned anew
    bool interrupts = false;  ///< some micro-batches are discarded, some steps skipped, and masters published anew
    double max_norm = 0;      ///< clipping; 0 for none
    int saved_after = 0;      ///< this many steps, then a checkpoint goes through another job, and the training goes on; 0: none
    int micro_batches = 1;    ///< of each rank, if `options.micro_batches` does not count them
    gradsync::ReducerOptions options;
    gradsync::ParameterStorage storage = gradsync::ParameterStorage::borrowed;
    gradsync::ShardedParametersOptions stage3;
    bool device = false;   ///< numbers are in device memory
    double tolerance = 0;  ///< of the weights and norms, relative to the largest; 0: the bits of weights are known

    /// A number below n that is drawn for these numbers: the same on all ranks, and for the oracle.
    std::size_t draw(std::size_t n, int what, int step, int turn = 0, int rank = 0, std::size_t i = 0) const {
        Random random(seed);
        for (const std::size_t x : {std::size_t(what), std::size_t(step), std::size_t(turn), std::size_t(rank), i})
            random = Random(random() + x);
        return random.below(n);
    }
    bool pooled() const { return kind == Kind::zero2 || (kind == Kind::stage3 && stage3.shard_gradients); }
    bool borrows() const { return kind != Kind::stage3 && !pooled() && options.gradients != gradsync::GradientStorage::in_buckets; }
    bool counted() const { return options.micro_batches != 0; }
    bool finds_unused() const { return options.unused == gradsync::UnusedParameters::find_unused; }
    bool weighted() const { return options.averaging >= gradsync::Averaging::weighted_mean; }
    gradsync::Deal deal() const { return {options.micro_batches, ranks, pooled()}; }
    int turns(int rank) const { return counted() ? static_cast<int>(deal().count(rank)) : micro_batches; }
    static int batch(int step, int turn) { return step * 100 + turn; }
    std::size_t unit_of(std::size_t i) const { return draw(3, 1, 0) != 0 ? i : draw(1 + draw(5, 1, 1), 2, 0, 0, 0, i); }

    bool is_trained(int step, std::size_t i) const { return parameters[i].thaws <= step; }
    /// Does the rank have a batch? Where a step has one `finish()`, all its micro-batches have the same answer.
    bool has_batch(int step, int turn, int rank) const {
        if (counted() && pooled()) return turn < turns(rank);
        return !joins || rank == static_cast<int>(draw(static_cast<std::size_t>(ranks), 3, step, turn)) ||
               draw(3, 4, step, turn, rank) != 0;
    }
    double weight(int step, int turn, int rank) const { return static_cast<double>(draw(5, 5, step, turn, rank)); }
    bool uses(int step, int turn, int rank, std::size_t i) const {
        return !finds_unused() || (draw(6, 6, step, 0, 0, i) != 0 && draw(4, 7, step, turn, rank, i) != 0);
    }
    /// How often a rank marks a parameter that it uses.
    std::uint32_t marks(int step, int turn, int rank, std::size_t i) const {
        const std::uint32_t all = parameters[i].uses;
        return finds_unused() ? all - static_cast<std::uint32_t>(draw(all, 8, step, turn, rank, i)) : all;
    }
    bool poisoned(int step) const { return poisons && draw(3, 30, step) == 0; }
    bool skips(int step) const { return interrupts && draw(4, 9, step) == 0; }
    /// These parameters, each as often as it is marked, in an order of the rank's own or of all ranks.
    std::vector<std::size_t> mark_order(int step, int turn, int rank, const std::vector<std::size_t>& of) const {
        std::vector<std::size_t> marked;
        for (auto i = of.rbegin(); i != of.rend(); ++i)
            if (uses(step, turn, rank, *i)) marked.insert(marked.end(), marks(step, turn, rank, *i), *i);
        if (order == 0) return marked;
        const auto places = shuffled(marked.size(), static_cast<std::uint32_t>(draw(1u << 30, 10, step, turn, order == 1 ? 0 : rank)));
        std::vector<std::size_t> result;
        for (const std::size_t k : places) result.push_back(marked[k]);
        return result;
    }

    gradsync::AnyBuckets bucket_policy() const;
    gradsync::AnyOverlap overlap_policy() const;

    /// The training that continues from the checkpoint, with other policies.
    DrawnTraining resumed() const;
    /// A job that only loads the checkpoint and saves it again: another number of ranks, another stage.
    DrawnTraining between() const;
    /// The same without what devices do not have, or do not allow.
    DrawnTraining on_device() const;
};

inline DrawnTraining::DrawnTraining(std::uint64_t seed_) : seed(seed_) {
    using namespace gradsync;
    Random random(seed);
    random = Random(random());
    const auto chance = [&](std::size_t n) { return random.below(n) == 0; };
    const auto below = [&](int n) { return static_cast<int>(random.below(static_cast<std::size_t>(n))); };
    const auto one_of = [&]<class T>(std::initializer_list<T> all) { return all.begin()[random.below(all.size())]; };
    using enum DType;

    kind = one_of({Kind::reducer, Kind::reducer, Kind::zero1, Kind::zero2, Kind::step_inside, Kind::stage3, Kind::stage3, Kind::stage3});
    tcp = chance(4);
    ranks = tcp ? 2 + below(3) : one_of({1, 2, 2, 3, 3, 4, 4});
    shared_memory = chance(2);
    per_host = one_of({1, 2, 3, 4, 4, 4});
    steps = 2 + below(4);
    const bool may_shard_in_groups = kind == Kind::zero1 || kind == Kind::zero2 || kind == Kind::stage3;
    if (may_shard_in_groups && chance(3))
        ranks = one_of({ranks, 4, 4}), per_group = ranks == 4 ? one_of({1, 2, 2, 2, 4}) : one_of({1, ranks});

    const auto types = one_of(
        {std::vector{f32}, std::vector{f32}, std::vector{bf16}, std::vector{f64}, std::vector{f32, bf16}, std::vector{f32, bf16, f64}});
    const bool own_types = chance(3), ties = chance(3);  // of values
    for (int i = kind == Kind::stage3 ? 3 + below(6) : 1 + below(8); i > 0; --i) {
        Drawn p;
        p.count = one_of({0u, 1u, 3u, 7u, 64u, 129u, 500u, 1000u, 1025u, 3001u, 5000u});
        p.gradient = types[random.below(types.size())];
        p.value = own_types ? types[random.below(types.size())] : p.gradient;
        p.uses = static_cast<std::uint32_t>(ties && chance(3) ? 2 + below(2) : 1);
        const bool may_thaw = kind != Kind::reducer && kind != Kind::stage3;
        if (chance(6)) p.thaws = may_thaw && chance(2) ? 1 + below(steps) : steps;
        parameters.push_back(p);
    }
    if (parameters[0].thaws != 0) parameters[0].thaws = 0;

    buckets = below(6), overlap = below(4), order = below(3);
    forward = (kind == Kind::reducer || kind == Kind::zero2) && per_group == 0 && chance(4);
    rebuilds = chance(2), interrupts = chance(3), polls = chance(3), in_place = chance(2);
    if (!(kind == Kind::reducer && forward) && chance(2)) max_norm = one_of({0.1, 1.0, 10.0, 1000.0});
    if (chance(2)) micro_batches = 2 + below(3);
    const bool in_buckets = !pooled() && kind != Kind::stage3 && chance(2);

    stage3.prefetch = one_of({0u, 0u, 1u, 1u, 2u, 3u});
    stage3.reshard_after_forward = !chance(3);
    stage3.shard_gradients = !chance(4);
    stage3.replicate_below = one_of({0u, 0u, 0u, 0u, 10u, 10000u});
    if (kind != Kind::stage3 && kind != Kind::reducer)
        storage = one_of({ParameterStorage::borrowed, ParameterStorage::in_buckets, ParameterStorage::shared});
    if (storage == ParameterStorage::shared && tcp) storage = ParameterStorage::in_buckets;
    if (storage != ParameterStorage::shared) root = below(per_group != 0 ? per_group : ranks);

    ReducerOptions& o = options;
    if (in_buckets) o.gradients = GradientStorage::in_buckets;
    if (per_group == 0) {
        o.averaging = one_of({Averaging::mean, Averaging::mean, Averaging::sum, Averaging::weighted_mean, Averaging::mean_over_count});
        joins = chance(3);
        if (chance(kind == Kind::stage3 ? 2 : 3)) o.unused = UnusedParameters::find_unused;
        eager = joins && !pooled() && !finds_unused() && kind != Kind::stage3 && chance(2);
        if (o.averaging == Averaging::mean && chance(3)) o.divisor = JoinDivisor::all_ranks;
        const bool has_low = std::any_of(parameters.begin(), parameters.end(), [](const Drawn& p) { return is_low_precision(p.gradient); });
        if (chance(3) && !(has_low && !borrows())) {
            const auto n = static_cast<std::size_t>(ranks);
            o.micro_batches = n + random.below(4 * n);
            if (pooled() && weighted()) o.averaging = Averaging::mean;
            if (o.averaging == Averaging::weighted_mean) o.micro_batches = n;
            if (!pooled() && (joins || weighted()))
                o.micro_batches = n << (weighted() && o.averaging == Averaging::weighted_mean ? 0 : random.below(3));
            if (pooled()) joins = false;
            o.accumulation = Accumulation::in_buckets;
        }
    }
    if (!counted() && borrows() && chance(3)) o.accumulation = Accumulation::in_buckets;
    const bool has_f64 = std::any_of(parameters.begin(), parameters.end(), [](const Drawn& p) { return p.gradient == f64; });
    if ((borrows() || (pooled() && !counted())) && chance(4))
        o.reduce_dtype = has_f64 || counted() ? one_of({f32, f64}) : one_of({f32, bf16, f16});
    if (kind != Kind::stage3 && storage == ParameterStorage::borrowed) o.compare_weights_every = random.below(3);
    if (chance(8)) o.compare_weights_every = never;
    o.check_writes = chance(8);
    threads = !forward && chance(4);
    renews = kind == Kind::reducer && (o.accumulation == Accumulation::in_buckets || micro_batches == 1) && chance(3);
    poisons = kind == Kind::reducer && !forward && chance(4);
    if (poisons) o.non_finite = NonFinite::skip;
    layout = below(4) % 3;
    stage3.reducer = o;
    if (kind != Kind::reducer && chance(3)) saved_after = 1 + below(steps - 1);
}

inline DrawnTraining DrawnTraining::resumed() const {
    const DrawnTraining other(seed + 1);
    DrawnTraining result = *this;
    result.buckets = other.buckets, result.overlap = other.overlap, result.layout = other.layout;
    if (!device || !pooled()) result.order = other.order;
    result.stage3.prefetch = other.stage3.prefetch, result.stage3.replicate_below = other.stage3.replicate_below;
    return result;
}

inline DrawnTraining DrawnTraining::between() const {
    const DrawnTraining other(seed + 1);
    DrawnTraining result = resumed();
    result.kind = other.kind == Kind::stage3 ? Kind::stage3 : Kind::zero1;
    result.ranks = other.ranks, result.root = 0, result.per_group = 0, result.tcp = false, result.forward = false;
    result.options = result.stage3.reducer = {};
    result.storage = gradsync::ParameterStorage::borrowed;
    return result;
}

inline DrawnTraining DrawnTraining::on_device() const {
    using namespace gradsync;
    DrawnTraining result = *this;
    result.device = true, result.tcp = false;
    result.poisons = result.options.check_writes = false;
    result.options.non_finite = NonFinite::pass;
    if (kind == Kind::step_inside) result.kind = Kind::zero1;
    if (storage == ParameterStorage::shared) result.storage = ParameterStorage::in_buckets;
    if (result.pooled()) result.order = 0, result.threads = false;  // acquire_gradient() wants an order
    if (renews) result.layout = 0;                                  // a gradient in an arena cannot be moved
    const auto wide = [&](DType type) { return kind != Kind::reducer && type == DType::f64 ? DType::f32 : type; };
    bool has_low = options.reduce_dtype && is_low_precision(*options.reduce_dtype);
    for (Drawn& p : result.parameters) {
        p.value = wide(p.value), p.gradient = wide(p.gradient);
        has_low = has_low || is_low_precision(p.value) || is_low_precision(p.gradient);
    }
    if (options.reduce_dtype) result.options.reduce_dtype = wide(*options.reduce_dtype);
    result.tolerance = has_low ? 0.04 : 1e-5;
    result.stage3.reducer = result.options;
    return result;
}

inline gradsync::AnyBuckets DrawnTraining::bucket_policy() const {
    using namespace gradsync;
    std::vector<std::size_t> unit_of_each, caps;
    for (std::size_t i = 0; i < parameters.size(); ++i) unit_of_each.push_back(unit_of(i));
    for (int k = 0; k < 3; ++k) caps.push_back(1 + draw(std::size_t{1} << draw(18, 11, k), 12, k));
    switch (buckets) {
        case 0: return SizeCappedBuckets();
        case 1: return SizeCappedBuckets::with_caps(caps);
        case 2: return PerParameter();
        case 3: return Flat();
        case 4: return OptimalBuckets(plan::CallCost{1e-6, 1e-9});
        default: return Units(unit_of_each);
    }
}

inline gradsync::AnyOverlap DrawnTraining::overlap_policy() const {
    using namespace gradsync;
    switch (overlap) {
        case 0: return OverlapBackward();
        case 1: return OverlapBackward(Progress::polls);
        case 2: return OverlapBackward(Progress::thread);
        default: return NoOverlap();
    }
}

/// In one line.
inline std::string describe(const DrawnTraining& t) {
    static constexpr const char* kinds[] = {"Reducer", "Zero1", "Zero2", "StepInside", "ShardedParameters"};
    const auto flag = [](bool set, const char* name) { return set ? std::string(" ") + name : std::string(); };
    const auto number = [](const char* name, auto n) { return std::string(" ") + name + "=" + std::to_string(n); };
    std::string text = "seed " + std::to_string(t.seed) + ": " + kinds[static_cast<int>(t.kind)] + number("ranks", t.ranks);
    if (t.device) text += " device";
    if (t.tcp) text += std::string(" tcp") + (t.shared_memory ? number("per_host", t.per_host) : " messages");
    if (t.per_group != 0) text += number("per_group", t.per_group);
    text += number("steps", t.steps) + number("root", t.root) + " " + describe(t.options) + " buckets=" + t.bucket_policy().describe() +
            " overlap=" + (t.forward ? "OverlapForward" : t.overlap_policy().describe()) + number("order", t.order) +
            number("batches", t.micro_batches) + number("storage", static_cast<int>(t.storage)) + number("max_norm", t.max_norm) +
            flag(t.joins, "joins") + flag(t.eager, "eager") + flag(t.polls, "polls") + flag(t.threads, "threads") +
            flag(t.renews, "renews") + number("layout", t.layout) + flag(t.in_place, "in_place") + flag(t.rebuilds, "rebuilds") +
            flag(t.interrupts, "interrupts") + (t.saved_after != 0 ? number("saved_after", t.saved_after) : "") +
            flag(t.options.check_writes, "check_writes");
    if (t.kind == Kind::stage3)
        text += number("prefetch", t.stage3.prefetch) + flag(t.stage3.reshard_after_forward, "reshard") +
                flag(t.stage3.shard_gradients, "shard_gradients") + number("replicate_below", t.stage3.replicate_below);
    for (std::size_t i = 0; i < t.parameters.size(); ++i) {
        const auto& p = t.parameters[i];
        text += " " + std::to_string(p.count) + std::string(name_of(p.value)) + "/" + std::string(name_of(p.gradient));
        if (p.uses != 1) text += "x" + std::to_string(p.uses);
        if (p.thaws != 0) text += p.thaws < t.steps ? "@" + std::to_string(p.thaws) : "frozen";
        if (t.kind == Kind::stage3) text += "u" + std::to_string(t.unit_of(i));
    }
    return text;
}

}  // namespace gradsync_test
