#pragma once

#include <atomic>
#include <utility>

namespace gradsync::inline v0::detail {

/// While it lives, marks synchronise nothing: see Reducer::no_sync.
class [[nodiscard]] NoSync {
public:
    explicit NoSync(std::atomic<int>& depth) noexcept : depth_(&depth) { ++depth; }
    NoSync(NoSync&& other) noexcept : depth_(std::exchange(other.depth_, nullptr)) {}
    NoSync& operator=(NoSync&&) = delete;
    ~NoSync() {
        if (depth_ != nullptr) --*depth_;
    }

private:
    std::atomic<int>* depth_;
};

}  // namespace gradsync::inline v0::detail
