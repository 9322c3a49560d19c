#pragma once

#include <cstddef>
#include <exception>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "../core/clock.hpp"
#include "thread_backend.hpp"

namespace gradsync::inline v0 {

/// Options of `run_threads`.
struct ThreadOptions {
    std::chrono::nanoseconds timeout = ThreadBackend::default_timeout;  ///< of every wait; `set_timeout` changes it
};

namespace detail {

inline std::string describe_current_exception() {
    try {
        throw;
    } catch (const std::exception& e) {
        return e.what();
    } catch (...) {
        return "an exception that is no std::exception";
    }
}

}  // namespace detail

/// Runs `f(ThreadBackend)` on `size` threads, one a rank, and returns when all have returned: nothing, or the
/// results by rank if `f` returns something.
///
/// If a rank throws, the others are released from whatever collective they wait for, with an Error that names it,
/// and the exception of the rank that failed first is rethrown here, of its own type. A rank that neither
/// communicates nor returns cannot be stopped from outside: run_threads waits for it.
template <class F>
auto run_threads(int size, F&& f, ThreadOptions options = {}) {
    using Result = std::invoke_result_t<F&, ThreadBackend>;
    using Stored = std::conditional_t<std::is_void_v<Result>, char, Result>;

    std::vector<ThreadBackend> handles = ThreadBackend::make(size, options.timeout);
    std::vector<std::optional<Stored>> results(handles.size());
    std::vector<std::exception_ptr> errors(handles.size());
    // Errors that ranks throw because another rank failed point at that rank.
    std::vector<int> blamed(handles.size(), -1);

    const auto run_rank = [&](std::size_t r) {
        // Ours is the last handle of the rank to go: not before its failure is on record.
        ThreadBackend handle = std::move(handles[r]);
        try {
            if constexpr (std::is_void_v<Result>) f(ThreadBackend(handle));
            else results[r].emplace(f(ThreadBackend(handle)));
        } catch (const Error& e) {
            errors[r] = std::current_exception();
            blamed[r] = e.context().peer;
            handle.fail(e.what());
        } catch (...) {
            errors[r] = std::current_exception();
            handle.fail(detail::describe_current_exception());
        }
    };

    std::vector<std::thread> threads;
    threads.reserve(handles.size());
    try {
        for (std::size_t r = 0; r < handles.size(); ++r) threads.emplace_back(run_rank, r);
    } catch (...) {  // no thread to be had: release those that run
        ThreadBackend(handles.back()).fail("its thread could not be started");
        for (std::thread& thread : threads) thread.join();
        throw;
    }
    for (std::thread& thread : threads) thread.join();

    // The cause is an exception that blames nobody else; failing that, the first that there is.
    for (const bool causes_only : {true, false})
        for (std::size_t r = 0; r < errors.size(); ++r)
            if (errors[r] && (!causes_only || blamed[r] < 0 || blamed[r] == static_cast<int>(r))) std::rethrow_exception(errors[r]);

    if constexpr (!std::is_void_v<Result>) {
        std::vector<Result> values;
        values.reserve(results.size());
        for (auto& result : results) values.push_back(std::move(*result));
        return values;
    }
}

}  // namespace gradsync::inline v0
