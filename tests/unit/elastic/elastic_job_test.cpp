// SPDX-License-Identifier: BSL-1.0
// ctest: COST 30
// Ranks that come and go, as processes that this test starts, kills and asks to leave. The weights at the end are compared with those of one
// process that does all of the work by itself.
#include <gradsync/elastic/elastic_job.hpp>

#include <doctest/doctest.h>

#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <optional>
#include <random>
#include <span>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/elastic_ranks.hpp"
#include "support/ports.hpp"
#include "support/says.hpp"
#include "support/slow_build.hpp"
#include "support/standard_error.hpp"
#include "support/temporary_directory.hpp"

using namespace std::chrono_literals;
using gradsync::BufferView;
using gradsync::ElasticJob;
using gradsync::Errc;
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

using Ranks = gradsync_test::ElasticRanks;
constexpr std::size_t micro_batches = 12;

/// A model with a frozen parameter, one that some steps do not use, and momentum.
struct Model {
    static constexpr std::size_t count = 3;
    std::vector<std::vector<float>> weights{std::vector<float>(5, 1), std::vector<float>(70, 2), std::vector<float>(3, 3)},
        momentum = weights, gradients = weights;
    static bool uses(std::uint64_t step, std::size_t i) { return i == 0 || (i == 1 && step % 3 != 0); }  // parameter 2 is frozen
    void backward(std::uint64_t step, std::size_t micro_batch, const std::function<void(std::size_t)>& ready) {
        for (std::size_t i = 0; i < 2; ++i) {
            if (!uses(step, i)) continue;
            for (std::size_t k = 0; k < weights[i].size(); ++k)
                gradients[i][k] = 0.013f * weights[i][k] + static_cast<float>((step * 31 + k + micro_batch * 7) % 13) / 3;
            ready(i);
        }
    }
    void step(std::uint64_t number) {
        for (std::size_t i = 0; i < 2; ++i)
            for (std::size_t k = 0; uses(number, i) && k < weights[i].size(); ++k) {
                momentum[i][k] = 0.9f * momentum[i][k] + gradients[i][k];
                weights[i][k] -= 0.05f * momentum[i][k];
            }
    }
    std::vector<gradsync::ParameterView> parameters() {
        std::vector<gradsync::ParameterView> views;
        for (std::size_t i = 0; i < count; ++i)
            views.push_back({.name = "p" + std::to_string(i),
                             .value = gradsync::buffer(weights[i]),
                             .gradient = gradsync::buffer(gradients[i]),
                             .requires_grad = i < 2});
        return views;
    }
    std::vector<BufferView> state() {
        std::vector<BufferView> views;
        for (std::size_t i = 0; i < count; ++i) views.push_back(gradsync::buffer(weights[i]));
        views.push_back(BufferView(static_cast<float*>(nullptr), 0));  // a part of a state may be empty
        for (std::size_t i = 0; i < count; ++i) views.push_back(gradsync::buffer(momentum[i]));
        return views;
    }
    std::string digest() const {
        std::uint64_t hash = 1;
        for (const auto& all : {weights, momentum})
            for (const auto& one : all) hash = gradsync::detail::fnv1a(one.data(), one.size() * sizeof(float), hash);
        return std::to_string(hash);
    }
};

/// Trains, and returns the digest of the end. `at(comm, step)`: what happens in a step. `on(restored, comm)`: when the ranks have met.
template <class At, class On>
std::string train(ElasticJob& job, Model& model, std::uint64_t steps, At&& at, On&& on, std::chrono::nanoseconds limit = 20s) {
    job.run(
        [&](TcpBackend& comm) {
            gradsync::Reducer sync(comm, model.parameters(),
                                   {.accumulation = gradsync::Accumulation::in_buckets,
                                    .micro_batches = micro_batches,
                                    .unused = gradsync::UnusedParameters::find_unused});
            on(job.restore(sync, model.state()), comm);
            while (job.step() < steps && job.goes_on()) {
                for (const std::size_t m : job.micro_batches()) {
                    std::optional<gradsync::NoSync> more;
                    if (m != job.micro_batches().back()) more.emplace(sync.no_sync());
                    model.backward(job.step(), m, [&](std::size_t i) { sync.mark_ready(i); });
                }
                at(comm, job.step());
                sync.finish();
                sync.clip_gradients_by_norm(20);
                job.update([&] { model.step(job.step()); });
            }
        },
        {.timeout = limit});
    return job.has_left() ? "left" : model.digest();
}
template <class At>
std::string train(ElasticJob& job, std::uint64_t steps, At&& at) {
    Model model;
    return train(job, model, steps, at, [](const Restored&, TcpBackend&) {});
}
/// What all must have in the end.
std::string expected(std::uint64_t steps) {
    ElasticJob alone{Job{}};
    return train(alone, steps, [](TcpBackend&, std::uint64_t) {});
}

}  // namespace

TEST_CASE("without a store one rank trains alone, and can be asked to leave") {
    CHECK(expected(20) == expected(20));
    CHECK(expected(20) != expected(21));
    ElasticJob job{Job{}};
    const std::string end = train(job, 100, [&](TcpBackend&, std::uint64_t step) {
        if (step == 7) job.request_leave();
    });
    CHECK(end == "left");
    CHECK(job.step() == 9);  // the vote of step 8 says so, and is read in step 9
}

