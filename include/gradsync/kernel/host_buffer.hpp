// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <new>

namespace gradsync::inline v0_2::kernel {

/// Owned host memory: zeroed, and aligned to 64 bytes. Buffers of 4 MiB and more are aligned to 2 MiB and backed by huge pages,
/// because a pass over many ranks' buffers would miss the TLB otherwise.
class HostBuffer {
public:
    HostBuffer() = default;

    /// Throws std::bad_alloc.
    explicit HostBuffer(std::size_t bytes) {
        if (bytes == 0) return;
        constexpr std::size_t huge_page = std::size_t{2} << 20;
        const std::size_t alignment = bytes >= 2 * huge_page ? huge_page : 64;
        data_ = {::operator new(bytes, std::align_val_t{alignment}), Free{bytes, alignment}};
        if (alignment == huge_page) ::madvise(data(), bytes / huge_page * huge_page, MADV_HUGEPAGE);  // a hint only
        std::memset(data(), 0, bytes);
    }

    void* data() const noexcept { return data_.get(); }
    std::size_t bytes() const noexcept { return data_ ? data_.get_deleter().bytes : 0; }

private:
    struct Free {
        std::size_t bytes, alignment;
        void operator()(void* data) const noexcept { ::operator delete(data, std::align_val_t{alignment}); }
    };

    std::unique_ptr<void, Free> data_;
};

}  // namespace gradsync::inline v0_2::kernel
