// SPDX-License-Identifier: BSL-1.0
// What a folder adds to TcpRendezvous: how ranks find rank 0, and what they say of a folder that is not as it should be.
#include <gradsync/bootstrap/file_rendezvous.hpp>

#include <doctest/doctest.h>

#include <sys/resource.h>
#include <sys/stat.h>

#include <chrono>
#include <csignal>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "support/forked.hpp"
#include "support/no_descriptors.hpp"
#include "support/says.hpp"
#include "support/temporary_directory.hpp"

using namespace std::chrono_literals;
using gradsync::FileRendezvous;
using gradsync_test::says;

namespace {

template <class F>
std::string error_of(F&& f) {
    try {
        f();
        return "nothing was thrown";
    } catch (const gradsync::Error& error) {
        return error.what();
    }
}

void wait_for(const std::string& file) {
    while (!std::filesystem::exists(file)) std::this_thread::sleep_for(1ms);
}

}  // namespace

TEST_CASE("FileRendezvous: what another run has left is not taken for this one's") {
    const gradsync_test::TemporaryDirectory folder;
    CHECK(says(error_of([&] { FileRendezvous(folder.path().string(), 0, 2, {.timeout = 200ms}); }), "already exists"));
    CHECK(std::filesystem::exists(folder.path()));  // and not removed either
    CHECK(says(error_of([&] { FileRendezvous(folder.file("no/such"), 0, 2, {.timeout = 200ms}); }), "No such file"));
}

TEST_CASE("FileRendezvous: ranks that come before the folder is there wait for it, and rank 0 removes it when all have arrived") {
    const gradsync_test::TemporaryDirectory folder;
    const std::string path = folder.file("meeting");
    std::thread early([&] {
        FileRendezvous rendezvous(path, 1, 2, {.timeout = 20s});
        CHECK(rendezvous.all_gather({}).size() == 2);
    });
    std::this_thread::sleep_for(100ms);
    FileRendezvous rendezvous(path, 0, 2, {.timeout = 20s, .bind = "127.0.0.1"});
    CHECK(!std::filesystem::exists(path));
    CHECK(rendezvous.secret().size() == 32);
    CHECK(rendezvous.all_gather({}).size() == 2);
    early.join();
}

TEST_CASE("FileRendezvous: rank 0 removes the folder if not all arrive") {
    const gradsync_test::TemporaryDirectory folder;
    const std::string path = folder.file("meeting");
    CHECK(says(error_of([&] { FileRendezvous(path, 0, 3, {.timeout = 200ms}); }), "ranks 1, 2 did not arrive at "));
    CHECK(!std::filesystem::exists(path));
}

TEST_CASE("FileRendezvous: rank 0 removes the folder if it cannot write into it") {
    const gradsync_test::TemporaryDirectory folder;
    const std::string path = folder.file("meeting");
    const auto reports = gradsync_test::forked(1, [&](int) {
        std::signal(SIGXFSZ, SIG_IGN);
        const rlimit nothing{0, 0};
        ::setrlimit(RLIMIT_FSIZE, &nothing);
        return error_of([&] { FileRendezvous(path, 0, 2, {.timeout = 200ms}); });
    });
    CHECK(reports[0].says("cannot take a name"));
    CHECK(!std::filesystem::exists(path));
}

TEST_CASE("FileRendezvous: what rank 0 has not written is refused") {
    const gradsync_test::TemporaryDirectory folder;
    const std::string path = folder.file("meeting");
    REQUIRE(::mkdir(path.c_str(), 0700) == 0);
    std::ofstream(path + "/rank-0") << "not a word of it is true";
    CHECK(says(error_of([&] { FileRendezvous(path, 1, 2, {.timeout = 10s}); }), "holds invalid data"));
    std::filesystem::remove(path + "/rank-0");
    const std::vector<std::byte> of_another_version(10);
    gradsync::FileStore(path).create("rank-0", of_another_version);
    CHECK(says(error_of([&] { FileRendezvous(path, 1, 2, {.timeout = 10s}); }), "rank 0 runs another version of gradsync"));
    std::filesystem::remove(path + "/rank-0");
    std::filesystem::create_symlink("elsewhere", path + "/rank-0");
    CHECK(says(error_of([&] { FileRendezvous(path, 1, 2, {.timeout = 500ms}); }), "Too many levels of symbolic links"));
    std::filesystem::remove(path + "/rank-0");
    REQUIRE(::mkfifo((path + "/rank-0").c_str(), 0600) == 0);
    CHECK(says(error_of([&] { FileRendezvous(path, 1, 2, {.timeout = 500ms}); }), "cannot be read"));
}

TEST_CASE("FileRendezvous names both world sizes if the ranks were given different ones") {
    const gradsync_test::TemporaryDirectory folder;
    std::string first, second;
    std::thread rank_0([&] { first = error_of([&] { FileRendezvous(folder.file("meeting"), 0, 2, {.timeout = 2s}); }); });
    second = error_of([&] { FileRendezvous(folder.file("meeting"), 1, 3, {.timeout = 10s}); });
    rank_0.join();
    CHECK(says(second, "rank 1 was told that there are 3 ranks, rank 0 that there are 2"));
    CHECK(says(first, "rank 1 did not arrive"));
}

TEST_CASE("FileRendezvous: a folder that others may write into is refused, and nothing is written into it") {
    const gradsync_test::TemporaryDirectory folder;
    const std::string path = folder.file("meeting");
    REQUIRE(::mkdir(path.c_str(), 0700) == 0);
    CHECK(says(error_of([&] { FileRendezvous(path, 1, 2, {.timeout = 200ms}); }), "rank 0 did not arrive"));
    std::filesystem::permissions(path, std::filesystem::perms::all);
    CHECK(says(error_of([&] { FileRendezvous(path, 1, 2, {.timeout = 10s}); }), "others may write into it"));
    CHECK(std::filesystem::is_empty(path));
}

TEST_CASE("FileRendezvous refuses invalid ranks and time limits, and addresses that are not this machine's") {
    CHECK(says(error_of([] { FileRendezvous("x", 2, 2); }), "rank 2 is not one of 2"));
    CHECK(says(error_of([] { FileRendezvous("x", 0, 2, {.timeout = 0s}); }), "time limit must be positive"));
    CHECK(says(error_of([] { FileRendezvous("x", 0, 2, {.timeout = 1s, .bind = "no-such-net"}); }), "cannot listen at 'no-such-net'"));
    CHECK(!std::filesystem::exists("x"));
}

TEST_CASE("FileRendezvous: a file that cannot be opened is not one that has not come") {
    const gradsync_test::TemporaryDirectory folder;
    const std::string path = folder.file("meeting");
    std::thread rank_0([&] { error_of([&] { FileRendezvous(path, 0, 2, {.timeout = 2s}); }); });
    wait_for(path + "/rank-0");
    std::string error;
    {
        const gradsync_test::NoDescriptors none;
        error = error_of([&] { FileRendezvous(path, 1, 2, {.timeout = 500ms}); });
    }
    rank_0.join();
    CHECK(says(error, "Too many open files"));
}
