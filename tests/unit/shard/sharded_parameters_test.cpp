// SPDX-License-Identifier: BSL-1.0
#include <doctest/doctest.h>

#include <chrono>
#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/overlap/no_overlap.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

#include "support/sharding.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

/// A forward over all units, first to last, and a backward; the backward reports whether weights are what they were before.
template <class Sharded>
void forward_backward(Sharded& sharded, int rank, int batch, Finding& finding) {
    std::vector<Bytes> seen;
    for (std::size_t u = 0; u < sharded.unit_count(); ++u) {
        const auto use = sharded.gather(u);
        for (std::size_t i = 0; i < sharded.parameters().size(); ++i)
            if (sharded.unit_of(i) == u) seen.push_back(bytes_of(sharded.parameter_value(i)));
    }
    for (std::size_t u = sharded.unit_count(); u-- > 0;) {
        const auto use = sharded.gather(u);
        for (std::size_t i = sharded.parameters().size(); i-- > 0;) {
            if (sharded.unit_of(i) != u) continue;
            finding.check(holds(sharded.parameter_value(i), seen[i]),
                          "p" + std::to_string(i) + " has changed between forward and backward");
            write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), rank, batch, i);
            sharded.mark_ready(i);
        }
    }
}

template <class Overlap>
std::string difference_from_whole(int size, const Training& t, ShardedParametersOptions options) {
    std::vector<double> expected_norms, norms;
    const std::vector<Bytes> expected = weights_of_whole(size, t, AdamW{{0.01, 0.02}}, &expected_norms);
    std::string found = findings(size, [&](ThreadBackend comm, Finding& finding) {
        const int rank = comm.rank();
        auto given = initial_tensors(t.counts, t.dtype);
        if (rank != 0)
            for (Tensor& p : given) p.value = constant_bytes(p.dtype, p.count(), 9);
        ShardedParameters<ThreadBackend, AdamW, Overlap> sharded(comm, given, AdamW{{0.01, 0.02}}, awkward_units, options);
        sharded.broadcast_parameters();
        given.clear();  // not needed any more
        for (int s = 0; s < t.steps; ++s) {
            forward_backward(sharded, rank, s, finding);
            sharded.finish();
            const double norm = sharded.gradient_norm();
            if (rank == 0) norms.push_back(norm);
            sharded.step(gradsync::clip_factor(norm, t.max_norm));
            if (s == 1) {  // a forward only, as a validation has it
                for (std::size_t u = 0; u < sharded.unit_count(); ++u) {
                    const auto use = sharded.gather(u);
                    finding.check(u != 0 || sharded.parameter_value(0).data != nullptr, "p0 is not there");
                }
            }
        }
        finding.check(first_difference(expected, weights(sharded)).empty(), first_difference(expected, weights(sharded)) + " differs");
    });
    if (found.empty() && norms != expected_norms) found = "the norms differ";
    return found;
}

/// Does parameter_value(i) say that its unit is to be gathered?
template <class Sharded>
bool is_not_here(const Sharded& sharded, std::size_t i) {
    const Outcome outcome = outcome_of([&] { (void)sharded.parameter_value(i); });
    return outcome.is(Errc::invalid_argument) && outcome.error->context().parameter == "p" + std::to_string(i) &&
           outcome.says("'p" + std::to_string(i) + "' are not here; call gather(" + std::to_string(sharded.unit_of(i)) + ")");
}

}  // namespace

TEST_CASE("sharded parameters train to the bits of whole ones, however they are gathered") {
    for (const int size : rank_counts())
        for (const std::size_t prefetch : {0u, 1u, 3u})
            for (const bool reshard : {true, false})
                for (const std::size_t replicate : {0u, 10u, 100000u}) {
                    CAPTURE(size);
                    CAPTURE(prefetch);
                    CAPTURE(reshard);
                    CAPTURE(replicate);
                    const ShardedParametersOptions options{
                        .prefetch = prefetch, .reshard_after_forward = reshard, .replicate_below = replicate};
                    CHECK(difference_from_whole<OverlapBackward>(size, {}, options) == "");
                    if (size == 3) CHECK(difference_from_whole<NoOverlap>(size, {}, options) == "");
                }
}

TEST_CASE("sharded f64 weights, and 16- and 8-bit ones with f32 master weights, train to the bits of whole ones") {
    for (const DType dtype : {DType::f64, DType::bf16, DType::f16, DType::f8e4m3})
        for (const int size : rank_counts(1, 3)) CHECK(difference_from_whole<OverlapBackward>(size, {.dtype = dtype}, {}) == "");
}

