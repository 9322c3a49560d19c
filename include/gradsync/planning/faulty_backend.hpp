// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <functional>
#include <memory>

#include "../core/backend.hpp"
#include "../core/math.hpp"
#include "../core/shard_range.hpp"

namespace gradsync::inline v0_2 {

/// A collective that a rank is about to start.
struct FaultPoint {
    int rank = 0;                     ///< in its communicator
    std::uint64_t number = 0;         ///< collectives that this rank has reached before in this communicator
    std::string_view operation = {};  ///< "all_reduce"
    std::size_t bytes = 0;            ///< size of the largest buffer of the collective
};

/// A backend that injects faults, to test how a program handles them. Each rank calls `fault` before it starts a
/// collective. `fault` may throw, as the rank's own code might; sleep, like a straggler, or past the time limit, like a
/// rank that hangs; or end the process.
///
///     gs::FaultyBackend faulty(comm, [](const gs::FaultPoint& at) {
///         if (at.rank == 1 && at.number == 100) std::raise(SIGKILL);
///     });
///     gs::Reducer<gs::FaultyBackend<gs::MpiBackend>> sync(faulty, parameters);
///
/// Memory, time limits and bits are B's. All copies of a handle share `fault`, and so do the communicators made from
/// it, which count from 0. Any thread that starts a collective calls it, the overlap policy's included, and several
/// ranks may call it at the same time. If it throws, the collective does not start, and every later collective of that
/// communicator on that rank rethrows the exception without a call. So the program sees the exception even if a
/// progress thread swallowed the first one. `split`, `duplicate` and collectives of `host()` (backends of device
/// memory) do not call it.
template <Backend B>
class FaultyBackend : public B {
public:
    using Fault = std::function<void(const FaultPoint&)>;  ///< called before each collective; throws to make it fail
    using WorkType = typename B::WorkType;

    /// Wraps a backend.
    FaultyBackend(B backend, Fault fault)
        : FaultyBackend(std::move(backend), std::make_shared<const Fault>(std::move(fault))) {}

    WorkType all_reduce(BufferView buffer, ReduceOp op, Contribution contribution = {}) {
        return reach("all_reduce", buffer.bytes()).all_reduce(buffer, op, contribution);
    }
    WorkType reduce(BufferView buffer, ReduceOp op, int root, Contribution contribution = {}) {
        return reach("reduce", buffer.bytes()).reduce(buffer, op, root, contribution);
    }
    WorkType reduce_scatter(ConstBufferView in, BufferView out, ReduceOp op, Contribution contribution = {}) {
        return reach("reduce_scatter", in.bytes()).reduce_scatter(in, out, op, contribution);
    }
    /// See BackendAbilities::steps_inside.
    WorkType reduce_step(ConstBufferView in, BufferView out, ReduceOp op, Contribution contribution, ShardStep& step)
        requires(abilities_of<B>.steps_inside)
    {
        return reach("reduce_step", in.bytes()).reduce_step(in, out, op, contribution, step);
    }
    WorkType all_gather(ConstBufferView in, BufferView out) {
        return reach("all_gather", out.bytes()).all_gather(in, out);
    }
    WorkType broadcast(BufferView buffer, int root) {
        return reach("broadcast", buffer.bytes()).broadcast(buffer, root);
    }
    WorkType gather(ConstBufferView in, BufferView out, int root) {
        return reach("gather", detail::larger(in.bytes(), out.bytes())).gather(in, out, root);
    }
    WorkType scatter(ConstBufferView in, BufferView out, int root) {
        return reach("scatter", detail::larger(in.bytes(), out.bytes())).scatter(in, out, root);
    }
    WorkType barrier() { return reach("barrier", 0).barrier(); }

    FaultyBackend split(int color, int key) { return {B::split(color, key), fault_}; }
    FaultyBackend duplicate() { return {B::duplicate(), fault_}; }

private:
    /// The state of one rank in one communicator.
    struct State {
        std::mutex mutex;
        std::uint64_t reached = 0;
        std::exception_ptr thrown;
    };

    FaultyBackend(B backend, std::shared_ptr<const Fault> fault)
        : B(std::move(backend)), fault_(std::move(fault)), state_(std::make_shared<State>()) {}

    /// Calls `fault`, and returns the backend that then starts the collective.
    B& reach(std::string_view operation, std::size_t bytes) {
        if (!state_) return *this;  // moved from: B throws
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
        return *this;
    }

    std::shared_ptr<const Fault> fault_;
    std::shared_ptr<State> state_;
};

}  // namespace gradsync::inline v0_2
