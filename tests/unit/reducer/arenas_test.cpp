// SPDX-License-Identifier: BSL-1.0
// Gradients that lie side by side in memory of the trainer, which is then a bucket.
#include <gradsync/backend/tcp.hpp>
#include <gradsync/gradsync.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>

#include <doctest/doctest.h>

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "support/forked.hpp"
#include "support/ports.hpp"
#include "support/slow_build.hpp"

namespace gs = gradsync;

namespace {

constexpr std::size_t parts = 6, part_size = 100;

double value(std::size_t element, int rank) { return static_cast<double>(element % 17) + rank; }

std::vector<gs::ParameterView> views(float* arena, const std::vector<std::size_t>& order) {
    std::vector<gs::ParameterView> parameters;
    for (const std::size_t place : order) parameters.push_back({.gradient = {arena + place * part_size, part_size, gs::DType::f32}});
    return parameters;
}

/// Marks everything and finishes; says what is wrong with the means of `elements` elements.
template <class Sync>
std::string wrong_step(Sync& sync, float* arena, std::size_t elements, int rank, int size) {
    for (std::size_t k = 0; k < elements; ++k) arena[k] = static_cast<float>(value(k, rank));
    for (std::size_t i = sync.parameters().size(); i-- > 0;) sync.mark_ready(i);
    sync.finish();
    for (std::size_t k = 0; k < elements; ++k)
        if (arena[k] != static_cast<float>(value(k, 0) + (size - 1) / 2.0))
            return "element " + std::to_string(k) + " is " + std::to_string(arena[k]);
    return "";
}

const std::vector<std::size_t> ascending{0, 1, 2, 3, 4, 5}, mixed{3, 0, 5, 1, 4, 2};

template <class F>
std::vector<gradsync_test::Report> on_processes(int size, gs::TcpOptions options, F&& f) {
    const std::uint16_t port = gradsync_test::free_port();
    return gradsync_test::forked(size, [&](int rank) -> std::string {
        gs::TcpRendezvous meeting({.rank = rank, .size = size, .port = port});
        gs::TcpBackend comm(meeting, options);
        return f(comm);
    });
}

}  // namespace

TEST_CASE("arenas: gradients side by side are buckets where they are, in any order, with the right means") {
    for (const auto& order : {ascending, mixed})
        for (const int size : gradsync_test::rank_counts(2)) {
            std::vector<std::string> found(static_cast<std::size_t>(size));
            gs::run_threads(size, [&](gs::ThreadBackend comm) {
                std::vector<float> arena(parts * part_size + 1, -1.0f);
                gs::Reducer sync(comm, views(arena.data(), order));
                std::string& said = found[static_cast<std::size_t>(comm.rank())];
                if (sync.plan().size() != 1) said = "there are several buckets";
                if (sync.bytes() != 0) said = std::to_string(sync.bytes()) + " bytes for what is not copied";
                for (int step = 0; step < 2 && said.empty(); ++step)
                    said = wrong_step(sync, arena.data(), parts * part_size, comm.rank(), size);
                if (arena.back() != -1.0f) said = "it wrote behind the arena";
            });
            for (const std::string& said : found) CHECK(said == "");
        }
}

TEST_CASE("arenas: where the gradients of one rank lie otherwise, all ranks copy them") {
    std::vector<std::string> found(3);
    gs::run_threads(3, [&](gs::ThreadBackend comm) {
        std::vector<float> arena(parts * part_size);
        gs::Reducer sync(comm, views(arena.data(), comm.rank() == 1 ? ascending : mixed));
        for (std::size_t k = 0; k < arena.size(); ++k) arena[k] = static_cast<float>(comm.rank());
        for (std::size_t i = parts; i-- > 0;) sync.mark_ready(i);
        sync.finish();
        if (sync.bytes() == 0) found[static_cast<std::size_t>(comm.rank())] = "it does not copy";
        for (const float x : arena)
            if (x != 1.0f) found[static_cast<std::size_t>(comm.rank())] = "wrong";
    });
    for (const std::string& said : found) CHECK(said == "");
}

TEST_CASE("arenas: an empty gradient without an address is nowhere, and keeps no arena from being a bucket") {
    std::vector<std::string> found(2);
    gs::run_threads(2, [&](gs::ThreadBackend comm) {
        std::vector<float> arena(parts * part_size);
        for (const std::size_t place : {std::size_t{0}, std::size_t{2}, parts}) {
            std::vector<gs::ParameterView> parameters = views(arena.data(), mixed);
            parameters.insert(parameters.begin() + static_cast<std::ptrdiff_t>(place),
                              {.gradient = {static_cast<float*>(nullptr), 0}, .may_be_empty = true});
            gs::Reducer sync(comm, parameters);
            std::string& said = found[static_cast<std::size_t>(comm.rank())];
            if (said.empty() && sync.bytes() != 0) said = "it copies";
            if (said.empty()) said = wrong_step(sync, arena.data(), arena.size(), comm.rank(), 2);
        }
    });
    for (const std::string& said : found) CHECK(said == "");
}

