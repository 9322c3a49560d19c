// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gradsync/backend/nccl.hpp>
#include <gradsync/gradsync.hpp>

#include "contest.hpp"

namespace bench {

inline void check_nccl(ncclResult_t code, const char* call) {
    if (code != ncclSuccess) throw std::runtime_error(std::string(call) + ": " + ncclGetErrorString(code));
}

/// A rank's buffer on its device, and what is done to it: as many elements for each rank, so that NCCL itself, which
/// knows no uneven shards, can do the same.
struct OnDevice {
    std::string collective;
    gradsync::DType dtype;
    void* data;
    std::size_t count;  ///< of all ranks' shards together

    std::size_t bytes() const { return count * size_of(dtype); }
};

/// A rank whose calls are put on a stream one after another; the time is that until the stream is done.
class DeviceContestant : public Contestant {
public:
    DeviceContestant(gradsync::NcclBackend& comm, OnDevice what) : comm_(comm), what_(std::move(what)) {}

    void meet(int) override {
        gradsync::cuda::check(cudaStreamSynchronize(comm_.stream()), "cudaStreamSynchronize");
        comm_.host().barrier().wait();
    }
    double run(int, int times) override {
        return time([&] {
            for (int i = 0; i < times; ++i) start();
            gradsync::cuda::check(cudaStreamSynchronize(comm_.stream()), "cudaStreamSynchronize");
        });
    }

protected:
    virtual void start() = 0;

    gradsync::NcclBackend& comm_;
    OnDevice what_;
};

/// NcclBackend.
class OverNcclBackend final : public DeviceContestant {
public:
    using DeviceContestant::DeviceContestant;

private:
    auto start_one() {
        const gradsync::BufferView whole{what_.data, what_.count, what_.dtype, gradsync::MemorySpace::device};
        const auto [first, last] = gradsync::shard_range(whole.count, comm_.size(), comm_.rank());
        const gradsync::BufferView shard = whole.subview(first, last - first);
        constexpr auto sum = gradsync::ReduceOp::sum;
        const std::string& collective = what_.collective;
        if (collective == "all_reduce") return comm_.all_reduce(whole, sum);
        if (collective == "reduce") return comm_.reduce(whole, sum, 0);
        if (collective == "reduce_scatter") return comm_.reduce_scatter(whole, shard, sum);
        if (collective == "all_gather") return comm_.all_gather(shard, whole);
        if (collective == "broadcast") return comm_.broadcast(whole, 0);
        throw std::runtime_error("no collective is called " + collective);
    }

    void start() override { start_one().wait_on(comm_.stream()); }
};

/// A communicator of NCCL's own, for the ranks of a backend.
class BareNccl {
public:
    explicit BareNccl(gradsync::NcclBackend& backend) {
        ncclUniqueId id{};
        if (backend.rank() == 0) check_nccl(ncclGetUniqueId(&id), "ncclGetUniqueId");
        const std::span bytes(reinterpret_cast<std::uint8_t*>(&id), sizeof id);
        backend.host().broadcast(gradsync::buffer(bytes), 0).wait();
        check_nccl(ncclCommInitRank(&comm_, backend.size(), id, backend.rank()), "ncclCommInitRank");
    }
    BareNccl(const BareNccl&) = delete;
    BareNccl& operator=(const BareNccl&) = delete;
    ~BareNccl() { ncclCommDestroy(comm_); }

    ncclComm_t get() const { return comm_; }

private:
    ncclComm_t comm_ = nullptr;
};

/// NCCL's own functions, on the same stream.
class NcclLibrary final : public DeviceContestant {
public:
    NcclLibrary(gradsync::NcclBackend& comm, const BareNccl& bare, OnDevice what)
        : DeviceContestant(comm, std::move(what)), bare_(bare.get()) {}

private:
    void start() override {
        const std::size_t each = what_.count / static_cast<std::size_t>(comm_.size());
        void* const all = what_.data;
        void* const own = static_cast<std::byte*>(all) + static_cast<std::size_t>(comm_.rank()) * each * size_of(what_.dtype);
        const ncclDataType_t type = type_of(what_.dtype);
        cudaStream_t const stream = comm_.stream();
        const std::string& collective = what_.collective;
        if (collective == "all_reduce")
            return check_nccl(ncclAllReduce(all, all, what_.count, type, ncclSum, bare_, stream), "ncclAllReduce");
        if (collective == "reduce") return check_nccl(ncclReduce(all, all, what_.count, type, ncclSum, 0, bare_, stream), "ncclReduce");
        if (collective == "reduce_scatter")
            return check_nccl(ncclReduceScatter(all, own, each, type, ncclSum, bare_, stream), "ncclReduceScatter");
        if (collective == "all_gather") return check_nccl(ncclAllGather(own, all, each, type, bare_, stream), "ncclAllGather");
        if (collective == "broadcast") return check_nccl(ncclBroadcast(all, all, what_.count, type, 0, bare_, stream), "ncclBroadcast");
        throw std::runtime_error("no collective is called " + collective);
    }

    static ncclDataType_t type_of(gradsync::DType dtype) {
        switch (dtype) {
            case gradsync::DType::f64: return ncclFloat64;
            case gradsync::DType::bf16: return ncclBfloat16;
            case gradsync::DType::f16: return ncclFloat16;
            default: return ncclFloat32;
        }
    }

    ncclComm_t bare_;
};

}  // namespace bench
