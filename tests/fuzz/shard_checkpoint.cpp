// SPDX-License-Identifier: BSL-1.0
// A sharded checkpoint of one rank: the input is its manifest or its part, as it is or with a magic and a digest that are right.
#include <vector>

#include <gradsync/shard/checkpoint.hpp>

#include "fuzz.hpp"

namespace {

using gradsync::BufferView;

/// A training of two parameters, of which this rank has all of the first and a slice of the second, and of a frozen one.
struct Sharded {
    std::vector<float> values = std::vector<float>(11);                 // two arrays of a, and one of b
    std::vector<std::uint16_t> frozen = std::vector<std::uint16_t>(4);  // in bf16
    std::vector<gradsync::ParameterView> views = {view("a", 3), view("b", 9), view("c", 4)};

    Sharded() {
        views[2].value = gradsync::detail::typed_view(frozen.data(), 4, gradsync::DType::bf16);
        views[2].requires_grad = false;
        views[1].shape = {3, 3};
    }

    static gradsync::ParameterView view(const char* name, std::size_t count) {
        gradsync::ParameterView result;
        result.name = name;
        result.gradient.count = count;
        return result;
    }

    const auto& parameters() const { return views; }
    template <class F>
    void for_each_shard(F&& f) {
        for (std::size_t array = 0; array < 2; ++array) f(0, array, 0, BufferView(values.data() + 3 * array, 3));
        f(1, 0, 2, BufferView(values.data() + 6, 5));
    }
};

}  // namespace

static const gradsync_fuzz::Target target("shard_checkpoint", [](gradsync_fuzz::Input input) {
    namespace detail = gradsync::detail;
    const auto digest_of = [](const std::string& bytes) { return detail::fnv1a(bytes.data(), bytes.size()); };
    const auto& directory = gradsync_fuzz::directory();
    const auto what = input.take<std::uint8_t>() % 4;
    std::string bytes = input.text();
    if (what % 2 == 0) {
        bytes.insert(0, detail::shard_magic, sizeof detail::shard_magic);
        bytes += gradsync_fuzz::bytes_of(digest_of(bytes));
    }
    detail::ShardManifest manifest;
    manifest.digests.push_back(digest_of(bytes.substr(0, bytes.size() - std::min<std::size_t>(bytes.size(), 8))));
    if (what < 2) {
        gradsync_fuzz::write_file(manifest.file(directory, 0), {bytes});
    } else {
        gradsync_fuzz::write_file(detail::ShardManifest::path(directory), {bytes});
        manifest = detail::ShardManifest::read(directory);
    }
    Sharded sharded;
    detail::read_shards(directory, manifest, sharded, 0, 1, detail::HostPasses());
});
