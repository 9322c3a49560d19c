// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "flight_recorder.hpp"
#include "world.hpp"

/// The messages with which engines end a world. All ranks are world ranks; `what` is a `name_of(call, n)`.

namespace gradsync::inline v0_2::collective {

/// "all_reduce(sum, f32, 8 elements), collective #3"
[[gnu::cold, gnu::noinline]] inline std::string name_of(const Call& call, std::uint64_t n) {
    return text(describe(call), ", collective #", n);
}

/// Rank `misfit` of the communicator started a different collective n than the others, see `first_misfit`.
/// `world_ranks`: by rank.
[[gnu::cold, gnu::noinline]] inline Failure mismatch(std::uint64_t n, ListView<const Call> calls, int misfit,
                                                     ListView<const int> world_ranks) {
    // The root of a gather or scatter sets its size; rank 0 may be the one that does not fit.
    const int other = misfit != 0 ? 0 : is_rooted(calls[0].operation) ? calls[0].root : 1;
    const bool by_tag = !is_rooted(calls[other].operation) && calls[other].root != calls[misfit].root;
    const auto started = [&](int r) {
        return text("rank ", world_ranks[r], " started ", describe(calls[r]), by_tag ? " for " : "",
                    by_tag ? CollectiveTag::text_of(calls[r].root) : std::string());
    };
    return {Errc::collective_mismatch, world_ranks[misfit],
            text("collective #", n, " differs: ", started(other), ", ", started(misfit),
                 "; all ranks must start the same collectives in the same order")};
}

/// The ranks that hold up a collective, as far as one rank can tell.
struct Late {
    enum class Did { not_start, not_go_on, not_answer, wait_itself };
    List<int> ranks = {};      ///< world ranks; empty if unknown
    Did did = Did::not_start;  ///< what these ranks failed to do; `not_go_on`: every rank has started it
    bool certain = true;       ///< if not, these or unknown ranks may be waiting for a rank that others can name
};

[[gnu::cold, gnu::noinline]] inline Failure timed_out(const std::string& what, const Late& late, int self,
                                                      std::chrono::nanoseconds limit) {
    constexpr const char* did[] = {" did not start it", " started it like all others, but made no progress",
                                   " did not answer",
                                   " is itself waiting for one that did not start it,"};  // indexed by Late::Did
    const bool blames = !late.ranks.empty() && late.did != Late::Did::wait_itself;
    std::string who = "its work did not end, though every rank started it";
    if (!late.ranks.empty())
        who = text(late.ranks.size() == 1 ? "rank " : "ranks ", gradsync::detail::joined(late.ranks),
                   did[static_cast<int>(late.did)]);
    return {Errc::timeout, blames ? late.ranks.front() : -1,
            text(what, ": ", who, " while rank ", self, " waited ", gradsync::detail::format_duration(limit),
                 "; find out what delays it, or raise the limit with set_timeout()")};
}

[[gnu::cold, gnu::noinline]] inline Failure left_early(const std::string& what, int rank) {
    return {Errc::peer_left, rank,
            text("rank ", rank, " left without starting ", what, "; all ranks must start the same collectives")};
}

[[gnu::cold, gnu::noinline]] inline Failure died(const std::string& what, int rank) {
    return {Errc::peer_failed, rank,
            text("the process of rank ", rank, " died while ", what,
                 " was under way; look at its own output, or at the system's log, for the cause")};
}

/// The connection to that rank broke: its host has left everything unanswered for `silence`.
[[gnu::cold, gnu::noinline]] inline Failure vanished(const std::string& what, int rank, std::chrono::seconds silence) {
    return {Errc::peer_failed, rank,
            text("the host of rank ", rank, " no longer answers (no answer for ", silence.count(), " s) while ", what,
                 " was under way; look at its machine and the network")};
}

/// The calling thread abandoned the collective. `flights`: those of rank `self`, or null.
[[gnu::cold, gnu::noinline]] inline Failure abandoned(const std::string& what, int self,
                                                      FlightRecorder* flights = nullptr) {
    if (flights != nullptr) flights->write(self);
    if (std::uncaught_exceptions() > 0)
        return {Errc::peer_failed, self,
                text("an exception on rank ", self, " left ", what, " incomplete; look at what that rank says")};
    return {Errc::abandoned, self,
            text("rank ", self, " dropped ", what, " before it was complete; keep the Work and wait() for it")};
}

/// Throws the failure, as rank `self` sees it in `operation`. `flights`: its collectives, or null.
[[noreturn, gnu::cold, gnu::noinline]] inline void raise_failure(const Failure& failure, Operation operation, int self,
                                                                 FlightRecorder* flights = nullptr) {
    if (flights != nullptr) flights->write(self);
    gradsync::detail::raise(failure.code,
                            {.operation = name_of(operation).data(), .rank = self, .peer = failure.culprit}, "rank ",
                            self, ": ", failure.message, flights != nullptr ? flights->summary() : std::string());
}

}  // namespace gradsync::inline v0_2::collective
