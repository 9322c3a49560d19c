// SPDX-License-Identifier: BSL-1.0
#pragma once
// The command line.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include <gradsync/core/deal.hpp>

#include "data.hpp"
#include "mlp.hpp"
#include "transformer.hpp"

namespace gradsync_train {

struct Options {
    std::string model = "transformer";
    std::size_t d_model = 0, context = 0, blocks = 4, heads = 4;  // 0: the model's own default
    std::vector<std::size_t> hidden{512, 512};
    bool tied = false, recompute = false;

    std::vector<std::filesystem::path> data;
    std::uint64_t seed = 1;
    std::uint64_t steps = 200;
    std::size_t micro_batch = 0, accumulate = 1, global_batch = 0;
    std::size_t micro_batches = 0;  // of a step, of all ranks: as --accumulate or --global-batch say, or the checkpoint
    bool asks_for_micro_batches = false;
    std::string optimizer = "adamw";
    double lr = 1e-3, weight_decay = 0.1, clip = 1.0;
    std::uint64_t warmup = 20;
    std::uint64_t validate_every = 0;

    std::string device = "cpu", precision = "bf16";  // the latter on a device
    std::string backend = "threads";
    int ranks = 2;  // over MPI and NCCL: as many as there are processes
    bool no_shared_memory = false;
    std::string buckets = "capped";
    double bucket_mib = 25, first_bucket_mib = 1;
    std::string overlap = "backward";
    std::string gradients = "in-buckets";
    std::string reduce_dtype = "f32";  // of gradients on their way
    std::string compress = "none";
    std::size_t compress_rank = 4;  // of --compress power-sgd
    unsigned compress_bits = 8;     // of --compress quantize
    std::uint64_t compress_after = 0;
    std::string shard = "none";
    std::size_t prefetch = 1, replicate_below = 0;  // of --shard parameters
    bool no_reshard = false;
    bool shared_weights = false;
    double timeout = 60;
    bool independent = false;
    bool elastic = false;

    std::filesystem::path checkpoint;
    std::uint64_t checkpoint_every = 0, keep_every = 1, stop_after = 0;
    bool resume = false;
    std::filesystem::path load_weights, save_weights;

    std::size_t sample = 0;
    std::string prompt = "\n";
    std::string json, trace;

    std::size_t samples_per_step() const { return micro_batches * micro_batch; }
    /// The micro-batches of a step, for `size` ranks that are in step with one another; each is alone if they are independent.
    gradsync::Deal deal(int size) const {
        const std::size_t all = micro_batches == 0 ? accumulate * static_cast<std::size_t>(size)
                                : independent      ? micro_batches / static_cast<std::size_t>(ranks)
                                                   : micro_batches;
        return {all, size, shard == "gradients" || shard == "parameters"};
    }
    std::uint64_t last_step() const { return stop_after > 0 ? std::min(stop_after, steps) : steps; }

    /// Describes what a checkpoint holds: the model, its optimizer, and the compression of gradients, of which each rank holds a part.
    std::string describe_run(std::string of_model) const {
        if (optimizer != "adamw") of_model += " optimizer=" + optimizer;
        if (compress == "none") return of_model;
        return of_model + " compress=" + compress + ":" + std::to_string(compress == "power-sgd" ? compress_rank : compress_bits) + ":" +
               std::to_string(compress_after) + " ranks=" + std::to_string(ranks);
    }

    void model_config(MlpConfig& c) const {
        c = {.context = context, .embedding = d_model, .hidden = hidden, .sequences = micro_batch, .seed = seed};
    }
    void model_config(TransformerConfig& c) const {
        c = {.width = d_model,
             .blocks = blocks,
             .heads = heads,
             .context = context,
             .sequences = micro_batch,
             .tied = tied,
             .recompute = recompute,
             .seed = seed};
    }
};

/// What `argv` asks for, complete and consistent. Throws UsageError, and HelpWanted (its text is the help page).
/// `processes`: how many the launcher has started; 0: the program cannot be one of several.
Options parse_options(int argc, char** argv, int processes = 0);

struct HelpWanted : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// Throws UsageError if the text is too short for the flags.
void check_text(const Options& o, Reading reading, const Text& text);

}  // namespace gradsync_train
