// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <mpi.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "../buffers.hpp"
#include "../mpi_ranks.hpp"

namespace bench {

/// The whole of a program that bench_all_reduce runs as a --peer: an all-reduce of floats, in place, by a library that is started under mpiexec.
/// A program of its own, as one process cannot have two MPIs. `make(ranks, buffer, bytes)` returns the library's Contestant.
///
///     mpiexec -n RANKS PROGRAM NAME BYTES SECONDS LEAST ROUNDS pin|no-pin
template <class Make>
int main_of_peer(int argc, char** argv, Make&& make, int thread_level = MPI_THREAD_SINGLE) {
    const auto run = [&](const std::vector<std::string>& arguments) {
        if (arguments.size() != 6) throw std::runtime_error("takes NAME BYTES SECONDS LEAST ROUNDS pin|no-pin");
        constexpr auto f32 = gradsync::DType::f32;
        const std::string& name = arguments[0];
        const std::size_t bytes = std::strtoull(arguments[1].c_str(), nullptr, 10);
        const MpiRanks ranks;
        const gradsync::kernel::HostBuffer buffer(bytes);
        auto library = make(ranks, buffer.data(), bytes);
        fill(buffer.data(), bytes, f32, static_cast<float>(ranks.rank + 1));
        library.run(ranks.rank, 1);
        check_filled(buffer.data(), bytes, f32, sum_of_ranks(ranks.size), name);
        fill(buffer.data(), bytes, f32, 0);
        Contestant* const contestants[] = {&library};
        const ContestOptions options = contest_options_of({arguments.begin() + 2, arguments.end()});
        const ContestResult samples = take_part(ranks.rank, contestants, options, slowest_of_mpi_ranks);
        if (ranks.rank != 0) return;
        for (double sample : samples[0].seconds) std::printf("%s %.9e\n", name.c_str(), sample);
    };
    return main_of_mpi_helper(argc, argv, run, thread_level);
}

}  // namespace bench
