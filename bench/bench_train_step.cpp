// SPDX-License-Identifier: BSL-1.0
// Whole steps of the example trainer's models, by the way in which ranks are kept together.
//
//     bench_train_step [--seconds=S] [--rounds=N] [--no-pin] [Google Benchmark's flags]
//
// Benchmarks are named train_step/MODEL/STRATEGY/BACKEND/ranks:N. MODEL is transformer or mlp (see strategies.hpp).
// STRATEGY is one of
//
//     independent             copies that are not synchronised: the limit
//     meeting                 copies that wait for one another after the backward, and exchange nothing
//     naive                   one collective a parameter, after the backward
//     flat                    one collective, after the backward
//     overlap_per_parameter   one collective a parameter, each as soon as its gradient is final
//     buckets_1MB ...         SizeCappedBuckets and OverlapBackward; 25 MB is the default
//     optimal                 OptimalBuckets, planned from the first steps, and OverlapBackward
//     forward                 the default's buckets and OverlapForward
//     zero1, zero2, zero3     sharded optimizer, gradients, weights
//     fused, fused_shared     zero1 with the optimizer inside the reduction (StepInside); the same with one set of
//                             weights for all ranks, which are threads
//     timeline                as buckets_25MB, while a Timeline keeps what happens
//
// BACKEND is threads (ThreadBackend), mpi (MpiBackend, processes that share memory), mpi_messages (processes that send
// messages) or tcp (TcpBackend, processes that share memory). The strategies of one model, backend and number of ranks
// that the filter selects take turns, a step each, all ranks starting together; a step of `independent` stands directly
// before and after each of them, and the two and the mean of these are a pair. `timeline` is paired with buckets_25MB in
// the same way, in a contest of its own.
//
// Times are medians over the rounds, of the slowest rank. Counters, times in seconds: independent_ratio, the time of
// `independent` over this one's, and exposed_against_independent, this one's less that of `independent`: medians over the
// pairs, and their quartiles as ..._q1 and ..._q3 (of `timeline`: unwatched_ratio and exposed_against_unwatched); zero1_ratio,
// of `fused` and `fused_shared`, the time of `zero1` in the same round over this one's; exposed and communication, of a
// step (StepStatistics, medians, of the rank where it is most); overlap_ratio, 1 - exposed / communication;
// samples_per_second and tokens_per_second, of all ranks together; state_bytes, of weights, gradients and the optimizer on
// one rank; time_min, time_max, samples; handoff_ns, the state of the machine. `forward` and `zero3` are without
// communication and overlap_ratio: what they gather for the next step is under way while others take their turns, so that
// it would count the steps of these. In JSON, a benchmark's label holds the pairs: "pairs STEP/REFERENCE ...",
// seconds.

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <gradsync/backend/thread_backend.hpp>
#include <gradsync/observe/observer.hpp>

#include "flags.hpp"
#include "on_each_rank.hpp"
#include "reporting.hpp"
#include "shared_contests.hpp"
#include "train_contest.hpp"
#ifdef GRADSYNC_BENCH_MPIEXEC
#include "under_mpi.hpp"
#endif

namespace {

using namespace bench;

ContestOptions contest_options{.seconds = 5, .least_rounds = 3, .reference = 0};

struct Case {
    std::string model;
    std::string backend;
    int ranks = 2;

