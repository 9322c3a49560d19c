#pragma once

#include <memory>
#include <string>
#include <utility>

#include "../bootstrap/job.hpp"
#include "../bootstrap/tcp_rendezvous.hpp"
#include "../collective/engine.hpp"
#include "../core/backend.hpp"
#include "engine_collectives.hpp"
#include "tcp_engine.hpp"

namespace gradsync::inline v0 {

struct TcpOptions {
    std::chrono::nanoseconds timeout = std::chrono::minutes(5);  ///< of every wait; `set_timeout` changes it
};

/// Ranks that are processes (or threads) with connections of TCP between them; nothing but sockets is needed.
///
/// - Every collective begins with a message from each rank to each, data follows in rounds (see docs/design.md). Messages move
///   only inside `progress()`, `test()` and `wait()`, which any thread may call: between machines `OverlapBackward` has one that does.
/// - Sums are made by the kernel of ThreadBackend, in rank order: the bits are the same, for every bucket and overlap policy.
/// - If a rank fails, leaves early, dies or reaches its time limit, every other rank's wait throws an Error that names it. A
///   death shows at once, on other machines too: its system closes the connections.
class TcpBackend : public detail::EngineCollectives<TcpBackend, collective::Engine> {
public:
    /// The ranks that meet at `rendezvous`, which may go afterwards. Collective.
    template <Rendezvous R>
    explicit TcpBackend(R& rendezvous, TcpOptions options = {}) : engine_(detail::make_tcp_engine(rendezvous, options.timeout)) {}

    /// The ranks of the job that the environment tells of; see `Job::from_environment`. Collective.
    static TcpBackend from_environment(TcpOptions options = {}) {
        TcpRendezvous rendezvous(Job::from_environment(), {.timeout = options.timeout});
        return TcpBackend(rendezvous, options);
    }

    int rank() const noexcept { return engine_->rank(); }
    int size() const noexcept { return engine_->size(); }

    /// Where the ranks (of the first communicator, for parts of it too) are on several machines, messages move only inside calls: those of
    /// a thread.
    bool wants_progress_thread() const noexcept { return engine_->world().spans_machines; }

    std::string describe() const { return std::to_string(size()) + (size() == 1 ? " process" : " processes that send messages over TCP"); }

    /// Memory in which collectives are fastest; see the concept.
    collective::Memory allocate(std::size_t bytes) { return engine_->allocate(bytes); }

private:
    friend EngineCollectives;
    friend class NcclBackend;

    explicit TcpBackend(std::shared_ptr<collective::Engine> engine) noexcept : engine_(std::move(engine)) {}

    int world_rank() const noexcept { return engine_->world_rank(rank()); }
    const std::shared_ptr<collective::Engine>& shared_engine() const noexcept { return engine_; }
    TcpBackend join(const collective::Group& group) { return TcpBackend(engine_->split(group)); }

    std::shared_ptr<collective::Engine> engine_;
};

static_assert(Backend<TcpBackend>);

}  // namespace gradsync::inline v0
