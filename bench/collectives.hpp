// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <gradsync/backend/thread_backend.hpp>

#include "contest.hpp"

namespace bench {

/// Bus bandwidth over algorithm bandwidth: nccl-tests' factors, which make figures of different collectives and
/// numbers of ranks comparable with the speed of the links.
inline double bus_factor(std::string_view collective, int ranks) {
    const double n = ranks;
    if (collective == "all_reduce") return 2 * (n - 1) / n;
    if (collective == "broadcast" || collective == "reduce") return 1;
    return (n - 1) / n;
}

/// Returns the one of `these` that has this name; each is a DType or a ReduceOp.
template <class Named>
Named find_named(std::string_view name, std::initializer_list<Named> these) {
    for (const Named each : these)
        if (name_of(each) == name) return each;
    throw std::runtime_error("nothing here is called " + std::string(name));
}
inline gradsync::DType dtype_of(std::string_view name) {
    using enum gradsync::DType;
    return find_named(name, {f32, f64, bf16, f16});
}

/// One rank's part in one collective of the library. `buffer` is its whole buffer, of `bytes`; its shard, where the
/// operation has one, is its place in it: nothing is copied that need not be.
template <class Backend>
class RankOfCollective {
public:
    RankOfCollective(std::string collective, gradsync::DType dtype, Backend comm, void* buffer, std::size_t bytes,
                     gradsync::ReduceOp op = gradsync::ReduceOp::sum)
        : collective_(std::move(collective)),
          op_(op),
          comm_(std::move(comm)),
          whole_{buffer, bytes / gradsync::size_of(dtype), dtype, gradsync::MemorySpace::host} {}

    void meet() { comm_.barrier().wait(); }

    void run(int times) {
        const auto [first, last] = gradsync::shard_range(whole_.count, comm_.size(), comm_.rank());
        const gradsync::BufferView shard = whole_.subview(first, last - first);
        const auto repeat = [times](auto&& once) {
            for (int i = 0; i < times; ++i) once().wait();
        };
        if (collective_ == "all_reduce") return repeat([&] { return comm_.all_reduce(whole_, op_); });
        if (collective_ == "reduce") return repeat([&] { return comm_.reduce(whole_, op_, 0); });
        if (collective_ == "reduce_scatter") return repeat([&] { return comm_.reduce_scatter(whole_, shard, op_); });
        if (collective_ == "all_gather") return repeat([&] { return comm_.all_gather(shard, whole_); });
        if (collective_ == "broadcast") return repeat([&] { return comm_.broadcast(whole_, 0); });
        if (collective_ == "gather") return repeat([&] { return comm_.gather(shard, whole_, 0); });
        if (collective_ == "scatter") return repeat([&] { return comm_.scatter(whole_, shard, 0); });
        return repeat([&] { return comm_.barrier(); });
    }

private:
    std::string collective_;
    gradsync::ReduceOp op_;
    Backend comm_;
    gradsync::BufferView whole_;
};

/// The same as a contestant; each rank takes part in the contest with its own.
template <class Backend>
class OverBackend final : public Contestant {
public:
    template <class... Args>
    explicit OverBackend(Args&&... args) : rank_(std::forward<Args>(args)...) {}

    void meet(int) override { rank_.meet(); }
    double run(int, int times) override {
        return time([&] { rank_.run(times); });
    }

private:
    RankOfCollective<Backend> rank_;
};

/// The same over ranks that are threads, all of them.
class ThreadsCollective final : public Contestant {
public:
    ThreadsCollective(const std::string& collective, gradsync::DType dtype, const std::vector<void*>& buffers, std::size_t bytes) {
        for (gradsync::ThreadBackend& comm : gradsync::ThreadBackend::make(static_cast<int>(buffers.size()))) {
            void* const buffer = buffers[ranks_.size()];
            ranks_.emplace_back(collective, dtype, std::move(comm), buffer, bytes);
        }
    }

    void meet(int rank) override { ranks_[static_cast<std::size_t>(rank)].meet(); }
    double run(int rank, int times) override {
        return time([&] { ranks_[static_cast<std::size_t>(rank)].run(times); });
    }

private:
    std::vector<RankOfCollective<gradsync::ThreadBackend>> ranks_;
};

}  // namespace bench
