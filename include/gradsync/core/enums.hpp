// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstdint>

/// @file
/// Enumerations that programs in C++14 use too (see cxx14.hpp). Plain C++14.

namespace gradsync {
inline namespace v0_2 {

/// The element types that a buffer can hold.
enum class DType : std::uint8_t { i8, u8, i32, u32, i64, u64, f16, bf16, f32, f64, f8e4m3, f8e5m2 };

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
    storage,                ///< no memory; or a file could not be written or read, or has wrong contents
};

}  // namespace v0_2
}  // namespace gradsync
