// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "any_shards.hpp"
#include "entry.hpp"

namespace gradsync::inline v0_2::elastic {

/// Internal: copies of the parts of a sharded state. Each rank keeps its own part and those of one or two other ranks,
/// its mates, in memory that outlives the generations. A part is what a rank has of each array, and the state that all
/// ranks have. Not thread-safe.
class KeptParts {
public:
    /// Takes note of what all ranks have beside their shards, and returns what all ranks have kept. Throws what
    /// `pieces_of` and `exchange_entries` throw. Collective.
    [[gnu::cold]] List<Entry> meet(TcpBackend& comm, const AnyShards& shards, std::span<const BufferView> state,
                                   bool begun) {
        Entry own{.row = holdings_.row(), .begun = begun};
        for (const ParameterView& one : shards.parameters())
            own.layout = detail::fnv1a(&one.gradient.count, sizeof one.gradient.count, own.layout + 1);
        state_ = pieces_of(comm, state, own);
        const List<Entry> all = exchange_entries(comm, own);
        for (const Entry& one : all) know(one.row.top);
        return all;
    }

    /// Gives all ranks what rank 0 has, and the shards have not: all, or with a checkpoint what is beside the shards.
    /// Collective.
    [[gnu::cold]] void begin(TcpBackend& comm, const AnyShards& shards, bool anew) {
        if (anew) shards.broadcast_parameters(0);
        else shards.broadcast_frozen(0);
        for (const Piece& piece : state_)
            in_chunks(piece.data, piece.bytes, [&](std::size_t, BufferView chunk) { comm.broadcast(chunk, 0).wait(); });
    }

    /// Writes the state that the members have agreed on into the shards and the memory of the state. Throws
    /// Error(parameter_mismatch) if it is of another model. Collective.
    [[gnu::cold]] void restore(TcpBackend& comm, const AnyShards& shards, const Plan& plan) {
        shards.broadcast_frozen(static_cast<int>(plan.owners[0]));
        shards.flush();
        List<Wanted> wanted(shards.parameters().size());
        shards.for_each([&](std::size_t i, std::size_t, std::size_t first, BufferView view) {
            wanted[i].first = first;
            wanted[i].arrays.push_back(view);
        });
        List<std::byte> room;
        for (std::uint32_t part = 0; part < plan.owners.size(); ++part) {
            const int owner = static_cast<int>(plan.owners[part]);
            const ListView<std::byte> here = receive(comm, plan.base, part, owner, room);
            if (!unpack(here, part == 0, wanted)) refuse_part(comm, owner);
        }
        for (const Wanted& one : wanted)
            if (!one.arrays.empty() && one.found != one.arrays[0].count * one.arrays.size()) refuse_part(comm, -1);
        shards.publish();
    }

    /// Keeps the state `number` in a place of its own: the one before stays until this one is whole on all ranks.
    /// `mates`: a communicator of those that keep their parts together, whose ranks among all are `ranks`. `plan`: what
    /// the members go on from; without one, the last state that was kept. Throws what the backend throws. Collective.
    void keep(TcpBackend& mates, const List<std::uint32_t>& ranks, int size, const AnyShards& shards,
              std::uint64_t number, const Plan* plan = nullptr) {
        slices_.clear();
        std::size_t bytes = sizeof(Head);
        shards.for_each([&](std::size_t i, std::size_t a, std::size_t first, BufferView view) {
            slices_.push_back({i, a, first, view.count, static_cast<std::uint64_t>(view.dtype)});
            bytes += sizeof(Slice) + view.bytes();
        });
        for (const Piece& piece : state_) bytes += piece.bytes;
        std::uint64_t room = bytes;  // the largest part's
        mates.all_reduce(BufferView(&room, 1), ReduceOp::max).wait();

        const auto self = static_cast<std::size_t>(mates.rank());
        const int place = plan != nullptr ? holdings_.place_for(*plan, ranks[self]) : holdings_.place_for_next();
        if (place < 0) refuse_state(mates, Errc::storage, {}, "changes were interrupted too often; start the job anew");
        holdings_.tear(place);
        Place& to = places_[place];
        to.bytes.resize(room * ranks.size());
        to.room = room;
        pack(to.bytes.data() + self * room, number, shards);
        in_chunks(to.bytes.data(), room, [&](std::size_t done, BufferView chunk) {
            decltype(mates.broadcast(chunk, 0)) works[Holding::most];  // at the same time
            for (std::size_t m = 0; m < ranks.size(); ++m) {
                chunk.data = to.bytes.data() + m * room + done;
                works[m] = mates.broadcast(chunk, static_cast<int>(m));
            }
            for (auto& work : works) work.wait();
        });
        Holding state{.number = number, .division = shards.division(), .parts = static_cast<std::uint32_t>(size)};
        for (std::size_t m = 0; m < Holding::most; ++m) state.part[m] = m < ranks.size() ? ranks[m] : Holding::none;
        holdings_.fill(place, state);
        newest_ = place;
    }

