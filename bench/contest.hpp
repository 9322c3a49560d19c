#pragma once

#include <algorithm>
#include <barrier>
#include <span>
#include <thread>
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
    bool pin = true;  ///< keep every rank on one core: rank r on core r, modulo the number of cores
};

/// Samples of each contestant: seconds for doing it once, the slowest rank's.
using ContestResult = std::vector<std::vector<double>>;

/// Measures the contestants against each other: in every round each of them runs one batch, of about a third of a
/// millisecond at least. The machine may change its state, or be busy with something else, at any moment: what
/// happens to one contestant then happens to all.
inline ContestResult run_contest(int ranks, std::span<Contestant* const> contestants, ContestOptions options = {}) {
    constexpr double batch_seconds = 300e-6;
    struct alignas(64) Duration {
        double seconds = 0;
    };
    std::vector<Duration> durations(static_cast<std::size_t>(ranks));
    std::vector<int> batches(contestants.size(), 1);
    ContestResult samples(contestants.size());
    int rounds = 0;
    std::barrier<> everybody(ranks);  // sleeps: who has nothing to do must not take a core from those who have

    const auto batch = [&](std::size_t which, int rank) {
        Contestant& contestant = *contestants[which];
        everybody.arrive_and_wait();
        double& seconds = durations[static_cast<std::size_t>(rank)].seconds;
        seconds = 0;
        if (contestant.takes_part(rank)) {
            if (options.pin || contestant.needs_own_cores()) pin_to_core(rank % cores());
            else unpin();
            contestant.meet(rank);
            seconds = contestant.run(rank, batches[which]);
        }
        everybody.arrive_and_wait();
        double slowest = 0;
        for (const Duration& duration : durations) slowest = std::max(slowest, duration.seconds);
        return slowest / batches[which];
    };

    const auto run_rank = [&](int rank) {
        // Warm-up; it also finds the sizes of the batches.
        double round_seconds = 0;
        for (std::size_t c = 0; c < contestants.size(); ++c) {
            double once = batch(c, rank);
            for (int i = 0; i < 4; ++i) {
                if (rank == 0) batches[c] = std::clamp(static_cast<int>(batch_seconds / once), 1, 10000);
                once = std::min(once, batch(c, rank));
            }
            round_seconds += once * batches[c];
        }
        if (rank == 0)
            rounds = std::clamp(static_cast<int>(options.seconds / round_seconds), options.least_rounds,
                                options.most_rounds);
        everybody.arrive_and_wait();
        for (int round = 0; round < rounds; ++round)
            for (std::size_t c = 0; c < contestants.size(); ++c) {
                const double seconds = batch(c, rank);
                if (rank == 0) samples[c].push_back(seconds);
            }
    };

    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank) threads.emplace_back(run_rank, rank);
    for (std::thread& thread : threads) thread.join();
    return samples;
}

}  // namespace bench
