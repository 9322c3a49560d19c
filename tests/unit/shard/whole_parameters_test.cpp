// SPDX-License-Identifier: BSL-1.0
// Whole parameters under sharding: who owns what, where it lies, and that nothing of it shows in the weights.
#include <doctest/doctest.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/overlap/overlap_forward.hpp>
#include <gradsync/shard/checkpoint.hpp>
#include <gradsync/shard/hybrid.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

#include "support/sharding.hpp"
#include "support/slow_build.hpp"
#include "support/temporary_directory.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

/// Momentum, made more orthogonal by one step of Newton and Schulz: each element of an update depends on the whole matrix.
/// Vectors get plain steps.
struct Orthogonal {
    static constexpr std::size_t state_count() { return 1; }
    void begin_step() {}
    template <class T>
    void step(const OptimizerSlice<T>& s) const {
        for (std::size_t k = 0; k < s.value.size(); ++k) {
            s.state[0][k] = T(0.5) * s.state[0][k] + s.gradient[k] * static_cast<T>(s.gradient_scale);
            s.value[k] -= T(0.05) * s.state[0][k];
        }
    }
    static std::size_t scratch_count(std::span<const std::size_t> shape) { return shape[0] * shape[0]; }
    template <class T>
    void step(const OptimizerMatrix<T>& m) const {
        const std::size_t rows = m.shape[0], columns = m.value.size() / rows;
        T* const x = m.state[0];
        T norm = T(1e-6);
        for (std::size_t k = 0; k < m.value.size(); ++k) {
            x[k] = T(0.5) * x[k] + m.gradient[k] * static_cast<T>(m.gradient_scale);
            norm += x[k] * x[k];
        }
        for (std::size_t i = 0; i < rows; ++i)
            for (std::size_t j = 0; j < rows; ++j) {
                T dot = 0;
                for (std::size_t k = 0; k < columns; ++k) dot += x[i * columns + k] * x[j * columns + k];
                m.scratch[i * rows + j] = dot / norm;
            }
        for (std::size_t i = 0; i < rows; ++i)
            for (std::size_t k = 0; k < columns; ++k) {
                T mixed = 0;
                for (std::size_t j = 0; j < rows; ++j) mixed += m.scratch[i * rows + j] * x[j * columns + k];
                m.value[i * columns + k] -= T(0.05) * (T(1.5) * x[i * columns + k] - T(0.5) * mixed) / std::sqrt(norm);
            }
    }
};
static_assert(MatrixOptimizer<Orthogonal> && !MatrixOptimizer<Sgd> && !MatrixOptimizer<AdamW>);

struct Model {
    DType dtype = DType::f32;
    std::vector<std::vector<std::size_t>> shapes = {};  ///< by parameter; of one dimension: a vector
    std::vector<double> costs = {};                     ///< by parameter; empty: the default

    std::vector<std::size_t> counts() const {
        std::vector<std::size_t> counts;
        for (const auto& shape : shapes) {
            counts.push_back(1);
            for (const std::size_t extent : shape) counts.back() *= extent;
        }
        return counts;
    }
    std::vector<Tensor> tensors() const {
        std::vector<Tensor> tensors = initial_tensors(counts(), dtype);
        for (std::size_t i = 0; i < tensors.size(); ++i) tensors[i].shape = shapes[i];
        return tensors;
    }
    double cost(std::size_t i) const {
        if (!costs.empty()) return costs[i];
        if (shapes[i].size() < 2) return 0;
        const double rows = static_cast<double>(shapes[i][0]), columns = static_cast<double>(counts()[i]) / rows;
        return std::max(rows, columns) * std::min(rows, columns) * std::min(rows, columns);
    }
    WholeParameters policy() const {
        if (costs.empty()) return {};
        return WholeParameters([costs = costs](const ParameterView& p) { return costs[std::stoul(p.name.substr(1))]; });
    }
};

Model random_model(std::mt19937_64& random, DType dtype = DType::f32) {
    const auto below = [&](std::size_t n) { return random() % n; };
    Model model{.dtype = dtype};
    const std::size_t parameters = 3 + below(14), widest = below(2) == 0 ? 6 : 40;
    for (std::size_t i = 0; i < parameters; ++i) {
        model.shapes.push_back({1 + below(widest)});
        if (i == 0 || below(3) != 0) model.shapes.back().push_back(1 + below(widest));
        if (below(8) == 0) model.shapes.back().push_back(1 + below(3));
    }
    if (below(2) == 0)
        for (std::size_t i = 0; i < parameters; ++i)
            model.costs.push_back(i == 0 ? 1 : model.shapes[i].size() < 2 || below(4) == 0 ? 0 : static_cast<double>(1 + below(9)));
    return model;
}

