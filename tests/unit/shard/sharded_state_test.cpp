// SPDX-License-Identifier: BSL-1.0
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

#include "support/sharding.hpp"

using namespace gradsync;
using namespace gradsync_test;

TEST_CASE("a rank keeps its share of the state, and of the gradients in stage 2") {
    const std::vector<std::size_t> counts = {60000, 200, 40000, 300};
    const std::size_t elements = 100500;
    for (const int size : {1, 2, 4}) {
        CAPTURE(size);
        CHECK(findings(size, [&](ThreadBackend comm, Finding& finding) {
                  auto model = initial_tensors(counts, DType::bf16);
                  // Padding: a share is rounded up to an element, a bucket's part to 64 bytes, and gaps are below 64 bytes a parameter.
                  const std::size_t padding = 4 * 64 + 4 * 64, share = elements / static_cast<std::size_t>(size);
                  const auto within = [&](std::size_t bytes, std::size_t least) { return bytes >= least && bytes <= least + 2 * padding; };
                  ShardedOptimizer<ThreadBackend, AdamW, Zero1, Flat> one(
                      comm, model, AdamW{},
                      {.reducer = {.gradients = GradientStorage::in_buckets}, .parameters = ParameterStorage::in_buckets});
                  finding.check(within(one.memory().parameters, 2 * elements), "stage 1: weights");
                  finding.check(within(one.memory().gradients, 2 * elements), "stage 1: gradients");
                  finding.check(within(one.memory().master_weights, 4 * share), "stage 1: master weights");
                  finding.check(within(one.memory().optimizer_state, 8 * share), "stage 1: optimizer");
                  ShardedOptimizer<ThreadBackend, AdamW, Zero2, PerParameter> two(comm, model, AdamW{},
                                                                                  {.parameters = ParameterStorage::in_buckets});
                  // Shards in f32, and two slots: as large as the two largest buckets.
                  finding.check(within(two.memory().gradients, 4 * share + 2 * (60000 + 40000)),
                                "stage 2: gradients are " + std::to_string(two.memory().gradients));
                  finding.check(within(two.memory().optimizer_state, 8 * share), "stage 2: optimizer");
              }) == "");
    }
}

TEST_CASE("q ranks go on from state that p ranks collected, to the same bits") {
    const Training t{.steps = 6};
    for (const int from : {1, 2, 4}) {
        // The same data on every rank: the mean does not depend on how many there are.
        std::vector<std::vector<Bytes>> saved;
        int steps = 0;
        const auto same_data = [](auto& sharded, std::vector<Tensor>& model, int first, int last) {
            for (int s = first; s < last; ++s) {
                for (std::size_t i = model.size(); i-- > 0;) {
                    write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), 0, s, i);
                    sharded.mark_ready(i);
                }
                sharded.finish();
                sharded.step();
            }
        };
        run_threads(
            from,
            [&](ThreadBackend comm) {
                auto model = initial_tensors(t.counts, t.dtype);
                ShardedOptimizer<ThreadBackend, AdamW> sharded(comm, model, AdamW{});
                same_data(sharded, model, 0, 3);
                if (comm.rank() == 0) saved.assign(model.size(), std::vector<Bytes>(1 + sharded.optimizer().state_count()));
                sharded.collect_state(0, [&](std::size_t i, std::size_t a, std::size_t first, ConstBufferView piece) {
                    if (saved[i][a].size() != first * sizeof(float)) saved[i][a].clear();
                    const Bytes bytes = bytes_of(piece);
                    saved[i][a].insert(saved[i][a].end(), bytes.begin(), bytes.end());
                });
                if (comm.rank() == 0) steps = sharded.optimizer().steps;
            },
            patient);
        Training plain = t;
        plain.max_norm = 0;
        for (const int to : {1, 2, 3}) {
            CAPTURE(from);
            CAPTURE(to);
            std::vector<Bytes> whole;
            run_threads(1, [&](ThreadBackend comm) {
                auto model = initial_tensors(t.counts, t.dtype);
                ShardedOptimizer<ThreadBackend, AdamW> alone(comm, model, AdamW{});
                same_data(alone, model, 0, 6);
                whole = weights(alone);
            });
            CHECK(findings(to, [&](ThreadBackend comm, Finding& finding) {
                      auto model = tensors(t.counts, t.dtype);  // zeros: all comes from what was saved
                      ShardedOptimizer<ThreadBackend, AdamW, Zero2, SizeCappedBuckets> sharded(comm, model, AdamW{.steps = steps}, {},
                                                                                               SizeCappedBuckets(4000));
                      sharded.distribute_state(0, [&](std::size_t i, std::size_t a, std::size_t first, BufferView piece) {
                          std::memcpy(piece.data, saved[i][a].data() + first * sizeof(float), piece.bytes());
                      });
                      same_data(sharded, model, 3, 6);
                      // Means of equal numbers are exact for 1, 2 and 4 ranks; thirds are rounded.
                      const auto now = weights(sharded);
                      if (to != 3) finding.check(first_difference(whole, now).empty(), first_difference(whole, now) + " differs");
                      for (std::size_t i = 0; i < model.size(); ++i) {
                          const auto a = numbers(sharded.parameter_value(i)), b = numbers({whole[i].data(), model[i].count(), DType::f32});
                          for (std::size_t k = 0; k < a.size(); ++k)
                              finding.check(std::abs(a[k] - b[k]) <= 1e-5 * (1 + std::abs(b[k])), "too far off");
                      }
                  }) == "");
        }
    }
}

