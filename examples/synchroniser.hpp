// SPDX-License-Identifier: BSL-1.0
#pragma once
// What the training loop asks of whoever keeps the ranks in step.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <gradsync/elastic/any_shards.hpp>
#include <gradsync/gradsync.hpp>

#include "gradient_store.hpp"
#include "options.hpp"
#include "parameters.hpp"
#include "report.hpp"
#include "unit_access.hpp"

namespace gradsync_train {

namespace gs = gradsync;

/// A part of the training's state: elements of parameter i from `first` on, of its weights (array 0), of the
/// optimizer's running means (arrays 1 and 2), or of what compression keeps: what the ranks have in common (array 3), and
/// what each has not sent yet (array 4 of rank 0, 5 of rank 1, ...).
struct StatePlace {
    std::size_t parameter;
    std::size_t array;
    std::size_t first;
};
constexpr std::size_t state_arrays(bool compresses, int ranks) { return compresses ? 4 + static_cast<std::size_t>(ranks) : 3; }

/// The training's state as this rank's memory, which stays where it is.
struct StateViews {
    std::vector<gs::BufferView> views = {};
    bool is_replicated = true;  // every rank has the same; otherwise each has a part, or some of its own
    std::string name = {};      // of the model and the run
};

/// Keeps the state of a rank in memory that outlives it.
class Keeper {
public:
    Keeper() = default;
    Keeper(const Keeper&) = delete;
    virtual ~Keeper() = default;

    /// Is there a state that all ranks have kept? Local, the same on every rank.
    virtual bool has_state() const = 0;
    /// Writes it where the views say. All ranks call it together.
    virtual void restore() = 0;
    /// All ranks call it, with a collective between two calls.
    virtual void keep(std::uint64_t step) = 0;
};
using MakeKeeper = std::function<std::unique_ptr<Keeper>(const StateViews&)>;

/// Ranks come and go while they train: see gs::ElasticJob.
class Elastic {
public:
    Elastic() = default;
    Elastic(const Elastic&) = delete;
    virtual ~Elastic() = default;

    /// Gives all ranks the newest state. `shards`: what each has a part of, if there is that; then `state` is what all have beside it.
    /// `load()`: for rank 0, or for all ranks with shards, if no rank has a state: reads a checkpoint and returns its step, or returns 0. All
    /// ranks call it together.
    virtual void restore(const StateViews& state, const std::optional<gs::elastic::AnyShards>& shards,
                         const std::function<std::uint64_t()>& load) = 0;
    /// Call it before each step. False if the ranks change now. All ranks call it together.
    virtual bool goes_on() = 0;
    /// Calls `change()`, which changes the state by one step. All ranks call it together.
    virtual void update(const std::function<void()>& change) = 0;
    /// False if the others have gone on without this rank. Local.
    virtual bool is_current() = 0;
};

/// Owns weights, gradients and the optimizer's state, as much of them as the way of sharding leaves to this rank: see
/// plain_synchroniser.hpp and sharded_synchroniser.hpp. The loop does not know which way it is. All ranks call the
/// same functions in the same order, but for those said to be local.
///
/// A step: for each micro-batch a forward pass, `begin_backward`, a backward pass, `end_backward`; then `step`. The
/// model tells of the units that it uses, and asks for the gradients that it writes.
class Synchroniser : public UnitAccess, public GradientStore {
public:
    using StateSink = std::function<void(StatePlace, std::span<const float>)>;
    using StateSource = std::function<void(StatePlace, std::span<float>)>;

    virtual ~Synchroniser() = default;

    /// Each micro-batch writes its gradients anew; the library adds them up. Local.
    virtual void begin_backward(std::size_t micro_batch) = 0;
    virtual void end_backward() = 0;
    /// With the mean of all gradients, clipped. May leave work to be done when units are entered.
    virtual void step(double learning_rate) = 0;
    /// The work that the last step has left. Local.
    virtual void flush() = 0;

