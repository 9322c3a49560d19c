// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "gradient_buckets.hpp"
#include "policies.hpp"

namespace gradsync::inline v0_2::detail {

/// Reduces the sums of which a bucket consists (GradientBuckets::for_each_sum), each to the shards of the ranks. Ranks outside a sum
/// contribute nothing to it, and send nothing.
template <Backend B>
class DealtExchange final : public AnyExchange<B> {
public:
    /// `gradients` outlives this.
    explicit DealtExchange(const GradientBuckets<B>& gradients) noexcept : AnyExchange<B>({.scatters = true}), gradients_(gradients) {}

    std::string describe() const override { return ReduceScatter().describe(); }
    bool is_single_rank(const B&) const noexcept override { return false; }
    Traffic traffic(const B&, std::size_t b, BufferView bucket) const override {
        Traffic all{0, 0};
        gradients_.for_each_sum(b, [&](BufferView, BufferView, bool own, std::size_t) {
            all.bytes += own ? bucket.bytes() : 0;
            ++all.collectives;
        });
        return all;
    }
    std::chrono::nanoseconds progress_time() const override { return {}; }
    void resize(std::size_t buckets) override { works_ = List<List<typename B::WorkType>>(buckets); }
    void adopt_plan(B&, const BucketLayout&, const BucketPlan&, ListView<const ParameterInfo>, ListView<const ParameterView>) override {}

    void start(B& backend, std::size_t b, BufferView, ReduceOp op, Contribution contribution) override {
        List<typename B::WorkType>& works = works_[b];
        works.clear();
        gradients_.for_each_sum(b, [&](BufferView input, BufferView shard, bool own, std::size_t) {
            works.push_back(backend.reduce_scatter(input, shard, op, {own ? contribution.scale : 0, contribution.weight}));
        });
    }
    bool poll(std::size_t b) override {
        for (auto& work : works_[b])
            if (!poll_work(work)) return false;
        return true;
    }
    bool test(std::size_t b) override {
        for (auto& work : works_[b])
            if (!work.test()) return false;
        return true;
    }
    void wait(B& backend, std::size_t b) override {
        for (auto& work : works_[b]) await(backend, work);
    }

private:
    const GradientBuckets<B>& gradients_;
    List<List<typename B::WorkType>> works_;  ///< by bucket
};

}  // namespace gradsync::inline v0_2::detail
