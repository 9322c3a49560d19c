// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>

namespace gradsync_fake {

/// What exists.
struct Census {
    std::atomic<int> streams{0}, events{0}, memories{0}, communicators{0};
};
Census& census();

/// Frees memory of the fake CUDA runtime's at once, whatever the device does.
void release(void* data);

}  // namespace gradsync_fake
