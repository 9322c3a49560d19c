// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "run_ranks.hpp"
#include "thread_backend.hpp"

namespace gradsync::inline v0_2 {

/// Options of `run_threads`.
struct ThreadOptions {
    std::chrono::nanoseconds timeout = ThreadBackend::default_timeout;  ///< limit of every wait; `set_timeout` changes it
};

/// Runs `f(ThreadBackend)` on `size` threads, one per rank, and returns when all have returned. Returns nothing, or the results by rank if
/// `f` returns something.
///
/// If a rank throws, the others are released from any collective that they wait for, with an Error that names it. The exception that was
/// the cause (by rank, the first that blames no other rank) is rethrown here with its own type. A rank that neither communicates nor
/// returns cannot be stopped from outside: run_threads waits for it.
template <class F>
auto run_threads(int size, F&& f, ThreadOptions options = {}) {
    return detail::run_ranks(ThreadBackend::make(size, options.timeout), std::forward<F>(f), [](std::size_t, auto&& run) { run(); });
}

}  // namespace gradsync::inline v0_2
