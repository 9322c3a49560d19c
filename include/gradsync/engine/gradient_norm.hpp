// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "gradient_home.hpp"

namespace gradsync::inline v0_2 {

/// The factor that scales gradients down to a norm of at most `max_norm`, for optimizers that take a factor and save
/// the clipping pass. 1 if the norm is small enough, infinite or NaN: one bad element must not spoil all others. Throws
/// Error(invalid_argument) if `max_norm` is negative or NaN.
inline double clip_factor(double norm, double max_norm) {
    if (!(max_norm >= 0)) detail::refuse("clip_factor", "a limit must be 0 or more, not ", max_norm);
    return norm > max_norm && detail::is_finite(norm) ? max_norm / norm : 1;
}

}  // namespace gradsync::inline v0_2

namespace gradsync::inline v0_2::detail {

/// The global L2 norm of gradients. Each rank reads only its part. Squares are summed over fixed blocks, counted from
/// each parameter's first element, and the sums of blocks are added up in a fixed order. So the bits depend neither on
/// bucket layout, rank nor world size, nor on whether gradients are whole or sharded.
///
/// A block that a shard boundary cuts is put together first: each owner adds its elements to zeros, in the same
/// collective as the sums.
template <Backend B>
class GradientNorm {
public:
    /// `sharded`: this rank has only its shards of the averages; otherwise it has all of them.
    [[gnu::cold]] GradientNorm(const B& backend, const GradientHome<B>& home, bool sharded) {
        const PlannedParameters<B>& planned = home.planned();
        const int size = backend.size(), rank = backend.rank();
        for (const ParameterView& p : planned.parameters()) {
            counts_.push_back(p.requires_grad && is_floating(p.gradient.dtype) ? p.gradient.count : 0);
            first_block_.push_back(blocks_ += divide_up(counts_.back(), block));
        }
        if (sharded) split_ = List<std::size_t>(blocks_, whole);
        const ElementRange own = shard_range(blocks_, size, rank);
        for (std::size_t i = 0; !sharded && i < counts_.size(); ++i) {
            const std::size_t begin = first_block_[i], end = smaller(first_block_[i + 1], own.last);
            const std::size_t first = larger(begin, own.first);
            if (first < end)
                slices_.push_back({.parameter = i,
                                   .first = (first - begin) * block,
                                   .count = smaller(counts_[i], (end - begin) * block) - (first - begin) * block});
        }
        // Blocks that are cut have one place each behind the sums.
        for (int r = 0; sharded && r < size; ++r)
            for (const ShardSlice& s :
                 shard_slices(planned.plan(), home.storage().layout(), planned.infos(), size, r)) {
                if (counts_[s.parameter] == 0) continue;
                if (r == rank) slices_.push_back(s);
                for (const std::size_t edge : {s.first, s.first + s.count})
                    if (edge % block != 0 && edge != counts_[s.parameter])
                        if (std::size_t& place = split_[first_block_[s.parameter] + edge / block]; place == whole)
                            place = splits_++;
            }
        values_.resize(blocks_ + splits_ * block);
    }

    /// Computes the norm. `part(i, first, count, bucket, offset)` returns the view of `count` elements of gradient i
    /// from element `first`. Sharded gradients lie at `offset` in this rank's shard of `bucket`. Collective.
    double compute(B& backend, auto&& part) {
        kernel::register_kernels<DType::f64>();  // parts of gradients become f64 before a view of them is made
        values_.fill(0);
        const auto passes = passes_of(backend);
        auto sums = passes.square_sums();
        for (const ShardSlice& s : slices_) {
            for (std::size_t done = 0; done < s.count;) {
                const std::size_t first = s.first + done, in_block = first % block;
                const std::size_t n = smaller(block - in_block, s.count - done),
                                  k = first_block_[s.parameter] + first / block;
                const ConstBufferView elements = part(s.parameter, first, n, s.bucket, s.offset + done);
                if (splits_ == 0 || split_[k] == whole) sums.add(elements, values_[k]);
                else read_part(passes, elements, values_.data() + blocks_ + split_[k] * block + in_block);
                done += n;
            }
        }
        sums.finish();
        if (backend.size() > 1) host_of(backend).all_reduce(buffer(values_), ReduceOp::sum).wait();
        for (std::size_t k = 0; splits_ != 0 && k < blocks_; ++k)  // a short last block is padded with zeros
            if (split_[k] != whole)
                values_[k] = kernel::sum_of_squares({values_.data() + blocks_ + split_[k] * block, block, DType::f64});
        return square_root(kernel::detail::sum_in_order({values_.data(), blocks_}));
    }

private:
    /// Elements of a block: few enough to put together at shard boundaries, enough that the sums
    /// are small against the gradients.
    static constexpr std::size_t block = 1024;
    static constexpr std::size_t whole = static_cast<std::size_t>(-1);

    /// Copies elements of a split block to the host, as f64.
    static void read_part(const auto& passes, ConstBufferView elements, double* to) {
        std::byte bytes[block * sizeof(double)];
        passes.read(elements, bytes);
        kernel::convert(bytes, elements.dtype, to, DType::f64, elements.count);
    }

    List<std::size_t> counts_;             ///< by parameter: elements that count
    List<std::size_t> first_block_ = {0};  ///< by parameter; then the number of blocks
    std::size_t blocks_ = 0;
    List<ShardSlice> slices_;  ///< the elements that this rank reads
    List<std::size_t> split_;  ///< by block: its index among the split ones, or `whole`
    std::size_t splits_ = 0;
    List<double> values_;  ///< the blocks' sums, then the elements of split blocks
};

}  // namespace gradsync::inline v0_2::detail
