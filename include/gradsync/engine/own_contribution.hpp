// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <optional>

namespace gradsync::inline v0_2::detail {

/// Says whether this rank has a batch in a step, and holds the weight that the trainer has set for it.
class OwnContribution {
public:
    void set_weight(double weight) noexcept { weight_ = weight; }
    const std::optional<double>& weight() const noexcept { return weight_; }
    /// `some_have_none`: other ranks may have no batch.
    void set_batch(bool has_batch, bool some_have_none) noexcept {
        has_batch_ = has_batch;
        some_have_none_ = some_have_none;
    }
    bool has_batch() const noexcept { return has_batch_; }
    bool some_have_none() const noexcept { return some_have_none_; }
    /// Ends the step. The next one has a batch everywhere, unless told otherwise.
    void reset() noexcept { *this = {}; }

private:
    std::optional<double> weight_;
    bool has_batch_ = true, some_have_none_ = false;
};

}  // namespace gradsync::inline v0_2::detail
