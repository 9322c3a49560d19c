// SPDX-License-Identifier: BSL-1.0
#pragma once
// AdamW on devices: the library's, which steps many parameters in one kernel. Include it before AdamW<CudaOps> is used.

#include <gradsync/cuda/optimizers.hpp>

#include "../optimizer.hpp"
#include "ops_cuda.hpp"

namespace gradsync_train {

/// Two groups: the parameters that decay, and the others.
template <>
class AdamW<CudaOps> : public gradsync::cuda::AdamW {
public:
    AdamW(const Parameters& parameters, double weight_decay)
        : gradsync::cuda::AdamW{{settings(weight_decay), settings(0)}, groups_of(parameters)} {}

    /// Sets the learning rate of the next steps.
    void set_learning_rate(double rate) {
        for (std::size_t g = 0; g < group_count(); ++g) options(g).learning_rate = rate;
    }

private:
    static gradsync::cuda::AdamWOptions settings(double weight_decay) {
        return {.beta1 = adam_beta1, .beta2 = adam_beta2, .epsilon = adam_epsilon, .weight_decay = weight_decay};
    }
    static gradsync::List<std::size_t> groups_of(const Parameters& parameters) {
        gradsync::List<std::size_t> groups;
        for (const auto& p : parameters) groups.push_back(p.decays() ? 0 : 1);
        return groups;
    }
};

}  // namespace gradsync_train
