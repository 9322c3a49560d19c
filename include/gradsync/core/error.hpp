// SPDX-License-Identifier: BSL-1.0
#pragma once

#ifndef __cpp_exceptions
#error "gradsync: compile with exceptions (no -fno-exceptions): errors of the library, and of other ranks, are thrown"
#endif

#include <exception>
#include <stdexcept>
#include <utility>

#include "text.hpp"

namespace gradsync::inline v0_2 {

/// The kinds of failure. Every failure of the library is a `gradsync::Error` that carries one of these.
enum class Errc {
    invalid_argument = 1,   ///< invalid input; nothing was communicated
    timeout,                ///< a wait reached its time limit; the message names the ranks that did not arrive
    peer_failed,            ///< another rank failed, and this one was released from its wait
    peer_left,              ///< another rank's function returned, or its handle was dropped, with work outstanding
    collective_mismatch,    ///< the ranks started different collectives (operation, count, dtype, root, ...)
    parameter_mismatch,     ///< the ranks' parameters or policies differ
    gradient_not_ready,     ///< `finish()` with parameters that were not marked ready
    gradient_marked_twice,  ///< `mark_ready` was called more often than the parameter has uses
    abandoned,              ///< a collective was dropped before it was complete
    device_failed,          ///< a device, or the library that drives it, failed on this rank
    non_finite,             ///< a gradient has an element that is infinite or NaN (NonFinite::error)
    storage,                ///< a file could not be written or read, or has the wrong contents
};

/// Is it the number of one of these? It may have come from another process.
constexpr bool is_errc(int number) noexcept {
    return number >= static_cast<int>(Errc::invalid_argument) && number <= static_cast<int>(Errc::storage);
}

/// The place of a failure. A field that does not apply is empty, or -1.
struct ErrorContext {
    std::string operation = {};  ///< "all_reduce", "finish", ...
    int rank = -1;               ///< the rank that throws
    int peer = -1;               ///< the rank that is to blame, if it is another one
    std::ptrdiff_t bucket = -1;  ///< index into the plan
    std::string parameter = {};  ///< name of the first parameter concerned
};

/// The one exception type of the library. `what()` is a sentence that says what happened and what to do.
class Error : public std::runtime_error {
public:
    Error(Errc code, const std::string& message, ErrorContext context = {})
        : std::runtime_error(message), code_(code), context_(std::move(context)) {}

    Errc errc() const noexcept { return code_; }
    const ErrorContext& context() const noexcept { return context_; }

    /// Adds the bucket that failed, unless the error names one already. For code that rethrows the error.
    void name_bucket(std::size_t bucket) {
        if (context_.bucket >= 0) return;
        std::runtime_error::operator=(std::runtime_error(detail::text(what(), " (it was bucket ", bucket, ")")));
        context_.bucket = static_cast<std::ptrdiff_t>(bucket);
    }

private:
    Errc code_;
    ErrorContext context_;
};

namespace detail {

/// An ErrorContext that owns nothing, so that a place which throws has nothing to clean up.
struct ErrorPlace {
    const char* operation = "";
    int rank = -1;
    int peer = -1;
    std::ptrdiff_t bucket = -1;
    std::string_view parameter = {};
};

/// Throws Error(code, message, place).
[[noreturn, gnu::cold, gnu::noinline]] inline void raise(Errc code, std::string_view message, const ErrorPlace& place = {}) {
    throw Error(code, std::string(message), {place.operation, place.rank, place.peer, place.bucket, std::string(place.parameter)});
}

/// Throws Error(invalid_argument) with the message "operation: what".
[[noreturn, gnu::cold]] inline void refuse(const char* operation, std::string_view what, int rank = -1) {
    raise(Errc::invalid_argument, text(operation, ": ", what), {.operation = operation, .rank = rank});
}

/// What an exception says.
struct Handled {
    std::string what = "an exception that is no std::exception";
    Errc code = Errc::peer_failed;
    int peer = -1;  ///< the rank to blame, if it is an Error that blames another one
};
/// The exception that is being handled, if there is one.
[[gnu::cold, gnu::noinline]] inline Handled handled() {
    try {
        if (std::current_exception()) throw;
    } catch (const Error& error) {
        return {error.what(), error.errc(), error.context().peer};
    } catch (const std::exception& error) {
        return {error.what()};
    } catch (...) {
    }
    return {};
}

/// Runs `f()` for bucket b; an Error from it names that bucket.
template <class F>
decltype(auto) naming_bucket(std::size_t b, F&& f) {
    try {
        return f();
    } catch (Error& error) {
        error.name_bucket(b);
        throw;
    }
}

}  // namespace detail

}  // namespace gradsync::inline v0_2
