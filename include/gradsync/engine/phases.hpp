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

/// The state of a sharded object's averages, from the marks of a backward to `step()`. Its bits are not those of Phase,
/// so that one table has the rules for both.
enum class Averages : std::uint16_t {
    none = 128,
    settled = 256,  ///< `finish()` has returned, and `step()` will step inside the reductions
    reduced = 512,  ///< this rank's shards hold the averages of one `finish()` or several
};

constexpr unsigned any_of(auto... states) noexcept { return (static_cast<unsigned>(states) | ...); }

/// A call that is refused in some phases, or states of averages, and what it says then.
struct PhaseRule {
    std::string_view call;
    unsigned states;
    const char* refusal;
};

inline constexpr unsigned within_step = any_of(Phase::marked, Phase::launched, Phase::ended, Phase::closed);
inline constexpr const char* some_are_marked =
    "some gradients of this step are marked; mark the rest, and call finish() first";
inline constexpr const char* none_are_averaged = "gradients are not averaged yet; call finish() first";
inline constexpr const char* step_first = "gradients of this step are averaged already; call step() first";
inline constexpr const char* step_or_discard =
    "gradients of this step are averaged already; call step() or discard() first";

/// The rules. In a state without a rule a call is allowed.
inline constexpr PhaseRule phase_rules[] = {
    {"begin_step", within_step, some_are_marked},
    {"set_weight", any_of(Phase::launched, Phase::closed),
     "buckets of this step are in flight already; set the weight before the first mark_ready()"},
    {"no_sync", any_of(Phase::launched, Phase::closed),
     "buckets of this step are in flight already; call finish() first"},
    {"discard", within_step, some_are_marked},
    {"rebind_gradient", within_step, some_are_marked},
    {"rebuild_buckets", within_step, some_are_marked},
    {"step", within_step, some_are_marked},
    {"gradient_norm", within_step, some_are_marked},
    {"gradient_norm", any_of(Phase::fresh, Phase::accumulated), none_are_averaged},
    {"clip_gradients_by_norm", within_step, some_are_marked},
    {"clip_gradients_by_norm", any_of(Phase::fresh, Phase::accumulated), none_are_averaged},
    {"clip_gradients_by_value", within_step, some_are_marked},
    {"clip_gradients_by_value", any_of(Phase::fresh, Phase::accumulated), none_are_averaged},
    {"for_each_gradient", within_step, some_are_marked},
    {"begin_step", any_of(Averages::settled), "the step is not over; call step() or discard() first"},
    {"set_weight", any_of(Averages::settled), "the step is not over; call step() or discard() first"},
    {"gradient_norm", any_of(Averages::none), "there are no averaged gradients; call finish() first"},
    {"step", any_of(Averages::none), "there are no averaged gradients; call finish() first"},
    {"for_each_gradient", any_of(Averages::none, Averages::settled),
     "there are no averaged gradients; call finish() first (with StepInside, gradient_norm() too)"},
    {"rebuild_buckets", any_of(Averages::settled, Averages::reduced), step_first},
    {"unfreeze", any_of(Averages::settled, Averages::reduced), step_first},
    {"distribute_state", any_of(Averages::settled, Averages::reduced), step_or_discard},
    {"load_shards", any_of(Averages::settled, Averages::reduced), step_or_discard},
};

/// The name of a call that has rules; any other text does not compile.
struct CheckedCall {
    template <std::size_t n>
    consteval CheckedCall(const char (&call)[n]) : name(call) {
        bool has_rule = false;
        for (const PhaseRule& rule : phase_rules) has_rule = has_rule || rule.call == name;
        if (!has_rule) throw "the table has no rule for this call";
    }
    /// Why the call is refused in a Phase or Averages; null if it is allowed.
    constexpr const char* refusal(auto state) const noexcept {
        for (const PhaseRule& rule : phase_rules)
            if (rule.call == name && (rule.states & any_of(state)) != 0) return rule.refusal;
        return nullptr;
    }

    const char* name;
};

}  // namespace gradsync::inline v0_2::detail
