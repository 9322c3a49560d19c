// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <csignal>
#include <mutex>
#include <string>
#include <vector>

#include <gradsync/collective/messages/transport.hpp>
#include <gradsync/core/backend.hpp>
#include <gradsync/core/error.hpp>

#include "launcher.hpp"
#include "support/forked.hpp"

namespace gradsync_test {

/// For ranks that are processes: one is killed, and all others name it long before their time limit. `connect(rank, size)` makes the
/// backend of a process; what it throws is a finding.
template <class Connect>
void check_killed(Connect&& connect) {
    constexpr int size = 3, killed = 1;
    const auto reports = forked(size, [&](int rank) -> std::string {
        auto comm = connect(rank, size);
        comm.set_timeout(slow_build ? 10min : 2min);
        try {
            for (int step = 0; step < 2; ++step) {  // the first may be complete on the killed rank alone
                std::vector<float> data(100'000, 1);
                comm.all_reduce(gradsync::buffer(data), gradsync::ReduceOp::sum).wait();
                if (data[7] != size) return "a wrong sum";
                if (rank == killed) ::kill(::getpid(), SIGKILL);
            }
            return "nothing was thrown";
        } catch (const gradsync::Error& error) {
            return error.context().peer == killed && error.errc() == gradsync::Errc::peer_failed ? "told" : error.what();
        }
    });
    for (int rank = 0; rank < size; ++rank) {
        CAPTURE(rank);
        if (rank == killed) CHECK(reports[static_cast<std::size_t>(rank)].signal == SIGKILL);
        else CHECK(reports[static_cast<std::size_t>(rank)].text == "told");
    }
}

/// For a Transport between processes: one is killed, and the other one has lost it, once all that it sent is received. The backends' case
/// does not show it, because processes of one system see each other die. `make(rank, size)` makes the transport of a process.
template <class Make>
void check_lost(Make&& make) {
    constexpr int killed = 1;
    const auto reports = forked(2, [&](int rank) -> std::string {
        const auto transport = make(rank, 2);
        std::string word = rank == killed ? "last word" : std::string(9, ' ');
        const std::lock_guard lock(transport->mutex());
        auto ticket = rank == killed ? transport->send(1 - rank, 1, word.data(), word.size())
                                     : transport->receive(1 - rank, 1, word.data(), word.size());
        const auto until = std::chrono::steady_clock::now() + (slow_build ? 10min : 1min);
        while (!transport->finish_one(ticket) || (rank == killed ? !transport->arrived(0) : !transport->lost(killed))) {
            transport->poll();
            if (std::chrono::steady_clock::now() > until) return word + ", but no end of its sender";
        }
        if (rank == killed) ::kill(::getpid(), SIGKILL);
        return word;
    });
    CHECK(reports[0].text == "last word");
    CHECK(reports[killed].signal == SIGKILL);
}

}  // namespace gradsync_test
