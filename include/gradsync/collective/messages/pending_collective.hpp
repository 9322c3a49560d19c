// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <array>

#include "../combine.hpp"
#include "transport.hpp"

namespace gradsync::inline v0_2::message_passing {

using collective::Call;
using collective::Operation;
using gradsync::detail::larger;
using gradsync::detail::smaller;

static_assert(std::is_trivially_copyable_v<Call>, "it is sent");

/// One rank's part of one collective. It begins with a hello to every other rank: the call and, if there is little
/// data, all elements that the rank contributes. If the hello is too long for one quick message
/// (Transport::quick_bytes), the rest follows in another stream. Its length is known if the others have started the
/// same collective. If they have not, no message is longer than its receive buffer.
///
/// With `few_owners`, if one rank owns all elements, every hello goes to that rank only: the hub, rank 0. The hub hears
/// the others, and answers with its own call and, if there is little data, their results. That takes 2 (n - 1) messages
/// instead of n (n - 1), and two trips; the others do not learn which ranks have started the collective. A barrier
/// never uses the hub: it must complete when every rank has started it, whatever rank 0 does then.
class PendingCollective {
public:
    /// `room`: the most bytes of data that a hello carries. `few_owners`: if there is little
    /// data, few ranks own all of it.
    PendingCollective(const Route& route, std::size_t room, bool few_owners)
        : route_(route),
          few_owners_(few_owners),
          first_(smaller(sizeof(Call) + room, larger(sizeof(Call), route.transport.quick_bytes()))),
          place_(detail::in_lines(detail::round_up(sizeof(Call) + room, first_))) {
        hellos_.reserve(calls_.size() * place_);
    }

    /// `room`: the most bytes of data that this collective's hello carries.
    void start(std::uint64_t number, const Call& call, std::size_t room, const KnownMemory& known) {
        number_ = number;
        call_ = call;
        phase_ = Phase::starting;
        from_in_ = has_to_leave_ = false;
        const std::size_t width = size_of(call.dtype);
        // Only the root of a scatter or gather knows its size.
        whole_is_known_ = call.operation != Operation::gather && call.operation != Operation::scatter;
        if (whole_is_known_) whole_ = call.operation == Operation::barrier ? 0 : larger(call.in_count, call.out_count);
        owners_ = ranks_;
        if (few_owners_ && whole_is_known_ && !collective::has_shards(call.operation))
            owners_ = static_cast<int>(smaller(larger<std::size_t>(whole_ * width / min_share, 1), calls_.size()));
        small_ = whole_is_known_ && !call.elsewhere && whole_ * width <= room;
        const std::size_t brought = brought_by(rank_);
        const bool has_rest = sizeof(Call) + brought > first_;
        in_is_known_ = (!small_ || has_rest) && known.contains(call.in, call.in_count * width);
        out_is_known_ = !small_ && known.contains(call.out, call.out_count * width);

        by_way_of_one_ = ranks_ > 2 && owners_ == 1 && !call.elsewhere && call.operation != Operation::barrier;

        for (int r = 0; r < ranks_; ++r) {
            came_[r] = due_[r] = 0;
            if (!talks_to(r)) continue;
            const int stream = waits_for_hub() ? Route::answers : Route::hellos;
            const std::size_t all = due_[r] = sizeof(Call) + (waits_for_hub() ? result_bytes(rank_) : brought_by(r));
            hellos_in_[r] = route_.receive(r, stream, hello_of(r), first_, &came_[r]);
            if (all > first_) rests_in_[r] = receive_rest(r, stream, hello_of(r) + first_, all - first_, &came_[r]);
        }
        std::byte* const own = hello_of(rank_);
        std::memcpy(own, &call, sizeof call);
        // The elements of a rank with scale 0 are not read; zeros are sent instead, which no rank uses.
        const std::size_t read =
            brought != 0 && collective::contributes(call, rank_, rank_) ? smaller(brought, call.in_count * width) : 0;
        from_in_ = has_rest && in_is_known_ && read == brought && !is_hub();
        if (read != 0) std::memcpy(own + sizeof(Call), call.in, from_in_ ? first_ - sizeof(Call) : read);
        if (read == 0 && brought != 0) std::memset(own + sizeof(Call), 0, brought);
        if (!is_hub()) send_hellos(brought);
        phase_ = Phase::sent;
    }

