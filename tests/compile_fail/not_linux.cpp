// SPDX-License-Identifier: BSL-1.0
// expect: gradsync: compile for 64-bit Linux
// flags: -U__linux__
#include <gradsync/gradsync.hpp>
