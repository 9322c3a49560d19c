// SPDX-License-Identifier: BSL-1.0
#pragma once

/// What every rendezvous promises (the concept `gradsync::Rendezvous`), at 1 to 4 ranks. A new one needs a small file: a meeting, which
/// says how rank `rank` of `size` comes to it, and a test case for each way in which ranks run.
///
///     struct MyMeeting {
///         explicit MyMeeting(int size);                   // before the ranks
///         MyRendezvous join(int rank, std::chrono::nanoseconds limit);  // on each, at once
///     };

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <gradsync/bootstrap/rendezvous.hpp>

#include "support/forked.hpp"
#include "support/slow_build.hpp"

namespace gradsync_test {

inline gradsync::Blob some_bytes(std::size_t count, std::size_t seed) {
    constexpr std::size_t period = 2048;  // of the low 11 bits of i * 131
    gradsync::Blob bytes(count);
    for (std::size_t i = 0; i < count && i < period; ++i) bytes[i] = static_cast<std::byte>((i * 131 + seed * 17) >> 3);
    for (std::size_t done = period; done < count; done += period) std::memcpy(&bytes[done], bytes.data(), std::min(period, count - done));
    return bytes;
}

/// What one rank finds wrong, or "".
template <gradsync::Rendezvous R>
std::string use_rendezvous(R& rendezvous, int rank, int size) {
    const std::string where = "rank " + std::to_string(rank) + " of " + std::to_string(size) + ": ";
    if (rendezvous.rank() != rank || rendezvous.size() != size) return where + "thinks that it is another";
    for (std::size_t round = 0; round < 20; ++round)
        for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{128}, std::size_t{5000} * round}) {
            // Of different lengths, also none.
            const auto length = [&](int r) { return count * static_cast<std::size_t>((r + 1) % 3) / 2; };
            const auto all = rendezvous.all_gather(some_bytes(length(rank), round + static_cast<std::size_t>(rank)));
            if (all.size() != static_cast<std::size_t>(size)) return where + "all_gather gave another number of them";
            for (int r = 0; r < size; ++r)
                if (all[static_cast<std::size_t>(r)] != some_bytes(length(r), round + static_cast<std::size_t>(r)))
                    return where + "all_gather gave something else";
        }
    if (rendezvous.all_gather(some_bytes(gradsync::largest_blob, 1))[0] != some_bytes(gradsync::largest_blob, 1))
        return where + "the largest did not arrive";
    try {
        (void)rendezvous.all_gather(some_bytes(gradsync::largest_blob + 1, 1));
        return where + "one that is too large was taken";
    } catch (const gradsync::Error& error) {
        if (error.errc() != gradsync::Errc::invalid_argument) return where + "another code: " + error.what();
    }
    struct Pair {
        int rank;
        double square;
    };
    const auto pairs = gradsync::bootstrap::exchange(rendezvous, Pair{rank, rank * 0.5});
    for (int r = 0; r < size; ++r)
        if (pairs[static_cast<std::size_t>(r)].rank != r || pairs[static_cast<std::size_t>(r)].square != r * 0.5)
            return where + "exchange gave something else";
    return {};
}

/// Runs `f(rank)`, which returns a string, on `size` threads.
template <class F>
std::vector<std::string> on_threads(int size, F&& f) {
    std::vector<std::string> texts(static_cast<std::size_t>(size));
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank)
        threads.emplace_back([&, rank] {
            try {
                texts[static_cast<std::size_t>(rank)] = f(rank);
            } catch (const std::exception& error) {
                texts[static_cast<std::size_t>(rank)] = std::string("exception: ") + error.what();
            }
        });
    for (std::thread& thread : threads) thread.join();
    return texts;
}

template <class Meeting>
void check_rendezvous() {
    using namespace std::chrono_literals;
    SUBCASE("threads") {
        for (const int size : rank_counts()) {
            Meeting meeting(size);
            for (const std::string& text : on_threads(size, [&](int rank) {
                     auto rendezvous = meeting.join(rank, 60s);
                     return use_rendezvous(rendezvous, rank, size);
                 }))
                CHECK(text == "");
        }
    }
    SUBCASE("processes") {
        for (const int size : rank_counts()) {
            Meeting meeting(size);
            for (const Report& report : forked(size, [&](int rank) {
                     auto rendezvous = meeting.join(rank, 60s);
                     return use_rendezvous(rendezvous, rank, size);
                 })) {
                CHECK(report.text == "");
                CHECK(report.clean);
            }
        }
    }
    SUBCASE("ranks that do not arrive are named, by rank 0 at least") {
        Meeting meeting(4);
        const auto texts = on_threads(4, [&](int rank) -> std::string {
            if (rank == 2 || rank == 3) return {};
            try {
                auto rendezvous = meeting.join(rank, 3s);  // enough for rank 1 to be there, also where it is slow
                (void)rendezvous.all_gather({});
                return "nothing was thrown";
            } catch (const gradsync::Error& error) {
                return error.errc() == gradsync::Errc::timeout || rank != 0 ? error.what() : std::string("another code: ") + error.what();
            }
        });
        CAPTURE(texts[0]);
        CAPTURE(texts[1]);
        CHECK(texts[0].find("ranks 2, 3 did not arrive") != std::string::npos);
        CHECK(texts[1].find("rank 1") != std::string::npos);
    }
    SUBCASE("a rank that is gone") {
        Meeting meeting(3);
        const auto texts = on_threads(3, [&](int rank) -> std::string {
            try {
                auto rendezvous = meeting.join(rank, 20s);
                (void)rendezvous.all_gather({});
                if (rank == 1) return {};
                (void)rendezvous.all_gather({});
                return "nothing was thrown";
            } catch (const gradsync::Error& error) {
                return error.what();
            }
        });
        CHECK(texts[1] == "");
        for (const int rank : {0, 2}) {
            CAPTURE(texts[static_cast<std::size_t>(rank)]);
            CHECK(texts[static_cast<std::size_t>(rank)].find("rank 1 ") != std::string::npos);
        }
    }
}

}  // namespace gradsync_test
