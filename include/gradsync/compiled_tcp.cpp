// SPDX-License-Identifier: BSL-1.0
// A source of gradsync::compiled: ranks that are processes.
#ifndef GRADSYNC_COMPILED
#define GRADSYNC_COMPILED
#endif
#define GRADSYNC_ONCE
#include "gradsync.hpp"  // what compiled.cpp holds is only declared here
#undef GRADSYNC_EXTERN
#define GRADSYNC_EXTERN
#include "backend/tcp.hpp"
