// SPDX-License-Identifier: BSL-1.0
// ctest: SANITIZED LIBRARIES gradsync_fake_nccl gradsync_fake_passes
// Collectives that leave together as one launch of NCCL's, and failures in them. Over the fakes of support/fake.
#include <gradsync/backend/nccl.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "nccl_fake.hpp"
#include "support/ports.hpp"

using namespace std::chrono_literals;
using namespace gradsync_test;
using gradsync::DType;
using gradsync::Errc;
using gradsync::MemorySpace;
using gradsync::NcclBackend;
using gradsync::ReduceOp;

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
        constexpr Operation operations[] = {Operation::all_reduce, Operation::reduce, Operation::reduce_scatter, Operation::all_gather,
                                            Operation::broadcast,  Operation::gather, Operation::scatter};
        constexpr DType dtypes[] = {DType::f32, DType::bf16, DType::f64};
        Step step{operations[number(7)],
                  dtypes[number(3)],
                  number(4) * 37 + number(3) * static_cast<std::uint32_t>(size),
                  static_cast<int>(number(static_cast<std::uint32_t>(size))),
                  {},
                  {}};
        if (static_cast<int>(number(4)) == rank) step.contribution = {0, 0};
        for (std::size_t k = 0; k < step.count; ++k) {
            const auto value = static_cast<float>((k * 7 + i + static_cast<std::size_t>(rank) * 3) % 13) - 6;
            const double as_f64 = value;
            const gradsync::BFloat16 as_bf16(value);
            const auto* const bytes = reinterpret_cast<const std::byte*>(step.dtype == DType::f32   ? static_cast<const void*>(&value)
                                                                         : step.dtype == DType::f64 ? static_cast<const void*>(&as_f64)
                                                                                                    : &as_bf16);
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
            shards.emplace_back(std::vector<std::byte>(step.in.begin() + static_cast<std::ptrdiff_t>(first * size_of(step.dtype)),
                                                       step.in.begin() + static_cast<std::ptrdiff_t>(last * size_of(step.dtype))));
            const gradsync::BufferView shard{shards.back().data(), last - first, step.dtype, MemorySpace::device};
            switch (step.operation) {
                case Operation::all_reduce: works.push_back(comm.all_reduce(whole, ReduceOp::mean, step.contribution)); break;
                case Operation::reduce: works.push_back(comm.reduce(whole, ReduceOp::mean, step.root, step.contribution)); break;
                case Operation::reduce_scatter:
                    works.push_back(comm.reduce_scatter(whole, shard, ReduceOp::mean, step.contribution));
                    break;
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
        on_nccl_ranks(size, [&](NcclBackend comm) {
            for (unsigned seed = 0; seed < 25; ++seed) {
                const auto steps = made_up_steps(seed, comm.rank(), size);
                findings.check(results_of(comm, steps, true) == results_of(comm, steps, false),
                               std::to_string(size) + " ranks, seed " + std::to_string(seed));
            }
        });
    }
    gradsync_fake::be_slow(0);
}

TEST_CASE("NcclBackend: a group is one launch, and one more for the weights of its means") {
    const Nothing left;
    Findings findings;
    for (const auto& [op, launches] : {std::pair(ReduceOp::sum, 1), std::pair(ReduceOp::mean, 2)})
        on_nccl_ranks(1, [&, op = op, launches = launches](NcclBackend comm) {
            std::vector<DeviceMemory> data(5, DeviceMemory(floats(10, 3)));
            std::vector<NcclBackend::WorkType> works;
            const int before = gradsync_fake::launches();
            {
                const auto group = comm.group();
                for (DeviceMemory& d : data) works.push_back(comm.all_reduce(view_of(d, 10), op));
                findings.check(!works[0].test() && gradsync_fake::launches() == before, "it left before the group was over");
            }
            for (auto& work : works) work.wait();
            findings.check(gradsync_fake::launches() == before + launches,
                           std::to_string(gradsync_fake::launches() - before) + " launches");
            for (const DeviceMemory& d : data) findings.check(first_of(d) == 3, "a wrong result");
        });
}

