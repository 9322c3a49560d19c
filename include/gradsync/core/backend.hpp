// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <string>
#include <utility>

#include "backend_abilities.hpp"
#include "buffer_view.hpp"
#include "clock.hpp"
#include "reduce_op.hpp"

namespace gradsync::inline v0_2 {

/// A started collective. `test()` makes progress and says whether it is complete, never blocking; `wait()`
/// returns when it is complete or throws `Error`, at the latest at the backend's time limit, as `test()` does where it was called for so
/// long. A default-constructed Work is complete. Dropping an unfinished Work fails the whole communicator (its buffers may be about to go),
/// so that no other rank waits in vain.
template <class W>
concept Work = std::movable<W> && std::default_initializable<W> && requires(W& work) {
    { work.test() } -> std::same_as<bool>;
    { work.wait() } -> std::same_as<void>;
};

/// A rank's handle to a communicator: a group of ranks that start the same collectives in the same order.
///
/// Copies of a handle are the same rank. All operations return at once with a Work; buffers belong to the
/// library until that Work is complete. Elements are split over the ranks by `shard_range`. Any count, 0 too.
///
/// | call | effect |
/// |---|---|
/// | `all_reduce(b, op, c)` | in place: every rank's `b` becomes the reduction of all; `c` for `mean` only |
/// | `reduce(b, op, root, c)` | in place: the root's `b` becomes it; other ranks' buffers are only read |
/// | `reduce_scatter(in, out, op, c)` | `in` whole on every rank; `out` receives this rank's shard; may alias its place in `in` |
/// | `all_gather(in, out)` | `in` is this rank's shard; `out` receives all of them; `in` may be its place in `out` |
/// | `broadcast(b, root)` | every rank's `b` becomes the root's |
/// | `gather(in, out, root)` | `in` is this rank's shard; the root's `out` receives all of them; others pass `{}` |
/// | `scatter(in, out, root)` | the root's `in` is split over the ranks' `out`; others pass `{}` |
/// | `barrier()` | complete when every rank has started it |
///
/// Min and max: a NaN wins. A mean is multiplied by one over the sum of the weights, in the accumulator's type. A backend
/// that cannot sum in rank order says so.
///
/// `progress()` advances what is under way and never blocks; `progress_time()` is how long this rank has worked in
/// it and in `Work::test()` so far. `fail(what)` makes every rank's outstanding and
/// later calls throw an error that names this rank, and returns once no other rank touches this rank's buffers. A failure
/// ends all communicators of one origin; errors name ranks by their number in the first of them.
/// `describe()` says in words how the ranks reach one another, and where that is not the fastest way, why.
/// `split(color, key)` and `duplicate()` are collective and make communicators with an order of their own; a rank makes one at
/// a time, of all that have one origin.
/// `allocate(bytes)` gives memory in which collectives are fastest (aligned to 64 bytes at least, zeroed), owned
/// by the returned object; it is collective too: same order, same sizes on all ranks.
/// A backend may offer more; see BackendAbilities.
template <class B>
concept Backend =
    std::copy_constructible<B> && requires(B& backend, const B& handle, BufferView b, ConstBufferView in, ReduceOp op, Contribution c,
                                           int i, std::string what, std::chrono::nanoseconds limit, std::size_t bytes) {
        requires Work<typename B::WorkType>;
        { B::memory_space } -> std::convertible_to<MemorySpace>;
        { handle.rank() } -> std::same_as<int>;
        { handle.size() } -> std::same_as<int>;
        { backend.all_reduce(b, op) } -> std::same_as<typename B::WorkType>;
        { backend.all_reduce(b, op, c) } -> std::same_as<typename B::WorkType>;
        { backend.reduce(b, op, i) } -> std::same_as<typename B::WorkType>;
        { backend.reduce(b, op, i, c) } -> std::same_as<typename B::WorkType>;
        { backend.reduce_scatter(in, b, op) } -> std::same_as<typename B::WorkType>;
        { backend.reduce_scatter(in, b, op, c) } -> std::same_as<typename B::WorkType>;
        { backend.all_gather(in, b) } -> std::same_as<typename B::WorkType>;
        { backend.broadcast(b, i) } -> std::same_as<typename B::WorkType>;
        { backend.gather(in, b, i) } -> std::same_as<typename B::WorkType>;
        { backend.scatter(in, b, i) } -> std::same_as<typename B::WorkType>;
        { backend.barrier() } -> std::same_as<typename B::WorkType>;
        { backend.progress() } -> std::same_as<void>;
        { handle.progress_time() } -> std::convertible_to<std::chrono::nanoseconds>;
        { backend.fail(what) } noexcept -> std::same_as<void>;
        { backend.set_timeout(limit) } -> std::same_as<void>;
        { handle.timeout() } -> std::convertible_to<std::chrono::nanoseconds>;
        { backend.split(i, i) } -> std::same_as<B>;
        { backend.duplicate() } -> std::same_as<B>;
        { backend.allocate(bytes).data() } -> std::same_as<void*>;
        { handle.describe() } -> std::convertible_to<std::string>;
    };

namespace detail {

/// W is a backend's (see BackendAbilities::poll) or an exchange's.
template <class W>
bool poll_work(W& work) {
    if constexpr (requires { work.poll(); }) return work.poll();
    else return work.test();
}

}  // namespace detail

}  // namespace gradsync::inline v0_2