TEST_CASE("weights, gradients and state are aligned for their types") {
    for (const int size : rank_counts(1, 3))
        CHECK(findings(size, [](ThreadBackend comm, Finding& finding) {
                  auto given = mixed_tensors();
                  ShardedParameters<ThreadBackend, AlignedAdamW> sharded(comm, given, AlignedAdamW{},
                                                                         Units(std::vector<std::size_t>(given.size())));
                  const auto use = sharded.gather(0);
                  mark_aligned(sharded, sharded.parameters().size(), finding);
                  sharded.finish();
                  sharded.step();
              }) == "");
}

TEST_CASE("find_unused: ranks that use different layers do not wait for one another's gathers and buckets") {
    struct Descent {
        std::size_t state_count() const { return 0; }
        void begin_step() {}
        void step(const OptimizerSlice<float>& s) const {
            for (std::size_t k = 0; k < s.value.size(); ++k) s.value[k] -= s.gradient[k];
        }
    };
    constexpr std::size_t sizes[] = {5, 300, 5000, 20000};
    constexpr int ranks = 3, steps = 6;
    const auto uses = [](int s, int r, std::size_t p) { return (s * 5 + r * 3 + static_cast<int>(p) * 7) % 4 != 0; };
    const auto all = outcomes(ranks,
                              [&](ThreadBackend comm) {
                                  std::vector<std::vector<float>> w, g;
                                  std::vector<ParameterView> model;
                                  w.reserve(4), g.reserve(4);
                                  for (const std::size_t size : sizes) {
                                      w.emplace_back(size, 1.0f), g.emplace_back(size);
                                      model.push_back(parameter("p" + std::to_string(w.size()), w.back(), g.back()));
                                  }
                                  ShardedParameters sharded(comm, model, Descent{}, Units({0, 1, 2, 3}),
                                                            ShardedParametersOptions{.reducer = {.unused = UnusedParameters::find_unused}});
                                  for (int s = 0; s < steps; ++s) {
                                      for (std::size_t p = model.size(); p-- > 0;) {
                                          const auto use = sharded.gather(p);
                                          if (!uses(s, comm.rank(), p)) continue;
                                          for (float& x : sharded.acquire_gradient(p).as<float>()) x = 3.0f;
                                          sharded.mark_ready(p);
                                      }
                                      sharded.finish();
                                      sharded.step();
                                  }
                                  sharded.for_each_shard([&](std::size_t p, std::size_t, std::size_t, BufferView shard) {
                                      float expected = 1;
                                      for (int s = 0; s < steps; ++s)
                                          for (int r = 0; r < ranks; ++r) expected -= uses(s, r, p) ? 1.0f : 0.0f;
                                      for (const float x : shard.as<float>())
                                          if (std::abs(x - expected) > 1e-4f) throw std::runtime_error("wrong weights");
                                  });
                              },
                              {.timeout = std::chrono::seconds(10)});
    for (const Outcome& one : all) CHECK(one.text == "");
}

TEST_CASE("NoOverlap: a rank that has more memory for gradients does not keep the others waiting") {
    const auto all = outcomes(
        2,
        [&](ThreadBackend comm) {
            auto model = tensors({1000, 1000, 1000, 1000, 1000});
            ShardedParameters sharded(comm, model, Sgd{}, Units({0, 1, 2, 3, 4}), ShardedParametersOptions{.prefetch = 0}, NoOverlap{});
            for (int s = 0; s < 2; ++s) {
                const bool has_batch = s == 1 || comm.rank() == 0;
                (void)sharded.begin_step(has_batch);
                for (std::size_t k = 0; k < model.size(); ++k) {
                    const std::size_t i = s == 0 ? k : model.size() - 1 - k;  // the first order needs memory for all, on rank 0 only
                    const auto use = sharded.gather(i);
                    if (!has_batch) continue;
                    write(sharded.acquire_gradient(i), constant_bytes(DType::f32, 1000, 1));
                    sharded.mark_ready(i);
                }
                sharded.finish();
                sharded.step();
            }
        },
        {.timeout = std::chrono::seconds(10)});
    for (const Outcome& one : all) CHECK(one.text == "");
}

