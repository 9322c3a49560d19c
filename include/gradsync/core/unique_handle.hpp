// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <utility>

namespace gradsync::inline v0_2 {

/// Owns an object of a C library by its handle. Traits have `Handle`, a type that can be compared and copied; `none`, the empty handle; and
/// `close(handle)`, which must not throw.
template <class Traits>
class UniqueHandle {
public:
    using Handle = typename Traits::Handle;

    UniqueHandle() = default;
    explicit UniqueHandle(Handle handle) noexcept : handle_(handle) {}
    UniqueHandle(UniqueHandle&& other) noexcept : handle_(other.release()) {}
    UniqueHandle& operator=(UniqueHandle&& other) noexcept {
        UniqueHandle(std::move(other)).swap(*this);
        return *this;
    }
    ~UniqueHandle() {
        if (*this) Traits::close(handle_);
    }

    Handle get() const noexcept { return handle_; }
    explicit operator bool() const noexcept { return handle_ != Traits::none; }
    [[nodiscard]] Handle release() noexcept { return std::exchange(handle_, Traits::none); }
    void swap(UniqueHandle& other) noexcept { std::swap(handle_, other.handle_); }

private:
    Handle handle_ = Traits::none;
};

}  // namespace gradsync::inline v0_2
