// SPDX-License-Identifier: BSL-1.0
// The library in a second translation unit of the same program.
#include <gradsync/gradsync.hpp>

float second_unit() {
    std::vector<float> x{2.f};
    return gradsync::buffer(x).count == 1 ? x[0] : 0.f;
}