    std::uint64_t number() const noexcept { return number_; }
    const Call& call() const noexcept { return call_; }

    /// Have all ranks started it? From then on `calls()` is valid. If the hub said so, it holds the calls of the hub
    /// and of this rank only. Throws Nonsense if a rank has sent an invalid call.
    bool hear() {
        if (phase_ == Phase::starting || !route_.transport.finish_all(hellos_in_)) return false;
        for (int r = 0; r < ranks_; ++r) {
            const int from = waits_for_hub() && r != rank_ ? 0 : r;
            std::memcpy(static_cast<void*>(&calls_[r]), hello_of(from), sizeof(Call));
            if (from != rank_ && (came_[from] < sizeof(Call) || !collective::is_valid(calls_[r], ranks_)))
                throw Nonsense(route_.other(from), "an invalid call");
        }
        return true;
    }
    /// Has that rank started it, as far as this rank knows? True for ranks that this rank does not hear.
    bool arrived(int rank) const noexcept { return hellos_in_[rank] == Transport::no_ticket; }
    /// Does this rank wait for rank 0's answer? If so, rank 0 may have started it while others have not.
    bool waits_for_hub() const noexcept { return by_way_of_one_ && rank_ != 0; }
    /// Has that rank, which has started it, yet to send some of its contribution,
    /// or to receive some of what is sent to it?
    bool owes(int rank) const noexcept {
        return rests_in_[rank] != Transport::no_ticket || (has_to_leave_ && rests_out_[rank] != Transport::no_ticket) ||
               (is_leaving() && hellos_out_[rank] != Transport::no_ticket);
    }
    const List<Call>& calls() const noexcept { return calls_; }

    /// Records that the calls fit.
    void accept() noexcept {
        phase_ = Phase::accepted;
        whole_ = collective::whole_count(calls_);
        whole_is_known_ = true;
    }
    bool accepted() const noexcept { return phase_ >= Phase::accepted; }

    /// Do the hellos carry all data?
    bool small() const noexcept { return small_; }
    /// Are all contributions here? This rank's own must also have left, if results may overwrite it, or if the
    /// receivers had to be asked first: this rank may do something else for long once the collective is complete, and
    /// the receivers must not wait for that.
    bool is_all_here() {
        const bool here = route_.transport.finish_all(rests_in_);
        for (int r = 0; here && r < ranks_; ++r) route_.check_length(r, came_[r], due_[r]);
        return (!has_to_leave_ || route_.transport.finish_all(rests_out_)) && here;
    }

    /// For an accepted collective that is not small: the hub answers the ranks that wait for it.
    void answer() {
        if (is_hub()) send_hellos(0);
    }

    /// For a small collective: computes this rank's results or takes them from the answer; the hub answers the others.
    /// `inputs`: scratch.
    void finish_small(collective::Combiner& combiner, List<const void*>& inputs) {
        inputs.resize(calls_.size());
        if (!by_way_of_one_) {
            for (int owner = 0; owner < ranks_; ++owner)
                if (const ElementRange range = shard(owner);
                    range.size() != 0 && collective::receives(call_, rank_, owner))
                    compute(owner, range, output(range), combiner, inputs);
        } else {
            const ElementRange all{0, whole_};
            if (is_hub() && whole_ != 0) compute(0, all, elements_of(0), combiner, inputs);
            if (const std::size_t bytes = result_bytes(rank_); bytes != 0)
                std::memcpy(output(all), elements_of(0), bytes);
        }
        set_computed();  // first: sending may throw, and this must not run twice
        if (is_hub()) send_hellos(0, true);
    }
    bool computed() const noexcept { return phase_ >= Phase::computed; }
    void set_computed() noexcept { phase_ = Phase::computed; }
    /// Is it computed, but not known to be complete?
    bool is_leaving() const noexcept { return phase_ == Phase::computed; }
    /// Completes what is computed once its own hellos have left this process: this rank may do something else for long
    /// afterwards, or end, and the receivers must not wait for that. After a failure of the world it is complete at
    /// once, because other ranks may have seen it so.
    void see_off(bool failed) {
        if (failed || !route_.transport.sends_in_poll() || route_.transport.finish_all(hellos_out_))
            phase_ = Phase::complete;
    }

