// ctest: LIBRARIES gradsync_fake_nccl gradsync_fake_passes TIMEOUT 60 COMPILE_OPTIONS -O1
// What NcclBackend does beside what every backend does: streams, events, time limits of the device's time, NCCL's own failures,
// adopted communicators, and that nothing is left behind. Over the fakes of support/fake; groups and memory have files of their own.
#include <gradsync/backend/nccl.hpp>

#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
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

TEST_CASE("NcclBackend: a collective comes after what is on the compute stream, and keeps no host waiting") {
    const Nothing left;
    Findings findings;
    on_nccl_ranks(2, [&](NcclBackend comm) {
        const gradsync::cuda::Stream compute = gradsync::cuda::make_stream(), other = gradsync::cuda::make_stream();
        comm.set_stream(compute.get());
        findings.check(comm.stream() == compute.get(), "another stream");
        DeviceMemory data(floats(1000, 0)), result(floats(1000, 0));
        std::optional<gradsync_fake::Busy> backward(std::in_place, compute.get());
        const auto values = floats(1000, static_cast<float>(comm.rank() + 1));
        cudaMemcpyAsync(data.data(), values.data(), values.size(), cudaMemcpyHostToDevice, compute.get());
        auto work = comm.all_reduce(view_of(data, 1000), ReduceOp::sum);
        findings.check(!work.test(), "complete before the compute stream got there");
        work.wait_on(other.get());  // returns at once
        work.wait();                // complete, as far as the host is concerned
        findings.check(work.test(), "a Work that was handed over is not complete");
        cudaMemcpyAsync(result.data(), data.data(), values.size(), cudaMemcpyDeviceToDevice, other.get());
        findings.check(cudaStreamQuery(other.get()) == cudaErrorNotReady, "the stream did not wait");
        backward.reset();
        cudaStreamSynchronize(other.get());
        findings.check(first_of(result) == 3, "a wrong sum: " + std::to_string(first_of(result)));
        comm.barrier().wait();
    });
}

TEST_CASE("NcclBackend: the time limit is of the collective, not of the computation before it") {
    const Nothing left;
    Findings findings;
    on_nccl_ranks(2, [&](NcclBackend comm) {
        const gradsync::cuda::Stream compute = gradsync::cuda::make_stream(), other = gradsync::cuda::make_stream();
        comm.barrier().wait();
        comm.set_timeout(1s);
        comm.set_stream(compute.get());
        DeviceMemory data(floats(10, 1));
        {
            const gradsync_fake::Busy backward(compute.get());
            comm.all_reduce(view_of(data, 10), ReduceOp::sum).wait_on(other.get());
            std::this_thread::sleep_for(1500ms);
        }
        cudaStreamSynchronize(other.get());
        findings.check(first_of(data) == 2, "a wrong sum");
        comm.set_timeout(60s);
        const auto error = error_of([&] { comm.barrier().wait(); });
        findings.check(!error, error ? error->what() : "");
    });
}

TEST_CASE("NcclBackend: where no host waits, ranks that stay away are named all the same") {
    const Nothing left;
    Findings findings;
    on_nccl_ranks(3, [&](NcclBackend comm) {
        comm.barrier().wait();
        auto alike = comm.host().split(comm.rank() == 1, comm.rank());
        std::unique_ptr<gradsync::Error> error;
        if (comm.rank() == 1) {
            error = error_of([&] { comm.host().barrier().wait(); });  // hears of it
        } else {
            const gradsync::cuda::Stream stream = gradsync::cuda::make_stream();
            DeviceMemory data(floats(10, 1));
            comm.all_reduce(view_of(data, 10), ReduceOp::sum).wait_on(stream.get());
            error = error_of([&] { alike.barrier().wait(); });  // so that nobody's limit runs while the other one is merely slow
            comm.set_timeout(200ms);
            cudaStreamSynchronize(stream.get());  // ends when the collective is aborted
            if (!error) error = error_of([&] { comm.barrier().wait(); });
        }
        if (!error) return findings.check(false, "nothing was thrown");
        findings.check(error->errc() == Errc::timeout && error->context().peer == 1, error->what());
        findings.check(mentions(*error, "rank 1 did not start it"), error->what());
        findings.check(mentions(*error, "all_reduce(sum, f32, 10 elements)"), error->what());
    });
}