TEST_CASE("arenas: a gap between gradients is not touched") {
    std::vector<std::string> found(2);
    gs::run_threads(2, [&](gs::ThreadBackend comm) {
        std::vector<float> arena(3 * part_size, 7.0f);
        std::vector<gs::ParameterView> parameters = views(arena.data(), {0, 2});
        gs::Reducer sync(comm, parameters);
        for (std::size_t k = 0; k < arena.size(); ++k)
            if (k / part_size != 1) arena[k] = static_cast<float>(comm.rank());
        for (std::size_t i = 2; i-- > 0;) sync.mark_ready(i);
        sync.finish();
        for (std::size_t k = 0; k < arena.size(); ++k)
            if (arena[k] != (k / part_size == 1 ? 7.0f : 0.5f)) found[static_cast<std::size_t>(comm.rank())] = std::to_string(k);
    });
    for (const std::string& said : found) CHECK(said == "");
}

TEST_CASE("arenas: a gradient may leave its arena") {
    std::vector<std::string> found(2);
    gs::run_threads(2, [&](gs::ThreadBackend comm) {
        std::vector<float> arena(parts * part_size), elsewhere(part_size);
        gs::Reducer sync(comm, views(arena.data(), ascending));
        std::string& said = found[static_cast<std::size_t>(comm.rank())];
        said = wrong_step(sync, arena.data(), arena.size(), comm.rank(), 2);
        if (comm.rank() == 0) sync.rebind_gradient(2, {elsewhere.data(), part_size, gs::DType::f32});  // on one rank only
        for (int step = 0; step < 2; ++step) {
            for (float& x : elsewhere) x = static_cast<float>(comm.rank());
            for (float& x : arena) x = static_cast<float>(comm.rank());
            for (std::size_t i = parts; i-- > 0;) sync.mark_ready(i);
            sync.finish();
            for (std::size_t k = 0; k < arena.size(); ++k) {
                const bool left = comm.rank() == 0 && k / part_size == 2;
                if ((left ? elsewhere[k - 2 * part_size] : arena[k]) != 0.5f) said = "wrong at " + std::to_string(k);
            }
        }
    });
    for (const std::string& said : found) CHECK(said == "");
}

TEST_CASE("arenas: a gradient may be in another arena in each step, of which the last one is gone") {
    std::vector<std::string> found(2);
    gs::run_threads(2, [&](gs::ThreadBackend comm) {
        std::string& said = found[static_cast<std::size_t>(comm.rank())];
        auto arena = std::make_unique<std::vector<float>>(parts * part_size);
        gs::Reducer sync(comm, views(arena->data(), ascending));
        for (int step = 0; step < 3; ++step) {
            const bool moves = step != 1 || comm.rank() == 0;  // on one rank only, or on both
            auto other = std::make_unique<std::vector<float>>(parts * part_size, static_cast<float>(comm.rank()));
            if (moves) arena = std::move(other);
            else arena->assign(parts * part_size, static_cast<float>(comm.rank()));
            for (std::size_t i = parts; i-- > 0;) {
                if (moves) sync.mark_ready(i, gs::BufferView(arena->data() + i * part_size, part_size));
                else sync.mark_ready(i);
            }
            sync.finish();
            if (*arena != std::vector<float>(parts * part_size, 0.5f)) said = "no mean in step " + std::to_string(step);
        }
        const auto error = [&] {
            try {
                sync.mark_ready(0, gs::BufferView(static_cast<float*>(nullptr), part_size));
            } catch (const gs::Error& refused) {
                return std::string(refused.what());
            }
            return std::string("nothing");
        }();
        if (error.find("or no memory") == std::string::npos) said = error;
    });
    for (const std::string& said : found) CHECK(said == "");
}

TEST_CASE("arenas: memory of allocate() is reduced where it is, between processes too") {
    for (const bool shared : {true, false}) {
        const auto reports = on_processes(3, {.shared_memory = shared}, [&](gs::TcpBackend& comm) -> std::string {
            const auto memory = comm.allocate(parts * part_size * sizeof(float));
            auto* const arena = static_cast<float*>(memory.data());
            gs::Reducer sync(comm, views(arena, mixed));
            if (shared != (sync.bytes() == 0)) return std::to_string(sync.bytes()) + " bytes of buckets";  // small messages are copied
            return wrong_step(sync, arena, parts * part_size, comm.rank(), 3);
        });
        for (const auto& report : reports) CHECK(report.text == "");
    }
}

