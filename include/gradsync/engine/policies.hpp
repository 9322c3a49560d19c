// SPDX-License-Identifier: BSL-1.0
#pragma once

#include "../bucket/any_buckets.hpp"
#include "../core/exchange.hpp"
#include "../kernel/passes.hpp"
#include "../overlap/any_overlap.hpp"
#include "whole_owners.hpp"

/// The policies of a Reducer as plain interfaces, so that the engine is compiled once per backend, not once per
/// combination of policies. An engine calls them per bucket, not per gradient.

namespace gradsync::inline v0_2::detail {

/// An exchange, with the collectives that it has started, by bucket. See BucketExchange.
template <class B>
class AnyExchange {
public:
    AnyExchange(ExchangeTraits has, bool has_stages) noexcept : traits(has), in_stages(has_stages) {}
    virtual ~AnyExchange() = default;

    const ExchangeTraits traits;
    const bool in_stages;  ///< what it starts has further collectives, which start in `poll`
    virtual bool is_single_rank(const B& backend) const noexcept { return backend.size() == 1; }
    virtual Traffic traffic(const B& backend, std::size_t b, BufferView bucket) const = 0;
    /// See ExchangeTraits::reports_progress_time; 0 without it.
    virtual std::chrono::nanoseconds progress_time() const { return {}; }

    /// Prepares for a plan and drops what was started. Collective if the traits say so and there are several ranks.
    virtual void adopt_plan(B& backend, const BucketLayout& layout, const BucketPlan& plan,
                            ListView<const ParameterInfo> infos, ListView<const ParameterView> parameters) = 0;

    virtual void start(B& backend, std::size_t b, BufferView bucket, ReduceOp op, Contribution contribution) = 0;
    /// See BackendAbilities::poll.
    virtual bool poll(std::size_t b) = 0;
    virtual bool test(std::size_t b) = 0;
    /// Returns once passes over the result may be called.
    virtual void wait(B& backend, std::size_t b) = 0;
};

template <class X, class B>
class ExchangeAs final : public AnyExchange<B> {
public:
    template <class Policy>
    explicit ExchangeAs(Policy&& policy)
        : AnyExchange<B>(X::traits, !std::same_as<typename X::template WorkType<B>, typename B::WorkType>),
          exchange_(std::forward<Policy>(policy)) {}

    X& exchange() noexcept { return exchange_; }

    bool is_single_rank(const B& backend) const noexcept override { return exchange_.is_single_rank(backend); }
    Traffic traffic([[maybe_unused]] const B& backend, [[maybe_unused]] std::size_t b,
                    BufferView bucket) const override {
        if constexpr (X::traits.reports_traffic) return exchange_.traffic(backend, b, bucket);
        else return {bucket.bytes(), 1};
    }
    std::chrono::nanoseconds progress_time() const override {
        if constexpr (X::traits.reports_progress_time) return exchange_.progress_time();
        else return {};
    }
    void adopt_plan([[maybe_unused]] B& backend, [[maybe_unused]] const BucketLayout& layout, const BucketPlan& plan,
                    [[maybe_unused]] ListView<const ParameterInfo> infos,
                    [[maybe_unused]] ListView<const ParameterView> parameters) override {
        works_ = List<typename X::template WorkType<B>>(plan.size());
        if constexpr (X::traits.adopts_plan) {
            if (exchange_.is_single_rank(backend)) return;
            List<BucketContents> contents;
            for (std::size_t b = 0; b < plan.size(); ++b) {
                contents.push_back({layout.counts[b], infos[plan.bucket(b).front()].dtype, {}});
                for (std::size_t i : plan.bucket(b))
                    contents.back().parts.push_back({i, layout.offsets[i], infos[i].count, parameters[i].shape});
            }
            exchange_.adopt_plan(backend, contents);
        }
    }
    void start(B& backend, std::size_t b, BufferView bucket, ReduceOp op, Contribution contribution) override {
        works_[b] = exchange_.start(backend, b, bucket, op, contribution);
    }
    bool poll(std::size_t b) override { return poll_work(works_[b]); }
    bool test(std::size_t b) override { return works_[b].test(); }
    void wait(B& backend, std::size_t b) override { await(backend, works_[b]); }

private:
    X exchange_;
    List<typename X::template WorkType<B>> works_;
};

/// The policies of one engine.
template <class B>
struct Policies {
    AnyBuckets buckets;
    AnyOverlap overlap;
    std::string exchange_name;
    std::unique_ptr<AnyExchange<B>> exchange;
    /// The exchange is the first half of an all-reduce; the gathers are pending after `finish()`.
    bool decoupled = false;
    bool packs = false;  ///< the exchange wants many gradients per bucket, even if they are cheaper alone
    bool sums = true;    ///< the exchange adds up gradients unchanged
    WholeCosts whole = {};
};

template <class B, class Buckets, class Overlap, class X>
Policies<B> make_policies(Buckets buckets, Overlap overlap, X exchange) {
    constexpr bool decoupled = gathers_in_forward<Overlap>() && !ExchangeOver<X, B>::traits.scatters;
    auto given = std::make_unique<ExchangeAs<ExchangeOver<X, B>, B>>(std::move(exchange));
    std::string name = given->exchange().describe();
    std::unique_ptr<AnyExchange<B>> own = std::move(given);
    if constexpr (decoupled) own = std::make_unique<ExchangeAs<ReduceScatter, B>>(ReduceScatter());
    return {std::move(buckets),
            {std::in_place, std::move(overlap)},
            std::move(name),
            std::move(own),
            decoupled,
            !std::is_same_v<X, AllReduce>,
            std::is_same_v<X, AllReduce> || std::derived_from<X, ReduceScatter>,
            {}};
}

}  // namespace gradsync::inline v0_2::detail
