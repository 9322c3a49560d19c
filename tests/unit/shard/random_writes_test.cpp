// SPDX-License-Identifier: BSL-1.0
// What a trainer writes between two calls, drawn from a seed: it counts as in one process without the library, or every rank refuses it, in
// every stage, storage, type and layout, and on every number of ranks.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <gradsync/bucket/units.hpp>
#include <gradsync/gradsync.hpp>
#include <gradsync/overlap/overlap_forward.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

#include "support/random.hpp"
#include "support/ranks.hpp"
#include "support/tensor.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

const std::vector<std::size_t> written_sizes = {33, 1, 64, 5, 130, 17};

enum class WriteStage { reducer, one, two, inside, three };
/// Writes that every rank must refuse: gradients between `finish()` and `step()`, and master weights without `publish()`.
enum class Forbidden { nothing, gradients, masters };

constexpr std::uint64_t between_steps = 10, after_finish = 11, at_the_end = 12;  ///< places of a step; the last is for what is forbidden

/// All that is drawn. Gradients are small whole numbers that the ranks sum, so every order, type and number of ranks gives the same bits.
struct WriteCase {
    explicit WriteCase(std::uint64_t seed_) : seed(seed_) {
        Random draw(seed);
        ranks = 1 + static_cast<int>(draw.below(3));
        stage = static_cast<WriteStage>(draw.below(5));
        type = std::vector{DType::f32, DType::bf16, DType::f16}[draw.below(3)];
        gradient_type = draw.below(2) == 0 ? DType::f32 : type;
        rounds = draw.below(3) == 0 && stage != WriteStage::reducer;
        forward = draw.below(3) == 0 && (stage == WriteStage::one || stage == WriteStage::two);
        arena = draw.below(2) == 0;
        micro_batches = 1 + static_cast<int>(draw.below(2));
        cap = std::vector<std::size_t>{1, 400, 100000}[draw.below(3)];
        weights = static_cast<ParameterStorage>(draw.below(3));
        pools = stage == WriteStage::two || (stage == WriteStage::three && draw.below(2) == 0);
        const bool whole = !pools && stage != WriteStage::three;
        if (draw.below(2) == 0 && whole) options.gradients = GradientStorage::in_buckets;
        if (draw.below(2) == 0 && whole && options.gradients == GradientStorage::automatic) options.accumulation = Accumulation::in_buckets;
        if (draw.below(3) == 0 && options.gradients == GradientStorage::automatic && (pools || whole))
            options.reduce_dtype = draw.below(2) == 0 ? DType::f32 : DType::bf16;
        if (draw.below(3) == 0 && !rounds) options.unused = UnusedParameters::find_unused;
        options.averaging = Averaging::sum;
        options.check_writes = draw.below(4) == 0;
        reshards = draw.below(2) == 0;
        steps = 1 + static_cast<int>(draw.below(4));
        if (stage != WriteStage::reducer && draw.below(2) == 0) forbidden = static_cast<Forbidden>(1 + draw.below(2));
    }

    std::uint64_t seed;
    int ranks, micro_batches, steps;
    WriteStage stage;
    DType type, gradient_type;
    bool rounds, forward, arena, reshards, pools;
    std::size_t cap;
    ParameterStorage weights;
    ReducerOptions options = {};
    Forbidden forbidden = Forbidden::nothing;

