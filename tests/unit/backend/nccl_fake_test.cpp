// SPDX-License-Identifier: BSL-1.0
// ctest: SANITIZED LIBRARIES gradsync_fake_nccl gradsync_fake_passes
// What NcclBackend does beside what every backend does: streams, events, time limits of the device's time, NCCL's own failures,
// adopted communicators, memory of NCCL's own, and that nothing is left behind. Over the fakes of support/fake; groups have a file of their
// own.
#include <gradsync/backend/nccl.hpp>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gradsync/kernel/convert.hpp>

#include "nccl_fake.hpp"
#include "support/forked.hpp"
#include "support/ports.hpp"

using namespace std::chrono_literals;
using namespace gradsync_test;
using gradsync::DType;
using gradsync::Errc;
using gradsync::MemorySpace;
using gradsync::NcclBackend;
using gradsync::ReduceOp;

int prepare_tests() {
    gradsync_fake::connect_late();
    return -1;
}

TEST_CASE("NcclBackend: a collective comes after what is on the compute stream, and keeps no host waiting") {
    const Nothing left;
    Findings findings;
    on_nccl_ranks(2, [&](NcclBackend comm) {
        const gradsync::cuda::Stream compute = gradsync::cuda::make_stream(), other = gradsync::cuda::make_stream();
        comm.set_stream(compute.get());
        findings.check(comm.stream() == compute.get(), "another stream");
        DeviceMemory data(floats(1000, 0)), result(floats(1000, 0)), values(floats(1000, static_cast<float>(comm.rank() + 1)));
        std::optional<gradsync_fake::Busy> backward(std::in_place, compute.get());
        cudaMemcpyAsync(data.data(), values.data(), 4000, cudaMemcpyDeviceToDevice, compute.get());
        auto work = comm.all_reduce(view_of(data, 1000), ReduceOp::sum);
        findings.check(!work.test(), "complete before the compute stream got there");
        work.wait_on(other.get());  // returns at once
        work.wait();                // complete, as far as the host is concerned
        findings.check(work.test(), "a Work that was handed over is not complete");
        cudaMemcpyAsync(result.data(), data.data(), 4000, cudaMemcpyDeviceToDevice, other.get());
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
            comm.set_timeout(60s);
        }
        cudaStreamSynchronize(other.get());
        findings.check(first_of(data) == 2, "a wrong sum");
        const auto error = error_of([&] { comm.barrier().wait(); });
        findings.check(!error, error ? error->what() : "");
    });
}

TEST_CASE("NcclBackend: a rank of the environment's job that has a wrong time limit keeps no other waiting") {
    const std::string port = std::to_string(free_port());
    const auto reports = forked(2, [&](int rank) -> std::string {
        for (const auto& [name, value] : {std::pair{"RANK", std::to_string(rank)}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", port}})
            ::setenv(name, value.c_str(), 1);
        const auto error = error_of([&] { NcclBackend::from_environment({.timeout = rank == 1 ? 0s : 30s}); });
        return error ? error->what() : "no error";
    });
    CHECK(reports[0].text == "NcclBackend: rank 1 has other NcclOptions than rank 0; give all ranks the same");
    CHECK(reports[1].text == "the time limit of a backend must be positive");
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
        findings.check(error && error->errc() == Errc::device_failed && error->context().peer == 1,
                       error ? error->what() : "nothing was thrown");
        findings.check(error && mentions(*error, "network error"), error ? error->what() : "");
    });
}

namespace {

/// One rank fails, and a little before it the others' NCCL does: they do not know why.
class Loss {
public:
    void fail(NcclBackend& comm) {
        begun_ = true;
        begun_.notify_all();
        std::this_thread::sleep_for(20ms);
        comm.fail("the disk is full");
    }
    /// On the other ranks. Waits, so that the rank that fails cannot be late.
    void notice(const NcclBackend& comm) {
        begun_.wait(false);
        gradsync_fake::fail_asynchronously(comm.size(), comm.rank(), ncclRemoteError);
    }

private:
    std::atomic<bool> begun_{false};
};

}  // namespace

