// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/reduce_op.hpp"
#include "../core/shard_range.hpp"

/// @file
/// A call: what a rank says to the others about a collective that it has started.

namespace gradsync::inline v0_2::collective {

using gradsync::detail::text;

enum class Operation : std::uint8_t {
    all_reduce,
    reduce,
    reduce_scatter,
    all_gather,
    broadcast,
    gather,
    scatter,
    barrier,
    reduce_step
};

constexpr std::string_view name_of(Operation operation) noexcept {
    return gradsync::detail::name_in({"all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "gather",
                                      "scatter", "barrier", "reduce_step"},
                                     operation);
}

/// One rank's description of a collective that it starts. Counts are in elements; an unused side is {nullptr, 0}.
/// In-place operations have the same buffer on both sides.
struct Call {
    const void* in = nullptr;
    void* out = nullptr;
    std::size_t in_count = 0;
    std::size_t out_count = 0;  ///< bytes in a reduce_step, because its type may differ
    Contribution contribution = {};
    int root = 0;  ///< root of a rooted operation; otherwise the code of the CollectiveTag
    Operation operation = Operation::barrier;
    ReduceOp op = ReduceOp::sum;
    DType dtype = DType::f32;
    bool elsewhere : 1 = false;      ///< ranks only synchronise here; the data moves elsewhere
    std::uint8_t followers : 7 = 0;  ///< number of later collectives that are started with it, as one group
};

constexpr bool is_rooted(Operation operation) noexcept {
    return operation == Operation::reduce || operation == Operation::broadcast || operation == Operation::gather ||
           operation == Operation::scatter;
}

/// Is this a valid call for messages in a communicator of `size` ranks? A call from another process may be anything.
constexpr bool is_valid(const Call& call, int size) noexcept {
    return call.operation <= Operation::barrier && call.op <= ReduceOp::mean && call.dtype <= DType::f8e5m2 &&
           (!is_rooted(call.operation) || (call.root >= 0 && call.root < size));
}

constexpr bool reduces(Operation operation) noexcept {
    return operation <= Operation::reduce_scatter || operation == Operation::reduce_step;
}

/// "all_reduce(sum, f32, 1000 elements)"
[[gnu::cold, gnu::noinline]] inline std::string describe(const Call& call) {
    std::string said = text(call.operation, "(");
    if (call.operation != Operation::barrier) {
        if (reduces(call.operation)) said += text(call.op, ", ");
        // Gather and scatter: this rank's shard and, at the root, the whole buffer.
        const bool gathers = call.operation == Operation::gather,
                   parts = gathers || call.operation == Operation::scatter;
        const std::size_t shard = gathers ? call.in_count : call.out_count,
                          whole = gathers ? call.out_count : call.in_count;
        said += text(call.dtype, ", ",
                     parts ? shard
                           : gradsync::detail::larger(call.in_count,
                                                      call.operation == Operation::reduce_step ? 0 : call.out_count));
        if (parts && whole != 0) said += text(" of ", whole);
        said += " elements";
        if (is_rooted(call.operation)) said += text(", root ", call.root);
    }
    said += ")";
    if (call.followers != 0) said += text(" in a group with the next ", call.followers);
    return said;
}

/// Is `in` (or `out`) the calling rank's shard? Otherwise it is the whole buffer.
constexpr bool in_is_shard(Operation operation) noexcept {
    return operation == Operation::all_gather || operation == Operation::gather;
}
constexpr bool out_is_shard(Operation operation) noexcept {
    return operation == Operation::reduce_scatter || operation == Operation::scatter;
}
/// Does each rank own its shard (`shard_range`)? Otherwise the ranks may split the buffer in any way.
constexpr bool has_shards(Operation operation) noexcept {
    return in_is_shard(operation) || out_is_shard(operation) || operation == Operation::reduce_step;
}

/// Does `rank` contribute to the share of the buffer that belongs to `owner`?
constexpr bool contributes(const Call& ranks_call, int rank, int owner) noexcept {
    switch (ranks_call.operation) {
        case Operation::barrier: return false;
        case Operation::broadcast:
        case Operation::scatter: return rank == ranks_call.root;
        case Operation::all_gather:
        case Operation::gather: return rank == owner;
        default: return ranks_call.op != ReduceOp::mean || ranks_call.contribution.scale != 0;
    }
}
/// Does `rank` get the result of that share? (The root of a broadcast already has it.)
constexpr bool receives(const Call& call, int rank, int owner) noexcept {
    switch (call.operation) {
        case Operation::barrier: return false;
        case Operation::reduce:
        case Operation::gather: return rank == call.root;
        case Operation::reduce_scatter:
        case Operation::scatter: return rank == owner;
        case Operation::broadcast: return rank != call.root;
        default: return true;
    }
}

/// The number of elements of the whole buffer, which is split over the ranks.
inline std::size_t whole_count(ListView<const Call> calls) noexcept {
    const Call& own = calls[0];
    switch (own.operation) {
        case Operation::all_gather: return own.out_count;
        case Operation::gather: return calls[own.root].out_count;
        case Operation::scatter: return calls[own.root].in_count;
        case Operation::barrier: return 0;
        default: return own.in_count;
    }
}

/// The first rank whose call does not fit rank 0's, or -1.
inline int first_misfit(ListView<const Call> calls) noexcept {
    const Call& first = calls[0];
    const int size = static_cast<int>(calls.size());
    for (int r = 1; r < size; ++r) {
        const Call& call = calls[r];
        if (call.operation != first.operation || call.followers != first.followers) return r;
        if (first.operation == Operation::barrier) continue;
        if (call.dtype != first.dtype || call.op != first.op || call.root != first.root) return r;
    }
    // Compares the side that every rank has: in a gather or scatter its shard, otherwise the whole buffer.
    const bool scatters = first.operation == Operation::scatter,
               has_shard = scatters || first.operation == Operation::gather;
    const bool of_out = scatters || first.operation == Operation::all_gather;
    const std::size_t whole = whole_count(calls);
    for (int r = 0; r < size; ++r) {
        const Call& call = calls[r];
        if ((of_out ? call.out_count : call.in_count) != (has_shard ? shard_range(whole, size, r).size() : whole))
            return r;
    }
    return -1;
}

}  // namespace gradsync::inline v0_2::collective

namespace gradsync::inline v0_2::detail {
using collective::Call, collective::Operation;
}
