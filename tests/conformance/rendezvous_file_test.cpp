// SPDX-License-Identifier: BSL-1.0
#include <filesystem>

#include <gradsync/bootstrap/file_rendezvous.hpp>

#include "conformance/rendezvous.hpp"
#include "support/temporary_directory.hpp"

namespace {

struct FileMeeting {
    int size;
    gradsync_test::TemporaryDirectory folder = {};

    explicit FileMeeting(int size_) : size(size_) {}
    ~FileMeeting() { CHECK(!std::filesystem::exists(folder.file("meeting"))); }  // rank 0 has tidied up, also if it failed
    gradsync::FileRendezvous join(int rank, std::chrono::nanoseconds limit) const {
        return {folder.file("meeting"), rank, size, {.timeout = limit}};
    }
};

}  // namespace

TEST_CASE("FileRendezvous is a rendezvous") { gradsync_test::check_rendezvous<FileMeeting>(); }
