// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../cuda/passes.hpp"
#include "../cuda/runtime.hpp"
#include "communicator.hpp"

namespace gradsync::inline v0_2::detail {

/// Translates a `Call` into NCCL calls on a stream of its own. NCCL's own operations need equal shards; uneven ones are
/// composed of grouped operations.
///
/// A mean is a sum of elements that each rank multiplies by its scale over the sum of all weights. The ranks add
/// up the weights on the device just before, so no host waits. NCCL multiplies f32 and f64 in full precision.
/// Types of 16 and 8 bits are multiplied by a pass of the library, in f32, because NCCL would round the factor
/// to their type. So are all types on a single rank, where NCCL before 2.29.7 skips up to 31 elements at the end
/// (NVIDIA/nccl#1950). Not thread-safe.
class NcclChannel {
public:
    /// `slots`: the most calls in flight.
    NcclChannel(NcclCommunicator comm, int rank, int size, std::size_t slots)
        : comm_(std::move(comm)),
          rank_(rank),
          size_(size),
          cells_(slots * sizeof(cuda::MeanFactor)),
          weights_(slots * sizeof(double)) {
        pending_.reserve(slots);
    }

    cudaStream_t stream() const noexcept { return stream_.get(); }
    NcclCommunicator& communicator() noexcept { return comm_; }

    /// Throws Error(invalid_argument) if this program cannot run the call.
    static void check(const Call& call) {
        if (collective::reduces(call.operation) && call.op == ReduceOp::mean && !cuda::linked())
            refuse(name_of(call.operation).data(), "a mean on a device needs the library's kernels; ",
                   "link gradsync::cuda, or compile gradsync/cuda/passes.cu with nvcc into the program");
    }

    /// Adds a call to the next launch; `call` must stay valid until then. `slot` must differ from
    /// those of all calls in flight.
    void add(const Call& call, std::size_t slot) {
        pending_.push_back({&call, slot, call.in, nccl_op(call.op)});
        culprit_ = pending_.size();
    }

    /// Enqueues the added calls on the stream, as one NCCL launch. `wanted()` returns false to give up. Throws
    /// Error(device_failed).
    ///
    /// The factors of all means are computed first, because NCCL starts a group only when it ends.
    template <class Wanted>
    void launch(Wanted&& wanted) {
        const auto settle = [&](ncclResult_t code, const char* what) { comm_.settle(code, what, wanted); };
        scale_means(settle);
        together([this](const Pending& next) { post(next); }, settle);
        for (const Pending& done : pending_)
            if (done.own_op) ncclRedOpDestroy(done.op, comm_.get());
        pending_.clear();
        culprit_ = 0;
    }
    /// After a failure: the index of the failed call among those added, or their number if it is unknown.
    std::size_t culprit() const noexcept { return culprit_; }

private:
    struct Pending {
        const Call* call;
        std::size_t slot;
        const void* data;  ///< input of a reduction
        ncclRedOp_t op;
        bool own_op = false;  ///< `op` was made for this call

        bool is_mean() const noexcept { return collective::reduces(call->operation) && call->op == ReduceOp::mean; }
        std::size_t bytes() const noexcept { return call->in_count * size_of(call->dtype); }
    };

    /// Calls `post(call)` for all pending calls, as one launch.
    template <class Post, class Settle>
    void together(Post&& post, Settle&& settle) {
        culprit_ = 0;
        check(ncclGroupStart(), "ncclGroupStart");
        struct Group {  // an open group would capture later calls of this thread on any communicator
            bool open = true;
            ~Group() {
                if (open) ncclGroupEnd();
            }
        } group;
        for (; culprit_ < pending_.size(); ++culprit_) post(pending_[culprit_]);
        group.open = false;
        settle(ncclGroupEnd(), "ncclGroupEnd");
    }
    /// Throws NcclError if a non-blocking call has failed.
    void check(ncclResult_t code, const char* function) const {
        if (code != ncclSuccess && code != ncclInProgress) throw_nccl_error(code, function, comm_.get());
    }

    /// NCCL takes the address of read-only buffers as a pointer to const.
    static std::byte* element(const void* data, std::size_t index, DType dtype) noexcept {
        return static_cast<std::byte*>(const_cast<void*>(data)) + index * size_of(dtype);
    }

