// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <exception>
#include <thread>
#include <vector>

namespace bench {

/// Runs `f(rank)` on a thread for each rank; rethrows what one of them throws.
template <class F>
void on_each_rank(int ranks, F&& f) {
    std::vector<std::exception_ptr> errors(static_cast<std::size_t>(ranks));
    std::vector<std::thread> threads;
    for (int r = 0; r < ranks; ++r)
        threads.emplace_back([&, r] {
            try {
                f(static_cast<std::size_t>(r));
            } catch (...) {
                errors[static_cast<std::size_t>(r)] = std::current_exception();
            }
        });
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& error : errors)
        if (error) std::rethrow_exception(error);
}

}  // namespace bench
