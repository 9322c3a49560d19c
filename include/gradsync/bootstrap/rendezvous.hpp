// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <span>
#include <string_view>
#include <system_error>
#include <vector>

#include "../core/clock.hpp"
#include "../core/error.hpp"
#include "../core/list.hpp"

/// @file
/// How ranks that know only their numbers find one another, before they have a backend.

namespace gradsync::inline v0_2 {

using Blob = std::vector<std::byte>;  ///< bytes that ranks exchange before they have a backend

/// The most bytes that one rank may contribute to an exchange.
inline constexpr std::size_t largest_blob = std::size_t{1} << 20;

/// Lets ranks that know only their numbers find one another. They exchange a few bytes, from which a backend makes its
/// connections. Too slow for data.
///
/// `all_gather(own)` returns every rank's bytes, by rank; they may differ in length. It is collective, and has a time
/// limit and a size limit (`largest_blob`). It throws an Error that names the rank if another rank did not arrive or is
/// gone. A model need not be thread-safe. If others than the job's ranks can read the exchange, a model has
/// `std::string_view secret()`: text that only the ranks know. It becomes part of the keys of the connections. A model
/// may have `all_gather(own, limit)`, an exchange with another time limit; otherwise the construction of a backend may
/// take half a limit longer.
template <class R>
concept Rendezvous = requires(R& rendezvous, const R& constant, std::span<const std::byte> own) {
    { constant.rank() } -> std::same_as<int>;
    { constant.size() } -> std::same_as<int>;
    { rendezvous.all_gather(own) } -> std::same_as<std::vector<Blob>>;
};

namespace bootstrap {

using gradsync::detail::ErrorPlace;
using gradsync::detail::format_duration;
using gradsync::detail::raise;
using gradsync::detail::text;

/// A reference to a Rendezvous without its type, so that the code that makes connections is compiled once.
class AnyRendezvous {
public:
    template <class R>
        requires(!std::is_same_v<R, AnyRendezvous> && Rendezvous<R>)
    AnyRendezvous(R& model)
        : model_(&model),
          rank_(model.rank()),
          size_(model.size()),
          all_gather_([](void* object, std::span<const std::byte> own, std::chrono::nanoseconds limit) {
              R& rendezvous = *static_cast<R*>(object);
              if constexpr (requires { rendezvous.all_gather(own, limit); }) {
                  if (limit != usual) return rendezvous.all_gather(own, limit);
              }
              return rendezvous.all_gather(own);
          }) {
        if constexpr (requires { model.secret(); }) {
            static_assert(
                std::is_same_v<decltype(model.secret()), std::string_view>,
                "gradsync: secret() of a rendezvous returns a std::string_view, of text that the rendezvous keeps");
            secret_ = model.secret();
        }
    }

    static constexpr std::chrono::nanoseconds usual{};  ///< stands for the model's own time limit

    int rank() const noexcept { return rank_; }
    int size() const noexcept { return size_; }
    std::string_view secret() const noexcept { return secret_; }
    std::vector<Blob> all_gather(std::span<const std::byte> own, std::chrono::nanoseconds limit) const {
        return all_gather_(model_, own, limit);
    }

private:
    void* model_;
    int rank_, size_;
    std::string_view secret_;
    std::vector<Blob> (*all_gather_)(void*, std::span<const std::byte>, std::chrono::nanoseconds);
};

/// Writes the `bytes` bytes at `own` of all ranks to `all`, by rank. Collective.
[[gnu::cold]] inline void exchange_bytes(AnyRendezvous meeting, const void* own, std::size_t bytes, void* all,
                                         std::chrono::nanoseconds limit) {
    const std::vector<Blob> blobs = meeting.all_gather({static_cast<const std::byte*>(own), bytes}, limit);
    if (blobs.size() != static_cast<std::size_t>(meeting.size()))
        raise(Errc::invalid_argument, "a rendezvous of ", meeting.size(), " ranks gave ", blobs.size(),
              " blobs; all_gather() has to return one of each rank");
    for (int r = 0; r < meeting.size(); ++r) {
        const Blob& blob = blobs[static_cast<std::size_t>(r)];
        if (blob.size() != bytes)
            raise(Errc::parameter_mismatch, {.operation = "rendezvous", .peer = r}, "rank ", r, " sent ", blob.size(),
                  " bytes where ", bytes, " were due; all ranks must run the same program");
        std::memcpy(static_cast<std::byte*>(all) + static_cast<std::size_t>(r) * bytes, blob.data(), bytes);
    }
}

/// Returns `own` of all ranks, by rank. Collective.
template <class T>
    requires std::is_trivially_copyable_v<T>
List<T> exchange(AnyRendezvous meeting, const T& own, std::chrono::nanoseconds limit = AnyRendezvous::usual) {
    List<T> all(static_cast<std::size_t>(meeting.size()));
    exchange_bytes(meeting, &own, sizeof own, all.data(), limit);
    return all;
}

inline void check_blob(std::size_t bytes, const char* operation, int rank) {
    if (bytes > largest_blob)
        raise(Errc::invalid_argument, {.operation = operation, .rank = rank}, operation, " of a rendezvous: ", bytes,
              " bytes are more than the ", largest_blob, " that it takes; use a backend's collectives for data");
}

/// "rank 3", "ranks 1, 3", "ranks 1, 2, 3, 4 and 60 others"
inline std::string list_ranks(std::span<const int> ranks) {
    const std::size_t named = ranks.size() < 8 ? ranks.size() : 8;
    return text(ranks.size() == 1 ? "rank " : "ranks ", detail::joined(ranks.first(named)),
                named == ranks.size() ? "" : text(" and ", ranks.size() - named, " others"));
}

/// Why a rank cannot continue, as the others are told.
struct Refusal {
    Errc code = Errc::peer_failed;
    int peer = -1;  ///< the rank to blame
    std::string why = {};