TEST_CASE("micro-batches are reduced one by one and added up in the shards") {
    const Training t{.micro_batches = 3};
    const auto expected = weights_of_whole(3, t, Sgd{});
    CHECK(findings(3, [&](ThreadBackend comm, Finding& finding) {
              auto given = initial_tensors(t.counts, t.dtype);
              ShardedParameters<ThreadBackend, Sgd> sharded(comm, given, Sgd{}, awkward_units);
              for (int s = 0; s < t.steps; ++s) {
                  for (int m = 0; m < t.micro_batches; ++m) {
                      forward_backward(sharded, comm.rank(), t.batch(s, m), finding);
                      sharded.finish();
                  }
                  sharded.step(gradsync::clip_factor(sharded.gradient_norm(), t.max_norm));
              }
              const auto now = weights(sharded);
              for (std::size_t i = 0; i < t.counts.size(); ++i) {
                  const auto a = numbers({now[i].data(), t.counts[i], DType::f32}),
                             b = numbers({expected[i].data(), t.counts[i], DType::f32});
                  for (std::size_t k = 0; k < a.size(); ++k)
                      finding.check(std::abs(a[k] - b[k]) <= 1e-5 * (1 + std::abs(b[k])),
                                    "p" + std::to_string(i) + "[" + std::to_string(k) + "] " + std::to_string(a[k]) + " is not " +
                                        std::to_string(b[k]));
              }
          }) == "");
}

TEST_CASE("micro_batches is the only option that sharded gradients need: the weights of one rank, on every number of ranks") {
    const auto train = [](int ranks, std::size_t all, auto made) {
        std::vector<Bytes> result;
        run_threads(ranks, [&](ThreadBackend comm) {
            auto given = initial_tensors(awkward_sizes, DType::f32);
            const auto with_sharded = [&](auto& sharded) {
                const Deal deal{all, ranks, true};
                for (int step = 0; step < 3; ++step) {
                    for (std::size_t turn = 0; turn < deal.rounds(); ++turn) {
                        const bool mine = turn < deal.count(comm.rank());
                        if (turn + 1 == deal.rounds()) (void)sharded.begin_step(mine);
                        for (std::size_t i = given.size(); mine && i-- > 0;) {
                            std::size_t unit = 0;
                            if constexpr (requires { sharded.gather(unit); }) sharded.acquire(unit = sharded.unit_of(i));
                            const auto number = static_cast<int>(deal.number(comm.rank(), turn));
                            write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), number, step, i);
                            sharded.mark_ready(i);
                            if constexpr (requires { sharded.gather(unit); }) sharded.release(unit);
                        }
                        sharded.finish();
                    }
                    sharded.step();
                }
                const auto last = weights(sharded);
                if (comm.rank() == 0) result = last;
            };
            made(comm, given, with_sharded);
        });
        return result;
    };
    for (const std::size_t all : {4u, 7u}) {
        const auto stage_2 = [&](ThreadBackend comm, std::vector<Tensor>& given, auto&& use) {
            ShardedOptimizer sharded(comm, given, AdamW{}, Zero2{}, ShardingOptions{.reducer = {.micro_batches = all}});
            use(sharded);
        };
        const auto stage_3 = [&](ThreadBackend comm, std::vector<Tensor>& given, auto&& use) {
            ShardedParameters sharded(comm, given, AdamW{}, Units(std::vector<std::size_t>(given.size())),
                                      ShardedParametersOptions{.reducer = {.micro_batches = all}});
            use(sharded);
        };
        const auto expected = train(1, all, stage_2);
        for (const int ranks : rank_counts()) {
            CAPTURE(all);
            CAPTURE(ranks);
            CHECK(train(ranks, all, stage_2) == expected);
            CHECK(train(ranks, all, stage_3) == expected);
        }
    }
}

TEST_CASE("micro-batches that are added up without communication give the bits of a whole trainer") {
    const Training t{.micro_batches = 3};
    for (const int size : rank_counts(1, 3)) {
        const auto expected = weights_of_whole(size, t);
        CHECK(findings(size, [&](ThreadBackend comm, Finding& finding) {
                  auto given = initial_tensors(t.counts, t.dtype);
                  ShardedParameters<ThreadBackend, AdamW> sharded(comm, given, AdamW{}, awkward_units, {.shard_gradients = false});
                  for (int s = 0; s < t.steps; ++s) {
                      for (int m = 0; m < t.micro_batches; ++m) {
                          std::optional<decltype(sharded.no_sync())> guard;
                          if (m + 1 < t.micro_batches) guard.emplace(sharded.no_sync());
                          for (std::size_t i = sharded.parameters().size(); i-- > 0;) {
                              const auto use = sharded.gather(sharded.unit_of(i));
                              write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), comm.rank(), t.batch(s, m), i, m > 0);
                              sharded.mark_ready(i);
                          }
                      }
                      sharded.finish();
                      const double norm = sharded.gradient_norm() / t.micro_batches;
                      sharded.step(gradsync::clip_factor(norm, t.max_norm) / t.micro_batches);
                  }
                  finding.check(first_difference(expected, weights(sharded)).empty(),
                                first_difference(expected, weights(sharded)) + " differs");
              }) == "");
    }
}

