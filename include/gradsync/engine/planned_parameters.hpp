// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "parameters.hpp"
#include "policies.hpp"
#include "verification.hpp"

namespace gradsync::inline v0_2::detail {

/// The registered parameters, and the buckets that the trainable ones are planned into.
template <Backend B>
class PlannedParameters {
public:
    /// `options` and `policies` outlive this. Throws Error if parameters, options and policy do not fit together.
    [[gnu::cold]] PlannedParameters(B& backend, List<ParameterView> parameters, const ReducerOptions& options,
                                    const Policies<B>& policies)
        : options_(options),
          policy_(policies.buckets),
          means_only_(policies.exchange->traits.means_only),
          size_(backend.size()),
          owners_(policies.whole),
          parameters_(std::move(parameters)),
          infos_(infos_for(backend, policies)),
          plan_(make_plan(backend)) {}

    std::size_t size() const noexcept { return parameters_.size(); }
    const ParameterView& operator[](std::size_t i) const noexcept { return parameters_[i]; }
    const List<ParameterView>& parameters() const noexcept { return parameters_; }
    /// Returns the description of each parameter that bucket policies plan by.
    const List<ParameterInfo>& infos() const noexcept { return infos_; }
    /// The trainable parameters, in the order in which their gradients are expected to become ready.
    std::span<const std::size_t> order() const noexcept { return order_; }
    const BucketPlan& plan() const noexcept { return plan_; }
    BucketLayout layout() const { return {plan_, infos_, owners_.owners(), size_}; }

    void set_value(std::size_t i, BufferView value) noexcept { parameters_[i].value = value; }  ///< to be compared
    /// For any thread.
    void set_gradient(std::size_t i, BufferView gradient) noexcept {
        parameters_[i].gradient = gradient;
        some_moved_.store(true, std::memory_order_relaxed);
    }
    /// Was a gradient set since `note_apart()`?
    bool some_moved() const noexcept { return some_moved_.load(std::memory_order_relaxed); }
    void note_apart() noexcept { some_moved_.store(false, std::memory_order_relaxed); }

    /// Plans for another order of readiness. Returns true if the plan changed.
    [[gnu::cold]] bool reorder(const B& backend, std::span<const std::uint64_t> order) {
        for (std::size_t k = 0; k < order_.size(); ++k) order_[k] = order[k];
        BucketPlan plan = make_plan(backend);
        if (plan == plan_) return false;
        plan_ = std::move(plan);
        return true;
    }

    /// By bucket: the range of the trainer's memory that is this bucket on all ranks; without memory if there is none.
    /// Collective.
    [[gnu::cold]] List<BufferView> direct_buckets(B& backend) const {
        List<BufferView> ranges(plan_.size());
        List<std::uint64_t> places(plan_.size());  // by bucket: digest of the positions of its gradients in the range
        bool several = false;
        for (std::size_t b = 0; b < plan_.size(); ++b) {
            const std::span<const std::size_t> bucket = plan_.bucket(b);
            // Groups with replicas must lay out buckets alike, but each sees only its own memory.
            bool direct = !means_only_ || bucket.size() == 1;
            for (const std::size_t i : bucket) direct = direct && may_be_direct(i, infos_[i]);
            if (!direct) continue;
            several = several || bucket.size() > 1;
            ranges[b] = range_in_place<B>(bucket, parameters_, &ParameterView::gradient);
            Digest digest;
            if (bucket.size() > 1 && ranges[b].bytes() < least_direct_) ranges[b] = {};
            if (ranges[b].data == nullptr) continue;
            for (const std::size_t i : bucket) digest.add(std::uint64_t{distance(ranges[b], parameters_[i].gradient)});
            places[b] = digest.value();
        }
        if (!several || backend.size() == 1) return ranges;
        const List<std::uint64_t> all = gather_values(host_of(backend), places);
        for (std::size_t k = 0; k < all.size(); ++k)
            if (const std::size_t b = k % plan_.size(); all[k] != places[b]) ranges[b] = {};
        return ranges;
    }

private:
    /// May a bucket use the memory of gradient i directly?
    bool may_be_direct(std::size_t i, const ParameterInfo& info) const {
        return parameters_[i].requires_grad && borrows() && options_.unused == UnusedParameters::error &&
               options_.accumulation == Accumulation::in_gradients && info.dtype == parameters_[i].gradient.dtype &&
               !info.whole;
    }

    bool borrows() const noexcept { return options_.gradients == GradientStorage::borrowed; }

    [[gnu::cold]] List<ParameterInfo> infos_for(B& backend, const Policies<B>& policies) {
        const bool scattered = policies.exchange->traits.scatters && !policies.decoupled;
        List<ParameterInfo> infos = bucket_infos(parameters_, options_, B::memory_space, scattered, backend.rank());
        for (std::size_t i = 0; i < infos.size(); ++i) infos[i].whole = size_ > 1 && owners_.is_whole(i);
        if constexpr (abilities_of<B>.cheaper_alone) {
            if (backend.size() == 1) return infos;
            std::uint64_t shared = 1;  // compared whatever the options say: they may differ between ranks
            for (const ParameterView& p : parameters_)
                shared = shared && (!p.requires_grad || p.gradient.count == 0 || backend.shares(p.gradient));
            for (const std::uint64_t all : gather_values(backend, {&shared, 1})) shared = shared && all;
            least_direct_ = shared != 0 ? 0 : backend.cheaper_alone_from(false);
            // Doubles the bytes from which gradients travel alone until these are few: a rank that is ahead need not
            // wait for the others before it starts another bucket.
            std::size_t least = backend.cheaper_alone_from(shared != 0), most = 256;
            for (std::size_t alone = most + 1; alone > most && !policies.packs; least *= 2) {
                alone = 0;
                for (std::size_t i = 0; i < infos.size(); ++i)
                    alone += infos[i].cheaper_alone = may_be_direct(i, infos[i]) && infos[i].bytes() >= least;
            }
        }
        return infos;
    }

    [[gnu::cold]] BucketPlan make_plan(const B& backend) {
        BucketPlan plan;
        // One rank sends nothing. With one bucket per gradient, borrowed gradients are not even copied.
        if (backend.size() == 1 && borrows()) {
            for (const std::size_t& i : order_) plan.push_back({&i, 1});
            return plan;
        }
        plan = policy_.plan(infos_, order_);
        check_plan(plan, infos_, parameters_, policy_.describe(), backend.rank());
        if (!owners_.empty() && size_ > 1) plan = owners_.deal(plan, infos_, size_);
        if (debugs()) debug_plan(plan, infos_, parameters_, policy_.describe(), backend.rank());
        return plan;
    }

    const ReducerOptions& options_;
    const AnyBuckets& policy_;
    const bool means_only_;  ///< see ExchangeTraits
    const int size_;
    WholeOwners owners_;
    List<ParameterView> parameters_;
    /// Bytes from which a range of several gradients in the trainer's memory is used as a bucket.
    std::size_t least_direct_ = 0;
    List<ParameterInfo> infos_;
    List<std::size_t> order_ = default_order(parameters_);
    BucketPlan plan_;
    std::atomic<bool> some_moved_{false};
};

}  // namespace gradsync::inline v0_2::detail
