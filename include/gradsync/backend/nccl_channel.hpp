#pragma once

#include <cuda_runtime_api.h>
#include <nccl.h>

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "../collective/call.hpp"
#include "../core/buffer_view.hpp"
#include "../core/error.hpp"
#include "../core/shard_range.hpp"
#include "../cuda/passes.hpp"
#include "../cuda/runtime.hpp"
#include "nccl_communicator.hpp"

namespace gradsync::inline v0::detail {

/// Says in NCCL's words what a `Call` asks for, on a stream of its own. Shares are ours, which NCCL's own operations know only
/// where all are equal; others are made of grouped ones.
///
/// A mean is a sum of elements that every rank has multiplied by its scale over the sum of all weights, which the ranks add up on
/// the device just before: no host waits. f32 and f64 are multiplied by NCCL, in full precision; 16-bit types in a pass of ours,
/// in f32, as NCCL would round the factor to 16 bits. For one thread at a time.
class NcclChannel {
    using Call = collective::Call;
    using Operation = collective::Operation;

public:
    /// `slots`: calls that may be under way.
    NcclChannel(NcclCommunicator comm, int rank, int size, std::size_t slots)
        : comm_(std::move(comm)),
          rank_(rank),
          size_(size),
          stream_(cuda::make_stream(true)),
          cells_(slots * sizeof(cuda::MeanFactor)),
          weights_(slots * sizeof(double)),
          token_(sizeof(int)) {}

    cudaStream_t stream() const noexcept { return stream_.get(); }
    NcclCommunicator& communicator() noexcept { return comm_; }

    /// Throws Error(invalid_argument) where this program cannot do it.
    static void check(const Call& call) {
        if (collective::reduces(call.operation) && call.op == ReduceOp::mean && !cuda::linked())
            throw Error(
                Errc::invalid_argument,
                std::string(name_of(call.operation)) +
                    ": a mean on a device needs the library's kernels; link gradsync::cuda, or compile gradsync/cuda/passes.cu "
                    "with nvcc into the program",
                {.operation = std::string(name_of(call.operation))});
    }

    /// Puts the call on the stream. `slot`: not that of another one under way. `wanted()`: false to give up.
    template <class Wanted>
    void launch(const Call& call, std::size_t slot, Wanted&& wanted) {
        const auto issue = [&](const char* what, auto&& f) { comm_.settle(f(), what, wanted); };
        const ncclDataType_t type = nccl_type(call.dtype);
        if (collective::reduces(call.operation)) return reduce(call, slot, issue);
        switch (call.operation) {
            case Operation::broadcast:
                if (call.out_count != 0)
                    issue("ncclBroadcast", [&] {
                        return ncclBroadcast(call.in, call.out, call.out_count, type, call.root, comm_.get(), stream());
                    });
                break;
            case Operation::all_gather: all_gather(call, issue); break;
            case Operation::gather: gather(call, issue); break;
            case Operation::scatter: scatter(call, issue); break;
            default:
                issue("ncclAllReduce",
                      [&] { return ncclAllReduce(token_.data(), token_.data(), 1, ncclInt32, ncclMax, comm_.get(), stream()); });
        }
    }

private:
    /// NCCL calls that become one.
    class Batch {
    public:
        Batch() { note(ncclGroupStart()); }
        void add(ncclResult_t code) noexcept { note(code); }
        ncclResult_t end() noexcept {
            const ncclResult_t code = ncclGroupEnd();
            return code_ == ncclSuccess ? code : code_;
        }

    private:
        void note(ncclResult_t code) noexcept {
            if (code_ == ncclSuccess && code != ncclInProgress) code_ = code;
        }
        ncclResult_t code_ = ncclSuccess;
    };

    static const std::byte* element(const void* data, std::size_t index, DType dtype) noexcept {
        return static_cast<const std::byte*>(data) + index * size_of(dtype);
    }
    static std::byte* element(void* data, std::size_t index, DType dtype) noexcept {
        return static_cast<std::byte*>(data) + index * size_of(dtype);
    }

