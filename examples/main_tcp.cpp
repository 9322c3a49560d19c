// SPDX-License-Identifier: BSL-1.0
// gradsync_train --backend tcp: the ranks are processes that anything may have started, as long as it told each its number, and this is
// one of them.

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <gradsync/elastic/elastic_job.hpp>
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

/// The ranks that have met, as the training loop sees them.
class ElasticRanks final : public Elastic {
public:
    ElasticRanks(gs::ElasticJob& job, gs::TcpBackend& comm, const Options& o)
        : job_{job}, comm_{comm}, options_{.accumulation = gs::Accumulation::in_buckets, .micro_batches = o.micro_batches} {}

    void restore(const StateViews& state, const std::optional<gs::elastic::AnyShards>& shards,
                 const std::function<std::uint64_t()>& load) override {
        const gs::Restored restored = job_.restore(comm_, options_, state.views, load, shards);
        if (comm_.rank() != 0 || restored.from == gs::Restored::From::start) return;
        const std::string again =
            restored.again == 0 ? "" : ", and " + std::to_string(restored.again) + " that lost ranks had done are done again";
        std::fprintf(stderr, "gradsync_train: %d %s after step %llu%s%s\n", comm_.size(),
                     comm_.size() == 1 ? "rank goes on" : "ranks go on", static_cast<unsigned long long>(restored.step),
                     restored.from == gs::Restored::From::checkpoint ? ", from the checkpoint: all that had a newer state were lost" : "",
                     again.c_str());
    }
    bool goes_on() override { return job_.goes_on(); }
    void update(const std::function<void()>& change) override { job_.update(change); }
    bool is_current() override { return job_.is_current(); }

private:
    gs::ElasticJob& job_;
    gs::TcpBackend& comm_;
    gs::ReducerOptions options_;
};

gs::ElasticJob* leaving = nullptr;  // asked to leave by SIGTERM

/// This process, in a job whose ranks come and go.
int run_elastic(int argc, char** argv) {
    const gs::Job place = place_in_job("--elastic");
    gs::ElasticJob elastic{place};
    leaving = &elastic;
    const std::shared_ptr<void> not_any_more(nullptr, [](void*) { leaving = nullptr; });
    std::signal(SIGTERM, [](int) {
        if (leaving != nullptr) leaving->request_leave();
    });
    Outliving outliving;
    Job job = prepare(parse_options(argc, argv, place.max_ranks != 0 ? place.max_ranks : place.size), place.rank == 0);
    job.outliving = &outliving;
    if (job.options.shard != "none") elastic.keep_every(job.options.keep_every);
    int exit_code = 0;
    elastic.run(
        [&](gs::TcpBackend& comm) {
            ElasticRanks ranks{elastic, comm, job.options};
            job.elastic = &ranks;
            const Results results = run_rank(CpuOps{}, comm, job);
            if (results.changes) return;
            // If this rank is lost before all have ended, another one does it.
            exit_code = comm.rank() == 0 ? exit_code_of([&] { present(job, results); }) : 0;
        },
        {.timeout = time_limit(job.options), .shared_memory = !job.options.no_shared_memory});
    return exit_code;
}

}  // namespace

int main_over_tcp(int argc, char** argv) {
    const auto is_elastic = [](const char* argument) { return std::string_view(argument) == "--elastic"; };
    if (std::any_of(argv, argv + argc, is_elastic)) {
        return exit_code_of([&] { return run_elastic(argc, argv); });
    }
    std::optional<TcpProcess> process;
    if (const int code = exit_code_of([&] { process.emplace(place_in_job("--backend tcp")); }); code != 0) return code;
    return run_process(*process, argc, argv);
}

}  // namespace gradsync_train
