// SPDX-License-Identifier: BSL-1.0
// What the Reducer costs.
//
//     bench_reducer [--seconds=S] [--rounds=N] [--no-pin] [Google Benchmark's flags]
//
// reducer/mark_ready/OVERLAP/STORAGE/ranks:N/parameters:P   one mark, on average over the marks of a step (time), with
//                                                           buckets of 100 gradients; finish() is not counted
// reducer/step/BUCKETS/STORAGE/ranks:N/parameters:P/bytes:B every gradient marked, and finish(). all_reduce_ratio: the
//                                                           time of one bare all_reduce of as many bytes over this
//                                                           one's
// reducer/construct/ranks:N/parameters:P                    construction, verification included. bytes_per_parameter: of
//                                                           heap that a Reducer then holds, without the buckets
// reducer/overlap/OVERLAP/compute:WHERE/...                 a step with compute between the marks, on the ranks' cores
// or
//                                                           on a device. compute_ratio: the compute's time over the
//                                                           step's
//
// Times are medians; what a ratio compares is measured in turns.

#include <malloc.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <functional>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include <gradsync/bucket/flat.hpp>
#include <gradsync/bucket/per_parameter.hpp>
#include <gradsync/bucket/size_capped.hpp>
#include <gradsync/overlap/no_overlap.hpp>
#include <gradsync/overlap/overlap_backward.hpp>

#include "buffers.hpp"
#include "collectives.hpp"
#include "flags.hpp"
#include "reducer_contestants.hpp"
#include "reporting.hpp"

namespace {

std::atomic<std::ptrdiff_t> heap_bytes = 0;  // allocated by operator new and not yet freed; not the buckets, whose memory is aligned

}  // namespace

void* operator new(std::size_t bytes) {
    void* const memory = std::malloc(bytes);
    if (memory == nullptr) throw std::bad_alloc();
    heap_bytes.fetch_add(static_cast<std::ptrdiff_t>(::malloc_usable_size(memory)), std::memory_order_relaxed);
    return memory;
}
void operator delete(void* memory) noexcept {
    heap_bytes.fetch_sub(static_cast<std::ptrdiff_t>(::malloc_usable_size(memory)), std::memory_order_relaxed);
    std::free(memory);
}
void operator delete(void* memory, std::size_t) noexcept { operator delete(memory); }