TEST_CASE("NcclBackend: an asynchronous failure of NCCL's ends it on all ranks, which name the rank and the collective") {
    const Nothing left;
    Findings findings;
    on_nccl_ranks(3, [&](NcclBackend comm) {
        DeviceMemory data(floats(10, 1));
        comm.all_reduce(view_of(data, 10), ReduceOp::sum).wait();
        const auto error = error_of([&] {
            comm.host().barrier().wait();  // all ranks have the first sum
            if (comm.rank() == 1) gradsync_fake::fail_asynchronously(3, 1, ncclRemoteError);
            if (comm.rank() == 0) std::this_thread::sleep_for(20ms);  // the others wait for it
            if (comm.rank() == 0) comm.host().barrier().wait();
            comm.all_reduce(view_of(data, 10), ReduceOp::sum).wait();
            if (comm.rank() == 0) throw std::logic_error("nothing was thrown");
        });
        findings.check(error && error->errc() == Errc::device_failed && error->context().peer == 1, error ? error->what() : "nothing was thrown");
        findings.check(error && mentions(*error, "network error"), error ? error->what() : "");
    });
}

TEST_CASE("NcclBackend: a failure of the runtime's is one of this rank") {
    const Nothing left;
    Findings findings;
    on_nccl_ranks(2, [&](NcclBackend comm) {
        DeviceMemory data(floats(10, 1));
        comm.all_reduce(view_of(data, 10), ReduceOp::sum).wait();
        if (comm.rank() == 1) {
            comm.host().barrier().wait();
            gradsync_fake::fail_next("cudaMalloc", cudaErrorMemoryAllocation);
            const auto error = error_of([&] { comm.allocate(100); });
            findings.check(error && error->errc() == Errc::device_failed && mentions(*error, "cudaMalloc: out of memory"), error ? error->what() : "nothing");
            comm.fail(error->what());
            return;
        }
        const auto error = error_of([&] {
            comm.host().barrier().wait();  // all memory that this rank needs is there
            comm.all_reduce(view_of(data, 10), ReduceOp::sum).wait();
        });
        findings.check(error && error->errc() == Errc::peer_failed && error->context().peer == 1 && mentions(*error, "out of memory"), error ? error->what() : "nothing");
    });
}

TEST_CASE("NcclBackend: communicators that are there already") {
    const Nothing left;
    ncclUniqueId id;
    ncclGetUniqueId(&id);
    const auto made = [&](int rank, int size) {
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = 0;
        ncclComm_t comm = nullptr;
        ncclCommInitRankConfig(&comm, size, id, rank, &config);
        ncclResult_t code = ncclInProgress;
        while (code == ncclInProgress) ncclCommGetAsyncError(comm, &code);
        return comm;
    };
    const auto sum = [](NcclBackend& comm) {
        DeviceMemory data(floats(10, 1));
        comm.all_reduce(view_of(data, 10), ReduceOp::sum).wait();
        return first_of(data);
    };
    Findings findings;
    SUBCASE("attached: they stay the caller's") {
        std::vector<ncclComm_t> comms(2);
        run_rank_threads(
            2, [&](auto& rendezvous) { return NcclBackend::attach(rendezvous, comms[static_cast<std::size_t>(rendezvous.rank())] = made(rendezvous.rank(), 2), {.timeout = 60s}); },
            [&](NcclBackend comm) { findings.check(sum(comm) == 2, "a wrong sum"); });
        for (ncclComm_t comm : comms) CHECK(ncclCommDestroy(comm) == ncclSuccess);
    }
    SUBCASE("attached, and memory outlives the handle") {
        std::vector<ncclComm_t> comms(2);
        std::vector<gradsync::collective::Memory> memories(2);
        run_rank_threads(
            2,
            [&](auto& rendezvous) {
                ncclComm_t& comm = comms[static_cast<std::size_t>(rendezvous.rank())] = made(rendezvous.rank(), 2);
                return NcclBackend::attach(rendezvous, comm, {.timeout = 60s, .memory = gradsync::NcclMemory::registered});
            },
            [&](NcclBackend comm) { memories[static_cast<std::size_t>(comm.rank())] = comm.allocate(1000); });
        memories.clear();  // is no longer registered: see `left`
        for (ncclComm_t comm : comms) CHECK(ncclCommDestroy(comm) == ncclSuccess);
    }
    SUBCASE("taken over") {
        run_rank_threads(
            2, [&](auto& rendezvous) { return NcclBackend::take_ownership(rendezvous, made(rendezvous.rank(), 2), {.timeout = 60s}); },
            [&](NcclBackend comm) { findings.check(sum(comm) == 2, "a wrong sum"); });
    }
    SUBCASE("of other ranks: refused") {
        run_rank_threads(
            2,
            [&](auto& rendezvous) {
                ncclComm_t wrong = made(1 - rendezvous.rank(), 2);
                const auto error = error_of([&] { NcclBackend::attach(rendezvous, wrong); });
                findings.check(error && error->errc() == Errc::invalid_argument && mentions(*error, "same order"), error ? error->what() : "not refused");
                ncclCommDestroy(wrong);
                return NcclBackend(rendezvous);
            },
            [&](NcclBackend) {});
    }
    CHECK(gradsync_fake::misuses() == 0);
}

