// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "gradient_buckets.hpp"

namespace gradsync::inline v0_2::detail {

/// Reduces the sums of which a bucket consists, each in memory of its own. Ranks outside a sum contribute nothing to it, and send nothing.
/// Rarely used, so that it is compiled for size.
template <Backend B>
class DealtExchange {
public:
    void resize(const GradientBuckets<B>& gradients) {
        each_ = gradients.dealt().needs().at_a_time;
        works_ = List<typename B::WorkType>(gradients.plan().size() * each_);
    }
    [[gnu::cold]] Traffic traffic(const GradientBuckets<B>& gradients, std::size_t b) const {
        Traffic all{0, gradients.dealt().now().size()};
        for (const DealtSum& sum : gradients.dealt().now()) all.bytes += gradients.has_part(sum) ? gradients.bucket(b).bytes() : 0;
        return all;
    }
    [[gnu::cold]] void start(B& backend, const GradientBuckets<B>& gradients, std::size_t b, Contribution own) {
        std::size_t k = 0;
        for (const DealtSum& sum : gradients.dealt().now()) {
            const Contribution part{gradients.has_part(sum) ? own.scale : 0, own.weight};
            const BufferView memory = gradients.sum(b, k);
            works_[b * each_ + k] = gradients.halves() ? backend.reduce_scatter(memory, gradients.result(b, k), ReduceOp::mean, part)
                                                       : backend.all_reduce(memory, ReduceOp::mean, part);
            ++k;
        }
    }
    /// See AnyExchange. If a round uses fewer works than there are, the others are complete from an earlier round, or empty.
    [[gnu::cold]] bool poll(std::size_t b) {
        for (std::size_t k = 0; k < each_; ++k)
            if (!poll_work(works_[b * each_ + k])) return false;
        return true;
    }
    [[gnu::cold]] bool test(std::size_t b) {
        for (std::size_t k = 0; k < each_; ++k)
            if (!works_[b * each_ + k].test()) return false;
        return true;
    }
    [[gnu::cold]] void wait(B& backend, std::size_t b) {
        for (std::size_t k = 0; k < each_; ++k) await(backend, works_[b * each_ + k]);
    }

private:
    std::size_t each_ = 0;
    List<typename B::WorkType> works_;  ///< by bucket, and sum of a round
};

}  // namespace gradsync::inline v0_2::detail
