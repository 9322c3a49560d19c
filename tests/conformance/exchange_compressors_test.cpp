// SPDX-License-Identifier: BSL-1.0
// Compressors are exact exchanges before their `start_step`. The rest of what they promise is in compressor.hpp.
#include <gradsync/compress/power_sgd.hpp>
#include <gradsync/compress/quantizer.hpp>
#include <gradsync/compress/top_k.hpp>

#include "conformance/exchange.hpp"

namespace {

template <class X, class Options>
void check_before_start(Options options) {
    using gradsync_test::RecordingBackend;
    options.start_step = 100;
    Options other = options;
    other.start_step = 101;
    gradsync_test::check_exchange([&](RecordingBackend world) { return gradsync_test::over(world, X(options)); },
                                  [&](RecordingBackend) { return X(other); });
}

}  // namespace

TEST_CASE("PowerSgd is an exchange") {
    check_before_start<gradsync::PowerSgd<gradsync_test::RecordingBackend>>(gradsync::PowerSgdOptions{});
}
TEST_CASE("Quantizer is an exchange") {
    check_before_start<gradsync::Quantizer<gradsync_test::RecordingBackend>>(gradsync::QuantizerOptions{});
}
TEST_CASE("TopK is an exchange") { check_before_start<gradsync::TopK<gradsync_test::RecordingBackend>>(gradsync::TopKOptions{}); }
