// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <doctest/doctest.h>
#include <algorithm>

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <gradsync/core/backend.hpp>
#include <gradsync/core/error.hpp>

#include "support/slow_build.hpp"

namespace gradsync_test {

using namespace std::chrono_literals;

/// How the suite runs a function on the ranks of a backend. A model has
///
/// - `Backend`: the type under test. `Memory`: a buffer in the memory that it reads (`HostMemory`, or alike).
/// - `largest`: the largest world that it can make; the suite runs at those of `sizes_here` up to that.
/// - `one_order`: whether sums have the bits of the tree over the ranks (core/math.hpp); else they are compared with a tolerance, those of 8-bit
///   types with inputs for which they are the same in any order.
/// - `run(size, limit, f)`: makes a new communicator of `size` ranks whose waits are limited to `limit`, runs
///   `f(Backend)` on each of them and returns when all have returned. An exception that leaves `f` ends the
///   communicator on all ranks and leaves `run` too, at least where that rank was run. Ranks in other processes:
///   a process that is no member returns at once.
/// - `here(rank)`: whether `run` runs that rank in this process.
template <class L>
concept Launcher = gradsync::Backend<typename L::Backend> && requires(int size, std::chrono::nanoseconds limit) {
    { L::largest } -> std::convertible_to<int>;
    { L::one_order } -> std::convertible_to<bool>;
    { L::here(size) } -> std::same_as<bool>;
    L::run(size, limit, [](typename L::Backend) {});
    requires std::constructible_from<typename L::Memory, std::vector<std::byte>>;
};

/// A buffer on the host. A model in other memory: a constructor from the first content, its address, its content now.
class HostMemory {
public:
    explicit HostMemory(std::vector<std::byte> bytes) : bytes_(std::move(bytes)) {}
    std::byte* data() noexcept { return bytes_.data(); }
    const std::vector<std::byte>& read() const noexcept { return bytes_; }

private:
    std::vector<std::byte> bytes_;
};

/// What the ranks found wrong. Ranks may be threads, so nothing of doctest is called on them: their findings come
/// out when the run is over, on the thread of the test. A few are enough.
class Findings {
public:
    void check(bool good, const std::string& what) {
        if (good) return;
        const std::lock_guard lock(mutex_);
        if (++count_ <= 5) texts_.push_back(what);
    }

    ~Findings() {
        CHECK_MESSAGE(count_ == 0, count_, " findings");
        for (const std::string& text : texts_) FAIL_CHECK(text);
    }

private:
    std::mutex mutex_;
    std::vector<std::string> texts_;
    int count_ = 0;
};

/// How often a case is repeated that makes a new world each time. A program whose worlds take a second each sets it to 1.
inline int repetitions = slow_build ? 8 : 40;

/// Loops over very many cases run every `thinning`-th. A program with slow collectives sets it higher.
inline std::size_t thinning = slow_build ? 3 : 1;

/// The sizes of the worlds that this program runs the suite at.
struct Sizes {
    int from = 1, to = slow_build ? 3 : 4;
};
inline Sizes sizes_here;

/// The limit of waits that are not meant to reach it, and of those that are.
inline constexpr auto ample = 60s;
inline constexpr auto scant = 300ms;

inline std::vector<int> sizes_up_to(int largest, int least = 1) {
    std::vector<int> sizes;
    for (int size = std::max(least, sizes_here.from); size <= std::min(largest, sizes_here.to); ++size) sizes.push_back(size);
    return sizes;
}

/// Runs `f(backend, findings)` on the ranks of a new world of each size, nothing being meant to reach a time limit.
template <Launcher L, class F>
void each_world(F&& f) {
    for (const int size : sizes_up_to(L::largest)) {
        Findings findings;
        L::run(size, ample, [&](typename L::Backend backend) {
            findings.check(backend.size() == size, "size() is " + std::to_string(backend.size()) + ", not " + std::to_string(size));
            f(backend, findings);
        });
    }
}

inline std::string at(int rank, int size) { return "rank " + std::to_string(rank) + " of " + std::to_string(size) + ": "; }

/// The gradsync::Error that `f` throws, or null. Whatever else it throws passes through.
template <class F>
std::unique_ptr<gradsync::Error> error_of(F&& f) {
    try {
        f();
        return nullptr;
    } catch (const gradsync::Error& error) {
        return std::make_unique<gradsync::Error>(error);
    }
}

inline bool mentions(const gradsync::Error& error, const std::string& words) {
    return std::string(error.what()).find(words) != std::string::npos;
}

/// Checks that `f` throws an Error with this code, blaming this peer (-1: any), with all these words.
template <class F>
void expect_error(Findings& findings, const std::string& where, gradsync::Errc code, int peer, const std::vector<std::string>& words,
                  F&& f) {
    const auto error = error_of(f);
    if (!error) return findings.check(false, where + "nothing was thrown");
    findings.check(error->errc() == code, where + "another code: " + error->what());
    findings.check(peer < 0 || error->context().peer == peer,
                   where + "blames rank " + std::to_string(error->context().peer) + ": " + error->what());
    for (const std::string& word : words) findings.check(mentions(*error, word), where + "no \"" + word + "\" in: " + error->what());
}

}  // namespace gradsync_test
