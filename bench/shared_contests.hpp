// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace bench {

/// A contest is the measurement of all its contestants: whichever is asked for first runs it, and the others report the
/// same one.
template <class Measured>
class SharedContests {
public:
    /// What came out for `who` of the contest of this name, which `measure()` runs for all `contestants`.
    template <class Measure>
    Measured take(const std::string& contest, const std::vector<std::string>& contestants, const std::string& who, Measure&& measure) {
        auto& own = left_[{contest, who}];
        if (own.empty()) {
            const Measured measured = measure();
            for (const std::string& each : contestants) left_[{contest, each}].push_back(measured);
        }
        const Measured measured = own.front();
        own.pop_front();
        return measured;
    }

private:
    std::map<std::pair<std::string, std::string>, std::deque<Measured>> left_;
};

}  // namespace bench