TEST_CASE("without a store rank 0 of several says that the first lost rank ends the job") {
    const auto said = [](int rank, int size) { return gradsync_test::written_by([&] { ElasticJob job({.rank = rank, .size = size}); }); };
    CHECK(says(said(0, 2), "without a store the first lost rank ends this ElasticJob; start the ranks with gradsync_run --min-ranks N"));
    CHECK(said(1, 2) == "");
    CHECK(said(0, 1) == "");
}

TEST_CASE("a run whose ranks change all the time ends with the bits of one whose ranks do not") {
    const std::uint64_t steps = 150;
    const std::string before = expected(steps);
    for (const unsigned seed : {1u, 2u}) {
        CAPTURE(seed);
        const gradsync_test::TemporaryDirectory folder;
        const std::string sizes = folder.file("sizes");
        Ranks ranks(
            1,
            [&](ElasticJob& job, int, const std::string&) {
                const Listening listening(job);
                Model model;
                const auto on = [&](const Restored& restored, TcpBackend& comm) {
                    if (comm.rank() == 0) note(sizes, std::to_string(comm.size()) + " from " + std::to_string(restored.step));
                };
                const auto at = [&](TcpBackend& comm, std::uint64_t step) {  // no faster than the ranks change
                    nap(comm, step);
                    for (int i = 0; i < 40 && lines_in(sizes) * 12 < step; ++i) nap(comm, step);
                };
                const std::string end = train(job, model, steps, at, on, 1s);
                if (job.step() == steps) note(folder.file("digests"), end);
            },
            1, 4);
        std::mt19937 random(seed);
        ranks.start(5);  // it stays, as somebody has to have the state
        await([&] { return std::filesystem::exists(sizes); });
        std::vector<bool> here{true, false, false, false, false};
        while (!std::filesystem::exists(folder.file("digests"))) {
            const int which = static_cast<int>(random() % 5);
            if (!here[static_cast<std::size_t>(which)]) ranks.start(which);
            else ranks.send(which, random() % 2 == 0 ? SIGKILL : SIGUSR1);
            here[static_cast<std::size_t>(which)].flip();
            const std::size_t seen = lines_in(sizes);
            for (int i = 0; i < 30 && lines_in(sizes) == seen; ++i) std::this_thread::sleep_for(1ms);
        }
        (void)ranks.ends();
        const std::string digests = content_of(folder.file("digests"));
        for (std::size_t at = 0; at < digests.size(); at += before.size() + 1) CHECK(digests.substr(at, before.size()) == before);
        CHECK(lines_in(sizes) > 10);
    }
}

TEST_CASE("added: processes that come later become ranks, up to the number that the job should have") {
    const gradsync_test::TemporaryDirectory folder;
    Ranks ranks(
        1,
        [&](ElasticJob& job, int, const std::string&) {
            Model model;
            const auto on = [&](const Restored&, TcpBackend& comm) {
                if (comm.rank() == 0) note(folder.file("sizes"), std::to_string(comm.size()));
            };
            const auto at = [](TcpBackend& comm, std::uint64_t step) { comm.size() < 3 ? slow_nap() : nap(comm, step); };
            throw std::runtime_error(train(job, model, 100, at, on, 1s));
        },
        1, 3);
    await([&] { return lines_in(folder.file("sizes")) == 1; });
    ranks.start(1);
    await([&] { return lines_in(folder.file("sizes")) == 2; });
    ranks.start(2), ranks.start(3);
    const std::vector<std::string> ends = ranks.ends();
    CHECK(content_of(folder.file("sizes")) == "1\n2\n3\n");
    std::size_t equal = 0;
    for (const std::string& end : ends) equal += end == expected(100);
    CHECK(equal == 3);  // one was not needed
}

TEST_CASE("removed: a rank that is asked to leave goes after the step, and the others go on") {
    const gradsync_test::TemporaryDirectory folder;
    Ranks ranks(
        3,
        [&](ElasticJob& job, int, const std::string&) {
            const Listening listening(job);
            throw std::runtime_error(train(job, 60, [&](TcpBackend& comm, std::uint64_t step) {
                comm.size() == 3 && step > 10 ? slow_nap() : nap(comm, step);
                if (comm.rank() == 0 && step == 10) note(folder.file("steps"), "10");
            }));
        },
        1, 3);
    await([&] { return std::filesystem::exists(folder.file("steps")); });
    ranks.send(0, SIGUSR1);
    const std::vector<std::string> ends = ranks.ends();
    CHECK(ends[0] == "left");
    CHECK(ends[1] == expected(60));
    CHECK(ends[2] == expected(60));
}

TEST_CASE("several at once: one rank that is left has the state for all that come") {
    const gradsync_test::TemporaryDirectory folder;
    Ranks ranks(
        4,
        [&](ElasticJob& job, int, const std::string&) {
            throw std::runtime_error(train(job, 120, [&](TcpBackend& comm, std::uint64_t step) {
                comm.size() < 4 ? slow_nap() : nap(comm, step);
                if (comm.rank() == 0) note(folder.file("steps"), std::to_string(step));
            }));
        },
        1, 4);
    await([&] { return lines_in(folder.file("steps")) > 10; });
    for (const int rank : {0, 1, 3}) ranks.send(rank, SIGKILL);
    for (const int rank : {0, 1, 3}) ranks.replace(rank);
    for (const std::string& end : ranks.ends()) CHECK(end == expected(120));
}

