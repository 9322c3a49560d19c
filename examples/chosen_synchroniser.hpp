// SPDX-License-Identifier: BSL-1.0
#pragma once
// From run-time flags to the types that the library is built of. In a program of your own you would write down the few
// that you use. This one offers all, and is not to be compiled for every combination of them: so it has a bucket policy
// and an overlap policy that hold whichever the flags name, and are policies like any other.
// The backend is the template parameter: each has a translation unit of its own.

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <gradsync/bucket/optimal.hpp>
#include <gradsync/compress/power_sgd.hpp>
#include <gradsync/compress/quantizer.hpp>
#include <gradsync/compress/top_k.hpp>
#include <gradsync/gradsync.hpp>
#include <gradsync/overlap/overlap_forward.hpp>
#include <gradsync/plan/calibrate.hpp>

#include "make_synchroniser.hpp"
#include "plain_synchroniser.hpp"
#include "sharded_synchroniser.hpp"

namespace gradsync_train {

/// The bucket policy that the flags name.
class ChosenBuckets {
public:
    /// `cost`: of a collective, for --buckets optimal.
    ChosenBuckets(const Options& o, gs::plan::CallCost cost) : policy_{choose(o, cost)}, cost_{cost} {}

    gs::BucketPlan plan(std::span<const gs::ParameterInfo> parameters, std::span<const std::size_t> order) const {
        return std::visit([&](const auto& policy) { return policy.plan(parameters, order); }, policy_);
    }
    std::string describe() const {
        return std::visit([](const auto& policy) { return policy.describe(); }, policy_);
    }

    /// For --buckets optimal, which goes by them.
    void set_ready_seconds(std::vector<double> times) {
        if (auto* optimal = std::get_if<gs::OptimalBuckets>(&policy_)) optimal->set_ready_seconds(std::move(times));
    }
    gs::plan::CallCost cost() const { return cost_; }

private:
    using Any = std::variant<gs::PerParameter, gs::Flat, gs::SizeCappedBuckets, gs::OptimalBuckets>;

    static Any choose(const Options& o, gs::plan::CallCost cost) {
        if (o.buckets == "optimal") return gs::OptimalBuckets{cost};
        if (o.buckets == "per-parameter") return gs::PerParameter{};
        if (o.buckets == "flat") return gs::Flat{};
        const auto bytes = [](double mib) { return static_cast<std::size_t>(mib * 1024 * 1024); };
        return gs::SizeCappedBuckets{bytes(o.bucket_mib), bytes(std::min(o.bucket_mib, o.first_bucket_mib))};
    }

    Any policy_;
    gs::plan::CallCost cost_;
};
static_assert(gs::TimedBucketPolicy<ChosenBuckets>);

/// The overlap policy that the flags name, of those within the backward pass. (OverlapForward makes other collectives
/// of the buckets: that is a property of the type.)
class ChosenOverlap {
public:
    explicit ChosenOverlap(const Options& o) {
        if (o.overlap == "backward") policy_.emplace<gs::OverlapBackward>();
        if (o.overlap == "backward-polls") policy_.emplace<gs::OverlapBackward>(gs::Progress::polls);
        if (o.overlap == "backward-thread") policy_.emplace<gs::OverlapBackward>(gs::Progress::thread);
    }

    void attach(gs::BucketEngine auto& engine) {
        std::visit([&](auto& policy) { policy.attach(engine); }, policy_);
    }
    void bucket_full(gs::BucketEngine auto& engine) {
        std::visit([&](auto& policy) { policy.bucket_full(engine); }, policy_);
    }
    void gradients_ready(gs::BucketEngine auto& engine) {
        std::visit([&](auto& policy) { policy.gradients_ready(engine); }, policy_);
    }
    void detach() noexcept {
        std::visit([](auto& policy) { policy.detach(); }, policy_);
    }
    std::string describe() const {
        return std::visit([](const auto& policy) { return policy.describe(); }, policy_);
    }

private:
    std::variant<gs::NoOverlap, gs::OverlapBackward> policy_;
};
static_assert(gs::OverlapPolicy<ChosenOverlap>);

/// What a collective costs here, where buckets are to be planned by it. Collective.
template <class Backend>
gs::plan::CallCost cost_of_calls(Backend comm, const Options& o) {
    if (o.buckets != "optimal" || comm.size() == 1) return {};
    return gs::plan::calibrate(comm).cost;
}

/// All that differs in their overlap policy only.
template <class Ops, class Backend, class Overlap>
std::unique_ptr<Synchroniser> make_overlapping(Ops ops, Backend comm, const Options& o, Overlap overlap, Parameters& parameters,
                                               const Units& units, gs::Observer* observer) {
    const auto make = [&]<class S>(std::type_identity<S>, auto... more) -> std::unique_ptr<Synchroniser> {
        return std::make_unique<S>(comm, parameters, units, o, observer, ChosenBuckets{o, cost_of_calls(comm, o)}, std::move(overlap),
                                   more...);
    };
    if constexpr (!Ops::on_device) {  // state is sharded in the host's memory
        if (o.shard == "optimizer") return make(std::type_identity<OptimizerSharding<Ops, Backend, gs::Zero1, ChosenBuckets, Overlap>>{});
        if (o.shard == "gradients") return make(std::type_identity<OptimizerSharding<Ops, Backend, gs::Zero2, ChosenBuckets, Overlap>>{});
    }
    return make(std::type_identity<PlainSynchroniser<Ops, Backend, ChosenBuckets, Overlap>>{}, ops);
}

template <class Backend, class Ops>
std::unique_ptr<Synchroniser> make_synchroniser(Backend comm, const Options& o, Parameters& parameters, const Units& units,
                                                gs::Observer* observer, Ops ops) {
    if constexpr (!Ops::on_device) {
        if (o.shard == "parameters")
            return std::make_unique<ParameterSharding<Ops, Backend, ChosenOverlap>>(comm, parameters, units, o, observer, ChosenOverlap{o});
    }
    if constexpr (!Ops::on_device) {  // and so is compressed
        const auto compressing = [&]<class Exchange>(Exchange exchange) -> std::unique_ptr<Synchroniser> {
            return std::make_unique<PlainSynchroniser<Ops, Backend, ChosenBuckets, ChosenOverlap, Exchange>>(
                comm, parameters, units, o, observer, ChosenBuckets{o, cost_of_calls(comm, o)}, ChosenOverlap{o}, ops, exchange);
        };
        if (o.compress == "top-k") return compressing(gs::TopK<Backend>({.density = o.compress_density, .start_step = o.compress_after}));
        if (o.compress == "power-sgd") return compressing(gs::PowerSgd<Backend>({.rank = o.compress_rank, .start_step = o.compress_after}));
        if (o.compress == "quantize") return compressing(gs::Quantizer<Backend>({.bits = o.compress_bits, .start_step = o.compress_after}));
    }
    if (o.overlap == "forward") return make_overlapping(ops, comm, o, gs::OverlapForward{}, parameters, units, observer);
    return make_overlapping(ops, comm, o, ChosenOverlap{o}, parameters, units, observer);
}

}  // namespace gradsync_train
