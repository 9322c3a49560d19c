// SPDX-License-Identifier: BSL-1.0
// oneCCL's all-reduce: see peer_under_mpi.hpp.

#include <cstddef>
#include <oneapi/ccl.hpp>

#include "peer_under_mpi.hpp"

namespace {

class OneCcl final : public bench::Contestant {
public:
    OneCcl(const bench::MpiRanks& ranks, void* buffer, std::size_t bytes)
        : comm_(communicator(ranks)), buffer_(static_cast<float*>(buffer)), count_(bytes / sizeof(float)) {}

    void meet(int) override { ccl::barrier(comm_).wait(); }
    double run(int, int times) override {
        return time([&] {
            for (int i = 0; i < times; ++i) ccl::allreduce(buffer_, buffer_, count_, ccl::reduction::sum, comm_).wait();
        });
    }

private:
    static ccl::communicator communicator(const bench::MpiRanks& ranks) {
        ccl::init();
        ccl::kvs::address_type address{};
        ccl::shared_ptr_class<ccl::kvs> kvs;
        if (ranks.rank == 0) {
            kvs = ccl::create_main_kvs();
            address = kvs->get_address();
        }
        MPI_Bcast(address.data(), static_cast<int>(address.size()), MPI_BYTE, 0, MPI_COMM_WORLD);
        if (ranks.rank != 0) kvs = ccl::create_kvs(address);
        return ccl::create_communicator(ranks.size, ranks.rank, kvs);
    }

    ccl::communicator comm_;
    float* buffer_;
    std::size_t count_;
};

}  // namespace

int main(int argc, char** argv) {
    const auto make = [](const bench::MpiRanks& ranks, void* buffer, std::size_t bytes) { return OneCcl(ranks, buffer, bytes); };
    return bench::main_of_peer(argc, argv, make, MPI_THREAD_MULTIPLE);
}
