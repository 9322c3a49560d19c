// SPDX-License-Identifier: BSL-1.0
// Bulk conversion between floating types, one thread.
//
//     bench_convert [--seconds=S] [--rounds=N] [--no-pin] [Google Benchmark's flags]
//
// Benchmarks are named convert/FROM/TO/elements:N. Counters: bandwidth, bytes read and
// written a second; memcpy_ratio, the time of a memcpy of as many bytes (half read, half written) over this one's,
// measured in turns with it.

#include <cstddef>
#include <cstring>
#include <string>

#include <gradsync/kernel/convert.hpp>
#include <gradsync/kernel/host_buffer.hpp>
#include <gradsync/kernel/tables.hpp>

#include "contest.hpp"
#include "flags.hpp"
#include "reporting.hpp"

namespace {

using namespace bench;
using gradsync::DType;

ContestOptions contest_options{.seconds = 0.3};

class Conversion final : public Contestant {
public:
    Conversion(DType from, DType to, std::size_t count)
        : from_(from), to_(to), count_(count), in_(count * size_of(from)), out_(count * size_of(to)) {
        gradsync::kernel::register_kernels(from);
        gradsync::kernel::register_kernels(to);
    }
    void meet(int) override {}
    double run(int, int times) override {
        return time([&] {
            for (int i = 0; i < times; ++i) gradsync::kernel::convert(in_.data(), from_, out_.data(), to_, count_);
        });
    }

private:
    DType from_, to_;
    std::size_t count_;
    gradsync::kernel::HostBuffer in_, out_;
};

class Copy final : public Contestant {
public:
    explicit Copy(std::size_t bytes) : in_(bytes), out_(bytes) {}
    void meet(int) override {}
    double run(int, int times) override {
        return time([&] {
            for (int i = 0; i < times; ++i) {
                std::memcpy(out_.data(), in_.data(), in_.bytes());
                asm volatile("" ::: "memory");  // each copy is one that counts
            }
        });
    }

private:
    gradsync::kernel::HostBuffer in_, out_;
};

void add(DType from, DType to, std::size_t count) {
    const std::string name =
        "convert/" + std::string(name_of(from)) + "/" + std::string(name_of(to)) + "/elements:" + std::to_string(count);
    add_benchmark(name, benchmark::kMicrosecond, [=](benchmark::State& state) {
        const std::size_t bytes = count * (size_of(from) + size_of(to));
        Conversion conversion(from, to, count);
        Copy copy(bytes / 2);
        Contestant* contestants[] = {&conversion, &copy};
        const ContestResult samples = run_contest(1, contestants, contest_options);
        const Summary own = summarise(samples[0].seconds);
        report(state, own, 0);
        state.counters["bandwidth"] = static_cast<double>(bytes) / own.median;
        state.counters["memcpy_ratio"] = summarise(samples[1].seconds).median / own.median;
    });
}

}  // namespace

int main(int argc, char** argv) {
    Flags(argc, argv).take(contest_options);
    constexpr DType pairs[][2] = {{DType::f32, DType::bf16}, {DType::bf16, DType::f32}, {DType::f32, DType::f16},
                                  {DType::f16, DType::f32},  {DType::f64, DType::bf16}, {DType::f16, DType::bf16}};
    for (const auto& [from, to] : pairs)
        for (std::size_t count : {std::size_t{4} << 10, std::size_t{128} << 10, std::size_t{16} << 20}) add(from, to, count);
    return run_benchmarks(argc, argv);
}
