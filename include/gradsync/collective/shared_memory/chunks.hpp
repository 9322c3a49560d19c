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

/// Cuts the elements of a collective into chunks, each for one rank. Chunk c of share r belongs to rank r first: a rank
/// that works on its own share finds it in its cache next time.
class Chunks {
public:
    Chunks() = default;  ///< no chunks
    explicit Chunks(ListView<const Call> calls) noexcept {
        const Call& call = calls[0];
        count_ = whole_count(calls);
        share_ = divide_up(count_, calls.size());
        const std::size_t line = detail::line_bytes / size_of(call.dtype);
        // If any cut is allowed, no two ranks write into one cache line.
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
    std::uint32_t chunks_in(int rank) const noexcept {
        return static_cast<std::uint32_t>(divide_up(share(rank).size(), chunk_));
    }
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

/// Works on single chunks. Reuses its scratch memory, so that a steady state allocates nothing. Not thread-safe.
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
                outputs_[receivers++] =
                    static_cast<std::byte*>(calls[r].out) + (collective::out_is_shard(call.operation) ? shard : whole);
        if (collective::reduces(call.operation)) {
            for (std::size_t r = 0; r < calls.size(); ++r)
                inputs_[r] = static_cast<const std::byte*>(calls[r].in) + whole;
            return combiner_.run(calls, inputs_, {outputs_.data(), receivers}, range.size());
        }
        const bool gathers = collective::in_is_shard(call.operation);
        const Call& source = calls[gathers ? owner : call.root];
        const void* const from = static_cast<const std::byte*>(source.in) + (gathers ? shard : whole);
        for (std::size_t i = 0; i < receivers; ++i)
            if (outputs_[i] != from) std::memcpy(outputs_[i], from, range.size() * size_of(call.dtype));
    }

private:
    /// Works in blocks whose sums stay in the first-level cache.
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
            step.step(block, detail::typed_view<const void>(to, block.size(), dtype), outputs_);
        }
    }

    collective::Combiner combiner_;
    List<const void*> inputs_;
    List<void*> outputs_;
};

/// The pieces in which one rank takes a collective through staging areas. Every rank has an area that the others see.
/// Each piece is copied there, reduced or broadcast in the areas, and copied out. The pieces follow from the call, the
/// rank and the size, so all ranks have the same pieces in the same order. If a piece has one owner (a gathered or
/// scattered shard), it never spans two shards.
class StagedPieces {
public:
    /// A piece that fits into the area.
    struct Piece {
        ElementRange range;  ///< elements of the whole buffer; the area holds only these
        int owner = 0;       ///< owner of the shard, if shards have owners
    };
    /// The part of a piece that a rank copies in or out, as a range of the whole buffer. `begins`: the element of the
    /// whole buffer at which the rank's own buffer begins.
    struct Share {
        ElementRange range;
        std::size_t begins = 0;
    };

    /// `whole`: elements of the whole buffer. `most`: size limit of a piece in bytes.
    StagedPieces(const Call& call, std::size_t whole, int rank, int size, std::size_t most) noexcept
        : call_(call), whole_(whole), rank_(rank), size_(size), most_(most / size_of(call.dtype)) {}

    /// Has `take` returned the last piece? A buffer without elements has one piece, which is empty.
    bool all_taken() const noexcept { return all_taken_; }

    Piece take() noexcept {
        Piece piece;
        if (!has_owners()) {
            piece.range = {first_, smaller(first_ + most_, whole_)};
        } else {
            const ElementRange shard = shard_range(whole_, size_, owner_);
            const std::size_t first = larger(first_, shard.first);
            piece = {{first, smaller(first + most_, shard.last)}, owner_};
        }
        first_ = piece.range.last;
        all_taken_ = first_ == whole_;
        while (has_owners() && !all_taken_ && first_ >= shard_range(whole_, size_, owner_).last) ++owner_;
        return piece;
    }

    Share brings(const Piece& piece) const noexcept {
        if (!collective::contributes(call_, rank_, piece.owner)) return {};
        return collective::in_is_shard(call_.operation) ? own_part(piece) : Share{piece.range};
    }
    Share fetches(const Piece& piece) const noexcept {
        if (collective::out_is_shard(call_.operation)) return own_part(piece);
        return collective::receives(call_, rank_, piece.owner) ? Share{piece.range} : Share{};
    }

    /// The collective on the piece in the areas.
    Call call_on(std::byte* area, const Piece& piece) const noexcept {
        Call call = call_;
        const bool reduces = collective::reduces(call_.operation);
        call.operation = reduces ? Operation::all_reduce : Operation::broadcast;
        call.root = reduces ? 0 : collective::in_is_shard(call_.operation) ? piece.owner : call_.root;
        call.in = call.out = area;
        call.in_count = call.out_count = piece.range.size();
        return call;
    }

private:
    bool has_owners() const noexcept {
        return collective::in_is_shard(call_.operation) || call_.operation == Operation::scatter;
    }

    /// The part of the piece that is in this rank's shard; its buffer holds the shard only.
    Share own_part(const Piece& piece) const noexcept {
        const ElementRange all = piece.range, own = shard_range(whole_, size_, rank_);
        const ElementRange common{larger(all.first, own.first), smaller(all.last, own.last)};
        return {common.first < common.last ? common : ElementRange{}, own.first};
    }

    Call call_;
    std::size_t whole_ = 0;
    int rank_ = 0, size_ = 1;
    std::size_t most_ = 0;   ///< size limit of a piece, in elements
    int owner_ = 0;          ///< owner of the next piece
    std::size_t first_ = 0;  ///< the next piece begins with this element of the whole buffer
    bool all_taken_ = false;
};

}  // namespace gradsync::inline v0_2::shared_memory
