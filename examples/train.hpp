#pragma once
// The training loop of one rank. What gradsync adds to a trainer stands in four places, marked (1) to (4).

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gradsync/gradsync.hpp>

#include "checkpoint.hpp"
#include "data.hpp"
#include "optimizer.hpp"
#include "options.hpp"
#include "report.hpp"
#include "sample.hpp"

namespace gradsync_train {

namespace gs = gradsync;

/// Which part of every batch is this rank's. (Independent ranks are alone in their communicator, but not here.)
struct Shard {
    int rank;
    int size;
};

/// Mean loss over the first validation samples, each rank taking its share of them. All ranks call it together.
template <class Model, class Backend>
double validate(Model& model, Backend comm, const Samples& samples, std::size_t micro_batch) {
    Batch batch{.sequences = std::min(micro_batch, samples.per_epoch())};
    const std::uint64_t batches = std::min<std::uint64_t>(32, samples.per_epoch() / batch.sequences);
    std::vector<double> sum_and_count(2);
    for (auto i = static_cast<std::uint64_t>(comm.rank()); i < batches; i += static_cast<std::uint64_t>(comm.size())) {
        samples.fill(i * batch.sequences, batch);
        sum_and_count[0] += model.forward(batch);
        sum_and_count[1] += 1;
    }
    comm.all_reduce(gs::buffer(sum_and_count), gs::ReduceOp::sum).wait();
    return sum_and_count[0] / sum_and_count[1];
}

/// Every rank's summary, on every rank.
template <class Backend>
std::vector<RankSummary> gather(Backend comm, const RankSummary& own) {
    std::vector<RankSummary> all(static_cast<std::size_t>(comm.size()));
    const auto bytes = [](auto* data, std::size_t n) {
        return std::span(reinterpret_cast<std::uint8_t*>(data), n * sizeof *data);
    };
    RankSummary copy = own;
    comm.all_gather(gs::const_buffer(bytes(&copy, 1)), gs::buffer(bytes(all.data(), all.size()))).wait();
    return all;
}

/// Keeps the state of a run that has lost a rank; `keep` says whether it had to. Never throws: the loss is what has to
/// be reported.
template <class Keep>
void keep_after_loss(int rank, const Progress& progress, const std::filesystem::path& directory, const Keep& keep) {
    try {
        if (!keep()) return;
        std::fprintf(stderr, "gradsync_train: rank %d has kept the state after step %llu in %s; go on with --resume\n",
                     rank, static_cast<unsigned long long>(progress.steps), directory.c_str());
    } catch (const std::exception& error) {
        std::fprintf(stderr, "gradsync_train: rank %d could not keep the state: %s\n", rank, error.what());
    }
}

template <class Model, class Backend, class BucketPolicy, class OverlapPolicy>
Results train(Backend comm, Shard shard, const Options& o, const Text& text, const Checkpoint* checkpoint,
              std::FILE* out, const BucketPolicy& buckets, const OverlapPolicy& overlap) {
    using Ops = typename Model::Operations;
    using Clock = std::chrono::steady_clock;
    const auto seconds_since = [](Clock::time_point t) {
        return std::chrono::duration<double>(Clock::now() - t).count();
    };

    typename Model::Config config;
    o.model_config(config);
    Model model{config};
    auto& parameters = model.parameters();
    AdamW<Ops> optimizer{parameters, o.weight_decay};
    const Schedule schedule{o.lr, o.warmup, o.steps};
    Progress progress{.fingerprint = text.fingerprint()};
    if (checkpoint != nullptr) {
        checkpoint->restore(parameters, optimizer);
        progress = checkpoint->progress();
        progress.fingerprint = text.fingerprint();
    }

    // (1) Tell the reducer what there is to synchronise, and start from rank 0's parameters.
    const bool borrowed = o.gradients == "borrowed";
    std::vector<typename Ops::Floats> own_gradients;
    std::vector<gs::ParameterView> views;
    for (auto& p : parameters) {
        gs::BufferView gradient;  // none: it will live in a bucket
        if (borrowed) gradient = gs::buffer(own_gradients.emplace_back(p.value.size()));
        views.push_back(
            {.name = p.name, .value = gs::buffer(p.value), .gradient = gradient, .shape = p.shape, .uses = p.uses});
    }
    gs::Reducer<Backend, BucketPolicy, OverlapPolicy> sync{
        comm, std::move(views),
        gs::ReducerOptions{.gradients = borrowed ? gs::GradientStorage::borrowed : gs::GradientStorage::in_buckets,
                           // Micro-batches are added up, over ranks and over time, and divided by their number.
                           .averaging = gs::Averaging::mean_over_count},
        buckets, overlap};
    sync.broadcast_parameters();

    std::vector<float*> gradients;
    for (std::size_t i = 0; i < parameters.size(); ++i)
        gradients.push_back(static_cast<float*>(sync.gradient_view(i).data));
    GradientWriter<Ops> writer{parameters, gradients, o.accumulate > 1};

    const Samples training{text.training, config.reading(), o.seed};
    const Samples validation{text.validation, config.reading(), 0};
    Batch batch{.sequences = o.micro_batch};
    const bool speaks = shard.rank == 0;
    std::optional<ProgressLine> line;
    // Standard output is a terminal to mpirun's processes, wherever it goes from there.
    const bool terminal = o.backend == "threads" && ::isatty(fileno(out)) == 1;
    if (speaks) {
        line.emplace(out, terminal, progress.steps, o.last_step(), o.samples_per_step(), config.reading().targets);
    }

    const auto save = [&] {
        save_checkpoint(o.checkpoint, shard.rank, config.description(), progress, parameters, optimizer);
    };

    RankSummary summary;
    std::vector<StepRecord> steps;
    steps.reserve(o.last_step());
    Results results;
    try {
        while (progress.steps < o.last_step()) {
            const auto started = Clock::now();
            double loss = 0;
            // (2) Each rank weighs as much as it has micro-batches; all but the last are not communicated.
            sync.set_weight(static_cast<double>(o.accumulate));
            for (std::size_t a = 0; a < o.accumulate; ++a) {
                // Rank after rank and, within one, micro-batch after micro-batch: as gradients are summed, too.
                const std::uint64_t micro_batch = static_cast<std::uint64_t>(shard.rank) * o.accumulate + a;
                training.fill(progress.samples + micro_batch * o.micro_batch, batch);
                loss += model.forward(batch);
                if (a + 1 < o.accumulate) {
                    const auto guard = sync.no_sync();
                    writer.begin(a == 0, {});
                    model.backward(batch, writer);
                } else {
                    // (3) A gradient is announced the moment it is final; its bucket may leave while others are
                    // computed.
                    writer.begin(a == 0, [&sync](std::size_t i) { sync.mark_ready(i); });
                    model.backward(batch, writer);
                }
            }
            // (4) Now the gradients are the mean over all ranks.
            sync.finish();
            const double scale = o.clip > 0 ? sync.clip_factor(sync.gradient_norm(), o.clip) : 1.0;
            optimizer.step(parameters, gradients, schedule.at(progress.steps), scale);

            const double seconds = seconds_since(started);
            const auto& spent = sync.statistics().last;
            steps.push_back({seconds, spent.communication_seconds, spent.exposed_seconds,
                             loss / static_cast<double>(o.accumulate)});
            progress.steps += 1;
            progress.samples += o.samples_per_step();
            if (speaks) line->update(progress.steps, steps.back());

            const bool last = progress.steps == o.last_step();
            if (o.validate_every > 0 && progress.steps % o.validate_every == 0 && !last) {
                const double mean = validate(model, comm, validation, o.micro_batch);
                if (speaks)
                    line->note(formatted("step %llu  validation loss %.3f",
                                         static_cast<unsigned long long>(progress.steps), mean));
            }
            const bool due = o.checkpoint_every > 0 && progress.steps % o.checkpoint_every == 0;
            if (speaks && !o.checkpoint.empty() && (due || last)) save();
        }
        line.reset();

        summarise_steps(steps, summary);
        summary.validation_loss = validate(model, comm, validation, o.micro_batch);
        summary.digest = digest(parameters);
        summary.parameters = parameters.count();
        results.ranks = gather(comm, summary);
        for (const auto& bucket : sync.statistics().buckets) results.bucket_bytes.push_back(bucket.bytes);
    } catch (const gs::Error& error) {
        // Another rank is lost. Nothing was changed since the last step that this rank has completed: what it holds is
        // whole. It is kept for a run that goes on with --resume. Every rank that is left sees to it: more than one may
        // be lost, and none knows which. (Some may be a step ahead of others, which is as good.)
        const bool lost = error.errc() == gs::Errc::peer_failed || error.errc() == gs::Errc::peer_left ||
                          error.errc() == gs::Errc::timeout;
        if (lost && !steps.empty() && !o.checkpoint.empty()) {
            line.reset();
            keep_after_loss(shard.rank, progress, o.checkpoint, [&] {
                return keep_checkpoint(o.checkpoint, shard.rank, config.description(), progress, parameters, optimizer);
            });
        }
        throw;
    }

    for (std::size_t r = 1; r < results.ranks.size(); ++r) {
        if (results.ranks[r].digest != results.ranks[0].digest) {
            throw std::runtime_error("the ranks' parameters differ after the last step: digest " +
                                     hexadecimal(results.ranks[r].digest) + " on rank " + std::to_string(r) + ", " +
                                     hexadecimal(results.ranks[0].digest) + " on rank 0");
        }
    }
    if (speaks && o.sample > 0) results.sample = generate(model, o.prompt, o.sample, o.seed);
    return results;
}

}  // namespace gradsync_train