TEST_CASE("NcclBackend: where NCCL fails as another rank is gone, that rank is named, not the one that noticed") {
    const Nothing left;
    Findings findings;
    Loss loss;
    on_nccl_ranks(3, [&](NcclBackend comm) {
        DeviceMemory data(floats(10, 1));
        comm.all_reduce(view_of(data, 10), ReduceOp::sum).wait();
        const auto error = error_of([&] {
            comm.host().barrier().wait();  // all ranks have the first sum
            if (comm.rank() == 1) loss.fail(comm);
            else loss.notice(comm);
            comm.all_reduce(view_of(data, 10), ReduceOp::sum).wait();
        });
        findings.check(error && error->errc() == Errc::peer_failed && error->context().peer == 1,
                       error ? error->what() : "nothing was thrown");
        findings.check(error && mentions(*error, "the disk is full"), error ? error->what() : "");
    });
}

TEST_CASE("NcclBackend: a rank that is gone is named also if NCCL fails while it registers memory") {
    const Nothing left;
    Findings findings;
    Loss loss;
    on_nccl_ranks(3,
                  [&](NcclBackend comm) {
                      std::thread other;
                      const auto error = error_of([&] {
                          comm.host().barrier().wait();  // nobody is in its constructor any more
                          if (comm.rank() == 1) other = std::thread([&loss, comm]() mutable { loss.fail(comm); });
                          else loss.notice(comm);
                          comm.allocate(1000);
                      });
                      if (other.joinable()) other.join();
                      findings.check(error && error->errc() == Errc::peer_failed && error->context().peer == 1,
                                     error ? error->what() : "nothing was thrown");
                  },
                  {.timeout = 60s, .memory = gradsync::NcclMemory::windows});
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
            findings.check(error && error->errc() == Errc::device_failed && mentions(*error, "cudaMalloc: out of memory"),
                           error ? error->what() : "nothing");
            comm.fail(error->what());
            return;
        }
        const auto error = error_of([&] {
            comm.host().barrier().wait();  // all memory that this rank needs is there
            comm.all_reduce(view_of(data, 10), ReduceOp::sum).wait();
        });
        findings.check(error && error->errc() == Errc::peer_failed && error->context().peer == 1 && mentions(*error, "out of memory"),
                       error ? error->what() : "nothing");
    });
}

TEST_CASE("NcclBackend works on communicators that the program made with NCCL") {
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
            2,
            [&](auto& rendezvous) {
                return NcclBackend::attach(rendezvous, comms[static_cast<std::size_t>(rendezvous.rank())] = made(rendezvous.rank(), 2),
                                           {.timeout = 60s});
            },
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
                findings.check(error && error->errc() == Errc::invalid_argument && mentions(*error, "same order"),
                               error ? error->what() : "not refused");
                ncclCommDestroy(wrong);
                return NcclBackend(rendezvous);
            },
            [&](NcclBackend) {});
    }
    CHECK(gradsync_fake::misuses() == 0);
}

TEST_CASE("NcclBackend: the ranks' control connections listen where they are told") {
    Findings findings;
    run_rank_threads(
        2,
        [&](auto& rendezvous) {
            const auto error = error_of([&] { (void)NcclBackend(rendezvous, {.timeout = 60s, .bind = "no-such-net"}); });
            findings.check(error && mentions(*error, "rank 0 cannot listen for connections"), error ? error->what() : "not refused");
            return NcclBackend(rendezvous, {.timeout = 60s, .bind = "127.0.0.1"});
        },
        [&](NcclBackend comm) { findings.check(comm.size() == 2, "not 2 ranks"); });
}