    bool is_even(std::size_t whole) const noexcept { return whole % static_cast<std::size_t>(size_) == 0; }

    /// Calls `use(rank, range)` for the non-empty shards of a buffer.
    template <class Use>
    void for_shards(std::size_t whole, Use&& use) const {
        for (int r = 0; r < size_; ++r)
            if (const ElementRange range = shard_range(whole, size_, r); range.size() != 0) use(r, range);
    }

    // ----------------------------------------------------------------------------------------------------------- means

    cuda::MeanFactor* cell(const Pending& mean) const noexcept {
        return static_cast<cuda::MeanFactor*>(cells_.data()) + mean.slot;
    }

    /// Prepares the operands of all pending means: this rank's elements times its factor.
    template <class Settle>
    void scale_means(Settle&& settle) {
        std::size_t room = 0;
        bool any = false;
        for (const Pending& next : pending_) {
            if (!next.is_mean()) continue;
            any = true;
            room += scratch_bytes(next);
            double* const weight = static_cast<double*>(weights_.data()) + next.slot;
            *weight = next.call->contribution.weight;
            cuda::copy(&cell(next)->weight, weight, sizeof *weight, cudaMemcpyHostToDevice, stream());
        }
        if (!any) return;
        together(
            [this](const Pending& next) {
                if (!next.is_mean()) return;
                double* const weight = &cell(next)->weight;
                check(ncclAllReduce(weight, weight, 1, ncclFloat64, ncclSum, comm_.get(), stream()), "ncclAllReduce");
            },
            settle);
        std::byte* scratch = room == 0 ? nullptr : this->scratch(room);
        for (culprit_ = 0; culprit_ < pending_.size(); ++culprit_)
            if (Pending& next = pending_[culprit_]; next.is_mean()) {
                cuda::mean_factor(cell(next), next.call->contribution.scale, stream());
                scale(next, scratch, settle);
                scratch += scratch_bytes(next);
            }
    }

    template <class Settle>
    void scale(Pending& mean, std::byte* scratch, Settle&& settle) {
        const Call& call = *mean.call;
        void* const to = may_write(call) ? call.out : scratch;
        if (multiplied_here(call.dtype)) {
            mean.data = to;
            if (mean.bytes() != 0)
                cuda::scale_by(detail::typed_view<const void>(call.in, call.in_count, call.dtype, MemorySpace::device),
                               detail::typed_view(to, call.in_count, call.dtype, MemorySpace::device),
                               &cell(mean)->factor, stream());
            return;
        }
        if (call.contribution.scale == 0 && mean.bytes() != 0) {  // not read, because it may hold NaNs
            cuda::check(cudaMemsetAsync(to, 0, mean.bytes(), stream()), "cudaMemsetAsync");
            mean.data = to;
        }
        void* const factor = call.dtype == DType::f64 ? static_cast<void*>(&cell(mean)->factor) : &cell(mean)->factor32;
        settle(ncclRedOpCreatePreMulSum(&mean.op, factor, nccl_type(call.dtype), ncclScalarDevice, comm_.get()),
               "ncclRedOpCreatePreMulSum");
        mean.own_op = true;
    }

    /// May `out` hold the scaled elements? Only if it is as long as `in`.
    bool may_write(const Call& call) const noexcept {
        return call.operation == Operation::all_reduce || (call.operation == Operation::reduce && rank_ == call.root);
    }
    bool multiplied_here(DType dtype) const noexcept { return is_low_precision(dtype) || size_ == 1; }
    /// Bytes of scratch memory for the operand, rounded up to the alignment of device memory.
    std::size_t scratch_bytes(const Pending& mean) const noexcept {
        const bool needed = multiplied_here(mean.call->dtype) || mean.call->contribution.scale == 0;
        return needed && !may_write(*mean.call) ? (mean.bytes() + 255) / 256 * 256 : 0;
    }
    /// Scratch memory that all launches share, in stream order. Freeing would wait for the device, so memory that has
    /// become too small is kept.
    std::byte* scratch(std::size_t bytes) {
        if (scratch_.empty() || scratch_.back().bytes() < bytes)
            scratch_.emplace_back(scratch_.empty() ? bytes : bytes + bytes / 2, false);
        return static_cast<std::byte*>(scratch_.back().data());
    }

    // -------------------------------------------------------------------------------------------- the calls themselves

