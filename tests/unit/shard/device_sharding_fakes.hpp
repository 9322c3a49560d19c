// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <gradsync/backend/nccl.hpp>
#include <gradsync/backend/staging.hpp>
#include <gradsync/backend/thread_backend.hpp>

#include <chrono>
#include <cstddef>
#include <string>
#include <vector>

#include "support/device_training.hpp"
#include "support/rank_threads.hpp"

/// Ranks over the fakes of support/fake, and parameters of which there are no gradients in memory.

namespace gradsync_test {

using StagedThreads = gradsync::StagingBackend<gradsync::ThreadBackend>;

template <class F>
void on_nccl_ranks(int size, F&& f) {
    run_rank_threads(
        size, [](auto& rendezvous) { return gradsync::NcclBackend(rendezvous, {.timeout = std::chrono::seconds(60)}); }, f);
}

template <class B>
std::vector<gradsync::ParameterView> views_of(std::vector<Numbers<B>>& weights) {
    std::vector<gradsync::ParameterView> views;
    for (auto& w : weights) {
        views.push_back({.name = "p" + std::to_string(views.size()), .value = w.view(), .gradient = w.view(), .may_be_empty = true});
        views.back().gradient.data = nullptr;
    }
    return views;
}

}  // namespace gradsync_test