TEST_CASE("all fail: without a checkpoint the job ends and says so; with one it goes on from there") {
    for (const bool has_checkpoint : {false, true}) {
        CAPTURE(has_checkpoint);
        const gradsync_test::TemporaryDirectory folder;
        Ranks ranks(
            2,
            [&](ElasticJob& job, int, const std::string&) {
                Model model;
                job.run(
                    [&](TcpBackend& comm) {
                        gradsync::Reducer sync(comm, model.parameters(),
                                               {.accumulation = gradsync::Accumulation::in_buckets,
                                                .micro_batches = micro_batches,
                                                .unused = gradsync::UnusedParameters::find_unused});
                        const Restored restored = job.restore(sync, model.state(), [&]() -> std::uint64_t {
                            std::ifstream in(folder.file("checkpoint"), std::ios::binary);
                            for (const BufferView& view : model.state())
                                in.read(static_cast<char*>(view.data), static_cast<std::streamsize>(view.bytes()));
                            return in ? 20 : 0;
                        });
                        if (comm.rank() == 0)
                            note(folder.file("from"),
                                 std::to_string(static_cast<int>(restored.from)) + " " + std::to_string(restored.step));
                        while (job.step() < 60 && job.goes_on()) {
                            for (const std::size_t m : job.micro_batches()) {
                                std::optional<gradsync::NoSync> more;
                                if (m != job.micro_batches().back()) more.emplace(sync.no_sync());
                                model.backward(job.step(), m, [&](std::size_t i) { sync.mark_ready(i); });
                            }
                            nap(comm, 0);
                            if (job.step() == 40) await([&] { return std::filesystem::exists(folder.file("killed")); });
                            sync.finish();
                            sync.clip_gradients_by_norm(20);
                            job.update([&] { model.step(job.step()); });
                            if (comm.rank() != 0) continue;
                            note(folder.file("steps"), "one");
                            if (!has_checkpoint || job.step() != 20) continue;
                            std::ofstream out(folder.file("checkpoint.new"), std::ios::binary);
                            for (const BufferView& view : model.state())
                                out.write(static_cast<const char*>(view.data), static_cast<std::streamsize>(view.bytes()));
                            out.close();
                            std::filesystem::rename(folder.file("checkpoint.new"), folder.file("checkpoint"));
                        }
                    },
                    {.timeout = 20s});
                throw std::runtime_error(model.digest());
            },
            1, 2);
        await([&] { return lines_in(folder.file("steps")) > 25; });
        for (const int rank : {0, 1}) ranks.send(rank, SIGKILL);
        note(folder.file("killed"), "both");
        for (const int rank : {0, 1}) ranks.replace(rank);
        const std::vector<std::string> ends = ranks.ends();
        if (has_checkpoint) {
            CHECK(ends[0] == expected(60));
            CHECK(ends[1] == expected(60));
            CHECK(content_of(folder.file("from")) == "0 0\n2 20\n");
        } else {
            for (const std::string& end : ends)
                CHECK(says(end, "all ranks that had the state of the training were lost, and there is no checkpoint; start it anew"));
        }
    }
}

namespace {

/// A process on another host, which nobody can reach.
gradsync::elastic::Member elsewhere(std::uint64_t id, std::int64_t place) {
    gradsync::elastic::Member one;
    one.id = id, one.place = place, one.process = gradsync::collective::ProcessIdentity::own();
    ++one.process.system;
    return one;
}
Job alone_in(const gradsync_test::TemporaryDirectory& store, int most) {
    return {.rank = 0, .size = most, .address = "127.0.0.1", .store = store.path().string(), .min_ranks = 1, .max_ranks = most};
}
std::string said(gradsync::FileStore& store, const std::string& name) {
    const auto found = store.read(name);
    return found ? std::string(gradsync::bootstrap::text_of(*found)) : "nothing";
}

}  // namespace

TEST_CASE("a job begins anew only if no earlier generation has begun, and then none can any more") {
    for (const std::string earlier : {"", "no", "yes"}) {
        CAPTURE(earlier);
        const gradsync_test::TemporaryDirectory folder;
        gradsync::FileStore store(folder.path().string());
        const auto lost = elsewhere(4711, 0);
        store.create("gen/0000000001", std::as_bytes(std::span(&lost, 1)));
        store.create("gone/0000000000001267", {});
        if (!earlier.empty()) store.create("begun/1", std::as_bytes(std::span(earlier)));
        ElasticJob job(alone_in(folder, 1));
        if (earlier == "yes") {
            CHECK_THROWS_WITH_AS(train(job, 5, nap), doctest::Contains("all ranks that had the state of the training were lost"), Error);
        } else {
            CHECK(train(job, 5, nap) == expected(5));
            CHECK(said(store, "begun/1") == "no");
            CHECK(said(store, "begun/2") == "yes");
        }
    }
}

