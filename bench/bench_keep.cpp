// SPDX-License-Identifier: BSL-1.0
// Keeping a state in memory that outlives its process, beside a memcpy of as many bytes on as many threads.
//
//     bench_keep [--seconds=S] [--rounds=N] [--no-pin] [Google Benchmark's flags]
//
// Benchmarks are named keep/ranks:R/bytes:N; N is what each rank keeps. Counters: bandwidth, bytes read and written a second; memcpy_ratio, the
// time of keeping over that of the copy, measured in turns.

#include <barrier>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <gradsync/elastic/kept_memory.hpp>
#include <gradsync/kernel/host_buffer.hpp>

#include "contest.hpp"
#include "flags.hpp"
#include "reporting.hpp"

namespace {

using namespace bench;
using gradsync::elastic::KeptMemory;

ContestOptions contest_options{.seconds = 1};

/// A state on each rank.
class OnEachRank : public Contestant {
public:
    OnEachRank(int ranks, std::size_t bytes) : all_(ranks) {
        for (int r = 0; r < ranks; ++r) state_.emplace_back(bytes);
    }
    void meet(int) override { all_.arrive_and_wait(); }

protected:
    gradsync::kernel::HostBuffer& state(int rank) { return state_[static_cast<std::size_t>(rank)]; }

private:
    std::barrier<> all_;
    std::vector<gradsync::kernel::HostBuffer> state_;
};

class Keep final : public OnEachRank {
public:
    Keep(int ranks, std::size_t bytes) : OnEachRank(ranks, bytes), steps_(static_cast<std::size_t>(ranks)) {
        for (int r = 0; r < ranks; ++r) memory_.push_back(KeptMemory::make(bytes, 0));
    }
    double run(int rank, int times) override {
        const auto r = static_cast<std::size_t>(rank);
        const gradsync::List<gradsync::elastic::Piece> pieces{{static_cast<std::byte*>(state(rank).data()), state(rank).bytes()}};
        return time([&] {
            for (int i = 0; i < times; ++i) memory_[r].write(++steps_[r], pieces);
        });
    }

private:
    std::vector<KeptMemory> memory_;
    std::vector<std::uint64_t> steps_;
};

class Copy final : public OnEachRank {
public:
    Copy(int ranks, std::size_t bytes) : OnEachRank(ranks, bytes) {
        for (int r = 0; r < ranks; ++r) out_.emplace_back(bytes);
    }
    double run(int rank, int times) override {
        gradsync::kernel::HostBuffer& out = out_[static_cast<std::size_t>(rank)];
        return time([&] {
            for (int i = 0; i < times; ++i) {
                std::memcpy(out.data(), state(rank).data(), out.bytes());
                asm volatile("" ::: "memory");  // each copy is one that counts
            }
        });
    }

private:
    std::vector<gradsync::kernel::HostBuffer> out_;
};

void add(int ranks, std::size_t bytes) {
    add_benchmark("keep/ranks:" + std::to_string(ranks) + "/bytes:" + std::to_string(bytes), benchmark::kMicrosecond,
                  [=](benchmark::State& state) {
                      Keep keep(ranks, bytes);
                      Copy copy(ranks, bytes);
                      Contestant* contestants[] = {&keep, &copy};
                      const ContestResult samples = run_contest(ranks, contestants, contest_options);
                      const Summary own = summarise(samples[0].seconds);
                      report(state, own, 0);
                      state.counters["bandwidth"] = 2 * static_cast<double>(bytes) * ranks / own.median;
                      state.counters["memcpy_ratio"] = own.median / summarise(samples[1].seconds).median;
                  });
}

}  // namespace

int main(int argc, char** argv) {
    Flags(argc, argv).take(contest_options);
    for (const int ranks : {1, 2})
        for (const std::size_t bytes : {std::size_t{64} << 10, std::size_t{1} << 20, std::size_t{16} << 20, std::size_t{128} << 20})
            add(ranks, bytes);
    return run_benchmarks(argc, argv);
}
