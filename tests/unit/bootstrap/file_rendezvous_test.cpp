// SPDX-License-Identifier: BSL-1.0
// ctest: COST 25
#include <gradsync/bootstrap/file_rendezvous.hpp>

#include <doctest/doctest.h>

#include <sys/stat.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

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

}  // namespace

TEST_CASE("FileRendezvous: what another run has left is not taken for this one's") {
    const gradsync_test::TemporaryDirectory folder;
    CHECK(says(error_of([&] { FileRendezvous(folder.path().string(), 0, 2, {.timeout = 200ms}); }), "already exists"));
    CHECK(std::filesystem::exists(folder.path()));  // and not removed either
    CHECK(says(error_of([&] { FileRendezvous(folder.file("no/such"), 0, 2, {.timeout = 200ms}); }), "No such file"));
}

TEST_CASE("FileRendezvous: nonsense in the folder is named") {
    const gradsync_test::TemporaryDirectory folder;
    const std::string path = folder.file("meeting");
    std::string first;
    std::thread rank_0([&] { first = error_of([&] { FileRendezvous(path, 0, 2, {.timeout = 10s}); }); });
    while (!std::filesystem::exists(path + "/arrival.0")) std::this_thread::sleep_for(1ms);
    std::ofstream(path + "/nonsense") << "not a word of it is true, and it is much longer than a header";
    std::filesystem::rename(path + "/nonsense", path + "/arrival.1");
    rank_0.join();
    CHECK(says(first, "holds invalid data"));
}

TEST_CASE("FileRendezvous names both world sizes if the ranks were given different ones") {
    const gradsync_test::TemporaryDirectory folder;
    std::string first, second;
    std::thread rank_0([&] { first = error_of([&] { FileRendezvous(folder.file("meeting"), 0, 2, {.timeout = 2s}); }); });
    second = error_of([&] { FileRendezvous(folder.file("meeting"), 1, 3, {.timeout = 10s}); });
    rank_0.join();
    CHECK(says(second, "rank 0 was told that there are 2 ranks, this one that there are 3"));
    CHECK(says(first, "rank 1 did not arrive"));
}

TEST_CASE("FileRendezvous: an exchange names all ranks that did not come in time, and a rank that has left") {
    const gradsync_test::TemporaryDirectory folder;
    std::atomic<bool> over{false};
    std::vector<std::thread> others;
    for (const int rank : {1, 2})
        others.emplace_back([&, rank] {
            FileRendezvous rendezvous(folder.file("meeting"), rank, 3, {.timeout = 10s});
            while (!over) std::this_thread::sleep_for(1ms);
        });
    FileRendezvous rendezvous(folder.file("meeting"), 0, 3, {.timeout = 3s});
    CHECK(says(error_of([&] { (void)rendezvous.all_gather({}); }), "ranks 1, 2 did not come to all_gather-0 within 3 s"));
    over = true;
    for (std::thread& other : others) other.join();
    CHECK(says(error_of([&] { (void)rendezvous.all_gather({}); }), "rank 1 left before all_gather-1"));
}

TEST_CASE("FileRendezvous: an exchange may have a limit of its own") {
    const gradsync_test::TemporaryDirectory folder;
    std::atomic<bool> over{false};
    std::thread other([&] {
        FileRendezvous rendezvous(folder.file("meeting"), 1, 2, {.timeout = 10s});
        while (!over) std::this_thread::sleep_for(1ms);
    });
    FileRendezvous rendezvous(folder.file("meeting"), 0, 2, {.timeout = 1h});
    CHECK(says(error_of([&] { (void)rendezvous.all_gather({}, 500ms); }), "rank 1 did not come to all_gather-0 within 0.5 s"));
    over = true;
    other.join();
}

TEST_CASE("FileRendezvous: the folder stays until all have said good-bye; whoever finds it gone says so at once") {
    const gradsync_test::TemporaryDirectory folder;
    const std::string path = folder.file("meeting");
    std::thread rank_0([&] { FileRendezvous(path, 0, 2, {.timeout = 20s}); });
    {
        const FileRendezvous late(path, 1, 2, {.timeout = 20s});
        std::this_thread::sleep_for(1500ms);
        CHECK(std::filesystem::exists(path));
    }
    rank_0.join();
    CHECK(!std::filesystem::exists(path));

    std::thread stays([&] {
        FileRendezvous rendezvous(path, 0, 2, {.timeout = 4s});
        std::this_thread::sleep_for(300ms);
        std::filesystem::rename(path, path + "-elsewhere");
    });
    FileRendezvous alone(path, 1, 2, {.timeout = 4s});
    for (int again = 0; again < 2; ++again)  // while it waits, and before it could write
        CHECK(says(error_of([&] { (void)alone.all_gather({}); }), "the folder is gone"));
    stays.join();
}

