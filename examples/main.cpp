// gradsync_train: trains a language model over bytes, data-parallel. See --help.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include <gradsync/gradsync.hpp>

#include "checkpoint.hpp"
#include "data.hpp"
#include "mlp.hpp"
#include "ops_cpu.hpp"
#include "options.hpp"
#include "report.hpp"
#include "sample.hpp"
#include "train.hpp"
#include "transformer.hpp"

namespace {

using namespace gradsync_train;

// From run-time flags to compile-time types. Each flag becomes a variant that holds one of the types it may stand for;
// std::visit instantiates the training loop once for every combination and calls the one that the variants hold.
using AnyModel = std::variant<std::type_identity<Transformer<CpuOps>>, std::type_identity<Mlp<CpuOps>>>;
using AnyBuckets = std::variant<gs::PerParameter, gs::Flat, gs::SizeCappedBuckets>;
using AnyOverlap = std::variant<gs::NoOverlap, gs::OverlapBackward>;

AnyModel choose_model(const Options& o) {
    if (o.model == "mlp") return std::type_identity<Mlp<CpuOps>>{};
    return std::type_identity<Transformer<CpuOps>>{};
}

AnyBuckets choose_buckets(const Options& o) {
    if (o.buckets == "per-parameter") return gs::PerParameter{};
    if (o.buckets == "flat") return gs::Flat{};
    const auto bytes = [](double mib) { return static_cast<std::size_t>(mib * 1024 * 1024); };
    return gs::SizeCappedBuckets{bytes(o.bucket_mib), bytes(std::min(o.bucket_mib, o.first_bucket_mib))};
}

AnyOverlap choose_overlap(const Options& o) {
    if (o.overlap == "none") return gs::NoOverlap{};
    return gs::OverlapBackward{};
}

/// Runs all ranks; returns rank 0's results (with every rank's summary).
template <class Model, class BucketPolicy, class OverlapPolicy>
Results run(const Options& o, const Text& text, const Checkpoint* checkpoint, std::FILE* out,
            const BucketPolicy& buckets, const OverlapPolicy& overlap) {
    const auto timeout = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(o.timeout));
    auto by_rank = gs::run_threads(
        o.ranks,
        [&](gs::ThreadBackend comm) {
            const Shard shard{comm.rank(), comm.size()};
            if (o.independent) comm = comm.split(comm.rank(), 0);  // every rank in a world of its own
            return train<Model>(comm, shard, o, text, checkpoint, out, buckets, overlap);
        },
        gs::ThreadOptions{.timeout = timeout});
    if (o.independent) {
        for (std::size_t r = 1; r < by_rank.size(); ++r) by_rank[0].ranks.push_back(by_rank[r].ranks[0]);
    }
    return std::move(by_rank[0]);
}

void train_and_report(const Options& o) {
    // Standard output is for one reader at a time: a program or a person.
    std::FILE* const out = o.json == "-" ? stderr : stdout;
    CpuOps::initialise();
    const Text text = read_text(o.data.empty() ? default_files(GRADSYNC_SOURCE_DIR) : o.data);

    std::visit(
        [&]<class Model>(std::type_identity<Model>, const auto& buckets, const auto& overlap) {
            typename Model::Config config;
            o.model_config(config);
            check_text(o, config.reading(), text);
            std::unique_ptr<Checkpoint const> checkpoint;
            if (o.resume) {
                checkpoint = std::make_unique<Checkpoint const>(o.checkpoint);
                checkpoint->expect_model(config.description());
                if (checkpoint->progress().steps > o.last_step()) {
                    throw UsageError("--resume: the checkpoint is at step " +
                                     std::to_string(checkpoint->progress().steps) +
                                     " already; raise --steps or --stop-after");
                }
                if (checkpoint->progress().fingerprint != text.fingerprint()) {
                    std::fprintf(
                        stderr,
                        "gradsync_train: the text has changed since the checkpoint; going on with the new one\n");
                }
            }

            const Results result = run<Model>(o, text, checkpoint.get(), out, buckets, overlap);

            report(out, o, result.ranks, config.reading().targets, text);
            if (!result.sample.empty()) std::fprintf(out, "\n----\n%s\n----\n", printable(result.sample).c_str());
        },
        choose_model(o), choose_buckets(o), choose_overlap(o));
}

}  // namespace

int main(int argc, char** argv) {
    try {
        train_and_report(parse_options(argc, argv));
        return 0;
    } catch (const HelpWanted& help) {
        std::printf("%s", help.what());
        return 0;
    } catch (const UsageError& error) {
        std::fprintf(stderr, "gradsync_train: %s\n", error.what());
        return 2;
    } catch (const std::bad_alloc&) {
        std::fprintf(stderr,
                     "gradsync_train: not enough memory; lower --d-model, --hidden, --micro-batch or --ranks, or use "
                     "--recompute\n");
        return 1;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "gradsync_train: %s\n", error.what());
        return 1;
    }
}
