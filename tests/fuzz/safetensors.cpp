// SPDX-License-Identifier: BSL-1.0
// Weights that the example trainer loads: the input is a header, whose length is written before it, and data; or an index, and such a file.
#include "safetensors.hpp"

#include "data.hpp"
#include "fuzz.hpp"

namespace {

using namespace gradsync_train;

/// Its first two bytes are the length of the header; the rest is data.
void write_weights(const std::filesystem::path& path, gradsync_fuzz::Input input) {
    const std::string header = input.take_bytes(input.take<std::uint16_t>()).text();
    gradsync_fuzz::write_file(path, {gradsync_fuzz::bytes_of(std::uint64_t{header.size()}), header, input.text()});
}

/// The file as it is, and what it must say of itself if it is taken.
void read(const std::filesystem::path& path) {
    SafeWeights weights(path);
    Parameters parameters(1);
    parameters.add_constant("a", {2, 3}, 0);
    parameters.add_constant("b", {5}, 0);
    weights.match(parameters);
    std::vector<float> values(6);
    weights.read(0, 0, values);
    weights.read(1, 2, std::span(values).first(3));
    (void)weights.digest();
}

}  // namespace

static const gradsync_fuzz::Target target("safetensors", [](gradsync_fuzz::Input input) {
    static const auto& folder = gradsync_fuzz::directory();
    switch (input.take<std::uint8_t>() % 3) {
        case 0: {
            const auto file = folder / "raw.safetensors";
            gradsync_fuzz::write_file(file, {input.text()});
            return read(file);
        }
        case 1: write_weights(folder / "model.safetensors", input); return read(folder / "model.safetensors");
        default: {
            const auto index = input.take_bytes(input.take<std::uint16_t>());
            gradsync_fuzz::write_file(folder / "model.safetensors.index.json", {index.text()});
            const auto first = input.take_bytes(input.take<std::uint16_t>());
            write_weights(folder / "part", first);
            write_weights(folder / "other", input);
            return read(folder / "model.safetensors.index.json");
        }
    }
});
