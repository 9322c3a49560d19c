// SPDX-License-Identifier: BSL-1.0
// ctest: COST 30
// Ranks that come and go and have sharded state, in all stages, as processes that this test starts, kills and asks to leave. The state at the
// end is compared with that of one process that does all of the work by itself.
#include <gradsync/elastic/elastic_job.hpp>
#include <gradsync/overlap/overlap_forward.hpp>
#include <gradsync/shard/checkpoint.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>
#include <gradsync/shard/sharded_parameters.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <type_traits>
#include <vector>

#include "support/elastic_ranks.hpp"
#include "support/says.hpp"
#include "support/temporary_directory.hpp"

using namespace std::chrono_literals;
using gradsync::BufferView;
using gradsync::ElasticJob;
using gradsync::Error;
using gradsync::Job;
using gradsync::Restored;
using gradsync::TcpBackend;
using gradsync_test::await;
using gradsync_test::content_of;
using gradsync_test::lines_in;
using gradsync_test::Listening;
using gradsync_test::nap;
using gradsync_test::note;
using gradsync_test::says;
using gradsync_test::slow_nap;

namespace {

/// Its step counts the steps before, so that their number is a part of the state.
struct Momentum {
    std::uint64_t* steps;
    std::size_t state_count() const { return 2; }
    void begin_step() { ++*steps; }
    void step(const gradsync::OptimizerSlice<float>& slice) const {
        for (std::size_t k = 0; k < slice.value.size(); ++k) {
            const float gradient = slice.gradient[k] * static_cast<float>(slice.gradient_scale);
            slice.state[0][k] = 0.9f * slice.state[0][k] + gradient;
            slice.state[1][k] += gradient * gradient;
            slice.value[k] -= (0.05f + 0.01f / static_cast<float>(*steps)) * slice.state[0][k] / (1 + slice.state[1][k]);
        }
    }
};

/// Parameter 2 is frozen; the processes begin with different weights.
struct ShardedModel {
    static constexpr std::size_t count = 4;
    std::vector<std::vector<float>> weights{std::vector<float>(5, 1), std::vector<float>(70, 2), std::vector<float>(3, 3),
                                            std::vector<float>(33, 4)},
        gradients = weights;
    explicit ShardedModel(float beginning = 0) {
        for (auto& all : weights)
            for (float& one : all) one += beginning;
    }
    std::vector<gradsync::ParameterView> parameters() {
        std::vector<gradsync::ParameterView> views;
        for (std::size_t i = 0; i < count; ++i)
            views.push_back({.name = "p" + std::to_string(i),
                             .value = gradsync::buffer(weights[i]),
                             .gradient = gradsync::buffer(gradients[i]),
                             .requires_grad = i != 2});
        return views;
    }
};

struct Stage1 {
    static auto make(TcpBackend& comm, ShardedModel& model, std::uint64_t& steps) {
        return gradsync::ShardedOptimizer(comm, model.parameters(), Momentum{&steps}, gradsync::Zero1{}, gradsync::SizeCappedBuckets{200},
                                          gradsync::ShardingOptions{.reducer = {.gradients = gradsync::GradientStorage::in_buckets,
                                                                                .accumulation = gradsync::Accumulation::in_buckets,
                                                                                .micro_batches = 12}});
    }
};
struct Stage2 {
    static auto make(TcpBackend& comm, ShardedModel& model, std::uint64_t& steps) {
        return gradsync::ShardedOptimizer(comm, model.parameters(), Momentum{&steps}, gradsync::Zero2{}, gradsync::SizeCappedBuckets{200},
                                          gradsync::OverlapForward{}, gradsync::ShardingOptions{.reducer = {.micro_batches = 12}});
    }
};
struct Stage3 {
    static auto make(TcpBackend& comm, ShardedModel& model, std::uint64_t& steps) {
        return gradsync::ShardedParameters(comm, model.parameters(), Momentum{&steps}, gradsync::Units({0, 0, 1, 1}),
                                           gradsync::ShardedParametersOptions{.reducer = {.micro_batches = 12}});
    }
};

/// The gradients of a micro-batch follow from the weights.
template <class Stage, class Sharded>
void compute_gradients(Sharded& sharded, std::uint64_t step, std::size_t micro_batch) {
    for (std::size_t i = 0; i < ShardedModel::count; ++i) {
        if (i == 2) continue;
        if constexpr (std::is_same_v<Stage, Stage2>) sharded.wait_parameter(i);
        const float frozen = *static_cast<const float*>(sharded.parameters()[2].value.data);
        const auto weights = sharded.parameter_value(i).template as<float>();
        const auto gradient = sharded.acquire_gradient(i).template as<float>();
        for (std::size_t k = 0; k < weights.size(); ++k)
            gradient[k] = 0.013f * weights[k] + frozen / 100 + static_cast<float>((step * 31 + k + micro_batch * 7) % 13) / 30;
        sharded.mark_ready(i);
    }
}
template <class Stage, class Sharded>
void compute(ElasticJob& job, Sharded& sharded) {
    const auto with_weights = [&](std::size_t micro_batch) {
        if constexpr (std::is_same_v<Stage, Stage3>) {
            const auto first = sharded.gather(0), second = sharded.gather(1);
            compute_gradients<Stage>(sharded, job.step(), micro_batch);
        } else {
            compute_gradients<Stage>(sharded, job.step(), micro_batch);
        }
    };
    if constexpr (std::is_same_v<Stage, Stage1>) {
        for (const std::size_t m : job.micro_batches()) {
            std::optional<gradsync::NoSync> more;
            if (m != job.micro_batches().back()) more.emplace(sharded.no_sync());
            with_weights(m);
        }
        sharded.finish();
    } else {
        for (std::size_t turn = 0; turn < job.rounds(); ++turn) {
            if (turn < job.micro_batches().size()) {
                with_weights(job.micro_batches()[turn]);
            } else {
                (void)sharded.begin_step(false);
                if constexpr (std::is_same_v<Stage, Stage3>) const auto first = sharded.gather(0), second = sharded.gather(1);
            }
            sharded.finish();
        }
    }
}

/// Returns a hash of all weights and arrays of the optimizer. Collective.
template <class Sharded>
std::string digest_of(Sharded& sharded, std::uint64_t steps) {
    std::uint64_t hash = steps;
    sharded.collect_state([&](std::size_t i, std::size_t array, std::size_t first, gradsync::ConstBufferView piece) {
        for (const std::size_t number : {i, array, first}) hash = gradsync::detail::fnv1a(&number, sizeof number, hash);
        hash = gradsync::detail::fnv1a(piece.data, piece.bytes(), hash);
    });
    return std::to_string(hash);
}

struct Watching {
    std::function<void(TcpBackend&, std::uint64_t)> at = [](TcpBackend&, std::uint64_t) {};
    std::function<void(const Restored&, TcpBackend&)> on = [](const Restored&, TcpBackend&) {};
    std::string folder = {};  // of checkpoints
    std::uint64_t keep_every = 1;
    float beginning = 0;
};

template <class Stage>
std::string train_sharded(ElasticJob& job, std::uint64_t steps, const Watching& watch = {}) {
    std::string end;
    ShardedModel model(watch.beginning);
    job.keep_every(watch.keep_every);
    job.run(
        [&](TcpBackend& comm) {
            std::uint64_t optimizer_steps = 0;
            auto sharded = Stage::make(comm, model, optimizer_steps);
            const auto load = [&] {
                if (watch.folder.empty() || !std::filesystem::exists(watch.folder + "/manifest.gradsync")) return std::uint64_t{0};
                optimizer_steps = std::stoull(gradsync::load_shards(watch.folder, sharded));
                return optimizer_steps;
            };
            watch.on(job.restore(sharded, {BufferView(static_cast<float*>(nullptr), 0), BufferView(&optimizer_steps, 1)}, load), comm);
            while (job.step() < steps && job.goes_on()) {
                compute<Stage>(job, sharded);
                watch.at(comm, job.step());
                const double norm = sharded.gradient_norm();
                job.update([&] { sharded.step(gradsync::clip_factor(norm, 2)); });
                if (!watch.folder.empty()) gradsync::save_shards(watch.folder, sharded, std::to_string(job.step()));
            }
            if (job.step() == steps) end = digest_of(sharded, optimizer_steps);
        },
        {.timeout = 20s});
    return job.has_left() ? "left" : end;
}
template <class Stage>
std::string expected_of(std::uint64_t steps) {
    ElasticJob alone{Job{}};
    return train_sharded<Stage>(alone, steps);
}

}  // namespace

