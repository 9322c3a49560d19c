// SPDX-License-Identifier: BSL-1.0
// A net of dlib on 1, 2 or 4 ranks, which are threads, learns which points lie in a ring: dlib_train [RANKS]     2 if not given
#include <cstdio>
#include <cstdlib>

#include <dlib/dnn.h>

#include <gradsync/gradsync.hpp>

using Point = dlib::matrix<float, 2, 1>;
using Net = dlib::loss_binary_log<dlib::fc<1, dlib::relu<dlib::fc<16, dlib::input<Point>>>>>;

void train(gradsync::ThreadBackend comm, Net net) {  // a copy for each rank
    std::vector<dlib::adam> solvers(Net::num_computational_layers);
    for (int step = 0; step <= 400; ++step) {
        std::vector<Point> points;
        std::vector<float> labels;
        for (int i = comm.rank(); i < 64; i += comm.size()) {  // this rank's part of the step's 64 points
            const double n = 64 * step + i, x = std::fmod(n * 0.7549, 2) - 1, y = std::fmod(n * 0.5698, 2) - 1;
            points.push_back({static_cast<float>(x), static_cast<float>(y)});
            labels.push_back(std::abs(x * x + y * y - 0.5) < 0.3 ? 1.0f : -1.0f);
        }
        double loss = net.compute_parameter_gradients(points.begin(), points.end(), labels.begin());
        dlib::visit_layer_parameter_gradients(net, [&](dlib::tensor& g) { gradsync::average(comm, g); });
        net.update_parameters(solvers, 0.05);
        gradsync::average(comm, loss);
        if (step % 100 == 0 && comm.rank() == 0) std::printf("step %d: loss %.6f\n", step, loss);
    }
    std::uint64_t digest = 0;
    dlib::visit_layer_parameters(net, [&](dlib::tensor& weights) {
        for (const float w : weights) digest = digest * 31 + std::bit_cast<std::uint32_t>(w);
    });
    std::printf("rank %d: digest %016lx\n", comm.rank(), digest);
}

int main(int argc, char** argv) {
    Net net;
    net(Point({0, 0}));  // the first forward draws the weights with std::rand(), before there are threads
    gradsync::run_threads(argc > 1 ? std::atoi(argv[1]) : 2, [&](gradsync::ThreadBackend comm) { train(comm, net); });
}
