// SPDX-License-Identifier: BSL-1.0
#include <gradsync/kernel/instantiations.hpp>
