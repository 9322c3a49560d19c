// SPDX-License-Identifier: BSL-1.0
#pragma once
// Text from a trained model.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "batch.hpp"
#include "parameters.hpp"

namespace gradsync_train {

/// Draws a byte from softmax(scores / temperature).
inline std::uint8_t draw(const float* scores, double temperature, Random& random) {
    const float top = *std::max_element(scores, scores + 256);
    std::array<double, 256> upto{};
    double sum = 0;
    for (std::size_t i = 0; i < upto.size(); ++i) upto[i] = sum += std::exp(static_cast<double>(scores[i] - top) / temperature);
    const auto drawn = std::upper_bound(upto.begin(), upto.end(), random.uniform() * sum);
    return static_cast<std::uint8_t>(std::min<std::ptrdiff_t>(drawn - upto.begin(), 255));
}

/// `count` bytes after the prompt, each from the context before it.
template <class Model>
std::string generate(Model& model, const std::string& prompt, std::size_t count, std::uint64_t seed) {
    const Reading reading = model.config().reading();
    const std::size_t context = reading.length;
    Random random{seed};
    std::vector<std::uint8_t> text(context - std::min(context, prompt.size()),
                                   '\n');  // a full context: every position was trained
    const std::size_t padding = text.size();
    std::vector<float> own;
    text.insert(text.end(), prompt.begin(), prompt.end());
    for (std::size_t i = 0; i < count; ++i) {
        const float* scores = model.logits(1, context, std::span(text).last(context));
        // A transformer scores every prefix, an n-gram model the whole: either way the last row is the one wanted.
        const std::span last = model.operations().read(256, scores + (reading.targets - 1) * 256, own);
        text.push_back(draw(last.data(), 0.8, random));
    }
    return std::string(text.begin() + static_cast<std::ptrdiff_t>(padding), text.end());
}

/// The text with all that is not printable UTF-8 replaced: a young model writes bytes that a terminal would obey.
inline std::string printable(const std::string& text) {
    std::string out;
    for (std::size_t i = 0; i < text.size();) {
        const auto lead = static_cast<unsigned char>(text[i]);
        const std::size_t length = lead < 0x80 ? 1 : lead >= 0xc2 && lead < 0xe0 ? 2 : lead >= 0xe1 && lead < 0xf0 ? 3 : 0;
        bool valid = length == 1 ? lead == '\n' || lead == '\t' || (lead >= 0x20 && lead != 0x7f) : length > 0;
        for (std::size_t k = 1; valid && k < length; ++k) {
            valid = i + k < text.size() && (static_cast<unsigned char>(text[i + k]) & 0xc0) == 0x80;
        }
        if (valid && length > 1) {  // neither the control characters U+0080 to U+009F nor surrogates
            const auto second = static_cast<unsigned char>(text[i + 1]);
            valid = !(lead == 0xc2 && second < 0xa0) && !(lead == 0xed && second >= 0xa0);
        }
        out += valid ? text.substr(i, length) : "\ufffd";
        i += valid ? length : 1;
    }
    return out;
}

}  // namespace gradsync_train
