// SPDX-License-Identifier: BSL-1.0
#include <gradsync/gradsync.hpp>

#include <stdexcept>
#include <vector>

float second_unit();

// A constant runs no constructor: what it names is in the program nevertheless.
constexpr gradsync::ReducerOptions in_bf16{.reduce_dtype = gradsync::DType::bf16};

int main() {
    gradsync::run_threads(2, [](gradsync::ThreadBackend comm) {
        std::vector<std::vector<float>> gradients{{static_cast<float>(comm.rank())}};
        gradsync::Reducer sync(comm, gradients, in_bf16);
        sync.mark_ready(0);
        sync.finish();
        if (gradients[0][0] * 4 != second_unit()) throw std::runtime_error("the mean of 0 and 1 is not a half");
    });
}
