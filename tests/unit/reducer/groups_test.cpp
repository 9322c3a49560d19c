// SPDX-License-Identifier: BSL-1.0
// A training with several communicators: dense layers over all ranks, experts over those that hold the same ones.
#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include <gradsync/gradsync.hpp>

#include "support/averaging_oracle.hpp"
#include "support/ranks.hpp"
#include "support/tensor.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

double sum_of_squares(const std::vector<Tensor>& model) {
    double sum = 0;
    for (const Tensor& t : model)
        for (const double x : numbers({t.gradient.data(), t.count(), t.dtype, MemorySpace::host})) sum += x * x;
    return sum;
}

}  // namespace

TEST_CASE("one Reducer per group is marked in one backward, and has a norm and clipping over all of them") {
    for (const int sets : {1, 2})
        for (const int copies : {1, 2}) {
            const int ranks = sets * copies;
            CAPTURE(ranks);
            CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                      // Rank r holds the experts of set r % sets.
                      const int set = comm.rank() % sets, copy = comm.rank() / sets;
                      ThreadBackend same = comm.split(set, copy), others = comm.split(copy, set);
                      auto dense = tensors({100, 30}), experts = tensors({200, 50, 7});
                      Reducer dense_sync(comm, dense), expert_sync(same, experts);
                      for (int step = 0; step < 3; ++step) {
                          const int batch = 10 * step + set;  // what the experts of one set have in common
                          for (std::size_t i = 3; i-- > 0;) {
                              if (i < 2) write(dense_sync.gradient_view(i), random_gradient(dense[i], comm.rank(), step, i));
                              write(expert_sync.gradient_view(i), random_gradient(experts[i], copy, batch, i));
                              expert_sync.mark_ready(i);
                              if (i < 2) dense_sync.mark_ready(i);
                          }
                          dense_sync.finish();
                          expert_sync.finish();
                          finding.check(wrong_mean(dense_sync, dense, ranks, step).empty(), "dense");
                          finding.check(wrong_mean(expert_sync, experts, copies, batch).empty(), "experts");

                          double squares = expert_sync.gradient_norm();
                          squares *= squares;
                          others.all_reduce(buffer(std::span(&squares, 1)), ReduceOp::sum).wait();
                          const double norm = std::hypot(dense_sync.gradient_norm(), std::sqrt(squares));

                          double expected = sum_of_squares(experts);
                          others.all_reduce(buffer(std::span(&expected, 1)), ReduceOp::sum).wait();
                          expected = std::sqrt(expected + sum_of_squares(dense));
                          finding.check(std::abs(norm - expected) <= 1e-12 * expected, "the norm is " + std::to_string(norm));

                          dense_sync.clip_gradients_by_norm(0.5, norm);
                          expert_sync.clip_gradients_by_norm(0.5, norm);
                          double clipped = sum_of_squares(experts);
                          others.all_reduce(buffer(std::span(&clipped, 1)), ReduceOp::sum).wait();
                          clipped = std::sqrt(clipped + sum_of_squares(dense));
                          finding.check(std::abs(clipped - 0.5) < 1e-6, "the norm after clipping is " + std::to_string(clipped));
                      }
                  }) == "");
        }
}
