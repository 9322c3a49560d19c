// SPDX-License-Identifier: BSL-1.0
// A training whose ranks come and go. Lose some, add others: the result has the same bits.
//
//   gradsync_run -n 4 --min-ranks 1 --spares 1 --restarts 9 -- gradsync_elastic     # kill ranks
//
// An argument says for how many milliseconds each step computes; 10 by default.
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include <gradsync/elastic/elastic_job.hpp>

namespace gs = gradsync;

namespace {

/// y = w[0] x + w[1], fitted to noisy values of 3 x - 2.
struct Line {
    std::vector<float> w = {0, 0}, gradient = {0, 0}, momentum = {0, 0};

    /// The gradient of 16 samples. They follow from the step and the number of the micro-batch, and from nothing else.
    void backward(std::uint64_t step, std::size_t micro_batch) {
        std::mt19937 random(static_cast<unsigned>(step * 1000 + micro_batch));
        std::uniform_real_distribution<float> place(-1, 1), noise(-0.1f, 0.1f);
        gradient = {0, 0};
        for (int i = 0; i < 16; ++i) {
            const float x = place(random), error = (w[0] - 3) * x + w[1] + 2 + noise(random);
            gradient[0] += error * x / 8;
            gradient[1] += error / 8;
        }
    }
    void step() {
        for (std::size_t i = 0; i < 2; ++i) {
            momentum[i] = 0.9f * momentum[i] + gradient[i];
            w[i] -= 0.01f * momentum[i];
        }
    }
};

gs::ElasticJob* on_request = nullptr;

}  // namespace

int main(int argc, char** argv) {
    try {
        constexpr std::uint64_t steps = 300;
        const std::chrono::milliseconds computes(argc > 1 ? std::atoi(argv[1]) : 10);
        Line line;
        gs::ElasticJob job = gs::ElasticJob::from_environment();
        on_request = &job;
        std::signal(SIGTERM, [](int) { on_request->request_leave(); });
        job.run([&](gs::TcpBackend& comm) {
            gs::Reducer sync(
                comm, std::vector<gs::ParameterView>{{.name = "w", .value = gs::buffer(line.w), .gradient = gs::buffer(line.gradient)}},
                {.accumulation = gs::Accumulation::in_buckets, .micro_batches = 12});
            const gs::Restored restored = job.restore(sync, {gs::buffer(line.w), gs::buffer(line.momentum)});
            if (comm.rank() == 0) std::printf("%d ranks from step %d\n", comm.size(), static_cast<int>(restored.step)), std::fflush(stdout);
            while (job.step() < steps && job.goes_on()) {
                for (const std::size_t m : job.micro_batches()) {
                    std::optional<gs::NoSync> more;  // micro-batches of this rank
                    if (m != job.micro_batches().back()) more.emplace(sync.no_sync());
                    line.backward(job.step(), m);
                    sync.mark_ready(0);
                }
                std::this_thread::sleep_for(computes);  // a larger model would take longer
                sync.finish();
                job.update([&] { line.step(); });
            }
            if (comm.rank() == 0 && job.step() == steps)
                std::printf("y = %a x %+a\n", static_cast<double>(line.w[0]), static_cast<double>(line.w[1]));
        });
        std::signal(SIGTERM, SIG_DFL);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 1;
    }
}
