// SPDX-License-Identifier: BSL-1.0
#include "options.hpp"

#include <array>
#include <string>

#include <CLI/CLI.hpp>

#include "numbers.hpp"

namespace gradsync_train {

namespace {

/// Fills in defaults that depend on other flags, and refuses what cannot work together.
void complete(Options& o) {
    const bool mlp = o.model == "mlp";
    if (o.d_model == 0) o.d_model = mlp ? 32 : 256;
    if (o.context == 0) o.context = mlp ? 16 : 128;
    if (o.micro_batch == 0) o.micro_batch = mlp ? 64 : 8;
    const auto text = [](auto n) { return std::to_string(n); };

    if (!mlp && o.d_model % o.heads != 0) {
        throw UsageError("--d-model " + text(o.d_model) + " is not divisible by --heads " + text(o.heads) +
                         "; every head takes an equal part of it");
    }
    if (mlp && (o.tied || o.recompute)) {
        throw UsageError(std::string(o.tied ? "--tied" : "--recompute") + " is for --model transformer; leave it out");
    }
    if (o.global_batch > 0) {
        if (o.global_batch % o.micro_batch != 0) {
            throw UsageError("--global-batch " + text(o.global_batch) + " is not divisible by --micro-batch " + text(o.micro_batch) +
                             "; the next that is: " + text((o.global_batch / o.micro_batch + 1) * o.micro_batch));
        }
        if (o.global_batch / o.micro_batch < static_cast<std::size_t>(o.ranks)) {
            throw UsageError("--global-batch " + text(o.global_batch) + " is too small for --ranks " + text(o.ranks) + " x --micro-batch " +
                             text(o.micro_batch) + "; every rank computes one micro-batch at least");
        }
    }
    if (o.independent && o.global_batch / o.micro_batch % static_cast<std::size_t>(o.ranks) != 0) {
        throw UsageError("--independent ranks compute as many micro-batches each; make --global-batch a multiple of " +
                         text(static_cast<std::size_t>(o.ranks) * o.micro_batch));
    }
    o.micro_batches = o.global_batch > 0 ? o.global_batch / o.micro_batch : static_cast<std::size_t>(o.ranks) * o.accumulate;
    if (o.checkpoint.empty() && (o.resume || o.checkpoint_every > 0)) {
        throw UsageError(std::string(o.resume ? "--resume" : "--checkpoint-every") + " needs a directory; name it with --checkpoint");
    }
    if (o.independent && (!o.checkpoint.empty() || !o.save_weights.empty() || o.sample > 0)) {
        throw UsageError("--independent runs are for timing only; leave out --checkpoint, --save-weights and --sample");
    }
    if (o.shard != "none" && o.gradients == "borrowed") {
        throw UsageError("--gradients borrowed is for --shard none; the gradients that are sharded live in buckets");
    }
    if (o.shard == "parameters" && o.overlap == "forward") {
        throw UsageError(
            "--overlap forward does not go with --shard parameters, which gathers weights in the forward "
            "pass as it is; see --prefetch");
    }
    if (o.shard != "none" && o.buckets == "optimal") {
        throw UsageError("--buckets optimal is for --shard none; shards stay where the first plan has put them");
    }
    if (o.shard != "optimizer" && o.overlap == "step") {
        throw UsageError("--overlap step is for --shard optimizer: each rank steps its shard inside the reduction");
    }
    if (o.shared_weights && (o.shard != "optimizer" || o.backend != "threads")) {
        throw UsageError("--shared-weights is for --shard optimizer and --backend threads: the ranks read one set of weights");
    }
    if (o.shard == "parameters") o.buckets = "unit";
    if (o.reduce_dtype != "f32" && (o.shard == "none" || o.shard == "optimizer")) o.gradients = "borrowed";  // buckets have the other type
    if (o.compress != "none") {
        const std::string flag = "--compress " + o.compress;
        if (o.shard != "none") throw UsageError(flag + " is for --shard none; what is sharded travels whole");
        if (o.reduce_dtype != "f32")
            throw UsageError(flag + " does not go with --reduce-dtype " + o.reduce_dtype +
                             ", as both say what travels; leave one of them out");
        if (o.device == "cuda") throw UsageError(flag + " is for --device cpu; gradients are compressed in the host's memory so far");
        if (o.overlap == "forward")
            throw UsageError(flag + " does not go with --overlap forward, which splits an all-reduce in two; use --overlap backward");
    }
    if (o.optimizer == "muon" && o.overlap == "step") {
        throw UsageError("--overlap step steps a matrix in parts, and --optimizer muon needs it whole; use --overlap backward");
    }
    if (o.device == "cuda") {
        if (o.optimizer == "muon") throw UsageError("--optimizer muon is for --device cpu so far; leave it out");
        if (o.overlap == "step") {
            throw UsageError("--overlap step is for --device cpu, where ranks read one another's memory; use --overlap backward");
        }
        if (o.shared_weights) throw UsageError("--shared-weights is for --device cpu, whose ranks share memory; leave it out");
        if (o.backend == "mpi" || o.backend == "tcp") {
            throw UsageError("--device cuda does not go with --backend " + o.backend +
                             "; use --backend nccl for processes, which needs no MPI, or threads");
        }
    } else if (o.backend == "nccl") {
        throw UsageError("--backend nccl is for --device cuda, whose memory it moves; add that");
    }
    if (o.elastic) {
        const auto refuse = [](bool wrong, const std::string& flag) {
            if (wrong) throw UsageError("--elastic does not go with " + flag + " so far; leave one of them out");
        };
        if (o.backend != "tcp") throw UsageError("--elastic is for --backend tcp");
        refuse(o.compress != "none", "--compress " + o.compress);
        refuse(o.reduce_dtype != "f32", "--reduce-dtype " + o.reduce_dtype);
        refuse(o.overlap == "step" || (o.overlap == "forward" && o.shard == "none"), "--overlap " + o.overlap);
        refuse(o.shard != "none" && o.keep_every == 0, "--keep-every 0");
        refuse(o.independent, "--independent");
    }
    if (o.prompt.empty()) throw UsageError("--prompt is empty; give at least one byte to go on from");
}

}  // namespace

void check_text(const Options& o, Reading reading, const Text& text) {
    const std::size_t samples = Samples::count(text.training.size(), reading);
    const std::string remedy = "; give more text with --data, or lower --context, --micro-batch, --accumulate or --ranks";
    const std::string size = "the text has " + std::to_string(text.training.size()) + " bytes for training and " +
                             std::to_string(text.validation.size()) + " for validation";
    if (samples == 0 || Samples::count(text.validation.size(), reading) == 0) {
        throw UsageError(size + ", too few for --context " + std::to_string(o.context) + remedy);
    }
    if (samples < o.samples_per_step()) {
        throw UsageError(size + ": " + std::to_string(samples) + " samples an epoch, fewer than the " +
                         std::to_string(o.samples_per_step()) + " of one step" + remedy);
    }
}

Options parse_options(int argc, char** argv, int processes) {
    Options o;
    CLI::App app{
        "Trains a small language model over bytes, data-parallel: every rank computes gradients on its own part of "
        "each\n"
        "batch, gradsync averages them, every rank takes the same step. Without --data it reads the project's own "
        "sources.\n"
        "\n"
        "  gradsync_train --ranks 2 --steps 200 --sample 400\n"
        "  gradsync_train --model mlp --hidden 2048,2048,1024 --buckets flat --overlap none --json -\n"
        "  gradsync_train --data corpus.txt --checkpoint run1 --checkpoint-every 100 --resume\n"};
    app.name("gradsync_train")->option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    for (const char* type : {"UINT", "INT", "FLOAT"}) app.get_formatter()->label(type, "N");
    app.get_formatter()->column_width(36);
    using gradsync_examples::within;
    const auto count = within(std::uint64_t{1}, std::uint64_t{1'000'000'000});
    const auto count_or_none = within(std::uint64_t{0}, std::uint64_t{1'000'000'000});
    const auto size = within(std::uint64_t{1}, std::uint64_t{1'000'000});
    const auto amount = within(0.0, 1e9);

    std::string group = "Model";
    app.add_option("--model", o.model, "mlp: the last bytes' embeddings through hidden layers; or transformer")
        ->check(CLI::IsMember({"mlp", "transformer"}))
        ->group(group);
    app.add_option("--d-model", o.d_model, "width of the residual stream [256]; mlp: numbers a byte [32]")
        ->check(size)
        ->group(group)
        ->default_str("");
    app.add_option("--context", o.context, "bytes the model looks back on [128; mlp: 16]")->check(size)->group(group)->default_str("");
    app.add_option("--blocks", o.blocks, "transformer blocks")->check(size)->group(group);
    app.add_option("--heads", o.heads, "attention heads")->check(size)->group(group);
    app.add_flag("--tied", o.tied, "output layer and embedding are one matrix")->group(group);
    app.add_option("--hidden", o.hidden, "widths of the mlp's hidden layers")->check(size)->delimiter(',')->take_all()->group(group);
    app.add_flag("--recompute", o.recompute,
                 "keep the blocks' inputs only and repeat each block before its backward pass:\n"
                 "same result, less memory, about a quarter more time")
        ->group(group);

    group = "Training";
    app.add_option("--data", o.data, "text files; the last tenth of each is for validation")->take_all()->group(group)->default_str("");
    app.add_option("--steps", o.steps, "optimizer steps, over all resumed runs together")->check(count)->group(group);
    app.add_option("--micro-batch", o.micro_batch, "samples in one forward pass of one rank [8; mlp: 64]")
        ->check(size)
        ->group(group)
        ->default_str("");
    app.add_option("--device", o.device, "cpu; cuda: models compute on GPUs, a rank on each")
        ->check(CLI::IsMember({"cpu", "cuda"}))
        ->group(group);
    const auto* precision =
        app.add_option(
               "--precision", o.precision,
               "--device cuda: the type of what matrix products take, and of activations; weights, their gradients and sums are f32")
            ->check(CLI::IsMember({"bf16", "f32"}))
            ->group(group);
    auto* accumulate =
        app.add_option("--accumulate", o.accumulate, "micro-batches a rank adds up before a step")->check(size)->group(group);
    app.add_option("--global-batch", o.global_batch,
                   "samples a step over all ranks, instead of --accumulate: the same bits on any number of ranks")
        ->check(size)
        ->excludes(accumulate)
        ->group(group)
        ->default_str("");
    app.add_option("--lr", o.lr, "peak learning rate")->check(amount)->group(group);
    app.add_option("--warmup", o.warmup, "steps to reach it; then half a cosine down to a tenth")->check(count_or_none)->group(group);
    app.add_option("--optimizer", o.optimizer, "muon: for the matrices between layers; the rest has AdamW")
        ->check(CLI::IsMember({"adamw", "muon"}))
        ->group(group);
    app.add_option("--weight-decay", o.weight_decay, "of matrices")->check(amount)->group(group);
    app.add_option("--clip", o.clip, "largest norm of the averaged gradient; 0: any")->check(amount)->group(group);
    app.add_option("--seed", o.seed, "of the first weights and of the order of samples")->check(within(std::uint64_t{0}))->group(group);
    app.add_option("--validate-every", o.validate_every, "steps between validations; 0: at the end only")
        ->check(count_or_none)
        ->group(group);

    group = "Synchronisation";
    app.add_option("--backend", o.backend,
                   "threads: ranks are threads of this process; mpi: they are the processes started by mpirun;\n"
                   "tcp: they are processes started by whatever sets RANK and WORLD_SIZE, no MPI; nccl: the same, with a GPU each")
        ->check(CLI::IsMember({"threads", "mpi", "tcp", "nccl"}))
        ->group(group);
    auto* ranks = app.add_option("--ranks", o.ranks, "how many train together [2; mpi, tcp, nccl: as the launcher says]")
                      ->check(within(1, 1024))
                      ->group(group)
                      ->default_str("");
    const std::array<CLI::Option*, 3> of_buckets{
        app.add_option("--buckets", o.buckets,
                       "gradients that travel together: per-parameter, flat (all), capped (by size), or optimal: planned\n"
                       "after some steps, by when gradients become ready and by what collectives cost here")
            ->check(CLI::IsMember({"per-parameter", "flat", "capped", "optimal"}))
            ->group(group),
        app.add_option("--bucket-mib", o.bucket_mib, "cap of a bucket, MiB")->check(within(1e-6, 1e6))->group(group),
        app.add_option("--first-bucket-mib", o.first_bucket_mib, "cap of the first bucket to leave, MiB")
            ->check(within(1e-6, 1e6))
            ->group(group)};
    app.add_option("--overlap", o.overlap,
                   "none: all at the end of the backward pass; backward: a bucket leaves when it is full;\n"
                   "backward-polls, backward-thread: the same, and marks of gradients move it on, or a thread beside the\n"
                   "computation does (backward takes what suits the backend);\n"
                   "forward: it is reduced in the backward pass, and gathered under the next forward pass;\n"
                   "step: with --shard optimizer it is reduced, stepped and gathered in one pass, where ranks share memory")
        ->check(CLI::IsMember({"none", "backward", "backward-polls", "backward-thread", "forward", "step"}))
        ->group(group);
    const auto* gradients =
        app.add_option("--gradients", o.gradients, "in-buckets: no copies; borrowed: the trainer's own memory, copied in and out")
            ->check(CLI::IsMember({"in-buckets", "borrowed"}))
            ->group(group);
    app.add_option("--reduce-dtype", o.reduce_dtype,
                   "the type in which gradients travel; bf16: half the bytes. Micro-batches still add up in f32, and weights and\n"
                   "the optimizer's state stay f32")
        ->check(CLI::IsMember({"f32", "bf16"}))
        ->group(group);
    app.add_option("--compress", o.compress,
                   "what travels of the gradients: none: all of them; power-sgd: factors of low rank; quantize: all in few\n"
                   "bits. The part that is not sent is added to the gradients of the next step")
        ->check(CLI::IsMember({"none", "power-sgd", "quantize"}))
        ->group(group);
    const std::array<CLI::Option*, 3> of_compression{
        app.add_option("--compress-after", o.compress_after, "--compress: steps before it begins")->check(count_or_none)->group(group),
        app.add_option("--compress-rank", o.compress_rank, "--compress power-sgd: of the matrices that travel instead")
            ->check(size)
            ->group(group),
        app.add_option("--compress-bits", o.compress_bits, "--compress quantize: of an element")
            ->check(CLI::IsMember({8, 4, 1}))
            ->group(group)};
    app.add_option("--shard", o.shard,
                   "what is split over the ranks: the optimizer's state; the gradients, too; the parameters, too.\n"
                   "The same result as none, on the CPU to the bit")
        ->check(CLI::IsMember({"none", "optimizer", "gradients", "parameters"}))
        ->group(group);
    app.add_flag("--shared-weights", o.shared_weights, "--shard optimizer on the CPU, threads: one set of weights for all ranks")
        ->group(group);
    const std::array<CLI::Option*, 3> of_parameters{
        app.add_option("--prefetch", o.prefetch, "--shard parameters: layers gathered ahead of the one in use")
            ->check(count_or_none)
            ->group(group),
        app.add_flag("--no-reshard", o.no_reshard, "--shard parameters: keep gathered weights from the forward for the backward pass")
            ->group(group),
        app.add_option("--replicate-below", o.replicate_below, "--shard parameters: keep parameters of fewer numbers whole (norms, biases)")
            ->check(count_or_none)
            ->group(group)};
    app.add_option("--timeout", o.timeout, "seconds after which a rank that waits gives up")->check(within(1e-3, 1e6))->group(group);
    app.add_flag("--no-shared-memory", o.no_shared_memory, "mpi, tcp: ranks of one machine send messages, like those of different machines")
        ->group(group);
    app.add_flag("--independent", o.independent, "do not synchronise at all: what the ranks cost one another otherwise")->group(group);

    app.add_flag("--elastic", o.elastic, "tcp: ranks may come and go; see gradsync_run --min-ranks and --spares")->group(group);

    group = "Output";
    app.add_option("--checkpoint", o.checkpoint, "directory to keep the run in, written at the end")->group(group)->default_str("");
    app.add_option("--keep-every", o.keep_every,
                   "under gradsync_run --restarts, or with --elastic and --shard: steps after which the state is kept in memory; 0: never");
    app.add_option("--checkpoint-every", o.checkpoint_every, "steps between checkpoints; 0: at the end only")
        ->check(count_or_none)
        ->group(group);
    app.add_flag("--resume", o.resume, "go on from the checkpoint, to the same bits as if never interrupted")->group(group);
    app.add_option("--stop-after", o.stop_after, "end at this step, to be resumed later; the schedule is that of --steps")
        ->check(count)
        ->group(group)
        ->default_str("");
    app.add_option("--load-weights", o.load_weights, "begin with these: a .safetensors file, its .index.json, or a folder with one of them")
        ->group(group)
        ->default_str("");
    app.add_option("--save-weights", o.save_weights,
                   "where the weights go at the end, for PyTorch and others: a file *.safetensors, or a folder, in which\n"
                   "--shard parameters makes a file a rank and model.safetensors.index.json")
        ->group(group)
        ->default_str("");
    app.add_option("--sample", o.sample, "bytes to generate at the end")->check(count_or_none)->group(group);
    app.add_option("--prompt", o.prompt, "what to go on from")->group(group)->default_str("");
    app.add_option("--json", o.json, "file for the results as one JSON object; -: standard output, the rest goes to standard error")
        ->group(group)
        ->default_str("");
    app.add_option("--trace", o.trace,
                   "file for a timeline of the last steps, for ui.perfetto.dev or chrome://tracing; a summary is printed")
        ->group(group)
        ->default_str("");

    try {
        app.parse(argc, argv);
    } catch (const CLI::CallForHelp&) {
        throw HelpWanted(app.help());
    } catch (const CLI::ParseError& error) {
        throw UsageError(std::string(error.what()) + "; see --help");
    }
    if (precision->count() > 0 && o.device == "cpu")
        throw UsageError("--precision is for --device cuda, as the CPU computes in f32; leave it out");
    if (o.backend == (o.device == "cuda" ? "nccl" : "tcp")) {
        if (ranks->count() > 0 && o.ranks != processes) {
            throw UsageError("--ranks " + std::to_string(o.ranks) + ", but WORLD_SIZE (or what the launcher sets instead) is " +
                             std::to_string(processes) + "; leave out --ranks, or start as many processes");
        }
        o.ranks = processes;
    }
    if (o.backend == "mpi" && o.device == "cpu") {
        if (processes == 0) {
            throw UsageError(
                "--backend mpi: this program was built without MPI and Boost.MPI; install them (apt-get install libopenmpi-dev "
                "openmpi-bin libboost-mpi-dev), then configure and build again");
        }
        if (ranks->count() > 0 && o.ranks != processes) {
            const std::string n = std::to_string(o.ranks);
            throw UsageError("--ranks " + n + ", but mpirun has started " + std::to_string(processes) + "; leave out --ranks, or start " +
                             n + " (mpirun -n " + n + ")");
        }
        o.ranks = processes;
    }
    if (o.no_shared_memory && o.backend != "mpi" && o.backend != "tcp")
        throw UsageError("--no-shared-memory is for --backend mpi and tcp; leave it out");
    for (const CLI::Option* option : of_parameters) {
        if (option->count() > 0 && o.shard != "parameters")
            throw UsageError(option->get_name() + " is for --shard parameters; leave it out");
    }
    const std::array<std::string, 3> compressors{"power-sgd or quantize", "power-sgd", "quantize"};
    for (std::size_t k = 0; k < compressors.size(); ++k) {
        const bool fits = k == 0 ? o.compress != "none" : o.compress == compressors[k];
        if (of_compression[k]->count() > 0 && !fits)
            throw UsageError(of_compression[k]->get_name() + " is for --compress " + compressors[k] + "; leave it out");
    }
    for (const CLI::Option* option : of_buckets) {
        if (option->count() > 0 && o.shard == "parameters")
            throw UsageError(option->get_name() +
                             " does not go with --shard parameters, whose gradients travel layer by layer; leave it out");
    }
    if (o.reduce_dtype != "f32" && gradients->count() > 0 && o.gradients == "in-buckets") {
        throw UsageError("--gradients in-buckets saves a copy that --reduce-dtype " + o.reduce_dtype + " needs; leave one of them out");
    }
    o.asks_for_micro_batches = accumulate->count() > 0 || o.global_batch > 0;
    complete(o);
    return o;
}

}  // namespace gradsync_train
