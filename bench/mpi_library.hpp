// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <mpi.h>

#include <cstddef>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include <gradsync/core/dtype.hpp>
#include <gradsync/core/shard_range.hpp>

#include "contest.hpp"

namespace bench {

/// A collective of the MPI library over MPI_COMM_WORLD, in place, with our shards: what RankOfCollective does.
/// "iall_reduce": MPI_Iallreduce and MPI_Wait.
class MpiLibrary final : public Contestant {
public:
    /// MPI adds up no 16-bit floating types.
    static bool has(gradsync::DType dtype) { return dtype == gradsync::DType::f32 || dtype == gradsync::DType::f64; }

    MpiLibrary(const std::string& collective, gradsync::DType dtype, void* buffer, std::size_t bytes)
        : buffer_(buffer), count_(static_cast<int>(bytes / size_of(dtype))) {
        type_ = dtype == gradsync::DType::f64 ? MPI_DOUBLE : MPI_FLOAT;
        int rank = 0, size = 1;
        MPI_Comm_rank(MPI_COMM_WORLD, &rank);
        MPI_Comm_size(MPI_COMM_WORLD, &size);
        for (int r = 0; r < size; ++r) {
            const auto [first, last] = gradsync::shard_range(static_cast<std::size_t>(count_), size, r);
            firsts_.push_back(static_cast<int>(first));
            counts_.push_back(static_cast<int>(last - first));
        }
        const auto own = static_cast<std::size_t>(rank);
        is_root_ = rank == 0;
        shard_count_ = counts_[own];
        shard_ = static_cast<std::byte*>(buffer) + static_cast<std::size_t>(firsts_[own]) * size_of(dtype);

        const std::map<std::string, void (MpiLibrary::*)()> all{{"all_reduce", &MpiLibrary::all_reduce},
                                                                {"iall_reduce", &MpiLibrary::iall_reduce},
                                                                {"reduce", &MpiLibrary::reduce},
                                                                {"broadcast", &MpiLibrary::broadcast},
                                                                {"reduce_scatter", &MpiLibrary::reduce_scatter},
                                                                {"all_gather", &MpiLibrary::all_gather},
                                                                {"gather", &MpiLibrary::gather},
                                                                {"scatter", &MpiLibrary::scatter},
                                                                {"barrier", &MpiLibrary::barrier}};
        const auto found = all.find(collective);
        if (found == all.end()) throw std::runtime_error("no collective is called " + collective);
        once_ = found->second;
    }

    void meet(int) override { barrier(); }
    double run(int, int times) override {
        return time([&] {
            for (int i = 0; i < times; ++i) (this->*once_)();
        });
    }

private:
    void all_reduce() { MPI_Allreduce(MPI_IN_PLACE, buffer_, count_, type_, MPI_SUM, MPI_COMM_WORLD); }
    void iall_reduce() {
        MPI_Request request;
        MPI_Iallreduce(MPI_IN_PLACE, buffer_, count_, type_, MPI_SUM, MPI_COMM_WORLD, &request);
        MPI_Wait(&request, MPI_STATUS_IGNORE);
    }
    void reduce() { MPI_Reduce(is_root_ ? MPI_IN_PLACE : buffer_, buffer_, count_, type_, MPI_SUM, 0, MPI_COMM_WORLD); }
    void broadcast() { MPI_Bcast(buffer_, count_, type_, 0, MPI_COMM_WORLD); }
    void reduce_scatter() { MPI_Reduce_scatter(MPI_IN_PLACE, buffer_, counts_.data(), type_, MPI_SUM, MPI_COMM_WORLD); }
    void all_gather() { MPI_Allgatherv(MPI_IN_PLACE, 0, type_, buffer_, counts_.data(), firsts_.data(), type_, MPI_COMM_WORLD); }
    void gather() {
        MPI_Gatherv(is_root_ ? MPI_IN_PLACE : shard_, shard_count_, type_, buffer_, counts_.data(), firsts_.data(), type_, 0,
                    MPI_COMM_WORLD);
    }
    void scatter() {
        MPI_Scatterv(buffer_, counts_.data(), firsts_.data(), type_, is_root_ ? MPI_IN_PLACE : shard_, shard_count_, type_, 0,
                     MPI_COMM_WORLD);
    }
    void barrier() { MPI_Barrier(MPI_COMM_WORLD); }

    void* buffer_;
    void* shard_ = nullptr;
    int count_, shard_count_ = 0;
    MPI_Datatype type_;
    std::vector<int> counts_, firsts_;  // of all ranks' shards, in elements
    bool is_root_ = false;
    void (MpiLibrary::*once_)() = nullptr;
};

}  // namespace bench