    std::uint64_t number(std::uint64_t a, std::uint64_t b = 0, std::uint64_t c = 0) const {
        return Random(seed * 1000003 + a * 10007 + b * 101 + c)();
    }
    bool is_trained(int s, std::size_t i) const {
        return options.unused == UnusedParameters::error || number(1, static_cast<std::uint64_t>(s), i) % 4 != 0;
    }
    /// Draws what the trainer does at a place of step s; 0, which is nothing, half the time.
    std::size_t deed(std::uint64_t place, int s, std::size_t choices) const {
        const std::uint64_t x = number(place, static_cast<std::uint64_t>(s));
        return x % 2 == 0 ? 0 : 1 + x / 2 % choices;
    }
    /// Does it write weights between `finish()` and `step()`? Not again in a step: to what they were before they have not changed.
    bool edits_late(int s) const { return stage != WriteStage::three && deed(between_steps, s, 3) != 1 && deed(after_finish, s, 1) == 1; }
    std::string text() const {
        return "seed " + std::to_string(seed) + ": " + std::to_string(ranks) + " ranks, stage " + std::to_string(static_cast<int>(stage)) +
               ", " + std::string(name_of(type)) + ", forbidden " + std::to_string(static_cast<int>(forbidden)) + ", weights " +
               std::to_string(static_cast<int>(weights)) + (forward ? ", forward" : "") + (arena ? ", arena" : "") +
               (rounds ? ", rounds" : "") + ", " + std::to_string(steps) + " steps of " + std::to_string(micro_batches) + ", cap " +
               std::to_string(cap) + ", " + describe(options);
    }
};

/// Returns the value that the trainer writes over element `k` of parameter i in step s: it changes all elements, some, or one.
float edited(const WriteCase& c, std::uint64_t place, int s, std::size_t i, std::size_t k, float x) {
    const std::uint64_t how = c.number(place + 50, static_cast<std::uint64_t>(s), i);
    switch (how % 5) {
        case 0: return -x;
        case 1: return x < 0.01f && x > -0.01f ? 1.0f : x / 2;  // each type holds it exactly
        case 2: return static_cast<float>((i + k) % 5) - 1.5f;
        case 3: return k == how / 5 % written_sizes[i] ? 2.5f : x;
        default: return x;
    }
}

/// Number k of the gradient that part `part` of 6 contributes, with the weight x.
float part_of_gradient(const WriteCase& c, int s, std::size_t i, std::size_t k, std::size_t part, float x) {
    const float drawn = static_cast<float>(c.number(2, static_cast<std::uint64_t>(s) * 6 + part, i * 1000 + k) % 7) - 3;
    return k % 6 == part ? drawn + (x > 0 ? 1.0f : -1.0f) : drawn;
}

struct WrittenSgd {
    std::uint64_t steps = 0;

    static constexpr std::size_t state_count() { return 1; }
    void begin_step() { ++steps; }
    void step(const OptimizerSlice<float>& s) const {
        for (std::size_t k = 0; k < s.value.size(); ++k) {
            s.state[0][k] = 0.5f * s.state[0][k] + s.gradient[k] * static_cast<float>(s.gradient_scale);
            s.value[k] -= 0.0137f * s.state[0][k];
        }
    }
};
struct RoundedSgd : WrittenSgd {
    void round(const RoundingSlice& s) const {
        if (s.rounded.dtype == DType::bf16) round_stochastically(s, steps);
        else kernel::copy(const_buffer(s.master), s.rounded);
    }
};

std::vector<float> wide(ConstBufferView view) {
    std::vector<float> result(view.count);
    kernel::copy(view, buffer(result));
    return result;
}

/// All training state, whole, in one process: the oracle, and what a Reducer's trainer has.
class WholeState {
public:
    explicit WholeState(const WriteCase& c) : c_(c) {
        for (std::size_t i = 0; i < written_sizes.size(); ++i) {
            Bytes& w = weights.emplace_back(written_sizes[i] * size_of(c.type));
            std::vector<float> first(written_sizes[i]);
            for (std::size_t k = 0; k < first.size(); ++k) first[k] = static_cast<float>((i * 5 + k * 3) % 16) / 8 - 1;
            kernel::copy(const_buffer(first), view(i));
            master.push_back(first);
            momentum.emplace_back(w.size() / size_of(c.type));
        }
    }
    BufferView view(std::size_t i) { return {weights[i].data(), written_sizes[i], c_.type, MemorySpace::host}; }

