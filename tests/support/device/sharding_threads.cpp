// SPDX-License-Identifier: BSL-1.0
#include <gradsync/backend/thread_backend.hpp>

#include "sharding_training.hpp"

template std::vector<float> gradsync_test::sharded_training(gradsync::ThreadBackend, const ShardedCase&, std::filesystem::path,
                                                            std::filesystem::path);