    /// Do forward passes need the other ranks? Then all do as many. Local, the same on every rank.
    virtual bool computes_together() const { return false; }
    virtual void add_up(std::span<double> values) = 0;
    virtual std::vector<RankSummary> gather(const RankSummary& own) = 0;

    /// Gives rank 0 all state: pieces of an array come in order.
    virtual void collect(const StateSink& sink) = 0;
    /// Takes all state, that of step `steps`, from `source`, on the ranks that read it for themselves or for others.
    virtual void restore(std::uint64_t steps, const StateSource& source) = 0;
    /// Does this rank hold all state, and is all of it of the same step? Local.
    virtual bool has_whole_state() const { return false; }
    /// Then this is it, array after array. Local.
    virtual void for_whole_state(const StateSink&) const {}

    /// This rank's state, on the host. Local.
    virtual StateViews state_views() = 0;
    /// The same, if each rank has a part of it.
    virtual std::optional<gs::elastic::AnyShards> shards() { return {}; }
    /// Call it after writing the state of step `steps` there. All ranks call it together.
    virtual void state_was_written(std::uint64_t steps) = 0;

    // Local.
    virtual const gs::Statistics& statistics() const = 0;
    virtual MemoryUse memory() const = 0;
    /// This rank's processor time in the steps of whole matrices so far. Local.
    virtual double matrix_seconds() const { return 0; }
    /// What the buckets were planned from; empty if that was not measured.
    virtual BucketProfile profile() const { return {}; }

protected:
    Synchroniser() = default;
    Synchroniser(const Synchroniser&) = delete;
    Synchroniser& operator=(const Synchroniser&) = delete;
};

/// For a model with these parameters, which it is to bind, and units. Collective.
using MakeSynchroniser = std::function<std::unique_ptr<Synchroniser>(Parameters&, const Units&)>;

/// The ranks of a backend, for what they tell one another in the host's memory.
template <class Backend>
auto& host_of(Backend& comm) {
    if constexpr (requires { comm.host(); }) return comm.host();
    else return comm;
}

/// Every rank's summary, on every rank.
template <class Backend>
std::vector<RankSummary> gather(Backend& comm, const RankSummary& own) {
    std::vector<RankSummary> all(static_cast<std::size_t>(comm.size()));
    const auto bytes = [](auto* data, std::size_t n) { return std::span(reinterpret_cast<std::uint8_t*>(data), n * sizeof *data); };
    RankSummary copy = own;
    host_of(comm).all_gather(gs::const_buffer(bytes(&copy, 1)), gs::buffer(bytes(all.data(), all.size()))).wait();
    return all;
}

/// What all ways have in common.
template <class Backend>
class BackendSynchroniser : public Synchroniser {
public:
    void add_up(std::span<double> values) override { host_of(comm_).all_reduce(gs::buffer(values), gs::ReduceOp::sum).wait(); }
    std::vector<RankSummary> gather(const RankSummary& own) override { return gradsync_train::gather(comm_, own); }

protected:
    BackendSynchroniser(Backend comm, Parameters& parameters, Units units)
        : comm_{comm}, parameters_{parameters}, units_{std::move(units)} {}

    Backend comm_;
    Parameters& parameters_;
    Units units_;
};

/// The type in which gradients travel, if it is not their own.
inline gs::OptionalDType reduce_dtype(const Options& o) {
    return o.reduce_dtype == "bf16" ? gs::OptionalDType(gs::DType::bf16) : gs::OptionalDType();
}

/// A parameter as the library sees it.
inline gs::ParameterView view_of(const Parameter& p, float* value, float* gradient = nullptr,
                                 gs::MemorySpace space = gs::MemorySpace::host) {
    const auto floats = [&](float* data) { return gs::BufferView{data, p.count, gs::DType::f32, space}; };
    return {.name = p.name, .value = floats(value), .gradient = floats(gradient), .shape = p.shape, .uses = p.uses};
}

}  // namespace gradsync_train
