// SPDX-License-Identifier: BSL-1.0
#include "support/device_engines.hpp"

#undef GRADSYNC_EXTERN
#define GRADSYNC_EXTERN

namespace gradsync {

GRADSYNC_TEST_DEVICE_ENGINES

}  // namespace gradsync