    static constexpr std::size_t longest = 1000;  ///< characters of the text

    [[gnu::cold]] std::string words() const {
        const std::int32_t numbers[] = {static_cast<std::int32_t>(code), peer};
        return std::string(reinterpret_cast<const char*>(numbers), sizeof numbers) + why.substr(0, longest);
    }
    /// Treats received bytes as no more than a text and two numbers.
    [[gnu::cold]] static Refusal read(std::string_view words) {
        std::int32_t numbers[] = {0, -1};
        if (words.size() < sizeof numbers) return {.why = "for no reason"};
        words.copy(reinterpret_cast<char*>(numbers), sizeof numbers);
        Refusal refusal{is_errc(numbers[0]) ? static_cast<Errc>(numbers[0]) : Errc::peer_failed, numbers[1],
                        std::string(words.substr(sizeof numbers, longest))};
        for (char& c : refusal.why)
            if (c < ' ' || c > '~') c = '?';  // it may be printed on a terminal
        return refusal;
    }
};
inline std::string_view text_of(std::span<const std::byte> bytes) noexcept {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// A number that strangers cannot guess.
inline std::uint64_t random_token() {
    std::uint64_t token = 0;
    if (::getentropy(&token, sizeof token) != 0)
        throw std::system_error(errno, std::generic_category(), std::string("no random numbers"));
    return token;
}

/// One rank of a rendezvous: its checked arguments, and its errors.
class Participant {
public:
    int rank() const noexcept { return rank_; }  ///< Returns this rank.
    int size() const noexcept { return size_; }  ///< Returns the number of ranks.

protected:
    /// `place`: where the ranks meet, for errors: " in /tmp/meeting", or empty. Throws Error(invalid_argument) for an
    /// invalid rank, size or time limit.
    Participant(int rank, int size, std::chrono::nanoseconds timeout, std::string place = {})
        : rank_(rank), size_(size), timeout_(detail::clamp_timeout(timeout)), place_(std::move(place)) {
        if (size < 1 || rank < 0 || rank >= size)
            refuse(Errc::invalid_argument, {}, "rank ", rank, " is not one of ", size);
        if (timeout <= std::chrono::nanoseconds::zero())
            refuse(Errc::invalid_argument, {}, "the time limit must be positive");
    }
    std::chrono::nanoseconds timeout() const noexcept { return timeout_; }
    void debug(const auto&... parts) const noexcept {
        detail::debug(detail::DebugLevel::info, rank_, "rendezvous: ", parts...);
    }
    /// `place`: has the peer, if one is to blame.
    template <class... Parts>  // nvcc over clang forgets `noreturn` of one with `auto`
    [[noreturn]] void refuse(Errc code, const ErrorPlace& place, const Parts&... parts) const {
        raise(code, {.operation = "rendezvous", .rank = rank_, .peer = place.peer}, "rendezvous of rank ", rank_,
              place_, ": ", parts...);
    }

private:
    int rank_, size_;
    std::chrono::nanoseconds timeout_;
    std::string place_;
};

}  // namespace bootstrap

}  // namespace gradsync::inline v0_2
