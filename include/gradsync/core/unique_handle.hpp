// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <utility>

namespace gradsync::inline v0_2 {

/// Owns an object of a C library by its handle. `close` is the function that releases the object; it must not throw. `none` is the empty
/// handle.
template <class Handle, auto close, Handle none = Handle{}>
class UniqueHandle {
public:
    UniqueHandle() = default;
    explicit UniqueHandle(Handle handle) noexcept : handle_(handle) {}
    UniqueHandle(UniqueHandle&& other) noexcept : handle_(other.release()) {}
    UniqueHandle& operator=(UniqueHandle&& other) noexcept {
        UniqueHandle(std::move(other)).swap(*this);
        return *this;
    }
    ~UniqueHandle() {
        if (*this) close(handle_);
    }

    Handle get() const noexcept { return handle_; }
    explicit operator bool() const noexcept { return handle_ != none; }
    [[nodiscard]] Handle release() noexcept { return std::exchange(handle_, none); }
    void swap(UniqueHandle& other) noexcept { std::swap(handle_, other.handle_); }

private:
    Handle handle_ = none;
};

/// Owns an object of this library that is shared with nobody: a std::unique_ptr with only the functions that are used. That one compiles
/// fifty functions for each type.
template <class T>
class Owner {
public:
    Owner() = default;
    explicit Owner(T* object) noexcept : object_(object) {}
    Owner(Owner&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
    Owner& operator=(Owner other) noexcept {
        std::swap(object_, other.object_);
        return *this;
    }
    ~Owner() { delete object_; }

    T* operator->() const noexcept { return object_; }
    T& operator*() const noexcept { return *object_; }

private:
    T* object_ = nullptr;
};

}  // namespace gradsync::inline v0_2