    void edit_weights(std::uint64_t place, int s) {
        for (std::size_t i = 0; i < weights.size(); ++i) {
            std::vector<float> now = wide(view(i));
            for (std::size_t k = 0; k < now.size(); ++k)
                if (const float x = edited(c_, place, s, i, k, now[k]); x != now[k]) master[i][k] = now[k] = x;
            kernel::copy(const_buffer(now), view(i));
        }
    }
    void edit_momentum(std::uint64_t place, int s) {
        for (std::size_t i = 0; i < weights.size(); ++i)
            for (std::size_t k = 0; k < momentum[i].size(); ++k) momentum[i][k] = edited(c_, place, s, i, k, momentum[i][k]);
    }
    void edit_masters(std::uint64_t place, int s) {
        for (std::size_t i = 0; i < weights.size(); ++i)
            for (std::size_t k = 0; k < master[i].size(); ++k) master[i][k] = edited(c_, place, s, i, k, master[i][k]);
        publish();
    }
    void publish() {
        for (std::size_t i = 0; i < weights.size(); ++i) round(i);
    }
    template <class Gradient>
    void step(int s, Gradient&& gradient) {
        optimizer_.begin_step();
        for (std::size_t i = 0; i < weights.size(); ++i) {
            if (!c_.is_trained(s, i)) continue;
            const std::vector<float> g = gradient(i);
            float* const state[] = {momentum[i].data()};
            optimizer_.step(OptimizerSlice<float>{.parameter = i, .value = master[i], .gradient = g, .gradient_scale = 1, .state = state});
            round(i);
        }
    }

    std::vector<Bytes> weights;
    std::vector<std::vector<float>> master, momentum;

private:
    void round(std::size_t i) {
        if (c_.rounds && c_.type != DType::f32) optimizer_.round({.parameter = i, .master = master[i], .rounded = view(i)});
        else kernel::copy(const_buffer(master[i]), view(i));
    }

    const WriteCase& c_;
    RoundedSgd optimizer_;
};

/// The weights that the oracle ends with. After the last step weights are written again: `collected` gets the master weights then.
std::vector<Bytes> oracle(const WriteCase& c, std::vector<std::vector<float>>& collected) {
    WholeState state(c);
    for (int s = 0; s < c.steps; ++s) {
        switch (c.deed(between_steps, s, 3)) {
            case 1: state.edit_weights(between_steps, s); break;
            case 2: state.edit_momentum(between_steps, s); break;
            case 3: state.edit_masters(between_steps, s); break;
            default: break;
        }
        std::vector<std::vector<float>> gradients;
        for (std::size_t i = 0; i < written_sizes.size(); ++i) {
            const std::vector<float> now = wide(state.view(i));
            std::vector<float>& g = gradients.emplace_back(now.size());
            for (std::size_t k = 0; k < g.size(); ++k)
                for (std::size_t part = 0; part < 6; ++part) g[k] += part_of_gradient(c, s, i, k, part, now[k]);
        }
        if (c.edits_late(s)) state.edit_weights(after_finish, s);
        state.step(s, [&](std::size_t i) { return gradients[i]; });
    }
    std::vector<Bytes> trained = state.weights;
    state.edit_weights(between_steps, c.steps);
    collected = state.master;
    return trained;
}

/// One rank's training, with a Reducer or a sharded object.
template <class Sync>
class Writer {
    static constexpr bool is_reducer = requires(Sync& sync) { sync.clip_gradients_by_value(1); };
    static constexpr bool gathers = requires(Sync& sync) { sync.gather(0); };

public:
    Writer(const WriteCase& c, ThreadBackend comm, WholeState& state, Sync& sync) : c_(c), comm_(comm), state_(state), sync_(sync) {}

