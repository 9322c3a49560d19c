// SPDX-License-Identifier: BSL-1.0
#pragma once

/// The version of the library. The inline namespace `v0_2` changes with every incompatible release, which is every
/// minor version before 1.0. Two versions can therefore be linked into one program.
#define GRADSYNC_VERSION_MAJOR 0
#define GRADSYNC_VERSION_MINOR 2
#define GRADSYNC_VERSION_PATCH 0

namespace gradsync::inline v0_2 {}
