// SPDX-License-Identifier: BSL-1.0
// Compressors are exact exchanges before their `start_step`. The rest of what they promise is in compressor.hpp.
#include <gradsync/compress/power_sgd.hpp>
#include <gradsync/compress/quantizer.hpp>

#include "conformance/exchange.hpp"

namespace {

template <class Settings>
void check_before_start() {
    using gradsync_test::RecordingBackend;
    gradsync_test::check_exchange([&](RecordingBackend world) { return gradsync_test::over(world, Settings{.start_step = 100}); },
                                  [&](RecordingBackend) { return Settings{.start_step = 101}; });
}

}  // namespace

TEST_CASE("PowerSgd is an exchange") { check_before_start<gradsync::PowerSgd>(); }
TEST_CASE("Quantizer is an exchange") { check_before_start<gradsync::Quantizer>(); }