TEST_CASE("FileRendezvous: whoever waits learns who is missing from the rank that gives up first") {
    for (const bool meets : {false, true}) {
        CAPTURE(meets);
        const gradsync_test::TemporaryDirectory folder;
        int blamed[2] = {-1, -1};
        std::string said[2];
        std::atomic<int> over{0};
        std::vector<std::thread> ranks;
        for (int rank = 0; rank < 3; ++rank)
            ranks.emplace_back([&, rank] {
                if (rank == 2 && !meets) return;
                try {
                    FileRendezvous rendezvous(folder.file("meeting"), rank, 3, {.timeout = rank == 0 ? 3s : 20s});
                    while (rank == 2 && over < 2) std::this_thread::sleep_for(1ms);
                    if (rank != 2) (void)rendezvous.all_gather({});
                } catch (const gradsync::Error& error) {
                    if (rank < 2) blamed[rank] = error.context().peer;
                    if (rank < 2) said[rank] = error.what();
                }
                ++over;
            });
        const auto start = std::chrono::steady_clock::now();
        for (std::thread& rank : ranks) rank.join();
        CHECK(std::chrono::steady_clock::now() - start < 15s);
        for (const int r : {0, 1}) {
            CHECK(blamed[r] == 2);
            CHECK(says(said[r], meets ? "rank 2 did not come to all_gather-0" : "rank 2 did not arrive"));
        }
    }
}

TEST_CASE("FileRendezvous: rank 0, which still waits for arrivals, says who is missing, and is not blamed itself") {
    const gradsync_test::TemporaryDirectory folder;
    int blamed = -1;
    std::thread rank_0([&] { error_of([&] { FileRendezvous(folder.file("meeting"), 0, 3, {.timeout = 4s}); }); });
    try {
        FileRendezvous rendezvous(folder.file("meeting"), 1, 3, {.timeout = 3s});
        (void)rendezvous.all_gather({});
    } catch (const gradsync::Error& error) {
        blamed = error.context().peer;
    }
    rank_0.join();
    CHECK(blamed == 2);
}

TEST_CASE("FileRendezvous: a folder that others may write into is refused") {
    const gradsync_test::TemporaryDirectory folder;
    const std::string path = folder.file("meeting");
    std::string first;
    std::thread rank_0([&] { first = error_of([&] { FileRendezvous(path, 0, 2, {.timeout = 2s}); }); });
    while (!std::filesystem::exists(path + "/arrival.0")) std::this_thread::sleep_for(1ms);
    std::filesystem::permissions(path, std::filesystem::perms::all);
    CHECK(says(error_of([&] { FileRendezvous(path, 1, 2, {.timeout = 10s}); }), "others may write into it"));
    rank_0.join();
    CHECK(says(first, "rank 1 did not arrive"));
}

TEST_CASE("FileRendezvous refuses invalid ranks and time limits") {
    CHECK(says(error_of([] { FileRendezvous("x", 2, 2); }), "rank 2 is not one of 2"));
    CHECK(says(error_of([] { FileRendezvous("x", 0, 2, {.timeout = 0s}); }), "time limit must be positive"));
}

TEST_CASE("FileRendezvous: a file that cannot be opened is not one that has not come") {
    const gradsync_test::TemporaryDirectory folder;
    const std::string path = folder.file("meeting");
    REQUIRE(::mkdir(path.c_str(), 0700) == 0);
    std::string error;
    {
        const gradsync_test::NoDescriptors none;
        error = error_of([&] { FileRendezvous(path, 1, 2, {.timeout = 500ms}); });
    }
    CHECK(says(error, "Too many open files; check whose the folder is, and how many files this process may open"));
    std::filesystem::create_symlink("elsewhere", path + "/arrival.0");
    CHECK(says(error_of([&] { FileRendezvous(path, 1, 2, {.timeout = 500ms}); }), "arrival.0: Too many levels of symbolic links"));
}

TEST_CASE("FileRendezvous: a pipe or a folder in the folder blocks no rank") {
    const gradsync_test::TemporaryDirectory folder;
    const std::string path = folder.file("meeting");
    REQUIRE(::mkdir(path.c_str(), 0700) == 0);
    REQUIRE(::mkfifo((path + "/arrival.0").c_str(), 0600) == 0);
    CHECK(says(error_of([&] { FileRendezvous(path, 1, 2, {.timeout = 500ms}); }), "holds invalid data"));
    std::filesystem::remove(path + "/arrival.0");
    std::filesystem::create_directory(path + "/arrival.0");
    CHECK(says(error_of([&] { FileRendezvous(path, 1, 2, {.timeout = 500ms}); }), "holds invalid data"));
}

TEST_CASE("FileRendezvous: a rank writes nothing into a folder in which rank 0 has not arrived") {
    const gradsync_test::TemporaryDirectory folder;
    const std::string path = folder.file("meeting");
    REQUIRE(::mkdir(path.c_str(), 0700) == 0);
    CHECK(says(error_of([&] { FileRendezvous(path, 1, 2, {.timeout = 200ms}); }), "rank 0 did not arrive"));
    CHECK(std::filesystem::is_empty(path));  // it may be another user's
}