    std::vector<Bytes> train(std::vector<std::vector<float>>& collected) {
        for (int s = 0; s < c_.steps; ++s) {
            settle();
            deed(c_.deed(between_steps, s, 3), s);
            if constexpr (!is_reducer)
                if (s + 1 == c_.steps && c_.forbidden == Forbidden::masters) return forget_to_publish();
            backward(s);
            if (s + 1 == c_.steps && forbidden(s)) return {};
            look(s);
            if constexpr (is_reducer) {
                state_.step(s, [&](std::size_t i) { return wide(sync_.gradient_view(i)); });
            } else {
                sync_.step();
            }
            if constexpr (requires { sync_.unfreeze({}); })
                if (c_.deed(20, s, 2) == 1) (void)sync_.rebuild_buckets();
        }
        settle();
        std::vector<Bytes> result;
        for (std::size_t i = 0; i < written_sizes.size(); ++i) with(i, [&](ConstBufferView w) { result.push_back(bytes_of(w)); });
        edit_weights(between_steps, c_.steps);
        if constexpr (is_reducer) {
            collected = state_.master;
        } else {
            collected.resize(written_sizes.size());
            sync_.collect_state([&](std::size_t i, std::size_t a, std::size_t, ConstBufferView piece) {
                if (a == 0) collected[i] = wide(piece);
            });
        }
        return result;
    }

private:
    void settle() {
        if constexpr (!is_reducer) sync_.flush();
    }
    template <class Use>
    void with(std::size_t i, Use&& use) {
        if constexpr (is_reducer) {
            use(state_.view(i));
        } else if constexpr (gathers) {
            const auto held = sync_.gather(sync_.unit_of(i));
            use(sync_.parameter_value(i));
        } else {
            use(sync_.parameter_value(i));
        }
    }
    /// Calls `edit(parameter, element, x)` for this rank's part of an array of the state.
    template <class Edit>
    void edit_state(std::size_t array, Edit&& edit) {
        sync_.for_each_shard([&](std::size_t i, std::size_t a, std::size_t first, BufferView view) {
            if (a != array) return;
            std::size_t k = first;
            for (float& x : view.as<float>()) x = edit(i, k, x), ++k;
        });
    }
    void edit_weights(std::uint64_t place, int s) {
        if constexpr (is_reducer) {
            state_.edit_weights(place, s);
        } else if constexpr (gathers) {  // by their master weights
            std::vector<std::vector<float>> now;
            for (std::size_t i = 0; i < written_sizes.size(); ++i) with(i, [&](ConstBufferView w) { now.push_back(wide(w)); });
            edit_state(0, [&](std::size_t i, std::size_t k, float x) {
                const float next = edited(c_, place, s, i, k, now[i][k]);
                return next != now[i][k] ? next : x;
            });
            sync_.publish();
        } else {
            if (c_.weights == ParameterStorage::shared) comm_.barrier().wait();
            for (std::size_t i = 0; i < written_sizes.size() && (c_.weights != ParameterStorage::shared || comm_.rank() == 0); ++i) {
                const BufferView view = sync_.parameter_value(i);
                std::vector<float> next = wide(view);
                for (std::size_t k = 0; k < next.size(); ++k)
                    if (const float x = edited(c_, place, s, i, k, next[k]); x != next[k]) next[k] = x;  // no 0 for -0
                kernel::copy(const_buffer(next), view);
            }
            if (c_.weights == ParameterStorage::shared) comm_.barrier().wait();
            if (c_.number(21, static_cast<std::uint64_t>(s)) % 4 == 0) sync_.adopt_values();
        }
    }
    void deed(std::size_t what, int s) {
        if (what == 1) edit_weights(between_steps, s);
        if (what < 2) return;
        if constexpr (is_reducer) {
            what == 2 ? state_.edit_momentum(between_steps, s) : state_.edit_masters(between_steps, s);
        } else {
            edit_state(what == 2 ? 1 : 0, [&](std::size_t i, std::size_t k, float x) { return edited(c_, between_steps, s, i, k, x); });
            if (what == 3) sync_.publish();
        }
    }
    /// Reads what may be read between `finish()` and `step()`.
    void look(int s) {
        if constexpr (!is_reducer) {
            const std::uint64_t what = c_.number(22, static_cast<std::uint64_t>(s)) % 8;
            if (what < 2) (void)sync_.gradient_norm();
            if (what == 1) sync_.for_each_gradient([](const auto&) {});
            if (what > 4) edit_state(0, [](std::size_t, std::size_t, float x) { return x; });
        }
    }
    BufferView gradient(std::size_t i) {
        if constexpr (is_reducer) return sync_.gradient_view(i);
        else return sync_.acquire_gradient(i);
    }
    void backward(int s) {
        for (int m = 0; m < c_.micro_batches; ++m) {
            const bool last = m + 1 == c_.micro_batches, adds = m > 0 && !c_.pools && c_.options.accumulation == Accumulation::in_gradients;
            std::optional<NoSync> guard;
            if (!last && !c_.pools) guard.emplace(sync_.no_sync());
            for (std::size_t i = written_sizes.size(); i-- > 0;) {
                if (!c_.is_trained(s, i)) continue;
                std::vector<float> now, all(written_sizes[i]);
                with(i, [&](ConstBufferView w) { now = wide(w); });
                const BufferView to = gradient(i);
                if (adds) all = wide(to);
                for (std::size_t part = 0; part < 6; ++part) {
                    const int turn = static_cast<int>(part) % (c_.ranks * c_.micro_batches);
                    if (turn != comm_.rank() * c_.micro_batches + m) continue;
                    for (std::size_t k = 0; k < all.size(); ++k) all[k] += part_of_gradient(c_, s, i, k, part, now[k]);
                }
                kernel::copy(const_buffer(all), to);
                sync_.mark_ready(i);
            }
            if (!last && c_.pools) sync_.finish();
        }
        sync_.finish();
        if constexpr (!gathers)
            if (c_.edits_late(s)) edit_weights(after_finish, s);
    }
    template <class Call>
    bool refused(Call&& call, const char* remedy) {
        const Outcome outcome = outcome_of(call);
        if (!outcome.is(Errc::invalid_argument) || !outcome.says(remedy)) throw std::logic_error("not refused: " + outcome.text);
        comm_.barrier().wait();  // the other ranks are refused as well, and all of them go on
        return true;
    }
    std::vector<Bytes> forget_to_publish() {
        edit_state(0, [&](std::size_t, std::size_t, float x) { return x + 1; });
        refused([&] { sync_.mark_ready(0); }, "call publish() on all ranks");
        sync_.publish();
        return {};
    }
    /// Does what nobody may do, and expects it to be refused.
    bool forbidden(int s) {
        if constexpr (!is_reducer) {
            switch (c_.forbidden) {
                case Forbidden::nothing: return false;
                case Forbidden::gradients:
                    for (std::size_t i = 0; i < written_sizes.size(); ++i)
                        for (const BufferView g = gradient(i); const std::size_t k : one_or_all(s, g.count)) {
                            const float other = wide(g)[k] == 7 ? 8 : 7;
                            kernel::copy(const_buffer(std::vector{other}), g.subview(k, 1));
                        }
                    return refused([&] { sync_.step(); }, "pass step() a factor");
                case Forbidden::masters: break;
            }
        }
        return false;
    }
    /// The elements that are written: one, if all writes are noticed, or all.
    std::vector<std::size_t> one_or_all(int s, std::size_t count) const {
        std::vector<std::size_t> result;
        const bool one = (s == 0 || c_.options.check_writes) && c_.number(at_the_end) % 2 == 0;
        for (std::size_t k = 0; k < count; ++k)
            if (!one || k == c_.number(at_the_end, 1) % count) result.push_back(k);
        return result;
    }

