#pragma once

#include <cstddef>
#include <string>
#include <utility>

#include "../core/error.hpp"

namespace gradsync::inline v0::detail {

/// Runs `f()`, which may find that a collective of bucket b has failed: its Error says then which bucket it was.
template <class F>
decltype(auto) naming_bucket(std::size_t b, F&& f) {
    try {
        return f();
    } catch (const Error& error) {
        if (error.context().bucket >= 0) throw;
        ErrorContext context = error.context();
        context.bucket = static_cast<std::ptrdiff_t>(b);
        throw Error(error.errc(), std::string(error.what()) + " (it was bucket " + std::to_string(b) + ")", std::move(context));
    }
}

}  // namespace gradsync::inline v0::detail