TEST_CASE_TEMPLATE("alone, a sharded job is a training like any other", Stage, Stage1, Stage2, Stage3) {
    CHECK(expected_of<Stage>(20) == expected_of<Stage>(20));
    CHECK(expected_of<Stage>(20) != expected_of<Stage>(21));
    CHECK(expected_of<Stage>(20) == expected_of<Stage1>(20));
}

TEST_CASE_TEMPLATE("shards move when ranks come, are killed and leave, and the end has the bits of one rank", Stage, Stage1, Stage2,
                   Stage3) {
    const std::uint64_t steps = 300;
    const std::string before = expected_of<Stage>(steps);
    const gradsync_test::TemporaryDirectory folder;
    const std::string sizes = folder.file("sizes"), digests = folder.file("digests");
    gradsync_test::ElasticRanks ranks(
        2,
        [&](ElasticJob& job, int start, const std::string&) {
            const Listening listening(job);
            Watching watch{.at = nap, .beginning = static_cast<float>(start - 1)};
            watch.on = [&](const Restored& restored, TcpBackend& comm) {
                if (comm.rank() != 0) return;
                note(sizes, std::to_string(comm.size()) + " from " + std::to_string(restored.step));
                if (restored.again > 1) note(folder.file("losses"), std::to_string(restored.again));
            };
            const std::string end = train_sharded<Stage>(job, steps, watch);
            if (job.step() == steps) note(digests, end);
        },
        1, 4);
    for (const int more : {2, 3}) ranks.start(more);
    const auto await_four = [&](std::size_t seen) {
        await([&] {
            const std::string text = "\n" + content_of(sizes);
            return std::filesystem::exists(digests) || (lines_in(sizes) > seen && text.rfind("\n4 ") == text.rfind('\n', text.size() - 2));
        });
    };
    await_four(0);
    // One at a time: of two that keep their parts together, one is left. Each time one of the four that are here: they meet again.
    std::mt19937 random(1);
    int here[] = {0, 1, 2, 3};
    for (int started = 4; !std::filesystem::exists(digests) && lines_in(sizes) < 60;) {  // a slow machine meets and hardly steps
        const std::size_t seen = lines_in(sizes);
        int& which = here[random() % 4];
        if (random() % 2 == 0) ranks.replace(which);
        else ranks.send(which, SIGUSR1), ranks.start(which = started++);
        await_four(seen);
    }
    (void)ranks.ends();
    const std::string ends = content_of(digests);
    for (std::size_t at = 0; at < ends.size(); at += before.size() + 1) CHECK(ends.substr(at, before.size()) == before);
    CHECK(lines_in(sizes) > 4);
    CHECK(!std::filesystem::exists(folder.file("losses")));
}

