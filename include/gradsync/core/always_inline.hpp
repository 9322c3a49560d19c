// SPDX-License-Identifier: BSL-1.0
#pragma once

/// @file
/// The attributes of functions that must become part of their caller: of loops over elements, which are compiled for
/// several instruction sets, and of a mark.

#if defined(__clang__)
// Clang's check of indirect calls would keep an out-of-line copy, with instructions that not every processor has.
#define GRADSYNC_ALWAYS_INLINE [[gnu::always_inline, clang::no_sanitize("function")]] inline
#else
#define GRADSYNC_ALWAYS_INLINE [[gnu::always_inline]] inline
#endif
