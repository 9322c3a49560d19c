// ctest: LIBRARIES gradsync_fake_nccl gradsync_fake_passes TIMEOUT 60 COMPILE_OPTIONS -O1
// What NcclBackend does beside what every backend does: streams, events, time limits of the device's time, NCCL's own failures,
// adopted communicators, and that nothing is left behind. Over the fakes of support/fake.
#include <gradsync/backend/nccl.hpp>

#include <algorithm>
#include <chrono>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "conformance/backend/launcher.hpp"
#include "support/device_memory.hpp"
#include "support/fake/fake.hpp"
#include "support/ports.hpp"
#include "support/rank_threads.hpp"

using namespace std::chrono_literals;
using gradsync::DType;
using gradsync::Errc;
using gradsync::MemorySpace;
using gradsync::NcclBackend;
using gradsync::ReduceOp;
using gradsync_test::DeviceMemory;
using gradsync_test::error_of;
using gradsync_test::Findings;

namespace {

template <class F>
void on_ranks(int size, F&& f, gradsync::NcclOptions options = {.timeout = 60s}) {
    gradsync_test::run_rank_threads(size, [&](auto& rendezvous) { return NcclBackend(rendezvous, options); }, f);
    CHECK(gradsync_fake::misuses() == 0);
}

/// Waits a while for `condition`.
template <class F>
bool soon(F&& condition) {
    for (int i = 0; i < 10000; ++i) {
        if (condition()) return true;
        std::this_thread::sleep_for(1ms);
    }
    return false;
}

std::vector<std::byte> floats(std::size_t count, float value) {
    std::vector<float> numbers(count, value);
    const auto bytes = std::as_bytes(std::span(numbers));
    return {bytes.begin(), bytes.end()};
}
float first_of(const DeviceMemory& memory) {
    float value;
    std::memcpy(&value, memory.read().data(), sizeof value);
    return value;
}
gradsync::BufferView view_of(DeviceMemory& memory, std::size_t count) { return {memory.data(), count, DType::f32, MemorySpace::device}; }

struct Nothing {
    int before = gradsync_fake::living();
    ~Nothing() {
        // Aborts and retired worlds take a moment.
        CHECK_MESSAGE(soon([&] { return gradsync_fake::living() == before; }), gradsync_fake::describe_living());
    }
};

}  // namespace