TEST_CASE("adopt: mapped memory becomes shared at its address, and the process's own again") {
    const auto reports = on_processes(2, {}, [](gs::TcpBackend& comm) -> std::string {
        constexpr std::size_t elements = 1 << 16, bytes = elements * sizeof(float);
        void* const mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        auto* const arena = static_cast<float*>(mapped);
        for (std::size_t k = 0; k < elements; ++k) arena[k] = static_cast<float>(k + 1);
        const auto shared = [&] { return comm.shares({arena, elements, gs::DType::f32}); };
        if (shared()) return "it is shared before";
        for (int round = 0; round < 2; ++round) {
            const auto adopted = gs::adopt(comm, std::span(arena, elements));
            for (std::size_t k = 0; k < elements; ++k)
                if (arena[k] != static_cast<float>(k + 1)) return "the contents changed";
            if (!shared()) return "it is not shared";
            gs::Reducer sync(comm, {gs::ParameterView{.gradient = {arena, elements, gs::DType::f32}}});
            if (sync.bytes() != 0) return "it is copied";
            if (const std::string wrong = wrong_step(sync, arena, elements, comm.rank(), 2); !wrong.empty()) return wrong;
            for (std::size_t k = 0; k < elements; ++k) arena[k] = static_cast<float>(k + 1);
        }
        if (shared()) return "it is still shared";
        for (std::size_t k = 0; k < elements; ++k)
            if (arena[k] != static_cast<float>(k + 1)) return "the contents changed on the way back";
        return ::munmap(mapped, bytes) == 0 ? "" : "it cannot be unmapped";
    });
    for (const auto& report : reports) CHECK(report.text == "");
}

TEST_CASE("adopt: where the system cannot remap the pages of one rank, all ranks get an error that names it, and keep their own") {
    const auto reports = on_processes(3, {}, [](gs::TcpBackend& comm) -> std::string {
        constexpr std::size_t elements = 1 << 14, bytes = elements * sizeof(float);
        void* const mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        auto* const arena = static_cast<float*>(mapped);
        arena[7] = 5;
        if (comm.rank() == 1) {  // its mremap fails from now on
            sock_filter rules[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                                   BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_mremap, 0, 1),
                                   BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOMEM), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
            sock_fprog program{4, rules};
            if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
                return "no filter";
        }
        try {
            (void)gs::adopt(comm, std::span(arena, elements));
            return "nothing was thrown";
        } catch (const gs::Error& error) {
            const char* const expected = comm.rank() == 1 ? "cannot map shared memory" : "rank 1 cannot do it; see what it says";
            if (error.context().peer != 1 || std::string(error.what()).find(expected) == std::string::npos) return error.what();
        }
        if (comm.shares({arena, elements, gs::DType::f32}) || arena[7] != 5) return "it is another memory";
        comm.all_reduce({arena, 8, gs::DType::f32}, gs::ReduceOp::sum).wait();  // the communicator still works
        return arena[7] == 15 ? "" : "another sum";
    });
    for (const auto& report : reports) CHECK(report.text == "");
}

TEST_CASE("adopt: memory of malloc and of unequal sizes is refused on all ranks") {
    const auto reports = on_processes(2, {}, [](gs::TcpBackend& comm) -> std::string {
        constexpr std::size_t bytes = 1 << 16;
        const auto refusal = [&](void* data, std::size_t size) -> std::string {
            try {
                (void)gs::adopt(comm, std::span(static_cast<unsigned char*>(data), size));
            } catch (const gs::Error& error) {
                return error.what();
            }
            return "";
        };
        void* const mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        std::vector<std::byte> heap(3 * bytes / 4);  // small enough for malloc not to map it
        const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
        std::byte* const aligned = heap.data() + (page - reinterpret_cast<std::uintptr_t>(heap.data()) % page) % page;
        const std::string heaps = refusal(comm.rank() == 1 ? aligned + 16 : mapped, bytes / 2);
        const std::string pages = refusal(comm.rank() == 1 ? aligned : mapped, bytes / 2);
        const std::string sizes = refusal(mapped, bytes / (comm.rank() == 1 ? 2 : 1));
        const std::string of_1 = "adopt on rank 1: memory is adopted by whole pages of 4096 bytes; map it with mmap";
        const std::string of_pages = "adopt on rank 1: this memory is not the program's own alone";
        const std::string of_others = "rank 1 cannot do it; see what it says";
        if (heaps.find(comm.rank() == 1 ? of_1 : of_others) == std::string::npos) return heaps;
        if (pages.find(comm.rank() == 1 ? of_pages : of_others) == std::string::npos) return pages;
        if (sizes.find("rank 1 passes 32768 bytes, rank 0 65536; all ranks must pass the same number") == std::string::npos) return sizes;
        return "";
    });
    for (const auto& report : reports) CHECK(report.text == "");
}
