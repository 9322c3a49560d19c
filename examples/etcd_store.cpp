// SPDX-License-Identifier: BSL-1.0
// Lets programs that link this file take addresses of etcd where they take a folder to meet in.
#include <gradsync/bootstrap/store/etcd_store.hpp>
