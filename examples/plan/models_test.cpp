// SPDX-License-Identifier: BSL-1.0
#include "models.hpp"

#include <doctest/doctest.h>

#include <cstdint>

#include <gradsync/planning/memory.hpp>

using namespace gradsync_plan;
using namespace gradsync::plan;

TEST_CASE("an MLP of 4096, 2048, 2048, 4096 at batch 4: 80 MiB of weights, 80.1875 MiB with activations") {
    const Mlp mlp{.widths = {4096, 2048, 2048, 4096}};
    constexpr double mib = 1 << 20;
    CHECK(static_cast<double>(4 * mlp.parameters()) / mib == 80);
    CHECK(static_cast<double>(4 * mlp.activations(4)) / mib == 0.1875);
    CHECK(static_cast<double>(4 * mlp.parameters() + 4 * mlp.activations(4)) / mib == 80.1875);
    CHECK(Mlp{.widths = {3, 5, 2}, .biases = true}.parameters() == 15 + 5 + 10 + 2);
}

TEST_CASE("a transformer of 194,103,296 parameters, and its bytes in training") {
    // No biases, one matrix for both tables, three matrices of e x 1.5 e in the feed-forward layer (or 4.5 e^2 otherwise).
    const Transformer model{
        .vocabulary = 50257, .d_model = 1024, .blocks = 16, .heads = 8, .d_ff = 1536, .gated = true, .biases = false, .tied = true};
    CHECK(model.parameters() == 194'103'296);
    Transformer deeper = model;
    deeper.blocks = 32;
    CHECK(deeper.parameters() == 336'742'400);
    deeper.d_model = 4096;
    deeper.d_ff = 6144;
    CHECK(deeper.parameters() == 4'769'521'664);

    // (4 P + 2 activations) x bytes a parameter
    const std::uint64_t batch = 3, context = 512;
    CHECK(model.activations(batch, context) == batch * context * (2 * 50257 + 16 * (6 * 1024 + 8 * context)));
    CHECK(state_memory(model.parameters(), half_precision_adam, ZeroStage::none, 1).total() == 4 * 194'103'296ull * 2);
    CHECK(model.activations(batch, context, true) == batch * context * (2 * 50257 + 16 * 1024 + 6 * 1024 + 8 * context));
}

TEST_CASE("a transformer's parameters, counted tensor by tensor") {
    const std::uint64_t v = 256, d = 32, l = 3, ff = 128, c = 64;
    const std::uint64_t block = 3 * d * d + 3 * d + d * d + d + d * ff + ff + ff * d + d + 2 * 2 * d;
    CHECK(Transformer{.vocabulary = v, .d_model = d, .blocks = l, .learned_positions = c}.parameters() ==
          2 * v * d + c * d + l * block + 2 * d);
    CHECK(Transformer{.vocabulary = v, .d_model = d, .blocks = l, .tied = true}.parameters() == v * d + l * block + 2 * d);
    const std::uint64_t gated = 4 * d * d + 4 * d + 3 * d * 96 + 2 * 96 + d + 2 * 2 * d;
    CHECK(Transformer{.vocabulary = v, .d_model = d, .blocks = l, .d_ff = 96, .gated = true}.parameters() == 2 * v * d + l * gated + 2 * d);
}

TEST_CASE("feed-forward blocks only: 219,848,638,464 parameters, and what a device holds of them") {
    const FeedForward model{.d_model = 16384, .d_ff = 53248, .blocks = 126};
    const std::uint64_t n = model.parameters();
    CHECK(n == 219'848'638'464);
    CHECK(4 * n == 879'394'553'856);                         // 879.4 GB
    CHECK(4 * n == 819ull << 30);                            // 819 GiB, on the dot
    CHECK(2 * model.activations_per_token() == 17'547'264);  // bytes in bf16
    CHECK(17'547'264 % 7 == 0);                              // as 126 blocks make it; 17,543,808 is no multiple of 7, and so a slip
    CHECK(17'543'808 % 7 != 0);
    CHECK(model.activations(1, 1) == 8'773'632);

    const StateMemory all = state_memory(n, single_precision_adam, ZeroStage::none, 1);
    CHECK(all.weights == 4 * n);
    CHECK(all.gradients == 4 * n);
    CHECK(all.optimizer == 8 * n);
    CHECK(state_memory(n, single_precision_adam, ZeroStage::parameters, 64).total() == 16 * n / 64);
}

TEST_CASE("sizes that 64 bits do not hold are refused") {
    const std::uint64_t huge = std::uint64_t{1} << 40;
    CHECK_THROWS_AS((FeedForward{huge, huge, 1}.parameters()), gradsync::Error);
    CHECK_THROWS_AS((FeedForward{1, 1, huge}.activations(huge, 1)), gradsync::Error);
    CHECK_THROWS_AS((Mlp{.widths = {huge, huge}}.parameters()), gradsync::Error);
    CHECK_THROWS_AS((Transformer{.vocabulary = 1, .d_model = huge, .blocks = 1}.parameters()), gradsync::Error);
}
