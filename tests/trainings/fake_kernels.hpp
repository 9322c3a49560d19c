// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <deque>
#include <functional>
#include <thread>
#include <utility>

#include <gradsync/cuda/optimizers.hpp>

#include "support/fake/fake.hpp"
#include "trainer.hpp"

namespace gradsync_test {

/// gs::cuda::Sgd, and the same in host memory. Weights depend on gradients linearly, so that roundings stay small, and gradients with a
/// wrong factor show.
struct LinearOptimizer : gradsync::cuda::Sgd {
    int steps = 0;

    LinearOptimizer() : Sgd({.learning_rate = 0.5, .momentum = 0.9, .weight_decay = 0.01}) {}
    void begin_step() { ++steps; }
    using Sgd::step;
    template <class T>
    void step(const gradsync::OptimizerSlice<T>& s) const {
        const gradsync::cuda::SgdRule r = rule(s.parameter, s.gradient_scale);
        for (std::size_t k = 0; k < s.value.size(); ++k) {
            T& m = s.state[0][k];
            m = T(r.momentum) * m + s.gradient[k] * T(r.gradient_scale) + T(r.decay) * s.value[k];
            s.value[k] -= T(r.rate) * m;
        }
    }
};

/// Kernels run on a stream, later than the host puts them there. Now and then they take longer, or there is a new stream, and the old one
/// ends. The fakes' device memory is the host's.
template <class B>
class FakeKernels final : public Kernels {
public:
    using Optimizer = LinearOptimizer;

    FakeKernels(B& comm, const DrawnTraining& t) : comm_(comm), t_(t) { comm_.set_stream(stream_.get()); }
    FakeKernels& operator=(FakeKernels&&) = delete;
    ~FakeKernels() override {
        finish();
        comm_.set_stream(nullptr);
    }

    /// The trainer's memory.
    void use(const gradsync::BufferView& view) override {
        if (view.bytes() != 0) lent_.emplace_back(view.data, view.bytes());
    }
    void run(std::function<void()> kernel) override { gradsync_fake::enqueue(stream_.get(), std::move(kernel)); }
    void finish() override { gradsync::cuda::check(cudaStreamSynchronize(stream_.get()), "cudaStreamSynchronize"); }
    void disturb(int step, int place, bool in_flight) override {
        const auto chance = [&](int what) { return t_.draw(12, what, step, place, comm_.rank()) == 0; };
        if (chance(31)) run([] { std::this_thread::sleep_for(std::chrono::milliseconds(1)); });
        const bool shared = in_flight && (t_.threads || (!t_.forward && t_.overlap == 2));  // another thread may be putting work on it
        if (shared || !chance(32)) return;
        gradsync::cuda::Stream other = gradsync::cuda::make_stream();
        gradsync::cuda::order(stream_.get(), other.get(), gradsync::cuda::make_event());
        comm_.set_stream(other.get());
        stream_ = std::move(other);
    }

private:
    B comm_;
    const DrawnTraining& t_;
    gradsync::cuda::Stream stream_ = gradsync::cuda::make_stream();
    std::deque<gradsync_fake::OnDevice> lent_;
};

}  // namespace gradsync_test
