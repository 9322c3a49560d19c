// SPDX-License-Identifier: BSL-1.0
#pragma once

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <stdexcept>
#include <thread>
#include <vector>

#include <gradsync/backend/tcp.hpp>
#include <gradsync/gradsync.hpp>
#include <gradsync/shard/checkpoint.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>

#include "plan.hpp"

/// The training that every rank runs, as a user would write it, and the faults that its ranks have.

namespace faults {

namespace gs = gradsync;

/// What the driver tells each rank.
struct Orders {
    Plan plan;
    double limit = 3;  ///< of each wait, in seconds
    std::filesystem::path folder;

    std::chrono::nanoseconds timeout() const { return std::chrono::nanoseconds(static_cast<std::int64_t>(limit * 1e9)); }
    double pause() const { return limit * (plan.fault == Fault::pause ? 0.3 : plan.fault == Fault::long_pause ? 1.5 : 0); }
};

/// The driver ends these processes when the run is over.
inline void note_process(const Orders& orders, pid_t process) {
    std::FILE* const file = std::fopen((orders.folder / "processes").c_str(), "a");
    if (file == nullptr) return;
    std::fprintf(file, "%d\n", process);
    std::fclose(file);
}

/// Sets this process's limit of open files; 0: to the most.
inline void limit_descriptors(rlim_t most) {
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    limit.rlim_cur = most == 0 ? limit.rlim_max : most;
    ::setrlimit(RLIMIT_NOFILE, &limit);
}

/// Thrown on a forked child, so that it destroys what its parent has.
struct Child {};

/// Commits this rank's faults.
class Injector {
public:
    Injector(const Orders& orders, int rank) : orders_(orders), plan_(orders.plan), rank_(rank) {}

    /// Marks a point of the program. Returns false if the rank is to return.
    [[nodiscard]] bool at(Stage stage, int step = 0, int parameter = 0) {
        if (!is_now(stage, step, parameter)) return true;
        switch (plan_.kind_of(rank_)) {
            case Fault::exception: throw std::runtime_error("this is the fault");
            case Fault::leave: return false;
            case Fault::exit: std::exit(0);
            case Fault::kill: strike([] { ::kill(::getpid(), SIGKILL); }); break;
            case Fault::stop: strike([] { std::raise(SIGSTOP); }); break;
            case Fault::pause:
            case Fault::long_pause:
                strike([seconds = orders_.pause(), own = plan_.backend != Backend::threads] { pause(seconds, own); });
                break;
            case Fault::cut: cut(); break;
            case Fault::fork_exits: fork_child(); break;
            case Fault::fork_outlives:
                fork_child();
                ::kill(::getpid(), SIGKILL);
                break;
            case Fault::no_descriptors: exhaust_descriptors(); break;
            default: break;  // in the program itself
        }
        return true;
    }

    /// Does this rank make this mistake here?
    bool makes(Fault fault, Stage stage, int step = 0, int parameter = 0) const {
        return plan_.fault == fault && is_now(stage, step, parameter);
    }

    std::uint64_t seed() const { return plan_.seed; }
    const std::filesystem::path& folder() const { return orders_.folder; }

private:
    bool is_now(Stage stage, int step, int parameter) const {
        const bool has_steps = stage == Stage::between || stage == Stage::finish || stage == Stage::optimizer;
        return plan_.is_faulty(rank_) && stage == plan_.stage && (!has_steps || step == plan_.step) &&
               (stage != Stage::between || parameter == plan_.parameter);
    }

    /// At once, or some time after, whatever the rank does then.
    template <class F>
    void strike(F f) {
        if (plan_.microseconds == 0 || plan_.backend == Backend::threads) return f();
        std::thread([f, microseconds = plan_.microseconds] {
            ::usleep(static_cast<unsigned>(microseconds));
            f();
        }).detach();
    }

    /// Stops this process, which another one then continues; a thread only sleeps.
    static void pause(double seconds, bool own_process) {
        const auto microseconds = static_cast<unsigned>(seconds * 1e6);
        if (!own_process) return static_cast<void>(::usleep(microseconds));
        const pid_t process = ::getpid(), child = ::fork();
        if (child == 0) {
            ::prctl(PR_SET_PDEATHSIG, SIGKILL);
            for (int descriptor = 3; descriptor < 1024; ++descriptor) ::close(descriptor);
            ::usleep(microseconds);
            ::kill(process, SIGCONT);
            ::_exit(0);
        }
        std::raise(SIGSTOP);  // before this thread goes on
    }

