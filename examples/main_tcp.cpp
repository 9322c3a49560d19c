// SPDX-License-Identifier: BSL-1.0
// gradsync_train --backend tcp: the ranks are processes that anything may have started, as long as it told each its number, and this is
// one of them.

#include <memory>
#include <optional>
#include <utility>

#include <gradsync/elastic/kept_state.hpp>
#include <gradsync/gradsync.hpp>

#include "place_in_job.hpp"
#include "run_process.hpp"

namespace gradsync_train {

namespace {

class StateKeeper final : public Keeper {
public:
    StateKeeper(gs::Membership& job, gs::TcpBackend& comm, const StateViews& state)
        : kept_{job, comm, state.views, state.is_replicated ? gs::StateKind::replicated : gs::StateKind::own, state.name} {}

    bool has_state() const override { return kept_.newest().has_value(); }
    void restore() override { (void)kept_.restore(); }
    void keep(std::uint64_t step) override { kept_.keep(step); }

private:
    gs::KeptState kept_;
};

/// Ranks that are left after a failure meet again, if a launcher starts the lost one again.
class TcpProcess {
public:
    explicit TcpProcess(gs::Job job) : place_(job), job_(std::move(job)) {}

    int rank() const { return place_.rank; }
    int size() const { return place_.size; }
    gs::TcpRendezvous meet(std::chrono::nanoseconds limit) { return job_.meet({.timeout = limit}); }
    gs::TcpBackend connect(gs::TcpRendezvous& ranks, const Options& o) {
        return gs::TcpBackend(ranks, {.timeout = time_limit(o), .shared_memory = !o.no_shared_memory});
    }
    MakeKeeper keeper(gs::TcpBackend& comm) {
        if (place_.store.empty()) return nullptr;
        return [this, &comm](const StateViews& state) { return std::make_unique<StateKeeper>(job_, comm, state); };
    }
    bool goes_on(const gs::Error& error) { return job_.goes_on(error); }
    bool is_over() const { return job_.is_over(); }
    void end(gs::TcpBackend& comm) { job_.end(comm); }

private:
    gs::Job place_;
    gs::Membership job_;
};

}  // namespace

int main_over_tcp(int argc, char** argv) {
    std::optional<TcpProcess> process;
    if (const int code = exit_code_of([&] { process.emplace(place_in_job("--backend tcp")); }); code != 0) return code;
    return run_process(*process, argc, argv);
}

}  // namespace gradsync_train
