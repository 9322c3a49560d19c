// SPDX-License-Identifier: BSL-1.0
// expect: gradsync: compile with exceptions
// flags: -fno-exceptions
#include <gradsync/core/error.hpp>
