// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <atomic>
#include <cstddef>
#include <optional>
#include <utility>

#include "../core/backend.hpp"
#include "../overlap/progress_thread.hpp"

namespace gradsync::inline v0_2::detail {

/// Does B need a polling thread, if it supports one?
template <Backend B>
bool wants_progress_thread([[maybe_unused]] const B& backend) noexcept {
    if constexpr (abilities_of<B>.progress_thread) return backend.size() > 1 && backend.wants_progress_thread();
    else return false;
}

/// Advances gathers during a computation that makes no calls for them: in a thread if the backend needs one, otherwise in `poll()`.
template <Backend B>
class GatherProgress {
public:
    /// Call it once, before the first gather.
    void attach(const B& backend) {
        engine_.backend.emplace(backend);
        if (wants_progress_thread(backend)) thread_.start(engine_);
    }
    ~GatherProgress() { thread_.stop(); }

    void started() noexcept {
        engine_.gathers.fetch_add(1, std::memory_order_relaxed);
        if (thread_.running()) thread_.wake();
    }
    void complete() noexcept { engine_.gathers.fetch_sub(1, std::memory_order_relaxed); }

    void poll() {
        if (!thread_.working() && engine_.in_flight()) engine_.poll();
    }

private:
    struct Engine {
        std::optional<B> backend;
        std::atomic<std::size_t> gathers{0};

        void launch_full_buckets() {}
        bool in_flight() const noexcept { return gathers.load(std::memory_order_relaxed) != 0; }
        void poll() { backend->progress(); }
        bool wants_thread() const noexcept { return true; }
    };

    Engine engine_;
    ProgressThread thread_;
};

}  // namespace gradsync::inline v0_2::detail
