// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <exception>
#include <memory>
#include <utility>

#include "engine.hpp"

namespace gradsync::inline v0_2::detail {

/// While it lives, collectives started on the engine are held back; they are launched as one group when it is destroyed. A failure then
/// counts as one of the collectives, as at any other start. If an exception destroys it, nothing is launched. A default-constructed one
/// does nothing.
class [[nodiscard]] NcclGroup {
public:
    NcclGroup() = default;
    explicit NcclGroup(std::shared_ptr<NcclEngine> engine) noexcept : engine_(std::move(engine)) { engine_->open_group(); }
    NcclGroup(NcclGroup&&) noexcept = default;
    NcclGroup& operator=(NcclGroup&& other) noexcept {
        NcclGroup moved(std::move(other));
        engine_.swap(moved.engine_);
        std::swap(exceptions_, moved.exceptions_);
        return *this;
    }
    ~NcclGroup() {
        if (engine_) engine_->close_group(std::uncaught_exceptions() > exceptions_);
    }

private:
    std::shared_ptr<NcclEngine> engine_;
    int exceptions_ = std::uncaught_exceptions();  ///< propagating when it was made
};

}  // namespace gradsync::inline v0_2::detail
