// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../engine/gradient_sync.hpp"
#include "../overlap/no_overlap.hpp"
#include "shard_state.hpp"
#include "values.hpp"

namespace gradsync::inline v0_2::detail {

/// One rank's optimizer inside the reductions of its gradients: each block of averages is stepped while it is in the
/// cache, and the new weights are written to all ranks. For host memory that the ranks share.
template <class B, class O>
class InsideSteps {
public:
    /// The references must outlive the object.
    InsideSteps(B& backend, const ShardState<B>& state, const BucketMemory<B>& values, O& optimizer) noexcept
        : backend_(backend), state_(state), values_(values), optimizer_(optimizer) {}

    /// Finds out whether all buckets of a new plan can be stepped inside the reductions. Collective.
    [[gnu::cold]] void adopt_plan([[maybe_unused]] const GradientSync<B>& engine, [[maybe_unused]] bool may) {
        possible_ = false;
        if constexpr (abilities_of<B>.steps_inside) {
            const std::size_t buckets = engine.home().planned().plan().size();
            std::uint64_t shared = may && can();
            for (std::size_t b = 0; shared != 0 && b < buckets; ++b)
                shared = backend_.shares(engine.home().storage().buckets()[b]) && backend_.shares(values_.buckets()[b]);
            possible_ = true;
            for (const std::uint64_t all : gather_values(backend_, {&shared, 1})) possible_ = possible_ && all != 0;
            steps_ = List<Step>(buckets);
            for (std::size_t b = 0; b < buckets; ++b) steps_[b].steps = this, steps_[b].bucket = b;
        }
    }
    bool possible() const noexcept { return possible_; }

    bool can() const {
        if constexpr (abilities_of<B>.steps_inside) return backend_.size() > 1 && backend_.steps_inside();
        else return false;
    }
    Policies<B> policies(auto& buckets, auto& overlap) {
        Policies<B> policies = make_policies<B>(buckets, overlap, Exchange(*this));
        if (can()) policies.overlap = NoOverlap();  // buckets leave in `step()`
        return policies;
    }

    /// Calls `finish()`, which completes the reductions of a step; their results are stepped instead of stored.
    void run(double gradient_scale, auto&& finish) {
        scale_ = gradient_scale;
        inside_ = true;
        finish();
        inside_ = false;
    }
    /// Calls `f()`. If it fails because this rank's optimizer threw, rethrows that exception.
    void rethrow(auto&& f) {
        try {
            f();
        } catch (...) {
            if (error_) std::rethrow_exception(error_);
            throw;
        }
    }

    /// The exchange of the buckets. Outside `run` it leaves the results in the shards.
    class Exchange : public ReduceScatter {
    public:
        explicit Exchange(InsideSteps& steps) noexcept : steps_(&steps) {}
        typename B::WorkType start(B& backend, std::size_t b, BufferView bucket, ReduceOp op,
                                   Contribution contribution) {
            if constexpr (abilities_of<B>.steps_inside) {
                if (steps_->inside_)
                    return backend.reduce_step(bucket, steps_->values_.buckets()[b], op, contribution,
                                               steps_->steps_[b]);
            }
            return ReduceScatter::start(backend, b, bucket, op, contribution);
        }

    private:
        InsideSteps* steps_;
    };

private:
    struct Step final : ShardStep {
        void step(ElementRange range, ConstBufferView sums, ListView<void* const> outs) override {
            try {
                steps->step(bucket, range, sums, outs);
            } catch (...) {
                steps->error_ = std::current_exception();
                throw;
            }
        }
        InsideSteps* steps = nullptr;
        std::size_t bucket = 0;
    };

    void step(std::size_t b, ElementRange range, ConstBufferView averages, ListView<void* const> outs) {
        const BufferView whole = values_.buckets()[b], own = whole.subview(range.first, range.size());
        const std::size_t first = range.first - shard_range(whole.count, backend_.size(), backend_.rank()).first;
        const auto all = [](std::size_t) { return true; };
        if constexpr (abilities_of<B>.steps_inside) {
            state_.step_part(b, first, averages, scale_, optimizer_, all);
            state_.round(HostPasses(), b, first, own, optimizer_, all);
        }
        for (void* const out : outs)
            if (void* const to = static_cast<std::byte*>(out) + range.first * size_of(own.dtype); to != own.data)
                std::memcpy(to, own.data, own.bytes());
    }

    B& backend_;
    const ShardState<B>& state_;
    const BucketMemory<B>& values_;
    O& optimizer_;
    bool possible_ = false, inside_ = false;
    double scale_ = 1;
    List<Step> steps_;          ///< by bucket
    std::exception_ptr error_;  ///< thrown by this rank's optimizer
};

}  // namespace gradsync::inline v0_2::detail
