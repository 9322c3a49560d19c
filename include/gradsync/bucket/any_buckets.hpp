// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../core/bucket_plan.hpp"
#include "../core/shared.hpp"

namespace gradsync::inline v0_2 {

/// A bucket policy whose type is chosen at run time:
///
///     gs::AnyBuckets buckets = flat ? gs::AnyBuckets(gs::Flat{}) : gs::SizeCappedBuckets{};
class AnyBuckets {
public:
    /// Holds a bucket policy of any type.
    template <class P>
        requires(!std::same_as<P, AnyBuckets> && BucketPolicy<P>)
    AnyBuckets(P policy)  // NOLINT: converts, as std::function does
        : policy_(detail::Shared<const Model<P>>::make(std::move(policy))) {}

    BucketPlan plan(std::span<const ParameterInfo> parameters, std::span<const std::size_t> order) const {
        return policy_->plan(parameters, order);
    }
    std::string describe() const { return policy_->describe(); }
    /// Whether the policy is a TimedBucketPolicy. If not, `set_ready_seconds` has no effect.
    bool plans_by_times() const noexcept { return policy_->plans_by_times(); }
    void set_ready_seconds(std::span<const double> times) { policy_ = policy_->timed(times); }

private:
    struct Interface {
        virtual ~Interface() = default;
        virtual BucketPlan plan(std::span<const ParameterInfo> parameters,
                                std::span<const std::size_t> order) const = 0;
        virtual std::string describe() const = 0;
        virtual bool plans_by_times() const noexcept = 0;
        virtual detail::Shared<const Interface> timed(std::span<const double> times) const = 0;
    };

    template <class P>
    struct Model final : Interface {
        explicit Model(P own) : policy(std::move(own)) {}
        BucketPlan plan(std::span<const ParameterInfo> parameters, std::span<const std::size_t> order) const override {
            return policy.plan(parameters, order);
        }
        std::string describe() const override { return policy.describe(); }
        bool plans_by_times() const noexcept override { return TimedBucketPolicy<P>; }
        detail::Shared<const Interface> timed([[maybe_unused]] std::span<const double> times) const override {
            P copy = policy;
            if constexpr (TimedBucketPolicy<P>) copy.set_ready_seconds(times);
            return detail::Shared<const Model>::make(std::move(copy));
        }
        P policy;
    };

    detail::Shared<const Interface> policy_;
};

static_assert(BucketPolicy<AnyBuckets>);

}  // namespace gradsync::inline v0_2
