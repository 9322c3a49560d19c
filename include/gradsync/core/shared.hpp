// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <concepts>
#include <cstddef>
#include <utility>

#include "forked.hpp"

namespace gradsync::inline v0_2::detail {

/// Counts the owners of an object, which is in a derived class. The last owner deletes it, except in a forked child:
/// there its destructor would leave the job in the parent's name, or wait for locks and threads
/// that the child does not have.
class SharedCount {
public:
    virtual ~SharedCount() = default;
    void add() noexcept { owners_.fetch_add(1, std::memory_order_relaxed); }
    [[gnu::noinline]] void drop() noexcept {
        if (owners_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
        if (maker_.is_here()) delete this;
        else next_copied_ = copied_.exchange(this);
    }
    const Maker& maker() const noexcept { return maker_; }

private:
    std::atomic<std::uint32_t> owners_{1};
    Maker maker_;
    SharedCount* next_copied_ = nullptr;
    static inline std::atomic<SharedCount*> copied_{nullptr};  ///< those of a forked child, linked for leak checkers
};

template <class T>
struct SharedObject final : SharedCount {
    template <class... Args>
    explicit SharedObject(Args&&... args) : object(std::forward<Args>(args)...) {}
    T object;
};

/// A std::shared_ptr with only the functions that this library uses. It compiles faster, because std::shared_ptr has
/// ninety functions per type, and it is safe in a forked child.
template <class T>
class Shared {
public:
    Shared() = default;
    /// Makes an object of `args`.
    template <class... Args>
    static Shared make(Args&&... args) {
        auto* const made = new SharedObject<T>(std::forward<Args>(args)...);
        return Shared(&made->object, made);
    }
    /// Owns `object`; the last owner calls `release(object)`.
    template <class Release>
    static Shared of(T* object, Release release) {
        struct Released final : SharedCount {
            Released(T* what, Release&& how) : object(what), release(std::move(how)) {}
            ~Released() override { release(object); }
            T* object;
            Release release;
        };
        return Shared(object, static_cast<SharedCount*>(new Released(object, std::move(release))));
    }
    /// Points to `object`, and shares the ownership of `owner`.
    template <class U>
    Shared(const Shared<U>& owner, T* object) noexcept : Shared(object, owner.count_) {
        if (count_ != nullptr) count_->add();
    }
    template <class U>
        requires std::convertible_to<U*, T*>
    Shared(const Shared<U>& other) noexcept : Shared(other, other.get()) {}
    /// Shares the ownership of a std::shared_ptr.
    template <class Pointer>
        requires requires(const Pointer& pointer) {
            pointer.use_count();
            { pointer.get() } -> std::convertible_to<T*>;
        }
    Shared(Pointer pointer) : object_(pointer.get()) {
        if (object_ != nullptr) count_ = new SharedObject<Pointer>(std::move(pointer));
    }
    Shared(const Shared& other) noexcept : Shared(other, other.object_) {}
    Shared(Shared&& other) noexcept { swap(other); }
    Shared& operator=(Shared other) noexcept {
        swap(other);
        return *this;
    }
    ~Shared() {
        if (count_ != nullptr) count_->drop();
    }

    T* get() const noexcept { return object_; }
    T* data() const noexcept { return object_; }  ///< for memory
    T* operator->() const noexcept { return object_; }
    auto& operator*() const noexcept { return *object_; }
    explicit operator bool() const noexcept { return object_ != nullptr; }
    /// The same object as a `Derived`, which it must be.
    template <class Derived>
    Shared<Derived> as() const noexcept {
        return Shared<Derived>(*this, static_cast<Derived*>(object_));
    }
    void reset() noexcept { *this = Shared(); }
    /// The process that made the object. There must be an object.
    const Maker& maker() const noexcept { return count_->maker(); }
    void swap(Shared& other) noexcept {
        std::swap(object_, other.object_);
        std::swap(count_, other.count_);
    }

private:
    template <class>
    friend class Shared;

    Shared(T* object, SharedCount* count) noexcept : object_(object), count_(count) {}

    T* object_ = nullptr;
    SharedCount* count_ = nullptr;
};

/// Keeps memory alive until the process ends, because a message may still be written into it. Takes no lock: a forked
/// child may call it.
[[gnu::cold]] inline void leak_until_exit(Shared<void> what) {
    struct Kept {
        Shared<void> what;
        Kept* next;
    };
    static std::atomic<Kept*> last{nullptr};
    auto* const kept = new Kept{std::move(what), last.load()};
    while (!last.compare_exchange_weak(kept->next, kept)) {
    }
}

}  // namespace gradsync::inline v0_2::detail