TEST_CASE("NcclBackend: host() is a backend of the same origin") {
    const Nothing left;
    Findings findings;
    on_nccl_ranks(3, [&](NcclBackend comm) {
        std::vector<double> data(100, comm.rank());
        comm.host().all_reduce(gradsync::buffer(data), ReduceOp::sum).wait();
        findings.check(data[99] == 3, "a wrong sum");
        findings.check(comm.describe() == "3 devices over NCCL 2.28.9" || NCCL_VERSION_CODE != 22809, comm.describe());
        DeviceMemory on_device(floats(10, 1));
        const auto error = error_of([&] {
            comm.host().barrier().wait();  // all ranks have the sum
            if (comm.rank() == 2) comm.host().fail("enough");
            comm.all_reduce(view_of(on_device, 10), ReduceOp::sum).wait();
        });
        findings.check(error && error->context().peer == 2 && mentions(*error, "enough"), error ? error->what() : "nothing was thrown");
    });
}

TEST_CASE("NcclBackend: a mean of 16-bit numbers does not overflow on the way, whatever its weights") {
    const Nothing left;
    Findings findings;
    on_nccl_ranks(4, [&](NcclBackend comm) {
        for (const double weight : {1.0, 4096.0}) {
            const std::vector<gradsync::Float16> values(1000, gradsync::Float16(40000.0f));
            const auto bytes = std::as_bytes(std::span(values));
            DeviceMemory memory({bytes.begin(), bytes.end()});
            comm.all_reduce({memory.data(), 1000, DType::f16, MemorySpace::device}, ReduceOp::mean, {weight, weight}).wait();
            gradsync::Float16 first;
            std::memcpy(&first, memory.read().data(), sizeof first);
            findings.check(static_cast<float>(first) == 40000.0f, std::to_string(static_cast<float>(first)));
        }
    });
}

TEST_CASE("NcclBackend: options that have to be the same on all ranks") {
    const Nothing left;
    Findings findings;
    std::vector<std::string> texts(3);
    run_rank_threads(
        3,
        [&](auto& rendezvous) {
            const auto rank = static_cast<std::size_t>(rendezvous.rank());
            const auto error = error_of([&] { NcclBackend(rendezvous, {.timeout = 60s, .group_bytes = rank == 2 ? std::size_t{7} : 8}); });
            if (error) texts[rank] = error->what();
            return NcclBackend(rendezvous);
        },
        [&](NcclBackend) {});
    for (const std::string& text : texts) CHECK(text == "the NcclOptions differ: rank 0 has plain memory and group_bytes 8, rank 2 has plain memory and group_bytes 7; they must be the same on all ranks");
}
