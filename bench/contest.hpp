// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <barrier>
#include <cstddef>
#include <optional>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "measure.hpp"

namespace bench {

/// Something that several ranks do together, over and over.
class Contestant {
public:
    virtual ~Contestant() = default;
    /// False for a rank that has nothing to do in it; such a rank sleeps meanwhile.
    virtual bool takes_part([[maybe_unused]] int rank) const { return true; }
    /// True if every rank must stay on a core of its own, whatever the options say.
    virtual bool needs_own_cores() const { return false; }
    /// True if no rank may be kept on a core, whatever the options say.
    virtual bool roams() const { return false; }
    /// Returns when all ranks that take part have called it.
    virtual void meet(int rank) = 0;
    /// Does it `times` times; returns the seconds that count, this rank's.
    virtual double run(int rank, int times) = 0;

protected:
    /// Seconds that `f()` takes.
    template <class F>
    static double time(F&& f) {
        const double begin = now();
        f();
        return now() - begin;
    }
};

struct ContestOptions {
    double seconds = 1;  ///< for all contestants together, roughly
    int least_rounds = 15;
    int most_rounds = 1001;
    int rounds = 0;    ///< exactly so many, if not 0
    bool pin = true;   ///< keep every rank on one core: rank r on core r, modulo the number of cores
    int warm_ups = 0;  ///< runs before every batch, which do not count: contestants with buffers of their own find
                       ///< those of others in the caches
    /// The number of the contestant that runs directly before and after each of the others, if there are any: where a
    /// batch takes so long that the machine changes its state within a round. What runs after one runs before the next,
    /// over all rounds; but where the next is the same contestant again, which would share it with itself, it runs once
    /// more between the two, so that no two pairs of a contestant have a time in common.
    std::optional<std::size_t> reference = {};
};

/// Of one contestant, by round: seconds for doing it once, the slowest rank's.
struct Samples {
    std::vector<double> seconds;
    std::vector<double> reference;  ///< the reference's, the mean of before and after; empty where there is none
};
using ContestResult = std::vector<Samples>;

/// How a contestant compares with the reference, pair by pair. A change of the machine's state spoils the pairs in which
/// it happens, and the median does not see these.
struct Paired {
    explicit Paired(const Samples& samples) {
        std::vector<double> ratios, differences;
        for (std::size_t i = 0; i < samples.reference.size(); ++i) {
            pairs.push_back({samples.seconds[i], samples.reference[i]});
            ratios.push_back(samples.reference[i] / samples.seconds[i]);
            differences.push_back(samples.seconds[i] - samples.reference[i]);
        }
        ratio = summarise(std::move(ratios));
        difference = summarise(std::move(differences));
    }
    Summary ratio;                ///< the reference's time over the contestant's
    Summary difference;           ///< the contestant's time less the reference's
    std::vector<Fraction> pairs;  ///< the contestant's time and the reference's
};

/// One rank's part in a contest; ranks are threads or processes. In every round each contestant runs one batch, of
/// about a third of a millisecond at least; the reference as many as there are others, one more where a contestant follows
/// upon itself (it does where there are only one or two others), and one before the first round. The machine may change its
/// state, or be busy with something else, at any moment: what happens to one contestant then happens to all. Who begins
/// changes from round to round. `slowest(seconds)` returns the most of what the ranks say, once all have called it;
/// meanwhile it sleeps: who has nothing to do must not take a core from those who have.
template <class Slowest>
ContestResult take_part(int rank, std::span<Contestant* const> contestants, const ContestOptions& options, Slowest&& slowest) {
    constexpr double batch_seconds = 300e-6;
    std::vector<int> batches(contestants.size(), 1);
    ContestResult samples(contestants.size());
    const bool in_pairs = options.reference && contestants.size() > 1;  // the reference alone is one like any other
    const std::size_t reference = in_pairs ? *options.reference : contestants.size();

    const auto batch = [&](std::size_t which) {
        Contestant& contestant = *contestants[which];
        double seconds = 0;
        if (contestant.takes_part(rank)) {
            if ((options.pin && !contestant.roams()) || contestant.needs_own_cores()) pin_to_core(rank % cores());
            else unpin();
            if (options.warm_ups != 0) contestant.run(rank, options.warm_ups);
            contestant.meet(rank);
            seconds = contestant.run(rank, batches[which]);
        }
        return slowest(seconds) / batches[which];  // the same on all ranks, so that what follows from it is too
    };

    // Warm-up; it also finds the sizes of the batches.
    double round_seconds = 0;
    for (std::size_t c = 0; c < contestants.size(); ++c) {
        double once = batch(c);
        for (int i = 0; i < (once < 10 * batch_seconds ? 4 : once < 100 * batch_seconds ? 1 : 0); ++i) {
            batches[c] = std::clamp(static_cast<int>(batch_seconds / once), 1, 10000);
            once = std::min(once, batch(c));
        }
        const std::size_t others = contestants.size() - 1;  // of two, a round begins with the last one twice in three times
        const double turns = c != reference ? 1 : static_cast<double>(others) + (others == 1 ? 1 : others == 2 ? 2.0 / 3 : 0);
        round_seconds += once * (batches[c] + options.warm_ups) * turns;
    }
    const auto rounds = static_cast<std::size_t>(
        options.rounds != 0 ? options.rounds
                            : std::clamp(static_cast<int>(options.seconds / round_seconds), options.least_rounds, options.most_rounds));
    const auto measure = [&](std::size_t c) { return samples[c].seconds.emplace_back(batch(c)); };
    double before = in_pairs ? measure(reference) : 0;
    std::size_t last = reference;
    for (std::size_t round = 0; round < rounds; ++round) {
        for (std::size_t turn = 0; turn < contestants.size(); ++turn) {
            const std::size_t c = (round + turn) % contestants.size();
            if (c == reference) continue;
            if (in_pairs && c == last) before = measure(reference);
            measure(c);
            last = c;
            if (!in_pairs) continue;
            const double after = measure(reference);
            samples[c].reference.push_back((before + after) / 2);
            before = after;
        }
    }
    return samples;
}

/// Measures the contestants against each other; the ranks are threads.
inline ContestResult run_contest(int ranks, std::span<Contestant* const> contestants, ContestOptions options = {}) {
    struct alignas(64) Duration {
        double seconds = 0;
    };
    std::vector<Duration> durations(static_cast<std::size_t>(ranks));
    std::barrier<> everybody(ranks);
    ContestResult samples;
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank)
        threads.emplace_back([&, rank] {
            const auto slowest = [&](double seconds) {
                durations[static_cast<std::size_t>(rank)].seconds = seconds;
                everybody.arrive_and_wait();
                double most = 0;
                for (const Duration& duration : durations) most = std::max(most, duration.seconds);
                everybody.arrive_and_wait();
                return most;
            };
            ContestResult own = take_part(rank, contestants, options, slowest);
            if (rank == 0) samples = std::move(own);
        });
    for (std::thread& thread : threads) thread.join();
    return samples;
}

}  // namespace bench
