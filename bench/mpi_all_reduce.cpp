// All-reduce (float, sum, in place) of ranks that are processes, for bench_all_reduce, which starts it under mpirun:
//
//     bench_mpi_all_reduce BYTES SECONDS [--no-pin]
//
// In turns, as everywhere: MpiBackend and the MPI library, and, among threads of rank 0 while the other ranks sleep,
// what they are compared with. Prints one sample a line: the contestant's name and the seconds for one call, the
// slowest rank's.

#include <gradsync/backend/mpi.hpp>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "buffers.hpp"
#include "collectives.hpp"
#include "limit_loop.hpp"

namespace {

using namespace bench;
using gradsync::DType;
using gradsync::MpiBackend;

struct Ranks {
    Ranks() {
        MPI_Comm_rank(MPI_COMM_WORLD, &rank);
        MPI_Comm_size(MPI_COMM_WORLD, &size);
    }
    int rank = 0;
    int size = 1;
};

class OverMpiBackend final : public Contestant {
public:
    OverMpiBackend(MpiBackend comm, void* buffer, std::size_t bytes)
        : rank_("all_reduce", DType::f32, std::move(comm), buffer, bytes) {}

    void meet(int) override { rank_.meet(); }
    double run(int, int times) override {
        return time([&] { rank_.run(times); });
    }

private:
    RankOfCollective<MpiBackend> rank_;
};

/// A function of the MPI library.
class OfTheLibrary final : public Contestant {
public:
    explicit OfTheLibrary(std::function<void()> all_reduce) : all_reduce_(std::move(all_reduce)) {}

    void meet(int) override { MPI_Barrier(MPI_COMM_WORLD); }
    double run(int, int times) override {
        return time([&] {
            for (int i = 0; i < times; ++i) all_reduce_();
        });
    }

private:
    std::function<void()> all_reduce_;
};

/// A contestant whose ranks are threads, of rank 0.
class AmongThreads final : public Contestant {
public:
    AmongThreads(Contestant& contestant, int threads, bool pin)
        : contestant_(contestant), threads_(threads), pin_(pin) {}

    bool takes_part(int rank) const override { return rank == 0; }
    void meet(int) override {}
    double run(int, int times) override {
        std::vector<double> seconds(static_cast<std::size_t>(threads_));
        std::vector<std::thread> threads;
        for (int t = 0; t < threads_; ++t)
            threads.emplace_back([&, t] {
                if (!contestant_.takes_part(t)) return;
                if (pin_ || contestant_.needs_own_cores()) pin_to_core(t % cores());
                else unpin();
                contestant_.meet(t);
                seconds[static_cast<std::size_t>(t)] = contestant_.run(t, times);
            });
        for (std::thread& thread : threads) thread.join();
        return *std::max_element(seconds.begin(), seconds.end());
    }

private:
    Contestant& contestant_;
    int threads_;
    bool pin_;
};

/// The most of what the ranks say. It sleeps until all have: MPI would spin.
double slowest(double seconds) {
    MPI_Request request;
    MPI_Iallreduce(MPI_IN_PLACE, &seconds, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD, &request);
    for (int all = 0;; std::this_thread::sleep_for(std::chrono::microseconds(50))) {
        MPI_Test(&request, &all, MPI_STATUS_IGNORE);
        if (all) return seconds;
    }
}

void run(std::size_t bytes, const ContestOptions& options) {
    const Ranks ranks;
    MpiBackend sharing(MPI_COMM_WORLD);
    MpiBackend sending(MPI_COMM_WORLD, {.shared_memory = false});
    const auto shared = sharing.allocate(bytes);
    const auto ordinary = sending.allocate(bytes);  // as good as memory of one process gets: for all others

    OverMpiBackend mpi(sharing, shared.data(), bytes);
    OverMpiBackend mpi_borrowed(sharing, ordinary.data(), bytes);
    OverMpiBackend mpi_messages(sending, ordinary.data(), bytes);
    const int count = static_cast<int>(bytes / sizeof(float));
    OfTheLibrary mpi_library(
        [&] { MPI_Allreduce(MPI_IN_PLACE, ordinary.data(), count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); });
    OfTheLibrary mpi_library_nonblocking([&] {
        MPI_Request request;
        MPI_Iallreduce(MPI_IN_PLACE, ordinary.data(), count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD, &request);
        MPI_Wait(&request, MPI_STATUS_IGNORE);
    });

    std::vector<std::string> names{"mpi", "mpi_borrowed", "mpi_messages", "mpi_library", "mpi_library_nonblocking"};
    std::vector<Contestant*> contestants{&mpi, &mpi_borrowed, &mpi_messages, &mpi_library, &mpi_library_nonblocking};
    for (std::size_t c = 0; c < contestants.size(); ++c) {
        void* const buffer = c == 0 ? shared.data() : ordinary.data();
        fill(buffer, bytes, DType::f32, static_cast<float>(ranks.rank + 1));
        contestants[c]->run(ranks.rank, 1);
        check_filled(buffer, bytes, DType::f32, sum_of_ranks(ranks.size), names[c]);
        fill(buffer, bytes, DType::f32, 0);
    }

    Buffers buffers(ranks.size, ranks.rank == 0 ? bytes : 0);
    ThreadsCollective threads("all_reduce", DType::f32, buffers.pointers(), bytes);
    LimitLoop limit(buffers.pointers(), bytes);
    if (ranks.rank == 0) {
        buffers.check_sum(threads, DType::f32, "threads");
        if (LimitLoop::supports(ranks.size)) buffers.check_sum(limit, DType::f32, "limit");
    }
    AmongThreads threads_of_one(threads, ranks.size, options.pin), limit_of_one(limit, ranks.size, options.pin);
    names.push_back("threads");
    contestants.push_back(&threads_of_one);
    if (LimitLoop::supports(ranks.size)) {
        names.push_back("limit");
        contestants.push_back(&limit_of_one);
    }

    const ContestResult samples = take_part(ranks.rank, contestants, options, slowest);
    if (ranks.rank != 0) return;
    for (std::size_t c = 0; c < contestants.size(); ++c)
        for (double sample : samples[c]) std::printf("%s %.9e\n", names[c].c_str(), sample);
}

}  // namespace

int main(int argc, char** argv) {
    MPI_Init(&argc, &argv);
    try {
        if (argc < 3) throw std::runtime_error("usage: bench_mpi_all_reduce BYTES SECONDS [--no-pin]");
        run(std::strtoull(argv[1], nullptr, 10), {.seconds = std::strtod(argv[2], nullptr),
                                                  .least_rounds = 7,
                                                  .pin = argc == 3,
                                                  .warm_ups = 6});  // 3 are too few at 25 MiB
    } catch (const std::exception& e) {
        std::fprintf(stderr, "bench_mpi_all_reduce: %s\n", e.what());
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    MPI_Finalize();
}
