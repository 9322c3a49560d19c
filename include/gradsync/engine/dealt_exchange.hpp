// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "policies.hpp"
#include "round_sums.hpp"

namespace gradsync::inline v0_2::detail {

/// Reduces the sums of a bucket, each in memory of its own. Ranks outside a sum contribute nothing to it and send
/// nothing. Rarely used, so it is compiled for size.
template <Backend B>
class DealtExchange final : public AnyExchange<B> {
public:
    /// `rounds` outlives this.
    DealtExchange(const RoundSums<B>& rounds, ExchangeTraits has) noexcept : AnyExchange<B>(has), rounds_(rounds) {}

    std::string describe() const override { return "sums"; }
    bool is_single_rank(const B& backend) const noexcept override { return backend.size() == 1; }
    std::chrono::nanoseconds progress_time() const override { return {}; }
    [[gnu::cold]] Traffic traffic(const B& backend, std::size_t, BufferView bucket) const override {
        Traffic all{0, sums().size()};
        for (const DealtSum& sum : sums()) all.bytes += sum.has(backend.rank()) ? bucket.bytes() : 0;
        return all;
    }
    [[gnu::cold]] void adopt_plan(B&, const BucketLayout&, const BucketPlan& plan, ListView<const ParameterInfo>,
                                  ListView<const ParameterView>) override {
        each_ = rounds_.dealt().needs().at_a_time;
        works_ = List<typename B::WorkType>(plan.size() * each_);
    }
    [[gnu::cold]] void start(B& backend, std::size_t b, BufferView, ReduceOp op, Contribution own) override {
        std::size_t k = 0;
        for (const DealtSum& sum : sums()) {
            const Contribution part{sum.has(backend.rank()) ? own.scale : 0, own.weight};
            const BufferView memory = rounds_.memory(b, k);
            works_[b * each_ + k] = this->traits.scatters
                                        ? backend.reduce_scatter(memory, rounds_.result(b, k), op, part)
                                        : backend.all_reduce(memory, op, part);
            ++k;
        }
    }
    // If a round uses fewer works than exist, the others are complete from an earlier round, or empty.
    [[gnu::cold]] bool poll(std::size_t b) override {
        for (std::size_t k = 0; k < each_; ++k)
            if (!poll_work(works_[b * each_ + k])) return false;
        return true;
    }
    [[gnu::cold]] bool test(std::size_t b) override {
        for (std::size_t k = 0; k < each_; ++k)
            if (!works_[b * each_ + k].test()) return false;
        return true;
    }
    [[gnu::cold]] void wait(B& backend, std::size_t b) override {
        for (std::size_t k = 0; k < each_; ++k) await(backend, works_[b * each_ + k]);
    }

private:
    ListView<const DealtSum> sums() const noexcept { return rounds_.dealt().now(); }

    const RoundSums<B>& rounds_;
    std::size_t each_ = 0;
    List<typename B::WorkType> works_;  ///< by bucket, and sum of a round
};

}  // namespace gradsync::inline v0_2::detail
