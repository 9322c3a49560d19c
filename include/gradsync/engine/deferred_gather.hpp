// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <exception>
#include <optional>
#include <utility>
#include <vector>

#include "../core/backend.hpp"
#include "../core/collective_tag.hpp"
#include "../core/error.hpp"
#include "../kernel/passes.hpp"
#include "bucket_layout.hpp"
#include "gather_progress.hpp"
#include "watch.hpp"

namespace gradsync::inline v0_2::detail {

struct NoGather {};

/// All-gathers, one per bucket, that are started together and waited for one by one, when their data are needed. For one thread at a time.
/// The destructor waits for those still pending, unless an exception is propagating.
template <Backend B>
class DeferredGather {
public:
    DeferredGather() = default;
    DeferredGather(const DeferredGather&) = delete;
    DeferredGather& operator=(const DeferredGather&) = delete;
    ~DeferredGather() {
        if (std::uncaught_exceptions() != exceptions_) return;
        try {
            for (std::size_t b = 0; b < works_.size(); ++b) wait(b);
        } catch (...) {  // the communicator has failed, and reports that to its other users
        }
    }

    /// Call it once, first.
    void attach(const B& backend) {
        backend_.emplace(backend);
        progress_.attach(backend);
    }
    /// Call it before the first gather. `watch` outlives the last one.
    void set_watch(Watch<B>& watch) noexcept { watch_ = &watch; }
    void resize(std::size_t buckets) { works_ = std::vector<Entry>(buckets); }

    /// Starts the all-gather of bucket b. The shard of this rank must be in its place in `bucket`.
    void start(std::size_t b, BufferView bucket, CollectiveTag tag) {
        works_[b].under_way = backend_->size() > 1;
        if (works_[b].under_way) {
            const auto begin = watch_->now();
            set_tag(*backend_, tag);
            works_[b].work =
                naming_bucket(b, [&] { return backend_->all_gather(shard_of(bucket, backend_->size(), backend_->rank()), bucket); });
            watch_->depart(Activity::gather, b, begin);
        }
        works_[b].pending = true;
        ++pending_;
        progress_.started();
    }

    /// Drops the started gathers after a failed step. That fails the communicator, too.
    void drop() noexcept {
        works_.clear();
        pending_ = 0;
    }

    /// The number of gathers that were not waited for yet.
    std::size_t pending() const noexcept { return pending_; }
    bool pending(std::size_t b) const noexcept { return works_[b].pending; }

    /// Advances the gathers and records which have arrived.
    void poll() {
        progress_.poll();
        for (std::size_t b = 0; b < works_.size(); ++b)
            if (works_[b].under_way && naming_bucket(b, [&] { return poll_work(works_[b].work); })) arrive(b);
    }
    /// Returns when bucket b has arrived.
    void wait(std::size_t b) {
        if (!works_[b].pending) return;
        naming_bucket(b, [&] { await(*backend_, works_[b].work); });
        if (works_[b].under_way) arrive(b);
        works_[b].pending = false;
        --pending_;
        progress_.complete();
    }

private:
    struct Entry {
        typename B::WorkType work;
        bool pending = false;    ///< was not waited for yet
        bool under_way = false;  ///< may still be in flight
    };

    void arrive(std::size_t b) {
        works_[b].under_way = false;
        watch_->arrive(Activity::gather, b);
    }

    std::optional<B> backend_;  ///< its own handle, which has a tag of its own
    Watch<B>* watch_ = nullptr;
    std::vector<Entry> works_;
    std::size_t pending_ = 0;
    GatherProgress<B> progress_;
    int exceptions_ = std::uncaught_exceptions();
};

}  // namespace gradsync::inline v0_2::detail