TEST_CASE("a lost rank costs at most the steps since the last copy, and these are done again with the same bits") {
    const std::uint64_t steps = 60;
    const gradsync_test::TemporaryDirectory folder;
    const std::string losses = folder.file("losses"), digests = folder.file("digests");
    gradsync_test::ElasticRanks ranks(
        3,
        [&](ElasticJob& job, int start, const std::string&) {
            Watching watch{.keep_every = 10};
            watch.at = [&](TcpBackend&, std::uint64_t step) {
                if (start == 2 && step == 34) ::kill(::getpid(), SIGKILL);
            };
            watch.on = [&](const Restored& restored, TcpBackend& comm) {
                if (comm.rank() == 0) note(losses, std::to_string(restored.step) + "+" + std::to_string(restored.again));
            };
            note(digests, train_sharded<Stage2>(job, steps, watch));
        },
        2, 3);
    (void)ranks.ends();
    CHECK(content_of(losses) == "0+0\n30+4\n");
    const std::string before = expected_of<Stage2>(steps);
    CHECK(content_of(digests) == before + "\n" + before + "\n");
}

TEST_CASE("three of four ranks that want to leave at once go in two changes, and no step is done again") {
    const std::uint64_t steps = 60;
    const gradsync_test::TemporaryDirectory folder;
    const std::string sizes = folder.file("sizes"), digests = folder.file("digests");
    gradsync_test::ElasticRanks ranks(
        4,
        [&](ElasticJob& job, int start, const std::string&) {
            Watching watch{.keep_every = 1000};
            watch.at = [&](TcpBackend&, std::uint64_t step) {
                if (start != 3 && step == 20) job.request_leave();
            };
            watch.on = [&](const Restored& restored, TcpBackend& comm) {
                if (comm.rank() == 0) note(sizes, std::to_string(comm.size()) + " lost " + std::to_string(restored.again));
            };
            note(digests, train_sharded<Stage3>(job, steps, watch));
        },
        1, 4);
    for (const std::string& end : ranks.ends()) CHECK(end == "done");
    // One may ask a step later than another.
    const std::string text = content_of(sizes);
    CHECK(text.starts_with("4 lost 0\n"));
    CHECK(text.ends_with("\n1 lost 0\n"));
    CHECK(text.find("lost 1") == std::string::npos);
    const std::string ends = content_of(digests);
    CHECK(ends.find(expected_of<Stage3>(steps)) != std::string::npos);
}