TEST_CASE("each rank keeps less the more ranks there are, and weights exist for few units at a time") {
    const std::vector<std::size_t> counts(12, 20000);  // twelve units of the same size
    std::vector<std::size_t> unit_of;
    for (std::size_t i = 0; i < counts.size(); ++i) unit_of.push_back(i);
    for (const int size : {1, 2, 4}) {
        CAPTURE(size);
        CHECK(findings(size, [&](ThreadBackend comm, Finding& finding) {
                  auto given = initial_tensors(counts, DType::bf16);
                  ShardedParameters<ThreadBackend, AdamW> sharded(comm, given, AdamW{}, Units(unit_of), {.prefetch = 1});
                  for (int s = 0; s < 3; ++s) {
                      forward_backward(sharded, comm.rank(), s, finding);
                      sharded.finish();
                      sharded.step();
                  }
                  const std::size_t elements = 12 * 20000, share = elements / static_cast<std::size_t>(size), padding = 12 * 2 * 64;
                  const ShardMemory memory = sharded.memory();
                  const auto within = [&](std::size_t bytes, std::size_t least) { return bytes >= least && bytes <= least + padding; };
                  finding.check(within(memory.master_weights, 4 * share), "master weights: " + std::to_string(memory.master_weights));
                  finding.check(within(memory.optimizer_state, 8 * share), "optimizer: " + std::to_string(memory.optimizer_state));
                  finding.check(within(memory.gradients, 4 * share + 2 * 2 * 20000), "gradients: " + std::to_string(memory.gradients));
                  finding.check(within(memory.parameters, 2 * 2 * 20000),
                                "weights: " + std::to_string(memory.parameters));  // one in use, one ahead
              }) == "");
    }
}

TEST_CASE("units of equal size that ranks gather in another order are told apart") {
    for (const int ranks : {2, 3}) {
        const auto seen = outcomes(ranks, [](ThreadBackend comm) {
            auto given = initial_tensors(std::vector<std::size_t>(4, 100), DType::f32);
            ShardedParameters<ThreadBackend, Sgd> sharded(comm, given, Sgd{}, Units({0, 1, 2, 3}));
            for (std::size_t k = 0; k < 4; ++k) const auto use = sharded.gather(comm.rank() == 1 ? 3 - k : k);
        });
        for (const Outcome& outcome : seen) {
            INFO(outcome.text);
            CHECK(outcome.is(Errc::collective_mismatch));
            CHECK(outcome.says("rank 0 started all_gather(f32, 100 elements) for unit 0 of ShardedParameters #"));
            CHECK(outcome.says("rank 1 started all_gather(f32, 100 elements) for unit 3 of ShardedParameters #"));
        }
    }
}

TEST_CASE("a rank that leaves in the middle of a gather is named, and nobody hangs") {
    const auto seen = outcomes(3, [](ThreadBackend comm) {
        auto given = initial_tensors(awkward_sizes, DType::f32);
        ShardedParameters<ThreadBackend, Sgd> sharded(comm, given, Sgd{}, awkward_units);
        const auto first = sharded.gather(0);
        if (comm.rank() == 2) throw std::runtime_error("out of memory, say");
        const auto second = sharded.gather(1);
    });
    for (const std::size_t r : {0u, 1u}) {
        CHECK((seen[r].is(Errc::peer_failed) || seen[r].is(Errc::peer_left)));  // its handles go before its exception arrives
        CHECK(seen[r].says("rank 2"));
    }
}