    bool complete() const noexcept { return phase_ == Phase::complete; }

    /// May another collective use its memory?
    bool is_over() {
        if (!complete()) return false;
        const bool hellos = route_.transport.finish_all(hellos_out_), rests = route_.transport.finish_all(rests_out_);
        return hellos && rests;
    }

    /// The messages that is_over() waits for, by rank.
    std::array<Transport::Ticket, 2> out_to(int rank) const noexcept { return {hellos_out_[rank], rests_out_[rank]}; }

    /// Gives up all messages after the world has failed. Returns false if a message may still be written into this
    /// object's memory.
    bool give_up() noexcept {
        return route_.transport.give_up_all({&hellos_in_, &hellos_out_, &rests_in_, &rests_out_});
    }

    /// Is the number of elements of the whole buffer known? In a gather or scatter only after the hellos.
    bool whole_is_known() const noexcept { return whole_is_known_; }
    /// The elements that `rank` reduces or passes on: its shard, if the collective has shards; otherwise only the first
    /// few ranks, the owners, have any.
    ElementRange shard(int rank) const noexcept { return shard_range(whole_, owners_, rank); }

    /// May messages be sent from `in`, and received in `out`, without a copy?
    bool in_is_known() const noexcept { return in_is_known_; }
    bool out_is_known() const noexcept { return out_is_known_; }

    /// Addresses of elements of the whole buffer in this rank's `in` and `out`.
    const void* input(ElementRange range) const noexcept {
        return static_cast<const std::byte*>(call_.in) +
               (range.first - (collective::in_is_shard(call_.operation) ? shard(rank_).first : 0)) *
                   size_of(call_.dtype);
    }
    void* output(ElementRange range) const noexcept {
        return static_cast<std::byte*>(call_.out) +
               (range.first - (collective::out_is_shard(call_.operation) ? shard(rank_).first : 0)) *
                   size_of(call_.dtype);
    }

private:
    /// How far it has come.
    enum class Phase : std::uint8_t { starting, sent, accepted, computed, complete };

    /// In bytes. If ranks take turns on their cores, fewer messages matter more than less work for each rank
    /// (docs/background/lab-notes.md).
    static constexpr std::size_t min_share = 64 * 1024;

    std::byte* hello_of(int rank) noexcept { return hellos_.data() + static_cast<std::size_t>(rank) * place_; }

    /// The elements that came with that rank's hello.
    std::byte* elements_of(int rank, std::size_t first = 0) noexcept {
        return hello_of(rank) + sizeof(Call) + first * size_of(call_.dtype);
    }

    const void* brought(int rank, std::size_t first) noexcept {
        return from_in_ && rank == rank_ ? static_cast<const std::byte*>(call_.in) + first * size_of(call_.dtype)
                                         : elements_of(rank, first);
    }

    /// Computes the result of an owner's share from the data of the hellos. `to` may be the
    /// memory of rank 0's elements.
    void compute(int owner, ElementRange share, void* to, collective::Combiner& combiner, List<const void*>& inputs) {
        const bool gathers = collective::in_is_shard(call_.operation);
        for (int r = 0; r < ranks_; ++r) inputs[r] = brought(r, gathers ? 0 : share.first);
        if (collective::reduces(call_.operation)) combiner.run(calls_, inputs, {&to, 1}, share.size());
        else if (const void* const from = inputs[gathers ? owner : call_.root]; from != to)
            std::memcpy(to, from, share.size() * size_of(call_.dtype));
    }

