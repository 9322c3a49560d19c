// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <gradsync/backend/thread_backend.hpp>

namespace gradsync_test {

/// A ThreadBackend that writes down how many elements each all_reduce and reduce_scatter has, in the order in which they are
/// started.
class RecordingBackend : public gradsync::ThreadBackend {
public:
    explicit RecordingBackend(gradsync::ThreadBackend backend) : ThreadBackend(std::move(backend)), log_(std::make_shared<Log>()) {}

    gradsync::ThreadWork all_reduce(gradsync::BufferView buffer, gradsync::ReduceOp op, gradsync::Contribution contribution = {}) {
        const std::lock_guard lock(log_->mutex);
        log_->counts.push_back(buffer.count);
        return ThreadBackend::all_reduce(buffer, op, contribution);
    }
    gradsync::ThreadWork reduce_scatter(gradsync::ConstBufferView in, gradsync::BufferView out, gradsync::ReduceOp op,
                                        gradsync::Contribution contribution = {}) {
        const std::lock_guard lock(log_->mutex);
        log_->counts.push_back(in.count);
        return ThreadBackend::reduce_scatter(in, out, op, contribution);
    }
    RecordingBackend split(int color, int key) { return RecordingBackend(ThreadBackend::split(color, key)); }
    RecordingBackend duplicate() { return RecordingBackend(ThreadBackend::duplicate()); }

    /// What was written down since the last call. Copies of a handle share it.
    std::vector<std::size_t> take_counts() {
        const std::lock_guard lock(log_->mutex);
        return std::exchange(log_->counts, {});
    }

private:
    struct Log {
        std::mutex mutex;
        std::vector<std::size_t> counts;
    };

    std::shared_ptr<Log> log_;
};

static_assert(gradsync::Backend<RecordingBackend>);

}  // namespace gradsync_test