constexpr std::size_t micro_batches = 6;
constexpr int steps = 3;

/// The weights after a training by one process that knows nothing of shards: a Reducer of one rank adds up the micro-batches.
std::vector<Bytes> weights_of_one(const Model& model) {
    std::vector<Bytes> result;
    run_threads(1, [&](ThreadBackend comm) {
        auto tensors = model.tensors();
        Reducer reducer(comm, tensors, ReducerOptions{.accumulation = Accumulation::in_buckets, .micro_batches = micro_batches});
        std::vector<Bytes> momentum;
        for (const Tensor& t : tensors) momentum.push_back(constant_bytes(model.dtype, t.count(), 0));
        for (int step = 0; step < steps; ++step) {
            for (std::size_t k = 0; k < micro_batches; ++k) {
                std::optional<NoSync> guard;
                if (k + 1 < micro_batches) guard.emplace(reducer.no_sync());
                for (std::size_t i = tensors.size(); i-- > 0;) {
                    write_gradient(tensors[i].gradient_view(), tensors[i].value_view(), static_cast<int>(k), step, i);
                    reducer.mark_ready(i);
                }
                if (k + 1 == micro_batches) reducer.finish();
            }
            for (std::size_t i = 0; i < tensors.size(); ++i)
                with_type(model.dtype, [&]<class T>(T*) {
                    if constexpr (std::is_same_v<T, float> || std::is_same_v<T, double>) {
                        const std::size_t n = tensors[i].count();
                        const std::span value(reinterpret_cast<T*>(tensors[i].value.data()), n);
                        const std::span gradient(static_cast<const T*>(tensors[i].gradient_view().data), n);
                        T* const state[] = {reinterpret_cast<T*>(momentum[i].data())};
                        std::vector<T> scratch(model.shapes[i][0] * model.shapes[i][0]);
                        if (model.cost(i) == 0) Orthogonal().step(OptimizerSlice<T>{i, 0, value, gradient, 1, state});
                        else Orthogonal().step(OptimizerMatrix<T>{i, model.shapes[i], value, gradient, 1, state, scratch});
                    }
                });
        }
        for (Tensor& t : tensors) result.push_back(t.value);
    });
    return result;
}

template <class Sharded>
void train(Sharded& sharded, ThreadBackend& comm, bool sharded_gradients) {
    const std::size_t parameters = sharded.parameters().size();
    const Deal deal{micro_batches, comm.size(), sharded_gradients};
    const std::size_t each = deal.count(comm.rank());
    for (int step = 0; step < steps; ++step) {
        for (std::size_t k = 0; k < (sharded_gradients ? deal.rounds() : each); ++k) {
            std::optional<NoSync> guard;
            if (!sharded_gradients && k + 1 < each) guard.emplace(sharded.no_sync());
            if (sharded_gradients && k >= deal.count(comm.size() - 1)) (void)sharded.begin_step(k < each);
            for (std::size_t i = parameters; i-- > 0;) {
                const auto use = [&] {
                    if (k < each) {
                        write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i),
                                       static_cast<int>(deal.number(comm.rank(), k)), step, i);
                        sharded.mark_ready(i);
                    }
                };
                if constexpr (requires { sharded.gather(std::size_t{}); }) {
                    const auto gathered = sharded.gather(sharded.unit_of(i));
                    use();
                } else {
                    use();
                }
            }
            if (sharded_gradients || k + 1 == each) sharded.finish();
        }
        sharded.step();
    }
}

/// The slices of a rank, whole: "" if each whole parameter is here completely or not at all. Counts those that are.
template <class Sharded>
std::string look_at_shards(Sharded& sharded, const Model& model, std::vector<int>& owners) {
    std::string wrong;
    sharded.for_each_shard([&](std::size_t i, std::size_t array, std::size_t first, BufferView view) {
        if (model.cost(i) == 0 || array != 0) return;
        if (first != 0 || view.count != model.counts()[i]) wrong = "parameter " + std::to_string(i) + " is cut";
        ++owners[i];
    });
    return wrong;
}

