// SPDX-License-Identifier: BSL-1.0
#pragma once
// Text as bytes: training and validation parts, and which sample each rank sees when.

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "batch.hpp"
#include "digest.hpp"
#include "parameters.hpp"

namespace gradsync_train {

/// What the user can mend: a flag, a file. Ends the program with exit code 2.
struct UsageError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct Text {
    std::vector<std::uint8_t> training;
    std::vector<std::uint8_t> validation;

    std::uint64_t fingerprint() const {
        return Digest{}.update(training.data(), training.size()).update(validation.data(), validation.size()).value();
    }
};

/// The last tenth of every file is for validation: files differ, and each should be represented in both parts.
inline Text read_text(const std::vector<std::filesystem::path>& files) {
    Text text;
    for (const auto& file : files) {
        if (std::filesystem::is_directory(file)) throw UsageError("--data: " + file.string() + " is a directory; name the files in it");
        if (std::filesystem::exists(file) && !std::filesystem::is_regular_file(file))
            throw UsageError("--data: " + file.string() + " is not a regular file; save the text to one first");
        std::ifstream in{file, std::ios::binary};
        if (!in) throw UsageError("--data: cannot read " + file.string() + "; check the name and its permissions");
        const std::vector<std::uint8_t> bytes{std::istreambuf_iterator<char>{in}, std::istreambuf_iterator<char>{}};
        const auto split = bytes.end() - static_cast<std::ptrdiff_t>(bytes.size() / 10);
        text.training.insert(text.training.end(), bytes.begin(), split);
        text.validation.insert(text.validation.end(), split, bytes.end());
    }
    return text;
}

/// The project's own sources and pages: text that is always at hand.
inline std::vector<std::filesystem::path> default_files(const std::filesystem::path& project) {
    std::vector<std::filesystem::path> files;
    for (const char* folder : {"include", "examples", "docs", "tests"}) {
        if (!std::filesystem::is_directory(project / folder)) continue;
        for (const auto& entry : std::filesystem::recursive_directory_iterator{project / folder}) {
            const std::string extension = entry.path().extension().string();
            const bool is_text = extension == ".hpp" || extension == ".cpp" || extension == ".md";
            if (entry.is_regular_file() && is_text) files.push_back(entry.path());
        }
    }
    if (std::filesystem::exists(project / "README.md")) files.push_back(project / "README.md");
    std::sort(files.begin(), files.end());
    if (files.empty()) throw UsageError("no text found under " + project.string() + "; name a file with --data");
    return files;
}

/// An endless stream of samples: epoch after epoch, each in another order.
///
/// The order is computed, not stored: a sample's place in the text follows from its number, the seed and nothing else.
/// So ranks that take different numbers see different samples, whatever their count, and a resumed run only needs to
/// know the next number.
class Samples {
public:
    Samples(const std::vector<std::uint8_t>& bytes, Reading reading, std::uint64_t seed)
        : bytes_{&bytes}, reading_{reading}, seed_{seed}, per_epoch_{count(bytes.size(), reading)} {}

    /// In an epoch. The first row begins somewhere in the first stride, anew in each epoch.
    static std::size_t count(std::size_t bytes, Reading r) {
        const std::size_t reach = r.length + r.stride;  // the last byte of the first row's target, at the latest beginning
        return bytes < reach ? 0 : (bytes - reach) / r.stride + 1;
    }

    std::size_t per_epoch() const { return per_epoch_; }

    /// Samples number first .. first + batch.sequences.
    void fill(std::uint64_t first, Batch& batch) const {
        batch.length = reading_.length;
        batch.inputs.resize(batch.sequences * reading_.length);
        batch.targets.resize(batch.sequences * reading_.targets);
        for (std::size_t row = 0; row < batch.sequences; ++row) {
            const std::uint8_t* text = bytes_->data() + place(first + row);
            std::copy_n(text, reading_.length, batch.inputs.data() + row * reading_.length);
            std::copy_n(text + reading_.length + 1 - reading_.targets, reading_.targets, batch.targets.data() + row * reading_.targets);
        }
    }

private:
    std::size_t place(std::uint64_t number) const {
        const std::uint64_t key = Random::mix(seed_ + 0x9e3779b97f4a7c15u * (number / per_epoch_ + 1));
        return key % reading_.stride + permute(number % per_epoch_, key) * reading_.stride;
    }

    /// A Feistel network is a permutation of the numbers of 2k bits; walking on until the result is below per_epoch_
    /// makes it one of those numbers.
    std::uint64_t permute(std::uint64_t x, std::uint64_t key) const {
        const auto half = static_cast<unsigned>(std::bit_width(per_epoch_) + 1) / 2;
        const std::uint64_t mask = (std::uint64_t{1} << half) - 1;
        do {
            std::uint64_t left = x >> half, right = x & mask;
            for (std::uint64_t round = 0; round < 4; ++round) {
                const std::uint64_t next = left ^ (Random::mix(key + (round << 32) + right) & mask);
                left = right;
                right = next;
            }
            x = left << half | right;
        } while (x >= per_epoch_);
        return x;
    }

    const std::vector<std::uint8_t>* bytes_;
    Reading reading_;
    std::uint64_t seed_;
    std::uint64_t per_epoch_;
};

}  // namespace gradsync_train