    /// All ranks have kept the state that they go on from; it alone counts.
    void go_on() {
        holdings_.go_on_from(newest_);
        drop_unused();
    }
    /// The number of the last state that was kept, 0 if there is none.
    std::uint64_t number() const noexcept { return holdings_.row().holdings[newest_].number; }
    /// Some member has had this state.
    void know(std::uint64_t number) noexcept { holdings_.know(number); }
    /// Drops what this process has kept, because others have newer states.
    void forget() {
        holdings_ = Holdings(Row::most);
        drop_unused();
    }

private:
    /// The beginning of a part. Its slices follow, then the state that all ranks have, then the elements of the slices.
    struct Head {
        std::uint64_t number = 0, slices = 0, state = 0;  ///< `state`: in bytes
    };
    struct Slice {
        std::uint64_t parameter, array, first, count, dtype;
        std::size_t bytes() const noexcept { return count * size_of(static_cast<DType>(dtype)); }
    };
    struct Place {
        List<std::byte> bytes;
        std::size_t room = 0;  ///< for each part
    };
    /// The elements of a parameter that this rank has, from `first` on.
    struct Wanted {
        std::size_t first = 0;
        List<BufferView> arrays = {};
        std::size_t found = 0;  ///< elements of all arrays that were written
    };

    [[noreturn]] static void refuse_part(const TcpBackend& comm, int owner) {
        refuse_state(comm, Errc::parameter_mismatch, {.peer = owner}, "what the ranks have kept is of another model; ",
                     "give all ranks the same parameters, optimizer and state");
    }
    void drop_unused() {
        for (int i = 0; i < Row::most; ++i)
            if (holdings_.row().holdings[i].number == 0) places_[i] = {};
    }

    /// Writes this rank's part.
    void pack(std::byte* to, std::uint64_t number, const AnyShards& shards) const {
        Head head{.number = number, .slices = slices_.size()};
        for (const Piece& piece : state_) head.state += piece.bytes;
        const auto put = [&](const void* from, std::size_t bytes) {
            if (bytes != 0) std::memcpy(to, from, bytes);
            to += bytes;
        };
        put(&head, sizeof head);
        put(slices_.data(), slices_.size() * sizeof(Slice));
        for (const Piece& piece : state_) put(piece.data, piece.bytes);
        shards.for_each([&](std::size_t, std::size_t, std::size_t, BufferView view) { put(view.data, view.bytes()); });
    }

    /// Returns the bytes of a part, from its owner to all ranks.
    ListView<std::byte> receive(TcpBackend& comm, const Holding& base, std::uint32_t part, int owner,
                                List<std::byte>& room) {
        ListView<std::byte> here;
        if (comm.rank() == owner) {
            const int place = holdings_.place_of(base, part);
            const Holding& held = holdings_.row().holdings[place];
            std::size_t m = 0;
            while (held.part[m] != part) ++m;
            here = {places_[place].bytes.data() + m * places_[place].room, places_[place].room};
        }
        std::uint64_t bytes = here.size();
        comm.broadcast(BufferView(&bytes, 1), owner).wait();
        if (comm.rank() != owner) {
            room.resize(bytes);
            here = room;
        }
        in_chunks(here.data(), bytes, [&](std::size_t, BufferView chunk) { comm.broadcast(chunk, owner).wait(); });
        return here;
    }

    /// Copies what this rank wants from a part. Returns false if the part does not fit to the model.
    bool unpack(ListView<std::byte> part, bool is_first, List<Wanted>& wanted) const {
        Head head;
        if (part.size() < sizeof head) return false;
        std::memcpy(&head, part.data(), sizeof head);
        std::size_t left = part.size() - sizeof head;
        const std::byte* from = part.data() + sizeof head;
        if (head.slices > left / sizeof(Slice)) return false;
        List<Slice> slices(head.slices);
        if (!slices.empty()) std::memcpy(slices.data(), from, head.slices * sizeof(Slice));
        const auto take = [&](std::size_t bytes) {
            from += bytes;
            left -= bytes;
        };
        take(head.slices * sizeof(Slice));
        if (!unpack_state(from, head.state, left, is_first)) return false;
        take(head.state);
        for (const Slice& slice : slices) {
            if (slice.dtype >= dtype_count || slice.count > left || slice.bytes() > left) return false;
            if (slice.parameter >= wanted.size()) return false;
            if (!copy(slice, from, wanted[slice.parameter])) return false;
            take(slice.bytes());
        }
        return true;
    }
    /// The state that all ranks have is that of the first part; the others must have the same.
    bool unpack_state(const std::byte* from, std::size_t bytes, std::size_t left, bool is_first) const {
        std::size_t expected = 0;
        for (const Piece& piece : state_) expected += piece.bytes;
        bool same = bytes == expected && bytes <= left;
        for (const Piece& piece : state_) {
            if (!same) break;
            if (is_first) std::memcpy(piece.data, from + piece.first, piece.bytes);
            else same = std::memcmp(piece.data, from + piece.first, piece.bytes) == 0;
        }
        return same;
    }
    static bool copy(const Slice& slice, const std::byte* from, Wanted& to) {
        if (to.arrays.empty()) return true;  // all of it is with other ranks
        if (slice.array >= to.arrays.size()) return false;
        const BufferView& view = to.arrays[slice.array];
        if (static_cast<std::uint64_t>(view.dtype) != slice.dtype || slice.first > ~slice.count) return false;
        const std::size_t first = detail::larger<std::size_t>(slice.first, to.first);
        const std::size_t end = detail::smaller<std::size_t>(slice.first + slice.count, to.first + view.count);
        if (first >= end) return true;
        const std::size_t width = size_of(view.dtype);
        std::memcpy(static_cast<std::byte*>(view.data) + (first - to.first) * width,
                    from + (first - slice.first) * width, (end - first) * width);
        to.found += end - first;
        return true;
    }

    Holdings holdings_{Row::most};
    Place places_[Row::most];
    int newest_ = 0;  ///< the place of the last state that was kept
    List<Piece> state_;
    List<Slice> slices_;  ///< of this rank's part
};

}  // namespace gradsync::inline v0_2::elastic
