// SPDX-License-Identifier: BSL-1.0
// ctest: NOT_WITH thread
#include <gradsync/kernel/host_buffer.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <utility>

using gradsync::kernel::HostBuffer;

namespace {

constexpr std::size_t huge_page = std::size_t{2} << 20;

bool is_aligned(const HostBuffer& buffer, std::size_t alignment) {
    return reinterpret_cast<std::uintptr_t>(buffer.data()) % alignment == 0;
}

bool is_filled_with(const HostBuffer& buffer, std::byte value) {
    const std::span bytes(static_cast<const std::byte*>(buffer.data()), buffer.bytes());
    return std::all_of(bytes.begin(), bytes.end(), [=](std::byte b) { return b == value; });
}

}  // namespace

static_assert(!std::is_copy_constructible_v<HostBuffer> && !std::is_copy_assignable_v<HostBuffer>);
static_assert(std::is_nothrow_move_constructible_v<HostBuffer> && std::is_nothrow_move_assignable_v<HostBuffer>);

TEST_CASE("HostBuffer is zeroed and aligned, also if the memory was used before") {
    constexpr std::size_t sizes[] = {1, 63, 4096, 2 * huge_page - 1, 2 * huge_page, 2 * huge_page + 4097};
    for (const std::size_t bytes : sizes)
        for (int round = 0; round < 3; ++round) {
            const HostBuffer buffer(bytes);
            CHECK(buffer.bytes() == bytes);
            CHECK(is_aligned(buffer, bytes >= 2 * huge_page ? huge_page : 64));
            CHECK(is_filled_with(buffer, std::byte{0}));
            std::memset(buffer.data(), 0xff, bytes);
        }
}

TEST_CASE("HostBuffer of no bytes has no memory") {
    CHECK(HostBuffer().data() == nullptr);
    CHECK(HostBuffer().bytes() == 0);
    CHECK(HostBuffer(0).data() == nullptr);
}

TEST_CASE("HostBuffer: moves take the memory along and leave nothing behind") {
    HostBuffer small(100), large(2 * huge_page);
    void* const small_data = small.data();
    void* const large_data = large.data();

    HostBuffer taken(std::move(small));
    CHECK(taken.data() == small_data);
    CHECK(taken.bytes() == 100);
    CHECK(small.data() == nullptr);
    CHECK(small.bytes() == 0);

    taken = std::move(large);  // of another alignment; frees the small one
    CHECK(taken.data() == large_data);
    CHECK(taken.bytes() == 2 * huge_page);
    CHECK(large.data() == nullptr);

    HostBuffer& same = taken;
    taken = std::move(same);
    CHECK(taken.data() == large_data);

    HostBuffer other(7);
    void* const other_data = other.data();
    std::swap(taken, other);
    CHECK(taken.data() == other_data);
    CHECK(other.bytes() == 2 * huge_page);
}
