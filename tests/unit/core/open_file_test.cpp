// SPDX-License-Identifier: BSL-1.0
#include <gradsync/core/open_file.hpp>

#include <doctest/doctest.h>

#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "support/temporary_directory.hpp"

using namespace gradsync::detail;

namespace {

std::string problem_of(const std::string& path, int flags, const char* mode) {
    std::FILE* const file = open_file(path, flags, mode);
    if (file == nullptr) return open_problem();
    std::fclose(file);
    return "";
}

}  // namespace

TEST_CASE("open_file: reads regular files, and waits for nobody") {
    const gradsync_test::TemporaryDirectory folder;
    std::ofstream(folder.file("file")) << "text";
    std::filesystem::create_symlink("file", folder.file("link"));
    REQUIRE(::mkfifo(folder.file("pipe").c_str(), 0600) == 0);
    CHECK(problem_of(folder.file("file"), O_RDONLY, "rb") == "");
    CHECK(problem_of(folder.file("link"), O_RDONLY, "rb") == "");
    CHECK(problem_of(folder.file("none"), O_RDONLY, "rb") == "No such file or directory");
    CHECK(problem_of(folder.file("link"), O_RDONLY | O_NOFOLLOW, "rb") == "Too many levels of symbolic links");
    for (const std::string& other : {folder.file("pipe"), folder.path().string(), std::string("/dev/zero"), std::string("/dev/full")})
        CHECK(problem_of(other, O_RDONLY, "rb") == "it is not a regular file");
}

TEST_CASE("open_file: writes regular files and devices, and waits for no reader") {
    const gradsync_test::TemporaryDirectory folder;
    const int flags = O_WRONLY | O_CREAT | O_TRUNC;
    CHECK(problem_of(folder.file("file"), flags, "wb") == "");
    CHECK(problem_of("/dev/null", flags, "wb") == "");
    CHECK(problem_of(folder.path().string(), flags, "wb") == "Is a directory");
    REQUIRE(::mkfifo(folder.file("pipe").c_str(), 0600) == 0);
    CHECK(problem_of(folder.file("pipe"), flags, "wb") == "it is not a regular file");
    const int reader = ::open(folder.file("pipe").c_str(), O_RDONLY | O_NONBLOCK);
    CHECK(problem_of(folder.file("pipe"), flags, "wb") == "it is not a regular file");
    ::close(reader);
}
