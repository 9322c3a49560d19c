// SPDX-License-Identifier: BSL-1.0
#include <gradsync/backend/nccl.hpp>

#include <cstdio>
#include <string>

// Runs without a device as well: everything of a one-rank communicator but the kernels of means, which would need nvcc.
int main() {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        std::puts("no device: built and linked");
        return 0;
    }
    gradsync::NcclBackend comm = gradsync::NcclBackend::from_environment();
    std::puts(comm.describe().c_str());
    comm.barrier().wait();
    return 0;
}
