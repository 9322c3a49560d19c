// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <filesystem>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "face.hpp"
#include "oracle.hpp"

namespace gradsync_test {

/// Steps of a training that one job makes.
struct Leg {
    int first = 0, last = 0;
    std::filesystem::path from = {}, to = {};  ///< checkpoints; "": none
};

/// How the trainer computes.
class Kernels {
public:
    virtual ~Kernels() = default;
    /// The trainer's memory, which kernels and collectives use.
    virtual void use(const gradsync::BufferView& memory) = 0;
    virtual void run(std::function<void()> kernel) = 0;
    virtual void finish() = 0;  ///< returns when all kernels are over
    /// Disturbs the device at this place of a step. `in_flight`: the backward may have collectives in flight.
    virtual void disturb(int step, int place, bool in_flight) = 0;
};

/// The optimizer of whole parameters that a trainer has beside a Reducer.
class TrainersOptimizer {
public:
    virtual ~TrainersOptimizer() = default;
    virtual void begin_step() = 0;
    virtual void step(std::size_t i, gradsync::ConstBufferView gradient, double scale, gradsync::BufferView value) = 0;
};
using MakeOptimizer = std::function<std::unique_ptr<TrainersOptimizer>(std::vector<Tensor>& model)>;

template <class O>
std::unique_ptr<TrainersOptimizer> make_whole_optimizer(std::vector<Tensor>& model) {
    struct Whole final : TrainersOptimizer {
        explicit Whole(std::vector<Tensor>& parameters) : optimizer(O{}, parameters) {}
        void begin_step() override { optimizer.begin_step(); }
        void step(std::size_t i, gradsync::ConstBufferView gradient, double scale, gradsync::BufferView value) override {
            optimizer.step(i, gradient, scale, value);
        }
        WholeOptimizer<O> optimizer;
    };
    return std::make_unique<Whole>(model);
}

/// Trains on this rank: the steps of a leg.
Trained train(Face& sync, const DrawnTraining& t, const Leg& leg, std::vector<Tensor>& model, int rank, Kernels& kernels,
              const MakeOptimizer& make_optimizer);

}  // namespace gradsync_test
