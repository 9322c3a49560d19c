#pragma once

#include <cstddef>
#include <exception>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "../core/error.hpp"

namespace gradsync::inline v0::detail {

inline std::string describe_current_exception() {
    try {
        throw;
    } catch (const std::exception& e) {
        return e.what();
    } catch (...) {
        return "an exception that is no std::exception";
    }
}

/// Runs `f(handle)` for each of these handles, one thread each, and returns when all have returned: nothing, or the results by
/// rank if `f` returns something. `around(rank, run)` calls `run()` on the rank's thread, and may do something before and
/// after it.
///
/// If a rank throws, `fail` is called on its handle, and the exception of the rank that failed first is rethrown here, of its
/// own type.
template <class Backend, class F, class Around>
auto run_ranks(std::vector<Backend> handles, F&& f, Around&& around) {
    using Result = std::invoke_result_t<F&, Backend>;
    using Stored = std::conditional_t<std::is_void_v<Result>, char, Result>;

    std::vector<std::optional<Stored>> results(handles.size());
    std::vector<std::exception_ptr> errors(handles.size());
    // Errors that ranks throw because another rank failed point at that rank.
    std::vector<int> blamed(handles.size(), -1);

    const auto run_rank = [&](std::size_t r) {
        // Ours is the last handle of the rank to go: not before its failure is on record.
        Backend handle = std::move(handles[r]);
        try {
            if constexpr (std::is_void_v<Result>) f(Backend(handle));
            else results[r].emplace(f(Backend(handle)));
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
        for (std::size_t r = 0; r < handles.size(); ++r) threads.emplace_back([&, r] { around(r, [&] { run_rank(r); }); });
    } catch (...) {  // no thread to be had: release those that run
        Backend(handles.back()).fail("its thread could not be started");
        for (std::size_t r = threads.size(); r < handles.size(); ++r) around(r, [] {});
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

}  // namespace gradsync::inline v0::detail
