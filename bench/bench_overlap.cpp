// SPDX-License-Identifier: BSL-1.0
// How much of the communication a backward hides, on devices.
//
//     bench_overlap [--layers=N] [--width=N] [--tokens=N] [--seconds=S] [--rounds=N] [Google Benchmark's flags]
//
// A step is the matrix products of a backward through linear layers (bf16, cuBLASLt) and the synchronisation of their f32 gradients,
// until the device is done with both. Exit code 77: there is no device.
//
// overlap/compute/WAY/...  the products alone, which nothing waits for
// overlap/none/WAY/...     NoOverlap: all gradients leave when the backward is on the stream
// overlap/backward/WAY/... OverlapBackward
//
// They take turns, the products alone directly before and after each of the others; times are medians, of the slowest rank. Counters,
// medians over these pairs, with quartiles as ..._q1 and ..._q3: exposed, the seconds that the step takes longer than the compute;
// compute_ratio, the compute's time over the step's. hidden: the share of what NoOverlap exposes that is not exposed (above 0: it
// overlaps; 1: all of it).
//
// WAY says what the gradients travel through:
//
// staging  in a process by itself, on any one device. Two ranks are threads that share it, each with a stream; gradients leave through
//          the copy engines to the host, are added there, and come back (StagingBackend). What is hidden is this way's: it says
//          nothing of NCCL, whose kernels take a part of the device.
// nccl     ranks are processes with a device each, told who they are by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT
//          (torchrun --no-python sets them, srun others). In a process by itself it is one rank: nothing travels, and `exposed`
//          is what the Reducer costs; counter overhead: that over the compute.

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <functional>
#include <iterator>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <gradsync/backend/nccl.hpp>
#include <gradsync/backend/staging.hpp>
#include <gradsync/gradsync.hpp>
#include <gradsync/overlap/no_overlap.hpp>

#include "cuda/device.hpp"
#include "device_backward.hpp"
#include "flags.hpp"
#include "on_each_rank.hpp"
#include "reporting.hpp"
#include "shared_contests.hpp"

namespace {

using namespace bench;
namespace gs = gradsync;

ContestOptions contest_options{.pin = false, .warm_ups = 1, .reference = 0};  // Mode::compute
DeviceBackward::Shape shape{12, 2048, 4096};

enum class Mode { compute, none, backward };
constexpr const char* mode_names[] = {"compute", "none", "backward"};

/// One rank, with a stream of its own, and what it does in each mode.
template <class B>
class Trainee {
public:
    explicit Trainee(B comm)
        : comm_(on_stream(std::move(comm), stream_.get())),
          backward_(shape, stream_.get()),
          own_(backward_.layers() * backward_.gradient_count() * sizeof(float)),
          none_(comm_.duplicate(), backward_.parameters(), options),
          overlapped_(comm_.duplicate(), backward_.parameters(), options) {
        check();
    }

    B& comm() { return comm_; }

    void step(Mode mode) {
        if (mode == Mode::compute) backward_.run([this](std::size_t i) { return own(i); }, [](std::size_t) {});
        else if (mode == Mode::none) step(none_);
        else step(overlapped_);
    }
    void synchronise() { gs::cuda::check(cudaStreamSynchronize(stream_.get()), "cudaStreamSynchronize"); }

private:
    static constexpr gs::ReducerOptions options{.gradients = gs::GradientStorage::in_buckets};

    static B on_stream(B comm, cudaStream_t stream) {
        comm.set_stream(stream);
        return comm;
    }

    float* own(std::size_t i) const { return static_cast<float*>(own_.data()) + i * backward_.gradient_count(); }

    template <class Reducer>
    void step(Reducer& sync) {
        backward_.run([&](std::size_t i) { return static_cast<float*>(sync.gradient_view(i).data); },
                      [&](std::size_t i) { sync.mark_ready(i); });
        sync.finish();
    }

    /// All ranks compute the same, so that the mean is what each of them has.
    void check() {
        for (const Mode mode : {Mode::compute, Mode::none, Mode::backward}) step(mode);
        std::vector<float> expected(backward_.gradient_count()), mean(expected.size());
        const auto read = [&](const void* from, std::vector<float>& to) {
            gs::cuda::check(cudaMemcpyAsync(to.data(), from, to.size() * sizeof(float), cudaMemcpyDeviceToHost, stream_.get()),
                            "cudaMemcpyAsync");
            synchronise();
        };
        for (std::size_t i = 0; i < backward_.layers(); ++i) {
            read(own(i), expected);
            for (const void* found : {none_.gradient_view(i).data, overlapped_.gradient_view(i).data}) {
                read(found, mean);
                for (std::size_t k = 0; k < mean.size(); ++k)
                    if (!(std::abs(mean[k] - expected[k]) <= 1e-5f * std::abs(expected[k])))
                        throw std::runtime_error("layer " + std::to_string(i) + ": a wrong mean of gradients");
            }
        }
    }

