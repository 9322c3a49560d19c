// SPDX-License-Identifier: BSL-1.0
#pragma once

/// GRADSYNC_SETUP stands before functions that a program calls to set up, and that call cold functions. g++ takes all that follows the call
/// of a cold function for cold too, a training loop for example, and compiles it for size; this keeps it from looking into the function.
#if defined(__clang__)
#define GRADSYNC_SETUP [[gnu::noinline]]
#else
#define GRADSYNC_SETUP [[gnu::noipa]]
#endif

/// GRADSYNC_ONCE stands before definitions that gradsync::compiled can hold. It is `inline` in a header-only program, and empty in the
/// sources of that library. In files that link the library it is not defined, and the definitions are left out: these files see the
/// declarations only.
#if !defined(GRADSYNC_COMPILED) && !defined(GRADSYNC_ONCE)
#define GRADSYNC_ONCE GRADSYNC_SETUP inline
#endif
