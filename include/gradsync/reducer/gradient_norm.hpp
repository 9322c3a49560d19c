#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "../core/backend.hpp"
#include "../core/math.hpp"
#include "../core/shard_range.hpp"
#include "../kernel/elementwise.hpp"

namespace gradsync::inline v0::detail {

/// The global L2 norm of gradients that all ranks hold alike. Each rank sums the squares of its share of fixed
/// blocks, counted from each parameter's first element, and the sums are gathered and added up in one order: the
/// pass over memory is split over the ranks, and the bits depend on neither bucket layout, rank nor world size.
class GradientNorm {
public:
    GradientNorm() = default;

    /// `counts[i]` elements of gradient i; 0 for one that takes no part.
    explicit GradientNorm(std::span<const std::size_t> counts) {
        std::size_t blocks = 0;
        for (const std::size_t count : counts) ends_.push_back(blocks += (count + block - 1) / block);
        sums_.resize(blocks);
    }

    /// Collective. `gradient(i)` is the view of gradient i.
    template <Backend B, class Gradient>
    double compute(B& backend, Gradient&& gradient) {
        const ElementRange own = shard_range(sums_.size(), backend.size(), backend.rank());
        std::size_t i = 0, begin = 0;  // the parameter that block k belongs to, and its first block
        for (std::size_t k = own.first; k < own.last; ++k) {
            while (ends_[i] <= k) begin = ends_[i++];
            const BufferView whole = gradient(i);
            const std::size_t first = (k - begin) * block, rest = whole.count - first;
            sums_[k] = kernel::sum_of_squares(whole.subview(first, rest < block ? rest : block));
        }
        const BufferView all = buffer(sums_);
        backend.all_gather(all.subview(own.first, own.size()), all).wait();
        return square_root(kernel::detail::sum_in_order({sums_.data(), sums_.size()}));
    }

private:
    static constexpr std::size_t block = 16384;

    std::vector<std::size_t> ends_;  ///< by parameter: the number of blocks up to its last one
    std::vector<double> sums_;       ///< by block
};

}  // namespace gradsync::inline v0::detail
