// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

/// @file
/// Keeps a forked child from using the objects that it has copied: their connections and shared
/// memory belong to the parent.

namespace gradsync::inline v0_2::detail {

/// One bit per descriptor: set if children must not keep it. While a child has a socket, the other end does not learn
/// that the parent died.
inline std::atomic<std::uint64_t> not_for_children[1024];

inline std::atomic<pid_t>& this_process() noexcept;

/// Runs in a new child. Replaces the descriptors by /dev/null instead of closing them, because copied objects may close
/// them later. Clears the bits, because the child may reuse the numbers for descriptors that its own children keep.
[[gnu::cold]] inline void leave_parent() noexcept {
    this_process().store(::getpid(), std::memory_order_relaxed);
    const int nothing = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
    for (int word = 0; word < 1024; ++word) {
        std::uint64_t bits = not_for_children[word].exchange(0, std::memory_order_relaxed);
        for (int i = 64 * word; bits != 0; ++i, bits >>= 1)
            if ((bits & 1) != 0) static_cast<void>(nothing < 0 ? ::close(i) : ::dup3(nothing, i, O_CLOEXEC));
    }
    if (nothing >= 0) ::close(nothing);
}

/// The process id, without a system call.
inline std::atomic<pid_t>& this_process() noexcept {
    static std::atomic<pid_t> number{(::pthread_atfork(nullptr, nullptr, leave_parent), ::getpid())};
    return number;
}

/// The process that made an object.
class Maker {
public:
    bool is_here() const noexcept { return number_ == this_process().load(std::memory_order_relaxed); }
    pid_t number() const noexcept { return number_; }

private:
    pid_t number_ = this_process().load(std::memory_order_relaxed);
};

/// Makes forked children close a descriptor, until `close_descriptor`. Returns it. Ignores negative ones.
[[gnu::cold]] inline int keep_from_children(int descriptor) noexcept {
    this_process();
    if (descriptor >= 0 && descriptor < 64 * 1024)
        not_for_children[descriptor / 64].fetch_or(std::uint64_t{1} << descriptor % 64, std::memory_order_relaxed);
    return descriptor;
}
[[gnu::cold]] inline void close_descriptor(int descriptor) noexcept {
    if (descriptor < 64 * 1024)
        not_for_children[descriptor / 64].fetch_and(~(std::uint64_t{1} << descriptor % 64), std::memory_order_relaxed);
    ::close(descriptor);
}

}  // namespace gradsync::inline v0_2::detail
