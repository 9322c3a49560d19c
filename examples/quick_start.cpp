// SPDX-License-Identifier: BSL-1.0
// Data-parallel training in one page: four ranks fit a line to noisy points, each from points of its own.

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include <gradsync/gradsync.hpp>

namespace gs = gradsync;

int main() {
    std::vector<std::vector<float>> fits = gs::run_threads(4, [](gs::ThreadBackend comm) {
        std::vector<float> slope{0}, offset{0};  // the model: y = slope x + offset
        std::vector<float> slope_gradient(1), offset_gradient(1);

        std::vector<gs::ParameterView> parameters{{.name = "slope", .value = gs::buffer(slope), .gradient = gs::buffer(slope_gradient)},
                                                  {.name = "offset", .value = gs::buffer(offset), .gradient = gs::buffer(offset_gradient)}};
        gs::Reducer sync(comm, parameters);
        sync.broadcast_parameters();

        std::mt19937 random(static_cast<unsigned>(comm.rank()));  // every rank draws other points
        std::uniform_real_distribution<float> place(-1, 1), noise(-0.1f, 0.1f);
        for (int step = 0; step < 300; ++step) {
            offset_gradient[0] = slope_gradient[0] = 0;
            for (int i = 0; i < 16; ++i) {
                const float x = place(random), y = 3 * x - 2 + noise(random);
                const float error = slope[0] * x + offset[0] - y;
                offset_gradient[0] += error / 8;
                slope_gradient[0] += error * x / 8;
            }
            sync.mark_ready(1);  // as soon as it is final: here at once; in a deep model, while the rest is computed
            sync.mark_ready(0);
            sync.finish();  // now both gradients are the mean over all ranks
            slope[0] -= 0.1f * slope_gradient[0];
            offset[0] -= 0.1f * offset_gradient[0];
        }
        return std::vector{slope[0], offset[0]};
    });

    bool right = true;
    for (const auto& fit : fits) {
        std::printf("y = %.3f x %+.3f\n", static_cast<double>(fit[0]), static_cast<double>(fit[1]));
        right = right && fit == fits[0] && std::abs(fit[0] - 3) < 0.05f && std::abs(fit[1] + 2) < 0.05f;
    }
    return right ? 0 : 1;  // all ranks hold the same line, and it is the true one
}
