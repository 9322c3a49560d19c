// SPDX-License-Identifier: BSL-1.0
#include <doctest/doctest.h>

#include <unistd.h>

#include <array>
#include <chrono>
#include <cmath>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <gradsync/bucket/any_buckets.hpp>
#include <gradsync/gradsync.hpp>
#include <gradsync/planning/optimal_buckets.hpp>
#include <gradsync/shard/checkpoint.hpp>
#include <gradsync/shard/hybrid.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

#include "support/sharding.hpp"
#include "support/temporary_directory.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

using Hybrid = HybridReduceScatter<ThreadBackend>;

/// Steps of a training whose sums are of whole numbers, and so exact in every order. `use(u)` keeps unit u in use.
template <class Sharded, class Use>
void train(Sharded& sharded, int world_rank, Use&& use) {
    for (int s = 0; s < 4; ++s) {
        for (std::size_t i = sharded.parameters().size(); i-- > 0;) {
            [[maybe_unused]] const auto in_use = use(i);
            const std::span<float> gradient = sharded.acquire_gradient(i).template as<float>();
            for (std::size_t k = 0; k < gradient.size(); ++k)
                gradient[k] = static_cast<float>((world_rank + 1) * static_cast<int>(k % 7 + i) + s);
            sharded.mark_ready(i);
        }
        sharded.finish();
        sharded.step(sharded.gradient_norm() > 100 ? 0.5 : 1.0);
    }
}

/// The same by a Reducer that has all ranks.
std::vector<Bytes> expected_weights(int size) {
    std::vector<Bytes> result;
    run_threads(size, [&](ThreadBackend comm) {
        auto model = initial_tensors(awkward_sizes, DType::f32);
        WholeOptimizer<Sgd> whole(Sgd{}, model);
        Reducer sync(comm, model);
        for (int s = 0; s < 4; ++s) {
            for (std::size_t i = model.size(); i-- > 0;) {
                const std::span<float> gradient = sync.gradient_view(i).as<float>();
                for (std::size_t k = 0; k < gradient.size(); ++k)
                    gradient[k] = static_cast<float>((comm.rank() + 1) * static_cast<int>(k % 7 + i) + s);
                sync.mark_ready(i);
            }
            sync.finish();
            const double scale = sync.gradient_norm() > 100 ? 0.5 : 1.0;
            for (std::size_t i = 0; i < model.size(); ++i) whole.step(i, sync.gradient_view(i), scale, model[i].value_view());
        }
        if (comm.rank() == 0)
            for (const Tensor& p : model) result.push_back(p.value);
    });
    return result;
}

}  // namespace

TEST_CASE("hybrid sharding trains as one group does, if sums are exact") {
    const std::vector<Bytes> expected = expected_weights(4);
    for (const int per_group : {1, 2, 4}) {
        CAPTURE(per_group);
        CHECK(findings(4, [&](ThreadBackend world, Finding& finding) {
                  const int rank = world.rank();
                  const auto given = [&] {
                      auto model = initial_tensors(awkward_sizes, DType::f32);
                      if (rank != 0)
                          for (Tensor& p : model) p.value = constant_bytes(p.dtype, p.count(), 3);
                      return model;
                  };
                  auto [group, replicas] = hybrid_groups(world, per_group);
                  finding.check(group.size() == per_group && replicas.size() == 4 / per_group, "the groups are of the wrong sizes");

                  auto one = given();
                  ShardedOptimizer<ThreadBackend, Sgd, Zero2, SizeCappedBuckets, OverlapBackward, Hybrid> optimizer(
                      group, one, Sgd{}, SizeCappedBuckets(4000), Hybrid(replicas));
                  finding.check(optimizer.replica() == rank / per_group, "replica() is not the number of the group");
                  optimizer.broadcast_parameters();
                  train(optimizer, rank, [](std::size_t) { return 0; });
                  for (std::size_t i = 0; i < one.size(); ++i)
                      finding.check(one[i].value == expected[i], one[i].name + " differs where the optimizer is sharded");

                  auto three = given();
                  ShardedParameters<ThreadBackend, Sgd, OverlapBackward, Hybrid> parameters(
                      group, three, Sgd{}, Units({0, 0, 1, 2, 2, 3, 3, 3}), Hybrid(replicas));
                  parameters.broadcast_parameters();
                  train(parameters, rank, [&](std::size_t i) { return parameters.gather(parameters.unit_of(i)); });
                  for (std::size_t i = 0; i < three.size(); ++i) {
                      const auto use = parameters.gather(parameters.unit_of(i));
                      finding.check(holds(parameters.parameter_value(i), expected[i]),
                                    "p" + std::to_string(i) + " differs where all is sharded");
                  }
              }) == "");
    }
}