TEST_CASE("NcclBackend: a handle that was moved from says so") {
    on_nccl_ranks(1, [](NcclBackend comm) {
        const NcclBackend other = std::move(comm);
        const std::function<void()> calls[] = {[&] { comm.set_stream(nullptr); },      [&] { (void)comm.stream(); },
                                               [&] { (void)comm.describe(); },         [&] { (void)comm.group(); },
                                               [&] { (void)comm.passes(); },           [&] { (void)comm.allocate(64); },
                                               [&] { comm.check_reduces(DType::f32); }};
        for (const auto& call : calls) CHECK_THROWS_WITH_AS(call(), doctest::Contains("was moved from"), gradsync::Error);
    });
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

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 24, 3)
TEST_CASE("NcclBackend sums and averages 8-bit floats, or says on all ranks what that needs") {
    const Nothing left;
    Findings findings;
    struct Expectation {
        int version, capability;
        std::string refusal;  ///< "" where it works
    };
    for (const Expectation& expected : {Expectation{NCCL_VERSION_CODE, 90, ""},
                                        {NCCL_VERSION_CODE, 100, ""},
                                        {NCCL_VERSION_CODE, 89, "rank 0 has a device of compute capability 8.9"},
                                        {NCCL_VERSION(2, 23, 4), 90, "rank 0 has, or was compiled for, NCCL 2.23.4"}}) {
        gradsync_fake::pretend(expected.version, true);
        gradsync_fake::be_of_capability(expected.capability);
        on_nccl_ranks(2, [&](NcclBackend comm) {
            for (const DType dtype : {DType::f8e4m3, DType::f8e5m2}) {
                gradsync::kernel::register_kernels(dtype);
                const auto memory_of = [&](float value) {
                    const std::vector<float> numbers(100, value);
                    std::vector<std::byte> bytes(100);
                    gradsync::kernel::convert(numbers.data(), DType::f32, bytes.data(), dtype, 100);
                    return DeviceMemory(bytes);
                };
                const auto value_of = [&](const DeviceMemory& memory) {
                    std::vector<float> numbers(100);
                    gradsync::kernel::convert(memory.read().data(), dtype, numbers.data(), DType::f32, 100);
                    return numbers[99];
                };
                DeviceMemory sum = memory_of(comm.rank() == 0 ? 2 : 5), mean = memory_of(comm.rank() == 0 ? 2 : 6),
                             root = memory_of(static_cast<float>(comm.rank()));
                const auto view = [&](DeviceMemory& memory) {
                    return gradsync::BufferView{memory.data(), 100, dtype, MemorySpace::device};
                };
                const auto error = error_of([&] {
                    comm.all_reduce(view(sum), ReduceOp::sum).wait();
                    comm.all_reduce(view(mean), ReduceOp::mean).wait();
                });
                if (expected.refusal.empty()) {
                    findings.check(!error, error ? error->what() : "");
                    findings.check(value_of(sum) == 7.0f && value_of(mean) == 4.0f, "a wrong result");
                } else {
                    findings.check(
                        error && error->errc() == Errc::invalid_argument &&
                            mentions(*error, "from 2.24.3 on, on devices of compute capability 9.0 and later, but " + expected.refusal),
                        error ? error->what() : "nothing was thrown");
                }
                comm.broadcast(view(root), 1).wait();  // what is only moved always works
                findings.check(value_of(root) == 1, "a wrong broadcast");
                // Equal shards, and others: they are other calls of NCCL's.
                for (const std::size_t whole : {100u, 99u}) {
                    const auto own_range = gradsync::shard_range(whole, comm.size(), comm.rank());
                    DeviceMemory own = memory_of(static_cast<float>(comm.rank() + 1)), scattered = memory_of(7);
                    DeviceMemory all = memory_of(7), gathered = memory_of(7);
                    const auto first_elements = [&](DeviceMemory& memory, std::size_t count) {
                        return gradsync::BufferView{memory.data(), count, dtype, MemorySpace::device};
                    };
                    const auto shard = [&](DeviceMemory& memory) { return first_elements(memory, own_range.size()); };
                    const bool is_root = comm.rank() == 1;
                    const gradsync::BufferView at_root = is_root ? first_elements(gathered, whole) : gradsync::BufferView{};
                    comm.all_gather(shard(own), first_elements(all, whole)).wait();
                    comm.gather(shard(own), at_root, 1).wait();
                    comm.scatter(at_root, shard(scattered), 1).wait();

                    const std::vector<std::byte> twos = memory_of(2).read(), sevens = memory_of(7).read();
                    const auto replace = [](std::vector<std::byte>& to, const std::vector<std::byte>& from, std::size_t first,
                                            std::size_t last) {
                        for (std::size_t i = first; i < last; ++i) to[i] = from[i];
                    };
                    std::vector<std::byte> together = memory_of(1).read(), shard_of_own = own.read();
                    replace(together, twos, gradsync::shard_range(whole, 2, 1).first, whole);
                    replace(together, sevens, whole, 100);
                    replace(shard_of_own, sevens, own_range.size(), 100);
                    findings.check(all.read() == together, "a wrong all_gather");
                    findings.check(gathered.read() == (is_root ? together : sevens), "a wrong gather");
                    findings.check(scattered.read() == shard_of_own, "a wrong scatter");
                }
            }
        });
    }
    gradsync_fake::pretend(NCCL_VERSION_CODE, true);
    gradsync_fake::be_of_capability(90);
}
#endif

