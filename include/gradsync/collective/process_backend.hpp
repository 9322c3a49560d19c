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

    int rank() const noexcept { return connection_.engine->rank(); }
    int size() const noexcept { return connection_.engine->size(); }

    /// Between machines, messages move only inside calls. A progress thread makes these calls, if any thread may send messages.
    bool wants_progress_thread() const { return connection_.paths.any_thread && connection_.paths.machine_count() > 1; }

    /// Says how the ranks reach one another, and why not by the faster way.
    std::string describe() const { return connection_.paths.describe() + connection_.engine->remark(); }

    /// Returns memory in which collectives are fastest; see the concept. Collective.
    collective::Memory allocate(std::size_t bytes) { return connection_.engine->allocate(bytes); }

protected:
    ProcessBackend() = default;
    explicit ProcessBackend(Connection connection) noexcept : connection_(std::move(connection)) {}

    Connection connection_;

private:
    friend EngineCollectives<Derived, collective::Engine>;

    int world_rank() const noexcept { return connection_.engine->world_rank(rank()); }
    const std::shared_ptr<collective::Engine>& shared_engine() const noexcept { return connection_.engine; }
    Derived join(const collective::Group& group) { return Derived({connection_.engine->split(group), connection_.paths.of(group)}); }
};

}  // namespace gradsync::inline v0_2::detail
