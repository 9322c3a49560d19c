// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <cstring>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "../core/clock.hpp"
#include "../core/error.hpp"

namespace gradsync::inline v0_2 {

using Blob = std::vector<std::byte>;  ///< a few bytes that ranks exchange before they have a backend

/// The most bytes that one rank may bring to an exchange.
inline constexpr std::size_t largest_blob = std::size_t{1} << 20;

/// Ranks that know only their numbers find one another here: they exchange a few bytes, from which a backend makes its connections. Too
/// slow for data.
///
/// | call | effect |
/// |---|---|
/// | `broadcast(own)` | rank 0's bytes, on every rank; what the others give is not read |
/// | `all_gather(own)` | every rank's bytes, by rank; they may be of different lengths |
///
/// Both are collective: the same calls in the same order on all ranks. Both have a time limit and a size limit (`largest_blob`). They throw
/// an Error that names the rank if another rank did not arrive, or is gone. A model is for one thread at a time.
template <class R>
concept Rendezvous = requires(R& rendezvous, const R& constant, std::span<const std::byte> own) {
    { constant.rank() } -> std::same_as<int>;
    { constant.size() } -> std::same_as<int>;
    { rendezvous.broadcast(own) } -> std::same_as<Blob>;
    { rendezvous.all_gather(own) } -> std::same_as<std::vector<Blob>>;
};

namespace bootstrap {

/// Returns `own` of all ranks, by rank. Collective.
template <class T, Rendezvous R>
    requires std::is_trivially_copyable_v<T>
std::vector<T> exchange(R& rendezvous, const T& own) {
    std::vector<T> all;
    for (const Blob& blob : rendezvous.all_gather(std::as_bytes(std::span(&own, 1)))) {
        const int sender = static_cast<int>(all.size());
        if (blob.size() != sizeof(T))
            throw Error(Errc::parameter_mismatch,
                        "rank " + std::to_string(sender) + " sent " + std::to_string(blob.size()) + " bytes where " +
                            std::to_string(sizeof(T)) + " were due; all ranks must run the same program",
                        {.operation = "rendezvous", .rank = -1, .peer = sender});
        std::memcpy(&all.emplace_back(), blob.data(), sizeof(T));
    }
    return all;
}

inline void check_blob(std::size_t bytes, const char* operation, int rank) {
    if (bytes > largest_blob)
        throw Error(Errc::invalid_argument,
                    std::string(operation) + " of a rendezvous: " + std::to_string(bytes) + " bytes are more than the " +
                        std::to_string(largest_blob) + " that it takes; use a backend's collectives for data",
                    {.operation = operation, .rank = rank});
}

/// "rank 3", "ranks 1, 3", "ranks 1, 2, 3, 4 and 60 others"
inline std::string list_ranks(std::span<const int> ranks) {
    constexpr std::size_t most = 8;
    std::string text = ranks.size() == 1 ? "rank " : "ranks ";
    for (std::size_t i = 0; i < ranks.size() && i < most; ++i) text += (i ? ", " : "") + std::to_string(ranks[i]);
    if (ranks.size() > most) text += " and " + std::to_string(ranks.size() - most) + " others";
    return text;
}

using gradsync::detail::format_duration;

}  // namespace bootstrap

}  // namespace gradsync::inline v0_2
