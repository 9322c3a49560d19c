// SPDX-License-Identifier: BSL-1.0
#include <gradsync/compress/quantizer.hpp>

#include "conformance/compressor.hpp"
#include "support/slow_build.hpp"

TEST_CASE_TEMPLATE("Quantizer is a compressor", Bits, std::integral_constant<unsigned, 8>, std::integral_constant<unsigned, 4>,
                   std::integral_constant<unsigned, 1>) {
    using gradsync::Quantizer;
    if (gradsync_test::slow_build && Bits::value == 8) return;  // what is not packed is the simplest
    gradsync_test::check_compressor(Quantizer{.bits = Bits::value}, Quantizer{.bits = Bits::value, .start_step = 2},
                                    {Quantizer{.bits = 3}});
}
