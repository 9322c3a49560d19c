// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>
#include <exception>
#include <span>
#include <string>
#include <vector>

#include "../core/clock.hpp"
#include "../core/collective_tag.hpp"
#include "../core/error.hpp"
#include "call.hpp"
#include "world.hpp"

/// The texts in which engines say what ended a world. All ranks are world ranks; `what` is a `name_of(call, n)`.

namespace gradsync::inline v0_2::collective {

/// "all_reduce(sum, f32, 8 elements), collective #3"
inline std::string name_of(const Call& call, std::uint64_t n) { return describe(call) + ", collective #" + std::to_string(n); }

/// Rank `misfit` of the communicator has started another collective n than the others, see `first_misfit`. `world_rank(r)`: the world rank
/// of rank r.
template <class WorldRank>
Failure mismatch(std::uint64_t n, std::span<const Call> calls, int misfit, WorldRank&& world_rank) {
    // The root of a gather or scatter sets its size; rank 0 may be the one that does not fit.
    const int other = misfit == 0 ? calls[0].root : 0;
    const auto call = [&](int r) -> const Call& { return calls[static_cast<std::size_t>(r)]; };
    const bool by_tag = !is_rooted(call(other).operation) && call(other).root != call(misfit).root;
    const auto started = [&](int r) {
        return "rank " + std::to_string(world_rank(r)) + " started " + describe(call(r)) +
               (by_tag ? " for " + CollectiveTag::text_of(call(r).root) : "");
    };
    return {Errc::collective_mismatch, world_rank(misfit),
            "collective #" + std::to_string(n) + " differs: " + started(other) + ", " + started(misfit) +
                "; all ranks must start the same collectives in the same order"};
}

/// The ranks that keep a collective from completing, as far as one rank can tell.
struct Late {
    enum class Did { not_start, not_go_on, not_answer };
    std::vector<int> ranks = {};  ///< world ranks; empty if unknown
    Did did = Did::not_start;     ///< the failure of these ranks; `not_go_on`: every rank has started it
    bool certain = true;          ///< if not, these ranks, or unknown ones, may wait themselves for a rank that others see
};

inline Failure timed_out(const std::string& what, const Late& late, int self, std::chrono::nanoseconds limit) {
    constexpr const char* did[] = {" did not start it", " started it, as all did, but did not go on",
                                   " did not answer, or waits itself for one that did not start it,"};  // indexed by Late::Did
    const bool blames = !late.ranks.empty() && late.did != Late::Did::not_answer;
    std::string who = "its work did not end, though every rank started it";
    if (!late.ranks.empty()) {
        who = late.ranks.size() == 1 ? "rank " : "ranks ";
        for (const int rank : late.ranks)
            who += std::to_string(rank) + (rank == late.ranks.back() ? did[static_cast<int>(late.did)] : ", ");
    }
    return {Errc::timeout, blames ? late.ranks.front() : -1,
            what + ": " + who + " while rank " + std::to_string(self) + " waited " + gradsync::detail::format_duration(limit) +
                "; find out what keeps it, or raise the limit with set_timeout()"};
}

inline Failure left_early(const std::string& what, int rank) {
    return {Errc::peer_left, rank,
            "rank " + std::to_string(rank) + " left without starting " + what + "; all ranks must start the same collectives"};
}

inline Failure died(const std::string& what, int rank) {
    return {Errc::peer_failed, rank,
            "the process of rank " + std::to_string(rank) + " died while " + what +
                " was under way; look at its own output, or at the system's log, for the cause"};
}

/// The collective was abandoned by the calling thread.
inline Failure abandoned(const std::string& what, int self) {
    if (std::uncaught_exceptions() > 0)
        return {Errc::peer_failed, self,
                "an exception on rank " + std::to_string(self) + " left " + what + " incomplete; look at what that rank says"};
    return {Errc::abandoned, self,
            "rank " + std::to_string(self) + " dropped " + what + " before it was complete; keep the Work and wait() for it"};
}

/// Returns the failure as rank `self` throws it from `operation`.
inline Error as_error(const Failure& failure, Operation operation, int self) {
    return Error(failure.code, "rank " + std::to_string(self) + ": " + failure.message,
                 {.operation = std::string(name_of(operation)), .rank = self, .peer = failure.culprit});
}

}  // namespace gradsync::inline v0_2::collective