TEST_CASE("NcclBackend: a wait inside a group launches what was started, and so does another stream") {
    const Nothing left;
    Findings findings;
    on_nccl_ranks(2, [&](NcclBackend comm) {
        const gradsync::cuda::Stream first = gradsync::cuda::make_stream(), second = gradsync::cuda::make_stream();
        DeviceMemory a(floats(10, 0)), b(floats(10, 1)), values(floats(10, 2));
        const auto outer = comm.group();
        {
            const auto inner = comm.group();  // the outer one counts
            comm.all_reduce(view_of(b, 10), ReduceOp::sum).wait();
            findings.check(first_of(b) == 2, "a wrong sum");
        }
        comm.set_stream(first.get());
        std::optional<gradsync_fake::Busy> backward(std::in_place, first.get());
        cudaMemcpyAsync(a.data(), values.data(), 40, cudaMemcpyDeviceToDevice, first.get());
        auto work = comm.all_reduce(view_of(a, 10), ReduceOp::sum);
        comm.set_stream(second.get());
        std::this_thread::sleep_for(5ms);
        findings.check(!work.test(), "it did not wait for the stream it was started after");
        backward.reset();
        work.wait();
        findings.check(first_of(a) == 4, "a wrong sum");
    });
}

TEST_CASE("NcclBackend: a group may have more collectives than may be in flight") {
    const Nothing left;
    Findings findings;
    on_nccl_ranks(2, [&](NcclBackend comm) {
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
    for (const auto& [function, named] : {std::pair("ncclReduce", "reduce(sum, f32, 20 elements, root 0)"),
                                          std::pair("ncclGroupEnd", "all_reduce(sum, f32, 10 elements) in a group with the next 2")})
        on_nccl_ranks(2, [&, function = function, named = named](NcclBackend comm) {
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
            findings.check(error && error->errc() == Errc::device_failed && mentions(*error, named),
                           error ? error->what() : "nothing was thrown");
        });
}

TEST_CASE("NcclBackend: an error in a group names the collective that failed") {
    const Nothing left;
    Findings findings;
    on_nccl_ranks(1, [&](NcclBackend comm) {
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
        findings.check(error && mentions(*error, "all_reduce(sum, f32, 10 elements) in a group with the next 1, collective #1 failed") &&
                           mentions(*error, "cudaEventRecord"),
                       error ? error->what() : "nothing was thrown");
    });
    // In an uneven reduce-scatter it is ncclReduce that is called.
    on_nccl_ranks(2, [&](NcclBackend comm) {
        DeviceMemory in(floats(3, 1)), out(floats(2, 1));
        comm.barrier().wait();
        comm.host().barrier().wait();
        if (comm.rank() == 0) gradsync_fake::refuse_next("ncclReduce", ncclInvalidArgument);
        const auto error = error_of([&] {
            comm.host().barrier().wait();  // may hear of it already
            comm.reduce_scatter(view_of(in, 3), view_of(out, comm.rank() == 0 ? 2 : 1), ReduceOp::sum).wait();
        });
        findings.check(error && mentions(*error, "reduce_scatter(sum, f32, 3 elements)") && mentions(*error, ": ncclReduce: "),
                       error ? error->what() : "nothing was thrown");
    });
}

TEST_CASE("NcclBackend: a group that an exception leaves is not launched, and ends it on all ranks") {
    const Nothing left;
    Findings findings;
    on_nccl_ranks(2, [&](NcclBackend comm) {
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
        findings.check(error && error->errc() == Errc::peer_failed && error->context().peer == 0,
                       error ? error->what() : "nothing was thrown");
    });
}

TEST_CASE("NcclBackend: a type that is refused in an open group leaves the group as it is") {
    const Nothing left;
    Findings findings;
    gradsync_fake::be_of_capability(80);
    on_nccl_ranks(2, [&](NcclBackend comm) {
        DeviceMemory a(floats(10, 1)), b(floats(10, 1)), c(floats(10, 2));
        const gradsync::BufferView bytes{b.data(), 40, DType::f8e4m3, MemorySpace::device};
        std::vector<NcclBackend::WorkType> works;
        const int before = gradsync_fake::launches();
        comm.host().barrier().wait();
        {
            const auto group = comm.group();
            works.push_back(comm.all_reduce(view_of(a, 10), ReduceOp::sum));
            const auto error = error_of([&] { works.push_back(comm.all_reduce(bytes, ReduceOp::sum)); });
            findings.check(error && error->errc() == Errc::invalid_argument && mentions(*error, "compute capability 8.0"),
                           error ? error->what() : "nothing was thrown");
            works.push_back(comm.all_reduce(view_of(c, 10), ReduceOp::sum));
        }
        for (auto& work : works) work.wait();
        findings.check(works.size() == 2 && first_of(a) == 2 && first_of(b) == 1 && first_of(c) == 4, "a wrong sum");
        comm.host().barrier().wait();
        findings.check(gradsync_fake::launches() == before + 2, "more than one launch for each rank");
    });
    gradsync_fake::be_of_capability(90);
}

TEST_CASE("NcclBackend: a gather that cannot be started takes its group with it") {
    const Nothing left;
    Findings findings;
    std::atomic<bool> is_open{false};
    on_nccl_ranks(2, [&](NcclBackend comm) {
        DeviceMemory own(floats(5, 1)), all(floats(10, 0));
        comm.host().barrier().wait();
        const int before = gradsync_fake::launches();
        const auto error = error_of([&] {
            if (comm.rank() == 1) {
                findings.check(soon([&] { return is_open.load(); }), "no group was opened");
                comm.fail("rank 1 has had enough");
                return comm.barrier().wait();
            }
            std::vector<NcclBackend::WorkType> works;
            const auto group = comm.group();
            const auto start = [&] { works.push_back(comm.all_gather(view_of(own, 5), view_of(all, 10))); };
            start();
            is_open = true;
            (void)soon([&] { return comm.progress(), comm.failed(); });
            start();
        });
        findings.check(error && error->context().peer == 1 && mentions(*error, "rank 1 has had enough"),
                       error ? error->what() : "nothing was thrown");
        findings.check(gradsync_fake::launches() == before, "a part of a group was launched");
    });
}

TEST_CASE("NcclBackend: a failure in a group leaves no group of NCCL's open") {
    const Nothing left;
    Findings findings;
    on_nccl_ranks(1, [&](NcclBackend comm) {
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
            findings.check(error && mentions(*error, "gather(f32, 10 of 10 elements, root 0)") && mentions(*error, "cudaMemcpyAsync"),
                           error ? error->what() : "nothing was thrown");
        }
        gradsync::TcpRendezvous rendezvous({.rank = 0, .size = 1, .port = free_port()}, {.timeout = 60s});
        NcclBackend other(rendezvous, {.timeout = 60s});
        const int before = gradsync_fake::launches();
        other.all_reduce(view_of(a, 10), ReduceOp::sum).wait();
        findings.check(gradsync_fake::launches() == before + 1, "an open group has swallowed it");
    });
}

TEST_CASE("NcclBackend: ranks that form other groups are named") {
    const Nothing left;
    Findings findings;
    on_nccl_ranks(3, [&](NcclBackend comm) {
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
        findings.check(error && error->errc() == Errc::collective_mismatch && error->context().peer == 1,
                       error ? error->what() : "nothing was thrown");
        findings.check(
            error &&
                mentions(
                    *error,
                    "rank 0 started all_reduce(sum, f32, 10 elements) in a group with the next 1, rank 1 started all_reduce(sum, f32, 10 elements)"),
            error ? error->what() : "");
    });
}

TEST_CASE("NcclBackend names a rank that stays away from a group, or that drops a part of it") {
    const Nothing left;
    Findings findings;
    on_nccl_ranks(2, [&](NcclBackend comm) {
        comm.barrier().wait();
        comm.host().barrier().wait();
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
        findings.check(error && error->errc() == Errc::timeout && error->context().peer == 1 && mentions(*error, "rank 1 did not start it"),
                       error ? error->what() : "nothing was thrown");
    });
    on_nccl_ranks(2, [&](NcclBackend comm) {
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
        findings.check(error && error->errc() == Errc::abandoned && error->context().peer == 1,
                       error ? error->what() : "nothing was thrown");
    });
}
