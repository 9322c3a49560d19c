// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <thread>
#include <utility>
#include <vector>

#include <gradsync/bootstrap/tcp_rendezvous.hpp>
#include <gradsync/core/error.hpp>

#include "conformance/backend/launcher.hpp"
#include "support/ports.hpp"

namespace gradsync_test {

/// Runs `f(backend)` on `size` ranks that are threads and meet over TCP; `make(rendezvous)` makes a rank's backend. As a launcher
/// does: an exception ends the communicator, and leaves with the cause before its echoes.
template <class Make, class F>
void run_rank_threads(int size, Make&& make, F&& f) {
    const std::uint16_t port = free_port();
    std::vector<std::exception_ptr> causes(static_cast<std::size_t>(size)), echoes(causes.size());
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size; ++rank)
        threads.emplace_back([&, rank] {
            try {
                gradsync::TcpRendezvous rendezvous({.rank = rank, .size = size, .port = port}, {.timeout = ample});
                auto backend = make(rendezvous);
                try {
                    f(std::remove_cvref_t<decltype(backend)>(backend));
                } catch (const std::exception& error) {
                    backend.fail(error.what());
                    throw;
                } catch (...) {
                    backend.fail("an exception that is no std::exception");
                    throw;
                }
            } catch (const gradsync::Error& error) {
                const bool by_another = error.context().peer >= 0 && error.context().peer != rank;
                (by_another ? echoes : causes)[static_cast<std::size_t>(rank)] = std::current_exception();
            } catch (...) {
                causes[static_cast<std::size_t>(rank)] = std::current_exception();
            }
        });
    for (std::thread& thread : threads) thread.join();
    for (const auto* kind : {&causes, &echoes})
        for (const std::exception_ptr& error : *kind)
            if (error) std::rethrow_exception(error);
}

}  // namespace gradsync_test
