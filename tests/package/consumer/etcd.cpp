// SPDX-License-Identifier: BSL-1.0
#include <gradsync/bootstrap/store/etcd_store.hpp>

int main() {
    try {
        (void)gradsync::AnyStore::open("etcd://127.0.0.1");
    } catch (const gradsync::Error& error) {  // of EtcdStore, so it is known
        return std::string(error.what()).find("no prefix") == std::string::npos;
    }
    return 1;
}
