// SPDX-License-Identifier: BSL-1.0
#pragma once
// From run-time flags to the types that the library is built of. In a program of your own you would write down the few that you use.
// This one offers all: AnyBuckets and AnyOverlap hold whichever policy the flags name, so that only what is a type of its own (the backend,
// sharding, OverlapForward, a compressor) is compiled for itself. The backend is the template parameter: each has a translation unit.

#include <algorithm>
#include <cstddef>
#include <memory>
#include <type_traits>
#include <utility>

#include <gradsync/bucket/any_buckets.hpp>
#include <gradsync/compress/power_sgd.hpp>
#include <gradsync/compress/quantizer.hpp>
#include <gradsync/gradsync.hpp>
#include <gradsync/overlap/any_overlap.hpp>
#include <gradsync/overlap/overlap_forward.hpp>
#include <gradsync/planning/calibrate.hpp>
#include <gradsync/planning/optimal_buckets.hpp>

#include "make_synchroniser.hpp"
#include "plain_synchroniser.hpp"
#include "sharded_synchroniser.hpp"

namespace gradsync_train {

/// The bucket policy that the flags name. `cost`: of a collective, for --buckets optimal.
inline gs::AnyBuckets chosen_buckets(const Options& o, gs::plan::CallCost cost) {
    if (o.buckets == "optimal") return gs::OptimalBuckets{cost};
    if (o.buckets == "per-parameter") return gs::PerParameter{};
    if (o.buckets == "flat") return gs::Flat{};
    const auto bytes = [](double mib) { return static_cast<std::size_t>(mib * 1024 * 1024); };
    return gs::SizeCappedBuckets{bytes(o.bucket_mib), bytes(std::min(o.bucket_mib, o.first_bucket_mib))};
}

/// The overlap policy that the flags name, of those within the backward. (OverlapForward is a type of its own, because its averages are
/// waited for in another way.)
inline gs::AnyOverlap chosen_overlap(const Options& o) {
    if (o.overlap == "backward") return gs::OverlapBackward{};
    if (o.overlap == "backward-polls") return gs::OverlapBackward{gs::Progress::polls};
    if (o.overlap == "backward-thread") return gs::OverlapBackward{gs::Progress::thread};
    return gs::NoOverlap{};
}

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
    const gs::plan::CallCost cost = cost_of_calls(comm, o);
    const auto make = [&]<class S>(std::type_identity<S>, auto... more) -> std::unique_ptr<Synchroniser> {
        return std::make_unique<S>(comm, parameters, units, o, observer, chosen_buckets(o, cost), std::move(overlap), more...);
    };
    if (o.shard == "optimizer")
        return make(std::type_identity<OptimizerSharding<Ops, Backend, gs::Zero1, Overlap>>{}, ops, whole_parameters(o));
    if (o.shard == "gradients")
        return make(std::type_identity<OptimizerSharding<Ops, Backend, gs::Zero2, Overlap>>{}, ops, whole_parameters(o));
    return make(std::type_identity<PlainSynchroniser<Ops, Backend, Overlap>>{}, cost, ops);
}

template <class Backend, class Ops>
std::unique_ptr<Synchroniser> make_synchroniser(Backend comm, const Options& o, Parameters& parameters, const Units& units,
                                                gs::Observer* observer, Ops ops) {
    if (o.shard == "parameters")
        return std::make_unique<ParameterSharding<Ops, Backend, gs::AnyOverlap>>(comm, parameters, units, o, observer, chosen_overlap(o),
                                                                                 ops);
    if constexpr (!Ops::on_device) {  // both are for the host's memory
        const auto compressing = [&]<class Exchange>(Exchange exchange) -> std::unique_ptr<Synchroniser> {
            const gs::plan::CallCost cost = cost_of_calls(comm, o);
            return std::make_unique<PlainSynchroniser<Ops, Backend, gs::AnyOverlap, Exchange>>(
                comm, parameters, units, o, observer, chosen_buckets(o, cost), chosen_overlap(o), cost, ops, exchange);
        };
        if (o.compress == "power-sgd") return compressing(gs::PowerSgd{.rank = o.compress_rank, .start_step = o.compress_after});
        if (o.compress == "quantize") return compressing(gs::Quantizer{.bits = o.compress_bits, .start_step = o.compress_after});
        if (o.overlap == "step")
            return std::make_unique<OptimizerSharding<Ops, Backend, gs::StepInside, gs::OverlapBackward>>(
                comm, parameters, units, o, observer, chosen_buckets(o, {}), gs::OverlapBackward{}, ops);
    }
    if (o.overlap == "forward") return make_overlapping(ops, comm, o, gs::OverlapForward{}, parameters, units, observer);
    return make_overlapping(ops, comm, o, chosen_overlap(o), parameters, units, observer);
}

}  // namespace gradsync_train