// ------------------------------------------------------------------------------------------------------------ memory

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
        {NcclMemory::windows, NCCL_VERSION(2, 26, 2), true, 0,
         "2 devices over NCCL 2.26.2, buckets in registered memory, as rank 0 has, or was compiled for, NCCL 2.26.2"},
        {NcclMemory::registered, NCCL_VERSION(2, 18, 3), true, 0,
         "2 devices over NCCL 2.18.3, buckets in plain memory, as rank 0 has, or was compiled for, NCCL 2.18.3"},
    };
    const Nothing left;
    Findings findings;
    for (const Expectation& expected : expectations)
        for (const int looks : {0, 3}) {
            if (expected.version > NCCL_VERSION_CODE) continue;  // compiled with an older header
            gradsync_fake::be_slow(looks);
            gradsync_fake::pretend(expected.version, expected.has_windows);
            on_nccl_ranks(2,
                          [&](NcclBackend comm) {
                              {
                                  const auto first = comm.allocate(4000), second = comm.allocate(100);
                                  std::vector<float> values(1000, 7);
                                  cudaMemcpy(values.data(), first.data(), 4000, cudaMemcpyDeviceToHost);
                                  findings.check(values == std::vector<float>(1000), "the memory is not zero");
                                  comm.host().barrier().wait();
                                  findings.check(gradsync_fake::windows() == 2 * expected.windows,
                                                 std::to_string(gradsync_fake::windows()) + " windows");
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
TEST_CASE("NcclBackend: allocate() waits for a missing rank no longer than the limit, and a refusal ends it on all ranks") {
    using gradsync::NcclMemory;
    const Nothing left;
    Findings findings;
    on_nccl_ranks(2,
                  [&](NcclBackend comm) {
                      if (comm.rank() == 1) comm.set_timeout(200ms);
                      const auto error = error_of([&] {
                          if (comm.rank() == 0) return comm.host().barrier().wait();  // a misunderstanding
                          comm.allocate(1000);
                      });
                      findings.check(error && error->errc() == Errc::timeout && error->context().peer == 0 &&
                                         mentions(*error, "rank 0 did not start it"),
                                     error ? error->what() : "nothing was thrown");
                      findings.check(comm.rank() == 0 || mentions(*error, "in allocate(1000 bytes)"), error->what());
                  },
                  {.timeout = 60s, .memory = NcclMemory::windows});
    CHECK(soon([&] { return gradsync_fake::living() == left.before; }));
    // Where one rank has no memory for it, the others do not wait.
    on_nccl_ranks(2,
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
                      findings.check(error && error->errc() == Errc::device_failed && error->context().peer == 1 &&
                                         mentions(*error, "allocate(1000 bytes)") && mentions(*error, "ncclMemAlloc"),
                                     error ? error->what() : "nothing was thrown");
                  },
                  {.timeout = 60s, .memory = NcclMemory::windows});
    on_nccl_ranks(2,
                  [&](NcclBackend comm) {
                      if (comm.rank() == 0) gradsync_fake::refuse_next("ncclCommWindowRegister", ncclInternalError);
                      comm.host().barrier().wait();
                      const auto error = error_of([&] { comm.allocate(1000); });
                      findings.check(
                          error && mentions(*error, "allocate(1000 bytes)") && mentions(*error, "ncclCommWindowRegister: a fake error"),
                          error ? error->what() : "nothing was thrown");
                  },
                  {.timeout = 60s, .memory = NcclMemory::windows});
}
#endif

TEST_CASE("NcclBackend: memory of other sizes is refused on all ranks, which go on") {
    const Nothing left;
    Findings findings;
    for (const auto memory : {gradsync::NcclMemory::registered, gradsync::NcclMemory::windows})
        on_nccl_ranks(3,
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
        on_nccl_ranks(2,
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

TEST_CASE("NcclBackend refuses options that differ between ranks, on every rank") {
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
    for (const std::string& text : texts)
        CHECK(
            text ==
            "the NcclOptions differ: rank 0 has plain memory and group_bytes 8, rank 2 has plain memory and group_bytes 7; they must be the same on all ranks");
}
