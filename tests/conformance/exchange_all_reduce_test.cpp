// SPDX-License-Identifier: BSL-1.0
#include <gradsync/core/exchange.hpp>

#include "conformance/exchange.hpp"

TEST_CASE("AllReduce is an exchange") {
    using gradsync_test::RecordingBackend;
    gradsync_test::check_exchange([](RecordingBackend world) { return gradsync_test::over(world, gradsync::AllReduce{}); },
                                  [](RecordingBackend) { return gradsync::ReduceScatter{}; });
}
