// SPDX-License-Identifier: BSL-1.0
// The source of gradsync::compiled.
#define GRADSYNC_COMPILED
#define GRADSYNC_EXTERN
#include "gradsync.hpp"
