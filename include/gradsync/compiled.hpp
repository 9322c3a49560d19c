// SPDX-License-Identifier: BSL-1.0
#pragma once

/// The parts that gradsync::compiled holds: what takes long to compile, and depends on no type of the program's. Included by gradsync.hpp, if
/// GRADSYNC_COMPILED is defined, as it is in targets that link gradsync::compiled.

#include <vector>

#include "backend/run_threads.hpp"
#include "backend/thread_backend.hpp"
#include "reducer.hpp"

#ifndef GRADSYNC_EXTERN  // defined as nothing in compiled.cpp
#define GRADSYNC_EXTERN extern
#endif

namespace gradsync::inline v0_2 {

GRADSYNC_EXTERN template class shared_memory::Seat<shared_memory::OneAddressSpace>;

namespace detail {

GRADSYNC_EXTERN template class NumberedWork<ThreadSeat>;
GRADSYNC_EXTERN template class EngineCollectives<ThreadBackend, ThreadSeat>;
GRADSYNC_EXTERN template void run_each_rank(std::vector<ThreadBackend>, FunctionRef<std::size_t, ThreadBackend&>,
                                            FunctionRef<std::size_t, FunctionRef<>>);

GRADSYNC_EXTERN template class Guard<ThreadBackend>;
GRADSYNC_EXTERN template class BucketStorage<ThreadBackend>;
GRADSYNC_EXTERN template class GradientBuckets<ThreadBackend>;
GRADSYNC_EXTERN template class DeferredGather<ThreadBackend>;
GRADSYNC_EXTERN template class WeightComparison<ThreadBackend>;
GRADSYNC_EXTERN template class ExchangeAs<AllReduce, ThreadBackend>;
GRADSYNC_EXTERN template class Step<ThreadBackend>;
GRADSYNC_EXTERN template class Marking<ThreadBackend>;
GRADSYNC_EXTERN template class GradientEngine<ThreadBackend>;

}  // namespace detail

GRADSYNC_EXTERN template class Reducer<ThreadBackend>;

}  // namespace gradsync::inline v0_2
