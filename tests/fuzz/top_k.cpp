// SPDX-License-Identifier: BSL-1.0
// The places and values of other ranks, added up, beside the sums of one element after the other.
#include <vector>

#include <gradsync/compress/top_k.hpp>

#include "fuzz.hpp"

static const gradsync_fuzz::Target target("top_k", [](gradsync_fuzz::Input input) {
    const std::size_t ranks = 1 + input.take<std::uint8_t>() % 3u, count = 1 + input.take<std::uint8_t>();
    gradsync::TopK::Codec codec({.density = 0.1});
    gradsync::detail::GatheredBucket bucket;
    bucket.elements = bucket.count = count;
    bucket.words = codec.words(bucket, {.count = count, .dtype = gradsync::DType::f32, .parts = {}}, 0, 0);
    std::vector<std::uint32_t> words(ranks * bucket.words);
    for (std::uint32_t& word : words) word = input.take<std::uint32_t>();
    std::vector<float> sums(count), held(count), expected(count);
    codec.put_back(bucket, words.data(), held.data());
    codec.add_up(bucket, {words.data(), bucket.words, ranks}, 0.5f, gradsync::BufferView(sums.data(), sums.size()),
                 [](std::size_t, gradsync::ConstBufferView from, gradsync::BufferView to) { gradsync::kernel::copy(from, to); });
    const std::size_t k = bucket.words / 2;
    for (std::size_t e = 0; e < ranks * k; ++e) {
        const std::uint32_t* const at = words.data() + e / k * bucket.words + e % k;
        gradsync_fuzz::check(at[0] < count, "a place out of range was not refused");
        float value;
        std::memcpy(&value, at + k, sizeof value);
        volatile float product = value * 0.5f;
        expected[at[0]] += product;
    }
    for (std::size_t i = 0; i < count; ++i)
        gradsync_fuzz::check(sums[i] == expected[i] || (sums[i] != sums[i] && expected[i] != expected[i]), "an element has another sum");
});