TEST_CASE("an exception of the trainer's, while units are gathered ahead: nobody reads memory that is gone") {
    const auto seen = outcomes(3, [](ThreadBackend comm) {
        auto given = initial_tensors(std::vector<std::size_t>(8, 200000), DType::f32);
        ShardedParameters<ThreadBackend, Sgd> sharded(comm, given, Sgd{}, Units({0, 1, 2, 3, 4, 5, 6, 7}), {.prefetch = 4});
        for (int s = 0; s < 2; ++s) {
            Finding finding;
            forward_backward(sharded, comm.rank(), s, finding);
            sharded.finish();
            sharded.step();
        }
        if (comm.rank() == 1) throw std::runtime_error("something else");
        Finding finding;
        forward_backward(sharded, comm.rank(), 2, finding);
        sharded.finish();
    });
    CHECK(seen[1].says("something else"));
    for (const std::size_t r : {0u, 2u}) CHECK(seen[r].says("rank 1"));
}

TEST_CASE("a rank without a batch, of many units: nobody waits for memory that only its finish() would free") {
    const Training t{.counts = {500, 400, 300, 200, 100}, .steps = 3};
    for (const int size : {2, 3})
        CHECK(findings(size, [&](ThreadBackend comm, Finding& finding) {
                  comm.set_timeout(std::chrono::seconds(20));
                  auto model = initial_tensors(t.counts, t.dtype);
                  ShardedParameters<ThreadBackend, Sgd> sharded(comm, model, Sgd{}, Units({0, 1, 2, 3, 4}));
                  sharded.broadcast_parameters();
                  for (int s = 0; s < t.steps; ++s) {
                      const bool has_batch = comm.rank() == s % size;
                      (void)sharded.begin_step(has_batch);
                      for (std::size_t i = 0; i < model.size(); ++i) (void)sharded.gather(i);
                      for (std::size_t i = model.size(); i-- > 0;) {
                          const auto use = sharded.gather(i);
                          if (!has_batch) continue;
                          write(sharded.acquire_gradient(i), constant_bytes(t.dtype, model[i].count(), 1));
                          sharded.mark_ready(i);
                      }
                      sharded.finish();
                      double sum = 0;
                      std::size_t count = 0;
                      sharded.for_each_gradient([&](const auto& slice) {
                          for (const auto g : slice.gradient) sum += static_cast<double>(g);
                          count += slice.gradient.size();
                      });
                      finding.check(sum == static_cast<double>(count), "the means are not those of the rank with a batch");
                      sharded.step();
                  }
              }) == "");
}

TEST_CASE("small parameters that stay whole cost no more than their size") {
    CHECK(findings(2, [](ThreadBackend comm, Finding& finding) {
              auto given = initial_tensors({100000, 10, 100000, 10, 100000, 10}, DType::f32);
              ShardedParameters<ThreadBackend, Sgd> sharded(comm, given, Sgd{}, Units({0, 0, 1, 1, 2, 2}),
                                                            {.prefetch = 0, .replicate_below = 100});
              {
                  const auto use = sharded.gather(1);
                  finding.check(sharded.parameter_value(5).data != nullptr, "p5 is not there");
              }
              const std::size_t needed = (100000 + 3 * 16) * sizeof(float);
              finding.check(sharded.memory().parameters == needed,
                            "the weights take " + std::to_string(sharded.memory().parameters) + ", not " + std::to_string(needed));
          }) == "");
}

TEST_CASE("ranks whose options differ get the same error on all of them") {
    const auto seen = outcomes(2, [](ThreadBackend comm) {
        auto given = initial_tensors(awkward_sizes, DType::f32);
        ShardedParameters<ThreadBackend, Sgd> sharded(comm, given, Sgd{}, awkward_units, {.prefetch = comm.rank() == 0 ? 1u : 2u});
    });
    for (const Outcome& outcome : seen) {
        CHECK(outcome.is(Errc::parameter_mismatch));
        CHECK(outcome.says("prefetch=1"));
        CHECK(outcome.says("prefetch=2"));
    }
}

