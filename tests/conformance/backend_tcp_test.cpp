// SPDX-License-Identifier: BSL-1.0
// ctest: TIMEOUT 900 COST 45
#include <stdexcept>
#include <vector>

#include <gradsync/backend/tcp.hpp>
#include <gradsync/collective/messages/tcp_transport.hpp>

#include "conformance/backend.hpp"
#include "conformance/backend/killed.hpp"
#include "support/forked.hpp"
#include "support/ports.hpp"
#include "support/rank_threads.hpp"

using namespace std::chrono_literals;

namespace {

/// Ranks that are threads, by messages: the connections between them are as those of processes.
struct TcpThreads {
    using Backend = gradsync::TcpBackend;
    using Memory = gradsync_test::HostMemory;
    static constexpr int largest = 4;
    static constexpr bool one_order = true;

    static bool here(int) { return true; }

    template <class F>
    static void run(int size, std::chrono::nanoseconds limit, F&& f) {
        gradsync_test::run_rank_threads(
            size, [&](auto& rendezvous) { return gradsync::TcpBackend(rendezvous, {.timeout = limit, .shared_memory = false}); }, f);
    }
};

}  // namespace

TEST_CASE("TcpBackend by messages gives the results of the oracle") { gradsync_test::check_results<TcpThreads>(); }
TEST_CASE("TcpBackend by messages keeps collectives in flight") { gradsync_test::check_in_flight<TcpThreads>(); }
TEST_CASE("TcpBackend by messages splits into groups") { gradsync_test::check_groups<TcpThreads>(); }
TEST_CASE("TcpBackend by messages reports failures on every rank") { gradsync_test::check_failures<TcpThreads>(); }
TEST_CASE("TcpBackend by messages has the abilities that it states") { gradsync_test::check_abilities<TcpThreads>(); }

TEST_CASE("TcpBackend: a process that is killed is named at once") {
    for (const bool shared_memory : {true, false}) {
        const std::uint16_t port = gradsync_test::free_port();
        gradsync_test::check_killed([&](int rank, int size) {
            gradsync::TcpRendezvous rendezvous({.rank = rank, .size = size, .port = port});
            gradsync::TcpBackend comm(rendezvous, {.shared_memory = shared_memory});
            if (comm.describe() != (shared_memory ? "3 processes that share memory"
                                                  : "3 processes that send messages over TCP (shared memory is switched off)"))
                throw std::runtime_error(comm.describe());
            return comm;
        });
    }
}

TEST_CASE("TcpTransport loses a process that is killed") {
    const std::uint16_t port = gradsync_test::free_port();
    gradsync_test::check_lost([&](int rank, int size) {
        gradsync::TcpRendezvous rendezvous({.rank = rank, .size = size, .port = port});
        return gradsync::message_passing::make_tcp_transport(rendezvous, 1min, "");
    });
}

TEST_CASE("TcpBackend: a process that goes on after a pause blames nobody who came in time") {
    for (const gradsync::TcpOptions& options : {gradsync::TcpOptions{}, {.shared_memory = false}, {.domain = 0}}) {
        const std::uint16_t port = gradsync_test::free_port();
        const int size = options.domain == 0 ? 4 : 2;
        const auto reports = gradsync_test::forked(size, [&](int rank) -> std::string {
            gradsync::TcpRendezvous rendezvous({.rank = rank, .size = size, .port = port});
            gradsync::TcpOptions own = options;
            if (own.domain == 0) own.domain = rank / 2;
            gradsync::TcpBackend comm(rendezvous, own);
            const int last = size - 1;
            std::int64_t process = rank == last ? ::getpid() : 0;
            comm.all_reduce({&process, 1, gradsync::DType::i64}, gradsync::ReduceOp::sum).wait();
            comm.set_timeout(2s);
            if (rank == 0) {
                std::this_thread::sleep_for(500ms);
                ::kill(static_cast<pid_t>(process), SIGSTOP);
                std::this_thread::sleep_for(2500ms);
                ::kill(static_cast<pid_t>(process), SIGCONT);
                std::this_thread::sleep_for(100ms);
            } else if (rank != last) {
                std::this_thread::sleep_for(2500ms);
            }
            std::vector<float> data(100'000, 1);
            comm.all_reduce(gradsync::buffer(data), gradsync::ReduceOp::sum).wait();
            return data[7] == static_cast<float>(size) ? "summed" : "a wrong sum";
        });
        for (const auto& report : reports) CHECK(report.text == "summed");
    }
}

TEST_CASE("TcpBackend: options that differ are refused on every rank") {
    const std::uint16_t port = gradsync_test::free_port();
    const auto reports = gradsync_test::forked(3, [&](int rank) -> std::string {
        gradsync::TcpRendezvous rendezvous({.rank = rank, .size = 3, .port = port});
        try {
            gradsync::TcpBackend comm(rendezvous, {.shared_memory = rank != 2});
            return "nothing was thrown";
        } catch (const gradsync::Error& error) {
            return error.what();
        }
    });
    for (const auto& report : reports) CHECK(report.text == "TcpBackend: rank 2 has other TcpOptions than rank 0; give all ranks the same");
}

namespace {

/// A rank whose build sends something else in the first exchange.
struct OtherBuild {
    gradsync::TcpRendezvous& rendezvous;
    bool first = true;

    int rank() const { return rendezvous.rank(); }
    int size() const { return rendezvous.size(); }
    std::vector<gradsync::Blob> all_gather(std::span<const std::byte> own) {
        std::vector<std::byte> changed(own.begin(), own.end());
        if (std::exchange(first, false)) changed[0] ^= std::byte{1};
        return rendezvous.all_gather(changed);
    }
};

}  // namespace

TEST_CASE("TcpBackend: a rank of another build is refused by name, on every rank") {
    const std::uint16_t port = gradsync_test::free_port();
    const auto reports = gradsync_test::forked(3, [&](int rank) -> std::string {
        gradsync::TcpRendezvous rendezvous({.rank = rank, .size = 3, .port = port});
        OtherBuild other{rendezvous};
        try {
            if (rank == 2) gradsync::TcpBackend{other};
            else gradsync::TcpBackend{rendezvous};
            return "nothing was thrown";
        } catch (const gradsync::Error& error) {
            return error.context().peer == 2 ? error.what() : "another rank is blamed";
        }
    });
    for (const auto& report : reports)
        CHECK(report.text == "rank 2 runs another build of gradsync than rank 0; start all ranks from one version of it");
}
