#pragma once
// From run-time flags to compile-time types. Each flag becomes a variant that holds one of the types it may stand for;
// std::visit instantiates the training loop once for every combination and calls the one that the variants hold.
// The backend is the template parameter: each has a translation unit of its own.

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <type_traits>
#include <variant>

#include <gradsync/gradsync.hpp>

#include "job.hpp"
#include "mlp.hpp"
#include "ops_cpu.hpp"
#include "train.hpp"
#include "transformer.hpp"

namespace gradsync_train {

using AnyModel = std::variant<std::type_identity<Transformer<CpuOps>>, std::type_identity<Mlp<CpuOps>>>;
using AnyBuckets = std::variant<gs::PerParameter, gs::Flat, gs::SizeCappedBuckets>;
using AnyOverlap = std::variant<gs::NoOverlap, gs::OverlapBackward, gs::OverlapBackwardThread>;

inline AnyModel choose_model(const Options& o) {
    if (o.model == "mlp") return std::type_identity<Mlp<CpuOps>>{};
    return std::type_identity<Transformer<CpuOps>>{};
}

inline AnyBuckets choose_buckets(const Options& o) {
    if (o.buckets == "per-parameter") return gs::PerParameter{};
    if (o.buckets == "flat") return gs::Flat{};
    const auto bytes = [](double mib) { return static_cast<std::size_t>(mib * 1024 * 1024); };
    return gs::SizeCappedBuckets{bytes(o.bucket_mib), bytes(std::min(o.bucket_mib, o.first_bucket_mib))};
}

inline AnyOverlap choose_overlap(const Options& o) {
    if (o.overlap == "none") return gs::NoOverlap{};
    if (o.overlap == "backward-thread") return AnyOverlap(std::in_place_type<gs::OverlapBackwardThread>);
    return gs::OverlapBackward{};
}

inline std::chrono::nanoseconds time_limit(const Options& o) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(o.timeout));
}

/// The whole training of one rank, which all ranks of `comm` call together.
template <class Backend>
Results run_rank(Backend comm, const Job& job) {
    const Options& o = job.options;
    const Shard shard{comm.rank(), comm.size()};
    return std::visit(
        [&]<class Model>(std::type_identity<Model>, const auto& buckets, const auto& overlap) {
            const auto run = [&](Backend ranks) {
                return train<Model>(ranks, shard, o, job.text, job.checkpoint.get(), job.out, buckets, overlap);
            };
            Results results =
                run(o.independent ? comm.split(comm.rank(), 0) : comm);  // or every rank in a world of its own
            if (o.independent) {
                comm.set_timeout(std::chrono::hours(24));  // and at a pace of its own
                results.ranks = gather(comm, results.ranks[0]);
            }
            results.transport = comm.describe();
            return results;
        },
        choose_model(o), choose_buckets(o), choose_overlap(o));
}

}  // namespace gradsync_train