TEST_CASE("buffers are the first group's root's in all groups") {
    for (const int per_group : {1, 2, 4})
        CHECK(findings(4, [&](ThreadBackend world, Finding& finding) {
                  auto [group, replicas] = hybrid_groups(world, per_group);
                  auto model = initial_tensors({100}, DType::f32);
                  ShardedOptimizer<ThreadBackend, Sgd, Zero2, Flat, OverlapBackward, Hybrid> sharded(group, model, Sgd{}, Hybrid(replicas));
                  float statistics[2] = {static_cast<float>(world.rank()), 7};
                  const BufferView buffers[] = {BufferView(statistics, 2)};
                  sharded.broadcast_buffers(buffers, per_group - 1);
                  finding.check(statistics[0] == static_cast<float>(per_group - 1), std::to_string(statistics[0]));
              }) == "");
}

TEST_CASE("weights that differ between groups are found by the first finish(), and by a later one that compares") {
    for (const auto& [ranks, per_group] : {std::pair{2, 1}, std::pair{3, 1}, std::pair{4, 2}})
        for (const bool optimizer : {true, false})
            for (const int step : {0, 2}) {
                if (step != 0 && !optimizer) continue;  // its weights live with the library, and are compared once
                for (const Outcome& outcome : outcomes(ranks, [&, per_group = per_group](ThreadBackend world) {
                         auto groups = hybrid_groups(world, per_group);
                         auto model = initial_tensors({100, 7}, DType::f32);
                         const auto differ = [&] { model[1].value_view().as<float>()[3] += groups.replicas.rank() == 1 ? 1.0f : 0.0f; };
                         const auto run = [&](auto& sharded) {
                             for (int s = 0; s <= step; ++s) {
                                 if (s == step && s != 0) differ();
                                 for (const std::size_t i : {1u, 0u}) {
                                     [[maybe_unused]] const auto gradient = sharded.acquire_gradient(i);
                                     write(gradient, Bytes(gradient.bytes()));
                                     sharded.mark_ready(i);
                                 }
                                 sharded.finish();
                                 sharded.step();
                             }
                         };
                         if (step == 0) differ();
                         if (optimizer) {
                             ShardedOptimizer sharded(groups.group, model, Sgd{}, ShardingOptions{.reducer = {.compare_weights_every = 1}},
                                                      Zero2{}, Hybrid(groups.replicas));
                             run(sharded);
                         } else {
                             ShardedParameters sharded(groups.group, model, Sgd{}, Units({0, 1}), Hybrid(groups.replicas));
                             run(sharded);
                         }
                     })) {
                    CHECK(outcome.is(Errc::parameter_mismatch));
                    CHECK(outcome.says("the weights of 'p1' differ: those of group 1 are not those of group 0"));
                }
            }
}

TEST_CASE("two trainings over communicators of their own may be finished in different orders") {
    CHECK(findings(2, [](ThreadBackend world, Finding&) {
              auto [group, replicas] = hybrid_groups(world, 1);
              auto [other_group, other_replicas] = hybrid_groups(world.duplicate(), 1);
              auto model = initial_tensors({100}, DType::f32), other_model = model;
              ShardedOptimizer one(group, model, Sgd{}, Hybrid(replicas));
              ShardedOptimizer other(other_group, other_model, Sgd{}, Hybrid(other_replicas));
              for (auto* sharded : {&one, &other}) {
                  write(sharded->acquire_gradient(0), Bytes(400));
                  sharded->mark_ready(0);
              }
              if (world.rank() == 0) one.finish();
              other.finish();
              if (world.rank() != 0) one.finish();
              one.step();
              other.step();
          }) == "");
}

