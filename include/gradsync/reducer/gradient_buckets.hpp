#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "../core/backend.hpp"
#include "../core/bucket_plan.hpp"
#include "../core/parameter.hpp"
#include "../kernel/convert.hpp"
#include "../kernel/elementwise.hpp"
#include "bucket_storage.hpp"
#include "options.hpp"
#include "parameters.hpp"
#include "verification.hpp"

namespace gradsync::inline v0::detail {

/// The gradients and their way into and out of the buckets. Knows nothing of time: who calls what when is the
/// Reducer's. `deposit` may run for different gradients at once.
template <Backend B, class Buckets>
class GradientBuckets {
public:
    /// Plans, without memory yet. Throws Error where parameters, options and policy do not go together.
    GradientBuckets(const B& backend, std::vector<ParameterView> parameters, const ReducerOptions& options, Buckets policy)
        : options_(options),
          policy_(std::move(policy)),
          parameters_(std::move(parameters)),
          infos_(bucket_infos(parameters_, options_, B::memory_space, backend.rank())),
          order_(default_order(parameters_)),
          plan_(make_plan(backend)),
          deposited_(parameters_.size()) {}

    /// The buckets' memory, before anything else is asked of it. All ranks have the same plan. Collective.
    void allocate(B& backend) { storage_ = make_storage(backend); }

    const std::vector<ParameterView>& parameters() const noexcept { return parameters_; }
    const ParameterView& parameter(std::size_t i) const noexcept { return parameters_[i]; }
    /// The trainable parameters, as their gradients are expected to become ready.
    std::span<const std::size_t> order() const noexcept { return order_; }
    const BucketPlan& plan() const noexcept { return plan_; }
    std::string describe_policy() const { return policy_.describe(); }

    /// What travels as bucket b.
    BufferView bucket(std::size_t b) const noexcept { return storage_.bucket(b); }

    /// Where the trainer finds gradient i.
    BufferView gradient(std::size_t i) const noexcept {
        return live_here() && parameters_[i].requires_grad ? storage_.parameter(i) : parameters_[i].gradient;
    }

    /// Does gradient i have to be copied into its bucket?
    bool is_copied(std::size_t i) const noexcept {
        return !live_here() && storage_.parameter(i).data != parameters_[i].gradient.data;
    }
    /// Does the bucket hold sums of gradient i's earlier micro-batches?
    bool holds_sum(std::size_t i) const noexcept { return deposited_[i] != 0; }

    /// Copies gradient i into its bucket, or adds it to what micro-batches left there.
    void deposit(std::size_t i) {
        const BufferView from = parameters_[i].gradient, to = storage_.parameter(i);
        if (deposited_[i]) kernel::add(to, from);
        else copy(from, to);
        deposited_[i] = options_.accumulation == Accumulation::in_buckets;
    }

    /// This rank has nothing for gradient i.
    void clear(std::size_t i) noexcept {
        if (const BufferView slot = storage_.parameter(i); slot.bytes() != 0) std::memset(slot.data, 0, slot.bytes());
    }

    /// Copies bucket b's results to the trainer's gradients, those of `wanted(i)`.
    template <class Wanted>
    void hand_out(std::size_t b, Wanted&& wanted) {
        for (std::size_t i : plan_.bucket(b))
            if (is_copied(i) && wanted(i)) copy(storage_.parameter(i), parameters_[i].gradient);
    }

    /// Keeps gradient i, if it lives in its bucket, for the case that no rank used it.
    void keep(std::size_t i) {
        if (!live_here()) return;
        const BufferView slot = storage_.parameter(i);
        const std::size_t end = kept_bytes_.size();
        kept_.push_back(i);
        kept_bytes_.resize(end + slot.bytes());
        if (slot.bytes() != 0) std::memcpy(kept_bytes_.data() + end, slot.data, slot.bytes());
    }
    /// Puts back what was kept of those for which `unused(i)`.
    template <class Unused>
    void restore(Unused&& unused) {
        const std::uint8_t* bytes = kept_bytes_.data();
        for (std::size_t i : kept_) {
            const BufferView slot = storage_.parameter(i);
            if (unused(i) && slot.bytes() != 0) std::memcpy(slot.data, bytes, slot.bytes());
            bytes += slot.bytes();
        }
        kept_.clear();
        kept_bytes_.clear();
    }

    /// The step is over: the next deposits overwrite.
    void forget_sums() noexcept { deposited_.assign(deposited_.size(), 0); }

    /// Plans anew for another order of readiness; values and sums move along. True if the plan changed. Collective.
    bool reorder(B& backend, std::span<const std::uint64_t> order) {
        for (std::size_t k = 0; k < order_.size(); ++k) order_[k] = order[k];
        BucketPlan plan = make_plan(backend);
        if (plan == plan_) return false;
        plan_ = std::move(plan);
        BucketStorage<B> storage = make_storage(backend);
        for (std::size_t i : order_)
            // Borrowed gradients live with the trainer: a bucket holds nothing of theirs but sums of micro-batches.
            if (live_here() || deposited_[i]) copy(storage_.parameter(i), storage.parameter(i));
        storage_ = std::move(storage);
        return true;
    }

    /// Gradient i, a borrowed one in bucket b, lives elsewhere from now on.
    void rebind(std::size_t i, std::size_t b, BufferView gradient) {
        if (parameters_[i].requires_grad && is_direct(b)) storage_.rebind(b, i, gradient);
        parameters_[i].gradient = gradient;
    }

private:
    bool live_here() const noexcept { return options_.gradients == GradientStorage::in_buckets; }

    static void copy(ConstBufferView from, BufferView to) {
        if (from.dtype != to.dtype) kernel::convert(from.data, from.dtype, to.data, to.dtype, to.count);
        else if (from.bytes() != 0) std::memcpy(to.data, from.data, from.bytes());
    }

    BucketPlan make_plan(const B& backend) const {
        BucketPlan plan;
        // One rank has nothing to send: with a bucket each, borrowed gradients are not even copied.
        if (backend.size() == 1 && !live_here()) {
            for (const std::size_t& i : order_) plan.push_back({&i, 1});
            return plan;
        }
        plan = policy_.plan(infos_, order_);
        check_plan(plan, infos_, parameters_, policy_.describe(), backend.rank());
        return plan;
    }

    /// Is bucket b the gradient of its only parameter, in the trainer's own memory?
    bool is_direct(std::size_t b) const {
        const std::size_t i = plan_.bucket(b).front();
        return plan_.bucket(b).size() == 1 && !live_here() && options_.unused == UnusedParameters::error &&
               options_.accumulation == Accumulation::in_gradients && infos_[i].dtype == parameters_[i].gradient.dtype;
    }

    BucketStorage<B> make_storage(B& backend) const {
        return {backend, plan_, infos_, parameters_, [this](std::size_t b) { return is_direct(b); }};
    }

    ReducerOptions options_;
    Buckets policy_;
    std::vector<ParameterView> parameters_;
    std::vector<ParameterInfo> infos_;
    std::vector<std::size_t> order_;
    BucketPlan plan_;
    BucketStorage<B> storage_;
    std::vector<std::uint8_t> deposited_;        ///< by parameter: the next deposit adds
    std::vector<std::size_t> kept_;      ///< gradients to put back if nobody used them
    std::vector<std::uint8_t> kept_bytes_;  ///< what they held, one after the other
};

}  // namespace gradsync::inline v0::detail