    const WriteCase& c_;
    ThreadBackend comm_;
    WholeState& state_;
    Sync& sync_;
};

template <class O>
std::vector<Bytes> written_on(const WriteCase& c, ThreadBackend comm, std::vector<std::vector<float>>& collected) {
    WholeState state(c);
    std::size_t values = 0, gradients = 0;
    for (const std::size_t count : written_sizes) values += count * size_of(c.type), gradients += count * size_of(c.gradient_type);
    Bytes value_arena(values), gradient_arena(gradients);
    std::vector<Bytes> apart;
    std::vector<ParameterView> views;
    values = gradients = 0;
    for (std::size_t i = 0; i < written_sizes.size(); ++i) {
        ParameterView p{.name = "p" + std::to_string(i), .value = state.view(i)};
        apart.emplace_back(written_sizes[i] * size_of(c.gradient_type));
        p.gradient = {c.arena ? gradient_arena.data() + gradients : apart.back().data(), written_sizes[i], c.gradient_type,
                      MemorySpace::host};
        if (c.arena && c.stage != WriteStage::reducer) p.value.data = value_arena.data() + values;
        if (c.arena && c.stage != WriteStage::reducer) kernel::copy(state.view(i), p.value);
        values += p.value.bytes(), gradients += p.gradient.bytes();
        views.push_back(p);
    }
    const auto train = [&](auto&& sync) { return Writer(c, comm, state, sync).train(collected); };
    const SizeCappedBuckets buckets(c.cap);
    const ShardingOptions options{.reducer = c.options, .parameters = c.weights};
    switch (c.stage) {
        case WriteStage::reducer: return train(Reducer(comm, views, c.options, buckets));
        case WriteStage::one:
            if (c.forward) return train(ShardedOptimizer(comm, views, O{}, options, buckets, OverlapForward{}));
            return train(ShardedOptimizer(comm, views, O{}, options, buckets));
        case WriteStage::two:
            if (c.forward) return train(ShardedOptimizer(comm, views, O{}, options, Zero2{}, buckets, OverlapForward{}));
            return train(ShardedOptimizer(comm, views, O{}, options, Zero2{}, buckets));
        case WriteStage::inside: return train(ShardedOptimizer(comm, views, O{}, options, StepInside{}, buckets));
        case WriteStage::three: break;
    }
    return train(ShardedParameters(comm, views, O{}, Units({0, 0, 1, 2, 2, 1}),
                                   ShardedParametersOptions{.reducer = c.options,
                                                            .shard_gradients = c.pools,
                                                            .reshard_after_forward = c.reshards,
                                                            .replicate_below = c.cap == 1 ? 6u : 0u}));
}

}  // namespace