TEST_CASE("ranks that keep their parts together are lost at once: the job goes on from its checkpoint, or ends and says why") {
    const std::uint64_t steps = 60;
    for (const bool saves : {true, false}) {
        CAPTURE(saves);
        const gradsync_test::TemporaryDirectory folder;
        const std::string sources = folder.file("sources"), digests = folder.file("digests");
        gradsync_test::ElasticRanks ranks(
            4,
            [&](ElasticJob& job, int start, const std::string&) {
                Watching watch;
                if (saves) watch.folder = folder.file("checkpoint");
                watch.at = [&](TcpBackend&, std::uint64_t step) {
                    if (step == 30 && (start == 1 || start == 3)) ::kill(::getpid(), SIGKILL);
                };
                watch.on = [&](const Restored& restored, TcpBackend& comm) {
                    if (comm.rank() == 0 && restored.from == Restored::From::checkpoint) note(sources, std::to_string(restored.step));
                };
                note(digests, train_sharded<Stage2>(job, steps, watch));
            },
            2, 4);
        const std::vector<std::string> ends = ranks.ends();
        if (saves) {
            CHECK(content_of(sources) == "30\n");
            const std::string before = expected_of<Stage2>(steps);
            CHECK(content_of(digests) == before + "\n" + before + "\n");
        } else {
            CHECK(content_of(digests) == "");
            CHECK(ends[1].find("all ranks that had the state of the training were lost, and there is no checkpoint") != std::string::npos);
        }
    }
}

TEST_CASE("a process with other parameters, or another state beside them, ends, and the others go on") {
    const std::uint64_t steps = 60;
    for (const bool more_parameters : {true, false}) {
        const gradsync_test::TemporaryDirectory folder;
        const std::string digests = folder.file("digests");
        gradsync_test::ElasticRanks ranks(
            2,
            [&](ElasticJob& job, int start, const std::string&) {
                const auto at = [&](TcpBackend& comm, std::uint64_t step) {
                    if (step < 3 || std::filesystem::exists(folder.file("other"))) nap(comm, step);
                    else slow_nap();
                    if (step == 3 && start == 1) note(folder.file("trains"), "");
                };
                if (start <= 2) return note(digests, train_sharded<Stage1>(job, steps, {.at = at}));
                ShardedModel model;
                job.run([&](TcpBackend& comm) {
                    note(folder.file("other"), "");
                    std::uint64_t counts[2] = {};
                    auto views = model.parameters();
                    if (more_parameters) views.pop_back();
                    gradsync::ShardedOptimizer sharded(
                        comm, views, Momentum{&counts[0]}, gradsync::Zero1{}, gradsync::SizeCappedBuckets{200},
                        gradsync::ShardingOptions{.reducer = {.gradients = gradsync::GradientStorage::in_buckets,
                                                              .accumulation = gradsync::Accumulation::in_buckets,
                                                              .micro_batches = 12}});
                    job.restore(sharded, {gradsync::buffer(counts)});
                });
            },
            1, 3);
        await([&] { return std::filesystem::exists(folder.file("trains")); });
        ranks.start(2);
        const std::vector<std::string> ends = ranks.ends();
        CHECK(says(ends[2], more_parameters ? "the number of parameters differs" : "rank 2 has 16 bytes of state, rank 0 8"));
        const std::string before = expected_of<Stage1>(steps);
        CHECK(content_of(digests) == before + "\n" + before + "\n");
    }
}

TEST_CASE("copies of the shards after no step are refused") {
    ElasticJob job{Job{}};
    CHECK_THROWS_WITH_AS(job.keep_every(0), doctest::Contains("keep_every: 0 steps; at least 1 lies between"), Error);
}
