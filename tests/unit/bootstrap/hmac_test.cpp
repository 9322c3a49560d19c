// SPDX-License-Identifier: BSL-1.0
#include <gradsync/bootstrap/hmac.hpp>

#include <doctest/doctest.h>

#include <string>

using gradsync::bootstrap::Hash;
using gradsync::bootstrap::hmac;
using gradsync::bootstrap::Sha256;

namespace {

std::string hex(const Hash& hash) {
    std::string text;
    for (const unsigned byte : hash.bytes)
        for (const unsigned digit : {byte / 16, byte % 16}) text += "0123456789abcdef"[digit];
    return text;
}

std::string sha256(const std::string& text) {
    Sha256 hash;
    hash.add(text);
    return hex(hash.end());
}

}  // namespace

TEST_CASE("Sha256 gives the digests of the examples of FIPS 180-4") {
    CHECK(sha256("") == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
    CHECK(sha256("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    CHECK(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq") ==
          "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
    CHECK(sha256(std::string(1'000'000, 'a')) == "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST_CASE("Sha256 gives the same digest in pieces, for every length around a block's") {
    for (std::size_t bytes = 0; bytes < 200; ++bytes) {
        const std::string text(bytes, 'x');
        Sha256 pieces;
        for (std::size_t i = 0; i < bytes; i += 7) pieces.add(std::string_view(text).substr(i, 7));
        CHECK(hex(pieces.end()) == sha256(text));
    }
}

TEST_CASE("hmac gives the codes of RFC 4231 for SHA-256") {
    CHECK(hex(hmac(std::string(20, '\x0b'), "Hi There")) == "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
    CHECK(hex(hmac("Jefe", "what do ya want for nothing?")) == "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    CHECK(hex(hmac("Jefe", "what do ya", " want for ", "nothing?")) == "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
    CHECK(hex(hmac(std::string(20, '\xaa'), std::string(50, '\xdd'))) ==
          "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe");
    std::string key;
    for (char c = 1; c <= 25; ++c) key += c;
    CHECK(hex(hmac(key, std::string(50, '\xcd'))) == "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b");
    CHECK(hex(hmac(std::string(20, '\x0c'), "Test With Truncation")).substr(0, 32) == "a3b6167473100ee06e0c796c2955552b");
    CHECK(hex(hmac(std::string(131, '\xaa'), "Test Using Larger Than Block-Size Key - Hash Key First")) ==
          "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
    CHECK(hex(hmac(std::string(131, '\xaa'),
                   "This is a test using a larger than block-size key and a larger than block-size data. The key needs to be hashed "
                   "before being used by the HMAC algorithm.")) == "9b09ffa71b942fcb27635fbcd5b0e944bfdc63644f0713938a7f51535c3a35e2");
}

TEST_CASE("Hashes are equal only if every byte is") {
    const Hash hash = hmac("key", "text");
    for (std::size_t i = 0; i < sizeof hash.bytes; ++i) {
        Hash other = hash;
        CHECK(other == hash);
        other.bytes[i] ^= 0x10;
        CHECK(!(other == hash));
    }
}