    void post(const Pending& next) {
        const Call& call = *next.call;
        const ncclDataType_t type = nccl_type_to_move(call.dtype);
        if (collective::reduces(call.operation)) return reduce(next);
        switch (call.operation) {
            case Operation::broadcast:
                if (call.out_count != 0)
                    check(ncclBroadcast(call.in, call.out, call.out_count, type, call.root, comm_.get(), stream()),
                          "ncclBroadcast");
                break;
            case Operation::all_gather: all_gather(call); break;
            case Operation::gather:
            case Operation::scatter: exchange_shards(call); break;
            default:
                check(ncclAllReduce(token_.data(), token_.data(), 1, ncclInt32, ncclMax, comm_.get(), stream()),
                      "ncclAllReduce");
        }
    }

    void reduce(const Pending& next) {
        const Call& call = *next.call;
        const ncclDataType_t type = nccl_type(call.dtype);
        const std::size_t whole = call.in_count;
        if (whole == 0) return;
        if (call.operation == Operation::all_reduce)
            return check(ncclAllReduce(next.data, call.out, whole, type, next.op, comm_.get(), stream()),
                         "ncclAllReduce");
        if (call.operation == Operation::reduce)
            return check(ncclReduce(next.data, call.out, whole, type, next.op, call.root, comm_.get(), stream()),
                         "ncclReduce");
        if (is_even(whole))
            return check(ncclReduceScatter(next.data, call.out, call.out_count, type, next.op, comm_.get(), stream()),
                         "ncclReduceScatter");
        for_shards(whole, [&](int r, ElementRange own) {
            check(ncclReduce(element(next.data, own.first, call.dtype), r == rank_ ? call.out : nullptr, own.size(),
                             type, next.op, r, comm_.get(), stream()),
                  "ncclReduce");
        });
    }

    void all_gather(const Call& call) {
        const ncclDataType_t type = nccl_type_to_move(call.dtype);
        const std::size_t whole = call.out_count;
        if (whole == 0) return;
        if (is_even(whole))
            return check(ncclAllGather(call.in, call.out, call.in_count, type, comm_.get(), stream()), "ncclAllGather");
        for_shards(whole, [&](int r, ElementRange part) {
            void* const to = element(call.out, part.first, call.dtype);
            check(ncclBroadcast(r == rank_ ? call.in : to, to, part.size(), type, r, comm_.get(), stream()),
                  "ncclBroadcast");
        });
    }

    /// Gathers or scatters: the root exchanges shards with each other rank, and copies its own.
    void exchange_shards(const Call& call) {
        const ncclDataType_t type = nccl_type_to_move(call.dtype);
        const bool gathers = call.operation == Operation::gather;
        const auto send = [&](const void* from, std::size_t count, int to) {
            if (count != 0) check(ncclSend(from, count, type, to, comm_.get(), stream()), "ncclSend");
        };
        const auto receive = [&](void* to, std::size_t count, int from) {
            if (count != 0) check(ncclRecv(to, count, type, from, comm_.get(), stream()), "ncclRecv");
        };
        if (rank_ != call.root)
            return gathers ? send(call.in, call.in_count, call.root) : receive(call.out, call.out_count, call.root);
        for_shards(gathers ? call.out_count : call.in_count, [&](int r, ElementRange part) {
            std::byte* const at = element(gathers ? call.out : call.in, part.first, call.dtype);
            if (r != rank_) return gathers ? receive(at, part.size(), r) : send(at, part.size(), r);
            void* const to = gathers ? at : call.out;
            if (const void* const from = gathers ? call.in : at; to != from)
                cuda::copy(to, from, part.size() * size_of(call.dtype), cudaMemcpyDeviceToDevice, stream());
        });
    }

    NcclCommunicator comm_;
    const int rank_, size_;
    cuda::Stream stream_ = cuda::make_stream(true);
    cuda::DeviceMemory cells_;               ///< a MeanFactor per slot
    cuda::PinnedMemory weights_;             ///< this rank's weight per slot
    cuda::DeviceMemory token_{sizeof(int)};  ///< the element that a barrier reduces
    std::vector<cuda::DeviceMemory> scratch_;
    std::vector<Pending> pending_;  ///< calls of the next launch
    std::size_t culprit_ = 0;
};

}  // namespace gradsync::inline v0_2::detail