    bool talks_to(int rank) const noexcept { return rank != rank_ && (!by_way_of_one_ || rank_ == 0 || rank == 0); }
    bool is_hub() const noexcept { return by_way_of_one_ && rank_ == 0; }

    /// Sends `bytes` bytes after the call; with `results`, each rank's results instead.
    void send_hellos(std::size_t bytes, bool results = false) {
        const std::byte* const own = hello_of(rank_);
        const std::byte* const rest =
            from_in_ ? static_cast<const std::byte*>(call_.in) + (first_ - sizeof(Call)) : own + first_;
        for (int k = 1; k < ranks_; ++k) {  // each rank starts at another one, so that messages spread out
            const int r = (rank_ + k) % ranks_;
            if (!talks_to(r)) continue;
            const std::size_t all = sizeof(Call) + (results ? result_bytes(r) : bytes);
            const int stream = is_hub() ? Route::answers : Route::hellos;
            hellos_out_[r] = route_.send(r, stream, own, smaller(all, first_));
            if (all <= first_) continue;
            const bool in_parts = route_.transport.in_parts(all - first_);
            has_to_leave_ = has_to_leave_ || from_in_ || !in_parts;
            rests_out_[r] = route_.send(r, stream + (in_parts ? 1 : 2), rest, all - first_, in_parts);
        }
    }

    Transport::Ticket receive_rest(int from, int stream, std::byte* to, std::size_t bytes, std::size_t* came) const {
        const bool in_parts = route_.transport.in_parts(bytes);
        return route_.receive(from, stream + (in_parts ? 1 : 2), to, place_ - first_, came, in_parts ? bytes : 0);
    }

    /// Bytes of `rank`'s result that come with rank 0's answer.
    std::size_t result_bytes(int rank) const noexcept {
        return small_ && collective::receives(call_, rank, 0) ? whole_ * size_of(call_.dtype) : 0;
    }

    /// Bytes that `rank` sends with its hello, if all ranks have started the same. A rank with scale 0 sends as many,
    /// because the others do not know its scale.
    std::size_t brought_by(int rank) const noexcept {
        if (!small_) return 0;
        const bool brings = call_.operation != Operation::broadcast || rank == call_.root;
        const std::size_t count = collective::in_is_shard(call_.operation) ? shard(rank).size() : whole_;
        return brings ? count * size_of(call_.dtype) : 0;
    }

    Phase phase_ = Phase::starting;
    std::uint64_t number_ = 0;
    Call call_;
    const Route& route_;
    const int ranks_ = route_.size(), rank_ = route_.rank;
    List<Call> calls_ = List<Call>(route_.transport_ranks.size());
    const bool few_owners_;
    const std::size_t first_;  ///< bytes of a hello that fit into a quick message
    /// Bytes of a hello's memory: whole quick messages and cache lines, so that elements are aligned.
    const std::size_t place_;
    int owners_ = 1;
    std::size_t whole_ = 0;
    bool whole_is_known_ = false, small_ = false, by_way_of_one_ = false;
    bool from_in_ = false;  ///< the rest of the hello is sent straight from `in`
    /// The rest must leave before this is complete: it is sent from `in`, or asks the receiver first.
    bool has_to_leave_ = false;
    bool in_is_known_ = false, out_is_known_ = false;
    List<std::byte> hellos_;  ///< by rank; never zeroed, because most of it may stay unused
    /// By rank: bytes of its hello, with the rest.
    List<std::size_t> due_ = List<std::size_t>(calls_.size()), came_ = due_;
    List<Transport::Ticket> hellos_in_ = List<Transport::Ticket>(calls_.size(), Transport::no_ticket);
    List<Transport::Ticket> hellos_out_ = hellos_in_, rests_in_ = hellos_in_, rests_out_ = hellos_in_;
};

}  // namespace gradsync::inline v0_2::message_passing