TEST_CASE("groups that load different checkpoints, or of which one cannot load, get an error on every rank, and may try again") {
    const TemporaryDirectory directory;
    const auto directories = [&](const char* name) { return directory.file(name); };
    for (const auto& [ranks, per_group] : {std::pair{2, 1}, std::pair{3, 1}, std::pair{4, 2}})
        for (const bool optimizer : {true, false})
            CHECK(findings(ranks, [&, per_group = per_group](ThreadBackend world, Finding& finding) {
                      auto groups = hybrid_groups(world, per_group);
                      auto model = initial_tensors({100, 7}, DType::f32);
                      const auto run = [&](auto& sharded) {
                          const bool first = sharded.replica() == 0, odd = sharded.replica() == 1;
                          for (const char* const name : {"old", "new"})
                              if (first) save_shards(directories(name), sharded, name);
                          world.barrier().wait();
                          const auto said = [&](const char* name) -> std::string {
                              try {
                                  return "loaded " + load_shards(directories(name), sharded);
                              } catch (const Error& error) {
                                  return (error.errc() == Errc::storage ? "" : "not storage: ") + std::string(error.what());
                              }
                          };
                          const std::string other = said(odd ? "old" : "new"), none = said(odd ? "none" : "new");
                          finding.check(other.find(" a different checkpoint; let all groups read the same directory") != std::string::npos,
                                        other);
                          const char* const why = odd ? "cannot be read" : "but group 1 could not; look at what it says";
                          finding.check(none.find(why) != std::string::npos, none);
                          finding.check(said("new") == "loaded new", "the groups cannot go on");
                      };
                      if (optimizer) {
                          ShardedOptimizer sharded(groups.group, model, Sgd{}, Zero2{}, Hybrid(groups.replicas));
                          run(sharded);
                      } else {
                          ShardedParameters sharded(groups.group, model, Sgd{}, Units({0, 1}), Hybrid(groups.replicas));
                          run(sharded);
                      }
                  }) == "");
}

TEST_CASE("a time limit that is set later holds for the averages across groups, too") {
    CHECK(findings(2, [](ThreadBackend world, Finding& finding) {
              auto [group, replicas] = hybrid_groups(world, 1);
              auto model = initial_tensors({100}, DType::f32);
              ShardedOptimizer<ThreadBackend, Sgd, Zero2, Flat, OverlapBackward, Hybrid> sharded(group, model, Sgd{}, Hybrid(replicas));
              group.set_timeout(std::chrono::minutes(7));
              sharded.acquire_gradient(0).as<float>()[0] = 1;
              sharded.mark_ready(0);
              sharded.finish();
              finding.check(replicas.timeout() == std::chrono::minutes(7), "the communicator of the replicas has another limit");
          }) == "");
}

TEST_CASE("two trainings over the same replicas, which ranks finish in another order, are told apart") {
    for (const Outcome& outcome : outcomes(2, [](ThreadBackend world) {
             auto [group, replicas] = hybrid_groups(world, 1);
             auto one = initial_tensors({100}, DType::f32), other = one;
             using Sharded = ShardedOptimizer<ThreadBackend, Sgd, Zero2, Flat, OverlapBackward, Hybrid>;
             Sharded first(group, one, Sgd{}, Hybrid(replicas)), second(group, other, Sgd{}, Hybrid(replicas));
             for (Sharded* const sharded : world.rank() == 1 ? std::array{&second, &first} : std::array{&first, &second}) {
                 const std::span<float> gradient = sharded->acquire_gradient(0).as<float>();
                 gradient[0] = 1;
                 sharded->mark_ready(0);
                 sharded->finish();
             }
         })) {
        INFO(outcome.text);
        CHECK(outcome.is(Errc::collective_mismatch));
        CHECK(outcome.says("rank 0 started all_reduce(mean, f32, "));
        CHECK(outcome.says(" for bucket 0 of Reducer #0"));
        CHECK(outcome.says(" for bucket 0 of Reducer #2"));
    }
}

TEST_CASE("ranks that are groups of one hear of an exception between another one's marks, also where that catches it") {
    for (const Outcome& outcome : outcomes(2, [](ThreadBackend world) {
             const bool guilty = world.rank() == 1;
             auto [group, replicas] = hybrid_groups(world, 1);
             auto model = initial_tensors({100, 100}, DType::f32);
             try {
                 ShardedOptimizer<ThreadBackend, Sgd, Zero2, PerParameter, NoOverlap, Hybrid> sharded(group, model, Sgd{},
                                                                                                      Hybrid(replicas));
                 for (const std::size_t i : {std::size_t{1}, std::size_t{0}}) {
                     const std::span<float> gradient = sharded.acquire_gradient(i).as<float>();
                     gradient[0] = 1;
                     sharded.mark_ready(i);
                     if (guilty) throw std::runtime_error("out of cheese");
                 }
                 sharded.finish();
             } catch (const std::runtime_error& e) {
                 if (std::string(e.what()) != "out of cheese") throw;
             }
             world.barrier().wait();
         })) {
        INFO(outcome.text);
        CHECK(outcome.is(Errc::peer_failed));
        CHECK(outcome.says("rank 1 failed: an exception ended its step"));
    }
}

