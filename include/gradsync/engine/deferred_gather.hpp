// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <optional>

#include "../core/collective_tag.hpp"
#include "../core/shard_range.hpp"
#include "../kernel/passes.hpp"
#include "../overlap/progress_thread.hpp"
#include "watch.hpp"

namespace gradsync::inline v0_2::detail {

/// All-gathers of buckets that start together and are waited for one by one, when their data are needed. Until then
/// they advance in a background thread if the backend needs one and the policy allows it, otherwise in `poll()`. Not
/// thread-safe. The destructor waits for pending gathers, unless an exception is propagating.
template <Backend B>
class DeferredGather final : BucketLauncher {
public:
    DeferredGather() = default;
    DeferredGather& operator=(DeferredGather&&) = delete;
    ~DeferredGather() {
        if (std::uncaught_exceptions() != exceptions_) return;
        try {
            for (std::size_t b = 0; b < gathers_.size(); ++b) wait(b);
        } catch (...) {  // the communicator has failed; later calls report it
        }
    }

    /// Call once, before anything else. `only_polls`: starts no thread. `landed(owner, b)`, if given, is called
    /// when bucket b has arrived.
    [[gnu::cold]] void attach(const B& backend, bool only_polls, void* owner = nullptr,
                              void (*landed)(void*, std::size_t) = nullptr) {
        owner_ = owner;
        landed_ = landed;
        backend_.emplace(backend);
        polled_.emplace(backend);
        if (!only_polls && wants_progress_thread(backend)) thread_.start(*this);
    }
    /// Call it before the first gather. `watch` outlives the last one.
    void set_watch(Watch& watch) noexcept { watch_ = &watch; }
    void resize(std::size_t buckets) { gathers_ = List<Gather>(buckets); }

    /// Starts the all-gather of bucket b. This rank's shard must be in its place in `bucket`.
    void start(std::size_t b, BufferView bucket, CollectiveTag tag) {
        Gather& gather = gathers_[b];
        gather.under_way = backend_->size() > 1;
        if (gather.under_way) {
            const auto begin = watch_->now();
            set_tag(*backend_, tag);
            gather.work = naming_bucket(
                b, [&] { return backend_->all_gather(shard_of(bucket, backend_->size(), backend_->rank()), bucket); });
            watch_->depart(Activity::gather, b, begin);
        }
        gather.pending = true;
        pending_.fetch_add(1, std::memory_order_relaxed);
        if (thread_.running()) thread_.wake();
    }

    /// Drops the pending gathers after a failed step. This fails the communicator, too.
    void drop() noexcept {
        gathers_.clear();
        pending_.store(0, std::memory_order_relaxed);
    }

    /// The number of gathers that were not waited for yet.
    std::size_t pending() const noexcept { return pending_.load(std::memory_order_relaxed); }
    bool pending(std::size_t b) const noexcept { return gathers_[b].pending; }

    /// Advances the gathers and records which have arrived.
    void advance() {
        if (!thread_.working() && in_flight()) poll();
        for (std::size_t b = 0; b < gathers_.size(); ++b)
            if (gathers_[b].under_way && naming_bucket(b, [&] { return poll_work(gathers_[b].work); })) arrive(b);
    }
    /// Has bucket b arrived? Repeated tests time out, as those of a Work do.
    bool test(std::size_t b) {
        if (gathers_[b].under_way && naming_bucket(b, [&] { return gathers_[b].work.test(); })) arrive(b);
        return !gathers_[b].under_way;
    }
    /// Returns when bucket b has arrived.
    void wait(std::size_t b) {
        Gather& gather = gathers_[b];
        if (!gather.pending) return;
        if (gather.under_way) {
            naming_bucket(b, [&] { await(*backend_, gather.work); });
            arrive(b);
        }
        gather.pending = false;
        pending_.fetch_sub(1, std::memory_order_relaxed);
    }

    /// Returns when bucket b has arrived and `landed` was called.
    void land(std::size_t b) {
        if (!gathers_[b].pending) return advance();
        const auto held = watch_->hold(Activity::wait, b);
        wait(b);
        if (landed_ != nullptr) landed_(owner_, b);
    }
    /// The same for all buckets, the first to be started first.
    void land_all() {
        for (std::size_t b = gathers_.size(); pending() != 0 && b-- > 0;) land(b);
    }

private:
    struct Gather {
        typename B::WorkType work;
        bool pending = false;    ///< was not waited for yet
        bool under_way = false;  ///< may still be in flight
    };

    // The background thread calls these.
    void launch_full_buckets() override {}
    bool in_flight() const noexcept override { return pending() != 0; }
    void poll() override { polled_->progress(); }
    bool wants_thread() const noexcept override { return true; }

    void arrive(std::size_t b) {
        gathers_[b].under_way = false;
        watch_->arrive(Activity::gather, b);
    }

    std::optional<B> backend_;  ///< a separate handle, because a handle holds one tag
    std::optional<B> polled_;   ///< another, for the thread
    void* owner_ = nullptr;
    void (*landed_)(void* owner, std::size_t b) = nullptr;
    Watch* watch_ = nullptr;
    List<Gather> gathers_;
    std::atomic<std::size_t> pending_{0};
    ProgressThread thread_;
    int exceptions_ = std::uncaught_exceptions();
};

}  // namespace gradsync::inline v0_2::detail
