// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../call.hpp"

namespace gradsync::inline v0_2::shared_memory {

/// The pieces in which one rank takes a collective through staging areas. Every rank has an area that the others see. Each piece is copied
/// there, reduced or broadcast in the areas, and copied out. The pieces follow from the call, the rank and the size, so all ranks have the
/// same pieces in the same order. If a piece has one owner (a shard that is gathered or scattered), it never spans two shards.
class StagedPieces {
    using Call = collective::Call;
    using Operation = collective::Operation;

public:
    /// A piece that fits into the area.
    struct Piece {
        ElementRange range;  ///< elements of the whole buffer; the area holds only these
        int owner = 0;       ///< owner of the shard, if shards have owners
    };
    /// The part of a piece that a rank copies in or out, as a range of the whole buffer; `begins` is the element of the whole buffer at
    /// which the rank's own buffer begins.
    struct Share {
        ElementRange range;
        std::size_t begins = 0;
    };

    /// `whole`: elements of the whole buffer. `most`: size limit of a piece in bytes.
    StagedPieces(const Call& call, std::size_t whole, int rank, int size, std::size_t most) noexcept
        : call_(call), whole_(whole), rank_(rank), size_(size), most_(most / size_of(call.dtype)) {}

    /// Has `take` returned the last piece? A buffer of no elements has one too, which is empty.
    bool all_taken() const noexcept { return all_taken_; }

    Piece take() noexcept {
        Piece piece;
        if (!has_owners()) {
            piece.range = {first_, gradsync::detail::smaller(first_ + most_, whole_)};
        } else {
            const ElementRange shard = shard_range(whole_, size_, owner_);
            const std::size_t first = gradsync::detail::larger(first_, shard.first);
            piece = {{first, gradsync::detail::smaller(first + most_, shard.last)}, owner_};
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
    bool has_owners() const noexcept { return collective::in_is_shard(call_.operation) || call_.operation == Operation::scatter; }

    /// The part of the piece that is in this rank's shard; its buffer holds the shard only.
    Share own_part(const Piece& piece) const noexcept {
        const ElementRange all = piece.range, own = shard_range(whole_, size_, rank_);
        const ElementRange common{gradsync::detail::larger(all.first, own.first), gradsync::detail::smaller(all.last, own.last)};
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
