// SPDX-License-Identifier: BSL-1.0
#pragma once
// The training loop of one rank, whatever the operations. For the files that define `train`, see train.hpp.

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "checkpoint.hpp"
#include "data.hpp"
#include "mlp.hpp"
#include "optimizer.hpp"
#include "options.hpp"
#include "sample.hpp"
#include "train.hpp"
#include "transformer.hpp"

namespace gradsync_train {

namespace train_detail {

/// Mean loss over the first validation samples, each rank taking its share of them. All ranks call it together.
template <class Model>
double validate(Model& model, Synchroniser& sync, int rank, int size, const Samples& samples, std::size_t micro_batch) {
    Batch batch{.sequences = std::min(micro_batch, samples.per_epoch())};
    const std::uint64_t batches = std::min<std::uint64_t>(32, samples.per_epoch() / batch.sequences);
    std::vector<double> sum_and_count(2);
    for (std::uint64_t first = 0; first < batches; first += static_cast<std::uint64_t>(size)) {
        const std::uint64_t own = first + static_cast<std::uint64_t>(rank);
        const bool counts = own < batches;
        if (!counts && !sync.computes_together()) break;
        samples.fill((counts ? own : first) * batch.sequences, batch);
        const auto loss = model.forward(batch);
        if (!counts) continue;  // the others needed this rank's weights
        sum_and_count[0] += model.operations().value(loss);
        sum_and_count[1] += 1;
    }
    sync.add_up(sum_and_count);
    return sum_and_count[0] / sum_and_count[1];
}

/// Of all weights, in order of registration, which is that of the units. All ranks call it together.
template <class Ops>
std::uint64_t digest(Ops ops, const Parameters& parameters, const Units& units, Synchroniser& sync) {
    Digest d;
    std::vector<float> own;
    std::size_t next = 0;
    for (std::size_t u = 0; u < units.size(); ++u) {
        const UnitUse use{&sync, u};
        for (std::size_t i : units[u]) {
            if (i != next) continue;  // tied: it had its turn
            const std::span weights = ops.read(parameters[i].count, parameters.value(i), own);
            d.update(weights.data(), weights.size_bytes());
            ++next;
        }
    }
    if (next != parameters.size()) throw std::logic_error("the model's units are not in the order of its parameters");
    return d.value();
}

/// Writes all weights to `path`: see --save-weights. `digest`: theirs. All ranks call it together.
template <class Ops>
void save_weights(Ops ops, const Parameters& parameters, const Units& units, Synchroniser& sync, Shard shard,
                  const std::filesystem::path& path, bool in_parts, std::uint64_t digest) {
    const bool single = is_weights_file(path);
    const auto ranks = static_cast<std::size_t>(single || !in_parts ? 1 : shard.size);
    // Which rank writes which parameter: all write about as much, a rank may have none.
    std::vector<std::size_t> writers, parts;
    std::size_t before = 0;
    for (const Parameter& p : parameters) {
        writers.push_back(before * ranks / std::max<std::size_t>(parameters.count(), 1));
        if (parts.empty() || writers.back() != parts.back()) parts.push_back(writers.back());
        before += p.count;
    }
    std::vector<std::string> files;
    for (const std::size_t w : writers) {
        const auto part = std::find(parts.begin(), parts.end(), w) - parts.begin() + 1;
        // A name of its own for each state: what an index names is never written anew.
        files.push_back(ranks == 1 ? "model.safetensors"
                                   : formatted("model-%s-%05td-of-%05zu.safetensors", hexadecimal(digest).c_str(), part, parts.size()));
    }
    std::vector<std::size_t> own;
    for (std::size_t i = 0; i < writers.size(); ++i)
        if (writers[i] == static_cast<std::size_t>(shard.rank)) own.push_back(i);
    if (!single) std::filesystem::create_directories(path);
    std::optional<SafeWriter> writer;
    if (!own.empty()) writer.emplace(single ? path : path / files[own.front()], parameters, own, shard.rank);
    std::vector<float> copy;
    for (std::size_t u = 0; u < units.size(); ++u) {
        const UnitUse use{&sync, u};
        for (std::size_t i : units[u])
            if (writer) writer->write(i, ops.read(parameters[i].count, parameters.value(i), copy));
    }
    if (writer) writer->finish();
    double written = 1;
    sync.add_up({&written, 1});  // every file is there, whichever rank it is of
    if (single || shard.rank != 0) return;
    const std::vector<std::string> old = safe_parts(path);
    if (ranks > 1) write_safe_index(path, parameters, files);
    else std::filesystem::remove(safe_index(path));
    // The new weights replace these.
    for (const std::string& part : old)
        if (std::find(files.begin(), files.end(), part) == files.end()) std::filesystem::remove(path / part);
    if (ranks > 1) std::filesystem::remove(path / "model.safetensors");
}

/// After which step the checkpoint in this directory was written, if it is one and whole.
inline std::optional<std::uint64_t> step_of_checkpoint(const std::filesystem::path& directory) {
    try {
        return Checkpoint{directory}.progress().steps;
    } catch (const std::exception&) {
        return {};
    }
}

/// Keeps the state of a run that has lost a rank, if this rank holds all of it. Never throws: the loss is what has to be
/// reported.
inline void keep_after_loss(const CheckpointWriter& writer, int rank, const Progress& progress, const std::filesystem::path& directory,
                            const Synchroniser& sync) {
    const auto say = [&](const std::string& text) { std::fprintf(stderr, "gradsync_train: rank %d %s\n", rank, text.c_str()); };
    const std::string step = std::to_string(progress.steps);
    try {
        if (!sync.has_whole_state()) {
            const auto saved = step_of_checkpoint(directory);
            say("cannot keep the state after step " + step + ", as parts of it were lost or under way; " +
                (saved ? "go on with --resume from step " + std::to_string(*saved) + ", the last in " + directory.string()
                       : "there is no checkpoint in " + directory.string() + " yet, see --checkpoint-every"));
        } else if (writer.keep(rank, progress, sync)) {
            say("has kept the state after step " + step + " in " + directory.string() + "; go on with --resume");
        }
    } catch (const std::exception& error) {
        say(std::string("could not keep the state: ") + error.what());
    }
}

/// The state of `sync` and of the loop, without shards if these are kept by themselves.
inline StateViews views_of_state(const std::string& name, Synchroniser& sync, Progress& progress, bool without_shards) {
    StateViews state = without_shards ? StateViews{} : sync.state_views();
    state.name = name;
    static_assert(sizeof progress % sizeof(std::uint64_t) == 0 && std::is_trivially_copyable_v<Progress>);
    state.views.push_back({reinterpret_cast<std::uint64_t*>(&progress), sizeof progress / sizeof(std::uint64_t)});
    return state;
}

template <class Model, class Ops>
Results train(Ops ops, const Job& job, Shard shard, gs::Timeline* timeline, const MakeSynchroniser& make) {
    using Clock = std::chrono::steady_clock;
    const auto seconds_since = [](Clock::time_point t) { return std::chrono::duration<double>(Clock::now() - t).count(); };

    const Options& o = job.options;
    typename Model::Config config;
    o.model_config(config);
    Model model{config, ops};
    auto& parameters = model.parameters();
    const Units units = model.units();
    if (job.weights)
        parameters.initialise_from([&](std::size_t i, std::size_t first, std::span<float> out) { job.weights->read(i, first, out); });
    if (job.outliving != nullptr) parameters.keep_arrays_in(job.outliving->arrays);
    const auto sync = make(parameters, units);
    model.set_access(sync.get());

    const Schedule schedule{o.lr, o.warmup, o.steps};
    const std::size_t arrays = state_arrays(o.compress != "none", o.ranks);
    Progress own_progress{};
    Progress& progress = job.outliving != nullptr ? job.outliving->progress : own_progress;
    const auto shards = job.elastic != nullptr ? sync->shards() : std::nullopt;
    const StateViews state = views_of_state(o.describe_run(config.description()), *sync, progress, shards.has_value());
    const std::unique_ptr<Keeper> keeper = job.make_keeper && o.keep_every != 0 ? job.make_keeper(state) : nullptr;
    const auto describe = [&] {
        progress.fingerprint = job.text.fingerprint();
        progress.micro_batches = o.micro_batches;
        progress.micro_batch = o.micro_batch;
    };
    if (job.elastic != nullptr) {
        describe();
        job.elastic->restore(state, shards, [&] {
            if (!o.resume || !std::filesystem::exists(checkpoint_file(o.checkpoint))) return std::uint64_t{0};
            const Checkpoint newest{o.checkpoint};
            newest.restore(parameters, arrays, *sync);
            progress = newest.progress();
            describe();
            return progress.steps;
        });
        sync->state_was_written(progress.steps);
    } else if (keeper && keeper->has_state()) {
        keeper->restore();
        sync->state_was_written(progress.steps);
        if (shard.rank == 0)
            std::fprintf(stderr, "gradsync_train: going on after step %llu, which the ranks have kept\n",
                         static_cast<unsigned long long>(progress.steps));
    } else if (job.checkpoint) {
        job.checkpoint->restore(parameters, arrays, *sync);
        progress = job.checkpoint->progress();
    }
    describe();
    const CheckpointWriter checkpoints{o.checkpoint, o.describe_run(config.description()), parameters, arrays};

    const int rank = o.independent ? 0 : shard.rank, size = o.independent ? 1 : shard.size;  // of those in step
    const Samples training{job.text.training, config.reading(), o.seed};
    const Samples validation{job.text.validation, config.reading(), 0};
    Batch batch{.sequences = o.micro_batch};
    const bool speaks = shard.rank == 0;
    std::optional<ProgressLine> line;
    // Standard output is a terminal to mpirun's processes, wherever it goes from there.
    const bool terminal = o.backend == "threads" && ::isatty(fileno(job.out)) == 1;
    if (speaks) {
        line.emplace(job.out, terminal, progress.steps, o.last_step(), o.samples_per_step(), config.reading().targets);
    }

    std::vector<StepRecord> steps;
    steps.reserve(o.last_step());
    // A device is a step behind: what it computes in one is read when the next is on its way, and nobody waits.
    std::array<std::vector<typename Ops::Loss>, 2> losses;
    // Numbered as the library adds up their gradients: the bits do not depend on who computes which.
    const gs::Deal deal = o.deal(size);
    const std::size_t own = deal.count(rank), rounds = deal.sharded_gradients ? deal.rounds() : own;
    losses.fill(std::vector<typename Ops::Loss>(own));
    const std::uint64_t first_step = progress.steps, first_number = o.independent ? static_cast<std::uint64_t>(shard.rank) * own : 0;
    std::size_t losses_read = 0;
    const auto read_losses = [&] {
        for (; losses_read < steps.size(); ++losses_read) {
            StepRecord& record = steps[losses_read];
            const std::uint64_t step = first_step + losses_read;
            for (const auto& loss : losses[step % 2]) record.loss += ops.value(loss);
            record.loss /= static_cast<double>(own);
            if (speaks) line->update(step + 1, record);
        }
    };

    const auto save = [&] {
        const auto collect = [&](const Synchroniser::StateSink& sink) { sync->collect(sink); };
        const auto counts = [&] { return job.elastic == nullptr || job.elastic->is_current(); };
        if (speaks) checkpoints.save(shard.rank, progress, collect, counts);
        else collect({});
    };

    RankSummary summary;
    Results results;
    try {
        if (keeper && !keeper->has_state()) keeper->keep(progress.steps);
        while (progress.steps < o.last_step()) {
            if (job.elastic != nullptr && !job.elastic->goes_on()) {
                results.changes = true;
                return results;
            }
            const auto started = Clock::now();
            for (std::size_t a = 0; a < rounds; ++a) {
                // A rank that has none left goes on with the others: they gather weights together.
                const std::uint64_t number = first_number + deal.number(rank, std::min(a, own - 1));
                training.fill(progress.samples + number * o.micro_batch, batch);
                {
                    const gs::Timeline::Scope scope{timeline, "forward"};
                    const auto loss = model.forward(batch);
                    if (a < own) losses[progress.steps % 2][a] = loss;
                }
                sync->begin_backward(a);
                {
                    const gs::Timeline::Scope scope{timeline, "backward"};
                    model.backward(batch, *sync);
                }
                sync->end_backward();
            }
            {
                const gs::Timeline::Scope scope{timeline, "optimizer step"};
                sync->step(schedule.at(progress.steps));
                const auto advance = [&] {
                    progress.steps += 1;
                    progress.samples += o.samples_per_step();
                };
                if (job.elastic == nullptr) advance();
                else job.elastic->update([&] { sync->flush(), advance(); });
            }

            const std::uint64_t done = progress.steps;
            const bool last = done == o.last_step();
            const bool validates = o.validate_every > 0 && done % o.validate_every == 0 && !last;
            const bool saves = !o.checkpoint.empty() && (last || (o.checkpoint_every > 0 && done % o.checkpoint_every == 0));
            if constexpr (Ops::on_device) {
                read_losses();  // those of the step before: the time of a step is the device's, as soon as it has enough to do
                // What it still has to do is this step's, and not that of what comes between steps or is counted by itself.
                if (last || validates || saves || steps.size() + 1 == warm_up_steps(o.last_step() - first_step)) ops.finish();
            }
            const double seconds = seconds_since(started);
            const auto& spent = sync->statistics().last;
            steps.push_back({seconds, spent.communication_seconds, spent.exposed_seconds, 0});
            if (!Ops::on_device || last) read_losses();

            if (validates) {
                const double mean = validate(model, *sync, rank, size, validation, o.micro_batch);
                if (speaks) line->note(formatted("step %llu  validation loss %.3f", static_cast<unsigned long long>(progress.steps), mean));
            }
            if (saves) save();
            if (keeper && progress.steps % o.keep_every == 0) {
                sync->flush();
                keeper->keep(progress.steps);
            }
        }
        line.reset();

        summarise_steps(steps, summary);
        // So that the ranks' mean is that over micro-batches.
        summary.train_loss *= static_cast<double>(own * static_cast<std::size_t>(deal.ranks)) / static_cast<double>(deal.micro_batches);
        summary.validation_loss = validate(model, *sync, rank, size, validation, o.micro_batch);
        summary.digest = digest(ops, parameters, units, *sync);
        if (!o.save_weights.empty())
            save_weights(ops, parameters, units, *sync, shard, o.save_weights, o.shard == "parameters", summary.digest);
        summary.parameters = parameters.count();
        summary.memory = sync->memory();
        summary.matrix_seconds = sync->matrix_seconds();
        summary.memory.parameters += model.weight_bytes();
        summary.memory.activations = model.activation_bytes();
        summary.peak_rss_bytes = peak_rss_bytes();
        results.ranks = sync->gather(summary);
        for (const auto& bucket : sync->statistics().buckets) results.bucket_bytes.push_back(bucket.bytes);
        for (const StepRecord& step : steps) results.losses.push_back(step.loss);
        results.first_step = first_step;
        results.communicated_bytes = sync->statistics().last.bytes;
        results.profile = sync->profile();
    } catch (const gs::Error& error) {
        // Another rank is lost. Where nothing was changed since the last step that this rank has completed, and it holds
        // all of the state, that is kept for a run that goes on with --resume. Every rank that is left sees to it: more
        // than one may be lost, and none knows which. (Some may be a step ahead of others, which is as good.)
        const bool lost = error.errc() == gs::Errc::peer_failed || error.errc() == gs::Errc::peer_left || error.errc() == gs::Errc::timeout;
        if (lost && !keeper && job.elastic == nullptr && !steps.empty() && !o.checkpoint.empty()) {
            line.reset();
            keep_after_loss(checkpoints, shard.rank, progress, o.checkpoint, *sync);
        }
        throw;
    }

    expect_equal_digests(results.ranks);
    if (o.sample > 0 && (speaks || sync->computes_together())) results.sample = generate(model, o.prompt, o.sample, o.seed);
    return results;
}

/// With the model that the flags name.
template <class Ops>
Results train_chosen(Ops ops, const Job& job, Shard shard, gs::Timeline* timeline, const MakeSynchroniser& make) {
    if (job.options.model == "mlp") return train<Mlp<Ops>>(ops, job, shard, timeline, make);
    return train<Transformer<Ops>>(ops, job, shard, timeline, make);
}

}  // namespace train_detail

}  // namespace gradsync_train
