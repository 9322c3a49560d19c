// ctest: LIBRARIES gradsync_fake_nccl gradsync_fake_passes TIMEOUT 60 COMPILE_OPTIONS -O1
// Memory of NCCL's own: made on all ranks, given back, refused and replaced. Over the fakes of support/fake.
#include <gradsync/backend/nccl.hpp>

#include <chrono>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "nccl_fake.hpp"

using namespace std::chrono_literals;
using namespace gradsync_test;
using gradsync::DType;
using gradsync::Errc;
using gradsync::MemorySpace;
using gradsync::NcclBackend;
using gradsync::ReduceOp;

TEST_CASE("NcclBackend: memory from allocate is what was wished for, or the best that there is, and says why") {
    using gradsync::NcclMemory;
    struct Expectation {
        NcclMemory wish;
        int version;
        bool has_windows;
        int windows;
        std::string described;
    };
    const std::vector<Expectation> expectations{
        {NcclMemory::plain, NCCL_VERSION(2, 28, 9), true, 0, "2 devices over NCCL 2.28.9"},
        {NcclMemory::registered, NCCL_VERSION(2, 28, 9), true, 0, "2 devices over NCCL 2.28.9, buckets in registered memory"},
        {NcclMemory::windows, NCCL_VERSION(2, 28, 9), true, 2, "2 devices over NCCL 2.28.9, buckets in symmetric windows"},
        {NcclMemory::windows, NCCL_VERSION(2, 28, 9), false, 0,
         "2 devices over NCCL 2.28.9, buckets in registered memory, as NCCL has no window for them here; NCCL_DEBUG=INFO tells why"},
        {NcclMemory::windows, NCCL_VERSION(2, 26, 2), true, 0, "2 devices over NCCL 2.26.2, buckets in registered memory, as rank 0 has, or was compiled for, NCCL 2.26.2"},
        {NcclMemory::registered, NCCL_VERSION(2, 18, 3), true, 0, "2 devices over NCCL 2.18.3, buckets in plain memory, as rank 0 has, or was compiled for, NCCL 2.18.3"},
    };
    const Nothing left;
    Findings findings;
    for (const Expectation& expected : expectations)
        for (const int looks : {0, 3}) {
            if (expected.version > NCCL_VERSION_CODE) continue;  // compiled with an older header
            gradsync_fake::be_slow(looks);
            gradsync_fake::pretend(expected.version, expected.has_windows);
            on_nccl_ranks(
                2,
                [&](NcclBackend comm) {
                    {
                        const auto first = comm.allocate(4000), second = comm.allocate(100);
                        std::vector<float> values(1000, 7);
                        cudaMemcpy(values.data(), first.data(), 4000, cudaMemcpyDeviceToHost);
                        findings.check(values == std::vector<float>(1000), "the memory is not zero");
                        comm.host().barrier().wait();
                        findings.check(gradsync_fake::windows() == 2 * expected.windows, std::to_string(gradsync_fake::windows()) + " windows");
                        findings.check(comm.describe() == expected.described, comm.describe());
                        NcclBackend other = comm.duplicate();
                        comm.host().barrier().wait();
                        values.assign(1000, 1);
                        cudaMemcpy(first.data(), values.data(), 4000, cudaMemcpyHostToDevice);
                        other.all_reduce({first.data(), 1000, DType::f32, MemorySpace::device}, ReduceOp::sum).wait();
                        cudaMemcpy(values.data(), first.data(), 4000, cudaMemcpyDeviceToHost);
                        findings.check(values[999] == 2, "a wrong sum");
                        comm.host().barrier().wait();
                    }
                    comm.host().barrier().wait();
                    findings.check(gradsync_fake::windows() == 0, "a window stays open");
                    comm.barrier().wait();
                },
                {.timeout = 60s, .memory = expected.wish});
        }
    gradsync_fake::be_slow(0);
    gradsync_fake::pretend(NCCL_VERSION_CODE, true);
}

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 3)
TEST_CASE("NcclBackend: who does not allocate is waited for no longer than the limit, and a refusal ends it on all ranks") {
    using gradsync::NcclMemory;
    const Nothing left;
    Findings findings;
    on_nccl_ranks(
        2,
        [&](NcclBackend comm) {
            if (comm.rank() == 1) comm.set_timeout(200ms);
            const auto error = error_of([&] {
                if (comm.rank() == 0) return comm.host().barrier().wait();  // a misunderstanding
                comm.allocate(1000);
            });
            findings.check(error && error->errc() == Errc::timeout && error->context().peer == 0 && mentions(*error, "rank 0 did not start it"), error ? error->what() : "nothing was thrown");
            findings.check(comm.rank() == 0 || mentions(*error, "in allocate(1000 bytes)"), error->what());
        },
        {.timeout = 60s, .memory = NcclMemory::windows});
    // Where one rank has no memory for it, the others do not wait.
    on_nccl_ranks(
        2,
        [&](NcclBackend comm) {
            comm.host().barrier().wait();
            const int before = gradsync_fake::living();
            comm.host().barrier().wait();
            const auto error = error_of([&] {
                if (comm.rank() == 1) {
                    findings.check(soon([&] { return gradsync_fake::living() > before; }), "rank 0 did not allocate");
                    gradsync_fake::fail_next("cudaMalloc", cudaErrorMemoryAllocation);
                }
                comm.allocate(1000);
            });
            findings.check(error && error->errc() == Errc::device_failed && error->context().peer == 1 && mentions(*error, "allocate(1000 bytes)") && mentions(*error, "ncclMemAlloc"), error ? error->what() : "nothing was thrown");
        },
        {.timeout = 60s, .memory = NcclMemory::windows});
    on_nccl_ranks(
        2,
        [&](NcclBackend comm) {
            if (comm.rank() == 0) gradsync_fake::refuse_next("ncclCommWindowRegister", ncclInternalError);
            comm.host().barrier().wait();
            const auto error = error_of([&] { comm.allocate(1000); });
            findings.check(error && mentions(*error, "allocate(1000 bytes)") && mentions(*error, "ncclCommWindowRegister: a fake error"), error ? error->what() : "nothing was thrown");
        },
        {.timeout = 60s, .memory = NcclMemory::windows});
}
#endif

