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

/// The name of a call that has rules; any other text does not compile.
struct PhasedCall {
    template <std::size_t n>
    consteval PhasedCall(const char (&call)[n]) : name(call) {
        bool has_rule = false;
        for (const PhaseRule& rule : phase_rules) has_rule = has_rule || rule.call == call;
        if (!has_rule) throw "phase_rules has no rule for this call";
    }
    const char* name;
};

/// Returns why the call is refused in this phase, or null if it is allowed.
constexpr const char* refusal_of(PhasedCall call, Phase phase) noexcept {
    for (const PhaseRule& rule : phase_rules)
        if (rule.call == call.name && (rule.phases & static_cast<unsigned>(phase)) != 0) return rule.refusal;
    return nullptr;
}

}  // namespace gradsync::inline v0_2::detail
