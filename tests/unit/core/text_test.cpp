// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/core/buffer_view.hpp>
#include <gradsync/core/text.hpp>

#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

using gradsync::detail::text;

TEST_CASE("text joins characters, names of enumerators and numbers in order") {
    const std::string owned = "owned ";
    CHECK(text("literal ", owned, std::string_view("view"), "") == "literal owned view");
    CHECK(text(gradsync::DType::bf16, " in ", gradsync::MemorySpace::device) == "bf16 in device");
    CHECK(text(-3, ' ' == 'x' ? "" : " ", std::uint8_t{200}, " ", std::numeric_limits<std::uint64_t>::max(), " ",
               std::numeric_limits<std::int64_t>::min()) == "-3 200 18446744073709551615 -9223372036854775808");
    CHECK(text(0.25, " ", 1e300, " ", std::numeric_limits<double>::infinity()) == "0.25 1e+300 inf");
}
