// SPDX-License-Identifier: BSL-1.0
// ctest: LIBRARIES gradsync::etcd NOT_WITH thread
#include <gradsync/bootstrap/store/etcd_store.hpp>

#include "conformance/store.hpp"
#include "support/etcd.hpp"

namespace {

struct Prefix {
    const gradsync_test::Etcd& etcd;
    std::string prefix = "/" + std::to_string(gradsync::bootstrap::random_token());

    gradsync::EtcdStore open() const { return gradsync::EtcdStore(etcd.address(prefix)); }
};

}  // namespace

TEST_CASE("EtcdStore is a store, and one of processes") {
    if (gradsync_test::is_missing("etcd")) return;
    static const gradsync_test::Etcd etcd;  // for all subcases
    gradsync_test::check_store(Prefix{etcd});
    SUBCASE("of processes") { gradsync_test::check_store_of_processes(Prefix{etcd}); }
}
