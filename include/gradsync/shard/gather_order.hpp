// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "../core/math.hpp"

namespace gradsync::inline v0_2::detail {

/// Remembers the order in which a step gathered its units, and predicts the next ones while a step follows the same order.
class GatherOrder {
public:
    /// Predicts as many units as `ahead` says.
    explicit GatherOrder(std::size_t ahead) noexcept : ahead_(ahead) {}

    /// Records that unit u is gathered. Returns the units that followed here in the previous step, the next one first.
    std::span<const std::size_t> next(std::size_t u) {
        if (now_.size() < most) now_.push_back(u);
        // After a forward without a backward, such as a validation's, the order starts over.
        if (at_ >= before_.size() || before_[at_] != u) at_ = !before_.empty() && before_[0] == u ? 0 : before_.size();
        if (at_ >= before_.size()) return {};
        return predicted(++at_);
    }

    /// Ends the step. Returns the units that the next one is expected to begin with.
    std::span<const std::size_t> end_step() {
        before_.swap(now_);
        now_.clear();
        at_ = 0;
        return predicted(0);
    }

private:
    std::span<const std::size_t> predicted(std::size_t from) const noexcept {
        return std::span(before_).subspan(from, smaller(ahead_, before_.size() - from));
    }

    static constexpr std::size_t most = std::size_t{1} << 16;  ///< gathers without a step; beyond that nobody is training

    std::size_t ahead_;
    std::vector<std::size_t> before_, now_;
    std::size_t at_ = 0;  ///< position in `before_`
};

}  // namespace gradsync::inline v0_2::detail