TEST_CASE("a generation in whose name a newer one has said that nothing has begun does not begin") {
    const gradsync_test::TemporaryDirectory folder;
    gradsync::FileStore store(folder.path().string());
    const std::string no = "no";
    store.create("begun/1", std::as_bytes(std::span(no)));
    ElasticJob job(alone_in(folder, 1));
    CHECK(train(job, 5, nap) == expected(5));
    CHECK(job.generation() == 2);
}

TEST_CASE("members on other hosts: their launchers say that they have ended, and those that do not come are missed at once") {
    const gradsync_test::TemporaryDirectory folder;
    gradsync::FileStore store(folder.path().string());
    for (const auto& one : {elsewhere(1, 1), elsewhere(2, 2), elsewhere(3, 3)})
        store.create(gradsync::elastic::name_of("join/", one.id), std::as_bytes(std::span(&one, 1)));
    std::uint32_t met = 0;
    SUBCASE("a launcher speaks while others wait in the meeting") {
        std::thread launcher([&] {
            gradsync::FileStore same(folder.path().string());
            await([&] { return same.read("gen/0000000001"); });
            for (const std::uint64_t id : {1u, 2u, 3u}) same.create(gradsync::elastic::name_of("gone/", id), {});
        });
        ElasticJob job(alone_in(folder, 4));
        CHECK(train(job, 5, nap) == expected(5));
        launcher.join();
        CHECK(store.names("out/").empty());  // nobody has waited for the time limit
    }
    SUBCASE("three do not come") {
        ElasticJob job(alone_in(folder, 4));
        Model model;
        const auto on = [&](const Restored&, TcpBackend&) { met = job.generation(); };
        CHECK(train(job, model, 5, nap, on, 1s) == expected(5));
        CHECK(met == 2);
    }
}

TEST_CASE("a member that cannot reach the first one lets it say who goes on") {
    const gradsync_test::TemporaryDirectory folder;
    gradsync::FileStore store(folder.path().string());
    const std::vector<gradsync::elastic::Member> others{elsewhere(1, 0), elsewhere(2, 1)};
    for (const auto& one : others) store.create(gradsync::elastic::name_of("join/", one.id), std::as_bytes(std::span(&one, 1)));
    std::thread first([&] {
        gradsync::FileStore same(folder.path().string());
        await([&] { return !same.names("back/1-").empty(); });
        std::this_thread::sleep_for(100ms);  // it gives up at the same time, and may be a little slower
        same.create("gen/0000000002", std::as_bytes(std::span(others)));
        same.create("end", std::as_bytes(std::span("for this test", 13)));
    });
    Job place = alone_in(folder, 3);
    place.rank = 2;
    ElasticJob job(place);
    CHECK_THROWS_WITH_AS(job.connect({.timeout = 500ms}), doctest::Contains("for this test"), Error);
    first.join();
    const auto went_on = gradsync::elastic::members_in(store.read("gen/0000000002").value());
    REQUIRE(went_on.size() == 2);
    CHECK(went_on[0].id == 1);
    CHECK(went_on[1].id == 2);
}

TEST_CASE("below the minimum: the others wait for a rank to come, and go on when it does, or end when their time is over") {
    for (const bool comes : {true, false}) {
        CAPTURE(comes);
        const gradsync_test::TemporaryDirectory folder;
        Ranks ranks(
            3,
            [&](ElasticJob& job, int, const std::string&) {
                Model model;
                throw std::runtime_error(train(
                    job, model, 60,
                    [&](TcpBackend& comm, std::uint64_t step) {
                        nap(comm, step);
                        note(folder.file("steps"), "one");
                        if (step == 40) await([&] { return std::filesystem::exists(folder.file("killed")); });
                    },
                    [](const Restored&, TcpBackend&) {}, comes ? 20s : 2s));
            },
            2, 3);
        await([&] { return lines_in(folder.file("steps")) > 30; });
        for (const int rank : {1, 2}) ranks.send(rank, SIGKILL);
        note(folder.file("killed"), "both");
        std::this_thread::sleep_for(100ms);
        if (comes) ranks.replace(1);
        const std::vector<std::string> ends = ranks.ends();
        if (comes) CHECK(ends[0] == expected(60));
        else CHECK(says(ends[0], "the job needs 2 ranks, and 1 process is there"));
    }
}

TEST_CASE("failure in the update: a rank whose state is torn gets that of another, twice") {
    Ranks ranks(
        3,
        [&](ElasticJob& job, int, const std::string&) {
            Model model;
            int failures = 0;
            job.run(
                [&](TcpBackend& comm) {
                    gradsync::Reducer sync(comm, model.parameters(),
                                           {.accumulation = gradsync::Accumulation::in_buckets,
                                            .micro_batches = micro_batches,
                                            .unused = gradsync::UnusedParameters::find_unused});
                    (void)job.restore(sync, model.state());
                    while (job.step() < 30 && job.goes_on()) {
                        for (const std::size_t m : job.micro_batches()) {
                            std::optional<gradsync::NoSync> more;
                            if (m != job.micro_batches().back()) more.emplace(sync.no_sync());
                            model.backward(job.step(), m, [&](std::size_t i) { sync.mark_ready(i); });
                        }
                        sync.finish();
                        sync.clip_gradients_by_norm(20);
                        job.update([&] {
                            model.step(job.step());
                            if (comm.rank() == 1 && job.step() == 10 + 5 * static_cast<std::uint64_t>(failures) && ++failures <= 2)
                                throw Error(Errc::peer_left, "as if a collective had failed here");
                        });
                    }
                },
                {.timeout = 20s});
            throw std::runtime_error(model.digest());
        },
        1, 3);
    for (const std::string& end : ranks.ends()) CHECK(end == expected(30));
}

