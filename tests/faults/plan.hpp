// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <random>
#include <string>
#include <vector>

/// What goes wrong in a run, on whom and when. A plan is a pure function of its seed, so that a seed is all that has to be kept.

namespace faults {

enum class Fault {
    none,
    exception,       ///< the rank throws
    leave,           ///< its function returns early
    exit,            ///< its process ends, and says nothing
    kill,            ///< SIGKILL
    stop,            ///< SIGSTOP, for good
    pause,           ///< SIGSTOP, then SIGCONT long before the limit: everybody succeeds
    long_pause,      ///< SIGSTOP, then SIGCONT after the limit
    two,             ///< two ranks at once, each with one of exception, leave, exit and kill
    messenger,       ///< a rank throws, and another one is killed while it passes that on
    count,           ///< a collective with another number of elements
    dtype,           ///< a collective with another type
    order,           ///< two collectives in another order
    twice,           ///< a call twice
    never,           ///< a call left out
    nan,             ///< a gradient that is not finite
    cut,             ///< a host's link is down
    fork_exits,      ///< a child is forked and ends: everybody succeeds
    fork_outlives,   ///< a child is forked; then the rank is killed, and the child lives on
    no_descriptors,  ///< the rank can open no more files
    count_of
};
inline constexpr const char* fault_names[] = {"none",       "throw", "leave",     "exit",       "kill",          "stop",          "pause",
                                              "long-pause", "two",   "messenger", "count",      "dtype",         "order",         "twice",
                                              "never",      "nan",   "cut",       "fork-exits", "fork-outlives", "no-descriptors"};

enum class Backend { threads, tcp_shared, tcp_messages, tcp_hierarchical, mpi, count_of };
inline constexpr const char* backend_names[] = {"threads", "tcp-shared", "tcp-messages", "tcp-hierarchical", "mpi"};

enum class Stage {
    before,      ///< the ranks meet (over MPI: MPI is initialised, and the backend is not made)
    during,      ///< they have met, and the backend is made
    after,       ///< the backend is made, and the Reducer is not
    first,       ///< the first collective
    between,     ///< between two marks of a backward
    finish,      ///< Reducer::finish
    split,       ///< a communicator of a part of the ranks
    optimizer,   ///< ShardedOptimizer::step
    checkpoint,  ///< save_shards
    count_of
};
inline constexpr const char* stage_names[] = {"before", "during", "after",     "first",     "between",
                                              "finish", "split",  "optimizer", "checkpoint"};

/// What an exception does on any rank.
enum class Ending {
    unwinds,  ///< main catches it
    fails,    ///< the same, after fail() on the communicator
    aborts,   ///< nobody catches it: the process ends with its connections open
};
inline constexpr const char* ending_names[] = {"unwinds", "fails", "aborts"};

inline const char* name_of(Fault f) { return fault_names[static_cast<int>(f)]; }
inline const char* name_of(Backend b) { return backend_names[static_cast<int>(b)]; }
inline const char* name_of(Stage s) { return stage_names[static_cast<int>(s)]; }

inline constexpr int steps = 3;       ///< of the Reducer, and of the optimizer
inline constexpr int parameters = 5;  ///< of the model

struct Plan {
    std::uint64_t seed = 0;
    Fault fault = Fault::none;
    Backend backend = Backend::threads;
    Stage stage = Stage::after;
    int size = 2;
    std::vector<int> faulty = {};   ///< ranks, the first one first
    std::vector<Fault> kinds = {};  ///< what each of them does
    int step = 0;                   ///< in stages that occur in each step
    int parameter = 0;              ///< before whose mark, between buckets
    int microseconds = 0;           ///< a signal strikes so long after the stage's begin: 0: at it
    bool by_file = false;           ///< the ranks meet in a folder
    bool messages = false;          ///< over MPI: no shared memory
    bool divided = false;           ///< two ranks at a time share memory
    bool unwinds = false;           ///< a forked child destroys what its parent has; else it calls exit
    Ending ending = Ending::fails;

    bool is_faulty(int rank) const { return std::find(faulty.begin(), faulty.end(), rank) != faulty.end(); }
    Fault kind_of(int rank) const {
        return is_faulty(rank) ? kinds[static_cast<std::size_t>(std::find(faulty.begin(), faulty.end(), rank) - faulty.begin())]
                               : Fault::none;
    }
    bool on_hosts() const { return fault == Fault::cut; }

