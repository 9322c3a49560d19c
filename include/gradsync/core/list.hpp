// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <initializer_list>
#include <type_traits>
#include <utility>

namespace gradsync::inline v0_2 {

/// A std::span with only the functions that this library uses; each converts to the other.
/// It compiles faster per element type, because it needs no iterator concepts. Functions that users call or write have
/// std::span in their signatures.
template <class T>
class ListView {
public:
    using value_type = std::remove_cv_t<T>;

    constexpr ListView() = default;
    constexpr ListView(T* first, std::size_t size) noexcept : data_(first), size_(size) {}
    template <std::size_t n>
    constexpr ListView(T (&elements)[n]) noexcept : data_(elements), size_(n) {}
    template <class R>
        requires requires(R& range, T*& data) {
            data = range.data(), range.size();
            // A range of a derived class has other strides.
            requires std::is_same_v<std::remove_cvref_t<decltype(*range.data())>, value_type>;
        }
    constexpr ListView(R&& range) noexcept : data_(range.data()), size_(range.size()) {}

    constexpr std::size_t size() const noexcept { return size_; }
    constexpr bool empty() const noexcept { return size_ == 0; }
    constexpr T* data() const noexcept { return data_; }
    constexpr T* begin() const noexcept { return data_; }
    constexpr T* end() const noexcept { return data_ + size_; }
    constexpr T& operator[](std::integral auto i) const noexcept { return data_[i]; }  ///< `i`: a rank, too
    constexpr ListView first(std::size_t size) const noexcept { return {data_, size}; }

private:
    T* data_ = nullptr;
    std::size_t size_ = 0;
};

/// A std::vector with only the functions that this library uses. Elements must be default-constructible, and movable if
/// the list grows. It compiles faster: a std::vector has about fifty functions per element type. A list is a contiguous
/// range, and converts to ListView and std::span.
template <class T>
class List {
public:
    using value_type = T;

    List() = default;
    /// `size` elements that are T().
    [[gnu::noinline]] explicit List(std::size_t size)
        : data_(size == 0 ? nullptr : make(size)), size_(size), capacity_(size) {
        if constexpr (plain) fill(T());
    }
    List(std::size_t size, const T& value) : List(size) { fill(value); }
    List(std::initializer_list<T> elements) : List(elements.size()) { copy(elements.begin()); }
    explicit List(ListView<const T> elements) : List(elements.size()) { copy(elements.data()); }
    List(const List& other) : List(other.size_) { copy(other.data_); }
    List(List&& other) noexcept { swap(other); }
    List& operator=(const List& other) {
        resize(other.size_);  // no allocation if there is room
        copy(other.data_);
        return *this;
    }
    List& operator=(List&& other) noexcept {
        List(std::move(other)).swap(*this);
        return *this;
    }
    ~List() { destroy(data_); }

    std::size_t size() const noexcept { return size_; }
    bool empty() const noexcept { return size_ == 0; }
    std::size_t capacity() const noexcept { return capacity_; }
    T* data() noexcept { return data_; }
    const T* data() const noexcept { return data_; }
    T* begin() noexcept { return data_; }
    const T* begin() const noexcept { return data_; }
    T* end() noexcept { return data_ + size_; }
    const T* end() const noexcept { return data_ + size_; }
    T& operator[](std::integral auto i) noexcept { return data_[i]; }
    const T& operator[](std::integral auto i) const noexcept { return data_[i]; }
    T& front() noexcept { return data_[0]; }
    const T& front() const noexcept { return data_[0]; }
    T& back() noexcept { return data_[size_ - 1]; }
    const T& back() const noexcept { return data_[size_ - 1]; }

    void push_back(T element) {
        if (size_ == capacity_) grow(2 * size_ + 4);
        data_[size_++] = std::move(element);
    }
    /// New elements are T(). Dropped elements release what they own; the list keeps its memory.
    [[gnu::noinline]] void resize(std::size_t size) {
        if (size > capacity_) grow(size > 2 * size_ ? size : 2 * size_);
        const std::size_t end = size > size_ || plain ? size : size_;
        std::size_t i = size < size_ ? size : size_;
        if constexpr (bytes) set_bytes(i, end, T());
        else
            for (; i < end; ++i) data_[i] = T();
        size_ = size;
    }
    void clear() { resize(0); }
    void pop_back() { resize(size_ - 1); }
    template <class Predicate>
    void erase_if(Predicate&& gone) {
        std::size_t kept = 0;
        for (std::size_t i = 0; i < size_; ++i)
            if (!gone(data_[i])) {
                if (i != kept) data_[kept] = std::move(data_[i]);
                ++kept;
            }
        resize(kept);
    }
    void reserve(std::size_t capacity) {
        if (capacity > capacity_) grow(capacity > 2 * size_ ? capacity : 2 * size_);
    }
    void fill(const T& value) {
        if constexpr (bytes) set_bytes(0, size_, value);
        else
            for (T& element : *this) element = value;
    }

    friend bool operator==(const List& a, const List& b) {
        std::size_t i = 0;
        while (i < a.size_ && i < b.size_ && a[i] == b[i]) ++i;
        return i == a.size_ && i == b.size_;
    }

private:
    /// Elements that need no constructor and no destructor: memory for them takes less code.
    static constexpr bool plain =
        __is_trivially_copyable(T) && __is_trivially_assignable(T&, const T&) && alignof(T) <= 16;
    /// Memory is written at once, because loops over bytes take long in programs that are not optimised.
    static constexpr bool bytes = plain && sizeof(T) == 1;

    static T* make(std::size_t size) {
        if constexpr (plain) return static_cast<T*>(::operator new(size * sizeof(T)));
        else return new T[size]();
    }
    [[gnu::noinline]] static void destroy(T* data) noexcept {
        if constexpr (plain) ::operator delete(data);
        else delete[] data;
    }
    void set_bytes(std::size_t first, std::size_t last, T value) {
        if (last > first) __builtin_memset(data_ + first, __builtin_bit_cast(unsigned char, value), last - first);
    }
    void copy(const T* elements) {
        if constexpr (plain) copy_memory(data_, elements, size_);
        else
            for (std::size_t i = 0; i < size_; ++i) data_[i] = elements[i];
    }
    static void copy_memory(T* to, const T* from, std::size_t size) {
        if (size != 0) __builtin_memmove(static_cast<void*>(to), from, size * sizeof(T));
    }
    void swap(List& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        std::swap(capacity_, other.capacity_);
    }
    [[gnu::noinline]] void grow(std::size_t capacity) {
        T* const longer = make(capacity);
        if constexpr (plain) copy_memory(longer, data_, size_);
        else
            for (std::size_t i = 0; i < size_; ++i) longer[i] = std::move(data_[i]);
        destroy(std::exchange(data_, longer));
        capacity_ = capacity;
    }

    T* data_ = nullptr;
    std::size_t size_ = 0, capacity_ = 0;
};

}  // namespace gradsync::inline v0_2
