// SPDX-License-Identifier: BSL-1.0
#pragma once
// Which part of a model is at work: what must be known where weights are not there all the time.

#include <cstddef>
#include <vector>

namespace gradsync_train {

/// Of each unit of a model (an embedding, a layer, a block) the parameters that it uses. Units are numbered as the
/// forward pass comes by them; tied weights belong to several.
using Units = std::vector<std::vector<std::size_t>>;

/// Whom a model tells that it begins to use the weights of a unit, and that it is done: in each forward pass, and again
/// in each backward pass. In between they must be where `Parameters::value` says.
class UnitAccess {
public:
    virtual void enter(std::size_t unit) = 0;
    virtual void leave(std::size_t unit) = 0;
    /// Do all weights stay in memory, in use or not?
    virtual bool weights_stay() const { return true; }

protected:
    ~UnitAccess() = default;
};

/// A unit in use, as long as this lives; nothing where nobody wants to know.
class UnitUse {
public:
    UnitUse(UnitAccess* access, std::size_t unit) : access_{access}, unit_{unit} {
        if (access_ != nullptr) access_->enter(unit_);
    }
    ~UnitUse() {
        if (access_ != nullptr) access_->leave(unit_);
    }
    UnitUse(const UnitUse&) = delete;
    UnitUse& operator=(const UnitUse&) = delete;

private:
    UnitAccess* access_;
    std::size_t unit_;
};

}  // namespace gradsync_train
