// SPDX-License-Identifier: BSL-1.0
// Which sample each rank sees when: Samples of data.hpp. And how generated text is printed: sample.hpp.
#include "../data.hpp"
#include "../sample.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace {

using gradsync_train::Batch;
using gradsync_train::Reading;
using gradsync_train::Samples;

/// Every byte says where it stands, as far as one byte can: texts here are short.
std::vector<std::uint8_t> text(std::size_t bytes) {
    std::vector<std::uint8_t> all(bytes);
    for (std::size_t i = 0; i < bytes; ++i) all[i] = static_cast<std::uint8_t>(i);
    return all;
}

/// The first bytes of samples first .. first + count, which tell them apart.
std::vector<std::uint8_t> firsts(const Samples& samples, std::uint64_t first, std::size_t count, const Reading& reading) {
    Batch batch;
    batch.sequences = count;
    samples.fill(first, batch);
    std::vector<std::uint8_t> found;
    for (std::size_t row = 0; row < count; ++row) found.push_back(batch.inputs[row * reading.length]);
    return found;
}

}  // namespace

TEST_CASE("samples: an epoch holds each once, whatever its length; the next one, and another seed's, in another order") {
    const Reading reading{.length = 3, .stride = 3, .targets = 3};
    for (const std::size_t bytes : {7, 20, 100, 250}) {
        CAPTURE(bytes);
        const std::vector<std::uint8_t> bytes_of = text(bytes);
        const Samples samples(bytes_of, reading, 1), others(bytes_of, reading, 2);
        const std::size_t epoch = samples.per_epoch();
        REQUIRE(epoch == (bytes - 6) / 3 + 1);
        const auto first = firsts(samples, 0, epoch, reading), second = firsts(samples, epoch, epoch, reading),
                   other = firsts(others, 0, epoch, reading);
        for (const auto& all : {first, second, other}) {
            CHECK(std::set(all.begin(), all.end()).size() == epoch);
            for (const std::uint8_t place : all) CHECK(place % 3 == all[0] % 3);  // an epoch begins somewhere in the first stride
        }
        CHECK(first == firsts(Samples(bytes_of, reading, 1), 0, epoch, reading));
        if (epoch < 10) continue;  // few have few orders
        CHECK(first != second);
        CHECK(first != other);
        CHECK_FALSE(std::is_sorted(first.begin(), first.end()));
    }
}

TEST_CASE("samples: targets are the bytes that follow the inputs") {
    const std::vector<std::uint8_t> bytes = text(200);
    for (const std::size_t targets : {1, 4}) {
        const Reading reading{.length = 4, .stride = 2, .targets = targets};
        Batch batch;
        batch.sequences = 10;
        Samples(bytes, reading, 7).fill(5, batch);
        for (std::size_t row = 0; row < 10; ++row) {
            const std::size_t first = batch.inputs[row * 4];
            for (std::size_t i = 0; i < 4; ++i) CHECK(batch.inputs[row * 4 + i] == first + i);
            for (std::size_t i = 0; i < targets; ++i) CHECK(batch.targets[row * targets + i] == first + 5 - targets + i);
        }
    }
}

TEST_CASE("samples: generated text is printed as UTF-8 without control characters, whatever its bytes are") {
    using gradsync_train::printable;
    const std::string unknown = "\ufffd";
    for (const std::string text : {"a\n\tb ~", "\u00a0", "\u07ff", "\u1000", "\ud7ff", "\ue000", "\uffff"}) CHECK(printable(text) == text);
    CHECK(printable("\x1b[31m") == unknown + "[31m");
    CHECK(printable("\x7f") == unknown);
    CHECK(printable("\xc2\x80") == unknown + unknown);                // U+0080, the first of the C1 control characters
    CHECK(printable("\xc2\x9b") == unknown + unknown);                // U+009B, which begins a sequence as ESC [ does
    CHECK(printable("\xed\xa0\x80") == unknown + unknown + unknown);  // U+D800, a surrogate: not UTF-8
    CHECK(printable("\xed\xbf\xbf") == unknown + unknown + unknown);  // U+DFFF
    CHECK(printable("\xc2") == unknown);                              // cut off
    CHECK(printable("\xe1\x80g") == unknown + unknown + "g");
    CHECK(printable("\xc1\xbf") == unknown + unknown);  // overlong
}
