// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <gradsync/backend/nccl.hpp>
#include <gradsync/backend/staging.hpp>
#include <gradsync/backend/thread_backend.hpp>
#include <gradsync/gradsync.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

/// The engine and the shards over the backends of most tests of devices. They are compiled once, in support/device/engines.cpp.

#define GRADSYNC_TEST_DEVICE_ENGINE(B)                                   \
    GRADSYNC_EXTERN template class detail::ExchangeAs<ReduceScatter, B>; \
    GRADSYNC_EXTERN template class detail::ShardState<B>;                \
    GRADSYNC_EXTERN template class detail::StateTransfer<B>;             \
    GRADSYNC_EXTERN_ENGINE(B)

#define GRADSYNC_TEST_DEVICE_ENGINES                                                                                \
    GRADSYNC_EXTERN template class detail::EngineCollectives<NcclBackend, detail::NcclEngine, MemorySpace::device>; \
    GRADSYNC_EXTERN template class StagingBackend<ThreadBackend>;                                                   \
    GRADSYNC_TEST_DEVICE_ENGINE(NcclBackend)                                                                        \
    GRADSYNC_TEST_DEVICE_ENGINE(StagingBackend<ThreadBackend>)

namespace gradsync {

GRADSYNC_TEST_DEVICE_ENGINES

}  // namespace gradsync