TEST_CASE("ShardedParameters refuses weights that are not gathered, units and shapes that do not fit, and an early step") {
    const auto says = [](auto&& f) {
        return outcomes(1,
                        [&](ThreadBackend comm) {
                            auto given = initial_tensors(awkward_sizes, DType::f32);
                            f(comm, given);
                        })[0]
            .text;
    };
    using Sharded = ShardedParameters<ThreadBackend, Sgd>;
    CHECK(says([](auto comm, auto& given) { Sharded(comm, given, Sgd{}, awkward_units).parameter_value(4); }) ==
          "parameter_value on rank 0: the weights of 'p4' are not here; call gather(2) first");
    CHECK(says([](auto comm, auto& given) { Sharded(comm, given, Sgd{}, awkward_units).acquire(4); }) ==
          "gather on rank 0: unit index 4 is out of range [0, 4)");
    CHECK(says([](auto comm, auto& given) {
              Sharded(comm, given, Sgd{}, Units({0, 1}));
          }) == "ShardedParameters on rank 0: there are 8 parameters, but units for 2");
    CHECK(says([](auto comm, auto& given) {
              auto views = std::vector<ParameterView>{parameter_view(given[0])};
              views[0].gradient.count /= 2;
              Sharded(comm, views, Sgd{}, Units({0}));
          }) == "Reducer on rank 0: parameter 'p0' has a shape of 700 elements, but a gradient of 350");
    CHECK(says([](auto comm, auto& given) {
              Sharded sharded(comm, given, Sgd{}, awkward_units);
              sharded.step();
          }) == "step on rank 0: there are no averaged gradients; call finish() first");
}

TEST_CASE("weights that are not in use are not handed out: not those gathered ahead, nor those whose use has ended") {
    const Training t{.steps = 2, .max_norm = 0};
    for (const int size : rank_counts(1, 3)) {
        const auto expected = weights_of_whole(size, t);
        CHECK(findings(size, [&](ThreadBackend comm, Finding& finding) {
                  auto given = initial_tensors(t.counts, t.dtype);
                  ShardedParameters<ThreadBackend, AdamW> sharded(comm, given, AdamW{}, awkward_units, {.prefetch = 1});
                  const auto refuses = [&](std::size_t i, const std::string& when) {
                      finding.check(is_not_here(sharded, i), "p" + std::to_string(i) + ", " + when + ", is handed out");
                  };
                  for (const std::size_t i : {0u, 2u, 4u, 7u}) refuses(i, "before the first gather");
                  for (int s = 0; s < t.steps; ++s) {
                      forward_backward(sharded, comm.rank(), s, finding);
                      sharded.finish();
                      sharded.step();
                  }
                  refuses(0, "on its way since the step");
                  refuses(1, "on its way since the step");
                  sharded.flush();
                  refuses(0, "gathered ahead");
                  refuses(2, "not gathered at all");
                  {
                      const auto use = sharded.gather(0);
                      finding.check(holds(sharded.parameter_value(0), expected[0]), "p0 is in use, and has other weights");
                      refuses(2, "on its way while unit 0 is in use");
                      sharded.flush();
                      refuses(2, "gathered ahead while unit 0 is in use");
                      refuses(4, "two units away");
                      { const auto again = sharded.gather(0); }
                      finding.check(holds(sharded.parameter_value(0), expected[0]), "p0 is gone, though it is in use once more");
                  }
                  refuses(0, "after its use");
                  refuses(1, "after its use");
                  const auto use = sharded.gather(1);
                  finding.check(holds(sharded.parameter_value(2), expected[2]), "p2 is in use, and has other weights");
                  refuses(0, "after its use, while another unit is in use");
              }) == "");
    }
}

TEST_CASE("a rank that alone calls flush() gathers the same units as the others, in any order") {
    CHECK(findings(2, [&](ThreadBackend comm, Finding& finding) {
              auto given = initial_tensors({40, 40, 40, 40}, DType::f32);
              ShardedParameters sharded(comm, given, Sgd{}, Units({0, 1, 2, 3}));
              for (int s = 0; s < 3; ++s) {
                  forward_backward(sharded, comm.rank(), s, finding);
                  sharded.finish();
                  sharded.step();
                  if (comm.rank() == 0) sharded.flush();
                  for (const std::size_t u : {2u, 3u, 0u, 1u}) (void)sharded.gather(u);
              }
          }) == "");
}

