// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <vector>

namespace gradsync::inline v0_2::collective {

/// What becomes of a split, for one of the ranks.
struct Group {
    std::size_t split = 0;  ///< number of the split on the parent, the same on all of its ranks
    int color = 0;
    std::vector<int> members = {};  ///< the parent's ranks, in their new order
    int rank = 0;                   ///< this rank's place among them
};

}  // namespace gradsync::inline v0_2::collective
