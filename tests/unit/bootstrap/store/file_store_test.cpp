// SPDX-License-Identifier: BSL-1.0
// What a FileStore does with a folder and files that are not as it left them. The conformance suite shows the rest.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <thread>

#include <sys/resource.h>
#include <unistd.h>
#include <gradsync/bootstrap/store/file_store.hpp>

#include "support/forked.hpp"
#include "support/no_descriptors.hpp"
#include "support/temporary_directory.hpp"

using namespace gradsync;

namespace {

Blob some_bytes(std::size_t count) {
    Blob bytes(count);
    for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i * 7);
    return bytes;
}

std::string content_of(const std::string& name) {
    std::ifstream file(name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
}
void overwrite(const std::string& name, const std::string& content) { std::ofstream(name, std::ios::binary) << content; }

}  // namespace

TEST_CASE("FileStore: a file that is cut, changed or foreign is an error that names it, and never bytes") {
    const gradsync_test::TemporaryDirectory folder;
    FileStore store(folder.path().string());
    REQUIRE(store.create("gen/1", some_bytes(100)) == some_bytes(100));
    const std::string file = folder.file("gen+/1"), good = content_of(file);
    REQUIRE(good.size() == 124);
    const auto is_refused = [&] {
        CHECK_THROWS_WITH_AS((void)store.read("gen/1"), doctest::Contains("gen+/1 is none of its own"), Error);
        CHECK_THROWS_AS((void)store.create("gen/1", some_bytes(3)), Error);
    };
    for (std::size_t cut = 0; cut < good.size(); cut += 5) {
        overwrite(file, good.substr(0, cut));
        is_refused();
    }
    for (std::size_t at = 0; at < good.size(); ++at) {
        std::string bad = good;
        bad[at] = static_cast<char>(bad[at] ^ 4);
        overwrite(file, bad);
        is_refused();
    }
    overwrite(file, std::string(500, '\xff'));
    is_refused();
    std::filesystem::remove(file);
    std::filesystem::create_symlink("/etc/passwd", file);
    CHECK_THROWS_AS((void)store.read("gen/1"), Error);
    std::filesystem::remove(file);
    REQUIRE(::mkfifo(file.c_str(), 0600) == 0);  // it waits for no writer
    CHECK_THROWS_WITH_AS((void)store.read("gen/1"), doctest::Contains("it is not a regular file"), Error);
}

TEST_CASE("FileStore: only a folder that is there, and that nobody else may write into, is taken") {
    const gradsync_test::TemporaryDirectory folder;
    CHECK_THROWS_WITH_AS(FileStore(folder.file("missing")), doctest::Contains("cannot be opened: No such file or directory"), Error);
    overwrite(folder.file("file"), "");
    CHECK_THROWS_WITH_AS(FileStore(folder.file("file")), doctest::Contains("it is no folder"), Error);
    std::filesystem::permissions(folder.path(), std::filesystem::perms::group_write, std::filesystem::perm_options::add);
    CHECK_THROWS_WITH_AS(FileStore(folder.path().string()), doctest::Contains("others may write into it"), Error);
}

TEST_CASE("FileStore: what a killed writer leaves is no name, and a folder that is gone is an error") {
    const gradsync_test::TemporaryDirectory folder;
    const std::string place = folder.file("store");
    std::filesystem::create_directory(place);
    std::filesystem::permissions(place, std::filesystem::perms::owner_all);
    FileStore store(place);
    overwrite(place + "/.12345", "half of a fi");
    CHECK(store.names("").empty());
    CHECK(store.create("a", some_bytes(9)) == some_bytes(9));
    CHECK(store.names("") == std::vector<std::string>{"a"});
    for (const auto& entry : std::filesystem::directory_iterator(place))
        CHECK((entry.path().filename() == "a" || entry.path().filename() == ".12345"));  // it leaves nothing of its own
    std::filesystem::remove_all(place);
    CHECK(store.read("a") == std::nullopt);
    CHECK_THROWS_WITH_AS((void)store.create("b", some_bytes(9)), doctest::Contains("cannot take a name: the folder was removed"), Error);
    for (const char* prefix : {"", "gen/"})
        CHECK_THROWS_WITH_AS((void)store.names(prefix), doctest::Contains("cannot be read: the folder was removed"), Error);
}

TEST_CASE("FileStore: a disk that is full takes no name") {
    const gradsync_test::TemporaryDirectory folder;
    const auto reports = gradsync_test::forked(1, [&](int) -> std::string {
        ::signal(SIGXFSZ, SIG_IGN);
        const rlimit most{1000, 1000};
        ::setrlimit(RLIMIT_FSIZE, &most);
        FileStore store(folder.path().string());
        try {
            (void)store.create("large", some_bytes(100'000));
            return "it was taken";
        } catch (const Error& error) {
            if (error.errc() != Errc::storage) return "another code";
        }
        if (store.read("large") || !store.names("").empty()) return "a part is there";
        return store.create("small", some_bytes(10)) == some_bytes(10) ? "right" : "the small one is wrong";
    });
    CHECK(reports[0].text == "right");
}

TEST_CASE("FileStore: create() tries again within its time limit while the system lacks descriptors") {
    using namespace std::chrono_literals;
    const gradsync_test::TemporaryDirectory folder;
    FileStore store(folder.path().string());
    const auto problem_of = [&](const char* name) -> std::string {
        std::exception_ptr problem;
        {
            const gradsync_test::NoDescriptors none;
            try {
                (void)store.create(name, some_bytes(9));
            } catch (...) {
                problem = std::current_exception();
            }
        }
        try {
            if (problem) std::rethrow_exception(problem);
            return "none";
        } catch (const Error& error) {
            return error.errc() == Errc::storage ? error.what() : "another code";
        }
    };
    CHECK(problem_of("a").find("Too many open files") != std::string::npos);
    CHECK(store.set_timeout(100ms) == 0ns);
    const auto begin = std::chrono::steady_clock::now();
    CHECK(problem_of("a").find("Too many open files") != std::string::npos);
    CHECK(std::chrono::steady_clock::now() - begin >= 100ms);

    CHECK(store.set_timeout(100s) == 100ms);
    std::optional<gradsync_test::NoDescriptors> none;
    std::atomic<bool> is_here = false, begins = false;
    std::thread other([&] {
        is_here = true;
        while (!begins) std::this_thread::sleep_for(1ms);
        std::this_thread::sleep_for(200ms);
        none.reset();
    });
    while (!is_here) std::this_thread::sleep_for(1ms);
    none.emplace();
    begins = true;
    const Blob taken = store.create("a", some_bytes(9));
    other.join();
    CHECK(taken == some_bytes(9));
    CHECK(store.read("a") == some_bytes(9));
    CHECK(store.create("a", some_bytes(3)) == some_bytes(9));
    overwrite(folder.file("b+"), "no folder");
    CHECK_THROWS_WITH_AS((void)store.create("b/1", some_bytes(9)), doctest::Contains("Not a directory"), Error);  // at once
}
