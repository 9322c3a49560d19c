// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/core/debug_log.hpp>

#include <doctest/doctest.h>

#include <regex>
#include <string>

#include "support/standard_error.hpp"

using gradsync::detail::DebugLevel;
using gradsync_test::written_by;

namespace {

/// The level that GRADSYNC_DEBUG=value names, and what is said about it.
DebugLevel level_of(const char* value, std::string& said) {
    ::setenv("GRADSYNC_DEBUG", value, 1);
    DebugLevel level{};
    said = written_by([&] { level = gradsync::detail::read_debug_level(); });
    ::unsetenv("GRADSYNC_DEBUG");
    return level;
}

}  // namespace

TEST_CASE("debug log: GRADSYNC_DEBUG names a level; another word is reported, and switches nothing on") {
    std::string said;
    CHECK(gradsync::detail::read_debug_level() == DebugLevel::off);
    CHECK(level_of("", said) == DebugLevel::off);
    CHECK(level_of("info", said) == DebugLevel::info);
    CHECK(level_of("trace", said) == DebugLevel::trace);
    CHECK(said.empty());
    CHECK(level_of("INFO", said) == DebugLevel::off);
    CHECK(said.find("GRADSYNC_DEBUG=INFO is no level; set it to info or trace\n") != std::string::npos);
}

TEST_CASE("debug log: a line has the time, the level, the rank, the process, and ends") {
    const std::string said = written_by([] {
        gradsync::detail::write_debug_line(DebugLevel::info, 3, {"met ", 4, " ranks"});
        gradsync::detail::write_debug_line(DebugLevel::trace, -1, {"no rank yet"});
        gradsync::detail::debug(DebugLevel::info, 0, "this program's log is off");
    });
    CAPTURE(said);
    CHECK(std::regex_match(said, std::regex("\\d\\d:\\d\\d:\\d\\d\\.\\d{3} gradsync info: rank 3 \\([^ ]+, process \\d+\\): met 4 ranks\n"
                                            "\\d\\d:\\d\\d:\\d\\d\\.\\d{3} gradsync trace: \\([^ ]+, process \\d+\\): no rank yet\n")));
}