TEST_CASE("what depends on the number of ranks is refused") {
    const auto refusal = [](const gradsync::ReducerOptions& options) {
        ElasticJob job{Job{.max_ranks = 3}};
        std::vector<float> weights(4), gradient(4);
        std::string text;
        job.run([&](TcpBackend& comm) {
            const std::vector<BufferView> state{gradsync::buffer(weights)};
            try {
                (void)job.restore(comm, options, state, [] { return 0; });
            } catch (const Error& error) {
                if (error.errc() == Errc::invalid_argument) text = error.what();
            }
            (void)job.restore(comm, {.micro_batches = 3}, state, [] { return 0; });
        });
        return text;
    };
    CHECK(says(refusal({}), "set ReducerOptions::micro_batches to a number that is at least 3, not 0"));
    CHECK(says(refusal({.micro_batches = 2}), "at least 3, not 2"));
    CHECK(says(refusal({.averaging = gradsync::Averaging::weighted_mean, .micro_batches = 3}), "weights of ranks depend on their number"));
    CHECK(says(refusal({.micro_batches = 3, .reduce_dtype = gradsync::DType::bf16}), "with a reduce_dtype of 16 or 8 bits"));
}

TEST_CASE("a body that forgets restore() or update() is refused") {
    ElasticJob job{Job{}};
    std::vector<float> weights(4);
    const auto refusal = [](auto&& call) -> std::string {
        try {
            call();
        } catch (const Error& error) {
            return error.what();
        }
        return "none";
    };
    job.run([&](TcpBackend& comm) {
        CHECK(says(refusal([&] { (void)job.goes_on(); }), "goes_on: call restore() first"));
        CHECK(says(refusal([&] { job.update([] {}); }), "update: call restore() once and goes_on() before each step"));
        (void)job.restore(comm, {.micro_batches = 1}, std::vector<BufferView>{gradsync::buffer(weights)}, [] { return 0; });
        REQUIRE(job.goes_on());
        CHECK(says(refusal([&] { (void)job.goes_on(); }), "no step was counted since the last call; change the state in update()"));
        job.update([] {});
        CHECK(job.goes_on());
    });
}

namespace {

/// One parameter, and a body without micro-batches to add up. `state`: what restore() gets. `at(step)`: before the gradient is ready.
template <class At>
void train_small(ElasticJob& job, std::vector<float>& weights, std::vector<BufferView> state, std::uint64_t steps, At&& at,
                 std::chrono::nanoseconds limit = 20s) {
    std::vector<float> gradient(weights.size());
    job.run(
        [&](TcpBackend& comm) {
            gradsync::Reducer sync(comm,
                                   std::vector<gradsync::ParameterView>{
                                       {.name = "w", .value = gradsync::buffer(weights), .gradient = gradsync::buffer(gradient)}},
                                   {.accumulation = gradsync::Accumulation::in_buckets, .micro_batches = 4});
            (void)job.restore(sync, state);
            while (job.step() < steps && job.goes_on()) {
                for (const std::size_t m : job.micro_batches()) {
                    std::optional<gradsync::NoSync> more;
                    if (m != job.micro_batches().back()) more.emplace(sync.no_sync());
                    gradient.assign(gradient.size(), static_cast<float>(m + job.step()));
                    if (m == job.micro_batches().back() && !at(comm, job.step())) return;
                    sync.mark_ready(0);
                }
                sync.finish();
                job.update([&] {
                    for (std::size_t i = 0; i < weights.size(); ++i) weights[i] = 0.99f * weights[i] + gradient[i];
                });
            }
        },
        {.timeout = limit});
}
float small_result(std::uint64_t steps) {
    std::vector<float> weights(3, 1);
    ElasticJob job{Job{}};
    train_small(job, weights, {gradsync::buffer(weights)}, steps, [](TcpBackend&, std::uint64_t) { return true; });
    return weights[2];
}
std::string in_words(float value) { return std::to_string(value); }

}  // namespace

TEST_CASE("a process that waits accuses nobody, however long the others do not need it") {
    Ranks ranks(
        3,
        [](ElasticJob& job, int, const std::string&) {
            std::vector<float> weights(3, 1);
            const auto nap_long = [](TcpBackend&, std::uint64_t) { return std::this_thread::sleep_for(60ms), true; };
            train_small(job, weights, {gradsync::buffer(weights)}, 80, nap_long, 3s);  // it waits for longer than the limit
            throw std::runtime_error(in_words(job.step() == 0 ? 0 : weights[2]));
        },
        2, 2);
    std::size_t right = 0;
    const std::vector<std::string> ends = ranks.ends();
    for (const std::string& end : ends) right += end == in_words(small_result(80));
    CHECK(right == 2);
    CHECK(gradsync::FileStore(ranks.job(0).store).names("out/").empty());
}