Units units_of(const Model& model, std::size_t count) {
    std::vector<std::size_t> unit_of(model.shapes.size());
    for (std::size_t i = 0; i < unit_of.size(); ++i) unit_of[i] = i * count / unit_of.size();
    return Units(unit_of);
}

ReducerOptions options() { return {.accumulation = Accumulation::in_buckets, .micro_batches = micro_batches}; }

/// Trains on `ranks` ranks in every stage; what differs from `expected`, or "".
std::string difference(const Model& model, int ranks, const std::vector<Bytes>& expected, std::size_t cap) {
    std::string text;
    const auto run = [&](const std::string& what, bool sharded_gradients, auto&& make) {
        std::vector<std::vector<int>> owners(static_cast<std::size_t>(ranks), std::vector<int>(model.shapes.size()));
        text += findings(ranks, [&](ThreadBackend comm, Finding& finding) {
            auto tensors = model.tensors();
            const auto sharded = make(comm, tensors);
            train(*sharded, comm, sharded_gradients);
            const std::string wrong = look_at_shards(*sharded, model, owners[static_cast<std::size_t>(comm.rank())]);
            finding.check(wrong.empty(), what + ": " + wrong);
            const std::string which = first_difference(expected, weights(*sharded));
            finding.check(which.empty(), what + ": the weights of " + which);
        });
        for (std::size_t i = 0; i < model.shapes.size(); ++i) {
            int count = 0;
            for (const auto& of_rank : owners) count += of_rank[i];
            if (model.cost(i) != 0 && count != 1) text += what + ": parameter " + std::to_string(i) + " has no single owner; ";
        }
    };
    const auto optimizer = [&]<class Stage>(Stage stage) {
        return [&, stage](ThreadBackend& comm, auto& tensors) {
            using Sharded = ShardedOptimizer<ThreadBackend, Orthogonal, Stage>;
            return std::make_unique<Sharded>(comm, tensors, Orthogonal{}, ShardingOptions{.reducer = options()}, stage,
                                             SizeCappedBuckets(cap), model.policy());
        };
    };
    run("stage 1", false, optimizer(Zero1{}));
    run("stage 2", true, optimizer(Zero2{}));
    run("stage 3", true, [&](ThreadBackend& comm, auto& tensors) {
        return std::make_unique<ShardedParameters<ThreadBackend, Orthogonal>>(
            comm, tensors, Orthogonal{}, units_of(model, 3), ShardedParametersOptions{.reducer = options()}, model.policy());
    });
    return text;
}

}  // namespace

