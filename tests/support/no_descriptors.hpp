// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <sys/resource.h>
#include <unistd.h>

namespace gradsync_test {

/// While it lives, this process can open no further file. Look at errors afterwards: sanitizers need descriptors, too.
class NoDescriptors {
public:
    NoDescriptors() {
        ::getrlimit(RLIMIT_NOFILE, &before_);
        const int next = ::dup(0);
        ::close(next);
        const rlimit no_more{static_cast<rlim_t>(next), before_.rlim_max};
        ::setrlimit(RLIMIT_NOFILE, &no_more);
    }
    NoDescriptors& operator=(NoDescriptors&&) = delete;
    ~NoDescriptors() { ::setrlimit(RLIMIT_NOFILE, &before_); }

private:
    rlimit before_{};
};

}  // namespace gradsync_test
