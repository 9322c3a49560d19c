// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "../core/math.hpp"

namespace gradsync::inline v0_2::simulation {

/// Zeroed memory, aligned to at least 64 bytes. On Linux it takes no physical memory until it is written, so that thousands of ranks can
/// have buckets each.
class LazyMemory {
public:
    /// Throws std::bad_alloc.
    explicit LazyMemory(std::size_t bytes) : bytes_(bytes) {
        if (bytes == 0) return;
#if defined(__linux__)
        data_ = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (data_ == MAP_FAILED) data_ = nullptr;
#else
        data_ = std::aligned_alloc(64, gradsync::detail::in_lines(bytes));
        if (data_ != nullptr) std::memset(data_, 0, bytes);
#endif
        if (data_ == nullptr) throw std::bad_alloc();
    }
    LazyMemory(const LazyMemory&) = delete;
    LazyMemory& operator=(const LazyMemory&) = delete;
    ~LazyMemory() {
        if (data_ == nullptr) return;
#if defined(__linux__)
        ::munmap(data_, bytes_);
#else
        std::free(data_);
#endif
    }

    void* data() const noexcept { return data_; }
    std::size_t bytes() const noexcept { return bytes_; }

private:
    void* data_ = nullptr;
    std::size_t bytes_ = 0;
};

}  // namespace gradsync::inline v0_2::simulation