TEST_CASE("what is written between two calls counts as in one process, or every rank refuses it") {
    std::size_t counted[5][3] = {}, refused[5][3] = {};
    for (std::uint64_t seed = 1; seed <= number_of_cases(600); ++seed) {
        const WriteCase c(seed);
        std::vector<std::vector<float>> masters;
        const std::vector<Bytes> expected = oracle(c, masters);
        std::vector<std::vector<Bytes>> found(static_cast<std::size_t>(c.ranks));
        std::vector<std::vector<std::vector<float>>> collected(found.size());
        const std::vector<Outcome> ends = outcomes(c.ranks, [&](ThreadBackend comm) {
            const auto rank = static_cast<std::size_t>(comm.rank());
            auto& all = collected[rank];
            found[rank] = c.rounds ? written_on<RoundedSgd>(c, comm, all) : written_on<WrittenSgd>(c, comm, all);
        });
        for (std::size_t rank = 0; rank < ends.size(); ++rank) {
            CAPTURE(c.text());
            CAPTURE(rank);
            CHECK(ends[rank].text == "");
            for (std::size_t i = 0; c.forbidden == Forbidden::nothing && i < found[rank].size(); ++i)
                CHECK_MESSAGE((found[rank][i] == expected[i] && collected[rank][i] == masters[i]), "p", i);
        }
        ++(c.forbidden == Forbidden::nothing ? counted : refused)[static_cast<std::size_t>(c.stage)][c.ranks - 1];
    }
    for (std::size_t stage = 0; !slow_build && stage < 5; ++stage)
        for (std::size_t ranks = 0; ranks < 3; ++ranks) {
            CHECK(counted[stage][ranks] > 5);
            CHECK((refused[stage][ranks] > 5 || stage == 0));
        }
}
