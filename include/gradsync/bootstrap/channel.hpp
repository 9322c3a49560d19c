// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "hmac.hpp"
#include "rendezvous.hpp"
#include "socket.hpp"

/// How two processes prove to each other that they belong to one job: both know a key, and neither sends it.
///
///     caller                                       called rank
///     Hello: ranks and a random number     ------>
///                                          <------ challenge: another number, or a refusal
///     proof: HMAC(key, 'c', both)          ------>
///                                          <------ welcome: HMAC(key, 'a', both), or a refusal
///
/// The two numbers are random, so that recorded messages prove nothing. All messages that follow are signed with a key
/// derived from all of this.

namespace gradsync::inline v0_2::net {

using bootstrap::Hash;
using bootstrap::Refusal;

struct Nonce {
    std::uint64_t words[2] = {};

    static Nonce random() { return {{bootstrap::random_token(), bootstrap::random_token()}}; }
    std::string text() const {
        char digits[33];
        std::snprintf(digits, sizeof digits, "%016llx%016llx", static_cast<unsigned long long>(words[0]),
                      static_cast<unsigned long long>(words[1]));
        return digits;
    }
};

/// A function that a wait calls every few milliseconds. If it throws, the wait ends.
struct Look {
    void (*function)(void*) = nullptr;
    void* argument = nullptr;

    static constexpr std::chrono::milliseconds period{3};

    explicit operator bool() const noexcept { return function != nullptr; }
    /// Waits until `socket` can be read, or the deadline.
    void await(const Socket& socket, Clock::time_point deadline) const {
        while (function != nullptr && Clock::now() < deadline &&
               !socket.await(POLLIN, gradsync::detail::smaller(deadline, Clock::now() + period)))
            function(argument);
    }
};

/// The first message of a caller, as plain bytes. All machines of a job must have the same byte order, or the magic
/// number does not match.
struct Hello {
    std::uint64_t magic = 0x31636e7973646172u;
    std::uint32_t version = 5;
    std::uint32_t size = 0;        ///< number of the job's ranks
    std::uint32_t from = 0;        ///< the rank that calls
    std::uint32_t to = 0;          ///< the called rank
    std::uint32_t connection = 0;  ///< number of this connection between the two ranks
    std::uint32_t generation = 0;  ///< of the job's ranks, if they change
    Hash job = {};                 ///< hash of the job's name
    Nonce nonce = {};
};
static_assert(sizeof(Hello) == 80 && std::is_trivially_copyable_v<Hello>);

/// The caller's proof that it knows the key (role 'c'), the called rank's proof (role 'a'),
/// or the key of the session (role 's').
inline Hash proof(const Hash& key, char role, const Hello& hello, const Nonce& challenge) noexcept {
    return bootstrap::hmac(bootstrap::bytes_of(key), bootstrap::bytes_of(role), bootstrap::bytes_of(hello),
                           bootstrap::bytes_of(challenge));
}

/// A connection whose messages are signed. Without its key nobody can invent, change, repeat or drop a message
/// unnoticed. Not thread-safe.
class Channel {
public:
    enum class Kind : std::uint32_t { blob = 1, refusal, challenge, welcome, waiting };
    enum class Got { message, nothing, nonsense };

    Channel() = default;
    explicit Channel(Socket socket, bool calls = false) noexcept : socket_(std::move(socket)), calls_(calls) {}

    explicit operator bool() const noexcept { return static_cast<bool>(socket_); }
    const Socket& socket() const noexcept { return socket_; }
    Socket take_socket() noexcept { return std::move(socket_); }

    /// From now on, messages are signed with `key`; until then, with a key that everybody knows.
    void secure(const Hash& key) noexcept {
        key_ = key;
        sent_ = received_ = 0;
    }

    /// False at the deadline or on an error; `errno` then says why, as after Socket::send_all.
    [[gnu::cold]] bool send(Kind kind, std::string_view bytes, Clock::time_point deadline) noexcept {
        const Header header{.kind = kind, .bytes = bytes.size()};
        const Hash signature = sign(calls_, sent_++, header, bytes);
        return socket_.send_all(&header, sizeof header, deadline) &&
               socket_.send_all(bytes.data(), bytes.size(), deadline) &&
               socket_.send_all(&signature, sizeof signature, deadline);
    }

    /// Receives the next message, of at most `largest` bytes. `nothing`: none came, and `errno` says why.
    [[gnu::cold]] Got receive(Kind& kind, Blob& bytes, Clock::time_point deadline, std::size_t largest = largest_blob) {
        Header header;
        if (!socket_.receive_all(&header, sizeof header, deadline)) return Got::nothing;
        if (header.magic != Header().magic || header.bytes > largest) return Got::nonsense;
        bytes.resize(header.bytes);
        Hash signature;
        if (!socket_.receive_all(bytes.data(), bytes.size(), deadline) ||
            !socket_.receive_all(&signature, sizeof signature, deadline))
            return Got::nothing;
        kind = header.kind;
        return signature == sign(!calls_, received_++, header, bootstrap::text_of(bytes)) ? Got::message
                                                                                          : Got::nonsense;
    }

private:
    struct Header {
        std::uint32_t magic = 0x636e7973u;
        Kind kind = Kind::refusal;
        std::uint64_t bytes = 0;  ///< length of the data that follows; the signature comes after it
    };

    Hash sign(bool calls, std::uint64_t number, const Header& header, std::string_view bytes) const noexcept {
        using bootstrap::bytes_of;
        return bootstrap::hmac(bytes_of(key_), bytes_of(calls), bytes_of(number), bytes_of(header), bytes);
    }

    Socket socket_;
    Hash key_;
    std::uint64_t sent_ = 0, received_ = 0;
    bool calls_ = false;
};

}  // namespace gradsync::inline v0_2::net
