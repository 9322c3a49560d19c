// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <memory>

#include "../core/overlap_policy.hpp"

namespace gradsync::inline v0_2 {

/// An overlap policy whose type is chosen at run time. OverlapForward must be chosen at compile time, because
/// `finish()` then returns another type.
///
///     gs::AnyOverlap overlap = overlaps ? gs::AnyOverlap(gs::OverlapBackward{}) : gs::NoOverlap{};
class AnyOverlap {
public:
    template <class P>
        requires(!std::same_as<P, AnyOverlap> && OverlapPolicy<P>)
    AnyOverlap(P policy) : AnyOverlap(std::in_place, std::move(policy)) {  // NOLINT: converts, as std::function does
        static_assert(!detail::gathers_in_forward<P>(),
                      "gradsync: AnyOverlap cannot hold OverlapForward, because finish() then returns another type: "
                      "pass OverlapForward to the Reducer itself");
    }
    /// Internal, for the engine: takes OverlapForward too, whose gathers the engine starts itself.
    template <OverlapPolicy P>
    AnyOverlap(std::in_place_t, P policy) : policy_(new Model<P>(std::move(policy))) {}

    /// Copies are made only before `attach`.
    AnyOverlap(const AnyOverlap& other) : policy_(other.policy_->copy()) {}
    AnyOverlap(AnyOverlap&&) noexcept = default;
    AnyOverlap& operator=(AnyOverlap other) noexcept {
        policy_ = std::move(other.policy_);
        return *this;
    }

    void attach(BucketLauncher& launcher) { policy_->attach(launcher); }
    void bucket_full(BucketLauncher& launcher) { policy_->bucket_full(launcher); }
    void gradients_ready(BucketLauncher& launcher) { policy_->gradients_ready(launcher); }
    void detach() { policy_->detach(); }
    bool only_polls() const noexcept { return policy_->only_polls(); }  ///< see the concept OverlapPolicy
    std::string describe() const { return policy_->describe(); }

private:
    struct Interface {
        virtual ~Interface() = default;
        virtual Interface* copy() const = 0;
        virtual void attach(BucketLauncher& launcher) = 0;
        virtual void bucket_full(BucketLauncher& launcher) = 0;
        virtual void gradients_ready(BucketLauncher& launcher) = 0;
        virtual void detach() = 0;
        virtual bool only_polls() const noexcept = 0;
        virtual std::string describe() const = 0;
    };

    template <class P>
    struct Model final : Interface {
        explicit Model(P own) : policy(std::move(own)) {}
        Interface* copy() const override { return new Model(policy); }
        void attach(BucketLauncher& launcher) override { policy.attach(launcher); }
        void bucket_full(BucketLauncher& launcher) override { policy.bucket_full(launcher); }
        void gradients_ready(BucketLauncher& launcher) override { policy.gradients_ready(launcher); }
        void detach() override { policy.detach(); }
        bool only_polls() const noexcept override { return detail::only_polls(policy); }
        std::string describe() const override { return policy.describe(); }
        P policy;
    };

    std::unique_ptr<Interface> policy_;
};

static_assert(OverlapPolicy<AnyOverlap>);

}  // namespace gradsync::inline v0_2
