// SPDX-License-Identifier: BSL-1.0
// A training that goes on when it loses a rank: the others keep running, wait for one that takes its place, and all go on from the step that
// they have kept.
//
//   gradsync_run -n 4 --restarts 3 -- gradsync_restart FOLDER     # kill a rank; FOLDER is for the checkpoint
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <gradsync/elastic/kept_state.hpp>
#include <gradsync/gradsync.hpp>

namespace gs = gradsync;

namespace {

/// The model, and the step that it has reached.
struct State {
    int step = 0;
    float line[2] = {0, 0};  // y = line[0] x + line[1]
};

/// A checkpoint appears as a whole or not at all.
void save(const State& state, const std::string& file) {
    std::ofstream out(file + ".new", std::ios::binary);
    if (!out.write(reinterpret_cast<const char*>(&state), sizeof state).flush()) throw std::runtime_error("cannot write " + file + ".new");
    std::filesystem::rename(file + ".new", file);
}
State load(const std::string& file) {
    State state;
    std::ifstream in(file, std::ios::binary);
    if (in && !in.read(reinterpret_cast<char*>(&state), sizeof state)) throw std::runtime_error(file + " is damaged");
    return state;
}

/// Trains from the newest state that is kept, else from the checkpoint.
void train(gs::Membership& job, gs::TcpBackend& comm, const std::string& checkpoint, int steps) {
    State state = comm.rank() == 0 ? load(checkpoint) : State();
    comm.broadcast(gs::BufferView(&state.step, 1), 0).wait();
    std::vector<float> gradient(2);
    gs::Reducer sync(comm,
                     std::vector<gs::ParameterView>{{.name = "line", .value = gs::buffer(state.line), .gradient = gs::buffer(gradient)}});
    sync.broadcast_parameters();
    gs::KeptState kept(job, comm, {gs::buffer(state.line), gs::BufferView(&state.step, 1)});
    if (kept.newest()) kept.restore();
    else kept.keep(static_cast<std::uint64_t>(state.step));
    while (state.step < steps) {
        if (comm.rank() == 0 && state.step % 100 == 0) save(state, checkpoint);
        std::mt19937 random(static_cast<unsigned>(state.step * comm.size() + comm.rank()));
        std::uniform_real_distribution<float> place(-1, 1), noise(-0.1f, 0.1f);
        gradient = {0, 0};
        for (int i = 0; i < 16; ++i) {
            const float x = place(random), error = (state.line[0] - 3) * x + state.line[1] + 2 + noise(random);
            gradient[0] += error * x / 8;
            gradient[1] += error / 8;
        }
        sync.mark_ready(0);
        sync.finish();
        for (int i = 0; i < 2; ++i) state.line[i] -= 0.1f * gradient[static_cast<std::size_t>(i)];
        kept.keep(static_cast<std::uint64_t>(++state.step));
        std::this_thread::sleep_for(std::chrono::milliseconds(10));  // a larger model would take longer
    }
    if (comm.rank() == 0) std::printf("y = %a x %+a\n", static_cast<double>(state.line[0]), static_cast<double>(state.line[1]));
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2) return std::fputs("usage: gradsync_restart FOLDER\n", stderr), 2;
    const std::string checkpoint = std::string(argv[1]) + "/checkpoint";
    try {
        gs::Membership job = gs::Membership::from_environment();
        while (!job.is_over()) try {
                gs::TcpBackend comm = job.connect({.timeout = std::chrono::seconds(30)});
                train(job, comm, checkpoint, 300);
                job.end(comm);
            } catch (const gs::Error& error) {
                if (!job.goes_on(error)) throw;
                std::fprintf(stderr, "goes on after: %s\n", error.what());
            }
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