TEST_CASE("hybrid sharding refuses groups, options and policies that it does not support") {
    const auto seen = outcomes(3, [](ThreadBackend world) { hybrid_groups(world, 2); });
    CHECK(seen[0].says("hybrid_groups: groups of 2 ranks do not divide 3 ranks"));
    const auto averaging = outcomes(2, [](ThreadBackend world) {
        auto model = initial_tensors({10}, DType::f32);
        auto [group, replicas] = hybrid_groups(world, 2);
        ShardedOptimizer<ThreadBackend, Sgd, Zero1, Flat, OverlapBackward, Hybrid> sharded(
            group, model, Sgd{}, {.reducer = {.averaging = Averaging::sum}}, Hybrid(replicas));
    });
    CHECK(averaging[0].says("hybrid sharding goes with Averaging::mean and UnusedParameters::error only"));
    // Costs that each group measured itself: before rebuild_buckets() the plans are equal, and afterwards they may not be.
    const auto costs = outcomes(4, [](ThreadBackend world) {
        auto model = initial_tensors({10, 20}, DType::f32);
        auto [group, replicas] = hybrid_groups(world, 2);
        const OptimalBuckets buckets(plan::CallCost{world.rank() < 2 ? 1e-6 : 2e-6, 1e-9});
        ShardedOptimizer<ThreadBackend, Sgd, Zero1, OptimalBuckets, OverlapBackward, Hybrid> sharded(group, model, Sgd{}, ShardingOptions{},
                                                                                                     buckets, Hybrid(replicas));
    });
    for (const Outcome& one : costs)  // of ranks 0 and 2, or of ranks 1 and 3
        CHECK((one.says("a setting differs: rank 0 has OptimalBuckets{fixed=") ||
               one.says("a setting differs: rank 1 has OptimalBuckets{fixed=")));
}

TEST_CASE("hybrid sharding: all groups plan anew by the order of the first one") {
    for (const bool timed : {false, true}) {
        CAPTURE(timed);
        CHECK(findings(4, [&](ThreadBackend comm, Finding& finding) {
                  auto [group, replicas] = hybrid_groups(comm, 2);
                  auto model = tensors({64, 64, 64}, DType::f32);  // of one size, so that mixed-up buckets would fit
                  const AnyBuckets buckets = timed ? AnyBuckets(OptimalBuckets(plan::CallCost{1e-9, 1e-9})) : PerParameter{};
                  ShardedOptimizer<ThreadBackend, Sgd, Zero1, AnyBuckets, OverlapBackward, Hybrid> sharded(
                      group, model, Sgd{.rate = 1}, ShardingOptions{}, buckets, Hybrid(replicas));
                  for (int s = 0; s < 2; ++s) {
                      for (std::size_t at = 0; at < model.size(); ++at) {
                          const std::size_t i = (at + (comm.rank() < 2 ? 1 : 2)) % model.size();  // not the order of registration
                          for (float& g : sharded.acquire_gradient(i).as<float>()) g = static_cast<float>(s) * static_cast<float>(i + 1);
                          sharded.mark_ready(i);
                          if (timed) ::usleep(1000);
                      }
                      sharded.finish();
                      sharded.step();
                      if (s == 0) finding.check(sharded.rebuild_buckets() || timed, "the plan stays");
                  }
                  for (std::size_t i = 0; i < model.size(); ++i)
                      for (const float w : sharded.parameter_value(i).as<float>())
                          finding.check(w == -static_cast<float>(i + 1), "weight " + std::to_string(i) + " is " + std::to_string(w));
              }) == "");
    }
}

TEST_CASE("hybrid sharding: gradients may lie in another order in each group") {
    CHECK(findings(4, [](ThreadBackend comm, Finding& finding) {
              auto [group, replicas] = hybrid_groups(comm, 2);
              std::vector<float> w(128), g(128);
              const std::size_t first = comm.rank() < 2 ? 0 : 64;
              std::vector<ParameterView> model = {parameter("a", std::span(w).first(64), std::span(g).subspan(first, 64)),
                                                  parameter("b", std::span(w).last(64), std::span(g).subspan(64 - first, 64))};
              ShardedOptimizer<ThreadBackend, Sgd, Zero1, SizeCappedBuckets, OverlapBackward, Hybrid> sharded(
                  group, model, Sgd{.rate = 1}, ShardingOptions{}, Hybrid(replicas));
              for (std::size_t i = 2; i-- > 0;) {
                  for (float& x : sharded.acquire_gradient(i).as<float>()) x = static_cast<float>(i + 1);
                  sharded.mark_ready(i);
              }
              sharded.finish();
              sharded.step();
              for (std::size_t i = 0; i < model.size(); ++i)
                  for (const float x : sharded.parameter_value(i).as<float>())
                      finding.check(x == -static_cast<float>(i + 1), "weight " + std::to_string(i) + " is " + std::to_string(x));
          }) == "");
}
