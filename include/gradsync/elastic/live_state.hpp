// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "entry.hpp"

namespace gradsync::inline v0_2::elastic {

/// Internal: the state of a training in this process's memory, which outlives the generations. It knows whether the
/// memory is whole, and gets the newest state from the ranks that have it, without ever overwriting the only one that
/// is left. Not thread-safe.
class LiveState {
public:
    /// Takes note of the memory, and returns what all ranks have. `begun`: may there be results? Throws
    /// Error(invalid_argument) for memory that was changed since the last step or is no host memory, and
    /// Error(parameter_mismatch) if the ranks' differ. Collective.
    [[gnu::cold]] List<Entry> meet(TcpBackend& comm, std::span<const BufferView> state, bool begun) {
        Entry own{.row = holdings_.row(), .begun = begun};
        List<Piece> pieces = pieces_of(comm, state, own);
        if (own.bytes == 0)
            refuse_state(comm, Errc::invalid_argument, {}, "the state is empty; pass all that a step changes");
        look_at(std::move(pieces), own.bytes);
        if (holdings_.memory().number != 0 && (own.layout != layout_ || look() != fingerprint_))
            refuse_state(comm, Errc::invalid_argument, {}, "the memory of the state was changed outside of update(), ",
                         "or is another one; make the model before run(), and change all of its state in update()");
        layout_ = own.layout;
        const List<Entry> all = exchange_entries(comm, own);
        for (const Entry& one : all) holdings_.know(one.row.top);
        return all;
    }

    /// The memory holds this state, and no other rank has one.
    Plan begin(std::uint64_t number, bool is_here) {
        if (is_here) fill(Row::memory, {.number = number});
        return {.base = {.number = number}, .owners = List<std::uint32_t>(1, 0)};
    }
    /// Drops the states of this process, because others have newer ones.
    void forget() {
        holdings_.tear(Row::memory);
        holdings_.tear(copy);
    }

    /// Puts the state that the members have agreed on into every rank's memory. Throws what the backend throws; then
    /// this process has what it had, or the newer state. Collective.
    [[gnu::cold]] void heal(TcpBackend& comm, const Plan& plan, const List<Entry>& all) {
        const Holding& base = plan.base;
        bool is_needed = false;
        for (std::size_t r = 0; r < all.size(); ++r) {
            bool has = r == plan.owners[0];
            for (const Holding& one : all[r].row.holdings) has = has || one.number == base.number;
            is_needed = is_needed || !has;
        }
        if (is_needed) receive(comm, plan);
        comm.barrier().wait();  // all have it: what they had before is no longer needed
        if (holdings_.place_of(base) == copy) {
            holdings_.tear(Row::memory);
            for (const Piece& piece : state_) std::memcpy(piece.data, copy_.data() + piece.first, piece.bytes);
            fill(Row::memory, base);
        }
        copy_ = List<std::byte>();
        holdings_.go_on_from(Row::memory);
    }

    /// Calls `change()`, which changes the state by one step.
    template <class F>
    void update(F&& change) {
        const std::uint64_t number = holdings_.memory().number;
        holdings_.tear(Row::memory);
        std::forward<F>(change)();
        fill(Row::memory, {.number = number + 1});
    }
    /// A hash of some of the state's bytes, as it was last whole: enough to see that another model was made, or that
    /// the states of two ranks differ.
    std::uint64_t fingerprint() const noexcept { return fingerprint_; }

    /// The number of the state in memory: one more than the steps that are done; 0: it is torn, or nobody's.
    std::uint64_t number() const noexcept { return holdings_.memory().number; }

private:
    static constexpr int copy = 1;  ///< the place of a state beside the training's memory

    /// The owner sends the state. A rank that already has it compares both.
    [[gnu::cold]] void receive(TcpBackend& comm, const Plan& plan) {
        const int root = static_cast<int>(plan.owners[0]), there = holdings_.place_of(plan.base);
        const int place = there >= 0 ? there : holdings_.place_for(plan, static_cast<std::uint32_t>(comm.rank()));
        if (there < 0) {
            if (place == copy) copy_.resize(bytes_);
            holdings_.tear(place);
        }
        const bool compares = there >= 0 && comm.rank() != root;
        List<std::byte> other;
        bool same = true;
        for (const Piece& piece : state_) {
            std::byte* const here = place == copy ? copy_.data() + piece.first : piece.data;
            in_chunks(here, piece.bytes, [&](std::size_t done, BufferView chunk) {
                if (compares) {
                    other.resize(chunk.count);
                    chunk.data = other.data();
                }
                comm.broadcast(chunk, root).wait();
                same = same && (!compares || std::memcmp(here + done, chunk.data, chunk.count) == 0);
            });
        }
        if (!same)
            refuse_state(comm, Errc::parameter_mismatch, {.peer = root}, "the state of rank ", comm.rank(),
                         " after step ", plan.base.number - 1, " differs from that of rank ", root,
                         "; a step may depend on its number and on that of a micro-batch only");
        if (there < 0) fill(place, plan.base);
    }
    void fill(int place, const Holding& state) noexcept {
        holdings_.fill(place, state);
        if (place == Row::memory) fingerprint_ = look();
    }

    void look_at(List<Piece> pieces, std::size_t bytes) {
        state_ = std::move(pieces);
        bytes_ = bytes;
        samples_.clear();
        constexpr std::size_t most = 32;  // over all bytes, and as many in pieces, however small
        for (std::size_t i = 0; i < most; ++i)
            samples_.push_back(part_of(state_, bytes / most * i + bytes % most * i / most, 1)[0].data);
        const std::size_t stride = (state_.size() + most - 1) / most;
        for (std::size_t i = 0; i < state_.size(); i += stride)
            samples_.push_back(state_[i].data + state_[i].bytes / 2);
    }
    std::uint64_t look() const noexcept {
        std::uint64_t hash = 1;
        for (const std::byte* const sample : samples_) hash = detail::fnv1a(sample, 1, hash);
        return hash;
    }

    Holdings holdings_{2};
    List<Piece> state_;
    std::size_t bytes_ = 0;
    std::uint64_t layout_ = 0, fingerprint_ = 0;
    List<const std::byte*> samples_;
    List<std::byte> copy_;  ///< of the state; empty unless it is needed
};

}  // namespace gradsync::inline v0_2::elastic
