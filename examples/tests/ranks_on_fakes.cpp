// SPDX-License-Identifier: BSL-1.0
// gradsync_train --device cuda --backend nccl over the fakes, with all WORLD_SIZE ranks in one process: the fake NCCL connects threads only.

#include <gradsync/backend/nccl.hpp>
#include <gradsync/gradsync.hpp>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <thread>
#include <vector>

#include "../cuda/train_cuda.hpp"
#include "../run_rank.hpp"
#include "support/fake/fake.hpp"
#include "support/ports.hpp"

using namespace gradsync_train;

int main(int argc, char** argv) {
    return exit_code_of([&] {
        const int size = std::atoi(std::getenv("WORLD_SIZE"));
        const Job job = prepare(parse_options(argc, argv, size));
        const std::uint16_t port = gradsync_test::free_port();
        std::vector<Results> results(static_cast<std::size_t>(size));
        std::vector<std::thread> ranks;
        for (int rank = 0; rank < size; ++rank)
            ranks.emplace_back([&, rank] {  // an exception ends the program
                const CudaOps ops{job.options.precision == "f32" ? Precision::f32 : Precision::bf16};
                gs::TcpRendezvous rendezvous({.rank = rank, .size = size, .port = port});
                const gs::NcclBackend comm(rendezvous, {.timeout = time_limit(job.options), .stream = ops.stream()});
                results[static_cast<std::size_t>(rank)] = run_rank(ops, comm, job);
            });
        for (std::thread& rank : ranks) rank.join();
        present(job, results[0]);
        if (gradsync_fake::misuses() != 0) throw std::logic_error("the fakes were misused: see above");
    });
}
