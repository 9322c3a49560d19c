// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace bench {

/// Seconds on a steady clock.
inline double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#endif
}

#if defined(__linux__)
/// The cores that the process was given. To be called first before any thread is pinned.
inline const cpu_set_t& given_cores() {
    static const cpu_set_t given = [] {
        cpu_set_t set;
        CPU_ZERO(&set);
        pthread_getaffinity_np(pthread_self(), sizeof set, &set);
        return set;
    }();
    return given;
}
#endif

/// How many cores the process was given: what `taskset` leaves of the machine's.
inline int cores() {
#if defined(__linux__)
    return std::max(1, CPU_COUNT(&given_cores()));
#else
    return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
#endif
}

/// Keeps the calling thread on one core of those that the process was given, where the system offers that.
inline void pin_to_core([[maybe_unused]] int number) {
#if defined(__linux__)
    const cpu_set_t& given = given_cores();
    cpu_set_t set;
    CPU_ZERO(&set);
    for (std::size_t core = 0; core < CPU_SETSIZE; ++core)
        if (CPU_ISSET(core, &given) && number-- == 0) CPU_SET(core, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
#endif
}

/// Lets it run on any of them again.
inline void unpin() {
#if defined(__linux__)
    pthread_setaffinity_np(pthread_self(), sizeof(cpu_set_t), &given_cores());
#endif
}

/// What is reported of a series of samples, in the samples' unit.
struct Summary {
    double median = 0;
    double min = 0;
    double max = 0;
    std::size_t count = 0;
    double lower_quartile = 0;
    double upper_quartile = 0;
};

inline Summary summarise(std::vector<double> samples) {
    if (samples.empty()) return {};
    std::sort(samples.begin(), samples.end());
    const std::size_t n = samples.size();
    const auto quantile = [&](double part) {  // between the two samples that it lies between
        const double place = part * static_cast<double>(n - 1);
        const auto below = static_cast<std::size_t>(place);
        const double above = samples[std::min(below + 1, n - 1)];
        return samples[below] + (place - static_cast<double>(below)) * (above - samples[below]);
    };
    return {quantile(0.5), samples.front(), samples.back(), n, quantile(0.25), quantile(0.75)};
}

/// Two times that belong together.
struct Fraction {
    double above = 0;
    double below = 0;
};

/// A barrier for threads that have a core each. Every thread owns a cache line, so that two of them meet for the
/// price of one handoff. It yields in the end: another program may have taken the core of the thread waited for.
class SpinBarrier {
public:
    explicit SpinBarrier(int size) : seats_(static_cast<std::size_t>(size)) {}

    void wait(int self) {
        const auto own = static_cast<std::size_t>(self);
        const long generation = seats_[own].generation.load(std::memory_order_relaxed) + 1;
        seats_[own].generation.store(generation, std::memory_order_release);
        for (const Seat& seat : seats_)
            for (int spins = 0; seat.generation.load(std::memory_order_acquire) < generation; ++spins) {
                if (spins < patience) pause();
                else std::this_thread::yield();
            }
    }

private:
    static constexpr int patience = 20000;
    struct alignas(64) Seat {
        std::atomic<long> generation{0};
    };
    std::vector<Seat> seats_;
};

/// Nanoseconds from a store on one core until another core sees it: says in which state the machine is. The least
/// of a few tries, so that other programs do not count. 0 where the process has one core: the two would wait for each
/// other's turn.
inline double handoff_latency() {
    if (cores() < 2) return 0;
    constexpr int round_trips = 2000;
    double best = 1e9;
    for (int attempt = 0; attempt < 5; ++attempt) {
        struct alignas(64) Flag {
            std::atomic<int> value{0};
        };
        Flag ping, pong;
        double seconds = 0;
        std::thread answering([&] {
            pin_to_core(1);
            for (int i = 1; i <= round_trips; ++i) {
                while (ping.value.load(std::memory_order_acquire) != i) {
                }
                pong.value.store(i, std::memory_order_release);
            }
        });
        std::thread asking([&] {
            pin_to_core(0);
            double begin = 0;
            for (int i = 1; i <= round_trips; ++i) {
                if (i == 2) begin = now();  // the other thread is there
                ping.value.store(i, std::memory_order_release);
                while (pong.value.load(std::memory_order_acquire) != i) {
                }
            }
            seconds = now() - begin;
        });
        asking.join();
        answering.join();
        best = std::min(best, seconds / (round_trips - 1) / 2 * 1e9);
    }
    return best;
}

}  // namespace bench
