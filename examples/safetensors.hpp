// SPDX-License-Identifier: BSL-1.0
#pragma once
// Weights in files that PyTorch and others open: https://github.com/huggingface/safetensors.
//
// A file is: length of the header (8 bytes, little-endian) | the header, a JSON object {name: {dtype, shape, data_offsets}} | the data. Weights in
// several files have an index beside them, model.safetensors.index.json, which says which file holds which tensor.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "file.hpp"
#include "parameters.hpp"

namespace gradsync_train {

/// One tensor of a file.
struct SafeTensor {
    std::string dtype;
    std::vector<std::size_t> shape;
    std::size_t begin = 0, end = 0;  // bytes of the file
};

/// Weights to begin with, for as many threads as there are. All that the files say of themselves is checked before it is used.
class SafeWeights {
public:
    /// `path`: a file, an index (*.json), or a folder with model.safetensors.index.json or model.safetensors. Throws UsageError.
    explicit SafeWeights(const std::filesystem::path& path);

    /// Throws UsageError unless these are the parameters, no more and no fewer. Before `read`.
    void match(const Parameters& parameters);
    /// The weights of parameter i from element `first` on, converted from 16 bits if the file has them so.
    void read(std::size_t i, std::size_t first, std::span<float> out) const;
    /// Weights that differ have different ones.
    std::uint64_t digest() const;

private:
    struct Part {
        std::filesystem::path path;
        File file;
        std::map<std::string, SafeTensor> tensors;
    };
    const Part& open(const std::filesystem::path& path);

    std::filesystem::path path_;
    std::vector<Part> parts_;
    std::vector<std::pair<const File*, const SafeTensor*>> places_;  // by parameter
};

/// Writes parameters `own` to a file, which appears whole, in the end.
class SafeWriter {
public:
    /// `rank` makes the temporary file's name.
    SafeWriter(const std::filesystem::path& path, const Parameters& parameters, const std::vector<std::size_t>& own, int rank);
    void write(std::size_t i, std::span<const float> weights) const;
    void finish();

private:
    std::filesystem::path path_;
    Temporary temporary_;
    File file_;
    std::map<std::size_t, std::size_t> places_;  // by parameter
};

/// Is a path of weights that are written the file itself? Otherwise it is the folder for the file, or files.
inline bool is_weights_file(const std::filesystem::path& path) { return path.extension() == ".safetensors"; }

/// The index's file in a folder, and the files that it names (none if it cannot be read).
std::filesystem::path safe_index(const std::filesystem::path& folder);
std::vector<std::string> safe_parts(const std::filesystem::path& folder);
/// Replaces the index. `files`: by parameter.
void write_safe_index(const std::filesystem::path& folder, const Parameters& parameters, const std::vector<std::string>& files);

}  // namespace gradsync_train
