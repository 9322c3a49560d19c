// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <optional>
#include <vector>

#include "../core/error.hpp"
#include "../core/list.hpp"
#include "../core/thread.hpp"

namespace gradsync::inline v0_2::detail {

/// A reference to a function without its type. Programs run many functions on ranks; the code that starts and joins the
/// threads is compiled once for all of them.
template <class... Args>
class FunctionRef {
public:
    template <class F>
        requires(!std::is_same_v<F, FunctionRef>)
    FunctionRef(const F& f) noexcept
        : object_(&f), call_([](const void* object, Args... args) {
              (*static_cast<const F*>(object))(static_cast<Args>(args)...);
          }) {}

    void operator()(Args... args) const { call_(object_, static_cast<Args>(args)...); }

private:
    const void* object_;
    void (*call_)(const void*, Args...);
};

template <class Backend>
void run_each_rank(std::vector<Backend> handles, FunctionRef<std::size_t, Backend&> f,
                   FunctionRef<std::size_t, FunctionRef<>> around) {
    List<std::exception_ptr> errors(handles.size());
    // The rank that each error blames; a rank that throws because another one failed blames that one.
    List<int> blamed(handles.size(), -1);

    const auto run_rank = [&](std::size_t r) {
        // The rank's last handle, which must live until the rank's failure is recorded.
        Backend handle = std::move(handles[r]);
        try {
            f(r, handle);
        } catch (...) {
            const Handled failure = handled();
            errors[r] = std::current_exception();
            blamed[r] = failure.peer;
            handle.fail(failure.what);
        }
    };
    const auto run_thread = [&](std::size_t r) {
        const auto run = [&] { run_rank(r); };
        around(r, run);
    };
    struct Task {
        const decltype(run_thread)* run = nullptr;
        std::size_t rank = 0;
        Thread thread = {};
        void operator()() const { (*run)(rank); }
    };

    {
        List<Task> tasks(handles.size());  // the end of this block joins their threads
        std::size_t started = 0;
        try {
            for (; started < handles.size(); ++started) {
                tasks[started].run = &run_thread;
                tasks[started].rank = started;
                tasks[started].thread.start(tasks[started]);
            }
        } catch (...) {  // no thread can be started: release those that run
            Backend(handles.back()).fail("its thread could not be started");
            const auto nothing = [] {};
            for (std::size_t r = started; r < handles.size(); ++r) around(r, nothing);
            throw;
        }
    }

    // The cause is an exception that blames no other rank; if there is none, the first exception.
    for (const bool causes_only : {true, false})
        for (std::size_t r = 0; r < errors.size(); ++r)
            if (errors[r] && (!causes_only || blamed[r] < 0 || blamed[r] == static_cast<int>(r)))
                std::rethrow_exception(errors[r]);
}

/// Runs `f(handle)` for each handle on a thread of its own, and returns when all have returned. Returns nothing, or the
/// results by rank if `f` returns something. `around(rank, run)` calls `run()` on the rank's thread, and may do
/// something before and after.
///
/// If a rank throws, `fail` is called on its handle. The exception that was the cause (by rank, the first that blames
/// no other rank) is rethrown here with its own type.
template <class Backend, class F, class Around>
auto run_ranks(std::vector<Backend> handles, F&& f, Around&& around) {
    static_assert(std::is_invocable_v<F&, Backend>,
                  "gradsync: this function runs once on each rank, with the rank's communicator: give it one parameter "
                  "of that type, by value, as in [](gs::ThreadBackend comm) {...}; comm.rank() is the rank");
    if constexpr (!std::is_invocable_v<F&, Backend>) {
        return;
    } else if constexpr (std::is_void_v<std::invoke_result_t<F&, Backend>>) {
        const auto call = [&](std::size_t, Backend& handle) { f(Backend(handle)); };
        run_each_rank<Backend>(std::move(handles), call, around);
    } else {
        using Result = std::invoke_result_t<F&, Backend>;
        std::vector<std::optional<Result>> results(handles.size());
        const auto call = [&](std::size_t r, Backend& handle) { results[r].emplace(f(Backend(handle))); };
        run_each_rank<Backend>(std::move(handles), call, around);
        std::vector<Result> values;
        values.reserve(results.size());
        for (auto& result : results) values.push_back(std::move(*result));
        return values;
    }
}

}  // namespace gradsync::inline v0_2::detail
