// SPDX-License-Identifier: BSL-1.0
// A training that gradsync_run starts, and that goes on after faults. It writes down what it does and when, for restarts.py:
//
//   restart_rank FOLDER STEPS ELEMENTS MICROSECONDS [keep | own]      # so long computes each step; keeps its state in memory, as replicated or
//                                                                     # as each rank's own, and not in checkpoints
#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <gradsync/elastic/kept_state.hpp>
#include <gradsync/gradsync.hpp>

namespace {

namespace gs = gradsync;

/// In seconds, by the clock of all processes of this machine.
double now() {
    timespec time{};
    ::clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}
void say(const char* what, double when, const std::string& more = {}) {
    std::printf("%s %d %.6f %s\n", what, ::getpid(), when, more.c_str());
    std::fflush(stdout);
}

struct State {
    std::uint64_t step = 0;
    std::vector<float> weights;

    void save(const std::string& file) const {
        std::ofstream out(file + ".new", std::ios::binary);
        out.write(reinterpret_cast<const char*>(&step), sizeof step);
        out.write(reinterpret_cast<const char*>(weights.data()), static_cast<std::streamsize>(weights.size() * sizeof(float)));
        out.close();
        std::filesystem::rename(file + ".new", file);
    }
    void load(const std::string& file) {
        std::ifstream in(file, std::ios::binary);
        step = 0;
        for (std::size_t i = 0; i < weights.size(); ++i) weights[i] = static_cast<float>(i % 7);
        if (!in) return;
        in.read(reinterpret_cast<char*>(&step), sizeof step);
        in.read(reinterpret_cast<char*>(weights.data()), static_cast<std::streamsize>(weights.size() * sizeof(float)));
        if (!in) throw std::runtime_error("the checkpoint is damaged");
    }
};

/// Computes for a while, as a model would.
void compute(double microseconds) {
    for (const double end = now() + 1e-6 * microseconds; now() < end;) ::usleep(50);
}

void train(gs::Membership& job, gs::TcpBackend& comm, State& state, const std::string& checkpoint, std::uint64_t steps, double microseconds,
           const std::string& way) {
    std::optional<gs::KeptState> kept;
    if (!way.empty())
        kept.emplace(job, comm, std::initializer_list<gs::BufferView>{gs::buffer(state.weights), gs::BufferView(&state.step, 1)},
                     way == "own" ? gs::StateKind::own : gs::StateKind::replicated);
    if (kept && kept->newest()) {
        const std::uint64_t number = kept->restore();
        if (number != state.step) throw std::runtime_error("another step is restored");
    } else {
        state.load(kept ? "" : checkpoint);
    }
    if (!kept) comm.broadcast(gs::BufferView(&state.step, 1), 0).wait();
    say("from", now(), std::to_string(state.step));
    const double begin = now();
    std::vector<float> gradient(state.weights.size());
    gs::Reducer sync(comm,
                     std::vector<gs::ParameterView>{{.name = "w", .value = gs::buffer(state.weights), .gradient = gs::buffer(gradient)}});
    const double made = now();
    sync.broadcast_parameters();
    say("face", made, std::to_string(made - begin));
    while (state.step < steps) {
        if (kept) kept->keep(state.step);
        else if (comm.rank() == 0 && state.step % 8 == 0) state.save(checkpoint);
        compute(microseconds);
        for (std::size_t i = 0; i < gradient.size(); ++i)
            gradient[i] =
                0.01f * state.weights[i] + static_cast<float>((state.step * 31 + i + static_cast<std::size_t>(comm.rank()) * 7) % 13);
        sync.mark_ready(0);
        sync.finish();
        for (std::size_t i = 0; i < gradient.size(); ++i) state.weights[i] -= 0.1f * gradient[i];
        ++state.step;
    }
    std::uint64_t digest = 1469598103934665603u;
    for (const float weight : state.weights) {
        std::uint32_t bits = 0;
        std::memcpy(&bits, &weight, sizeof bits);
        digest = (digest ^ bits) * 1099511628211u;
    }
    say("digest", now(), std::to_string(digest));
}

}  // namespace

int main(int argc, char** argv) {
    say("start", now(), std::getenv("RANK"));
    if (const char* const store = std::getenv("GRADSYNC_STORE")) say("store", now(), store);
    ::signal(SIGUSR1, [](int) { ::_exit(3); });
    const std::string checkpoint = std::string(argv[1]) + "/checkpoint";
    State state;
    state.weights.resize(std::strtoull(argv[3], nullptr, 10));
    try {
        gs::Membership job = gs::Membership::from_environment();
        while (!job.is_over()) try {
                say("meet", now());
                gs::TcpBackend comm = job.connect({.timeout = std::chrono::seconds(2)});
                say("met", now(), std::to_string(job.generation()));
                train(job, comm, state, checkpoint, std::strtoull(argv[2], nullptr, 10), std::atof(argv[4]), argc > 5 ? argv[5] : "");
                job.end(comm);
            } catch (const gs::Error& error) {
                const double when = now();
                const bool goes_on = job.goes_on(error);
                say(goes_on ? "error" : "failure", when, std::to_string(error.context().peer) + " " + error.what());
                if (!goes_on) throw;
            }
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
    say("end", now());
}