TEST_CASE("buckets are planned anew from the order of readiness, and state moves to its new owners") {
    const Training t{.steps = 6};
    const auto expected = weights_of_whole(3, t, AdamW{});
    const auto check = [&](auto stage) {
        CHECK(findings(3, [&](ThreadBackend comm, Finding& finding) {
                  auto model = initial_tensors(t.counts, t.dtype);
                  ShardedOptimizer<ThreadBackend, AdamW, decltype(stage)> sharded(
                      comm, model, AdamW{}, {.parameters = ParameterStorage::in_buckets}, SizeCappedBuckets(4096));
                  for (int s = 0; s < t.steps; ++s) {
                      for (const std::size_t i : shuffled(model.size(), 3)) {
                          write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), comm.rank(), s, i);
                          sharded.mark_ready(i);
                      }
                      sharded.finish();
                      sharded.step(gradsync::clip_factor(sharded.gradient_norm(), t.max_norm));
                      const BucketPlan before = sharded.plan();
                      if (s == 2) finding.check(sharded.rebuild_buckets() && sharded.plan() != before, "the plan has not changed");
                  }
                  finding.check(first_difference(expected, weights(sharded)).empty(),
                                first_difference(expected, weights(sharded)) + " differs");
              }) == "");
    };
    check(Zero1{});
    check(Zero2{});
}

namespace {

/// Notes the gradients that it is given.
struct Recorder {
    std::size_t state_count() const { return 1; }
    void begin_step() {}
    void step(const OptimizerSlice<float>& s) const {
        for (const float g : s.gradient) seen->push_back(g * static_cast<float>(s.gradient_scale));
        for (float& m : std::span(s.state[0], s.value.size())) m = static_cast<float>(s.parameter);
    }
    std::vector<float>* seen;
};

}  // namespace

