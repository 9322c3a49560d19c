#pragma once

#include <cstddef>
#include <string>
#include <string_view>
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

/// One collective of the library, over ranks that are threads. `buffers[r]` is rank r's whole buffer, of `bytes`;
/// a rank's shard, where the operation has one, is its place in it: nothing is copied that need not be.
class ThreadsCollective final : public Contestant {
public:
    ThreadsCollective(std::string collective, gradsync::DType dtype, std::vector<void*> buffers, std::size_t bytes)
        : collective_(std::move(collective)),
          ranks_(gradsync::ThreadBackend::make(static_cast<int>(buffers.size()))),
          buffers_(std::move(buffers)),
          dtype_(dtype),
          count_(bytes / gradsync::size_of(dtype)) {}

    void meet(int rank) override { ranks_[static_cast<std::size_t>(rank)].barrier().wait(); }

    double run(int rank, int times) override {
        gradsync::ThreadBackend& comm = ranks_[static_cast<std::size_t>(rank)];
        const gradsync::BufferView whole{buffers_[static_cast<std::size_t>(rank)], count_, dtype_,
                                         gradsync::MemorySpace::host};
        const auto [first, last] = gradsync::shard_range(count_, comm.size(), rank);
        const gradsync::BufferView shard = whole.subview(first, last - first);
        constexpr auto sum = gradsync::ReduceOp::sum;
        const auto repeat = [times](auto&& once) {
            return time([&] {
                for (int i = 0; i < times; ++i) once().wait();
            });
        };
        if (collective_ == "all_reduce") return repeat([&] { return comm.all_reduce(whole, sum); });
        if (collective_ == "reduce") return repeat([&] { return comm.reduce(whole, sum, 0); });
        if (collective_ == "reduce_scatter") return repeat([&] { return comm.reduce_scatter(whole, shard, sum); });
        if (collective_ == "all_gather") return repeat([&] { return comm.all_gather(shard, whole); });
        if (collective_ == "broadcast") return repeat([&] { return comm.broadcast(whole, 0); });
        if (collective_ == "gather") return repeat([&] { return comm.gather(shard, whole, 0); });
        if (collective_ == "scatter") return repeat([&] { return comm.scatter(whole, shard, 0); });
        return repeat([&] { return comm.barrier(); });
    }

private:
    std::string collective_;
    std::vector<gradsync::ThreadBackend> ranks_;
    std::vector<void*> buffers_;
    gradsync::DType dtype_;
    std::size_t count_;
};

}  // namespace bench
