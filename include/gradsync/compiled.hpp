// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// The instantiations that gradsync::compiled holds: code that takes long to compile and depends on no type of the
/// program. gradsync.hpp includes this header if GRADSYNC_COMPILED is defined, as it is in targets that link
/// gradsync::compiled.

#include "backend/thread_backend.hpp"
#include "reducer.hpp"

#ifndef GRADSYNC_EXTERN  // defined as nothing in compiled.cpp
#define GRADSYNC_EXTERN extern
#endif

/// The engine over a backend, with the default policies.
#define GRADSYNC_EXTERN_ENGINE(B)                                    \
    GRADSYNC_EXTERN template class detail::Guard<B>;                 \
    GRADSYNC_EXTERN template class detail::BucketMemory<B>;          \
    GRADSYNC_EXTERN template class detail::PlannedParameters<B>;     \
    GRADSYNC_EXTERN template class detail::RoundSums<B>;             \
    GRADSYNC_EXTERN template class detail::GradientHome<B>;          \
    GRADSYNC_EXTERN template class detail::DeferredGather<B>;        \
    GRADSYNC_EXTERN template class detail::WeightComparison<B>;      \
    GRADSYNC_EXTERN template class detail::ExchangeAs<AllReduce, B>; \
    GRADSYNC_EXTERN template class detail::InFlight<B>;              \
    GRADSYNC_EXTERN template class detail::Marks<B>;                 \
    GRADSYNC_EXTERN template class detail::GradientSync<B>;          \
    GRADSYNC_EXTERN template class Reducer<B>;

/// @cond explicit_instantiations
namespace gradsync::inline v0_2 {

GRADSYNC_EXTERN template class shared_memory::Seat<shared_memory::OneAddressSpace>;

GRADSYNC_EXTERN template class detail::NumberedWork<detail::ThreadSeat>;
GRADSYNC_EXTERN template class detail::EngineCollectives<ThreadBackend, detail::ThreadSeat>;
GRADSYNC_EXTERN template void detail::run_each_rank(std::vector<ThreadBackend>,
                                                    detail::FunctionRef<std::size_t, ThreadBackend&>,
                                                    detail::FunctionRef<std::size_t, detail::FunctionRef<>>);
GRADSYNC_EXTERN_ENGINE(ThreadBackend)

}  // namespace gradsync::inline v0_2
/// @endcond
