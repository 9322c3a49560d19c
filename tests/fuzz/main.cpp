// SPDX-License-Identifier: BSL-1.0
// Runs one target: with libFuzzer (scripts/fuzz), or without it on a corpus and on random mutations of it.
//
//   fuzz NAME CORPUS MUTATIONS        for two seconds at most
//   GRADSYNC_FUZZ_TARGET=NAME fuzz [libFuzzer's options]
#include <chrono>
#include <exception>
#include <fstream>
#include <iterator>
#include <random>
#include <string_view>
#include <vector>

#include "fuzz.hpp"

namespace {

using gradsync_fuzz::Target;

const Target& target_named(std::string_view name) {
    for (const Target* target = Target::first; target != nullptr; target = target->next)
        if (target->name == name) return *target;
    std::fprintf(stderr, "fuzz: no target '%s'; there are:\n", std::string(name).c_str());
    for (const Target* target = Target::first; target != nullptr; target = target->next) std::fprintf(stderr, "%s\n", target->name);
    std::exit(2);
}

void run(const Target& target, const std::uint8_t* data, std::size_t size) {
    try {
        target.run({data, size});
    } catch (const std::exception&) {
    }
}

}  // namespace

#ifdef GRADSYNC_LIBFUZZER
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static const char* const name = std::getenv("GRADSYNC_FUZZ_TARGET");
    static const Target& target = target_named(name != nullptr ? name : "");
    run(target, data, size);
    return 0;
}
#else
int main(int argc, char** argv) {
    const Target& target = target_named(argc > 1 ? argv[1] : "");
    if (argc != 4) return std::fprintf(stderr, "usage: %s NAME CORPUS MUTATIONS\n", argv[0]), 2;
    std::vector<std::vector<std::uint8_t> > seeds(1);
    for (const auto& entry : std::filesystem::directory_iterator(argv[2])) {
        std::ifstream file(entry.path(), std::ios::binary);
        seeds.emplace_back(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
    }
    std::sort(seeds.begin(), seeds.end());
    for (const auto& seed : seeds) run(target, seed.data(), seed.size());
    std::mt19937_64 random(1);
    const long most = std::atol(argv[3]);
    long runs = 0;
    for (const auto start = std::chrono::steady_clock::now();
         runs < most && std::chrono::steady_clock::now() - start < std::chrono::seconds(2); ++runs) {
        auto input = seeds[random() % seeds.size()];
        for (auto changes = random() % 4 + 1; changes > 0; --changes) {
            const std::size_t at = random() % (input.size() + 1), bytes = std::size_t{1} << random() % 4;
            const auto place = input.begin() + static_cast<std::ptrdiff_t>(at);
            const std::uint64_t value = random() % 2 ? random() : random() % 3 - 1;  // any, or 0, 1, -1
            switch (random() % 3) {
                case 0: input.insert(place, bytes, static_cast<std::uint8_t>(value)); break;
                case 1: input.erase(place, place + static_cast<std::ptrdiff_t>(std::min(bytes, input.size() - at))); break;
                default:
                    for (std::size_t i = 0; i < bytes && at + i < input.size(); ++i)
                        input[at + i] = static_cast<std::uint8_t>(value >> 8 * i);
            }
        }
        run(target, input.data(), input.size());
    }
    std::printf("%s: %zu files, %ld mutations\n", target.name, seeds.size() - 1, runs);
}
#endif