TEST_CASE("a rank that is killed while a large state travels costs nothing") {
    for (int round = 0; round < 4; ++round) {
        const gradsync_test::TemporaryDirectory folder;
        Ranks ranks(
            3,
            [&](ElasticJob& job, int start, const std::string&) {
                std::vector<float> weights(3, 1), large(16 << 20, start == 1 ? 7.0f : 0.0f);
                if (start == 1) note(folder.file("begun"), "one");
                train_small(job, weights, {gradsync::buffer(weights), gradsync::buffer(large)}, 40, [](TcpBackend& comm, std::uint64_t) {
                    return std::this_thread::sleep_for(comm.size() < 3 ? 100ms : 10ms), true;
                });
                if (job.step() == 0) return;  // it came too late
                throw std::runtime_error(in_words(weights[2]) + (large.back() == 7 ? "" : ", another large part"));
            },
            1, 3);
        await([&] { return std::filesystem::exists(folder.file("begun")); });
        std::this_thread::sleep_for(std::chrono::milliseconds(20 + 15 * round));
        ranks.replace(1);
        int late = 0;
        for (const std::string& end : ranks.ends()) {
            CHECK((end == in_words(small_result(40)) || end == "done"));
            late += end == "done";
        }
        CHECK(late <= 1);
    }
}

TEST_CASE("a process whose own error has ended run() may run again, and the others have gone on at once") {
    for (const bool in_update : {false, true}) {
        CAPTURE(in_update);
        Ranks ranks(
            2,
            [&](ElasticJob& job, int start, const std::string&) {
                std::vector<float> weights(3, 1), gradient(3);
                const auto fails = [&](std::uint64_t step) { return start == 2 && step == 5 && job.generation() == 1; };
                const auto at = [&](TcpBackend& comm, std::uint64_t step) {
                    std::this_thread::sleep_for(comm.size() == 1 ? 50ms : 5ms);  // until the other is back
                    if (!in_update && fails(step)) throw std::runtime_error("its own");
                    return true;
                };
                try {
                    train_small(job, weights, {gradsync::buffer(weights)}, 100, at);
                } catch (const std::runtime_error&) {
                    train_small(job, weights, {gradsync::buffer(weights)}, 100, at);
                }
                throw std::runtime_error(in_words(weights[2]));
            },
            1, 2);
        const auto begin = std::chrono::steady_clock::now();
        for (const std::string& end : ranks.ends()) CHECK(end == in_words(small_result(100)));
        CHECK(std::chrono::steady_clock::now() - begin < 15s);  // nobody has waited for the time limit
        CHECK(gradsync::FileStore(ranks.job(0).store).names("out/").empty());
    }
}

TEST_CASE("a process that cannot tell whether to go on says that it takes no part any more") {
    Ranks ranks(
        1,
        [](ElasticJob& job, int, const std::string& store) {
            job.run([&](TcpBackend&) {
                const std::byte wrong{};
                (void)gradsync::FileStore(store).create("join/1", {&wrong, 1});
                throw Error(Errc::peer_failed, "a rank was lost");
            });
        },
        1, 1);
    CHECK(says(ranks.ends()[0], "holds something else under join/1"));
    CHECK(gradsync::FileStore(ranks.job(0).store).names("gone/").size() == 1);
}

TEST_CASE("a second job of a process in the same store is refused when the first has ended") {
    const gradsync_test::TemporaryDirectory folder;
    Ranks ranks(
        1,
        [&](ElasticJob& job, int, const std::string& store) {
            (void)train(job, 5, [](TcpBackend&, std::uint64_t) {});
            ElasticJob second({.rank = 0, .size = 1, .address = "127.0.0.1", .store = store});
            (void)train(second, 5, [](TcpBackend&, std::uint64_t) {});
        },
        1, 1);
    CHECK(says(ranks.ends()[0], "run: the job has ended; a process takes part in a job once, also with another ElasticJob"));
}

TEST_CASE("a process with another model that comes later ends, and the others go on") {
    const gradsync_test::TemporaryDirectory folder;
    Ranks ranks(
        2,
        [&](ElasticJob& job, int start, const std::string&) {
            std::vector<float> weights(start == 3 ? 5 : 3, 1);
            train_small(job, weights, {gradsync::buffer(weights)}, 60, [&](TcpBackend&, std::uint64_t) {
                note(folder.file("steps"), "one");
                return std::this_thread::sleep_for(5ms), true;
            });
            throw std::runtime_error(in_words(weights[2]));
        },
        1, 3);
    // The third rank that the job should have is late: the others wait for it, and it has another model.
    ranks.start(2);
    const std::vector<std::string> first = ranks.ends();
    CHECK(says(first[0] + first[1] + first[2], "differs"));  // at the start nobody can be said to be right

    Ranks later(
        1,
        [&](ElasticJob& job, int start, const std::string&) {
            std::vector<float> weights(start == 2 ? 5 : 3, 1);
            train_small(
                job, weights, {gradsync::buffer(weights)}, 200,
                [&](TcpBackend&, std::uint64_t) {
                    note(folder.file("steps of the second"), "one");
                    return std::this_thread::sleep_for(job.generation() == 1 ? 50ms : 5ms), true;
                },
                1s);
            throw std::runtime_error(in_words(weights[2]));
        },
        1, 2);
    await([&] { return lines_in(folder.file("steps of the second")) > 3; });
    later.start(1);
    const std::vector<std::string> ends = later.ends();
    CHECK(ends[0] == in_words(small_result(200)));
    CHECK(says(ends[1], "differs"));
}

