// SPDX-License-Identifier: BSL-1.0
#pragma once
// Where a backward pass writes its gradients, and whom it tells that one is final.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "parameters.hpp"

namespace gradsync_train {

/// Owns the gradients.
class GradientStore {
public:
    /// Where gradient i is; asked for when it is about to be written, as it may have memory only then.
    virtual float* gradient(std::size_t i) = 0;
    /// It is final: once for each of the parameter's uses.
    virtual void ready(std::size_t i) = 0;

protected:
    ~GradientStore() = default;
};

/// Each micro-batch's gradient is computed on its own and then added, so that N micro-batches on one rank give the same
/// bits as one micro-batch on each of N ranks: the order of the sum is the same. The first micro-batch writes straight
/// into the gradients; later ones go through a scratch.
template <class Ops>
class GradientWriter {
public:
    GradientWriter(const Parameters& parameters, GradientStore& store, Ops ops = {})
        : ops_{ops}, parameters_{parameters}, store_{store}, seen_(parameters.size()) {}

    /// Starts a backward pass; `adds`: to the gradients of those before.
    void begin(bool adds) {
        adds_ = adds;
        if (adds && own_scratch_.empty()) allocate_scratch();
        std::fill(seen_.begin(), seen_.end(), 0);
    }

    /// Where the gradient of parameter i is to be written; valid until `done(i)`.
    float* target(std::size_t i) { return adds_ ? scratch(i) : store_.gradient(i); }

    /// One use's contribution to gradient i has been written.
    void done(std::size_t i) {
        if (++seen_[i] == parameters_[i].uses && adds_) ops_.add(parameters_[i].count, scratch(i), store_.gradient(i));
        store_.ready(i);
    }

    /// Of scratch.
    std::size_t bytes() const {
        std::size_t floats = shared_scratch_.size();
        for (const auto& own : own_scratch_) floats += own.size();
        return floats * sizeof(float);
    }

private:
    void allocate_scratch() {
        std::size_t largest = 0;
        for (const auto& p : parameters_) {
            // Matrices are written one at a time, and share a scratch that stays in the cache. Vectors are written in
            // pairs, and a tied matrix must survive the others between its uses.
            const bool shares = p.shape.size() > 1 && p.uses == 1;
            if (shares) largest = std::max(largest, p.count);
            own_scratch_.push_back(ops_.floats(shares ? 0 : p.count));
        }
        shared_scratch_ = ops_.floats(largest);
    }
    float* scratch(std::size_t i) { return own_scratch_[i].empty() ? shared_scratch_.data() : own_scratch_[i].data(); }

    Ops ops_;
    const Parameters& parameters_;
    GradientStore& store_;
    std::vector<std::uint32_t> seen_;
    std::vector<typename Ops::Floats> own_scratch_;
    typename Ops::Floats shared_scratch_;
    bool adds_ = false;
};

}  // namespace gradsync_train
