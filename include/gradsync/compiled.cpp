// SPDX-License-Identifier: BSL-1.0
// A source of gradsync::compiled: loops over elements, and ranks that are threads.
#define GRADSYNC_COMPILED
#define GRADSYNC_EXTERN
#include "gradsync.hpp"
