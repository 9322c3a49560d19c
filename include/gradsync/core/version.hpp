#pragma once

/// The version of the library. The inline namespace `v0` changes with the major version, so that two
/// versions linked into one program are two libraries and not one broken one.
#define GRADSYNC_VERSION_MAJOR 0
#define GRADSYNC_VERSION_MINOR 1
#define GRADSYNC_VERSION_PATCH 0

namespace gradsync::inline v0 {}
