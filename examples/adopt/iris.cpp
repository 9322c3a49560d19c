// SPDX-License-Identifier: BSL-1.0
// Eigen matrices as parameters: a network with one hidden layer tells Fisher's irises apart. Each rank has its part of the
// plants; parts of different sizes are weighed by the Reducer.
//
//     iris [RANKS] [FILE]     2 threads and examples/adopt/iris.csv if not given

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include <Eigen/Core>

#include <gradsync/gradsync.hpp>
#include <gradsync/interop/eigen.hpp>

using Eigen::MatrixXf, Eigen::VectorXf;
using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

constexpr int kinds = 3, features = 4, hidden = 16, steps = 300;
constexpr float rate = 0.5f;

/// One plant a column.
struct Plants {
    MatrixXf measures;
    std::vector<int> kind;
};

Plants read(const std::string& path) {
    std::ifstream file(path);
    std::vector<float> numbers;
    Plants plants;
    for (std::string line; std::getline(file, line);) {
        if (line.empty() || line[0] == '#') continue;
        std::istringstream fields(line);
        float x = 0;
        for (char comma = ','; comma == ',' && fields >> x; comma = 0, fields >> comma) numbers.push_back(x);
        const bool complete = numbers.size() == (plants.kind.size() + 1) * features + 1;
        plants.kind.push_back(complete ? static_cast<int>(numbers.back()) : -1);
        if (complete) numbers.pop_back();
        if (plants.kind.back() < 0 || plants.kind.back() >= kinds) {
            std::fprintf(stderr, "%s: not %d measures and a kind below %d: %s\n", path.c_str(), features, kinds, line.c_str());
            std::exit(2);
        }
    }
    if (plants.kind.empty()) {
        std::fprintf(stderr, "%s: no plants there\n", path.c_str());
        std::exit(2);
    }
    plants.measures = Eigen::Map<MatrixXf>(numbers.data(), features, static_cast<Eigen::Index>(plants.kind.size()));
    // To mean 0 and deviation 1.
    plants.measures.colwise() -= plants.measures.rowwise().mean().eval();
    const VectorXf deviation = (plants.measures.rowwise().squaredNorm() / static_cast<float>(plants.measures.cols())).cwiseSqrt();
    plants.measures.array().colwise() /= deviation.array();
    return plants;
}

/// Probabilities of the kinds, a plant a column.
MatrixXf softmax(MatrixXf scores) {
    scores.rowwise() -= scores.colwise().maxCoeff().eval();
    scores = scores.array().exp();
    scores.array().rowwise() /= scores.colwise().sum().eval().array();
    return scores;
}

void train(gradsync::ThreadBackend comm, const Plants& plants) {
    const auto all = static_cast<std::size_t>(plants.measures.cols());
    const auto part = gradsync::shard_range(all, comm.size(), comm.rank());
    const auto count = static_cast<Eigen::Index>(part.size());
    const MatrixXf x = plants.measures.middleCols(static_cast<Eigen::Index>(part.first), count);
    MatrixXf target = MatrixXf::Zero(kinds, count);
    for (Eigen::Index i = 0; i < count; ++i) target(plants.kind[part.first + static_cast<std::size_t>(i)], i) = 1;

    MatrixXf w1 = MatrixXf::NullaryExpr(hidden, features,
                                        [](Eigen::Index i, Eigen::Index j) { return 0.5f * std::sin(static_cast<float>(7 * i + 3 * j)); });
    VectorXf b1 = VectorXf::Zero(hidden), b2 = VectorXf::Zero(kinds);
    RowMajor w2 = RowMajor::Zero(kinds, hidden);  // row-major: it is all the same
    MatrixXf w1_gradient = w1;
    RowMajor w2_gradient = w2;
    VectorXf b1_gradient = b1, b2_gradient = b2;

    const std::vector parameters{gradsync::parameter("w1", w1, w1_gradient), gradsync::parameter("b1", b1, b1_gradient),
                                 gradsync::parameter("w2", w2, w2_gradient), gradsync::parameter("b2", b2, b2_gradient)};
    gradsync::Reducer sync(comm, parameters, {.averaging = gradsync::Averaging::weighted_mean});

    for (int step = 1; step <= steps; ++step) {
        sync.set_weight(static_cast<double>(count));
        const MatrixXf h = ((w1 * x).colwise() + b1).array().tanh();
        const MatrixXf p = softmax((w2 * h).colwise() + b2);
        const MatrixXf d2 = (p - target) / static_cast<float>(count);
        w2_gradient.noalias() = d2 * h.transpose();
        b2_gradient = d2.rowwise().sum();
        sync.mark_ready(3);
        sync.mark_ready(2);  // they leave while the first layer's are computed
        const MatrixXf d1 = (w2.transpose() * d2).array() * (1 - h.array().square());
        w1_gradient.noalias() = d1 * x.transpose();
        b1_gradient = d1.rowwise().sum();
        sync.mark_ready(1);
        sync.mark_ready(0);
        sync.finish();
        w1 -= rate * w1_gradient;
        b1 -= rate * b1_gradient;
        w2 -= rate * w2_gradient;
        b2 -= rate * b2_gradient;

        if (step % 50 != 0) continue;
        Eigen::Vector2d sums{0, 0};  // of the loss, and of plants that are told right
        for (Eigen::Index i = 0; i < count; ++i) {
            Eigen::Index guess = 0, truth = 0;
            p.col(i).maxCoeff(&guess);
            target.col(i).maxCoeff(&truth);
            sums += Eigen::Vector2d{-std::log(static_cast<double>(p(truth, i))), guess == truth};
        }
        comm.all_reduce(gradsync::buffer(sums), gradsync::ReduceOp::sum).wait();
        if (comm.rank() == 0)
            std::printf("step %d: loss %.6f, right %.0f of %zu\n", step, sums[0] / static_cast<double>(all), sums[1], all);
    }
}

int main(int argc, char** argv) {
    const int ranks = argc > 1 ? std::atoi(argv[1]) : 2;
    const Plants plants = read(argc > 2 ? argv[2] : "examples/adopt/iris.csv");
    if (ranks < 1 || static_cast<std::size_t>(ranks) > plants.kind.size()) {
        std::fprintf(stderr, "give a number of ranks from 1 to %zu\n", plants.kind.size());
        return 2;
    }
    gradsync::run_threads(ranks, [&](gradsync::ThreadBackend comm) { train(comm, plants); });
}
