// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <sys/mman.h>

#include <cstring>
#include <new>

#include "../core/list.hpp"

namespace gradsync::inline v0_2::kernel {

/// Owned host memory: zeroed, and aligned to 64 bytes. Buffers of 4 MiB and more are aligned to 2 MiB and backed by
/// huge pages, because a pass over many ranks' buffers would miss the TLB otherwise.
class HostBuffer {
public:
    HostBuffer() = default;

    /// Throws std::bad_alloc.
    explicit HostBuffer(std::size_t bytes) {
        if (bytes == 0) return;
        data_ = ::operator new(bytes, alignment_of(bytes));
        bytes_ = bytes;
        if (bytes >= 2 * huge_page) ::madvise(data_, bytes / huge_page * huge_page, MADV_HUGEPAGE);  // a hint only
        std::memset(data_, 0, bytes);
    }
    HostBuffer(HostBuffer&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
    HostBuffer& operator=(HostBuffer other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        return *this;
    }
    ~HostBuffer() { ::operator delete(data_, alignment_of(bytes_)); }

    void* data() const noexcept { return data_; }
    std::size_t bytes() const noexcept { return bytes_; }
    std::size_t capacity() const noexcept { return bytes_; }  ///< for the interface of List

private:
    static constexpr std::size_t huge_page = std::size_t{2} << 20;

    static std::align_val_t alignment_of(std::size_t bytes) noexcept {
        return std::align_val_t{bytes >= 2 * huge_page ? huge_page : 64};
    }

    void* data_ = nullptr;
    std::size_t bytes_ = 0;
};

}  // namespace gradsync::inline v0_2::kernel
