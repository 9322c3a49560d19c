// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <thread>
#include <vector>

#include "contest.hpp"

namespace bench {

/// A contestant whose ranks are threads, of rank 0 of a contest whose ranks are processes.
class AmongThreads final : public Contestant {
public:
    AmongThreads(Contestant& contestant, int threads, bool pin) : contestant_(contestant), threads_(threads), pin_(pin) {}

    bool takes_part(int rank) const override { return rank == 0; }
    void meet(int) override {}
    double run(int, int times) override {
        std::vector<double> seconds(static_cast<std::size_t>(threads_));
        std::vector<std::thread> threads;
        for (int t = 0; t < threads_; ++t)
            threads.emplace_back([&, t] {
                if (!contestant_.takes_part(t)) return;
                if (pin_ || contestant_.needs_own_cores()) pin_to_core(t % cores());  // else it is where the rank is: anywhere
                contestant_.meet(t);
                seconds[static_cast<std::size_t>(t)] = contestant_.run(t, times);
            });
        for (std::thread& thread : threads) thread.join();
        return *std::max_element(seconds.begin(), seconds.end());
    }

private:
    Contestant& contestant_;
    int threads_;
    bool pin_;
};

}  // namespace bench
