// SPDX-License-Identifier: BSL-1.0
// ctest: ALONE NOT_WITH thread
// Clang's thread sanitizer does not link beside the operators new and delete that count here.
// What backends that send messages leave behind: operator new counts. The conformance suite shows the rest.
#include <gradsync/backend/tcp.hpp>

#include <doctest/doctest.h>

#include <dirent.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdlib>
#include <new>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "support/forked.hpp"
#include "support/ports.hpp"

namespace {

std::atomic<long> allocations{0}, living{0};

void* counted(std::size_t bytes, std::size_t alignment) {
    ++allocations;
    ++living;
    if (alignment <= __STDCPP_DEFAULT_NEW_ALIGNMENT__) {
        if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
    } else if (void* memory = std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment)) {
        return memory;
    }
    throw std::bad_alloc();
}
void freed(void* memory) noexcept {
    living -= memory != nullptr;
    std::free(memory);
}

}  // namespace

// The other forms, of arrays and nothrow, call these. Not inlined, or GCC sees a free() of what operator new returned.
void* operator new(std::size_t bytes) { return counted(bytes, 1); }
void* operator new(std::size_t bytes, std::align_val_t alignment) { return counted(bytes, static_cast<std::size_t>(alignment)); }
[[gnu::noinline]] void operator delete(void* memory) noexcept { freed(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { freed(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept { freed(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { freed(memory); }

using namespace gradsync;
using namespace std::chrono_literals;

namespace {

int descriptors() {
    int count = 0;
    DIR* const folder = ::opendir("/proc/self/fd");
    while (::readdir(folder) != nullptr) ++count;
    ::closedir(folder);
    return count;
}

TcpBackend backend(int rank, int size, std::uint16_t port) {
    TcpRendezvous rendezvous({.rank = rank, .size = size, .port = port});
    return TcpBackend(rendezvous, {.timeout = 60s, .shared_memory = false});
}

void sum(TcpBackend& comm, std::vector<float>& data) { comm.all_reduce(buffer(data), ReduceOp::sum).wait(); }

/// Runs `f(rank)` on two ranks, and checks that it returns nothing.
template <class F>
void check(F&& f) {
    for (const auto& report : gradsync_test::forked(2, f)) CHECK(report.text == "");
}

}  // namespace

TEST_CASE("TcpBackend: backends that have failed leave no connections and no memory") {
    constexpr int worlds = 50, before = 5;
    std::vector<std::uint16_t> ports;
    for (int i = 0; i < worlds; ++i) ports.push_back(gradsync_test::free_port());
    check([&](int rank) -> std::string {
        int open = 0;
        long memory = 0;
        std::vector<float> data(1000);
        for (int i = 0; i < worlds; ++i) {
            if (i == before) open = descriptors(), memory = living;
            TcpBackend comm = backend(rank, 2, ports[static_cast<std::size_t>(i)]);
            const auto lent = comm.allocate(4000);
            sum(comm, data);
            if (rank == i % 2) {
                comm.fail("it has had enough");
                continue;
            }
            try {
                comm.all_reduce({lent.data(), 1000, DType::f32}, ReduceOp::sum).wait();
                return "nothing was thrown";
            } catch (const Error&) {
            }
        }
        // The last one or two may still be waiting for the other rank's good-bye.
        const int connections = descriptors() - open;
        const long blocks = living - memory;
        if (connections > 2) return std::to_string(connections) + " connections stayed";
        return blocks > 100 ? std::to_string(blocks) + " blocks of memory stayed" : "";
    });
}

TEST_CASE("TcpBackend: memory of different sizes is refused on all ranks, which can go on") {
    for (const bool shared_memory : {true, false})
        for (const std::size_t odd : {0u, 200u}) {
            const std::uint16_t port = gradsync_test::free_port();
            const auto reports = gradsync_test::forked(3, [&](int rank) -> std::string {
                gradsync::TcpRendezvous rendezvous({.rank = rank, .size = 3, .port = port});
                TcpBackend comm(rendezvous, {.timeout = 60s, .shared_memory = shared_memory});
                std::string said;
                try {
                    (void)comm.allocate(rank == 2 ? odd : 100);
                } catch (const gradsync::Error& error) {
                    if (error.errc() != gradsync::Errc::parameter_mismatch || error.context().peer != 2) return "another code or peer";
                    said = error.what();
                }
                const std::string expected = "allocate on rank " + std::to_string(rank) + ": rank 2 passes " + std::to_string(odd) +
                                             " bytes, rank 0 100; all ranks must pass the same number";
                return said != expected ? said : comm.allocate(100).data() == nullptr ? "no memory" : "right";
            });
            for (const auto& report : reports) CHECK(report.text == "right");
        }
}

TEST_CASE("TcpBackend: a rank whose collectives are complete may compute, drop its backend, or end: what it has sent arrives") {
    enum class Then { computes, drops, ends };
    for (const Then then : {Then::computes, Then::drops, Then::ends}) {
        CAPTURE(static_cast<int>(then));
        const std::uint16_t port = gradsync_test::free_port();
        void* const shared = ::mmap(nullptr, sizeof(std::atomic<bool>), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        REQUIRE(shared != MAP_FAILED);
        auto& received = *new (shared) std::atomic<bool>(false);
        check([&](int rank) -> std::string {
            const auto value = rank == 0 ? 1.0f : 0.0f;
            std::vector<std::vector<float>> parts(300, std::vector<float>(12'288, value));  // more than the sockets hold
            std::optional<TcpBackend> comm(backend(rank, 2, port));
            comm->set_timeout(5s);
            std::vector<TcpBackend::WorkType> works;
            for (auto& part : parts) works.push_back(comm->broadcast(buffer(part), 0));
            if (rank == 1) std::this_thread::sleep_for(300ms);  // in which it reads nothing
            for (auto& work : works) work.wait();
            if (rank == 0) {
                if (then == Then::drops) comm.reset();
                for (int ms = 0; then != Then::ends && !received && ms < 10'000; ++ms) std::this_thread::sleep_for(1ms);
            }
            received = received || rank == 1;
            return parts == std::vector(300, std::vector<float>(12'288, 1.0f)) ? "" : "wrong data";
        });
        ::munmap(shared, sizeof(std::atomic<bool>));
    }
}

TEST_CASE("TcpBackend: a group that goes leaves no memory") {
    const std::uint16_t port = gradsync_test::free_port();
    check([&](int rank) -> std::string {
        TcpBackend comm = backend(rank, 2, port);
        std::vector<float> data(1000);
        long memory = 0;
        for (int i = 0; i < 110; ++i) {
            if (i == 10) memory = living;
            TcpBackend group = comm.split(0, rank);
            sum(group, data);
        }
        const long blocks = living - memory;
        return blocks > 20 ? std::to_string(blocks) + " blocks of memory stayed" : "";
    });
}

TEST_CASE("TcpBackend: a steady step over messages allocates nothing, whichever rank comes first") {
    const std::uint16_t port = gradsync_test::free_port();
    check([&](int rank) -> std::string {
        TcpBackend comm = backend(rank, 2, port);
        std::vector<float> little(1000), much(300'000);
        long before = 0;
        for (int i = 0; i < 120; ++i) {
            if (i == 60) before = allocations;
            if (i % 3 == rank) std::this_thread::sleep_for(8ms);
            auto first = comm.all_reduce(buffer(little), ReduceOp::sum), second = comm.all_reduce(buffer(much), ReduceOp::sum);
            first.wait();
            second.wait();
        }
        const long during = allocations - before;  // a list may still have to grow, and the other rank may have left
        return during > 8 ? std::to_string(during) + " allocations" : "";
    });
}
