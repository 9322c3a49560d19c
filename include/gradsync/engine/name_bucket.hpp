// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>

#include "../core/error.hpp"

namespace gradsync::inline v0_2::detail {

/// Runs `f()`, which may find that a collective of bucket b has failed: its Error says then which bucket it was.
template <class F>
decltype(auto) naming_bucket(std::size_t b, F&& f) {
    try {
        return f();
    } catch (Error& error) {
        error.name_bucket(b);
        throw;
    }
}

}  // namespace gradsync::inline v0_2::detail
