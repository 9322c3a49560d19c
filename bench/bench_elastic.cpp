// SPDX-License-Identifier: BSL-1.0
// Measures elastic training without faults: the time of ElasticJob::goes_on, and of update less the function that it runs.
//
//   gradsync_run -n 2 -- bench_elastic [STEPS] [MICROSECONDS]      # of computing in each step
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <gradsync/elastic/elastic_job.hpp>

namespace gs = gradsync;

namespace {

double now() {
    timespec time{};
    ::clock_gettime(CLOCK_MONOTONIC, &time);
    return 1e6 * static_cast<double>(time.tv_sec) + 1e-3 * static_cast<double>(time.tv_nsec);
}

void report(const char* what, int rank, std::vector<double>& all) {
    std::sort(all.begin(), all.end());
    std::printf("%s, rank %d: median %.2f us, 99 %% %.2f us (%zu steps)\n", what, rank, all[all.size() / 2], all[all.size() * 99 / 100],
                all.size());
}

}  // namespace

int main(int argc, char** argv) {
    const std::uint64_t steps = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 2000;
    const double microseconds = argc > 2 ? std::atof(argv[2]) : 2000;
    std::vector<float> weights(262'144), gradient(weights.size());
    std::vector<double> goes_on, update, finish;
    gs::ElasticJob job = gs::ElasticJob::from_environment();
    job.run([&](gs::TcpBackend& comm) {
        gs::Reducer sync(comm,
                         std::vector<gs::ParameterView>{{.name = "w", .value = gs::buffer(weights), .gradient = gs::buffer(gradient)}},
                         {.accumulation = gs::Accumulation::in_buckets, .micro_batches = static_cast<std::size_t>(comm.size())});
        (void)job.restore(sync, {gs::buffer(weights)});
        for (;;) {
            const double begin = now();
            if (job.step() == steps || !job.goes_on()) break;
            goes_on.push_back(now() - begin);
            for (const double end = now() + microseconds; now() < end;) {
            }
            sync.mark_ready(0);
            sync.finish();
            double inside = 0;
            const double before = now();
            job.update([&] {
                const double first = now();
                for (std::size_t i = 0; i < weights.size(); ++i) weights[i] -= 0.1f * gradient[i];
                inside = now() - first;
            });
            update.push_back(now() - before - inside);
        }
        report("goes_on", comm.rank(), goes_on);
        report("update less its function", comm.rank(), update);
    });
}