    bool is_even(std::size_t whole) const noexcept { return whole % static_cast<std::size_t>(size_) == 0; }
    ElementRange shard(std::size_t whole, int rank) const noexcept { return shard_range(whole, size_, rank); }

    // ------------------------------------------------------------------------------------------------------- reductions

    /// What takes part in a reduction: the elements, and how they are combined.
    struct Operand {
        const void* data;
        ncclRedOp_t op;
        bool own_op = false;
    };

    template <class Issue>
    void reduce(const Call& call, std::size_t slot, Issue&& issue) {
        const Operand operand = call.op == ReduceOp::mean ? scaled(call, slot, issue) : Operand{call.in, nccl_op(call.op)};
        const ncclDataType_t type = nccl_type(call.dtype);
        const std::size_t whole = call.in_count;
        if (whole == 0) {
        } else if (call.operation == Operation::all_reduce) {
            issue("ncclAllReduce",
                  [&] { return ncclAllReduce(operand.data, call.out, whole, type, operand.op, comm_.get(), stream()); });
        } else if (call.operation == Operation::reduce) {
            issue("ncclReduce",
                  [&] { return ncclReduce(operand.data, call.out, whole, type, operand.op, call.root, comm_.get(), stream()); });
        } else if (is_even(whole)) {
            issue("ncclReduceScatter", [&] {
                return ncclReduceScatter(operand.data, call.out, call.out_count, type, operand.op, comm_.get(), stream());
            });
        } else {
            issue("ncclReduce", [&] {
                Batch batch;
                for (int r = 0; r < size_; ++r)
                    if (const ElementRange own = shard(whole, r); own.size() != 0)
                        batch.add(ncclReduce(element(operand.data, own.first, call.dtype), r == rank_ ? call.out : nullptr,
                                             own.size(), type, operand.op, r, comm_.get(), stream()));
                return batch.end();
            });
        }
        if (operand.own_op) ncclRedOpDestroy(operand.op, comm_.get());
    }

    /// This rank's elements times its factor.
    template <class Issue>
    Operand scaled(const Call& call, std::size_t slot, Issue&& issue) {
        auto* const cell = static_cast<cuda::MeanFactor*>(cells_.data()) + slot;
        auto* const weight = static_cast<double*>(weights_.data()) + slot;
        *weight = call.contribution.weight;
        cuda::check(cudaMemcpyAsync(&cell->weight, weight, sizeof *weight, cudaMemcpyHostToDevice, stream()), "cudaMemcpyAsync");
        issue("ncclAllReduce",
              [&] { return ncclAllReduce(&cell->weight, &cell->weight, 1, ncclFloat64, ncclSum, comm_.get(), stream()); });
        cuda::mean_factor(cell, call.contribution.scale, stream());

        // Only these may be written before they are sent.
        const bool own = call.operation == Operation::all_reduce || (call.operation == Operation::reduce && rank_ == call.root);
        const std::size_t bytes = call.in_count * size_of(call.dtype);
        if (is_low_precision(call.dtype)) {
            void* const to = own ? call.out : scratch(bytes);
            if (bytes != 0)
                cuda::scale_by({call.in, call.in_count, call.dtype, MemorySpace::device},
                               {to, call.in_count, call.dtype, MemorySpace::device}, &cell->factor, stream());
            return {to, ncclSum};
        }
        const void* data = call.in;
        if (call.contribution.scale == 0 && bytes != 0) {  // it is not read: it may hold NaNs
            void* const zeros = own ? call.out : scratch(bytes);
            cuda::check(cudaMemsetAsync(zeros, 0, bytes, stream()), "cudaMemsetAsync");
            data = zeros;
        }
        void* const factor = call.dtype == DType::f64 ? static_cast<void*>(&cell->factor) : &cell->factor32;
        Operand operand{data, ncclSum, true};
        issue("ncclRedOpCreatePreMulSum", [&] {
            return ncclRedOpCreatePreMulSum(&operand.op, factor, nccl_type(call.dtype), ncclScalarDevice, comm_.get());
        });
        return operand;
    }