TEST_CASE("an optimizer of matrices gives the same weights on every number of ranks, in every stage") {
    std::mt19937_64 random(60);
    for (std::size_t repeat = 0; repeat < gradsync_test::number_of_cases(40); ++repeat) {
        const Model model = random_model(random, repeat % 4 == 3 ? DType::f64 : DType::f32);
        const auto expected = weights_of_one(model);
        for (const int ranks : {1, 2, 3, 4, 6}) {
            CAPTURE(repeat);
            CAPTURE(ranks);
            CHECK(difference(model, ranks, expected, repeat % 2 == 0 ? 1000 : 100'000) == "");
        }
    }
}

namespace {

/// The padded elements of a bucket, and its owners: the next largest parameter goes where least was spent, of the ranks that have room for it;
/// if none has, where least lies, and of these where least was spent.
std::size_t oracle_of_bucket(const std::vector<std::size_t>& bucket, const List<ParameterInfo>& infos, const std::vector<double>& costs,
                             std::vector<double>& spent, std::map<std::size_t, std::size_t>& owners) {
    const auto padded = [&](std::size_t i) {
        const std::size_t line = 64 / size_of(infos[i].dtype);
        return (infos[i].count + line - 1) / line * line;
    };
    auto largest_first = bucket;
    std::sort(largest_first.begin(), largest_first.end(),
              [&](std::size_t i, std::size_t j) { return std::pair(infos[j].count, i) < std::pair(infos[i].count, j); });
    std::size_t all = 0;
    for (const std::size_t i : bucket) all += padded(i);
    const std::size_t room = std::max((all + spent.size() - 1) / spent.size(), padded(largest_first[0]));
    std::vector<std::size_t> filled(spent.size());
    for (const std::size_t i : largest_first) {
        std::vector<std::tuple<bool, double, std::size_t, double, std::size_t>> ranks;
        for (std::size_t r = 0; r < spent.size(); ++r) {
            const bool fits = filled[r] + padded(i) <= room;
            ranks.emplace_back(!fits, fits ? spent[r] : 0.0, filled[r], spent[r], r);
        }
        const std::size_t owner = std::get<4>(*std::min_element(ranks.begin(), ranks.end()));
        owners[i] = owner;
        spent[owner] += costs[i];
        filled[owner] += padded(i);
    }
    return *std::max_element(filled.begin(), filled.end()) * spent.size();
}

}  // namespace

TEST_CASE("WholeOwners: plans, owners and places are those of a plain oracle, for random models") {
    std::mt19937_64 random(61);
    const auto below = [&](std::size_t n) { return random() % n; };
    for (int repeat = 0; repeat < 300; ++repeat) {
        const std::size_t parameters = 1 + below(60), ranks = 2 + below(7);
        const bool two_types = below(2) == 0;
        List<ParameterInfo> infos(parameters);
        detail::WholeCosts whole{.costs = List<double>(parameters), .joins_buckets = below(3) != 0};
        std::vector<double> costs(parameters);
        for (std::size_t i = 0; i < parameters; ++i) {
            infos[i].count = below(4) == 0 ? 1 + below(3000) : 64 * (1 + below(4));
            infos[i].dtype = two_types && below(2) == 0 ? DType::bf16 : DType::f32;
            infos[i].whole = below(3) != 0;
            whole.costs[i] = costs[i] = infos[i].whole ? static_cast<double>(1 + below(5)) : 0;
        }
        std::vector<std::size_t> order(parameters);
        for (std::size_t i = 0; i < parameters; ++i) order[i] = parameters - 1 - i;
        const BucketPlan given = SizeCappedBuckets(1 + below(4000)).plan(infos, order);
        detail::WholeOwners owners(whole);
        const BucketPlan plan = owners.deal(given, infos, static_cast<int>(ranks));
        const detail::BucketLayout layout(plan, infos, owners.owners(), static_cast<int>(ranks));

        // Every bucket is one of the given ones, or joins whole ones that follow one another.
        std::vector<double> spent(ranks);
        std::map<std::size_t, std::size_t> expected_owners;
        std::vector<int> seen(parameters);
        std::map<DType, std::size_t> padded, elements, whole_buckets;
        for (std::size_t b = 0; b < plan.size(); ++b) {
            const std::vector<std::size_t> bucket(plan.bucket(b).begin(), plan.bucket(b).end());
            for (const std::size_t i : bucket) {
                ++seen[i];
                CHECK(infos[i].kind() == infos[bucket.front()].kind());
            }
            if (!infos[bucket.front()].whole) {
                CHECK(layout.counts[b] == layout.offsets[bucket.back()] + infos[bucket.back()].count);
                continue;
            }
            const std::size_t all = oracle_of_bucket(bucket, infos, costs, spent, expected_owners);
            CHECK(layout.counts[b] == all);
            const DType dtype = infos[bucket.front()].dtype;
            const std::size_t line = 64 / size_of(dtype);
            padded[dtype] += all;
            ++whole_buckets[dtype];
            std::vector<std::pair<std::size_t, std::size_t>> places;
            for (const std::size_t i : bucket) {
                elements[dtype] += (infos[i].count + line - 1) / line * line;
                CHECK(static_cast<std::size_t>(owners.owners()[i]) == expected_owners[i]);
                const ElementRange shard = shard_range(all, static_cast<int>(ranks), owners.owners()[i]);
                CHECK((shard.first <= layout.offsets[i] && layout.offsets[i] + infos[i].count <= shard.last));
                CHECK(layout.offsets[i] % line == 0);
                places.emplace_back(layout.offsets[i], layout.offsets[i] + infos[i].count);
            }
            CHECK(std::is_sorted(places.begin(), places.end()));
            for (std::size_t k = 1; k < places.size(); ++k) CHECK(places[k - 1].second <= places[k].first);
        }
        CHECK(std::all_of(seen.begin(), seen.end(), [](int times) { return times == 1; }));
        for (const auto& [dtype, count] : whole_buckets)
            if (whole.joins_buckets && count > 1) CHECK(padded[dtype] - elements[dtype] <= elements[dtype] / 10);
        if (!whole.joins_buckets) CHECK(plan.size() == given.size());
    }
}

TEST_CASE("of n ranks, each holds a share of the momentum that padding and imbalance allow") {
    Model model;
    for (int layer = 0; layer < 12; ++layer)
        for (const std::vector<std::size_t>& shape : {std::vector<std::size_t>{48, 16}, {16, 16}, {64, 16}, {16, 64}})
            model.shapes.push_back(shape);
    std::size_t all = 0;
    for (const std::size_t count : model.counts()) all += count * sizeof(float);
    for (const int ranks : {2, 3, 4, 6, 8})
        CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                  auto tensors = model.tensors();
                  ShardedOptimizer sharded(comm, tensors, Orthogonal{}, SizeCappedBuckets(20'000), Zero2{});
                  const double share = static_cast<double>(sharded.memory().optimizer_state) * ranks / static_cast<double>(all);
                  finding.check(share <= 1.1, "a rank holds " + std::to_string(share) + " times its share");
                  std::vector<int> owners(model.shapes.size());
                  finding.check(look_at_shards(sharded, model, owners).empty(), "cut");
              }) == "");
}

TEST_CASE("whole parameters keep their momentum when buckets are planned again, and when a job goes on with other ranks") {
    Model model;
    for (int layer = 0; layer < 6; ++layer)
        for (const std::vector<std::size_t>& shape : {std::vector<std::size_t>{12, 10}, {7}, {20, 12}, {10, 20}})
            model.shapes.push_back(shape);
    const auto expected = weights_of_one(model);
    const TemporaryDirectory folder;
    for (const int first : {1, 3})
        for (const int second : {2, 4}) {
            CAPTURE(first);
            CAPTURE(second);
            std::string text;
            std::atomic<int> planned_again{0};
            const auto half = [&](int ranks, int from, int to, const char* load, const char* save, bool compares) {
                text += findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                    auto tensors = model.tensors();
                    ShardedOptimizer sharded(comm, tensors, Orthogonal{}, ShardingOptions{.reducer = options()}, SizeCappedBuckets(1500),
                                             model.policy());
                    if (load != nullptr) (void)load_shards(folder.path() / load, sharded);
                    const Deal deal{micro_batches, ranks, false};
                    for (int step = from; step < to; ++step) {
                        for (std::size_t k = 0; k < deal.count(comm.rank()); ++k) {
                            std::optional<NoSync> guard;
                            if (k + 1 < deal.count(comm.rank())) guard.emplace(sharded.no_sync());
                            for (std::size_t n = tensors.size(); n-- > 0;) {
                                const std::size_t i = step == from ? (n + 2) % tensors.size() : n;  // a new order: new buckets
                                write_gradient(tensors[i].gradient_view(), sharded.parameter_value(i),
                                               static_cast<int>(deal.number(comm.rank(), k)), step, i);
                                sharded.mark_ready(i);
                            }
                        }
                        sharded.finish();
                        sharded.step();
                        planned_again += sharded.rebuild_buckets();
                    }
                    if (save != nullptr) save_shards(folder.path() / save, sharded);
                    if (compares) finding.check(first_difference(expected, weights(sharded)).empty(), "weights");
                });
            };
            half(first, 0, 2, nullptr, "two", false);
            half(second, 2, steps, "two", nullptr, true);
            CHECK(text == "");
            CHECK(planned_again >= second);
        }
}

