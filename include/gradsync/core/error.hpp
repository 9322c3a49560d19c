// SPDX-License-Identifier: BSL-1.0
#pragma once

#ifndef __cpp_exceptions
#error "gradsync: compile with exceptions (no -fno-exceptions): errors of the library, and of other ranks, are thrown"
#endif

#include <cstddef>
#include <string>
#include <system_error>
#include <utility>

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

inline const std::error_category& error_category() noexcept {
    class Category final : public std::error_category {
        const char* name() const noexcept override { return "gradsync"; }
        std::string message(int code) const override {
            switch (static_cast<Errc>(code)) {
                case Errc::invalid_argument: return "invalid argument";
                case Errc::timeout: return "time limit reached";
                case Errc::peer_failed: return "another rank failed";
                case Errc::peer_left: return "another rank left";
                case Errc::collective_mismatch: return "the ranks started different collectives";
                case Errc::parameter_mismatch: return "the ranks' parameters or policies differ";
                case Errc::gradient_not_ready: return "a gradient is not ready";
                case Errc::gradient_marked_twice: return "a gradient was marked ready too often";
                case Errc::abandoned: return "a collective was dropped before it was complete";
                case Errc::device_failed: return "a device failed";
                case Errc::non_finite: return "a gradient is infinite or NaN";
                case Errc::storage: return "a file could not be written or read";
            }
            return "unknown error";
        }
    };
    static const Category category;
    return category;
}

inline std::error_code make_error_code(Errc code) noexcept { return {static_cast<int>(code), error_category()}; }

/// The place of a failure. A field that does not apply is empty, or -1.
struct ErrorContext {
    std::string operation = {};  ///< "all_reduce", "finish", ...
    int rank = -1;               ///< the rank that throws
    int peer = -1;               ///< the rank that is to blame, if it is another one
    std::ptrdiff_t bucket = -1;  ///< index into the plan
    std::string parameter = {};  ///< name of the first parameter concerned
};

/// The one exception type of the library. `what()` is a sentence that says what happened and what to do.
class Error : public std::system_error {
public:
    Error(Errc code, const std::string& message, ErrorContext context = {})
        : std::system_error(make_error_code(code)), message_(message), context_(std::move(context)) {}

    const char* what() const noexcept override { return message_.c_str(); }

    Errc errc() const noexcept { return static_cast<Errc>(code().value()); }
    const ErrorContext& context() const noexcept { return context_; }

    /// Adds the bucket that failed, unless the error names one already. For code that rethrows the error.
    void name_bucket(std::size_t bucket) {
        if (context_.bucket >= 0) return;
        message_ += " (it was bucket " + std::to_string(bucket) + ")";
        context_.bucket = static_cast<std::ptrdiff_t>(bucket);
    }

private:
    std::string message_;
    ErrorContext context_;
};

namespace detail {

/// Throws Error(invalid_argument) with the message "operation: what".
[[noreturn]] inline void refuse(const char* operation, const std::string& what, int rank = -1) {
    throw Error(Errc::invalid_argument, std::string(operation) + ": " + what, {.operation = operation, .rank = rank});
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

template <>
struct std::is_error_code_enum<gradsync::Errc> : std::true_type {};
