// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../combine.hpp"

namespace gradsync::inline v0_2::shared_memory {

using collective::Call;
using collective::Operation;
using gradsync::detail::divide_up;
using gradsync::detail::larger;
using gradsync::detail::round_up;
using gradsync::detail::smaller;

/// Cuts the elements of a collective into chunks; one rank works on each alone. Chunk c of share r belongs to rank r first: a rank that
/// works on its own share finds it in its cache next time.
class Chunks {
public:
    Chunks() = default;  ///< no chunks
    explicit Chunks(ListView<const Call> calls) noexcept {
        const Call& call = calls[0];
        count_ = whole_count(calls);
        share_ = divide_up(count_, calls.size());
        const std::size_t line = gradsync::detail::line_bytes / size_of(call.dtype);
        // If the operation allows any cut, no two ranks write into one cache line.
        if (!has_shards(call.operation)) share_ = round_up(share_, line);
        const std::size_t least = min_chunk_bytes / size_of(call.dtype);
        const std::size_t most = max_chunk_bytes / size_of(call.dtype);
        chunk_ = smaller(larger(round_up(share_ / 8, line), least), most);
    }

    /// The share of a rank, in elements of the whole buffer.
    ElementRange share(int rank) const noexcept {
        const std::size_t first = smaller(share_ * static_cast<std::size_t>(rank), count_);
        return {first, smaller(first + share_, count_)};
    }
    std::uint32_t chunks_in(int rank) const noexcept { return static_cast<std::uint32_t>(divide_up(share(rank).size(), chunk_)); }
    ElementRange chunk(int rank, std::uint32_t c) const noexcept {
        const ElementRange range = share(rank);
        const std::size_t first = range.first + c * chunk_;
        return {first, smaller(first + chunk_, range.last)};
    }

private:
    static constexpr std::size_t min_chunk_bytes = 32 * 1024;
    static constexpr std::size_t max_chunk_bytes = 256 * 1024;

    std::size_t count_ = 0, share_ = 0, chunk_ = 1;
};

/// Works on single chunks. Keeps its scratch, so that a steady state allocates nothing. For one thread at a time.
class ChunkWorker {
public:
    explicit ChunkWorker(std::size_t ranks) : combiner_(ranks), inputs_(ranks), outputs_(ranks) {}

    /// Works on `range`, a part of the share of `owner`. `step`: the owner's, if the collective has one.
    template <class = void>  // see isa.hpp
    void run(ListView<const Call> calls, int owner, ElementRange range, ShardStep* step = nullptr) {
        const Call& call = calls[0];
        if (call.operation == Operation::reduce_step) return run_step(calls, range, *step);
        const std::size_t whole = range.first * size_of(call.dtype);  // offset in a whole buffer, in bytes
        // Offset in the owner's shard, in bytes, for operations whose shares are its shards.
        const std::size_t shard =
            whole - shard_range(whole_count(calls), static_cast<int>(calls.size()), owner).first * size_of(call.dtype);
        std::size_t receivers = 0;
        for (std::size_t r = 0; r < calls.size(); ++r)
            if (collective::receives(call, static_cast<int>(r), owner))
                outputs_[receivers++] = static_cast<std::byte*>(calls[r].out) + (collective::out_is_shard(call.operation) ? shard : whole);
        if (collective::reduces(call.operation)) {
            for (std::size_t r = 0; r < calls.size(); ++r) inputs_[r] = static_cast<const std::byte*>(calls[r].in) + whole;
            return combiner_.run(calls, inputs_, {outputs_.data(), receivers}, range.size());
        }
        const bool gathers = collective::in_is_shard(call.operation);
        const Call& source = calls[static_cast<std::size_t>(gathers ? owner : call.root)];
        const void* const from = static_cast<const std::byte*>(source.in) + (gathers ? shard : whole);
        for (std::size_t i = 0; i < receivers; ++i)
            if (outputs_[i] != from) std::memcpy(outputs_[i], from, range.size() * size_of(call.dtype));
    }

private:
    /// In blocks whose sums stay in the first cache.
    [[gnu::noinline]] void run_step(ListView<const Call> calls, ElementRange range, ShardStep& step) {
        alignas(64) std::byte sums[32 * 1024];
        void* const to = sums;
        const DType dtype = calls[0].dtype;
        for (std::size_t r = 0; r < calls.size(); ++r) outputs_[r] = calls[r].out;
        for (ElementRange block = range; block.first < range.last; block.first = block.last) {
            block.last = smaller(block.first + sizeof sums / size_of(dtype), range.last);
            for (std::size_t r = 0; r < calls.size(); ++r)
                inputs_[r] = static_cast<const std::byte*>(calls[r].in) + block.first * size_of(dtype);
            combiner_.run(calls, inputs_, {&to, 1}, block.size());
            step.step(block, gradsync::detail::typed_view<const void>(to, block.size(), dtype), outputs_);
        }
    }

    collective::Combiner combiner_;
    List<const void*> inputs_;
    List<void*> outputs_;
};

}  // namespace gradsync::inline v0_2::shared_memory
