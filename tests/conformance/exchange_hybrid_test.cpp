// SPDX-License-Identifier: BSL-1.0
#include <gradsync/shard/hybrid.hpp>

#include "conformance/exchange.hpp"

namespace {

using gradsync_test::RecordingBackend;
using Hybrid = gradsync::HybridReduceScatter<RecordingBackend>;

auto in_groups_of(int ranks_per_group, RecordingBackend world) {
    auto [group, replicas] = gradsync::hybrid_groups(world, ranks_per_group);
    return gradsync_test::over(group, Hybrid(replicas));
}

}  // namespace

TEST_CASE("HybridReduceScatter in groups of two, or of all ranks if they are odd, is an exchange") {
    gradsync_test::check_exchange([](RecordingBackend world) { return in_groups_of(world.size() % 2 == 0 ? 2 : world.size(), world); },
                                  [](RecordingBackend world) { return in_groups_of(1, world).policy; });
}

TEST_CASE("HybridReduceScatter in groups of one is an exchange") {
    gradsync_test::check_exchange([](RecordingBackend world) { return in_groups_of(1, world); },
                                  [](RecordingBackend) { return gradsync::ReduceScatter{}; });
}