TEST_CASE("gradients in a type of few bits are widened as a whole before an optimizer steps the matrix") {
    // Gradients that every rank has alike, so that no sum is rounded. In stage 1 they come as bf16, in stage 2 as f32.
    std::vector<Bytes> expected;
    const auto train = [&]<class Stage>(int ranks, Stage stage) {
        CAPTURE(ranks);
        CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                  auto tensors = Model{.dtype = DType::bf16, .shapes = {{120, 70}, {9}, {40, 3}}}.tensors();
                  ShardedOptimizer sharded(comm, tensors, Orthogonal{}, stage);
                  for (int step = 0; step < 2; ++step) {
                      for (std::size_t i = 3; i-- > 0;) {
                          write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), 0, step, i);
                          sharded.mark_ready(i);
                      }
                      sharded.finish();
                      sharded.step();
                  }
                  if (expected.empty()) expected = weights(sharded);
                  finding.check(first_difference(expected, weights(sharded)).empty(), "weights");
              }) == "");
    };
    for (const int ranks : {1, 2, 4}) {
        train(ranks, Zero1{});
        train(ranks, Zero2{});
    }
}

TEST_CASE("whole parameters may be frozen at first, live in buckets that are gathered under the next forward, and have replicas") {
    Model model{.shapes = {{30, 20}, {50}, {20, 30}, {30, 20}, {7}, {20, 20}}};
    const auto step = [](auto& sharded, int number, std::size_t first) {
        for (std::size_t i = sharded.parameters().size(); i-- > first;) {
            write_gradient(sharded.acquire_gradient(i), sharded.parameter_value(i), 0, number, i);
            sharded.mark_ready(i);
        }
        sharded.finish();
        sharded.step();
        sharded.flush();
    };
    std::vector<Bytes> expected;
    for (const int ranks : {1, 2, 4})
        CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                  auto tensors = model.tensors();
                  tensors[0].requires_grad = false;
                  ShardedOptimizer sharded(comm, tensors, Orthogonal{}, ShardingOptions{.parameters = ParameterStorage::in_buckets},
                                           OverlapForward{});
                  step(sharded, 0, 1);
                  const std::size_t first[] = {0};
                  sharded.unfreeze(first);
                  step(sharded, 1, 0);
                  step(sharded, 2, 0);
                  if (expected.empty()) expected = weights(sharded);
                  finding.check(first_difference(expected, weights(sharded)).empty(), "weights");
                  std::vector<int> owners(model.shapes.size());
                  finding.check(look_at_shards(sharded, model, owners).empty(), "cut");
              }) == "");

    std::vector<Bytes> of_one;
    for (const int ranks : {1, 4})
        CHECK(findings(ranks, [&](ThreadBackend world, Finding& finding) {
                  auto tensors = model.tensors();
                  const auto run = [&](ThreadBackend comm, auto... exchange) {
                      ShardedOptimizer sharded(comm, tensors, Orthogonal{}, Zero2{}, exchange...);
                      for (int number = 0; number < 3; ++number) step(sharded, number, 0);
                      if (of_one.empty()) of_one = weights(sharded);
                      finding.check(first_difference(of_one, weights(sharded)).empty(), "weights");
                      std::vector<int> owners(model.shapes.size());
                      finding.check(look_at_shards(sharded, model, owners).empty(), "cut");
                  };
                  if (ranks == 1) return run(world);
                  auto [group, replicas] = hybrid_groups(world, 2);
                  run(group, HybridReduceScatter(replicas));
              }) == "");
}

