// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <functional>

#include "../core/flat_optimizer.hpp"
#include "../engine/arguments.hpp"
#include "../engine/parameters.hpp"
#include "../engine/whole_owners.hpp"

namespace gradsync::inline v0_2 {

/// The cost of a step of Muon: proportional to the operations of a Newton-Schulz iteration, max(M, N) min(M, N)^2 for a
/// matrix of M times N elements. Further dimensions count as columns. 0 for vectors.
inline double newton_schulz_cost(const ParameterView& p) {
    if (p.shape.size() < 2 || p.gradient.count == 0) return 0;
    const auto rows = static_cast<double>(p.shape[0]), columns = static_cast<double>(p.gradient.count) / rows;
    return rows < columns ? columns * rows * rows : rows * columns * columns;
}

/// A shard policy: a parameter with a cost is not cut, but has one owner, a rank that holds and steps all of it. Owners
/// are dealt so that buckets need little padding, and where that leaves a choice, so that ranks have equal costs. Pass
/// it to ShardedOptimizer or ShardedParameters. A MatrixOptimizer has it by default; other optimizers then get whole
/// parameters as slices that begin at element 0.
///
///     gs::ShardedOptimizer sharded(comm, model.parameters(), Muon{...}, gs::WholeParameters([](const auto& p) {
///         return p.name == "embedding" ? 0 : gs::newton_schulz_cost(p);
///     }));
///
/// Every bucket of whole parameters has a slot of one size for each rank. What a slot does not need is padding: it is
/// reduced and gathered, too. A ShardedOptimizer joins such buckets, beyond the cap of the bucket policy, until padding
/// adds at most a tenth; a model with fewer matrices than ranks becomes one bucket. The units of ShardedParameters are
/// not joined: give each unit several layers. Gradients of whole parameters are copied into their buckets, even if they
/// lie side by side.
class WholeParameters {
public:
    static constexpr bool keeps_whole = true;  ///< Internal.

    /// Every parameter of two and more dimensions is whole, and costs what Muon's step does.
    WholeParameters() = default;
    /// `cost`: a function of a `const ParameterView&`. 0 for a parameter that may be cut. Any unit; equal on all ranks.
    template <class Cost>
        requires std::is_invocable_r_v<double, const Cost&, const ParameterView&>
    explicit WholeParameters(Cost cost) : cost_(std::move(cost)) {}

    /// Returns the cost of a parameter. Throws what the function throws.
    double cost(const ParameterView& p) const { return cost_(p); }

private:
    std::function<double(const ParameterView&)> cost_ = newton_schulz_cost;
};

namespace detail {

/// The costs of all parameters. `face`: the public object as errors name it. Throws Error(invalid_argument) if one is
/// negative or not finite.
[[gnu::cold]] inline List<double> costs_of(std::span<const ParameterView> parameters, const WholeParameters& whole,
                                           const char* face, int rank) {
    List<double> costs;
    for (const ParameterView& p : parameters) {
        const double cost = whole.cost(p);
        if (!(cost >= 0) || !is_finite(cost))
            refuse_on({.operation = face, .rank = rank, .parameter = p.name}, "the cost of whole parameter '", p.name,
                      "' must be 0 or more, not ", cost);
        costs.push_back(cost);
    }
    return costs;
}

/// The same for the optimizer and the arguments of a sharded object; none if neither asks for whole parameters. Also
/// throws if the optimizer steps matrices, and no parameter has the shape of one.
template <class O, class B, class... Arguments>
List<double> costs_of_whole(const List<ParameterView>& parameters, const char* face, int rank,
                            Arguments&... arguments) {
    List<double> costs;
    if constexpr (MatrixOptimizer<O> || ((role_of<Arguments, B>() == Role::shards) || ...)) {
        costs = costs_of(parameters, choose<WholeParameters, B>(arguments...), face, rank);
        bool any = !MatrixOptimizer<O> || costs.empty();
        for (std::size_t i = 0; i < costs.size(); ++i) any = any || costs[i] != 0 || parameters[i].shape.size() > 1;
        if (!any)
            refuse_on({face, rank}, "the optimizer steps matrices, but no parameter is one; give ",
                      "them shapes of two dimensions, as in gs::parameter(name, weights, gradient, {rows, columns})");
    }
    return costs;
}

/// What the ranks compare of these costs.
inline std::string describe_whole(const List<double>& costs) {
    return costs.empty() ? std::string()
                         : text(" whole=", fnv1a(costs.data(), costs.size() * sizeof(double)) & 0xffff'ffffu);
}

}  // namespace detail

/// How evenly a model's whole parameters are dealt.
struct WholeBalance {
    std::size_t buckets = 0;  ///< of whole parameters
    std::size_t bytes = 0;    ///< of the largest of these, with padding
    double padding = 0;       ///< elements of padding, as a fraction of the elements of whole parameters
    double imbalance = 0;     ///< how much more than the mean the busiest rank's cost is, as a fraction
};

/// What `ranks` ranks of a ShardedOptimizer with these parameters and policies, and default options, will have. Reads
/// no memory of the parameters. Throws Error(invalid_argument) as the ShardedOptimizer does, and unless `ranks` is
/// positive.
WholeBalance whole_balance(std::span<const ParameterView> parameters, int ranks, const WholeParameters& whole,
                           const BucketPolicy auto& buckets) {
    if (ranks < 1) detail::refuse("whole_balance", "the number of ranks must be positive, not ", ranks);
    const List<ParameterView> views = detail::view_parameters<MemorySpace::host>(parameters);
    detail::WholeOwners owners({detail::costs_of(views, whole, "whole_balance", 0), true});
    List<ParameterInfo> infos(parameters.size());
    List<std::size_t> order;
    for (std::size_t i = parameters.size(); i-- > 0;) {
        const BufferView &gradient = views[i].gradient, &value = views[i].value;
        infos[i] = {
            .count = gradient.count, .dtype = gradient.dtype, .value_dtype = value.dtype, .whole = owners.is_whole(i)};
        if (infos[i].whole && parameters[i].requires_grad) order.push_back(i);
    }
    const BucketPlan plan = owners.deal(buckets.plan(infos, order), infos, ranks);
    const detail::BucketLayout layout(plan, infos, owners.owners(), ranks);
    std::size_t padded = 0, elements = 0, bytes = 0;
    for (std::size_t b = 0; b < plan.size(); ++b) {
        padded += layout.counts[b];
        bytes = detail::larger(bytes, layout.counts[b] * size_of(infos[plan.bucket(b).front()].dtype));
    }
    List<double> spent(static_cast<std::size_t>(ranks), 0);
    double all = 0, most = 0;
    for (const std::size_t i : order) {
        elements += infos[i].count;
        all += owners.cost(i);
        most = detail::larger(most, spent[static_cast<std::size_t>(owners.owners()[i])] += owners.cost(i));
    }
    if (elements == 0) return {};
    return {plan.size(), bytes, static_cast<double>(padded) / static_cast<double>(elements) - 1,
            most * ranks / all - 1};
}

}  // namespace gradsync::inline v0_2