TEST_CASE("an optimizer that stands outside sees the gradients of a step, and all ranks can have all state") {
    const auto check = [](auto stage, DType dtype) {
        for (const int size : rank_counts()) {
            CAPTURE(size);
            CHECK(findings(size, [&](ThreadBackend comm, Finding& finding) {
                      auto model = initial_tensors(awkward_sizes, dtype);
                      std::vector<float> stepped, seen;
                      ShardedOptimizer sharded(comm, model, Recorder{&stepped}, stage, SizeCappedBuckets(4096));
                      const auto look = [&] {
                          seen.clear();
                          sharded.for_each_gradient([&](const auto& s) {
                              for (const auto g : s.gradient) seen.push_back(static_cast<float>(g) * static_cast<float>(s.gradient_scale));
                          });
                      };
                      finding.check(outcome_of(look).says("call finish() first"), "gradients before finish()");
                      for (int m = 0; m < (stage.shards_gradients ? 2 : 1); ++m) {
                          for (std::size_t i = model.size(); i-- > 0;) {
                              write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), comm.rank(), m, i);
                              sharded.mark_ready(i);
                          }
                          sharded.finish();
                      }
                      look();
                      sharded.step();
                      for (auto* gradients : {&seen, &stepped}) std::sort(gradients->begin(), gradients->end());  // buckets in any order
                      finding.check(seen == stepped && !(size == 1 && seen.empty()), "the gradients differ");

                      const auto into = [](std::vector<Bytes>& all) {
                          return [&](std::size_t i, std::size_t a, std::size_t first, ConstBufferView piece) {
                              all.push_back(bytes_of(piece));
                              all.push_back({std::byte(i), std::byte(a), std::byte(first)});
                          };
                      };
                      std::vector<Bytes> everywhere, at_root;
                      sharded.collect_state(into(everywhere));
                      sharded.collect_state(size - 1, into(at_root));
                      finding.check(!everywhere.empty() && (comm.rank() != size - 1 || everywhere == at_root), "the state differs");
                  }) == "");
        }
    };
    check(Zero1{}, DType::f32);
    check(Zero1{}, DType::bf16);
    check(Zero2{}, DType::bf16);
}

TEST_CASE("state is collected and distributed in the order of registration, whatever the plan") {
    using Piece = std::tuple<std::size_t, std::size_t, std::size_t>;
    const std::vector<std::size_t> sizes = {700, 300000, 0, 5, 1025};
    for (const int size : rank_counts()) {
        CAPTURE(size);
        CHECK(findings(size, [&](ThreadBackend comm, Finding& finding) {
                  std::vector<Piece> expected;
                  for (const std::size_t i : {0u, 1u, 3u, 4u})
                      for (std::size_t a = 0; a < 2; ++a)
                          for (std::size_t first = 0; first < sizes[i]; first += std::size_t{1} << 18) expected.push_back({i, a, first});
                  const auto model = initial_tensors(sizes, DType::bf16);
                  auto own = model;
                  ShardedOptimizer<ThreadBackend, Sgd, Zero1> sharded(comm, own, Sgd{}, {}, SizeCappedBuckets(4096));
                  const auto check = [&](auto&& object, const std::string& when) {
                      std::vector<Piece> collected, everywhere, distributed;
                      std::vector<Bytes> state;
                      object.collect_state(0, [&](std::size_t i, std::size_t a, std::size_t first, ConstBufferView piece) {
                          collected.push_back({i, a, first});
                          state.push_back(bytes_of(piece));
                      });
                      object.collect_state([&](std::size_t i, std::size_t a, std::size_t first, ConstBufferView) {
                          everywhere.push_back({i, a, first});
                      });
                      const auto before = weights(object);
                      object.distribute_state(0, [&](std::size_t i, std::size_t a, std::size_t first, BufferView piece) {
                          write(piece, state[distributed.size()]);
                          distributed.push_back({i, a, first});
                      });
                      finding.check(everywhere == expected, "another order on all ranks " + when);
                      finding.check(comm.rank() != 0 || (collected == expected && distributed == expected), "another order " + when);
                      finding.check(first_difference(before, weights(object)).empty(), "other weights " + when);
                  };
                  check(sharded, "at first");
                  for (const std::size_t i : {3u, 0u, 2u, 4u, 1u}) {
                      write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), comm.rank(), 0, i);
                      sharded.mark_ready(i);
                  }
                  sharded.finish();
                  sharded.step();
                  finding.check(sharded.rebuild_buckets(), "the plan has not changed");
                  check(sharded, "after planning anew");
                  auto parts = model;
                  check(ShardedParameters<ThreadBackend, Sgd>(comm, parts, Sgd{}, Units({0, 0, 1, 2, 1})), "in stage 3");
              }) == "");
    }
}
