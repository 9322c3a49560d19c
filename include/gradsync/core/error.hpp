// SPDX-License-Identifier: BSL-1.0
#pragma once

#ifndef __cpp_exceptions
#error "gradsync: compile with exceptions (no -fno-exceptions): errors of the library, and of other ranks, are thrown"
#endif

#include <exception>
#include <stdexcept>
#include <utility>

#include "debug_log.hpp"
#include "enums.hpp"

/// GRADSYNC_SETUP marks set-up functions that call cold functions. If g++ saw into them, it would treat the code after
/// their call, such as a training loop, as cold too, and compile it for size.
#if defined(__clang__)
#define GRADSYNC_SETUP [[gnu::noinline]]
#else
#define GRADSYNC_SETUP [[gnu::noipa]]
#endif

/// GRADSYNC_ONCE marks definitions that gradsync::compiled can hold. It is `inline` in a header-only program, and empty
/// in the sources of that library. In files that link the library it is not defined, and the definitions are left out:
/// these files see the declarations only.
#if !defined(GRADSYNC_COMPILED) && !defined(GRADSYNC_ONCE)
#define GRADSYNC_ONCE GRADSYNC_SETUP inline
#endif

namespace gradsync::inline v0_2 {

/// Returns whether `number` is a valid Errc. It may come from another process.
constexpr bool is_errc(int number) noexcept {
    return number >= static_cast<int>(Errc::invalid_argument) && number <= static_cast<int>(Errc::storage);
}

/// The place of a failure. A field that does not apply is empty, or -1.
struct ErrorContext {
    std::string operation = {};  ///< "all_reduce", "finish", ...
    int rank = -1;               ///< the rank that throws
    int peer = -1;               ///< the rank to blame, possibly the one that throws
    std::ptrdiff_t bucket = -1;  ///< index into the plan
    std::string parameter = {};  ///< name of the first parameter concerned
};

/// The one exception type of the library. `what()` is a sentence that says what happened and what to do.
class Error : public std::runtime_error {
public:
    /// Makes an error; the context is added to the message.
    Error(Errc code, const std::string& message, ErrorContext context = {})
        : std::runtime_error(message), code_(code), context_(std::move(context)) {}

    Errc errc() const noexcept { return code_; }                       ///< Returns the kind of failure.
    const ErrorContext& context() const noexcept { return context_; }  ///< Returns where it happened.

    /// Adds the bucket that failed, unless the error names one already. For code that rethrows it.
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

/// An ErrorContext that owns nothing, so that throwing code needs no clean-up code.
struct ErrorPlace {
    const char* operation = "";
    int rank = -1;
    int peer = -1;
    std::ptrdiff_t bucket = -1;
    std::string_view parameter = {};
};

/// Throws what its callers below describe.
[[noreturn, gnu::cold, gnu::noinline]] inline void raise_joined(Errc code, const ErrorPlace& place,
                                                                std::initializer_list<TextPart> parts) {
    const std::string message = join(parts);
    debug(DebugLevel::info, place.rank, "throws: ", message);
    throw Error(code, message, {place.operation, place.rank, place.peer, place.bucket, std::string(place.parameter)});
}

/// Throws an Error with the parts as its message: `raise(code, {.rank = r}, "rank ", r, " is late")`. The caller only
/// lists the parts, so that its check stays small; one cold function does the rest.
[[noreturn, gnu::always_inline]] inline void raise(Errc code, const ErrorPlace& place, const auto&... parts) {
    raise_joined(code, place, {TextPart(parts)...});
}
[[noreturn, gnu::always_inline]] inline void raise(Errc code, TextPart first, const auto&... parts) {
    raise_joined(code, {}, {first, TextPart(parts)...});
}

/// Throws Error(invalid_argument) with the message "operation: parts".
[[noreturn, gnu::always_inline]] inline void refuse(const ErrorPlace& place, const auto&... parts) {
    raise_joined(Errc::invalid_argument, place, {place.operation, ": ", TextPart(parts)...});
}
[[noreturn, gnu::always_inline]] inline void refuse(const char* operation, const auto&... parts) {
    raise_joined(Errc::invalid_argument, {.operation = operation}, {operation, ": ", TextPart(parts)...});
}
/// The same with "operation on rank r: parts".
[[noreturn, gnu::always_inline]] inline void refuse_on(const ErrorPlace& place, const auto&... parts) {
    raise_joined(Errc::invalid_argument, place, {place.operation, " on rank ", place.rank, ": ", TextPart(parts)...});
}

/// The message, code and culprit of an exception.
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
