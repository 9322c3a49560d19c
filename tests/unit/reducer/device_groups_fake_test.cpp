// SPDX-License-Identifier: BSL-1.0
// ctest: SANITIZED LIBRARIES gradsync_device_support gradsync_fake_nccl gradsync_fake_passes
// The Reducer on device memory, over the fakes of support/fake: buckets whose collectives leave as one launch.
#include <gradsync/backend/nccl.hpp>
#include <gradsync/bucket/any_buckets.hpp>
#include <gradsync/bucket/per_parameter.hpp>
#include <gradsync/bucket/size_capped.hpp>
#include <gradsync/overlap/any_overlap.hpp>
#include <gradsync/overlap/no_overlap.hpp>
#include <gradsync/overlap/overlap_backward.hpp>
#include <gradsync/overlap/overlap_forward.hpp>
#include <gradsync/planning/faulty_backend.hpp>

#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "support/device_training.hpp"
#include "support/fake/fake.hpp"
#include "support/rank_threads.hpp"

using namespace gradsync;

namespace {

/// Two steps of a Reducer of parameters of 4, 8, 12, ... bytes, marked in an order of this rank's own; the gradients, and the launches of
/// NCCL's that the second step took on all ranks together.
template <class Overlap>
std::pair<std::vector<float>, int> steps(int size, std::size_t group_bytes, const AnyBuckets& buckets, const Overlap& overlap,
                                         std::size_t parameters = 10) {
    gradsync_test::Findings findings;
    std::vector<float> result;
    int launches = 0;
    gradsync_test::run_rank_threads(
        size, [&](auto& rendezvous) { return NcclBackend(rendezvous, {.timeout = std::chrono::seconds(60), .group_bytes = group_bytes}); },
        [&](NcclBackend comm) {
            std::vector<gradsync_test::Numbers<NcclBackend>> gradients;
            for (std::size_t i = 0; i < parameters; ++i) gradients.emplace_back(i + 1, 0.0f);
            std::vector<ParameterView> views;
            for (auto& g : gradients) views.push_back({.name = "p" + std::to_string(views.size()), .gradient = g.view()});
            Reducer sync(comm, views, ReducerOptions{}, buckets, overlap);
            int before = 0;
            for (int step = 0; step < 2; ++step) {
                comm.host().barrier().wait();
                if (comm.rank() == 0) before = gradsync_fake::launches();
                comm.host().barrier().wait();
                for (std::size_t k = 0; k < gradients.size(); ++k) {
                    const std::size_t i = (gradients.size() - 1 - k + static_cast<std::size_t>(comm.rank()) * 3) % gradients.size();
                    gradsync_test::write(comm, gradients[i].view(),
                                         std::vector<float>(i + 1, static_cast<float>(comm.rank() + step) + 0.1f * static_cast<float>(i)));
                    sync.mark_ready(i);
                }
                (void)sync.finish();
                constexpr std::size_t of_a_bucket = std::is_same_v<Overlap, OverlapForward> ? 2 : 1;
                findings.check(sync.statistics().last.collectives == sync.plan().size() * of_a_bucket,
                               "a bucket in a group is no collective");
                cudaStreamSynchronize(comm.stream());
                comm.host().barrier().wait();
            }
            if (comm.rank() != 0) return;
            launches = gradsync_fake::launches() - before;
            for (auto& g : gradients)
                for (const float value : gradsync_test::read(comm, g.view())) result.push_back(value);
        });
    CHECK(gradsync_fake::misuses() == 0);
    return {result, launches};
}

}  // namespace

TEST_CASE("Reducer on devices: small buckets that follow one another leave as one launch, on all ranks alike") {
    const AnyOverlap backward = OverlapBackward{}, without = NoOverlap{};
    for (const int size : {2, 3}) {
        const auto [expected, apart] = steps(size, 0, PerParameter(), backward);
        CHECK(apart == size * 10 * 2);  // a mean is two: the weights, the elements
        // Bytes of the buckets in the order of launch: 40 36 32 28 24 20 16 12 8 4.
        struct Case {
            std::size_t bytes;
            int groups;
        };
        for (const Case c : {Case{76, 4}, {60, 5}, {220, 1}, {4, 10}, {1 << 20, 1}}) {
            CAPTURE(c.bytes);
            const auto [result, together] = steps(size, c.bytes, PerParameter(), backward);
            CHECK(result == expected);
            CHECK(together == size * c.groups * 2);
            CHECK(steps(size, c.bytes, PerParameter(), without) == std::pair(result, together));
        }
        // Gathers, each a launch without weights, leave in the same groups.
        for (const Case c : {Case{0, 10}, {76, 4}, {1 << 20, 1}})
            CHECK(steps(size, c.bytes, PerParameter(), OverlapForward()) == std::pair(expected, size * c.groups * 3));
        CHECK(steps(size, 100, SizeCappedBuckets(60, 40), backward).first == expected);
    }
    CHECK(steps(2, 1 << 20, PerParameter(), backward, 100).second == 2 * 4 * 2);  // 32, 32, 32 and 4
    CHECK(steps(2, 1 << 20, PerParameter(), OverlapForward(), 100).second == 2 * 4 * 3);
}

