// SPDX-License-Identifier: BSL-1.0
#include <gradsync/collective/shared_memory/segment.hpp>

#include <doctest/doctest.h>

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>

using gradsync::shared_memory::Segment;

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
