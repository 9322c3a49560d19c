// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstring>
#include <new>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace gradsync::inline v0_2::kernel {

/// Owned host memory: zeroed, aligned to 64 bytes, or to 2 MiB and backed by huge pages where it is large
/// (a pass over many ranks' buffers misses the TLB otherwise).
class HostBuffer {
public:
    HostBuffer() = default;

    /// Throws std::bad_alloc.
    explicit HostBuffer(std::size_t bytes) : bytes_(bytes) {
        if (bytes == 0) return;
        constexpr std::size_t huge_page = std::size_t{2} << 20;
        alignment_ = bytes >= 2 * huge_page ? huge_page : 64;
        data_ = ::operator new(bytes, std::align_val_t{alignment_});
#if defined(__linux__)
        if (alignment_ == huge_page) ::madvise(data_, bytes / huge_page * huge_page, MADV_HUGEPAGE);  // a hint only
#endif
        std::memset(data_, 0, bytes);
    }

    HostBuffer(HostBuffer&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)), alignment_(other.alignment_) {}
    HostBuffer& operator=(HostBuffer&& other) noexcept {
        HostBuffer(std::move(other)).swap(*this);
        return *this;
    }
    ~HostBuffer() {
        if (data_) ::operator delete(data_, std::align_val_t{alignment_});
    }

    void* data() const noexcept { return data_; }
    std::size_t bytes() const noexcept { return bytes_; }

    void swap(HostBuffer& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(bytes_, other.bytes_);
        std::swap(alignment_, other.alignment_);
    }

private:
    void* data_ = nullptr;
    std::size_t bytes_ = 0;
    std::size_t alignment_ = 64;
};

}  // namespace gradsync::inline v0_2::kernel
