// ctest: TIMEOUT 60
#include <cstdlib>
#include <filesystem>

#include <gradsync/bootstrap/file_rendezvous.hpp>

#include "conformance/rendezvous.hpp"

namespace {

struct FileMeeting {
    int size;
    std::string folder = (std::filesystem::temp_directory_path() / "gradsync-test-XXXXXX").string();

    explicit FileMeeting(int size_) : size(size_) { REQUIRE(::mkdtemp(folder.data()) != nullptr); }
    ~FileMeeting() {
        CHECK(!std::filesystem::exists(folder + "/meeting"));  // rank 0 has tidied up, also where it failed
        std::filesystem::remove_all(folder);
    }
    gradsync::FileRendezvous join(int rank, std::chrono::nanoseconds limit) const { return {folder + "/meeting", rank, size, {.timeout = limit}}; }
};

}  // namespace

TEST_CASE("FileRendezvous") { gradsync_test::check_rendezvous<FileMeeting>(); }
