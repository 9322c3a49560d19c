// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>

#include "../core/backend.hpp"
#include "../core/math.hpp"

namespace gradsync::inline v0_2 {

/// A collective that a rank is about to start.
struct FaultPoint {
    int rank = 0;                     ///< in its communicator
    std::uint64_t number = 0;         ///< of the communicator's collectives: this rank has been about to start so many before
    std::string_view operation = {};  ///< "all_reduce"
    std::size_t bytes = 0;            ///< of the largest buffer that it was given
};

/// A backend on which things go wrong, to test what a program makes of that: each rank calls `fault` before it starts a collective. That
/// may throw, as what the rank does next might; sleep, as a straggler does, or, for longer than the time limit, a rank that hangs; or end
/// the process.
///
///     gs::FaultyBackend faulty(comm, [](const gs::FaultPoint& at) {
///         if (at.rank == 1 && at.number == 100) std::raise(SIGKILL);
///     });
///     gs::Reducer<gs::FaultyBackend<gs::MpiBackend>> sync(faulty, parameters);
///
/// All else is B's: its memory, its time limits, its bits. `fault` is shared by all copies of a handle, and by the communicators that are
/// made of it, which count anew; it is called by whichever threads start collectives, the overlap policy's among them, on several ranks at
/// a time. A rank that gets an exception from it has started nothing, and gets it again from each later collective of that communicator,
/// without a call: so it is seen also where the first was a thread's for progress, which keeps it to itself. Not asked are `split`,
/// `duplicate` and what goes on in `host()` of a backend of device memory.
template <Backend B>
class FaultyBackend : public B {
public:
    using Fault = std::function<void(const FaultPoint&)>;
    using WorkType = typename B::WorkType;

    FaultyBackend(B backend, Fault fault) : FaultyBackend(std::move(backend), std::make_shared<const Fault>(std::move(fault))) {}

    WorkType all_reduce(BufferView buffer, ReduceOp op, Contribution contribution = {}) {
        reach("all_reduce", buffer.bytes());
        return B::all_reduce(buffer, op, contribution);
    }
    WorkType reduce(BufferView buffer, ReduceOp op, int root, Contribution contribution = {}) {
        reach("reduce", buffer.bytes());
        return B::reduce(buffer, op, root, contribution);
    }
    WorkType reduce_scatter(ConstBufferView in, BufferView out, ReduceOp op, Contribution contribution = {}) {
        reach("reduce_scatter", in.bytes());
        return B::reduce_scatter(in, out, op, contribution);
    }
    WorkType all_gather(ConstBufferView in, BufferView out) {
        reach("all_gather", out.bytes());
        return B::all_gather(in, out);
    }
    WorkType broadcast(BufferView buffer, int root) {
        reach("broadcast", buffer.bytes());
        return B::broadcast(buffer, root);
    }
    WorkType gather(ConstBufferView in, BufferView out, int root) {
        reach("gather", detail::larger(in.bytes(), out.bytes()));
        return B::gather(in, out, root);
    }
    WorkType scatter(ConstBufferView in, BufferView out, int root) {
        reach("scatter", detail::larger(in.bytes(), out.bytes()));
        return B::scatter(in, out, root);
    }
    WorkType barrier() {
        reach("barrier", 0);
        return B::barrier();
    }

    FaultyBackend split(int color, int key) { return {B::split(color, key), fault_}; }
    FaultyBackend duplicate() { return {B::duplicate(), fault_}; }

private:
    /// Of a rank in a communicator.
    struct State {
        std::mutex mutex;
        std::uint64_t reached = 0;
        std::exception_ptr thrown;
    };

    FaultyBackend(B backend, std::shared_ptr<const Fault> fault)
        : B(std::move(backend)), fault_(std::move(fault)), state_(std::make_shared<State>()) {}

    void reach(std::string_view operation, std::size_t bytes) {
        if (!state_) return;  // moved from, as B will say
        FaultPoint at{.rank = this->rank(), .operation = operation, .bytes = bytes};
        {
            const std::lock_guard lock(state_->mutex);
            if (state_->thrown) std::rethrow_exception(state_->thrown);
            at.number = state_->reached++;
        }
        try {
            (*fault_)(at);
        } catch (...) {
            const std::lock_guard lock(state_->mutex);
            state_->thrown = std::current_exception();
            throw;
        }
    }

    std::shared_ptr<const Fault> fault_;
    std::shared_ptr<State> state_;
};

}  // namespace gradsync::inline v0_2
