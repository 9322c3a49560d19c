#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <vector>

#include "../core/backend.hpp"
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
        for (std::size_t i = 0; i < counts.size(); ++i)
            for (std::size_t first = 0; first < counts[i]; first += block)
                blocks_.push_back({i, first, std::min(block, counts[i] - first)});
        sums_.resize(blocks_.size());
    }

    /// Collective. `gradient(i)` is the view of gradient i.
    template <Backend B, class Gradient>
    double compute(B& backend, Gradient&& gradient) {
        const ElementRange own = shard_range(blocks_.size(), backend.size(), backend.rank());
        for (std::size_t k = own.first; k < own.last; ++k) {
            const Block& b = blocks_[k];
            sums_[k] = kernel::sum_of_squares(gradient(b.parameter).subview(b.first, b.count));
        }
        const BufferView all = buffer(sums_);
        backend.all_gather(all.subview(own.first, own.size()), all).wait();
        double sum = 0;
        for (double s : sums_) sum += s;
        return std::sqrt(sum);
    }

private:
    static constexpr std::size_t block = 16384;

    struct Block {
        std::size_t parameter;
        std::size_t first;
        std::size_t count;
    };

    std::vector<Block> blocks_;
    std::vector<double> sums_;
};

}  // namespace gradsync::inline v0::detail
