// SPDX-License-Identifier: BSL-1.0
// A source of gradsync::compiled: loops over elements, and ranks that are threads.
#ifndef GRADSYNC_COMPILED
#define GRADSYNC_COMPILED
#endif
#define GRADSYNC_EXTERN
#include "gradsync.hpp"
