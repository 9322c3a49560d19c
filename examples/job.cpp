// SPDX-License-Identifier: BSL-1.0
#include "job.hpp"

#include <exception>
#include <filesystem>
#include <fstream>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "ops_cpu.hpp"
#include "sample.hpp"

namespace gradsync_train {

namespace {

template <class Model>
void prepare_for(Job& job, bool speaks) {
    Options& o = job.options;
    typename Model::Config config;
    o.model_config(config);
    job.reading = config.reading();
    if (o.resume && !std::filesystem::exists(std::filesystem::symlink_status(checkpoint_file(o.checkpoint)))) {
        if (speaks) std::fprintf(stderr, "gradsync_train: there is no checkpoint in %s yet; beginning anew\n", o.checkpoint.c_str());
        if (o.elastic) return check_text(o, job.reading, job.text);  // there may be one later
        o.resume = false;
    }
    if (!o.resume && !o.load_weights.empty()) {  // a checkpoint has its own
        auto weights = std::make_unique<SafeWeights>(o.load_weights);
        config.sequences = 1;  // only its parameters are wanted
        weights->match(Model(config).parameters());
        job.weights = std::move(weights);
    }
    if (!o.resume) return check_text(o, job.reading, job.text);
    job.checkpoint = std::make_unique<Checkpoint const>(o.checkpoint);
    job.checkpoint->expect_model(o.describe_run(config.description()));
    const Progress progress = job.checkpoint->progress();
    if (progress.steps > o.last_step()) {
        throw UsageError("--resume: the checkpoint is at step " + std::to_string(progress.steps) +
                         " already; raise --steps or --stop-after");
    }
    if (!o.asks_for_micro_batches) o.micro_batches = progress.micro_batches;
    if (o.micro_batches < static_cast<std::size_t>(o.ranks)) {
        throw UsageError("--resume: a step of the checkpoint has " + std::to_string(o.micro_batches) +
                         " micro-batches, too few for --ranks " + std::to_string(o.ranks) + "; start fewer ranks, or say --global-batch");
    }
    if (speaks && (o.micro_batches != progress.micro_batches || o.micro_batch != progress.micro_batch)) {
        std::fprintf(stderr, "gradsync_train: a step has %zu micro-batches of %zu samples from here on, and had %llu of %llu\n",
                     o.micro_batches, o.micro_batch, static_cast<unsigned long long>(progress.micro_batches),
                     static_cast<unsigned long long>(progress.micro_batch));
    }
    check_text(o, job.reading, job.text);
    if (speaks && progress.fingerprint != job.text.fingerprint()) {
        std::fprintf(stderr, "gradsync_train: the text has changed since the checkpoint; going on with the new one\n");
    }
}

/// Before the training, not after it. Leaves what is there as it is.
void expect_writable(const std::string& file, const char* flag) {
    const bool existed = std::filesystem::exists(file);
    if (!std::ofstream{file, std::ios::app}) throw UsageError("cannot write " + file + "; name another file with " + flag);
    if (!existed) std::filesystem::remove(file);
}

/// The same of a folder, which may have to be made.
void expect_writable_folder(const std::filesystem::path& folder, const char* flag) {
    const bool existed = std::filesystem::exists(folder);
    std::error_code error;
    std::filesystem::create_directories(folder, error);
    const auto probe = folder / ".gradsync_train";
    const bool writable = !error && std::ofstream{probe};
    std::filesystem::remove(probe, error);
    if (!existed) std::filesystem::remove(folder, error);
    if (!writable) throw UsageError("cannot write into " + folder.string() + "; name another folder with " + flag);
}

}  // namespace

Job prepare(Options options, bool speaks) {
    CpuOps::initialise();
    if (speaks && !options.json.empty() && options.json != "-") expect_writable(options.json, "--json");
    if (speaks && !options.trace.empty()) expect_writable(options.trace, "--trace");
    if (speaks && !options.checkpoint.empty()) expect_writable_folder(options.checkpoint, "--checkpoint");
    if (speaks && is_weights_file(options.save_weights)) expect_writable(options.save_weights, "--save-weights");
    else if (speaks && !options.save_weights.empty()) expect_writable_folder(options.save_weights, "--save-weights");
    Text text = read_text(options.data.empty() ? default_files(GRADSYNC_SOURCE_DIR) : options.data);
    std::FILE* const out = options.json == "-" ? stderr : stdout;
    Job job{std::move(options), out, {}, std::move(text), nullptr, nullptr, nullptr};
    if (job.options.model == "mlp") prepare_for<Mlp<CpuOps>>(job, speaks);
    else prepare_for<Transformer<CpuOps>>(job, speaks);
    return job;
}

void present(const Job& job, const Results& results) {
    report(job.out, job.options, results, job.reading.targets, job.text);
    if (!results.sample.empty()) std::fprintf(job.out, "\n----\n%s\n----\n", printable(results.sample).c_str());
}

Ending ending_of_current_exception() {
    try {
        throw;
    } catch (const HelpWanted& help) {
        return {0, help.what()};
    } catch (const UsageError& error) {
        return {2, error.what()};
    } catch (const std::bad_alloc&) {
        return {1, "not enough memory; lower --d-model, --hidden, --micro-batch or --ranks, or use --recompute"};
    } catch (const std::exception& error) {
        return {1, error.what()};
    }
}

void Ending::print() const {
    if (code == 0) std::printf("%s", text.c_str());
    else std::fprintf(stderr, "gradsync_train: %s\n", text.c_str());
}

}  // namespace gradsync_train
