// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <bit>
#include <cstdint>

#include "../core/list.hpp"

namespace gradsync::inline v0_2::collective {

/// The collectives that one rank has started and not finished yet, in a ring. Entries have consecutive numbers, counted
/// from 0. They are added at the end and leave at the front: all below `first()` are over.
///
/// A place in the ring keeps its contents when its entry leaves, so that the next entry can reuse its memory. A full
/// ring grows, which moves the entries and invalidates references. Not thread-safe.
template <class Started>
class InFlight {
public:
    /// `capacity`: the number of entries that fit before the ring must grow.
    explicit InFlight(std::size_t capacity = 8) : places_(std::bit_ceil(capacity)) {}

    std::uint64_t first() const noexcept { return first_; }
    std::uint64_t next() const noexcept { return next_; }  ///< number of the next entry
    std::size_t size() const noexcept { return next_ - first_; }
    bool empty() const noexcept { return first_ == next_; }
    bool is_over(std::uint64_t n) const noexcept { return n < first_; }

    Started& operator[](std::uint64_t n) noexcept { return places_[index(n)]; }
    const Started& operator[](std::uint64_t n) const noexcept { return places_[index(n)]; }
    Started& oldest() noexcept { return (*this)[first_]; }

    /// Adds an entry, which `begin(place, number)` fills in, and returns its number.
    /// If `begin` throws, nothing is added.
    template <class Begin>
    std::uint64_t add(Begin&& begin) {
        if (size() == places_.size()) grow();
        begin((*this)[next_], next_);
        return next_++;
    }

    void push(Started entry) {
        add([&](Started& place, std::uint64_t) { place = std::move(entry); });
    }
    void pop() noexcept { ++first_; }

    /// Removes all entries for which `gone(entry)` is true. Later ones get lower numbers.
    template <class Gone>
    void erase_if(Gone&& gone) {
        std::uint64_t kept = first_;
        for (std::uint64_t n = first_; n != next_; ++n)
            if (!gone((*this)[n])) std::swap((*this)[kept++], (*this)[n]);
        next_ = kept;
    }

    /// Removes entries from the front while `over(entry)` is true.
    template <class Over>
    void retire(Over&& over) {
        while (!empty() && over(oldest())) ++first_;
    }

private:
    std::size_t index(std::uint64_t n) const noexcept { return n & (places_.size() - 1); }

    void grow() {
        InFlight larger(2 * places_.size());
        for (std::uint64_t n = first_; n != next_; ++n) larger[n] = std::move((*this)[n]);
        places_ = std::move(larger.places_);
    }

    List<Started> places_;  ///< entry n is at n modulo the size, a power of two
    std::uint64_t first_ = 0, next_ = 0;
};

}  // namespace gradsync::inline v0_2::collective
