// SPDX-License-Identifier: BSL-1.0
#include <gradsync/gradsync.hpp>

#include <stdexcept>
#include <vector>

float second_unit();

int main() {
    gradsync::run_threads(2, [](gradsync::ThreadBackend comm) {
        std::vector<std::vector<float>> gradients{{static_cast<float>(comm.rank())}};
        gradsync::Reducer sync(comm, gradients);
        sync.mark_ready(0);
        sync.finish();
        if (gradients[0][0] * 4 != second_unit()) throw std::runtime_error("the mean of 0 and 1 is not a half");
    });
}