TEST_CASE("NcclBackend: memory of other sizes is refused on all ranks, which go on") {
    const Nothing left;
    Findings findings;
    for (const auto memory : {gradsync::NcclMemory::registered, gradsync::NcclMemory::windows})
        on_nccl_ranks(
            3,
            [&](NcclBackend comm) {
                const auto error = error_of([&] { comm.allocate(comm.rank() == 1 ? 2000 : 1000); });
                findings.check(error && error->errc() == Errc::parameter_mismatch && error->context().peer == 1 &&
                                   mentions(*error, "rank 0 asks for 1000 bytes, rank 1 for 2000"),
                               error ? error->what() : "nothing was thrown");
                const auto same = comm.allocate(1000);
                comm.all_reduce({same.data(), 250, DType::f32, MemorySpace::device}, ReduceOp::sum).wait();
                comm.host().barrier().wait();
            },
            {.timeout = 60s, .memory = memory});
}

TEST_CASE("NcclBackend: memory is not given back before the device is done with it") {
    const Nothing left;
    Findings findings;
    for (const auto memory : {gradsync::NcclMemory::plain, gradsync::NcclMemory::registered, gradsync::NcclMemory::windows})
        on_nccl_ranks(
            2,
            [&](NcclBackend comm) {
                const gradsync::cuda::Stream compute = gradsync::cuda::make_stream();
                comm.set_stream(compute.get());
                auto bucket = comm.allocate(4000);
                DeviceMemory result(floats(1000, 1));
                std::optional<gradsync_fake::Busy> backward(std::in_place, compute.get());
                comm.all_reduce({bucket.data(), 1000, DType::f32, MemorySpace::device}, ReduceOp::sum).wait_on(compute.get());
                cudaMemcpyAsync(result.data(), bucket.data(), 4000, cudaMemcpyDeviceToDevice, compute.get());
                std::thread device([&] {
                    std::this_thread::sleep_for(20ms);
                    backward.reset();
                });
                bucket = {};
                findings.check(cudaStreamQuery(compute.get()) == cudaSuccess, "it is gone, and the device has not read it yet");
                device.join();
                findings.check(first_of(result) == 0, "a wrong copy");
                comm.barrier().wait();
            },
            {.timeout = 60s, .memory = memory});
}
