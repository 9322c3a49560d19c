// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace gradsync::inline v0_2::detail {

/// The phases of a step, from its first mark to its averages.
enum class Phase : std::uint8_t {
    fresh = 1,        ///< before the first step
    averaged = 2,     ///< `finish()` has returned, and nothing was marked since
    accumulated = 4,  ///< some gradients were marked under `no_sync()`
    marked = 8,       ///< some gradients are marked, and no bucket has left
    launched = 16,    ///< some buckets have left
    ended = 32,       ///< no marks may follow, and the step is not reduced yet
    closed = 64,      ///< all buckets have left; `try_finish()` waits for them
};

/// A call that is refused in some phases, and what it says then.
struct PhaseRule {
    std::string_view call;
    unsigned phases;
    const char* refusal;
};

constexpr unsigned operator|(Phase a, Phase b) noexcept { return static_cast<unsigned>(a) | static_cast<unsigned>(b); }
constexpr unsigned operator|(unsigned a, Phase b) noexcept { return a | static_cast<unsigned>(b); }

inline constexpr unsigned within_step = Phase::marked | Phase::launched | Phase::ended | Phase::closed;
inline constexpr const char* some_are_marked =
    "some gradients of this step are marked; mark the rest, and call finish() first";
inline constexpr const char* none_are_averaged = "gradients are not averaged yet; call finish() first";

/// The rules for calls of the engine. In a phase without a rule a call is allowed.
inline constexpr PhaseRule phase_rules[] = {
    {"begin_step", within_step, some_are_marked},
    {"set_weight", Phase::launched | Phase::closed,
     "buckets of this step are in flight already; set the weight before the first mark_ready()"},
    {"no_sync", Phase::launched | Phase::closed, "buckets of this step are in flight already; call finish() first"},
    {"discard", within_step, some_are_marked},
    {"rebind_gradient", within_step, some_are_marked},
    {"rebuild_buckets", within_step, some_are_marked},
    {"step", within_step, some_are_marked},
    {"gradient_norm", within_step, some_are_marked},
    {"gradient_norm", Phase::fresh | Phase::accumulated, none_are_averaged},
    {"clip_gradients_by_norm", within_step, some_are_marked},
    {"clip_gradients_by_norm", Phase::fresh | Phase::accumulated, none_are_averaged},
    {"clip_gradients_by_value", within_step, some_are_marked},
    {"clip_gradients_by_value", Phase::fresh | Phase::accumulated, none_are_averaged},
};

/// The state of a sharded object's averages, from the marks of a backward to `step()`.
enum class Averages : std::uint8_t {
    none = 1,
    settled = 2,  ///< `finish()` has returned, and `step()` will step inside the reductions
    reduced = 4,  ///< this rank's shards hold the averages of one `finish()` or several
};

constexpr unsigned operator|(Averages a, Averages b) noexcept {
    return static_cast<unsigned>(a) | static_cast<unsigned>(b);
}

inline constexpr const char* step_first = "gradients of this step are averaged already; call step() first";

/// The rules for calls of a sharded object, in addition to those of its engine.
inline constexpr PhaseRule sharded_rules[] = {
    {"begin_step", static_cast<unsigned>(Averages::settled), "the step is not over; call step() or discard() first"},
    {"set_weight", static_cast<unsigned>(Averages::settled), "the step is not over; call step() or discard() first"},
    {"gradient_norm", static_cast<unsigned>(Averages::none), "there are no averaged gradients; call finish() first"},
    {"step", static_cast<unsigned>(Averages::none), "there are no averaged gradients; call finish() first"},
    {"for_each_gradient", Averages::none | Averages::settled,
     "there are no averaged gradients; call finish() first (with StepInside, gradient_norm() too)"},
    {"rebuild_buckets", Averages::settled | Averages::reduced, step_first},
    {"unfreeze", Averages::settled | Averages::reduced, step_first},
};
/// The name of a call that has rules; any other text does not compile.
struct CheckedCall {
    template <std::size_t n>
    consteval CheckedCall(const char (&call)[n]) : name(call) {
        bool has_rule = false;
        for (const PhaseRule& rule : phase_rules) has_rule = has_rule || rule.call == name;
        for (const PhaseRule& rule : sharded_rules) has_rule = has_rule || rule.call == name;
        if (!has_rule) throw "no table has a rule for this call";
    }
    /// Returns why the call is refused in this phase, or null if it is allowed.
    constexpr const char* refusal(Phase phase) const noexcept {
        return refusal(phase_rules, static_cast<unsigned>(phase));
    }
    constexpr const char* refusal(Averages averages) const noexcept {
        return refusal(sharded_rules, static_cast<unsigned>(averages));
    }

    const char* name;

private:
    constexpr const char* refusal(const auto& rules, unsigned phase) const noexcept {
        for (const PhaseRule& rule : rules)
            if (rule.call == name && (rule.phases & phase) != 0) return rule.refusal;
        return nullptr;
    }
};

}  // namespace gradsync::inline v0_2::detail
