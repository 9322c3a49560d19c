// Times MPI_Allreduce(float, sum, in place), for bench_all_reduce, which starts it under mpirun:
//
//     bench_mpi_all_reduce BYTES SECONDS
//
// Prints one sample a line: seconds for one call, the slowest rank's.

#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <gradsync/kernel/host_buffer.hpp>

int main(int argc, char** argv) {
    MPI_Init(&argc, &argv);
    int rank = 0;
    int size = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    if (argc != 3) {
        std::fprintf(stderr, "usage: bench_mpi_all_reduce BYTES SECONDS\n");
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    const auto bytes = static_cast<std::size_t>(std::strtoull(argv[1], nullptr, 10));
    const double seconds = std::strtod(argv[2], nullptr);
    const int count = static_cast<int>(bytes / sizeof(float));
    gradsync::kernel::HostBuffer memory(bytes);
    auto* buffer = static_cast<float*>(memory.data());

    const auto all_reduce = [&] { MPI_Allreduce(MPI_IN_PLACE, buffer, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); };
    const auto batch = [&](int times) {
        MPI_Barrier(MPI_COMM_WORLD);
        const double begin = MPI_Wtime();
        for (int i = 0; i < times; ++i) all_reduce();
        double once = (MPI_Wtime() - begin) / times;
        MPI_Allreduce(MPI_IN_PLACE, &once, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
        return once;  // the same on all ranks, so that what follows from it is too
    };

    std::fill_n(buffer, count, static_cast<float>(rank + 1));
    all_reduce();
    const auto sum = static_cast<float>(size * (size + 1) / 2);
    if (std::any_of(buffer, buffer + count, [&](float x) { return x != sum; })) {
        std::fprintf(stderr, "bench_mpi_all_reduce: the sum is wrong\n");
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    std::fill_n(buffer, count, 0.0f);

    int times = 1;
    double once = batch(1);
    for (int i = 0; i < 4; ++i) {
        times = std::clamp(static_cast<int>(300e-6 / once), 1, 10000);
        once = std::min(once, batch(times));
    }
    const int rounds = std::clamp(static_cast<int>(seconds / (once * times)), 5, 501);
    std::vector<double> samples;
    for (int i = 0; i < rounds; ++i) samples.push_back(batch(times));
    if (rank == 0)
        for (double sample : samples) std::printf("%.9e\n", sample);
    MPI_Finalize();
}