    void cut() {
        std::ofstream(orders_.folder / "links") << "down host" << rank_ / (plan_.divided ? 2 : 1) << std::endl;
        ::usleep(100'000);
    }

    void fork_child() {
        std::fflush(nullptr);
        const pid_t child = ::fork();
        if (child != 0) return note_process(orders_, child);
        if (plan_.fault == Fault::fork_outlives)
            for (;;) ::pause();
        if (plan_.unwinds) throw Child();
        std::exit(0);
    }

    static void exhaust_descriptors() {
        int highest = 0;
        for (int descriptor = 0; descriptor < 1024; ++descriptor)
            if (::fcntl(descriptor, F_GETFD) != -1) highest = descriptor;
        for (int descriptor = 0; descriptor < highest; ++descriptor)
            if (::fcntl(descriptor, F_GETFD) == -1) ::dup2(0, descriptor);
        limit_descriptors(static_cast<rlim_t>(highest) + 1);
    }

    const Orders& orders_;
    const Plan& plan_;
    int rank_;
};

// ------------------------------------------------------------------------------------------------------- the training

inline constexpr std::size_t counts[parameters] = {1000, 37, 50000, 1, 20000};

/// All values are small whole numbers, so that sums are exact in any order and the oracle is plain arithmetic.
inline float initial(std::size_t k) { return static_cast<float>(k % 5); }
inline float gradient(int rank, int i, int step, std::size_t k) {
    return static_cast<float>((static_cast<std::size_t>(rank) + 1) * ((k + static_cast<std::size_t>(3 * i + step)) % 7));
}

class Digest {
public:
    template <class T>
    void add(const std::vector<T>& values) {
        for (const T& value : values) {
            unsigned char bytes[sizeof(T)];
            std::memcpy(bytes, &value, sizeof value);
            for (const unsigned char byte : bytes) hash_ = (hash_ ^ byte) * 0x100000001b3u;
        }
    }
    std::uint64_t value() const { return hash_; }

private:
    std::uint64_t hash_ = 0xcbf29ce484222325u;
};

/// Of the weights that the training of so many ranks ends with.
inline std::uint64_t expected_digest(int size) {
    Digest digest;
    for (int i = 0; i < parameters; ++i) {
        std::vector<float> weights(counts[i]);
        for (std::size_t k = 0; k < weights.size(); ++k) {
            weights[k] = initial(k);
            for (int rank = 0; rank < size; ++rank)
                for (int step = 0; step < 2 * steps; ++step) weights[k] += gradient(rank, i, step, k);
        }
        digest.add(weights);
    }
    return digest.value();
}

/// A stateless optimizer: w += g.
struct Adds {
    static constexpr std::size_t state_count() { return 0; }
    void begin_step() {}
    template <class T>
    void step(const gs::OptimizerSlice<T>& s) const {
        for (std::size_t k = 0; k < s.value.size(); ++k) s.value[k] += s.gradient[k];
    }
};

/// Two collectives of the trainer's own, such as a loss: all ranks make the same two, but for mistakes.
template <class B>
void call_collectives(B& comm, const Injector& inject, Stage stage, int step = 0) {
    const auto makes = [&](Fault fault) { return inject.makes(fault, stage, step); };
    const float size = static_cast<float>(comm.size()), own = static_cast<float>(comm.rank() + 1);
    std::vector<float> sums(makes(Fault::count) ? 9u : 8u, own), from_root(4, own);
    std::vector<std::int32_t> whole(8, 1);
    const auto reduce = [&] {
        if (makes(Fault::dtype)) comm.all_reduce(gs::buffer(whole), gs::ReduceOp::sum).wait();
        else comm.all_reduce(gs::buffer(sums), gs::ReduceOp::sum).wait();
    };
    if (makes(Fault::order)) comm.broadcast(gs::buffer(from_root), 0).wait();
    if (!makes(Fault::never)) reduce();
    if (makes(Fault::twice)) reduce();
    if (!makes(Fault::order)) comm.broadcast(gs::buffer(from_root), 0).wait();
    for (const float sum : sums)
        if (sum != size * (size + 1) / 2) throw std::logic_error("WRONG NUMBER: a sum of " + std::to_string(sum));
    for (const float value : from_root)
        if (value != 1) throw std::logic_error("WRONG NUMBER: a broadcast of " + std::to_string(value));
}

/// Returns the digest of the weights, or nothing if the rank leaves early.
template <class B>
std::optional<std::uint64_t> train(B& comm, Injector& inject) {
    const int rank = comm.rank();
    if (!inject.at(Stage::after)) return {};

    std::vector<std::vector<float>> weights, gradients;
    for (const std::size_t count : counts) {
        weights.emplace_back(count);
        for (std::size_t k = 0; rank == 0 && k < count; ++k) weights.back()[k] = initial(k);  // the others get them from rank 0
        gradients.emplace_back(count);
    }
    std::vector<float> longer(counts[0] + 1), longer_gradient(counts[0] + 1);
    std::vector<double> wider(counts[0]), wider_gradient(counts[0]);
    std::vector<gs::ParameterView> views;
    for (std::size_t i = 0; i < weights.size(); ++i) views.push_back(gs::parameter("w" + std::to_string(i), weights[i], gradients[i]));
    if (inject.makes(Fault::count, Stage::after)) views[0] = gs::parameter("w0", longer, longer_gradient);
    if (inject.makes(Fault::dtype, Stage::after)) views[0] = gs::parameter("w0", wider, wider_gradient);
    const gs::ReducerOptions options{.averaging = gs::Averaging::sum, .non_finite = gs::NonFinite::error};
    std::mt19937_64 random(inject.seed() * 8 + static_cast<std::uint64_t>(rank));
    const auto fill = [&](std::size_t i, int step) {
        if (random() % 4 == 0) ::usleep(static_cast<unsigned>(random() % 4000));  // ranks are not equally fast
        for (std::size_t k = 0; k < gradients[i].size(); ++k) gradients[i][k] = gradient(rank, static_cast<int>(i), step, k);
    };
    {
        gs::Reducer sync(comm, views, options, gs::SizeCappedBuckets(4096));
        if (!inject.at(Stage::first)) return {};
        call_collectives(comm, inject, Stage::first);
        sync.broadcast_parameters();
        for (int step = 0; step < steps; ++step) {
            for (std::size_t i = weights.size(); i-- > 0;) {
                const int p = static_cast<int>(i);
                if (!inject.at(Stage::between, step, p)) return {};
                fill(i, step);
                if (inject.makes(Fault::nan, Stage::between, step, p)) gradients[i].back() = std::numeric_limits<float>::quiet_NaN();
                if (!inject.makes(Fault::never, Stage::between, step, p)) sync.mark_ready(i);
                if (inject.makes(Fault::twice, Stage::between, step, p)) sync.mark_ready(i);
            }
            if (!inject.at(Stage::finish, step)) return {};
            sync.finish();
            call_collectives(comm, inject, Stage::finish, step);
            for (std::size_t i = 0; i < weights.size(); ++i)
                for (std::size_t k = 0; k < weights[i].size(); ++k) weights[i][k] += gradients[i][k];
        }
    }
    if (!inject.at(Stage::split)) return {};
    {
        B part = comm.split(rank % 2, rank);
        std::vector<float> ones(3, 1);
        part.all_reduce(gs::buffer(ones), gs::ReduceOp::sum).wait();
        if (ones[2] != static_cast<float>(part.size())) throw std::logic_error("WRONG NUMBER: a sum in a part of the ranks");
        call_collectives(comm, inject, Stage::split);
    }
    gs::ShardedOptimizer sharded(comm, views, Adds(), gs::ShardingOptions{.reducer = options}, gs::SizeCappedBuckets(4096));
    for (int step = 0; step < steps; ++step) {
        for (std::size_t i = weights.size(); i-- > 0;) {
            fill(i, steps + step);
            sharded.mark_ready(i);
        }
        sharded.finish();
        if (!inject.at(Stage::optimizer, step)) return {};
        sharded.step();
        call_collectives(comm, inject, Stage::optimizer, step);
    }
    if (!inject.at(Stage::checkpoint)) return {};
    call_collectives(comm, inject, Stage::checkpoint);
    gs::save_shards(inject.folder() / "checkpoint", sharded);
    comm.barrier().wait();

    Digest digest;
    for (const auto& w : weights) digest.add(w);
    return digest.value();
}

// ------------------------------------------------------------------------------------------------------------- ranks

/// Writes for the driver what became of a rank.
inline void report(const Orders& orders, int rank, const std::string& text) {
    limit_descriptors(0);
    const auto name = orders.folder / ("rank" + std::to_string(rank));
    std::ofstream(name.string() + ".new") << text << std::endl;
    std::error_code ignored;
    std::filesystem::rename(name.string() + ".new", name, ignored);
}

/// "error CODE PEER" and the text, of the exception that is being handled.
inline std::string describe_exception() {
    try {
        throw;
    } catch (const gs::Error& error) {
        return "error " + std::to_string(static_cast<int>(error.errc())) + " " + std::to_string(error.context().peer) + "\n" + error.what();
    } catch (const std::exception& error) {
        return std::string("error 0 -1\n") + error.what();
    }
}

/// Runs `f`, which returns what `train` does, and reports "ok DIGEST", "left" or an error. Returns the exit code.
template <class F>
int run_rank(const Orders& orders, int rank, F&& f) {
    try {
        const std::optional<std::uint64_t> digest = f();
        report(orders, rank, digest ? "ok " + std::to_string(*digest) : "left");
        return 0;
    } catch (const Child&) {
        ::_exit(0);
    } catch (const std::exception&) {
        report(orders, rank, describe_exception());
        return 1;
    }
}

/// Trains, and has an exception end the rank as the plan says.
template <class B>
std::optional<std::uint64_t> train_to_the_end(B& comm, Injector& inject, const Orders& orders) {
    try {
        return train(comm, inject);
    } catch (const std::exception& error) {
        if (orders.plan.ending == Ending::fails) comm.fail(error.what());
        if (orders.plan.ending == Ending::aborts) {
            report(orders, comm.rank(), describe_exception());
            std::_Exit(1);
        }
        throw;
    }
}

}  // namespace faults
