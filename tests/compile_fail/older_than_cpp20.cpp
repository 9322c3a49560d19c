// SPDX-License-Identifier: BSL-1.0
// expect: gradsync: compile as C..20 or later
// flags: -std=c++17
#include <gradsync/gradsync.hpp>