TEST_CASE("without resharding weights stay readable after their use, until the step") {
    for (const int size : rank_counts(1, 3))
        for (const std::size_t prefetch : {0u, 1u}) {
            const Training t{.max_norm = 0};
            std::vector<std::vector<Bytes>> expected;  // by step
            for (int s = 1; s <= 3; ++s) {
                Training shorter = t;
                shorter.steps = s;
                expected.push_back(weights_of_whole(size, shorter));
            }
            CHECK(findings(size, [&](ThreadBackend comm, Finding& finding) {
                      auto given = initial_tensors(t.counts, t.dtype);
                      ShardedParameters<ThreadBackend, AdamW> sharded(comm, given, AdamW{}, awkward_units,
                                                                      {.prefetch = prefetch, .reshard_after_forward = false});
                      for (int s = 0; s < 3; ++s) {
                          forward_backward(sharded, comm.rank(), s, finding);
                          sharded.finish();
                          for (std::size_t i = 0; i < sharded.parameters().size(); ++i)
                              finding.check(holds(sharded.parameter_value(i), s == 0 ? initial_tensors(t.counts, t.dtype)[i].value
                                                                                     : expected[static_cast<std::size_t>(s) - 1][i]),
                                            "p" + std::to_string(i) + " is not there before step " + std::to_string(s));
                          sharded.step();
                          for (const std::size_t i : {0u, 2u, 4u, 7u})
                              finding.check(is_not_here(sharded, i),
                                            "p" + std::to_string(i) + " is handed out after step " + std::to_string(s));
                      }
                      finding.check(first_difference(expected.back(), weights(sharded)).empty(), "other weights");
                  }) == "");
        }
}

TEST_CASE("release() of a unit that there is not, or that is not in use, is refused, and changes nothing") {
    for (int size = 1; size <= 2; ++size)
        CHECK(findings(size, [](ThreadBackend comm, Finding& finding) {
                  auto given = initial_tensors(awkward_sizes, DType::f32);
                  // p1, p3, p4 and p6 lie in a unit of the library's, behind the user's: nobody else may let it go.
                  ShardedParameters<ThreadBackend, Sgd> sharded(comm, given, Sgd{}, awkward_units, {.prefetch = 2, .replicate_below = 10});
                  const auto refuses = [&](std::size_t u, const std::string& words) {
                      const Outcome outcome = outcome_of([&] { sharded.release(u); });
                      finding.check(outcome.is(Errc::invalid_argument) && outcome.says("release") && outcome.says(words),
                                    std::to_string(u) + ": " + outcome.text);
                  };
                  for (int s = 0; s < 2; ++s) {  // in the second step units are gathered ahead
                      refuses(4, "unit index 4 is out of range [0, 4)");
                      refuses(static_cast<std::size_t>(-1), "is out of range [0, 4)");
                      for (std::size_t u = 0; u < 4; ++u) refuses(u, "unit " + std::to_string(u) + " is not in use; acquire() it first");
                      sharded.acquire(0);
                      sharded.acquire(0);
                      refuses(1, "unit 1 is not in use");
                      sharded.release(0);
                      finding.check(sharded.parameter_value(0).as<float>().size() == 700, "p0 is gone, though it is in use once more");
                      sharded.release(0);
                      refuses(0, "unit 0 is not in use");
                      finding.check(sharded.parameter_value(1).data != nullptr, "the library's own unit is gone");
                      forward_backward(sharded, comm.rank(), s, finding);
                      sharded.finish();
                      sharded.step();
                  }
              }) == "");
}

TEST_CASE("after broadcast_parameters() trainable parameters have no values of the trainer's any more, frozen ones keep theirs") {
    for (int size = 1; size <= 2; ++size)
        CHECK(findings(size, [](ThreadBackend comm, Finding& finding) {
                  auto given = initial_tensors({100, 7, 0, 300}, DType::bf16);
                  given[1].requires_grad = false;
                  const auto expected = given;
                  if (comm.rank() != 0)
                      for (Tensor& p : given) p.value = constant_bytes(p.dtype, p.count(), 9);
                  ShardedParameters<ThreadBackend, Sgd> sharded(comm, given, Sgd{}, Units({0, 0, 1, 1}));
                  for (std::size_t i = 0; i < 4; ++i)
                      finding.check(sharded.parameters()[i].value == given[i].value_view(), given[i].name + " was registered otherwise");
                  sharded.broadcast_parameters();
                  for (const std::size_t i : {0u, 2u, 3u}) {
                      const BufferView value = sharded.parameters()[i].value;
                      finding.check(value.data == nullptr, given[i].name + " points to memory that may be gone");
                      finding.check(value.count == given[i].count() && value.dtype == DType::bf16, given[i].name + " has another type");
                  }
                  finding.check(sharded.parameters()[1].value == given[1].value_view(), "the frozen one has lost its value");
                  finding.check(holds(sharded.parameter_value(1), expected[1].value), "the frozen one is not the root's");
                  finding.check(sharded.parameters().size() == 4, "there are parameters that nobody has registered");
              }) == "");
}

