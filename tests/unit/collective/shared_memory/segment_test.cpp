// SPDX-License-Identifier: BSL-1.0
#include <gradsync/collective/shared_memory/segment.hpp>

#include <doctest/doctest.h>

#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstddef>

using gradsync::shared_memory::Segment;
using namespace std::chrono_literals;

TEST_CASE("Segment: making one leaves the program's other memory as it is, whatever its size") {
    const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    constexpr std::size_t least = 2 * Segment::huge_page, other = 32;  // pages of the program's own
    for (std::size_t bytes = least; bytes < least + 32 * page; bytes += page) {
        CAPTURE(bytes);
        // The system puts new mappings right below others: here into a hole of the size that huge pages need.
        const std::size_t hole = bytes + 2 * Segment::huge_page;
        void* const all = ::mmap(nullptr, hole + other * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        REQUIRE(all != MAP_FAILED);
        std::byte* const own = static_cast<std::byte*>(all) + hole;
        ::munmap(all, hole);
        {
            const Segment segment = Segment::create(bytes);
            CHECK(segment.data()[bytes - 1] == std::byte{0});
        }
        unsigned char resident[other];
        CHECK(::mincore(own, other * page, resident) == 0);  // ENOMEM if a page is mapped no longer
        ::munmap(own, other * page);
    }
}

TEST_CASE("Segment: signals do not keep memory from being reserved") {
    const Segment segment = Segment::create(256 * Segment::huge_page, 0s);
    std::signal(SIGALRM, [](int) {});
    const auto every = [](int microseconds) {
        const itimerval interval{{0, microseconds}, {0, microseconds}};
        ::setitimer(ITIMER_REAL, &interval, nullptr);
    };
    every(5000);
    CHECK_NOTHROW(segment.reserve());
    every(0);
    std::signal(SIGALRM, SIG_DFL);
}
