// SPDX-License-Identifier: BSL-1.0
// expect: gradsync: secret\(\) of a rendezvous returns a std::string_view, of text that the rendezvous keeps
// errors: 1
#include <string>

#include <gradsync/bootstrap/rendezvous.hpp>

struct Meeting {
    int rank() const { return 0; }
    int size() const { return 1; }
#ifdef GRADSYNC_EXPECT_FAILURE
    std::string secret() { return token; }
#else
    std::string_view secret() { return token; }
#endif
    std::vector<gradsync::Blob> all_gather(std::span<const std::byte> own) { return {{own.begin(), own.end()}}; }
    std::string token = "a secret";
};

std::string_view secret_of(Meeting& meeting) { return gradsync::bootstrap::AnyRendezvous(meeting).secret(); }
