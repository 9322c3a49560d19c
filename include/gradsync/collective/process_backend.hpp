// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "../core/backend_abilities.hpp"
#include "connect.hpp"
#include "engine.hpp"
#include "engine_collectives.hpp"

namespace gradsync::inline v0_2::detail {

/// The common part of backends whose ranks are processes: ranks share memory on one machine and send messages between several. Derived must
/// be constructible from a Connection by this class (a friend).
template <class Derived>
class ProcessBackend : public EngineCollectives<Derived, collective::Engine> {
public:
    static constexpr BackendAbilities abilities{.progress_thread = true, .poll = true, .failed = true, .tags = true};

    /// Between machines, messages move only inside calls. A progress thread makes these calls, if any thread may send messages.
    bool wants_progress_thread() const { return paths_.any_thread && paths_.machines.count() > 1; }

    /// Says how the ranks reach one another, and why not by the faster way.
    std::string describe() const { return paths_.describe() + this->engine_->remark(); }

    /// Returns memory in which collectives are fastest; see the concept. Collective.
    collective::Memory allocate(std::size_t bytes) { return this->engine_->allocate(bytes); }

protected:
    explicit ProcessBackend(Connection connection) noexcept
        : EngineCollectives<Derived, collective::Engine>(std::move(connection.engine)), paths_(std::move(connection.paths)) {}

    Paths paths_;

private:
    friend EngineCollectives<Derived, collective::Engine>;

    Derived join(const collective::Group& group) { return Derived({this->engine_->split(group), paths_.of(group)}); }
};

}  // namespace gradsync::inline v0_2::detail
