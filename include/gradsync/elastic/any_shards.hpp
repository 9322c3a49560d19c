// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../backend/run_ranks.hpp"
#include "../core/bucket_plan.hpp"
#include "../core/math.hpp"
#include "../core/parameter.hpp"

namespace gradsync::inline v0_2::elastic {

/// Internal: the state that a ShardedOptimizer or ShardedParameters object divides over the ranks, whatever its type.
/// Refers to the object. Not thread-safe.
class AnyShards {
public:
    using Use = detail::FunctionRef<std::size_t, std::size_t, std::size_t, BufferView>;

    template <class Sharded>
    explicit AnyShards(Sharded& sharded) noexcept : object_(&sharded), calls_(&calls_of<Sharded>) {}

    /// See ShardedBase::for_each_shard.
    void for_each(Use use) const { calls_->for_each(object_, use); }
    ListView<const ParameterView> parameters() const { return calls_->parameters(object_); }
    /// A hash of how the state is divided, the same on all ranks.
    std::uint64_t division() const { return calls_->division(object_); }
    void flush() const { calls_->flush(object_); }
    /// Collective.
    void publish() const { calls_->publish(object_); }
    /// Collective.
    void broadcast_parameters(int root) const { calls_->broadcast_parameters(object_, root); }
    /// Gives all ranks the root's frozen parameters. Collective.
    [[gnu::cold]] void broadcast_frozen(int root) const {
        List<BufferView> frozen;
        for (const ParameterView& one : parameters())
            if (!one.requires_grad && one.value.data != nullptr) frozen.push_back(one.value);
        calls_->broadcast_buffers(object_, frozen, root);
    }

private:
    struct Calls {
        void (*for_each)(void* object, Use use);
        ListView<const ParameterView> (*parameters)(void* object);
        std::uint64_t (*division)(void* object);
        void (*flush)(void* object);
        void (*publish)(void* object);
        void (*broadcast_parameters)(void* object, int root);
        void (*broadcast_buffers)(void* object, ListView<const BufferView> buffers, int root);
    };

    [[gnu::cold]] static std::uint64_t hash_of(const BucketPlan& plan, int ranks) {
        std::uint64_t hash = static_cast<std::uint64_t>(ranks);
        for (std::size_t b = 0; b < plan.size(); ++b)
            hash = detail::fnv1a(plan.bucket(b).data(), plan.bucket(b).size_bytes(), hash + 1);
        return hash | 1;
    }
    template <class Sharded>
    static Sharded& as(void* object) noexcept {
        return *static_cast<Sharded*>(object);
    }
    template <class Sharded>
    static constexpr Calls calls_of{
        [](void* object, Use use) { as<Sharded>(object).for_each_shard(use); },
        [](void* object) { return ListView<const ParameterView>(as<Sharded>(object).parameters()); },
        [](void* object) { return hash_of(as<Sharded>(object).plan(), as<Sharded>(object).backend().size()); },
        [](void* object) { as<Sharded>(object).flush(); },
        [](void* object) { as<Sharded>(object).publish(); },
        [](void* object, int root) { as<Sharded>(object).broadcast_parameters(root); },
        [](void* object, ListView<const BufferView> buffers, int root) {
            as<Sharded>(object).broadcast_buffers(std::span(buffers.data(), buffers.size()), root);
        }};

    void* object_;
    const Calls* calls_;
};

}  // namespace gradsync::inline v0_2::elastic