    /// Memory for one call after another, as they come on the stream. Freeing would wait for the device, so what has become too
    /// small is kept.
    void* scratch(std::size_t bytes) {
        if (scratch_.empty() || scratch_.back().bytes() < bytes)
            scratch_.emplace_back(scratch_.empty() ? bytes : bytes + bytes / 2, false);
        return scratch_.back().data();
    }

    // -------------------------------------------------------------------------------------------------------- movements

    template <class Issue>
    void all_gather(const Call& call, Issue&& issue) {
        const ncclDataType_t type = nccl_type(call.dtype);
        const std::size_t whole = call.out_count;
        if (whole == 0) return;
        if (is_even(whole))
            return issue("ncclAllGather",
                         [&] { return ncclAllGather(call.in, call.out, call.in_count, type, comm_.get(), stream()); });
        issue("ncclBroadcast", [&] {
            Batch batch;
            for (int r = 0; r < size_; ++r)
                if (const ElementRange part = shard(whole, r); part.size() != 0) {
                    void* const to = element(call.out, part.first, call.dtype);
                    batch.add(ncclBroadcast(r == rank_ ? call.in : to, to, part.size(), type, r, comm_.get(), stream()));
                }
            return batch.end();
        });
    }

    template <class Issue>
    void gather(const Call& call, Issue&& issue) {
        const ncclDataType_t type = nccl_type(call.dtype);
        if (rank_ == call.root)
            copy(element(call.out, shard(call.out_count, rank_).first, call.dtype), call.in, call.in_count * size_of(call.dtype));
        issue("ncclSend", [&] {
            Batch batch;
            if (rank_ != call.root) {
                if (call.in_count != 0) batch.add(ncclSend(call.in, call.in_count, type, call.root, comm_.get(), stream()));
            } else {
                for (int r = 0; r < size_; ++r)
                    if (const ElementRange part = shard(call.out_count, r); r != rank_ && part.size() != 0)
                        batch.add(
                            ncclRecv(element(call.out, part.first, call.dtype), part.size(), type, r, comm_.get(), stream()));
            }
            return batch.end();
        });
    }

    template <class Issue>
    void scatter(const Call& call, Issue&& issue) {
        const ncclDataType_t type = nccl_type(call.dtype);
        if (rank_ == call.root)
            copy(call.out, element(call.in, shard(call.in_count, rank_).first, call.dtype), call.out_count * size_of(call.dtype));
        issue("ncclRecv", [&] {
            Batch batch;
            if (rank_ != call.root) {
                if (call.out_count != 0) batch.add(ncclRecv(call.out, call.out_count, type, call.root, comm_.get(), stream()));
            } else {
                for (int r = 0; r < size_; ++r)
                    if (const ElementRange part = shard(call.in_count, r); r != rank_ && part.size() != 0)
                        batch.add(
                            ncclSend(element(call.in, part.first, call.dtype), part.size(), type, r, comm_.get(), stream()));
            }
            return batch.end();
        });
    }

    void copy(void* to, const void* from, std::size_t bytes) const {
        if (bytes != 0 && to != from)
            cuda::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream()), "cudaMemcpyAsync");
    }

    NcclCommunicator comm_;
    const int rank_, size_;
    cuda::Stream stream_;
    cuda::DeviceMemory cells_;    ///< a MeanFactor for each slot
    cuda::PinnedMemory weights_;  ///< this rank's weight, for each slot
    cuda::DeviceMemory token_;    ///< what a barrier reduces
    std::vector<cuda::DeviceMemory> scratch_;
};

}  // namespace gradsync::inline v0::detail