namespace {

using namespace bench;

ContestOptions contest_options;

/// OverlapBackward{Progress::thread}, under the name that results.json knows it by.
const std::string by_thread = "OverlapBackwardThread";

std::string name_of(gs::GradientStorage storage) { return storage == gs::GradientStorage::borrowed ? "borrowed" : "in_buckets"; }

void add(const std::string& name, benchmark::TimeUnit unit, std::function<void(benchmark::State&)> run) {
    add_benchmark("reducer/" + name, unit, std::move(run));
}

/// Reports the first contestant's time, and the second's over it as `ratio`.
void run_and_report(benchmark::State& state, int ranks, std::vector<Contestant*> contestants, const char* ratio, double parts = 1) {
    const double handoff = handoff_latency();
    const ContestResult samples = run_contest(ranks, contestants, contest_options);
    Summary own = summarise(samples[0].seconds);
    if (contestants.size() > 1) state.counters[ratio] = summarise(samples[1].seconds).median / own.median;
    own.median /= parts, own.min /= parts, own.max /= parts;
    report(state, own, handoff);
}

template <class Overlap>
void add_mark_ready(const std::string& name, const Overlap& overlap, const Workload& w) {
    add("mark_ready/" + name + "/" + name_of(w.storage) + "/ranks:" + std::to_string(w.ranks) +
            "/parameters:" + std::to_string(w.parameters),
        benchmark::kNanosecond, [=](benchmark::State& state) {
            const std::size_t cap = w.bytes / w.parameters * 100;
            ReducerMarks<gs::SizeCappedBuckets, Overlap> marks(w, gs::SizeCappedBuckets(cap, cap), {}, overlap);
            run_and_report(state, w.ranks, {&marks}, "", static_cast<double>(w.parameters));
        });
}

template <class Buckets>
void add_step(const std::string& buckets, const Workload& w) {
    add("step/" + buckets + "/" + name_of(w.storage) + "/ranks:" + std::to_string(w.ranks) + "/parameters:" + std::to_string(w.parameters) +
            "/bytes:" + std::to_string(w.bytes),
        benchmark::kMicrosecond, [=](benchmark::State& state) {
            ReducerSteps<Buckets, gs::OverlapBackward> steps(w);
            Buffers buffers(w.ranks, w.bytes);
            ThreadsCollective bare("all_reduce", gs::DType::f32, buffers.pointers(), w.bytes);
            run_and_report(state, w.ranks, {&steps, &bare}, "all_reduce_ratio");
        });
}

void add_construct(int ranks, std::size_t parameters) {
    add("construct/ranks:" + std::to_string(ranks) + "/parameters:" + std::to_string(parameters), benchmark::kMillisecond,
        [=](benchmark::State& state) {
            const Workload w{.ranks = ranks, .parameters = parameters, .bytes = parameters * 64, .storage = gs::GradientStorage::borrowed};
            std::vector<Gradients> gradients;
            for (int r = 0; r < ranks; ++r) gradients.emplace_back(w);
            const double handoff = handoff_latency();
            std::vector<double> samples;
            std::ptrdiff_t held = 0;
            for (int i = 0; i < (parameters < 1000000 ? 9 : 3); ++i) {
                std::vector<gs::ThreadBackend> comms = gs::ThreadBackend::make(ranks);
                std::vector<double> seconds(comms.size());
                const std::ptrdiff_t before = heap_bytes;
                on_each_rank(ranks, [&](std::size_t r) {
                    comms[r].barrier().wait();
                    const double begin = now();
                    const gs::Reducer<gs::ThreadBackend> reducer(comms[r], gradients[r].views());
                    seconds[r] = now() - begin;
                    comms[r].barrier().wait();
                    if (r == 0) held = heap_bytes - before;
                    comms[r].barrier().wait();
                });
                samples.push_back(*std::max_element(seconds.begin(), seconds.end()));
            }
            state.counters["bytes_per_parameter"] = static_cast<double>(held) / ranks / static_cast<double>(parameters);
            report(state, summarise(samples), handoff);
        });
}

/// As much work as a core does in `seconds` when it is undisturbed.
CoreCompute calibrated(double seconds) {
    constexpr long probe = 100000;
    double best = 1;
    for (int i = 0; i < 20; ++i) {
        const double begin = now();
        CoreCompute{probe}();
        best = std::min(best, now() - begin);
    }
    return {static_cast<long>(static_cast<double>(probe) * seconds / best)};
}

template <class Overlap, class Compute>
void add_overlap(const std::string& name, const Overlap& overlap, const std::string& where, std::function<Compute()> compute) {
    const Workload w{.ranks = 2, .parameters = 100, .bytes = std::size_t{100} << 20};
    add("overlap/" + name + "/compute:" + where + "/ranks:2/parameters:100/bytes:" + std::to_string(w.bytes), benchmark::kMicrosecond,
        [=](benchmark::State& state) {
            const Compute work = compute();
            ReducerSteps<gs::SizeCappedBuckets, Overlap, Compute> steps(w, gs::SizeCappedBuckets(), work, overlap);
            ComputeOnly<Compute> compute_only(w.ranks, w.parameters, work);
            run_and_report(state, w.ranks, {&steps, &compute_only}, "compute_ratio");
        });
}

template <class Overlap>
void add_overlaps(const std::string& name, const Overlap& overlap) {
    using namespace std::chrono_literals;
    add_overlap<Overlap, CoreCompute>(name, overlap, "core", [] { return calibrated(200e-6); });
    add_overlap<Overlap, DeviceCompute>(name, overlap, "device", [] { return DeviceCompute{200us}; });
}

void add_all() {
    constexpr std::size_t mib = std::size_t{1} << 20;
    for (int ranks : {1, 2})
        for (auto storage : {gs::GradientStorage::in_buckets, gs::GradientStorage::borrowed}) {
            const Workload w{.ranks = ranks, .parameters = 1000, .bytes = 1000 * 64, .storage = storage};
            add_mark_ready("NoOverlap", gs::NoOverlap(), w);
            add_mark_ready("OverlapBackward", gs::OverlapBackward(), w);
            add_mark_ready(by_thread, gs::OverlapBackward(gs::Progress::thread), w);
        }
    for (auto [parameters, bytes] :
         {std::pair{std::size_t{50}, mib}, {std::size_t{100}, 25 * mib}, {std::size_t{1000}, 25 * mib}, {std::size_t{300}, 100 * mib}})
        for (auto storage : {gs::GradientStorage::in_buckets, gs::GradientStorage::borrowed}) {
            const Workload w{.ranks = 2, .parameters = parameters, .bytes = bytes / parameters / 64 * 64 * parameters, .storage = storage};
            add_step<gs::PerParameter>("PerParameter", w);
            add_step<gs::Flat>("Flat", w);
            add_step<gs::SizeCappedBuckets>("SizeCappedBuckets", w);
        }
    add_step<gs::SizeCappedBuckets>("SizeCappedBuckets",
                                    {.ranks = 2, .parameters = 1000000, .bytes = 4000000, .storage = gs::GradientStorage::borrowed});
    for (std::size_t parameters : {100000, 1000000})
        for (int ranks : {1, 2}) add_construct(ranks, parameters);
    add_overlaps("NoOverlap", gs::NoOverlap());
    add_overlaps("OverlapBackward", gs::OverlapBackward());
    add_overlaps(by_thread, gs::OverlapBackward(gs::Progress::thread));
}

}  // namespace

int main(int argc, char** argv) {
    Flags(argc, argv).take(contest_options);
    add_all();
    return run_benchmarks(argc, argv);
}
