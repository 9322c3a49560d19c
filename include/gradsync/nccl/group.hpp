// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <exception>
#include <memory>
#include <utility>

#include "engine.hpp"

namespace gradsync::inline v0_2::detail {

/// While it lives, what is started on the engine waits; it leaves as one group when the object goes. A failure then is one of the
/// collectives, as that of any other start is. Nothing leaves where it goes as an exception passes. A default-constructed one does
/// nothing.
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
    int exceptions_ = std::uncaught_exceptions();  ///< on their way when it was made
};

}  // namespace gradsync::inline v0_2::detail
