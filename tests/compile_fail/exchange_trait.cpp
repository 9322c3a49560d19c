// SPDX-License-Identifier: BSL-1.0
// A misspelt trait. The sentence is the compiler's.
// expect: (ExchangeTraits.*means_onli|means_onli.*ExchangeTraits)
#include <gradsync/core/exchange.hpp>

#ifdef GRADSYNC_EXPECT_FAILURE
constexpr gradsync::ExchangeTraits traits{.scatters = true, .means_onli = true};
#else
constexpr gradsync::ExchangeTraits traits{.scatters = true, .means_only = true};
#endif
static_assert(traits.scatters);
