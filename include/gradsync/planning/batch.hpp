// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <vector>

#include "checked_size.hpp"

namespace gradsync::inline v0_2::plan {

/// GBS = MBS x GA x DP: samples per optimizer step = samples per micro-batch x micro-batches that each device
/// accumulates x devices. Tokens = samples x sequence length.
struct BatchTarget {
    std::uint64_t global_tokens = 0;  ///< wanted in one optimizer step
    std::uint64_t sequence = 1;       ///< tokens per sample
    std::uint64_t micro_batch = 1;    ///< samples that fit into a device at a time
    std::uint64_t devices = 1;        ///< ranks to plan for
};

/// The quantity that is rounded to get whole numbers.
enum class BatchRounding : std::uint8_t {
    none,                 ///< nothing: the target is met exactly
    fewer_steps,          ///< accumulate less often, a smaller batch
    more_steps,           ///< accumulate once more, a larger batch
    uneven_steps,         ///< some devices accumulate once less than others
    fewer_devices,        ///< leave devices idle
    smaller_micro_batch,  ///< fewer samples than fit
};

constexpr std::string_view name_of(BatchRounding rounding) noexcept {
    return gradsync::detail::name_in(
        {"none", "fewer_steps", "more_steps", "uneven_steps", "fewer_devices", "smaller_micro_batch"}, rounding);
}

/// One way to run the target, in whole numbers.
struct BatchChoice {
    BatchRounding rounding = BatchRounding::none;  ///< what was rounded
    /// Samples of a micro-batch, micro-batches of a rank per step, and ranks.
    std::uint64_t micro_batch = 0, accumulate = 0, devices = 0;
    std::uint64_t devices_with_one_less = 0;  ///< the devices that accumulate once less (uneven_steps)
    std::uint64_t samples = 0;                ///< samples of one optimizer step
    std::uint64_t tokens = 0;                 ///< of a step, over all ranks
    double relative_error = 0;                ///< (tokens - target) / target
    /// The sums that a rank sends, on average, if the library adds up the micro-batches in the order of their tree
    /// (ReducerOptions::micro_batches). The bytes that the ranks exchange grow with it.
    double sums = 1;
};

/// The result of `plan_batch`.
struct BatchPlan {
    double samples = 0;           ///< samples of the target; not whole if the sequence does not divide the tokens
    double accumulate_exact = 0;  ///< GA = samples / (MBS x DP)
    double devices_for_no_accumulation_exact = 0;   ///< ranks for which one micro-batch each is a step
    std::uint64_t devices_for_no_accumulation = 0;  ///< the fewest devices that reach the target with GA = 1
    bool more_devices_than_work = false;            ///< GA < 1: not every device has a micro-batch of this size
    std::vector<BatchChoice> choices;               ///< nearest to the target first
};

namespace detail {

/// The largest divisor of n between `low` and `high`; 0 if a million tries find none.
constexpr std::uint64_t largest_divisor(std::uint64_t n, std::uint64_t low, std::uint64_t high) noexcept {
    for (std::uint64_t tries = 1'000'000; high >= low && tries-- > 0; --high)
        if (n % high == 0) return high;
    return 0;
}

/// Completes a choice that has a micro-batch, an accumulation and devices.
inline BatchChoice complete_choice(const BatchTarget& target, BatchChoice c) {
    const std::uint64_t micro_batches = (CheckedSize(c.accumulate) * c.devices).value() - c.devices_with_one_less;
    c.samples = (CheckedSize(micro_batches) * c.micro_batch).value();
    c.tokens = (CheckedSize(c.samples) * target.sequence).value();
    const bool less = c.tokens < target.global_tokens;
    const std::uint64_t off = less ? target.global_tokens - c.tokens : c.tokens - target.global_tokens;
    c.relative_error = (less ? -1 : 1) * static_cast<double>(off) / static_cast<double>(target.global_tokens);
    if (c.devices > 1) {
        const auto more = static_cast<double>(micro_batches % c.devices) / static_cast<double>(c.devices);
        c.sums = std::popcount(micro_batches / c.devices) + more;
    }
    return c;
}

/// All ways to run the target. `step` is the tokens of a micro-batch, `round` those with one on every device.
inline std::vector<BatchChoice> batch_choices(const BatchTarget& target, std::uint64_t step, std::uint64_t round) {
    std::vector<BatchChoice> choices;
    const auto add = [&](BatchRounding rounding, std::uint64_t micro_batch, std::uint64_t accumulate,
                         std::uint64_t devices, std::uint64_t devices_with_one_less = 0) {
        choices.push_back(complete_choice(target, {rounding, micro_batch, accumulate, devices, devices_with_one_less}));
    };
    const std::uint64_t whole = target.global_tokens / round;
    const std::uint64_t micro = target.micro_batch, devices = target.devices;
    if (target.global_tokens % round == 0) {
        add(BatchRounding::none, micro, whole, devices);
        return choices;
    }
    if (whole > 0) add(BatchRounding::fewer_steps, micro, whole, devices);
    add(BatchRounding::more_steps, micro, whole + 1, devices);

    const std::uint64_t micro_batches = target.global_tokens / step;
    const bool divides = target.global_tokens % step == 0;
    // Over all devices, as evenly as possible. Every device has at least one.
    if (divides && whole > 0)
        add(BatchRounding::uneven_steps, micro, whole + 1, devices, (whole + 1) * devices - micro_batches);
    // On fewer devices, but more than half of them, with equal work.
    if (divides)
        if (const auto d =
                largest_divisor(micro_batches, devices / 2 + 1, devices < micro_batches ? devices : micro_batches);
            d != 0 && d != devices)
            add(BatchRounding::fewer_devices, micro, micro_batches / d, d);
    if (whole == 0 && micro_batches > 0 && choices.back().rounding != BatchRounding::fewer_devices)
        add(BatchRounding::fewer_devices, micro, 1, micro_batches);
    // Smaller micro-batches on all devices, which divide the samples of a device.
    // `row`: tokens of one sample on every device.
    if (const std::uint64_t row = round / micro; target.global_tokens % row == 0) {
        const std::uint64_t each = target.global_tokens / row;
        if (const auto m = largest_divisor(each, 1, micro - 1); m != 0)
            add(BatchRounding::smaller_micro_batch, m, each / m, devices);
    }
    return choices;
}

}  // namespace detail

/// The exact numbers for a target, and the ways to run it in whole numbers. Throws Error(invalid_argument) if a number
/// of the target is 0, or if a result does not fit into 64 bits.
inline BatchPlan plan_batch(const BatchTarget& target) {
    detail::check_positive({{target.global_tokens, "the number of tokens"},
                            {target.sequence, "the sequence length"},
                            {target.micro_batch, "the micro-batch"},
                            {target.devices, "the number of devices"}});
    const std::uint64_t step = (CheckedSize(target.micro_batch) * target.sequence).value();  // tokens per micro-batch
    const std::uint64_t round = (CheckedSize(step) * target.devices).value();                // with one on every device

    BatchPlan plan;
    const double tokens = static_cast<double>(target.global_tokens);
    plan.samples = tokens / static_cast<double>(target.sequence);
    plan.accumulate_exact = tokens / static_cast<double>(round);
    plan.devices_for_no_accumulation_exact = tokens / static_cast<double>(step);
    plan.devices_for_no_accumulation = target.global_tokens / step + (target.global_tokens % step != 0);
    plan.more_devices_than_work = target.global_tokens < round;

    plan.choices = detail::batch_choices(target, step, round);
    // By distance from the target.
    const auto off = [](const BatchChoice& c) { return c.relative_error < 0 ? -c.relative_error : c.relative_error; };
    gradsync::detail::sort_by(plan.choices,
                              [&](const BatchChoice& a, const BatchChoice& b) { return off(a) < off(b); });
    return plan;
}

/// The largest micro-batch up to `limit` for which `fits(micro_batch)` returns true, or 0 if 1 does not fit. It
/// doubles, then bisects, and never tries a size that is larger than one that did not fit. `fits` may run a step of
/// that size and catch std::bad_alloc and Errc::storage. Throws Error(invalid_argument) if `limit` is 0.
template <class Fits>
std::uint64_t find_micro_batch(Fits&& fits, std::uint64_t limit = std::uint64_t{1} << 20) {
    detail::check_positive({{limit, "the limit of the micro-batch"}});
    if (limit == static_cast<std::uint64_t>(-1)) --limit;
    std::uint64_t good = 0, bad = limit + 1;
    for (std::uint64_t next = 1; next < bad;) {
        if (fits(next)) good = next;
        else bad = next;
        const bool doubling = bad == limit + 1 && good != 0 && good <= limit / 2;
        next = doubling ? 2 * good : good + (bad - good + 1) / 2;
        if (next == good || next >= bad) break;
    }
    return good;
}

}  // namespace gradsync::inline v0_2::plan
