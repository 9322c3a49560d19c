// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <span>

#include "../core/list.hpp"
#include "../core/math.hpp"

namespace gradsync::inline v0_2::detail {

/// Remembers the order in which a step gathered its units. Predicts the next ones while a step follows the same order.
class GatherOrder {
public:
    /// Predicts `ahead` units.
    explicit GatherOrder(std::size_t ahead) noexcept : ahead_(ahead) {}

    /// Records that unit u is gathered. Returns the units that followed it in the previous step, the next one first.
    std::span<const std::size_t> next(std::size_t u) {
        if (now_.size() < most) now_.push_back(u);
        // After a forward without a backward, such as in validation, the order starts over.
        if (at_ >= before_.size() || before_[at_] != u) at_ = !before_.empty() && before_[0] == u ? 0 : before_.size();
        if (at_ >= before_.size()) return {};
        return predicted(++at_);
    }

    /// Ends the step. Returns the units that the next step should begin with.
    std::span<const std::size_t> end_step() {
        std::swap(before_, now_);
        now_.clear();
        at_ = 0;
        return predicted(0);
    }

private:
    std::span<const std::size_t> predicted(std::size_t from) const noexcept {
        return std::span(before_).subspan(from, smaller(ahead_, before_.size() - from));
    }

    /// Gathers without a step; beyond that it records no more.
    static constexpr std::size_t most = std::size_t{1} << 16;

    std::size_t ahead_;
    List<std::size_t> before_, now_;
    std::size_t at_ = 0;  ///< position in `before_`
};

}  // namespace gradsync::inline v0_2::detail
