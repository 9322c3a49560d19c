// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <type_traits>

/// SHA-256 (FIPS 180-4) and HMAC (RFC 2104). With them ranks prove that they know the token of their job. For a few
/// kilobytes: it uses no processor instructions for SHA.

namespace gradsync::inline v0_2::bootstrap {

/// 256 bits: a hash, a key, or a proof.
struct Hash {
    std::uint8_t bytes[32] = {};

    /// Takes constant time, whatever the difference.
    friend bool operator==(const Hash& a, const Hash& b) noexcept {
        unsigned difference = 0;
        for (std::size_t i = 0; i < sizeof a.bytes; ++i) difference |= a.bytes[i] ^ unsigned { b.bytes[i] };
        return difference == 0;
    }
};

class Sha256 {
public:
    [[gnu::cold]] void add(std::string_view text) noexcept {
        while (!text.empty()) {
            const std::size_t used = count_ % sizeof block_;
            const std::size_t added = text.copy(reinterpret_cast<char*>(block_) + used, sizeof block_ - used);
            text.remove_prefix(added);
            count_ += added;
            if (used + added == sizeof block_) mix();
        }
    }

    /// The hash of all that was added. No other call may follow.
    [[gnu::cold]] Hash end() noexcept {
        const std::uint64_t bits = 8 * count_;
        add({"\x80", 1});
        while (count_ % sizeof block_ != sizeof block_ - 8) add({"\0", 1});
        for (int shift = 56; shift >= 0; shift -= 8) {
            const char byte = static_cast<char>(bits >> shift);
            add({&byte, 1});
        }
        Hash hash;
        for (std::size_t i = 0; i < sizeof hash.bytes; ++i)
            hash.bytes[i] = static_cast<std::uint8_t>(state_[i / 4] >> (24 - 8 * (i % 4)));
        return hash;
    }

private:
    using Word = std::uint32_t;

    /// A program that is not optimised takes half the time where turns are no calls, and `a` to `h` no array.
    [[gnu::cold]] void mix() noexcept {
        /// The first 32 bits of the fractional parts of the cube roots of the first 64 primes.
        static constexpr Word constants[64] = {
            0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
            0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
            0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
            0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
            0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
            0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
            0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
            0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};
        Word schedule[64];
        for (std::size_t i = 0; i < 16; ++i) {
            schedule[i] = 0;
            for (std::size_t byte = 0; byte < 4; ++byte) schedule[i] = schedule[i] << 8 | block_[4 * i + byte];
        }
        for (std::size_t i = 16; i < 64; ++i) {
            const Word a = schedule[i - 15], b = schedule[i - 2];
            schedule[i] = schedule[i - 16] + ((a >> 7 | a << 25) ^ (a >> 18 | a << 14) ^ a >> 3) + schedule[i - 7] +
                          ((b >> 17 | b << 15) ^ (b >> 19 | b << 13) ^ b >> 10);
        }
        Word a = state_[0], b = state_[1], c = state_[2], d = state_[3];
        Word e = state_[4], f = state_[5], g = state_[6], h = state_[7];
        for (std::size_t i = 0; i < 64; ++i) {
            const Word first = h + ((e >> 6 | e << 26) ^ (e >> 11 | e << 21) ^ (e >> 25 | e << 7)) +
                               ((e & f) ^ (~e & g)) + constants[i] + schedule[i];
            const Word second =
                ((a >> 2 | a << 30) ^ (a >> 13 | a << 19) ^ (a >> 22 | a << 10)) + ((a & b) ^ (a & c) ^ (b & c));
            h = g, g = f, f = e, e = d + first, d = c, c = b, b = a, a = first + second;
        }
        const Word mixed[8] = {a, b, c, d, e, f, g, h};
        for (std::size_t i = 0; i < 8; ++i) state_[i] += mixed[i];
    }

    /// The first 32 bits of the fractional parts of the square roots of the first 8 primes.
    Word state_[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    std::uint8_t block_[64] = {};
    std::uint64_t count_ = 0;  ///< bytes added
};

/// The bytes of a value, for hashing.
template <class T>
    requires std::is_trivially_copyable_v<T>
std::string_view bytes_of(const T& value) noexcept {
    return {reinterpret_cast<const char*>(&value), sizeof value};
}

/// The HMAC of `parts`, one after another, under `key`. Nobody can compute it without the key.
template <class... Parts>
[[gnu::cold]] Hash hmac(std::string_view key, const Parts&... parts) noexcept {
    Sha256 inner, outer;
    char block[64] = {};
    const auto pad = [&](Sha256& hash, char with) {
        for (char& byte : block) byte = static_cast<char>(byte ^ with);
        hash.add({block, sizeof block});
    };
    Hash short_key;
    if (key.size() > sizeof block) {
        Sha256 hash;
        hash.add(key);
        short_key = hash.end();
        key = bytes_of(short_key);
    }
    key.copy(block, key.size());
    pad(inner, 0x36);
    (inner.add(parts), ...);
    pad(outer, 0x36 ^ 0x5c);  // the block still has the first pad
    const Hash hash = inner.end();
    outer.add(bytes_of(hash));
    return outer.end();
}

}  // namespace gradsync::inline v0_2::bootstrap
