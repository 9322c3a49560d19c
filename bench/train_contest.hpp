// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "contest.hpp"
#include "make_synchroniser.hpp"
#include "trainee.hpp"

namespace bench {

/// Steps of a training under one strategy, as a contestant. `trainees`: the ranks that are in this process.
class TrainSteps final : public Contestant {
public:
    TrainSteps(const std::vector<std::unique_ptr<Trainee>>& trainees, std::size_t which, std::function<void(int rank)> meet)
        : trainees_(trainees), which_(which), meet_(std::move(meet)) {}

    /// Not by a collective of the training's own: what the last step has left for the next one would be done in it.
    void meet(int rank) override { meet_(rank); }
    double run(int rank, int times) override {
        Trainee& trainee = *trainees_[trainees_.size() == 1 ? 0 : static_cast<std::size_t>(rank)];
        return time([&] { trainee.train(which_, times); });
    }

private:
    const std::vector<std::unique_ptr<Trainee>>& trainees_;
    std::size_t which_;
    std::function<void(int rank)> meet_;
};

/// Has a trainee take up a strategy. `together`: its place among the ranks; `alone`: if they do not synchronise. Collective.
template <class Backend>
void learn(Trainee& trainee, const std::string& model, const Strategy& strategy, const Backend& together, const Backend& alone) {
    const trainer::Options options = options_for(model, strategy);
    const Backend& comm = strategy.synchronises() ? together : alone;
    auto timeline = strategy.watched ? std::make_unique<gradsync::Timeline>() : nullptr;
    const trainer::MakeSynchroniser make = [&, observer = timeline.get()](trainer::Parameters& parameters, const trainer::Units& units) {
        return trainer::make_synchroniser(comm, options, parameters, units, observer);
    };
    std::function<void()> meet;
    if (strategy.meets) meet = [ranks = Backend(together)]() mutable { ranks.barrier().wait(); };
    trainee.learn(options, make, std::move(timeline), std::move(meet));
}

/// One for each of the strategies that the trainees have learnt.
inline std::vector<TrainSteps> train_steps(std::size_t strategies, const std::vector<std::unique_ptr<Trainee>>& trainees,
                                           const std::function<void(int rank)>& meet) {
    std::vector<TrainSteps> all;
    for (std::size_t s = 0; s < strategies; ++s) all.emplace_back(trainees, s, meet);
    return all;
}
inline std::vector<Contestant*> pointers_to(std::vector<TrainSteps>& steps) {
    std::vector<Contestant*> all;
    for (TrainSteps& each : steps) all.push_back(&each);
    return all;
}

/// What two ranks saw, put together.
inline Observed greatest(const Observed& a, const Observed& b) {
    return {std::max(a.exposed_seconds, b.exposed_seconds), std::max(a.communication_seconds, b.communication_seconds),
            std::max(a.state_bytes, b.state_bytes), std::max(a.second_loss, b.second_loss)};
}

}  // namespace bench
