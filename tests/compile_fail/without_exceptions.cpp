// expect: gradsync: compile with exceptions
// flags: -fno-exceptions
#include <gradsync/core/error.hpp>