    std::string name() const { return std::string(name_of(fault)) + "/" + name_of(backend) + "/" + name_of(stage); }
    std::string describe() const {
        std::string text = "seed " + std::to_string(seed) + ": " + name() + ", " + std::to_string(size) + " ranks";
        for (std::size_t i = 0; i < faulty.size(); ++i) text += ", rank " + std::to_string(faulty[i]) + " " + name_of(kinds[i]);
        text += ", step " + std::to_string(step) + ", parameter " + std::to_string(parameter) + ", after " + std::to_string(microseconds) +
                " us, " + ending_names[static_cast<int>(ending)];
        for (const auto& [is, word] : {std::pair(by_file, "by file"), std::pair(messages, "messages"), std::pair(divided, "divided"),
                                       std::pair(unwinds, "child unwinds")})
            if (is) text += std::string(", ") + word;
        return text;
    }
};

/// Why a combination is left out; null if it is not.
inline const char* left_out(Fault fault, Backend backend, Stage stage) {
    const bool constructs = stage <= Stage::during;
    switch (fault) {
        case Fault::exit:
        case Fault::kill:
        case Fault::stop:
        case Fault::messenger:
        case Fault::fork_exits:
        case Fault::fork_outlives:
        case Fault::no_descriptors:
            if (backend == Backend::threads) return "it befalls a process, and with it all its threads";
            break;
        case Fault::count:
        case Fault::dtype:
            if (constructs) return "construction takes no tensors";
            if (stage == Stage::between) return "buckets are planned at construction; a mark has neither a count nor a type";
            break;
        case Fault::order:
        case Fault::twice:
        case Fault::never:
            if (stage <= Stage::after) return "the ranks have made no call yet whose order they could change";
            if (stage == Stage::between && fault == Fault::order) return "gradients may be marked in any order";
            break;
        case Fault::nan:
            if (stage != Stage::between) return "gradients are made in the backward";
            break;
        case Fault::cut:
            if (backend == Backend::threads || backend == Backend::tcp_shared) return "its ranks are on one host";
            if (backend == Backend::mpi) return "mpirun's own connections would be cut, too";
            break;
        default: break;
    }
    if (constructs && backend == Backend::threads) return "threads are constructed in one call, before there are ranks";
    return nullptr;
}

struct Pair {
    Fault fault;
    Backend backend;
    std::vector<Stage> stages;
};

/// Every fault over every backend where it has a meaning.
inline const std::vector<Pair>& pairs() {
    static const std::vector<Pair> all_pairs = [] {
        std::vector<Pair> all;
        for (int f = 1; f < static_cast<int>(Fault::count_of); ++f)
            for (int b = 0; b < static_cast<int>(Backend::count_of); ++b) {
                Pair pair{static_cast<Fault>(f), static_cast<Backend>(b), {}};
                for (int s = 0; s < static_cast<int>(Stage::count_of); ++s)
                    if (left_out(pair.fault, pair.backend, static_cast<Stage>(s)) == nullptr) pair.stages.push_back(static_cast<Stage>(s));
                if (!pair.stages.empty()) all.push_back(pair);
            }
        return all;
    }();
    return all_pairs;
}

/// The plan of a seed. A round, pairs().size() consecutive seeds, has each pair once; the stages change from one round to the next.
inline Plan plan_of(std::uint64_t seed) {
    const std::size_t index = seed % pairs().size(), round = seed / pairs().size();
    const Pair& pair = pairs()[index];
    std::mt19937_64 random(seed);
    const auto below = [&](int bound) { return static_cast<int>(random() % static_cast<std::uint64_t>(bound)); };

    Plan plan{.seed = seed, .fault = pair.fault, .backend = pair.backend, .stage = pair.stages[(round + index * 7) % pair.stages.size()]};
    const bool two = plan.fault == Fault::two || plan.fault == Fault::messenger;
    plan.divided = plan.backend == Backend::tcp_hierarchical || (plan.backend == Backend::mpi && below(3) == 0);
    const int fewest = two || plan.divided ? 3 : 2;
    plan.size = fewest + below(6 - fewest);
    const int first = below(plan.size), other = (first + 1 + below(plan.size - 1)) % plan.size;
    plan.faulty = {first};
    if (two) plan.faulty.push_back(plan.fault == Fault::messenger && first != 0 && below(2) == 0 ? 0 : other);
    plan.kinds.assign(plan.faulty.size(), plan.fault);
    constexpr Fault ends[] = {Fault::exception, Fault::leave, Fault::exit, Fault::kill};
    if (plan.fault == Fault::two)
        for (Fault& kind : plan.kinds) kind = ends[below(plan.backend == Backend::threads ? 2 : 4)];
    if (plan.fault == Fault::messenger) plan.kinds = {Fault::exception, Fault::kill};
    if (plan.on_hosts() && plan.divided)  // all ranks of the host
        plan.faulty = first / 2 * 2 + 1 < plan.size ? std::vector{first / 2 * 2, first / 2 * 2 + 1} : std::vector{first};
    plan.kinds.resize(plan.faulty.size(), plan.fault);
    plan.step = below(steps);
    plan.parameter = below(parameters);
    const bool signals = plan.fault == Fault::kill || plan.fault == Fault::stop || plan.fault == Fault::pause ||
                         plan.fault == Fault::long_pause || plan.fault == Fault::messenger;
    if (signals && below(2) == 0) plan.microseconds = 1 + below(plan.stage == Stage::during ? 30'000 : 3000);
    plan.by_file = below(4) == 0 && plan.backend != Backend::threads && plan.backend != Backend::mpi;
    plan.by_file = plan.by_file && !plan.on_hosts();  // a host that is cut off would not see the folder either
    plan.messages = plan.backend == Backend::tcp_messages || (plan.backend == Backend::mpi && !plan.divided && below(2) == 0);
    plan.unwinds = below(2) == 0;
    if (plan.backend != Backend::threads) plan.ending = static_cast<Ending>(below(3));
    return plan;
}

}  // namespace faults
