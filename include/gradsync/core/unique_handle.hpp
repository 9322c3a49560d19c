// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <utility>

namespace gradsync::inline v0_2 {

/// Owns an object of a C library by its handle. `close` is the function that releases the object; it must not throw.
/// `none` is the empty handle.
template <class Handle, auto close, Handle none = Handle{}>
class UniqueHandle {
public:
    UniqueHandle() = default;
    explicit UniqueHandle(Handle handle) noexcept : handle_(handle) {}
    UniqueHandle(UniqueHandle&& other) noexcept : handle_(other.release()) {}
    UniqueHandle& operator=(UniqueHandle other) noexcept {
        std::swap(handle_, other.handle_);
        return *this;
    }
    ~UniqueHandle() {
        if (*this) close(handle_);
    }

    Handle get() const noexcept { return handle_; }
    explicit operator bool() const noexcept { return handle_ != none; }
    [[nodiscard]] Handle release() noexcept { return std::exchange(handle_, none); }

private:
    Handle handle_ = none;
};

}  // namespace gradsync::inline v0_2
