// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <span>
#include <vector>

namespace gradsync::inline v0_2::detail {

/// Remembers in which order units were gathered in a step, and tells what comes next where a step goes the same way.
class GatherOrder {
public:
    /// Unit u is asked for; returns those that followed here in the step before, the next one first.
    std::span<const std::size_t> next(std::size_t u) {
        if (now_.size() < most) now_.push_back(u);
        // A forward without a backward, such as a validation's, is followed by another beginning.
        if (at_ >= before_.size() || before_[at_] != u) at_ = !before_.empty() && before_[0] == u ? 0 : before_.size();
        if (at_ >= before_.size()) return {};
        return std::span<const std::size_t>(before_).subspan(++at_);
    }

    /// The step is over. Returns what the next one begins with.
    std::span<const std::size_t> end_step() {
        before_.swap(now_);
        now_.clear();
        at_ = 0;
        return before_;
    }

private:
    static constexpr std::size_t most = std::size_t{1} << 16;  ///< gathers without a step: nobody trains here

    std::vector<std::size_t> before_, now_;
    std::size_t at_ = 0;  ///< in `before_`
};

}  // namespace gradsync::inline v0_2::detail