TEST_CASE("NcclBackend: a collective comes after what is on the compute stream, and keeps no host waiting") {
    const Nothing left;
    Findings findings;
    on_ranks(2, [&](NcclBackend comm) {
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
    on_ranks(2, [&](NcclBackend comm) {
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
    on_ranks(3, [&](NcclBackend comm) {
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
        findings.check(gradsync_test::mentions(*error, "rank 1 did not start it"), error->what());
        findings.check(gradsync_test::mentions(*error, "all_reduce(sum, f32, 10 elements)"), error->what());
    });
}

TEST_CASE("NcclBackend: an asynchronous failure of NCCL's ends it on all ranks, which name the rank and the collective") {
    const Nothing left;
    Findings findings;
    on_ranks(3, [&](NcclBackend comm) {
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
        findings.check(error && gradsync_test::mentions(*error, "network error"), error ? error->what() : "");
    });
}

TEST_CASE("NcclBackend: a failure of the runtime's is one of this rank") {
    const Nothing left;
    Findings findings;
    on_ranks(2, [&](NcclBackend comm) {
        DeviceMemory data(floats(10, 1));
        comm.all_reduce(view_of(data, 10), ReduceOp::sum).wait();
        if (comm.rank() == 1) {
            comm.host().barrier().wait();
            gradsync_fake::fail_next("cudaMalloc", cudaErrorMemoryAllocation);
            const auto error = error_of([&] { comm.allocate(100); });
            findings.check(error && error->errc() == Errc::device_failed && gradsync_test::mentions(*error, "cudaMalloc: out of memory"), error ? error->what() : "nothing");
            comm.fail(error->what());
            return;
        }
        const auto error = error_of([&] {
            comm.host().barrier().wait();  // all memory that this rank needs is there
            comm.all_reduce(view_of(data, 10), ReduceOp::sum).wait();
        });
        findings.check(error && error->errc() == Errc::peer_failed && error->context().peer == 1 && gradsync_test::mentions(*error, "out of memory"), error ? error->what() : "nothing");
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
        gradsync_test::run_rank_threads(
            2, [&](auto& rendezvous) { return NcclBackend::attach(rendezvous, comms[static_cast<std::size_t>(rendezvous.rank())] = made(rendezvous.rank(), 2), {.timeout = 60s}); },
            [&](NcclBackend comm) { findings.check(sum(comm) == 2, "a wrong sum"); });
        for (ncclComm_t comm : comms) CHECK(ncclCommDestroy(comm) == ncclSuccess);
    }
    SUBCASE("attached, and memory outlives the handle") {
        std::vector<ncclComm_t> comms(2);
        std::vector<gradsync::collective::Memory> memories(2);
        gradsync_test::run_rank_threads(
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
        gradsync_test::run_rank_threads(
            2, [&](auto& rendezvous) { return NcclBackend::take_ownership(rendezvous, made(rendezvous.rank(), 2), {.timeout = 60s}); },
            [&](NcclBackend comm) { findings.check(sum(comm) == 2, "a wrong sum"); });
    }
    SUBCASE("of other ranks: refused") {
        gradsync_test::run_rank_threads(
            2,
            [&](auto& rendezvous) {
                ncclComm_t wrong = made(1 - rendezvous.rank(), 2);
                const auto error = error_of([&] { NcclBackend::attach(rendezvous, wrong); });
                findings.check(error && error->errc() == Errc::invalid_argument && gradsync_test::mentions(*error, "same order"), error ? error->what() : "not refused");
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
    on_ranks(3, [&](NcclBackend comm) {
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
        findings.check(error && error->context().peer == 2 && gradsync_test::mentions(*error, "enough"), error ? error->what() : "nothing was thrown");
    });
}

TEST_CASE("NcclBackend: a mean of 16-bit numbers does not overflow on the way, whatever its weights") {
    const Nothing left;
    Findings findings;
    on_ranks(4, [&](NcclBackend comm) {
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

// ------------------------------------------------------------------------------------------------------------ groups

namespace {

/// A collective of a made-up rank, with memory of its own.
struct Step {
    gradsync::collective::Operation operation;
    DType dtype;
    std::size_t count;
    int root;
    gradsync::Contribution contribution;
    std::vector<std::byte> in;
};

/// The same steps on all ranks, but for what they bring. Some ranks bring nothing.
std::vector<Step> made_up_steps(unsigned seed, int rank, int size) {
    using gradsync::collective::Operation;
    std::vector<Step> steps;
    std::uint32_t state = seed * 2654435761u + 1;
    const auto number = [&](std::uint32_t below) { return (state = state * 1664525u + 1013904223u) / 65536 % below; };
    for (std::uint32_t i = 0, n = 1 + number(7); i < n; ++i) {
        constexpr Operation operations[] = {Operation::all_reduce, Operation::reduce, Operation::reduce_scatter, Operation::all_gather, Operation::broadcast, Operation::gather, Operation::scatter};
        constexpr DType dtypes[] = {DType::f32, DType::bf16, DType::f64};
        Step step{operations[number(7)], dtypes[number(3)], number(4) * 37 + number(3) * static_cast<std::uint32_t>(size), static_cast<int>(number(static_cast<std::uint32_t>(size))), {}, {}};
        if (static_cast<int>(number(4)) == rank) step.contribution = {0, 0};
        for (std::size_t k = 0; k < step.count; ++k) {
            const auto value = static_cast<float>((k * 7 + i + static_cast<std::size_t>(rank) * 3) % 13) - 6;
            const double as_f64 = value;
            const gradsync::BFloat16 as_bf16(value);
            const auto* const bytes = reinterpret_cast<const std::byte*>(step.dtype == DType::f32 ? static_cast<const void*>(&value) : step.dtype == DType::f64 ? static_cast<const void*>(&as_f64) : &as_bf16);
            step.in.insert(step.in.end(), bytes, bytes + size_of(step.dtype));
        }
        steps.push_back(std::move(step));
    }
    return steps;
}

/// What the steps leave in the memory of this rank; started in a group, or one after another.
std::vector<std::vector<std::byte>> results_of(NcclBackend& comm, const std::vector<Step>& steps, bool grouped) {
    using gradsync::collective::Operation;
    std::vector<DeviceMemory> memory, shards;
    std::vector<NcclBackend::WorkType> works;
    {
        std::optional<gradsync::detail::NcclGroup> group;
        if (grouped) group.emplace(comm.group());
        for (const Step& step : steps) {
            memory.emplace_back(step.in);
            const gradsync::BufferView whole{memory.back().data(), step.count, step.dtype, MemorySpace::device};
            const auto [first, last] = gradsync::shard_range(step.count, comm.size(), comm.rank());
            shards.emplace_back(std::vector<std::byte>(step.in.begin() + static_cast<std::ptrdiff_t>(first * size_of(step.dtype)), step.in.begin() + static_cast<std::ptrdiff_t>(last * size_of(step.dtype))));
            const gradsync::BufferView shard{shards.back().data(), last - first, step.dtype, MemorySpace::device};
            switch (step.operation) {
                case Operation::all_reduce: works.push_back(comm.all_reduce(whole, ReduceOp::mean, step.contribution)); break;
                case Operation::reduce: works.push_back(comm.reduce(whole, ReduceOp::mean, step.root, step.contribution)); break;
                case Operation::reduce_scatter: works.push_back(comm.reduce_scatter(whole, shard, ReduceOp::mean, step.contribution)); break;
                case Operation::all_gather: works.push_back(comm.all_gather(shard, whole)); break;
                case Operation::broadcast: works.push_back(comm.broadcast(whole, step.root)); break;
                case Operation::gather: works.push_back(comm.gather(shard, whole, step.root)); break;
                default: works.push_back(comm.scatter(whole, shard, step.root));
            }
        }
    }
    for (auto& work : works) work.wait();
    std::vector<std::vector<std::byte>> results;
    for (std::size_t i = 0; i < steps.size(); ++i) {
        results.push_back(memory[i].read());
        results.push_back(shards[i].read());
    }
    return results;
}

}  // namespace

TEST_CASE("NcclBackend: a group gives what its collectives give one by one") {
    const Nothing left;
    Findings findings;
    for (const int size : {1, 2, 3}) {
        gradsync_fake::be_slow(size - 1);
        on_ranks(size, [&](NcclBackend comm) {
            for (unsigned seed = 0; seed < 25; ++seed) {
                const auto steps = made_up_steps(seed, comm.rank(), size);
                findings.check(results_of(comm, steps, true) == results_of(comm, steps, false), std::to_string(size) + " ranks, seed " + std::to_string(seed));
            }
        });
    }
    gradsync_fake::be_slow(0);
}

TEST_CASE("NcclBackend: a group is one launch, and one more for the weights of its means") {
    const Nothing left;
    Findings findings;
    for (const auto& [op, launches] : {std::pair(ReduceOp::sum, 1), std::pair(ReduceOp::mean, 2)})
        on_ranks(1, [&, op = op, launches = launches](NcclBackend comm) {
            std::vector<DeviceMemory> data(5, DeviceMemory(floats(10, 3)));
            std::vector<NcclBackend::WorkType> works;
            const int before = gradsync_fake::launches();
            {
                const auto group = comm.group();
                for (DeviceMemory& d : data) works.push_back(comm.all_reduce(view_of(d, 10), op));
                findings.check(!works[0].test() && gradsync_fake::launches() == before, "it left before the group was over");
            }
            for (auto& work : works) work.wait();
            findings.check(gradsync_fake::launches() == before + launches, std::to_string(gradsync_fake::launches() - before) + " launches");
            for (const DeviceMemory& d : data) findings.check(first_of(d) == 3, "a wrong result");
        });
}

TEST_CASE("NcclBackend: who waits inside a group lets leave what was started; so does another stream") {
    const Nothing left;
    Findings findings;
    on_ranks(2, [&](NcclBackend comm) {
        const gradsync::cuda::Stream first = gradsync::cuda::make_stream(), second = gradsync::cuda::make_stream();
        DeviceMemory a(floats(10, 0)), b(floats(10, 1));
        const auto values = floats(10, 2);
        const auto outer = comm.group();
        {
            const auto inner = comm.group();  // the outer one counts
            comm.all_reduce(view_of(b, 10), ReduceOp::sum).wait();
            findings.check(first_of(b) == 2, "a wrong sum");
        }
        comm.set_stream(first.get());
        std::optional<gradsync_fake::Busy> backward(std::in_place, first.get());
        cudaMemcpyAsync(a.data(), values.data(), values.size(), cudaMemcpyHostToDevice, first.get());
        auto work = comm.all_reduce(view_of(a, 10), ReduceOp::sum);
        comm.set_stream(second.get());
        std::this_thread::sleep_for(5ms);
        findings.check(!work.test(), "it did not wait for the stream it was started after");
        backward.reset();
        work.wait();
        findings.check(first_of(a) == 4, "a wrong sum");
    });
}

TEST_CASE("NcclBackend: groups longer than what may be under way") {
    const Nothing left;
    Findings findings;
    on_ranks(2, [&](NcclBackend comm) {
        std::vector<DeviceMemory> data(300, DeviceMemory(floats(3, 1)));
        std::vector<NcclBackend::WorkType> works;
        {
            const auto group = comm.group();
            for (DeviceMemory& d : data) works.push_back(comm.all_reduce(view_of(d, 3), ReduceOp::sum));
        }
        for (auto& work : works) work.wait();
        for (const DeviceMemory& d : data) findings.check(first_of(d) == 2, "a wrong sum");
    });
}

TEST_CASE("NcclBackend: what NCCL refuses in a group is named, and ends it on all ranks") {
    const Nothing left;
    Findings findings;
    // One collective where it is known which, else the first of the group.
    for (const auto& [function, named] : {std::pair("ncclReduce", "reduce(sum, f32, 20 elements, root 0)"), std::pair("ncclGroupEnd", "all_reduce(sum, f32, 10 elements) in a group with the next 2")})
        on_ranks(2, [&, function = function, named = named](NcclBackend comm) {
            DeviceMemory a(floats(10, 1)), b(floats(20, 1)), c(floats(30, 1));
            comm.barrier().wait();
            comm.host().barrier().wait();
            if (comm.rank() == 0) gradsync_fake::refuse_next(function, ncclInvalidArgument);
            std::vector<NcclBackend::WorkType> works;
            const auto error = error_of([&] {
                comm.host().barrier().wait();  // may hear of it already
                {
                    const auto group = comm.group();
                    works.push_back(comm.all_reduce(view_of(a, 10), ReduceOp::sum));
                    works.push_back(comm.reduce(view_of(b, 20), ReduceOp::sum, 0));
                    works.push_back(comm.all_reduce(view_of(c, 30), ReduceOp::sum));
                }
                works[2].wait();
            });
            findings.check(error && error->errc() == Errc::device_failed && gradsync_test::mentions(*error, named), error ? error->what() : "nothing was thrown");
        });
}

TEST_CASE("NcclBackend: a failure names what failed") {
    const Nothing left;
    Findings findings;
    on_ranks(1, [&](NcclBackend comm) {
        DeviceMemory a(floats(10, 1)), b(floats(20, 1));
        comm.all_reduce(view_of(a, 10), ReduceOp::sum).wait();
        gradsync_fake::fail_next("cudaEventRecord", cudaErrorMemoryAllocation);
        std::vector<NcclBackend::WorkType> works;
        const auto error = error_of([&] {
            {
                const auto group = comm.group();
                works.push_back(comm.all_reduce(view_of(a, 10), ReduceOp::sum));
                works.push_back(comm.all_reduce(view_of(b, 20), ReduceOp::sum));
            }
            works[0].wait();
        });
        // Which of the two is not known: the first stands for the group. What failed in the launch before does not matter.
        findings.check(error && gradsync_test::mentions(*error, "all_reduce(sum, f32, 10 elements) in a group with the next 1, collective #1 failed") &&
                           gradsync_test::mentions(*error, "cudaEventRecord"),
                       error ? error->what() : "nothing was thrown");
    });
    // In an uneven reduce-scatter it is ncclReduce that is called.
    on_ranks(2, [&](NcclBackend comm) {
        DeviceMemory in(floats(3, 1)), out(floats(2, 1));
        comm.barrier().wait();
        comm.host().barrier().wait();
        if (comm.rank() == 0) gradsync_fake::refuse_next("ncclReduce", ncclInvalidArgument);
        const auto error = error_of([&] {
            comm.host().barrier().wait();  // may hear of it already
            comm.reduce_scatter(view_of(in, 3), view_of(out, comm.rank() == 0 ? 2 : 1), ReduceOp::sum).wait();
        });
        findings.check(error && gradsync_test::mentions(*error, "reduce_scatter(sum, f32, 3 elements)") && gradsync_test::mentions(*error, ": ncclReduce: "), error ? error->what() : "nothing was thrown");
    });
}

TEST_CASE("NcclBackend: a group that an exception leaves is not launched, and ends it on all ranks") {
    const Nothing left;
    Findings findings;
    on_ranks(2, [&](NcclBackend comm) {
        DeviceMemory a(floats(10, 1));
        comm.all_reduce(view_of(a, 10), ReduceOp::sum).wait();
        if (comm.rank() == 0) {
            comm.host().barrier().wait();  // nobody else launches anything any more
            const int before = gradsync_fake::launches();
            try {
                std::vector<NcclBackend::WorkType> works;
                const auto group = comm.group();
                works.push_back(comm.all_reduce(view_of(a, 10), ReduceOp::sum));
                throw std::logic_error("no second one");
            } catch (const std::logic_error&) {
            }
            findings.check(gradsync_fake::launches() == before, "half a group was launched");
        }
        const auto error = error_of([&] {
            if (comm.rank() == 1) comm.host().barrier().wait();  // may hear of it already
            comm.host().barrier().wait();
        });
        findings.check(error && error->errc() == Errc::abandoned && error->context().peer == 0, error ? error->what() : "nothing was thrown");
    });
}

TEST_CASE("NcclBackend: a failure in a group leaves no group of NCCL's open") {
    const Nothing left;
    Findings findings;
    on_ranks(1, [&](NcclBackend comm) {
        DeviceMemory a(floats(10, 1)), b(floats(10, 1)), c(floats(10, 1));
        {
            std::vector<NcclBackend::WorkType> works;
            const auto error = error_of([&] {
                gradsync_fake::fail_next("cudaMemcpyAsync", cudaErrorMemoryAllocation);
                {
                    const auto group = comm.group();
                    works.push_back(comm.all_reduce(view_of(a, 10), ReduceOp::sum));
                    works.push_back(comm.gather(view_of(b, 10), view_of(c, 10), 0));
                }
                works[1].wait();
            });
            findings.check(error && gradsync_test::mentions(*error, "gather(f32, 10 of 10 elements, root 0)") && gradsync_test::mentions(*error, "cudaMemcpyAsync"), error ? error->what() : "nothing was thrown");
        }
        gradsync::TcpRendezvous rendezvous({.rank = 0, .size = 1, .port = gradsync_test::free_port()}, {.timeout = 60s});
        NcclBackend other(rendezvous, {.timeout = 60s});
        const int before = gradsync_fake::launches();
        other.all_reduce(view_of(a, 10), ReduceOp::sum).wait();
        findings.check(gradsync_fake::launches() == before + 1, "an open group has swallowed it");
    });
}

TEST_CASE("NcclBackend: ranks that form other groups are named") {
    const Nothing left;
    Findings findings;
    on_ranks(3, [&](NcclBackend comm) {
        DeviceMemory a(floats(10, 1)), b(floats(10, 1));
        const auto error = error_of([&] {
            std::vector<NcclBackend::WorkType> works;
            {
                std::optional<gradsync::detail::NcclGroup> group;
                if (comm.rank() != 1) group.emplace(comm.group());
                works.push_back(comm.all_reduce(view_of(a, 10), ReduceOp::sum));
                works.push_back(comm.all_reduce(view_of(b, 10), ReduceOp::sum));
            }
            for (auto& work : works) work.wait();
        });
        findings.check(error && error->errc() == Errc::collective_mismatch && error->context().peer == 1, error ? error->what() : "nothing was thrown");
        findings.check(error && gradsync_test::mentions(*error, "rank 0 started all_reduce(sum, f32, 10 elements) in a group with the next 1, rank 1 started all_reduce(sum, f32, 10 elements)"), error ? error->what() : "");
    });
}

TEST_CASE("NcclBackend: who stays away from a group, or drops a part of it, is named") {
    const Nothing left;
    Findings findings;
    on_ranks(2, [&](NcclBackend comm) {
        comm.barrier().wait();
        DeviceMemory a(floats(10, 1)), b(floats(10, 1));
        const auto error = error_of([&] {
            if (comm.rank() == 1) return comm.host().barrier().wait();
            comm.set_timeout(200ms);
            std::vector<NcclBackend::WorkType> works;
            {
                const auto group = comm.group();
                works.push_back(comm.all_reduce(view_of(a, 10), ReduceOp::sum));
                works.push_back(comm.all_reduce(view_of(b, 10), ReduceOp::sum));
            }
            works[1].wait();
        });
        findings.check(error && error->errc() == Errc::timeout && error->context().peer == 1 && gradsync_test::mentions(*error, "rank 1 did not start it"), error ? error->what() : "nothing was thrown");
    });
    on_ranks(2, [&](NcclBackend comm) {
        DeviceMemory a(floats(10, 1)), b(floats(10, 1));
        const auto error = error_of([&] {
            auto group = std::make_optional(comm.group());
            auto kept = comm.all_reduce(view_of(a, 10), ReduceOp::sum);
            if (comm.rank() == 0) {
                auto second = comm.all_reduce(view_of(b, 10), ReduceOp::sum);
                group.reset();
                second.wait();
            } else {
                (void)comm.all_reduce(view_of(b, 10), ReduceOp::sum);
            }
            group.reset();
            kept.wait();
        });
        findings.check(error && error->errc() == Errc::abandoned && error->context().peer == 1, error ? error->what() : "nothing was thrown");
    });
}

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
            on_ranks(
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
    on_ranks(
        2,
        [&](NcclBackend comm) {
            if (comm.rank() == 1) comm.set_timeout(200ms);
            const auto error = error_of([&] {
                if (comm.rank() == 0) return comm.host().barrier().wait();  // a misunderstanding
                comm.allocate(1000);
            });
            findings.check(error && error->errc() == Errc::timeout && error->context().peer == 0 && gradsync_test::mentions(*error, "rank 0 did not start it"), error ? error->what() : "nothing was thrown");
            findings.check(comm.rank() == 0 || gradsync_test::mentions(*error, "in allocate(1000 bytes)"), error->what());
        },
        {.timeout = 60s, .memory = NcclMemory::windows});
    // Where one rank has no memory for it, the others do not wait.
    on_ranks(
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
            findings.check(error && error->errc() == Errc::device_failed && error->context().peer == 1 && gradsync_test::mentions(*error, "allocate(1000 bytes)") && gradsync_test::mentions(*error, "ncclMemAlloc"), error ? error->what() : "nothing was thrown");
        },
        {.timeout = 60s, .memory = NcclMemory::windows});
    on_ranks(
        2,
        [&](NcclBackend comm) {
            if (comm.rank() == 0) gradsync_fake::refuse_next("ncclCommWindowRegister", ncclInternalError);
            comm.host().barrier().wait();
            const auto error = error_of([&] { comm.allocate(1000); });
            findings.check(error && gradsync_test::mentions(*error, "allocate(1000 bytes)") && gradsync_test::mentions(*error, "ncclCommWindowRegister: a fake error"), error ? error->what() : "nothing was thrown");
        },
        {.timeout = 60s, .memory = NcclMemory::windows});
}
#endif

TEST_CASE("NcclBackend: memory of other sizes is refused on all ranks, which go on") {
    const Nothing left;
    Findings findings;
    for (const auto memory : {gradsync::NcclMemory::registered, gradsync::NcclMemory::windows})
        on_ranks(
            3,
            [&](NcclBackend comm) {
                const auto error = error_of([&] { comm.allocate(comm.rank() == 1 ? 2000 : 1000); });
                findings.check(error && error->errc() == Errc::parameter_mismatch && error->context().peer == 1 &&
                                   gradsync_test::mentions(*error, "rank 0 asks for 1000 bytes, rank 1 for 2000"),
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
        on_ranks(
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

TEST_CASE("NcclBackend: options that have to be the same on all ranks") {
    const Nothing left;
    Findings findings;
    std::vector<std::string> texts(3);
    gradsync_test::run_rank_threads(
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