TEST_CASE("Reducer on devices: gathers that leave together are waited for one by one, in any order, and planned anew") {
    gradsync_test::Findings findings;
    gradsync_test::run_rank_threads(
        2, [](auto& rendezvous) { return NcclBackend(rendezvous, {.timeout = std::chrono::seconds(60), .group_bytes = 76}); },
        [&](NcclBackend comm) {
            std::vector<gradsync_test::Numbers<NcclBackend>> gradients;
            std::vector<ParameterView> views;
            for (std::size_t i = 0; i < 10; ++i) gradients.emplace_back(i + 1, 0.0f);
            for (auto& g : gradients) views.push_back({.name = "p" + std::to_string(views.size()), .gradient = g.view()});
            Reducer<NcclBackend, PerParameter, OverlapForward> sync(comm, views);
            for (int step = 0; step < 4; ++step) {
                for (std::size_t k = 0; k < 10; ++k) {
                    const std::size_t i = (k * 7) % 10;  // an order that changes the plan
                    gradsync_test::write(comm, gradients[i].view(),
                                         std::vector<float>(i + 1, static_cast<float>(comm.rank() * 4 + step) + static_cast<float>(i)));
                    sync.mark_ready(i);
                }
                auto averages = sync.finish();
                for (std::size_t k = 0; k < 10; ++k) {
                    const std::size_t i = (step + comm.rank()) % 2 == 0 ? k : (k * 3 + 5) % 10;  // each rank in another
                    averages.acquire(i);
                    const auto values = gradsync_test::read(comm, gradients[i].view());
                    findings.check(values == std::vector<float>(i + 1, static_cast<float>(2 + step) + static_cast<float>(i)),
                                   "step " + std::to_string(step) + ": a wrong mean of p" + std::to_string(i));
                }
                if (step == 1) findings.check(sync.rebuild_buckets(), "the plan has not changed");
            }
        });
    CHECK(gradsync_fake::misuses() == 0);
}

TEST_CASE("Reducer on devices: an exception out of a gather's start leaves none of its group on the device, and ends all ranks") {
    gradsync_test::Findings findings;
    using Stumbling = FaultyBackend<NcclBackend>;
    std::atomic<int> gathers{-1};  // that rank 0 may start yet; -1: all
    const Stumbling::Fault fault = [&](const FaultPoint& at) {
        if (at.rank == 0 && at.operation == "all_gather" && gathers >= 0 && gathers-- == 0)
            throw std::runtime_error("this rank has stumbled");
    };
    gradsync_test::run_rank_threads(
        2, [&](auto& rendezvous) { return Stumbling(NcclBackend(rendezvous, {.timeout = std::chrono::seconds(60)}), fault); },
        [&](Stumbling comm) {
            std::vector<gradsync_test::Numbers<NcclBackend>> gradients;
            std::vector<ParameterView> views;
            for (std::size_t i = 0; i < 4; ++i) gradients.emplace_back(i + 1, static_cast<float>(comm.rank()));
            for (auto& g : gradients) views.push_back({.name = "p" + std::to_string(views.size()), .gradient = g.view()});
            std::string text;
            int peer = -1;
            {
                Reducer<Stumbling, PerParameter, OverlapForward> sync(comm, views);
                for (std::size_t i = 4; i-- > 0;) sync.mark_ready(i);
                if (comm.rank() == 0) gathers = 2;
                comm.host().barrier().wait();
                const int before = gradsync_fake::launches();
                comm.host().barrier().wait();
                try {
                    if (comm.rank() == 0) (void)sync.finish();
                    else comm.host().barrier().wait();  // where nothing is launched meanwhile
                } catch (const Error& error) {
                    text = error.what();
                    peer = error.context().peer;
                } catch (const std::runtime_error& error) {
                    text = error.what();
                }
                findings.check(gradsync_fake::launches() == before, "a part of the gathers was launched");
            }
            if (comm.rank() == 0) findings.check(text == "this rank has stumbled", text);
            else findings.check(peer == 0 && text.find("rank 0 failed: this rank has stumbled") != std::string::npos, text);
        });
    CHECK(gradsync_fake::misuses() == 0);
}

TEST_CASE("Reducer on devices: what fails in a group ends the step on all ranks, and is named") {
    gradsync_test::Findings findings;
    gradsync_test::run_rank_threads(
        2, [](auto& rendezvous) { return NcclBackend(rendezvous, {.timeout = std::chrono::seconds(60)}); },
        [&](NcclBackend comm) {
            gradsync_test::Numbers<NcclBackend> a(1000, 1), b(2000, 2);
            std::vector<ParameterView> views{{.name = "a", .gradient = a.view()}, {.name = "b", .gradient = b.view()}};
            Reducer<NcclBackend, PerParameter, OverlapBackward> sync(comm, views);
            sync.mark_ready(1);
            comm.host().barrier().wait();
            if (comm.rank() == 0) gradsync_fake::refuse_next("ncclGroupEnd", ncclInvalidUsage);
            const auto error = gradsync_test::error_of([&] {
                comm.host().barrier().wait();  // may hear of it already
                sync.mark_ready(0);
                sync.finish();
                cudaStreamSynchronize(comm.stream());
                comm.barrier().wait();  // where the other rank's failure was not known yet
            });
            findings.check(error && error->errc() == Errc::device_failed, error ? error->what() : "nothing was thrown");
            findings.check(error && gradsync_test::mentions(*error, "all_reduce(mean, f32, 2000 elements) in a group with the next 1"),
                           error ? error->what() : "");
        });
}