TEST_CASE("calls at the wrong time, and with wrong arguments, are refused, and the training goes on to the same bits") {
    const Training t;
    for (const int size : rank_counts(1, 3)) {
        const auto expected = weights_of_whole(size, t);
        CHECK(findings(size, [&](ThreadBackend comm, Finding& finding) {
                  auto given = initial_tensors(t.counts, t.dtype);
                  if (comm.rank() != 0)
                      for (Tensor& p : given) p.value = constant_bytes(p.dtype, p.count(), 9);
                  ShardedParameters<ThreadBackend, AdamW> sharded(comm, given, AdamW{}, awkward_units, {.shard_gradients = false});
                  const auto refuses = [&](auto&& call, const std::string& words) {
                      const Outcome outcome = outcome_of(call);
                      finding.check(outcome.is(Errc::invalid_argument) && outcome.says(words), words + ", not: " + outcome.text);
                  };
                  const int ranks = comm.size();
                  for (const int root : {99, ranks, -1})
                      refuses([&] { sharded.broadcast_parameters(root); }, "there is no rank " + std::to_string(root));
                  sharded.broadcast_parameters();
                  for (int s = 0; s < t.steps; ++s) {
                      refuses([&] { sharded.step(); }, "there are no averaged gradients");
                      refuses([&] { sharded.gradient_norm(); }, "there are no averaged gradients");
                      forward_backward(sharded, comm.rank(), s, finding);
                      sharded.finish();
                      refuses([&] { sharded.finish(); }, "gradients are averaged already; call step() first");
                      const double norm = sharded.gradient_norm();
                      refuses([&] { sharded.finish(); }, "gradients are averaged already; call step() first");
                      refuses([&] { sharded.step(std::nan("")); }, "a gradient scale must be finite, not nan");
                      sharded.step(gradsync::clip_factor(norm, t.max_norm));
                      refuses([&] { sharded.broadcast_parameters(99); }, "there is no rank 99");
                      refuses([&] { sharded.acquire(4); }, "unit index 4 is out of range");
                  }
                  finding.check(first_difference(expected, weights(sharded)).empty(),
                                first_difference(expected, weights(sharded)) + " differs");
              }) == "");
    }
}

TEST_CASE("a root without a value is named by broadcast_parameters() on every rank, and another root serves") {
    for (const int ranks : rank_counts())
        CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                  auto model = initial_tensors({30, 400}, DType::f32);
                  std::vector<ParameterView> views = views_of(model);
                  const int without = comm.size() - 1;
                  if (comm.rank() == without) views[1].value.data = nullptr;
                  ShardedParameters sharded(comm, views, Sgd{}, Units({0, 1}), OverlapBackward{});
                  const Outcome outcome = outcome_of([&] { sharded.broadcast_parameters(without); });
                  finding.check(outcome.is(Errc::invalid_argument) && outcome.says("'p1' has no value on rank " + std::to_string(without)),
                                outcome.text);
                  if (comm.size() > 1) sharded.broadcast_parameters();
                  const auto use = sharded.gather(1);
                  finding.check(comm.size() == 1 || holds(sharded.parameter_value(1), initial_tensors({30, 400}, DType::f32)[1].value),
                                "other weights");
              }) == "");
}

TEST_CASE("a frozen parameter without a value is named by broadcast_parameters(), and what needs none goes on") {
    for (int size = 1; size <= 2; ++size)
        CHECK(findings(size, [](ThreadBackend comm, Finding& finding) {
                  auto given = initial_tensors({100, 7, 30}, DType::f32);
                  std::vector<ParameterView> views;
                  for (Tensor& p : given) views.push_back(parameter_view(p));
                  views[1].name = "embedding";
                  views[1].requires_grad = false;
                  views[1].value = {};
                  ShardedParameters<ThreadBackend, Sgd> sharded(comm, views, Sgd{}, Units({0, 0, 1}));
                  const Outcome outcome = outcome_of([&] { sharded.broadcast_parameters(); });
                  finding.check(outcome.is(Errc::invalid_argument) && outcome.says("frozen parameter 'embedding' has no value"),
                                outcome.text);
                  finding.check(outcome.error && outcome.error->context().parameter == "embedding", "it is not named in the context");
                  for (const std::size_t i : {2u, 0u}) {
                      const auto use = sharded.gather(sharded.unit_of(i));
                      finding.check(holds(sharded.parameter_value(i), given[i].value), given[i].name + " is another");
                      write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), comm.rank(), 0, i);
                      sharded.mark_ready(i);
                  }
                  sharded.finish();
                  sharded.step();
              }) == "");
}
