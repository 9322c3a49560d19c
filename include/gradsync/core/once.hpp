// SPDX-License-Identifier: BSL-1.0
#pragma once

/// GRADSYNC_ONCE stands before definitions that gradsync::compiled can hold. It is `inline` in a header-only program, and empty in the
/// sources of that library. In files that link the library it is not defined, and the definitions are left out: these files see the
/// declarations only.
#if !defined(GRADSYNC_COMPILED) && !defined(GRADSYNC_ONCE)
#define GRADSYNC_ONCE [[gnu::cold]] inline
#endif
