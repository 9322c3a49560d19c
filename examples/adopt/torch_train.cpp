// SPDX-License-Identifier: BSL-1.0
// A libtorch module, trained over threads or MPI; torch_ddp.py is the same in Python with PyTorch's DistributedDataParallel.
//
//     adopt_torch threads RANKS [STEPS [TEXT [WEIGHTS]]]
//     mpirun -n RANKS adopt_torch mpi RANKS ...
//
// Trains a model of bytes on TEXT (README.md) for STEPS steps (20). The ranks share each batch, so losses and weights match a
// one-rank run, up to rounding. Writes the weights to the file WEIGHTS, as doubles. Set OPENBLAS_NUM_THREADS=1, or ranks
// compete for cores.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <torch/torch.h>

#include <gradsync/gradsync.hpp>
#include <gradsync/interop/torch_reducer.hpp>
#ifdef ADOPT_MPI
#include <gradsync/interop/boost_mpi.hpp>
#endif

namespace {

constexpr std::int64_t context = 8, width = 32, hidden = 256, batch = 64;

/// Predicts a byte from those before it.
struct Net : torch::nn::Module {
    Net()
        : embedding(register_module("embedding", torch::nn::Embedding(256, width))),
          first(register_module("first", torch::nn::Linear(context * width, hidden))),
          second(register_module("second", torch::nn::Linear(hidden, hidden))),
          last(register_module("last", torch::nn::Linear(hidden, 256))) {}

    torch::Tensor forward(const torch::Tensor& bytes) { return last(torch::tanh(second(torch::tanh(first(embedding(bytes).flatten(1)))))); }

    torch::nn::Embedding embedding;
    torch::nn::Linear first, second, last;
};

struct Job {
    int steps = 20;
    std::string text = "README.md";
    std::string weights = {};
};

/// Rows `first`, `first` + `stride`, ... of a step's batch.
torch::Tensor rows(const torch::Tensor& text, int step, std::int64_t first, std::int64_t stride) {
    std::vector<torch::Tensor> result;
    for (std::int64_t i = first; i < batch; i += stride) {
        const std::int64_t place = (step * batch + i) * 7919 % (text.size(0) - context);
        result.push_back(text.slice(0, place, place + context + 1));
    }
    return torch::stack(result);
}

template <class Backend>
void train(Backend comm, const Job& job) {
    std::ifstream file(job.text, std::ios::binary);
    std::string bytes(std::istreambuf_iterator<char>(file), {});
    if (static_cast<std::int64_t>(bytes.size()) <= context)
        throw std::invalid_argument("'" + job.text + "' cannot be read, or is too short");
    const auto text = torch::from_blob(bytes.data(), {static_cast<std::int64_t>(bytes.size())}, torch::kByte).to(torch::kLong);

    const auto model = [] {
        static std::mutex one_generator;  // for all threads of a process
        const std::lock_guard lock(one_generator);
        torch::manual_seed(1);
        return std::make_shared<Net>();
    }();
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    gradsync::TorchReducer sync(comm, *model);
    sync.broadcast_parameters();

    std::vector<double> milliseconds;
    for (int step = 0; step < job.steps; ++step) {
        const auto data = rows(text, step, comm.rank(), comm.size());
        const auto begin = std::chrono::steady_clock::now();
        optimizer.zero_grad();
        auto loss = torch::nn::functional::cross_entropy(model->forward(data.slice(1, 0, context)), data.select(1, context));
        loss.backward();  // full buckets leave meanwhile
        sync.finish();
        optimizer.step();
        milliseconds.push_back(std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());

        double mean = loss.template item<double>();
        comm.all_reduce(gradsync::buffer(std::span(&mean, 1)), gradsync::ReduceOp::mean).wait();
        if (comm.rank() == 0) std::printf("step %d: loss %.9f\n", step, mean);
    }
    if (comm.rank() != 0) return;
    std::sort(milliseconds.begin(), milliseconds.end());
    if (!milliseconds.empty()) std::printf("step time: %.3f ms\n", milliseconds[milliseconds.size() / 2]);
    if (job.weights.empty()) return;
    std::ofstream out(job.weights, std::ios::binary);
    for (const auto& p : model->parameters()) {
        const auto values = p.detach().to(torch::kDouble).contiguous();
        out.write(static_cast<const char*>(values.data_ptr()), static_cast<std::streamsize>(values.nbytes()));
    }
    if (!out.flush()) throw std::runtime_error("'" + job.weights + "' cannot be written");
}

int usage(const char* program) {
#ifdef ADOPT_MPI
    const char* backends = "threads|mpi";
#else
    const char* backends = "threads";
#endif
    std::fprintf(stderr, "usage: %s %s RANKS [STEPS [TEXT [WEIGHTS]]], RANKS a divisor of %d\n", program, backends,
                 static_cast<int>(batch));
    return 2;
}

}  // namespace

int main(int argc, char** argv) {
    const std::string backend = argc > 1 ? argv[1] : "";
    const int ranks = argc > 2 ? std::atoi(argv[2]) : 0;
    Job job;
    if (argc > 3) job.steps = std::atoi(argv[3]);
    if (argc > 4) job.text = argv[4];
    if (argc > 5) job.weights = argv[5];
    if (argc > 6 || ranks < 1 || batch % ranks != 0 || job.steps < 0) return usage(argv[0]);
    torch::set_num_threads(1);  // as many ranks as cores share them

#ifdef ADOPT_MPI
    std::optional<boost::mpi::environment> environment;  // outlives the block: its destructor waits for all ranks
#endif
    try {
        if (backend == "threads") {
            gradsync::run_threads(ranks, [&](gradsync::ThreadBackend comm) { train(comm, job); });
            return 0;
        }
#ifdef ADOPT_MPI
        if (backend == "mpi") {
            environment.emplace(argc, argv, boost::mpi::threading::multiple, false);
            gradsync::MpiBackend comm(boost::mpi::communicator{});
            if (comm.size() != ranks)
                throw std::invalid_argument("mpirun started " + std::to_string(comm.size()) + " processes, not " + argv[2]);
            train(comm, job);
            return 0;
        }
#endif
    } catch (const std::invalid_argument& e) {
        std::fprintf(stderr, "%s: %s\n", argv[0], e.what());
        std::_Exit(2);  // MPI_Finalize may wait for ranks that are gone
    } catch (const std::exception& e) {
        std::fprintf(stderr, "%s: %s\n", argv[0], e.what());
        std::_Exit(1);
    }
    return usage(argv[0]);
}
