// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "backend_abilities.hpp"
#include "buffer_view.hpp"
#include "clock.hpp"
#include "list.hpp"
#include "reduce_op.hpp"

namespace gradsync::inline v0_2 {

/// A started collective. `test()` makes progress, returns whether the collective is complete, and never blocks.
/// `wait()` returns when it is complete. Both throw `Error` if it fails or reaches the backend's time limit; for
/// `test()` the limit counts across its calls. A default-constructed Work is complete. Dropping an unfinished Work
/// fails the whole communicator, because its buffers may be freed next; no other rank hangs.
template <class W>
concept Work = std::movable<W> && std::default_initializable<W> && requires(W& work) {
    { work.test() } -> std::same_as<bool>;
    { work.wait() } -> std::same_as<void>;
};

/// A rank's handle to a communicator: a group of ranks that start the same collectives in the same order.
///
/// Copies of a handle are the same rank. Every collective returns a Work at once; its buffers belong to the library
/// until that Work is complete. `shard_range` splits elements over the ranks. Any count is valid, including 0.
///
/// | call | effect |
/// |---|---|
/// | `all_reduce(b, op, c)` | in place: every rank's `b` becomes the reduction of all; `c` is for `mean` only |
/// | `reduce(b, op, root, c)` | in place: the root's `b` becomes the reduction; other ranks' buffers are only read |
/// | `reduce_scatter(in, out, op, c)` | `in` is whole; `out` receives this rank's shard, and may be its place in `in` |
/// | `all_gather(in, out)` | `in` is this rank's shard; `out` receives all shards; `in` may be its place in `out` |
/// | `broadcast(b, root)` | every rank's `b` becomes the root's |
/// | `gather(in, out, root)` | `in` is this rank's shard; the root's `out` receives all of them; others pass `{}` |
/// | `scatter(in, out, root)` | the root's `in` is split over the ranks' `out`; others pass `{}` |
/// | `barrier()` | complete when every rank has started it |
///
/// In min and max a NaN wins. A mean is a sum times one over the sum of the weights, in the accumulator's type.
/// Elements are combined in the order of the tree over the ranks (core/math.hpp); a backend that
/// cannot do this documents it.
///
/// - `progress()` advances collectives and never blocks. `progress_time()` is the time that this rank has worked in it
///   and in `Work::test()` so far.
/// - `fail(what)` makes outstanding and later calls throw an error that names this rank, on every rank. It returns once
///   no other rank touches this rank's buffers. A failure ends all communicators of one origin; errors number ranks as
///   the first of these does.
/// - A time limit must be positive. The largest is no limit.
/// - `describe()` says how the ranks reach one another; if that is not the fastest way, it also says why.
/// - `split(color, key)` and `duplicate()` are collective. They make communicators that order their collectives
///   independently: of the ranks with the same color, in the order of (key, rank), or of all ranks. A rank makes one at
///   a time among all communicators of one origin.
/// - `allocate(bytes)` is collective: all ranks call it in the same order with the same sizes. The returned object owns
///   zeroed memory, aligned to at least 64 bytes, in which collectives are fastest.
///
/// | mistake or failure | `Error` | the message contains |
/// |---|---|---|
/// | a rank makes an invalid call | invalid_argument | |
/// | a call on a handle that was moved from, except `progress` and `fail` | invalid_argument | "moved from" |
/// | the ranks start different collectives | collective_mismatch | what differs, as in "1000" and "1001" |
/// | a rank throws, or calls `fail(what)` | peer_failed | the rank, `what` |
/// | the last handle of a rank is gone, and others wait for it | peer_left | the rank |
/// | a wait, or `test()` again and again, reaches the limit | timeout | the collective, "ranks 1, 3 did not start it" |
/// | a Work is dropped | abandoned or peer_failed | the collective |
///
/// An invalid call throws on its rank before anything is communicated, and later calls work: a view without memory or
/// in the wrong memory space, a shard of the wrong size, two dtypes, a root out of range, a mean of integers, or a
/// Contribution to another operation than mean. All other mistakes are failures: `context().peer` is the rank to blame,
/// and afterwards every call that starts something throws, on all communicators of the origin.
///
/// A backend may have more abilities; see BackendAbilities.
template <class B>
concept Backend = std::copy_constructible<B> &&
                  requires(B& backend, const B& handle, BufferView b, ConstBufferView in, ReduceOp op, Contribution c,
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

/// Turns memory that this process mapped (whole pages of mmap, not malloc's) into memory like that of `comm.allocate`,
/// while the result lives: gradients there are reduced in place, at the speed of shared memory. It keeps its address
/// and contents, also afterwards. No thread may use it during this call and during the destruction of the result. A
/// no-op between threads and between machines. Collective, with the same number of bytes on all ranks. Throws
/// Error(invalid_argument) on all ranks of a machine if one of them cannot.
///
///     const auto adopted = gs::adopt(comm, std::span(arena, elements));
template <Backend B, class Region>
[[nodiscard]] auto adopt(B& comm, Region&& region) {
    const BufferView view = buffer(std::forward<Region>(region));
    if constexpr (requires { comm.adopt(std::span<std::byte>()); })
        return comm.adopt({static_cast<std::byte*>(view.data), view.bytes()});
    else return comm.allocate(0);
}

namespace detail {

/// Tests without a time limit if W can (BackendAbilities::poll), else with one. W is the WorkType
/// of a backend or of an exchange.
template <class W>
bool poll_work(W& work) {
    if constexpr (requires { work.poll(); }) return work.poll();
    else return work.test();
}

/// The number by which errors name a rank of this communicator: that before any split, if the backend knows it.
template <class B>
int named_rank(const B& backend, auto rank) {
    if constexpr (requires { backend.world_rank(0); }) return backend.world_rank(static_cast<int>(rank));
    else return static_cast<int>(rank);
}
/// The same of this rank.
template <class B>
int named_rank(const B& backend) {
    return named_rank(backend, backend.rank());
}

/// The values of all ranks, in rank order. Collective.
template <Backend B>
[[gnu::cold]] List<std::uint64_t> gather_values(B& backend, std::span<const std::uint64_t> own) {
    List<std::uint64_t> all(own.size() * static_cast<std::size_t>(backend.size()));
    backend.all_gather(ConstBufferView(own.data(), own.size()), BufferView(all.data(), all.size())).wait();
    return all;
}

/// One plain value of each rank, in rank order. Collective.
template <class T, Backend B>
    requires std::is_trivially_copyable_v<T>
[[gnu::cold]] List<T> gather_value(B& backend, const T& own) {
    List<T> all(static_cast<std::size_t>(backend.size()));
    const BufferView view = typed_view(all.data(), all.size() * sizeof(T), DType::u8);
    backend.all_gather(typed_view<const void>(&own, sizeof(T), DType::u8), view).wait();
    return all;
}

/// The texts of all ranks, in rank order; on ranks other than `root`, if one is given, none. Collective.
template <Backend B>
[[gnu::cold]] List<std::string> gather_texts(B& backend, std::string_view own, int root = -1) {
    const std::uint64_t size[] = {own.size()};
    const List<std::uint64_t> sizes = gather_values(backend, size);
    std::size_t longest = 0;
    for (const std::uint64_t s : sizes) longest = s < longest ? longest : s;
    const bool everywhere = root < 0, here = everywhere || root == backend.rank();
    std::string mine(own), all(here ? longest * sizes.size() : 0, '\0');
    mine.resize(longest);
    (everywhere ? backend.all_gather(const_buffer(mine), buffer(all))
                : backend.gather(const_buffer(mine), buffer(all), root))
        .wait();
    List<std::string> texts(here ? sizes.size() : 0);
    for (std::size_t r = 0; r < texts.size(); ++r) texts[r] = all.substr(r * longest, sizes[r]);
    return texts;
}

/// Returns whether B needs a polling thread.
template <Backend B>
bool wants_progress_thread([[maybe_unused]] const B& backend) noexcept {
    if constexpr (abilities_of<B>.progress_thread) return backend.size() > 1 && backend.wants_progress_thread();
    else return false;
}

}  // namespace detail

}  // namespace gradsync::inline v0_2