    gs::cuda::Stream stream_ = gs::cuda::make_stream();
    B comm_;
    DeviceBackward backward_;
    gs::cuda::DeviceMemory own_;
    gs::Reducer<B, gs::SizeCappedBuckets, gs::NoOverlap> none_;
    gs::Reducer<B, gs::SizeCappedBuckets, gs::OverlapBackward> overlapped_;
};

/// The ranks of this process in one mode; `trainee(rank)` is one of them.
template <class TraineeOf>
class Steps final : public Contestant {
public:
    Steps(Mode mode, TraineeOf trainee) : mode_(mode), trainee_(trainee) {}

    void meet(int rank) override {
        trainee_(rank).synchronise();
        trainee_(rank).comm().host().barrier().wait();
    }
    double run(int rank, int times) override {
        return time([&] {
            for (int i = 0; i < times; ++i) trainee_(rank).step(mode_);
            trainee_(rank).synchronise();
        });
    }

private:
    Mode mode_;
    TraineeOf trainee_;
};

/// `contest(contestants)`: samples of each. By mode.
template <class TraineeOf, class Contest>
ContestResult measure(TraineeOf trainee, Contest&& contest) {
    Steps<TraineeOf> compute(Mode::compute, trainee), none(Mode::none, trainee), backward(Mode::backward, trainee);
    Contestant* const contestants[] = {&compute, &none, &backward};
    return contest(std::span<Contestant* const>(contestants));
}

ContestResult measure_staging() {
    using B = gs::StagingBackend<gs::ThreadBackend>;
    constexpr int ranks = 2;
    const std::vector<gs::ThreadBackend> hosts = gs::ThreadBackend::make(ranks);
    std::vector<std::unique_ptr<Trainee<B>>> trainees(ranks);
    on_each_rank(ranks, [&](std::size_t r) { trainees[r] = std::make_unique<Trainee<B>>(B(hosts[r])); });
    const auto trainee = [&](int rank) -> Trainee<B>& { return *trainees[static_cast<std::size_t>(rank)]; };
    return measure(trainee, [](auto contestants) { return run_contest(ranks, contestants, contest_options); });
}

ContestResult measure_nccl(gs::NcclBackend& comm) {
    Trainee<gs::NcclBackend> own(comm);
    const auto trainee = [&](int) -> Trainee<gs::NcclBackend>& { return own; };
    const auto slowest = [&](double seconds) {
        comm.host().all_reduce(gs::buffer(std::span(&seconds, 1)), gs::ReduceOp::max).wait();
        return seconds;
    };
    return measure(trainee, [&](auto contestants) { return take_part(comm.rank(), contestants, contest_options, slowest); });
}

SharedContests<ContestResult> shared_contests;

void add(const std::string& way, int ranks, const std::function<ContestResult()>& run) {
    const std::string rest = way + "/ranks:" + std::to_string(ranks) + "/layers:" + std::to_string(shape.layers) +
                             "/width:" + std::to_string(shape.width) + "/tokens:" + std::to_string(shape.tokens);
    const std::vector<std::string> names(std::begin(mode_names), std::end(mode_names));
    for (std::size_t mode = 0; mode < names.size(); ++mode)
        add_benchmark("overlap/" + names[mode] + "/" + rest, benchmark::kMillisecond, [=](benchmark::State& state) {
            const ContestResult of = shared_contests.take(rest, names, names[mode], run);
            report(state, summarise(of[mode].seconds), 0);
            if (mode == 0) return;
            const Paired own(of[mode]), none(of[1]);
            report(state, "exposed", own.difference);
            report(state, "compute_ratio", own.ratio);
            const double exposed = own.difference.median, all = none.difference.median;
            state.counters["bytes"] = static_cast<double>(shape.layers * shape.width * shape.width * sizeof(float));
            if (ranks == 1) state.counters["overhead"] = 1 / own.ratio.median - 1;
            else if (mode == 2 && all > 0) state.counters["hidden"] = 1 - exposed / all;
        });
}

}  // namespace

int main(int argc, char** argv) {
    Flags flags(argc, argv);
    flags.take(contest_options);
    const auto take = [&](const char* name, std::size_t& number, double least) {
        number = static_cast<std::size_t>(flags.take(name, least, static_cast<double>(number)));
    };
    take("layers", shape.layers, 1);
    take("width", shape.width, 8);
    take("tokens", shape.tokens, 8);
    if (shape.width % 8 != 0 || shape.tokens % 8 != 0) {
        std::fprintf(stderr, "%s: --width and --tokens take multiples of 8, for cuBLASLt's sake\n", argv[0]);
        return 2;
    }
    if (const std::string why = gradsync_train::why_no_device(); !why.empty()) {
        std::printf("skipped: %s\n", why.c_str());
        return 77;
    }
    try {
        gs::NcclBackend comm = gs::NcclBackend::from_environment();
        if (comm.size() == 1) add("staging", 2, measure_staging);
        add("nccl", comm.size(), [&] { return measure_nccl(comm); });
        return run_benchmarks(argc, argv, comm.rank() == 0);
    } catch (const std::exception& e) {
        std::fprintf(stderr, "%s: %s\n", argv[0], e.what());
        return 1;
    }
}
