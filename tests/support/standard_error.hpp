// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <doctest/doctest.h>

#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>

#include "temporary_directory.hpp"

namespace gradsync_test {

/// What `f()` writes to standard error.
template <class F>
std::string written_by(F&& f) {
    const gradsync_test::TemporaryDirectory directory;
    const std::string name = directory.file("errors");
    std::FILE* const file = std::fopen(name.c_str(), "w");
    REQUIRE(file != nullptr);
    std::fflush(stderr);
    const int kept = ::dup(STDERR_FILENO);
    ::dup2(::fileno(file), STDERR_FILENO);
    f();
    ::dup2(kept, STDERR_FILENO);
    ::close(kept);
    std::fclose(file);
    std::ifstream in(name);
    return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace gradsync_test
