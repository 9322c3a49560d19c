// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../engine/bucket_memory.hpp"
#include "../engine/parameters.hpp"
#include "../engine/weights.hpp"

namespace gradsync::inline v0_2::detail {

/// Uses the trainer's memory for buckets whose values lie there alone and in the order of the gradients, on all ranks.
/// Collective.
template <Backend B>
void borrow_values(B& backend, const BucketPlan& plan, const BucketLayout& layout,
                   std::span<const ParameterView> parameters, List<BufferView>& buckets) {
    List<std::uint64_t> fits(plan.size());
    for (std::size_t b = 0; b < plan.size(); ++b) {
        const BufferView range = range_in_place<B>(plan.bucket(b), parameters, &ParameterView::value);
        bool same = range.data != nullptr && range.count == layout.counts[b];
        for (const std::size_t i : plan.bucket(b))
            same =
                same && (parameters[i].value.count == 0 || distance(range, parameters[i].value) == layout.offsets[i]);
        if ((fits[b] = same)) buckets[b].data = range.data;
    }
    const List<std::uint64_t> all = gather_values(host_of(backend), fits);
    for (std::size_t k = 0; k < all.size(); ++k)
        if (all[k] == 0) buckets[k % plan.size()].data = nullptr;
}

/// Makes all ranks, which must be threads of one process, use the memory of rank 0. `who`: as errors name it.
/// Collective.
template <Backend B>
[[gnu::cold]] void share_values(B& backend, BucketMemory<B>& values, const char* who) {
    const std::uint64_t own[] = {process_number(), reinterpret_cast<std::uintptr_t>(&values)};
    const List<std::uint64_t> all = gather_values(host_of(backend), own);
    for (std::size_t k = 0; k < all.size(); k += 2)
        if (all[k] != all[0])
            refuse_on({who, named_rank(backend)},
                      "ParameterStorage::shared is for ranks that are threads of one process; use in_buckets");
    if (backend.rank() != 0) values.share(*reinterpret_cast<const BucketMemory<B>*>(all[1]));
    backend.barrier().wait();  // only then may rank 0 continue, and be destroyed
}

}  // namespace gradsync::inline v0_2::detail
