// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <gradsync/backend/thread_backend.hpp>
#include <gradsync/reducer.hpp>

#include "contest.hpp"
#include "on_each_rank.hpp"

namespace bench {

namespace gs = gradsync;

/// What is synchronised: `parameters` gradients of equal size, in f32.
struct Workload {
    int ranks = 2;
    std::size_t parameters = 1000;
    std::size_t bytes = 0;  ///< of all gradients together
    gs::GradientStorage storage = gs::GradientStorage::in_buckets;

    std::size_t elements() const { return bytes / sizeof(float) / parameters; }
};

/// The gradients of one rank, in its own memory where they are borrowed, and their views.
class Gradients {
public:
    explicit Gradients(const Workload& workload) {
        const std::size_t n = workload.elements();
        if (workload.storage == gs::GradientStorage::borrowed) memory_.resize(n * workload.parameters);
        views_.resize(workload.parameters);
        for (std::size_t i = 0; i < workload.parameters; ++i) {
            views_[i].name = "parameter " + std::to_string(i);
            views_[i].gradient = {memory_.empty() ? nullptr : memory_.data() + i * n, n, gs::DType::f32, gs::MemorySpace::host};
        }
    }
    const std::vector<gs::ParameterView>& views() const { return views_; }

private:
    std::vector<float> memory_;
    std::vector<gs::ParameterView> views_;
};

/// What stands for the backward between two marks.
struct NoCompute {
    void operator()() const {}
};

/// Steps of a Reducer: every gradient marked, last parameter first, with `Compute` before each mark; then finish().
template <class Buckets, class Overlap, class Compute = NoCompute>
class ReducerSteps : public Contestant {
public:
    ReducerSteps(const Workload& workload, Buckets buckets = {}, Compute compute = {}, Overlap overlap = {})
        : ranks_(gs::ThreadBackend::make(workload.ranks)), reducers_(ranks_.size()), parameters_(workload.parameters), compute_(compute) {
        for (int r = 0; r < workload.ranks; ++r) gradients_.emplace_back(workload);
        on_each_rank(workload.ranks, [&](std::size_t r) {
            reducers_[r] = std::make_unique<Reducer>(ranks_[r], gradients_[r].views(), gs::ReducerOptions{.gradients = workload.storage},
                                                     buckets, overlap);
        });
    }

    void meet(int rank) override { ranks_[static_cast<std::size_t>(rank)].barrier().wait(); }

    double run(int rank, int times) override {
        Reducer& reducer = *reducers_[static_cast<std::size_t>(rank)];
        return time([&] {
            for (int i = 0; i < times; ++i) {
                mark_all(reducer);
                reducer.finish();
            }
        });
    }

protected:
    using Reducer = gs::Reducer<gs::ThreadBackend, Buckets, Overlap>;

    Reducer& reducer(int rank) { return *reducers_[static_cast<std::size_t>(rank)]; }

    void mark_all(Reducer& reducer) {
        for (std::size_t i = parameters_; i-- > 0;) {
            compute_();
            reducer.mark_ready(i);
        }
    }

private:
    std::vector<gs::ThreadBackend> ranks_;
    std::vector<Gradients> gradients_;
    std::vector<std::unique_ptr<Reducer>> reducers_;
    std::size_t parameters_;
    Compute compute_;
};

/// The same steps, but only the marks count.
template <class Buckets, class Overlap>
class ReducerMarks final : public ReducerSteps<Buckets, Overlap> {
public:
    using ReducerSteps<Buckets, Overlap>::ReducerSteps;

    double run(int rank, int times) override {
        double seconds = 0;
        for (int i = 0; i < times; ++i) {
            seconds += Contestant::time([&] { this->mark_all(this->reducer(rank)); });
            this->reducer(rank).finish();
        }
        return seconds;
    }
};

/// Nothing but the compute of a step.
template <class Compute>
class ComputeOnly final : public Contestant {
public:
    ComputeOnly(int ranks, std::size_t parameters, Compute compute)
        : ranks_(gs::ThreadBackend::make(ranks)), parameters_(parameters), compute_(compute) {}

    void meet(int rank) override { ranks_[static_cast<std::size_t>(rank)].barrier().wait(); }
    double run(int rank, int times) override {
        return time([&] {
            for (int i = 0; i < times; ++i) {
                for (std::size_t k = 0; k < parameters_; ++k) compute_();
                meet(rank);
            }
        });
    }

private:
    std::vector<gs::ThreadBackend> ranks_;
    std::size_t parameters_;
    Compute compute_;
};

/// Work that needs a core and no memory, always the same amount.
struct CoreCompute {
    long multiplications = 0;
    void operator()() const {
        volatile double x = 1;
        double y = x;
        for (long i = 0; i < multiplications; ++i) y = y * 1.0000001 + 1e-9;
        x = y;
    }
};

/// Work that a device does while the core has nothing to do.
struct DeviceCompute {
    std::chrono::microseconds duration{0};
    void operator()() const { std::this_thread::sleep_for(duration); }
};

}  // namespace bench
