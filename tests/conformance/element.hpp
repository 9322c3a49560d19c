// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <gradsync/backend/thread_backend.hpp>
#include <gradsync/reducer.hpp>

#include <doctest/doctest.h>

#include <bit>
#include <vector>

#include "support/averaging_oracle.hpp"

namespace gradsync_test {

/// An element type of a compiler or another library, which has the bits of `Ours`.
template <class T, class Ours>
void check_element() {
    static_assert(gradsync::Element<T> && gradsync::Element<const T> && gradsync::dtype_of<T> == gradsync::dtype_of<Ours>);
    static_assert(sizeof(T) == sizeof(Ours));
    for (const float x : {1.0f, -0.333f, 448.0f, 1e-3f, 0.0f})
        CHECK(std::bit_cast<typename Ours::Bits>(static_cast<T>(x)) == Ours(x).bits());

    constexpr int ranks = 3;
    const Tensor tensor("t", gradsync::dtype_of<Ours>, {7});
    const Bytes expected = expected_mean(tensor, ranks, 0, 0);
    gradsync::run_threads(ranks, [&](gradsync::ThreadBackend comm) {
        const auto filled = [&](int rank) {
            const Bytes bytes = random_gradient(tensor, rank, 0, 0);
            std::vector<T> elements(7);
            std::memcpy(static_cast<void*>(elements.data()), bytes.data(), bytes.size());
            return elements;
        };
        std::vector<T> weights = filled(comm.rank()), gradient = filled(comm.rank());
        const std::vector<T> of_rank_0 = filled(0);
        gradsync::Reducer sync(comm, {gradsync::parameter("w", weights, gradient)});
        sync.broadcast_parameters();
        sync.mark_ready(0);
        sync.finish();
        CHECK(std::memcmp(gradient.data(), expected.data(), expected.size()) == 0);
        CHECK(std::memcmp(weights.data(), of_rank_0.data(), expected.size()) == 0);
    });
}

}  // namespace gradsync_test
