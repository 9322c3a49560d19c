// SPDX-License-Identifier: BSL-1.0
// ensmallen's Adam on 1, 2, 3 or 5 ranks, which are threads: is this iris a virginica?     ensmallen_train [RANKS [FILE]]
#include <cstdio>

#include <ensmallen.hpp>
#include <gradsync/gradsync.hpp>

struct Loss {  // a sum over points, as ensmallen wants it, here over those of all ranks; a point is a column of x
    gradsync::ThreadBackend comm;
    arma::mat x, y, unused = {};
    std::size_t NumFunctions() const { return x.n_cols; }
    void Shuffle() {}
    double EvaluateWithGradient(const arma::mat& w, std::size_t first, arma::mat& gradient, std::size_t count) {
        const arma::mat some = x.cols(first, first + count - 1), truth = y.cols(first, first + count - 1);
        const arma::mat guess = 1 / (1 + arma::exp(-w.t() * some));
        gradient = some * (guess - truth).t();
        double loss = -arma::accu(arma::log(truth % guess + (1 - truth) % (1 - guess)));
        gradsync::sum(comm, gradient, loss);  // all ranks see one loss, so they stop together
        return loss;
    }
    double Evaluate(const arma::mat& w, std::size_t first, std::size_t count) { return EvaluateWithGradient(w, first, unused, count); }
};

void train(gradsync::ThreadBackend comm, const arma::mat& plants) {
    const arma::mat mine = plants.cols(arma::regspace<arma::uvec>(comm.rank(), comm.size(), plants.n_cols - 1));
    Loss loss{comm, arma::join_cols(mine.rows(0, 3), arma::ones(1, mine.n_cols)), arma::conv_to<arma::mat>::from(mine.row(4) == 2)};
    arma::mat w(5, 1);
    const double before = loss.Evaluate(w, 0, mine.n_cols);
    const double after = ens::Adam(0.1, 30 / comm.size(), 0.9, 0.999, 1e-8, 300 * mine.n_cols, 1e-5, true, true, true).Optimize(loss, w);
    const std::size_t digest = std::hash<std::string_view>()({reinterpret_cast<const char*>(w.memptr()), w.n_elem * sizeof(double)});
    std::printf("rank %d: loss %.6f, then loss %.6f, digest %016lx\n", comm.rank(), before, after, digest);
}

int main(int argc, char** argv) {
    std::ifstream file(argc > 2 ? argv[2] : "examples/adopt/iris.csv");
    arma::mat plants;
    if (!plants.load(file.ignore(999, '\n').ignore(999, '\n'), arma::csv_ascii)) return 2;  // behind two lines of comments
    plants = arma::shuffle(plants).t();                                                     // one order for all ranks
    gradsync::run_threads(argc > 1 ? std::atoi(argv[1]) : 2, [&](gradsync::ThreadBackend comm) { train(comm, plants); });
}
