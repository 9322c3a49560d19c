// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstring>

#include "core/collective_tag.hpp"
#include "core/list.hpp"
#include "core/requirements.hpp"

namespace gradsync::inline v0_2 {

namespace detail {

/// Reduces the tensors in place, or gives all ranks those of `root`, with ReduceOp::sum.
/// Small ones share one collective, in a buffer on the stack: a broadcast of these is a sum with zeros,
/// because the tags of sums are compared.
template <class B>
void all_reduce_together(B comm, ListView<const BufferView> tensors, ReduceOp op, int root = -1) {
    alignas(64) std::byte memory[std::size_t{16} << 10];
    const DType dtype = tensors[0].dtype;
    std::size_t packed = 0;
    const auto place = [&](const BufferView& t) -> std::byte* {  // null: the tensor travels alone
        if (tensors.size() == 1 || t.dtype != dtype || t.bytes() > sizeof memory - packed) return nullptr;
        if (t.space != MemorySpace::host || B::memory_space != MemorySpace::host || t.data == nullptr || t.count == 0)
            return nullptr;  // an empty tensor may have an address on one rank, and none on another
        packed += t.bytes();
        return memory + (packed - t.bytes());
    };
    const char* const operation = root >= 0 ? "broadcast" : op == ReduceOp::mean ? "average" : "sum";
    for (const BufferView& t : tensors) {  // before anything is started
        if (op == ReduceOp::mean && !is_floating(t.dtype))
            refuse({operation, named_rank(comm)}, "a mean of ", t.dtype, " is not defined; use sum() and divide");
        if ((t.data == nullptr && t.count != 0) || t.space != B::memory_space)
            refuse({operation, named_rank(comm)}, "a tensor has no memory, or lies in another memory space than this ",
                   "backend takes");
    }
    List<typename B::WorkType> works;  // after `memory`: an exception abandons them first
    std::uint64_t counts = fnv1a(&root, sizeof root);
    for (const BufferView& t : tensors)
        if (std::byte* const to = place(t)) {
            std::memcpy(to, t.data, t.bytes());
            counts = fnv1a(&t.count, sizeof t.count, counts);
        } else {
            works.push_back(root < 0 ? comm.all_reduce(t, op) : comm.broadcast(t, root));
        }
    if (packed != 0) {
        set_tag(comm, CollectiveTag::of_counts(counts));
        BufferView view = typed_view(memory, packed / size_of(dtype), dtype);
        if (root >= 0) view = BufferView(reinterpret_cast<std::uint8_t*>(memory), packed);
        if (root >= 0 && root != comm.rank()) std::memset(memory, 0, packed);
        works.push_back(comm.all_reduce(view, op));
    }
    for (auto& work : works) work.wait();
    packed = 0;
    for (const BufferView& t : tensors)
        if (const std::byte* const from = place(t)) std::memcpy(t.data, from, t.bytes());
}

/// A number counts as a tensor of one element.
template <class T>
BufferView view_to_reduce(T&& tensor) {
    using Number = std::remove_reference_t<T>;
    constexpr bool number = std::is_arithmetic_v<Number> || Element<Number>;
    static_assert(
        !number || (std::is_lvalue_reference_v<T&&> && !std::is_const_v<Number>),
        "gradsync: pass a variable that is not const: the result replaces this number (the root of a broadcast is a "
        "gradsync::Root)");
    static_assert(!number || Element<std::remove_const_t<Number>>,
                  "gradsync: copy this number into a double or an integer of 4 or 8 bytes");
    if constexpr (!number) return buffer(std::forward<T>(tensor));
    else if constexpr (std::is_lvalue_reference_v<T&&> && Element<Number> && !std::is_const_v<Number>)
        return BufferView(&tensor, 1);
    else return {};
}

template <class B, class... Tensors>
void run_in_place(const B& comm, ReduceOp op, int root, Tensors&&... tensors) {
    static_assert(require_backend<B>());
    const BufferView views[] = {view_to_reduce(std::forward<Tensors>(tensors))...};
    all_reduce_together(comm, ListView<const BufferView>(views), op, root);
}

}  // namespace detail

/// Replaces each tensor by its mean over the ranks, and returns when all of them are complete. Use it for losses, and
/// in trainers that need no overlap:
///
///     model.backward(batch);
///     gs::average(comm, model.w_gradient, model.b_gradient, loss);
///
/// A tensor is a contiguous range, a `BufferView`, a type with `buffer_traits`, or one number. Works with every
/// backend. Pass tensors of the same shapes and types, in the same order, on all ranks; they may be empty. Their types
/// must be floating; for integers use `sum`.
///
/// Cost: one collective per tensor, all in flight together. Host tensors of the first one's type share one collective
/// as long as they fit into 16 KiB; they are copied to the stack and back. Nothing overlaps with the backward; use a
/// `Reducer` for that.
///
/// The caller owns the memory. Several threads of a rank may call it only if all ranks start their collectives in the
/// same order. Collective. Throws Error(invalid_argument) before anything is sent if a type has no mean, or if a tensor
/// has no memory. Throws what a wait throws: Errc::collective_mismatch if counts or types differ between ranks,
/// Errc::timeout, or Errc::peer_failed; the tensors' contents are then unspecified.
template <class B, class First, class... More>
void average(const B& comm, First&& first, More&&... more) {
    detail::run_in_place(comm, ReduceOp::mean, -1, std::forward<First>(first), std::forward<More>(more)...);
}

/// As `average`, but with the sum over the ranks. Integers are allowed.
template <class B, class First, class... More>
void sum(const B& comm, First&& first, More&&... more) {
    detail::run_in_place(comm, ReduceOp::sum, -1, std::forward<First>(first), std::forward<More>(more)...);
}

/// The rank whose contents `broadcast` gives to the others.
struct Root {
    int rank = 0;  ///< its number
};

/// Replaces each tensor by the root's, and returns when all of them are complete. Use it for state without a gradient:
/// the seed of a shuffle, running statistics, a decision to stop. Arguments, cost, ownership and errors are as for
/// `average`. All types are allowed. Beside an `int`, name the root: the `int` could be meant as the root.
///
///     gs::broadcast(comm, model.running_mean);           // from rank 0
///     gs::broadcast(comm, gs::Root{0}, seed, epoch);
template <class B, class First, class... More>
void broadcast(const B& comm, Root root, First&& first, More&&... more) {
    if (root.rank < 0 || root.rank >= comm.size())
        detail::refuse({"broadcast", detail::named_rank(comm)}, "there is no rank ", root.rank, " among ", comm.size());
    detail::run_in_place(comm, ReduceOp::sum, root.rank, std::forward<First>(first), std::forward<More>(more)...);
}
template <class B, class First, class... More>
void broadcast(const B& comm, First&& first, More&&... more) {
    static_assert(sizeof...(More) == 0 || !(std::is_same_v<First, int&> || ... || std::is_same_v<More, int&>),
                  "gradsync: say whether this int is the root: broadcast(comm, gs::Root{root}, x) if it is, and "
                  "broadcast(comm, gs::Root{0}, number, x) if it is a number to broadcast");
    detail::run_in_place(comm, ReduceOp::sum, 0, std::forward<First>(first), std::forward<More>(more)...);
}

}  // namespace gradsync::inline v0_2
