// SPDX-License-Identifier: BSL-1.0
// The words of other ranks, added up, beside the sums of one element after the other.
#include <vector>

#include <gradsync/compress/quantizer.hpp>

#include "fuzz.hpp"

static const gradsync_fuzz::Target target("quantizer", [](gradsync_fuzz::Input input) {
    using gradsync::detail::GatheredBucket;
    constexpr unsigned widths[] = {1, 4, 8};
    const unsigned bits = widths[input.take<std::uint8_t>() % 3];
    const std::size_t ranks = 1 + input.take<std::uint8_t>() % 3u,
                      counts[] = {input.take<std::uint16_t>() % 600u, input.take<std::uint8_t>()};
    gradsync::Quantizer::Codec codec({.bits = bits});
    GatheredBucket bucket;
    bucket.parts = {{0, counts[0]}, {counts[0] + 3, counts[1]}};
    bucket.elements = counts[0] + counts[1];
    bucket.count = bucket.elements + 3;
    bucket.words = codec.words(bucket);
    std::vector<std::uint32_t> words(ranks * bucket.words);  // as many as are sent, and no more
    for (std::uint32_t& word : words) word = input.take<std::uint32_t>();
    std::vector<float> sums(bucket.count), held(bucket.count);
    codec.add_up(bucket, {words.data(), bucket.words, ranks}, 0.5f, gradsync::BufferView(sums.data(), sums.size()),
                 [](std::size_t, gradsync::ConstBufferView from, gradsync::BufferView to) { gradsync::kernel::copy(from, to); });
    codec.put_back(bucket, words.data(), held.data());
    gradsync_fuzz::check(bucket.words == 0 || sums.size() < 3 + counts[1] || (sums[counts[0]] == 0 && held[counts[0]] == 0),
                         "a gap was written");

    std::size_t word = 0;
    for (const auto& part : bucket.parts)
        for (std::size_t first = 0; first < part.count; first += 256) {
            const std::size_t n = std::min<std::size_t>(256, part.count - first), bytes = (n * bits + 7) / 8;
            for (std::size_t i = 0; i < n; ++i) {
                float sum = 0;
                for (std::size_t r = 0; r < ranks; ++r) {
                    const std::uint32_t* const block = words.data() + r * bucket.words + word;
                    float step;
                    std::memcpy(&step, block, sizeof step);
                    const unsigned byte = reinterpret_cast<const std::uint8_t*>(block + 1)[i % bytes], code = byte >> i / bytes * bits;
                    const int level = bits == 8   ? static_cast<std::int8_t>(code)
                                      : bits == 4 ? static_cast<int>(code & 15) - 8
                                      : code & 1  ? -1
                                                  : 1;
                    volatile float scaled = step * 0.5f, product = static_cast<float>(level) * scaled;
                    sum += product;
                }
                const float got = sums[part.first + first + i];
                gradsync_fuzz::check(got == sum || (got != got && sum != sum), "an element has another sum");
            }
            word += gradsync::kernel::quantized_words(n, bits);
        }
});