TEST_CASE("an optimizer of slices gets whole parameters with WholeParameters") {
    struct Strict : Sgd {
        void step(const OptimizerSlice<float>& s) const {
            if (s.parameter == 0 && (s.first != 0 || s.value.size() != 8400)) throw std::logic_error("a part of parameter 0");
            Sgd::step(s);
        }
    };
    for (const DType dtype : {DType::f32, DType::bf16})  // gradients of bf16 are widened first
        CHECK(findings(3, [&](ThreadBackend comm, Finding&) {
                  auto tensors = Model{.dtype = dtype, .shapes = {{120, 70}, {50}}}.tensors();
                  ShardedOptimizer sharded(comm, tensors, Strict{}, WholeParameters{});
                  sharded.mark_ready();
                  sharded.finish();
                  sharded.step();
              }) == "");
}

TEST_CASE("whole_balance foresees the buckets of whole parameters, also of those without gradients and of mixed types") {
    auto tensors = Model{.shapes = {{64, 48}, {48, 64}, {64, 64}, {30}}}.tensors();
    for (auto& tensor : Model{.dtype = DType::bf16, .shapes = {{64, 32}, {32, 64}}}.tensors()) tensors.push_back(tensor);
    auto without = gradsync::detail::view_parameters<MemorySpace::host>(tensors);
    for (ParameterView& parameter : without) parameter.gradient = {};
    for (const int ranks : {2, 3, 4})
        CHECK(findings(ranks, [&](ThreadBackend comm, Finding& finding) {
                  auto own = tensors;
                  ShardedOptimizer sharded(comm, own, Sgd{}, WholeParameters{}, SizeCappedBuckets(20'000));
                  std::size_t buckets = 0;
                  for (std::size_t b = 0; b < sharded.plan().size(); ++b) buckets += sharded.plan().bucket(b).front() != 3;
                  const WholeBalance balance = whole_balance(without, ranks, WholeParameters{}, SizeCappedBuckets(20'000));
                  finding.check(balance.buckets == buckets, std::to_string(balance.buckets) + " buckets, not " + std::to_string(buckets));
              }) == "");
}

TEST_CASE("whole parameters that make no sense are refused") {
    const auto refusal = [&](auto&&... arguments) {
        std::string text;
        run_threads(1, [&](ThreadBackend comm) {
            auto tensors = initial_tensors({600, 50}, DType::f32);
            try {
                ShardedOptimizer sharded(comm, tensors, arguments...);
            } catch (const Error& error) {
                text = error.what();
            }
        });
        return text;
    };
    CHECK(refusal(Orthogonal{}).find("no parameter is one; give them shapes of two dimensions") != std::string::npos);
    const WholeParameters all([](const ParameterView&) { return 1; });
    CHECK(refusal(Orthogonal{}, all).find("parameter 'p0' is to be stepped as a matrix, but has no shape of two dimensions") !=
          std::string::npos);
    run_threads(1, [&](ThreadBackend comm) {
        auto tensors = Model{.shapes = {{30, 20}}}.tensors();
        auto views = views_of(tensors);
        views[0].row_major = false;
        CHECK_THROWS_WITH_AS(ShardedOptimizer(comm, views, Orthogonal{}),
                             doctest::Contains("'p0' is to be stepped as a matrix, but does not lie row by row"), Error);
        ShardedOptimizer(comm, views, Sgd{}, all);
    });
    run_threads(1, [&](ThreadBackend comm) {
        auto tensors = Model{.shapes = {{30, 20}, {20, 30}}}.tensors();
        auto views = views_of(tensors);
        views[0].row_major = views[0].requires_grad = false;  // a frozen one is not stepped
        ShardedOptimizer sharded(comm, views, Orthogonal{});
        CHECK_THROWS_WITH_AS(sharded.unfreeze({{0}}), doctest::Contains("'p0' is to be stepped as a matrix, but does not lie row by row"),
                             Error);
    });
    struct OnlySingle : Orthogonal {
        void step(const OptimizerSlice<double>&) const {}
        void step(const OptimizerSlice<float>&) const {}
        void step(const OptimizerMatrix<float>&) const {}
    };
    run_threads(1, [&](ThreadBackend comm) {
        auto tensors = Model{.dtype = DType::f64, .shapes = {{30, 20}, {5}}}.tensors();
        CHECK_THROWS_WITH_AS(ShardedOptimizer(comm, tensors, OnlySingle{}), doctest::Contains("no step(OptimizerMatrix<double>)"), Error);
        ShardedOptimizer(comm, tensors, OnlySingle{}, WholeParameters([](const ParameterView&) { return 0; }));
    });

    CHECK(refusal(Sgd{}, WholeParameters([](const ParameterView&) { return -1; })).find("must be 0 or more, not -1") != std::string::npos);
    CHECK(refusal(Sgd{}, WholeParameters([](const ParameterView&) { return std::nan(""); })).find("must be 0 or more") !=
          std::string::npos);

    struct OneBucket {
        BucketPlan plan(std::span<const ParameterInfo>, std::span<const std::size_t> order) const {
            BucketPlan plan;
            plan.push_back(order);
            return plan;
        }
        std::string describe() const { return "OneBucket"; }
    };
    for (const Outcome& outcome : outcomes(2, [&](ThreadBackend comm) {
             auto tensors = Model{.shapes = {{30, 20}, {50}}}.tensors();
             ShardedOptimizer sharded(comm, tensors, Orthogonal{}, OneBucket{});
         }))
        CHECK(outcome.says("beside one that is cut, but it is whole"));

    const auto errors = outcomes(3, [&](ThreadBackend comm) {
        auto tensors = initial_tensors({600, 50}, DType::f32);
        ShardedOptimizer sharded(comm, tensors, Sgd{},
                                 WholeParameters([rank = comm.rank()](const ParameterView&) { return 1 + rank / 2; }));
    });
    for (const Outcome& outcome : errors) {
        CHECK(outcome.is(Errc::parameter_mismatch));
        CHECK(outcome.says("whole="));
    }
}