    std::string name(const std::string& strategy) const {
        return "train_step/" + model + "/" + strategy + "/" + backend + "/ranks:" + std::to_string(ranks);
    }
    double samples() const { return static_cast<double>(ranks) * static_cast<double>(options().micro_batch); }
    double tokens() const {
        const trainer::Options o = options();
        return samples() * static_cast<double>(model == "mlp" ? 1 : o.context);
    }

private:
    trainer::Options options() const { return options_for(model, {}); }
};

/// Of one strategy in a contest.
struct Figures {
    Samples samples;
    Observed observed;
};
struct Measured {
    std::map<std::string, Figures> of;  ///< by strategy
    double handoff = 0;
};

/// The strategies of these names, the first of which is the reference.
Measured measure_threads(const Case& c, const std::vector<std::string>& names) {
    const std::size_t ranks = static_cast<std::size_t>(c.ranks);
    std::vector<std::unique_ptr<Trainee>> trainees(ranks);
    on_each_rank(c.ranks, [&](std::size_t r) { trainees[r] = make_trainee(c.model, static_cast<int>(r)); });
    for (const std::string& name : names) {
        const Strategy& each = strategy(name);
        const std::vector<gradsync::ThreadBackend> together = gradsync::ThreadBackend::make(c.ranks);
        on_each_rank(c.ranks, [&](std::size_t r) { learn(*trainees[r], c.model, each, together[r], gradsync::ThreadBackend::make(1)[0]); });
    }

    SpinBarrier everybody(c.ranks);
    auto steps = train_steps(names.size(), trainees, [&](int rank) { everybody.wait(rank); });
    const ContestResult samples = run_contest(c.ranks, pointers_to(steps), contest_options);
    Measured measured;
    on_each_rank(c.ranks, [&](std::size_t r) { trainees[r]->end(); });

    std::vector<Observed> observed;
    for (std::size_t s = 0; s < names.size(); ++s) {
        observed.push_back(trainees[0]->observed(s));
        for (std::size_t r = 1; r < ranks; ++r) observed[s] = greatest(observed[s], trainees[r]->observed(s));
        measured.of[names[s]].samples = samples[s];
        measured.of[names[s]].observed = observed[s];
    }
    check_equal_losses(names, observed);
    return measured;
}

#ifdef GRADSYNC_BENCH_MPIEXEC
Measured measure_mpi(const Case& c, const std::vector<std::string>& names) {
    std::string arguments = c.model + " " + c.backend + " " + arguments_of(contest_options);
    for (const std::string& name : names) arguments += " " + name;
    Printed printed = run_under_mpi(GRADSYNC_BENCH_MPIEXEC, c.ranks, "bench_mpi_train_step", arguments);
    Measured measured;
    for (const std::string& name : names)
        measured.of[name] = {{printed.at(name + "/seconds"), printed[name + "/reference"]},
                             {.exposed_seconds = printed.at(name + "/exposed")[0],
                              .communication_seconds = printed.at(name + "/communication")[0],
                              .state_bytes = printed.at(name + "/state_bytes")[0]}};
    return measured;
}
#endif

void report_case(benchmark::State& state, const Case& c, const std::string& who, const Measured& measured) {
    const auto& [samples, observed] = measured.of.at(who);
    const Summary own = summarise(samples.seconds);
    report(state, own, measured.handoff);
    std::string label;
    if (!samples.reference.empty()) {
        const std::string reference = strategy(who).watched ? "unwatched" : "independent";
        const Paired paired(samples);
        report(state, reference + "_ratio", paired.ratio);
        report(state, "exposed_against_" + reference, paired.difference);
        report(state, label, "pairs", paired.pairs);
    }
    if (const auto zero1 = measured.of.find("zero1"); strategy(who).steps_inside() && zero1 != measured.of.end()) {
        const std::vector<double>&theirs = zero1->second.samples.seconds, &ours = samples.seconds;
        std::vector<double> ratios;
        for (std::size_t i = 0; i < std::min(theirs.size(), ours.size()); ++i) ratios.push_back(theirs[i] / ours[i]);
        report(state, "zero1_ratio", summarise(std::move(ratios)));
    }
    state.counters["exposed"] = observed.exposed_seconds;
    if (!strategy(who).gathers_between_steps()) {
        gradsync::StepStatistics statistics;
        statistics.communication_seconds = observed.communication_seconds;
        statistics.exposed_seconds = observed.exposed_seconds;
        state.counters["communication"] = statistics.communication_seconds;
        state.counters["overlap_ratio"] = statistics.overlap_ratio();
    }
    state.counters["samples_per_second"] = c.samples() / own.median;
    state.counters["tokens_per_second"] = c.tokens() / own.median;
    state.counters["state_bytes"] = observed.state_bytes;
}

/// The reference, and those that are to be measured with it if one of them is.
std::vector<std::string> contest_of(std::string_view reference, const Case& c) {
    std::vector<std::string> names{std::string(reference)};
    for (const Strategy& each : strategies())
        if (each.name != reference && each.goes_with(c.backend) && each.reference() == reference && selected(c.name(each.name)))
            names.push_back(each.name);
    return names;
}

SharedContests<Measured> shared_contests;

void add(const Case& c, Measured (*measure)(const Case&, const std::vector<std::string>&)) {
    for (const Strategy& each : strategies()) {
        if (!each.goes_with(c.backend)) continue;
        add_benchmark(c.name(each.name), benchmark::kMillisecond, [=, who = each.name](benchmark::State& state) {
            const std::string reference(strategy(who).reference());
            const std::vector<std::string> names = contest_of(reference, c);
            const Measured measured = shared_contests.take(c.name("* against " + reference), names, who, [&] {
                const double before = handoff_latency();
                Measured result = measure(c, names);
                result.handoff = (before + handoff_latency()) / 2;
                return result;
            });
            report_case(state, c, who, measured);
        });
    }
}

void add_all() {
    for (const std::string& model : models()) {
        for (int ranks : {1, 2, 4}) add({model, "threads", ranks}, measure_threads);
#ifdef GRADSYNC_BENCH_MPIEXEC
        for (const char* backend : {"mpi", "mpi_messages", "tcp"})
            for (int ranks : {1, 2, 4}) add({model, backend, ranks}, measure_mpi);
#endif
    }
}

}  // namespace

int main(int argc, char** argv) {
    Flags(argc, argv).take(contest_options);
    add_all();
    return run_benchmarks(argc, argv);
}
