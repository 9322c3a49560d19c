#pragma once

#include <atomic>

namespace gradsync_fake {

/// What exists.
struct Census {
    std::atomic<int> streams{0}, events{0}, memories{0}, communicators{0};
};
Census& census();

}  // namespace gradsync_fake