TEST_CASE("a process that was stopped while the others went on does not go on from its old state") {
    const gradsync_test::TemporaryDirectory folder;
    Ranks ranks(
        2,
        [&](ElasticJob& job, int, const std::string&) {
            std::vector<float> weights(3, 1);
            train_small(
                job, weights, {gradsync::buffer(weights)}, 10'000,
                [&](TcpBackend& comm, std::uint64_t) {
                    note(folder.file(comm.size() == 1 ? "steps of 1" : "steps of 2"), "one");
                    return std::this_thread::sleep_for(2ms), true;
                },
                1s);
        },
        1, 2);
    await([&] { return lines_in(folder.file("steps of 2")) > 10; });
    ranks.send(1, SIGSTOP);
    await([&] { return lines_in(folder.file("steps of 1")) > 10; });
    ranks.send(0, SIGKILL);
    std::this_thread::sleep_for(50ms);
    ranks.send(1, SIGCONT);
    CHECK(says(ranks.ends()[1], "all ranks that had the state of the training were lost"));
}

TEST_CASE("what would give wrong weights without a word is refused") {
    const auto ends_of = [](auto&& run) {
        Ranks ranks(
            2, [&](ElasticJob& job, int start, const std::string&) { run(job, start); }, 1, 2);
        std::string all;
        for (const std::string& end : ranks.ends()) all += end + "; ";
        return all;
    };
    const auto always = [](TcpBackend&, std::uint64_t) { return true; };
    SUBCASE("a step that depends on the rank, also the last one") {
        for (const std::uint64_t bad : {std::uint64_t{4}, std::uint64_t{9}})
            CHECK(says(ends_of([&](ElasticJob& job, int start) {
                           std::vector<float> weights(3, 1);
                           train_small(job, weights, {gradsync::buffer(weights)}, 10, [&](TcpBackend&, std::uint64_t step) {
                               if (step == bad) weights[1] += static_cast<float>(start);
                               return true;
                           });
                       }),
                       "goes_on: the states of the ranks differ after step " + std::to_string(bad + 1) +
                           "; pass all that a step changes to restore()"));
    }
    SUBCASE("a parameter that is no part of the state") {
        CHECK(says(ends_of([&](ElasticJob& job, int) {
                       std::vector<float> weights(3, 1), other(3);
                       train_small(job, weights, {gradsync::buffer(other)}, 10, always);
                   }),
                   "restore: parameter 'w' is no part of the state"));
    }
    SUBCASE("a body that returns early on one rank") {
        CHECK(says(ends_of([&](ElasticJob& job, int start) {
                       std::vector<float> weights(3, 1);
                       train_small(job, weights, {gradsync::buffer(weights)}, 10,
                                   [&](TcpBackend&, std::uint64_t step) { return start != 2 || step < 5; });
                   }),
                   "all_reduce"));
    }
    SUBCASE("an update after one that an exception has ended") {
        ElasticJob job{Job{}};
        float weight = 0;
        std::string text;
        job.run([&](TcpBackend& comm) {
            (void)job.restore(comm, {.micro_batches = 1}, std::vector<BufferView>{BufferView(&weight, 1)}, [] { return 0; });
            (void)job.goes_on();
            try {
                job.update([] { throw std::runtime_error("torn"); });
            } catch (const std::runtime_error&) {
                try {
                    job.update([] {});
                } catch (const Error& error) {
                    text = error.what();
                }
            }
        });
        CHECK(says(text, "update: an exception has torn this rank's state"));
    }
    SUBCASE("a second run") {
        ElasticJob job{Job{}};
        std::vector<float> weights(3, 1);
        train_small(job, weights, {gradsync::buffer(weights)}, 3, always);
        CHECK_THROWS_WITH_AS(train_small(job, weights, {gradsync::buffer(weights)}, 6, always), doctest::Contains("the job has ended"),
                             Error);
    }
    SUBCASE("an error of its own in a rank that leaves") {
        ElasticJob job{Job{}};
        CHECK_THROWS_WITH_AS(job.run([&](TcpBackend&) {
            job.request_leave();
            throw Error(Errc::invalid_argument, "its own");
        }),
                             doctest::Contains("its own"), Error);
    }
}

TEST_CASE("the only rank that has the state gives it to one that waits before it leaves") {
    const gradsync_test::TemporaryDirectory folder;
    Ranks ranks(
        1,
        [&](ElasticJob& job, int start, const std::string&) {
            const Listening listening(job);
            std::vector<float> weights(3, 1);
            train_small(job, weights, {gradsync::buffer(weights)}, 200, [&](TcpBackend&, std::uint64_t) {
                note(folder.file("steps"), "one");
                return std::this_thread::sleep_for(start == 1 ? 50ms : 5ms), true;
            });
            throw std::runtime_error(job.has_left() ? "left" : in_words(weights[2]));
        },
        1, 1);
    await([&] { return lines_in(folder.file("steps")) > 3; });
    ranks.start(1);  // it is not needed yet
    gradsync::FileStore store(ranks.job(0).store);
    await([&] { return !store.names("here/").empty(); });
    ranks.send(0, SIGUSR1);
    const std::vector<std::string> ends = ranks.ends();
    CHECK(ends[0] == "left");
    CHECK(ends[1] == in_words(small_result(200)));
}

