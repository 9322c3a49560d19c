// SPDX-License-Identifier: BSL-1.0
#include <gradsync/bootstrap/store/file_store.hpp>

#include "conformance/store.hpp"
#include "support/temporary_directory.hpp"

namespace {

struct Folder {
    gradsync_test::TemporaryDirectory folder = {};

    gradsync::FileStore open() const { return gradsync::FileStore(folder.path().string()); }
};

}  // namespace

TEST_CASE("FileStore is a store") { gradsync_test::check_store(Folder()); }
TEST_CASE("FileStore is a store of processes") { gradsync_test::check_store_of_processes(Folder()); }
