// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gradsync/backend/tcp.hpp>
#include <gradsync/bootstrap/socket.hpp>
#include <gradsync/bootstrap/tcp_rendezvous.hpp>

#include "buffers.hpp"
#include "collectives.hpp"
#include "contest.hpp"

namespace bench {

/// A port that nobody listened at a moment ago.
inline std::uint16_t free_port() {
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return gradsync::net::address_of(gradsync::net::listen({reinterpret_cast<const sockaddr*>(&name), sizeof name}, 1)).port();
}

/// TcpBackend by messages on the loopback interface, the ranks threads of this process as Gloo's are. Each works on memory that the backend
/// has made, as a Reducer's buckets are, and not on the contest's.
class TcpCollective final : public Contestant {
public:
    TcpCollective(const std::string& collective, gradsync::DType dtype, int ranks, std::size_t bytes)
        : dtype_(dtype), bytes_(bytes), ranks_(static_cast<std::size_t>(ranks)) {
        const std::uint16_t port = free_port();
        std::vector<std::thread> threads;
        for (std::size_t r = 0; r < ranks_.size(); ++r)
            threads.emplace_back([&, r] {
                gradsync::TcpRendezvous rendezvous({.rank = static_cast<int>(r), .size = ranks, .port = port});
                gradsync::TcpBackend comm(rendezvous, {.shared_memory = false});
                Rank& rank = ranks_[r];
                rank.memory = comm.allocate(bytes);
                rank.rank.emplace(collective, dtype, std::move(comm), rank.memory.data(), bytes);
            });
        for (std::thread& thread : threads) thread.join();
    }

    void meet(int rank) override { at(rank).rank->meet(); }
    double run(int rank, int times) override {
        return time([&] { at(rank).rank->run(times); });
    }

    /// Throws where an all-reduce has another result than the sum.
    void check_sum() {
        std::vector<std::thread> threads;
        for (std::size_t r = 0; r < ranks_.size(); ++r)
            threads.emplace_back([this, r] {
                fill(ranks_[r].memory.data(), bytes_, dtype_, static_cast<float>(r + 1));
                ranks_[r].rank->run(1);
            });
        for (std::thread& thread : threads) thread.join();
        for (Rank& rank : ranks_) {
            check_filled(rank.memory.data(), bytes_, dtype_, sum_of_ranks(static_cast<int>(ranks_.size())), "tcp_messages");
            fill(rank.memory.data(), bytes_, dtype_, 0);
        }
    }

private:
    struct Rank {
        gradsync::collective::Memory memory;
        std::optional<RankOfCollective<gradsync::TcpBackend>> rank;
    };
    Rank& at(int rank) { return ranks_[static_cast<std::size_t>(rank)]; }

    gradsync::DType dtype_;
    std::size_t bytes_;
    std::vector<Rank> ranks_;
};

}  // namespace bench
