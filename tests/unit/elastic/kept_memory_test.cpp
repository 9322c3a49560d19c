// SPDX-License-Identifier: BSL-1.0
#include <gradsync/elastic/kept_memory.hpp>

#include <doctest/doctest.h>

#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <system_error>
#include <vector>

#include "support/forked.hpp"
#include "support/random.hpp"

using gradsync::List;
using namespace gradsync::elastic;

namespace {

std::byte byte_of(std::uint64_t step, std::size_t i) { return static_cast<std::byte>(step * 37 + i * 11); }

/// A state in three pieces, as it is after a step.
struct State {
    std::vector<std::byte> first = std::vector<std::byte>(40), second = std::vector<std::byte>(3), third = std::vector<std::byte>(77);

    static constexpr std::size_t bytes = 120;
    List<Piece> pieces() { return {{first.data(), 40, 0}, {second.data(), 3, 40}, {third.data(), 77, 43}}; }
    void set(std::uint64_t step) {
        std::size_t i = 0;
        for (const Piece& piece : pieces())
            for (std::size_t k = 0; k < piece.bytes; ++k) piece.data[k] = byte_of(step, i++);
    }
    bool is(std::uint64_t step) {
        std::size_t i = 0;
        bool same = true;
        for (const Piece& piece : pieces())
            for (std::size_t k = 0; k < piece.bytes; ++k) same = same && piece.data[k] == byte_of(step, i++);
        return same;
    }
};

}  // namespace

TEST_CASE("a part of pieces is that of their bytes side by side") {
    gradsync_test::Random random(7);
    for (int round = 0; round < 300; ++round) {
        std::vector<std::byte> all(200);
        for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::byte>(i);
        List<Piece> pieces;
        std::size_t bytes = 0;
        while (pieces.size() < 6) {
            const std::size_t next = random.below(30);
            pieces.push_back({all.data() + bytes, next, bytes});
            bytes += next;
        }
        const std::size_t first = random.below(bytes + 1), count = random.below(bytes - first + 1);
        std::size_t at = first;
        bool same = true;
        for (const Piece& piece : part_of(pieces, first, count)) {
            same = same && piece.bytes != 0 && piece.data == all.data() + at && piece.first == at - first;
            at += piece.bytes;
        }
        CHECK(same);
        CHECK(at == first + count);
    }
}

TEST_CASE("two states are kept, and the older one is overwritten") {
    KeptMemory memory = KeptMemory::make(State::bytes, 5);
    const KeptMemory other = KeptMemory::open(memory.handle());
    CHECK(other.is_for(State::bytes, 5));
    CHECK(!other.is_for(State::bytes, 6));
    CHECK(!other.is_for(State::bytes + 1, 5));
    CHECK(other.newest() == 0);
    State state, read;
    for (std::uint64_t step = 1; step < 10; ++step) {
        state.set(step);
        memory.write(step, state.pieces());
        CHECK(other.newest() == step);
        CHECK(other.slot_of(step + 1) == -1);
        for (std::uint64_t kept = step == 1 ? step : step - 1; kept <= step; ++kept) {
            REQUIRE(other.slot_of(kept) >= 0);
            other.read(other.slot_of(kept), read.pieces());
            CHECK(read.is(kept));
        }
    }
    memory.forget(memory.slot_of(9));  // the next state goes there
    CHECK(other.newest() == 8);
    memory.write(9, state.pieces());
    CHECK(other.slot_of(8) >= 0);
}

TEST_CASE("more memory than there is gives an error that names both") {
    CHECK_THROWS_WITH_AS((void)KeptMemory::make(std::numeric_limits<std::size_t>::max() / 8, 0),
                         doctest::Contains("bytes needs more than the"), std::system_error);
}

TEST_CASE("wherever the writer is killed, the state before or the new one is whole") {
    gradsync_test::await_end_of_threads(0);
    KeptMemory memory = KeptMemory::make(State::bytes, 0);
    State state;
    for (const std::uint64_t step : {std::uint64_t{1}, std::uint64_t{2}}) {
        state.set(step);
        memory.write(step, state.pieces());
    }
    std::fflush(nullptr);
    const pid_t child = ::fork();
    if (child == 0) {
        const List<Piece> pieces = state.pieces();
        if (::ptrace(PTRACE_TRACEME, 0, nullptr, nullptr) != 0) ::_exit(2);
        ::raise(SIGSTOP);
        for (std::uint64_t step = 3; step <= 5; ++step) {
            state.set(step);
            memory.write(step, pieces);
        }
        ::_exit(0);
    }
    int status = 0;
    ::waitpid(child, &status, 0);
    if (WIFEXITED(status)) {
        MESSAGE("this system lets no process watch another: nothing is tested here");
        return;
    }
    // A process that is killed leaves the memory as it is between two of its instructions.
    std::size_t instructions = 0, wrong = 0, changes = 0;
    std::uint64_t newest = 2;
    State read;
    for (; !WIFEXITED(status) && instructions < 10'000'000; ++instructions) {
        bool has_one_before = false;
        for (const int slot : {0, 1}) {
            const std::uint64_t step = memory.step(slot);
            if (step == 0) continue;
            memory.read(slot, read.pieces());
            wrong += !read.is(step);
            has_one_before = has_one_before || step >= newest;
        }
        wrong += !has_one_before;
        changes += memory.newest() > newest;
        newest = std::max(newest, memory.newest());
        ::ptrace(PTRACE_SINGLESTEP, child, nullptr, nullptr);
        if (::waitpid(child, &status, 0) != child) break;
    }
    CHECK(WIFEXITED(status));
    CHECK(instructions > 500);
    CHECK(changes == 3);
    CHECK(wrong == 0);
    CHECK(memory.newest() == 5);
}
