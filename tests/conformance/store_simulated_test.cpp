// SPDX-License-Identifier: BSL-1.0
#include "support/simulated_store.hpp"

#include "conformance/store.hpp"

namespace {

struct SimulatedStores {
    gradsync_test::SimulatedStore::Shared shared = std::make_shared<gradsync_test::SimulatedStore::State>();
    double lost = 0, late = 0;

    gradsync_test::SimulatedStore open() const { return gradsync_test::SimulatedStore(shared, lost, late); }
};

}  // namespace

TEST_CASE("a simulated store is a store") { gradsync_test::check_store(SimulatedStores()); }
TEST_CASE("a simulated store that loses answers, repeats requests and is late is a store") {
    gradsync_test::check_store(SimulatedStores{.lost = 0.3, .late = 0.5});
}