TEST_CASE("a model that is made anew in the body, or changed outside of update(), is refused when the ranks meet again") {
    Ranks ranks(
        2,
        [&](ElasticJob& job, int, const std::string&) {
            Model model;
            throw std::runtime_error(train(
                job, model, 40,
                [&](TcpBackend& comm, std::uint64_t step) {
                    nap(comm, step);
                    if (step == 10) model.momentum[1].assign(70, -1.0f);
                    if (step == 10 && comm.rank() == 1) ::raise(SIGKILL);
                },
                [](const Restored&, TcpBackend&) {}));
        },
        1, 2);
    CHECK(says(ranks.ends()[0], "the memory of the state was changed outside of update(), or is another one"));
}

TEST_CASE("after many generations memory, descriptors and threads are as they were") {
    const std::string end = [] {
        Ranks ranks(
            2,
            [&](ElasticJob& job, int, const std::string&) {
                Model model;
                const auto use = [] {
                    long pages = 0;
                    std::ifstream("/proc/self/statm") >> pages >> pages;
                    const auto entries = [](const char* folder) {
                        return std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator());
                    };
                    return std::vector<long>{pages, entries("/proc/self/fd"), entries("/proc/self/task")};
                };
                std::vector<long> first;
                const int generations = 60;  // from the tenth on all stays as it is, up to some 20 pages
                std::uint64_t failed = 0;
                train(
                    job, model, generations,
                    [&](TcpBackend&, std::uint64_t step) {
                        if (step == 10) first = use();
                        if (std::exchange(failed, step) != step) throw Error(Errc::peer_left, "as if one were lost");
                    },
                    [](const Restored&, TcpBackend&) {});
                const std::vector<long> last = use();
                // A sanitizer keeps memory that is free.
                throw std::runtime_error((gradsync_test::slow_build || last[0] < first[0] + 150) && last[1] <= first[1] + 2 &&
                                                 last[2] <= first[2] + 1
                                             ? "flat"
                                             : "pages " + std::to_string(first[0]) + " to " + std::to_string(last[0]) + ", descriptors " +
                                                   std::to_string(first[1]) + " to " + std::to_string(last[1]) + ", threads " +
                                                   std::to_string(first[2]) + " to " + std::to_string(last[2]));
            },
            1, 2);
        const auto ends = ranks.ends();
        return ends[0] + " " + ends[1];
    }();
    CHECK(end == "flat flat");
}

TEST_CASE("a process that was asked to leave leaves well, also if its launcher has ended the job") {
    const gradsync_test::TemporaryDirectory folder;
    const std::string why = "a signal has ended it";
    (void)gradsync::FileStore(folder.path().string()).create("end", std::as_bytes(std::span(why)));
    for (const bool is_asked : {true, false}) {
        ElasticJob job(alone_in(folder, 2));
        if (is_asked) job.request_leave();
        const auto run = [&] { job.run([](TcpBackend&) { FAIL("there is no other rank"); }); };
        if (is_asked) CHECK_NOTHROW(run());
        else CHECK_THROWS_WITH_AS(run(), doctest::Contains("the job was ended: a signal has ended it"), Error);
        CHECK(job.has_left() == is_asked);
    }
}

TEST_CASE("a process that waits for members on other hosts gives up once none of their hosts has answered for three limits") {
    const gradsync_test::TemporaryDirectory folder;
    gradsync::FileStore store(folder.path().string());
    gradsync::net::Socket listener = gradsync::net::listen(gradsync_test::loopback(0), gradsync::net::backlog);
    gradsync::elastic::Member members[] = {elsewhere(1, 0), elsewhere(2, 1)};
    members[1].listener.count = 1;
    members[1].listener.addresses[0] = gradsync::net::address_of(listener);
    store.create("gen/0000000001", std::as_bytes(std::span(members)));
    ElasticJob job(alone_in(folder, 3));
    const auto begin = std::chrono::steady_clock::now();
    std::thread host([&] {
        std::this_thread::sleep_for(2s);
        listener = {};
    });
    CHECK_THROWS_WITH_AS(job.connect({.timeout = 300ms}), doctest::Contains("reaches none of them"), Error);
    CHECK(std::chrono::steady_clock::now() - begin > 2s);
    host.join();
}

TEST_CASE("a process that waits for long sees again and again that a member listens, and fills no queue there") {
    const gradsync_test::TemporaryDirectory folder;
    ElasticJob member(alone_in(folder, 1)), spare(alone_in(folder, 1));
    const TcpBackend comm = member.connect();
    std::thread end([&] {
        std::this_thread::sleep_for(3s);
        gradsync::FileStore(folder.path().string()).create("end", std::as_bytes(std::span("for this test", 13)));
    });
    CHECK_THROWS_WITH_AS(spare.connect({.timeout = 1ms}), doctest::Contains("for this test"), Error);
    end.join();
}
