// SPDX-License-Identifier: BSL-1.0
// ctest: COST 13
// What goes wrong on one rank is a typed error on every rank, within the time limit.
#include <doctest/doctest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <gradsync/gradsync.hpp>
#include <gradsync/shard/sharded_optimizer.hpp>

#include "support/attempts.hpp"
#include "support/averaging_oracle.hpp"
#include "support/optimizers.hpp"
#include "support/ranks.hpp"
#include "support/tensor.hpp"

using namespace gradsync;
using namespace gradsync_test;

namespace {

const std::vector<std::size_t> model_sizes{1000, 20, 3000, 5};

/// Rank 1 has no memory.
struct Poor : ThreadBackend {
    explicit Poor(ThreadBackend backend) : ThreadBackend(std::move(backend)) {}
    kernel::HostBuffer allocate(std::size_t bytes) {
        if (rank() == 1) throw std::bad_alloc();
        return ThreadBackend::allocate(bytes);
    }
    Poor split(int color, int key) { return Poor(ThreadBackend::split(color, key)); }
    Poor duplicate() { return Poor(ThreadBackend::duplicate()); }
};

/// Trains for ever, unless something throws. `at_step(sync, model, rank)` comes before step 2.
template <class Buckets, class Overlap, class AtStep>
std::vector<Outcome> train(int ranks, GradientStorage storage, AtStep&& at_step, Overlap overlap = {}) {
    return outcomes(ranks, [&](ThreadBackend comm) {
        const int rank = comm.rank();
        // On the heap, gone as soon as the rank unwinds: a late reader is caught by the address sanitizer.
        const auto model = std::make_unique<std::vector<Tensor>>(tensors(model_sizes));
        Reducer<ThreadBackend, Buckets, Overlap> sync(comm, *model, {.gradients = storage}, overlap);
        for (int step = 0; step < 50; ++step) {
            if (step == 2) at_step(sync, *model, rank);
            backward(sync, *model, rank, step);
            sync.finish();
        }
    });
}

template <class AtStep, class Check>
void check_everywhere(AtStep&& at_step, Check&& check) {
    for (const int ranks : rank_counts())
        for (const GradientStorage storage : {GradientStorage::borrowed, GradientStorage::in_buckets})
            for (int guilty = 0; guilty < ranks; ++guilty) {
                const auto here = [&](auto& sync, const auto& model, int rank) {
                    if (rank == guilty) at_step(sync, model);
                };
                for (const auto& result :
                     {train<PerParameter, OverlapBackward>(ranks, storage, here), train<Flat, NoOverlap>(ranks, storage, here),
                      train<PerParameter, OverlapBackward>(ranks, storage, here, OverlapBackward(Progress::thread))})
                    for (int r = 0; r < ranks; ++r) {
                        CAPTURE(ranks);
                        CAPTURE(guilty);
                        CAPTURE(r);
                        const Outcome& outcome = result[static_cast<std::size_t>(r)];
                        INFO(outcome.text);
                        check(outcome, r == guilty);
                        if (r != guilty) {
                            REQUIRE(outcome.error);
                            CHECK(outcome.error->context().peer == guilty);
                            CHECK(outcome.error->context().rank == r);
                        }
                    }
            }
}

}  // namespace

TEST_CASE("a rank that throws in the middle of its backward ends the step on all ranks") {
    check_everywhere(
        [](auto& sync, const auto& model) {
            write(sync.gradient_view(3), Bytes(model[3].gradient.size()));
            sync.mark_ready(3);
            sync.mark_ready(2);
            throw std::runtime_error("out of cheese");
        },
        [](const Outcome& outcome, bool guilty) {
            if (guilty) CHECK(outcome.says("not a gradsync::Error: out of cheese"));
            else CHECK((outcome.is(Errc::peer_failed) && outcome.says("an exception ended its step")));
        });
}

TEST_CASE("mark_ready() throws on every rank if a gradient was marked twice") {
    check_everywhere(
        [](auto& sync, const auto&) {
            sync.mark_ready(1);
            sync.mark_ready(1);
        },
        [](const Outcome& outcome, bool guilty) {
            CHECK(outcome.is(guilty ? Errc::gradient_marked_twice : Errc::peer_failed));
            CHECK(outcome.says("'p1'"));
            CHECK(outcome.says("more than once before finish()"));
        });
}

TEST_CASE("finish() throws on every rank if a gradient was never marked") {
    check_everywhere(
        [](auto& sync, const auto&) {
            for (const std::size_t i : {3u, 2u, 0u}) sync.mark_ready(i);
            sync.finish();
        },
        [](const Outcome& outcome, bool guilty) {
            CHECK(outcome.is(guilty ? Errc::gradient_not_ready : Errc::peer_failed));
            CHECK(outcome.says("'p1'"));
            CHECK(outcome.says("marked 0 of 1 times"));
        });
}

TEST_CASE("a second finish() with nothing marked in between throws on every rank") {
    check_everywhere([](auto& sync, const auto&) { sync.finish(); },
                     [](const Outcome& outcome, bool guilty) {
                         CHECK(outcome.is(guilty ? Errc::gradient_not_ready : Errc::peer_failed));
                         CHECK(outcome.says("4 of 4 gradients"));
                     });
}

TEST_CASE("mark_ready() refuses a frozen parameter, and an index out of range") {
    for (const int ranks : rank_counts(1, 3)) {
        const auto result = outcomes(ranks, [&](ThreadBackend comm) {
            auto model = tensors({10, 20});
            model[0].name = "embedding";
            model[0].requires_grad = false;
            Reducer sync(comm, model);
            const Outcome beyond = outcome_of([&] { sync.mark_ready(2); });
            if (!beyond.is(Errc::invalid_argument) || !beyond.says("parameter index 2 is out of range [0, 2)"))
                throw std::logic_error(beyond.text);
            if (comm.rank() == ranks - 1) sync.mark_ready(0);
            sync.mark_ready(1);
            sync.finish();
        });
        for (int r = 0; r < ranks; ++r) {
            const Outcome& outcome = result[static_cast<std::size_t>(r)];
            INFO(outcome.text);
            CHECK(outcome.is(r == ranks - 1 ? Errc::invalid_argument : Errc::peer_failed));
            CHECK(outcome.says("'embedding' is frozen"));
        }
    }
}

TEST_CASE("a rank that never calls finish: the others reach the time limit, which names it") {
    for (const int ranks : rank_counts(2))
        for (const bool marks : {true, false}) {
            std::atomic<int> launched{0}, waiting{ranks - 1};
            const auto result = outcomes(ranks, [&](ThreadBackend comm) {
                auto model = tensors(model_sizes);
                const int rank = comm.rank();
                Reducer<ThreadBackend, Flat> sync(comm, model);
                backward(sync, model, rank, 0);
                sync.finish();
                if (rank == 1) {
                    if (marks) sync.mark_ready(0);
                    while (waiting != 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
                    return;
                }
                struct Leave {
                    std::atomic<int>& count;
                    ~Leave() { --count; }
                } leave{waiting};
                backward(sync, model, rank, 1);
                // Nobody's limit runs out while another rank but rank 1 is merely slow.
                for (++launched; launched != ranks - 1 && waiting == ranks - 1;) std::this_thread::yield();
                comm.set_timeout(std::chrono::milliseconds(200));
                sync.finish();
            });
            for (int r = 0; r < ranks; ++r) {
                const Outcome& outcome = result[static_cast<std::size_t>(r)];
                INFO(outcome.text);
                if (r == 1) {
                    CHECK(outcome.text.empty());
                    continue;
                }
                REQUIRE(outcome.is(Errc::timeout));
                CHECK(outcome.says(": rank 1 did not start it"));
                CHECK(outcome.says(" (it was bucket " + std::to_string(outcome.error->context().bucket) + ")"));
                CHECK(outcome.error->context().bucket >= 0);
                CHECK(outcome.error->context().peer == 1);
            }
        }
}

TEST_CASE("a rank that leaves without finish() is named on the others") {
    for (const int ranks : rank_counts(2)) {
        const auto result = outcomes(ranks, [&](ThreadBackend comm) {
            auto model = tensors(model_sizes);
            const int rank = comm.rank();
            Reducer<ThreadBackend, Flat> sync(comm, model);
            if (rank == 0) return;
            backward(sync, model, rank, 1);
            sync.finish();
        });
        for (int r = 1; r < ranks; ++r) {
            const Outcome& outcome = result[static_cast<std::size_t>(r)];
            INFO(outcome.text);
            CHECK(outcome.is(Errc::peer_left));
            CHECK(outcome.error->context().peer == 0);
        }
    }
}

namespace {

/// Rank 0 marks one gradient and throws, and catches that where its Reducer is gone and its communicator is not: what the others get.
template <class Overlap>
void check_caught_outside() {
    for (const int ranks : {2, 3}) {
        const auto result = outcomes(ranks, [&](ThreadBackend comm) {
            auto model = tensors(model_sizes);
            const bool guilty = comm.rank() == 0;
            try {
                Reducer<ThreadBackend, PerParameter, Overlap> sync(comm, model);
                sync.mark_ready(3);
                if (guilty) throw std::runtime_error("out of cheese");
                for (const std::size_t i : {2u, 1u, 0u}) sync.mark_ready(i);
                sync.finish();
            } catch (const std::runtime_error& e) {
                if (std::string(e.what()) != "out of cheese") throw;
            }
            comm.barrier().wait();
        });
        for (const Outcome& outcome : result) {
            INFO(outcome.text);
            CHECK(outcome.is(Errc::peer_failed));
            CHECK(outcome.says("rank 0 failed: an exception ended its step"));
        }
    }
}

}  // namespace

TEST_CASE("an exception that ends a step ends it for the others, too, also where nothing is in flight") {
    check_caught_outside<NoOverlap>();
    check_caught_outside<OverlapBackward>();
}

TEST_CASE("an exception between steps does not end the communicator") {
    const auto result = outcomes(3, [&](ThreadBackend comm) {
        auto model = tensors(model_sizes);
        try {
            Reducer<ThreadBackend, PerParameter, OverlapBackward> sync(comm, model);
            backward(sync, model, comm.rank(), 0);
            sync.finish();
            throw std::runtime_error("enough");
        } catch (const Error&) {
            throw;
        } catch (const std::runtime_error&) {
        }
        comm.barrier().wait();
    });
    for (const Outcome& outcome : result) CHECK(outcome.text == "");
}

TEST_CASE("a Reducer that is destroyed in the middle of a step ends the step on all ranks") {
    for (const int ranks : rank_counts(2)) {
        const auto result = outcomes(ranks, [&](ThreadBackend comm) {
            const int rank = comm.rank();
            auto model = std::make_unique<std::vector<Tensor>>(tensors(model_sizes));
            {
                Reducer<ThreadBackend, PerParameter, OverlapBackward> sync(comm, *model);
                sync.mark_ready(3);
                sync.mark_ready(2);
                if (rank != 0) {
                    sync.mark_ready(1);
                    sync.mark_ready(0);
                    sync.finish();
                }
            }
            model.reset();
            comm.barrier().wait();
        });
        for (int r = 0; r < ranks; ++r) {
            const Outcome& outcome = result[static_cast<std::size_t>(r)];
            INFO(outcome.text);
            CHECK(outcome.is(Errc::peer_failed));
            CHECK(outcome.says("rank 0 failed: its Reducer was destroyed during a step; call finish() first"));
        }
    }
}

TEST_CASE("two Reducers that ranks use in different orders are told apart, and both collectives are named") {
    // Both are sound, but the ranks use them in different order.
    for (const int ranks : {2, 3}) {
        const auto result = outcomes(ranks, [&](ThreadBackend comm) {
            auto one = tensors({10, 20}), other = tensors({33, 40}, DType::bf16);
            const int rank = comm.rank();
            Reducer<ThreadBackend, Flat> first(comm, one), second(comm, other);
            for (int k = 0; k < 2; ++k) {
                const bool now_first = (k == 0) == (rank != 1);
                Reducer<ThreadBackend, Flat>& sync = now_first ? first : second;
                backward(sync, now_first ? one : other, rank, 0);
                sync.finish();
            }
        });
        for (const Outcome& outcome : result) {
            INFO(outcome.text);
            CHECK(outcome.is(Errc::collective_mismatch));
            CHECK(outcome.says("all_reduce(mean, f32"));
            CHECK(outcome.says("all_reduce(mean, bf16"));
        }
    }
}

TEST_CASE(
    "two Reducers of equal buckets, marked in another order, are not averaged with one another, nor with a collective of the program's own") {
    for (const int ranks : {2, 3})
        for (const bool own_collective : {false, true}) {
            const auto result = outcomes(ranks, [&](ThreadBackend comm) {
                auto one = tensors({100}), other = tensors({100});
                Reducer<ThreadBackend, Flat, OverlapBackward> first(comm, one), second(comm, other);
                std::vector<float> apart(100);
                const auto start_other = [&] {
                    if (own_collective) comm.all_reduce(buffer(apart), ReduceOp::mean).wait();
                    else second.mark_ready(0);
                };
                if (comm.rank() == 1) start_other();
                first.mark_ready(0);
                if (comm.rank() != 1) start_other();
                first.finish();
                if (!own_collective) second.finish();
            });
            for (const Outcome& outcome : result) {
                INFO(outcome.text);
                CHECK(outcome.is(Errc::collective_mismatch));
                CHECK(outcome.says("rank 0 started all_reduce(mean, f32, 100 elements) for bucket 0 of Reducer #"));
                CHECK(outcome.says(
                    own_collective
                        ? "rank 1 started all_reduce(mean, f32, 100 elements) for a call outside of buckets (of your own, average, "
                        : "rank 1 started all_reduce(mean, f32, 100 elements) for bucket 0 of Reducer #"));
            }
        }
}

TEST_CASE("norms, clipping and rebind_gradient() are refused while gradients are marked") {
    std::vector<std::string> wrong(2);
    const auto result = outcomes(2, [&](ThreadBackend comm) {
        auto model = tensors({10, 20});
        Reducer<ThreadBackend, PerParameter, OverlapBackward> sync(comm, model);
        std::vector<float> elsewhere(10);
        for (int step = 0; step < 2; ++step) {
            sync.mark_ready(1);
            const auto check = [&](const char* name, auto&& call) {
                const Outcome outcome = outcome_of(call);
                if (!outcome.is(Errc::invalid_argument) || !outcome.says(name) || !outcome.says("call finish() first"))
                    wrong[static_cast<std::size_t>(comm.rank())] += std::string(name) + ": " + outcome.text + "; ";
            };
            check("gradient_norm", [&] { sync.gradient_norm(); });
            check("clip_gradients_by_norm", [&] { sync.clip_gradients_by_norm(1); });
            check("clip_gradients_by_value", [&] { sync.clip_gradients_by_value(1); });
            check("rebind_gradient", [&] { sync.rebind_gradient(0, buffer(elsewhere)); });
            sync.mark_ready(0);  // nothing is lost
            sync.finish();
        }
        sync.clip_gradients_by_value(1);
        sync.rebind_gradient(0, buffer(elsewhere));
    });
    for (const std::string& text : wrong) CHECK(text == "");
    for (const Outcome& outcome : result) CHECK(outcome.text == "");
}

TEST_CASE("try_finish, called again and again, throws as finish does: where a rank has left, has stopped, or has not marked all") {
    enum class Fault { left, stopped, forgot };
    for (const int ranks : {2, 3})
        for (const Fault fault : {Fault::left, Fault::stopped, Fault::forgot}) {
            CAPTURE(static_cast<int>(fault));
            const auto limit = std::chrono::seconds(1);
            const std::string wrong = gradsync_test::wrong_each_time(
                [&] {
                    const auto result = outcomes(ranks, [&](ThreadBackend comm) {
                        auto model = tensors(model_sizes);
                        Reducer<ThreadBackend, PerParameter, OverlapBackward> sync(comm, model);
                        backward(sync, model, comm.rank(), 0);
                        while (!sync.try_finish()) std::this_thread::sleep_for(std::chrono::microseconds(100));
                        comm.barrier().wait();
                        comm.set_timeout(limit);
                        const bool guilty = comm.rank() == 0;
                        if (guilty && fault == Fault::left) return;
                        if (guilty && fault == Fault::stopped) std::this_thread::sleep_for(3 * limit);
                        for (const std::size_t i : {3u, 2u, 1u}) sync.mark_ready(i);
                        if (!guilty || fault != Fault::forgot) sync.mark_ready(0);
                        while (!sync.try_finish()) std::this_thread::sleep_for(std::chrono::microseconds(100));
                    });
                    std::string surprises;
                    for (std::size_t r = 0; r < result.size(); ++r) {
                        const Outcome& outcome = result[r];
                        const bool expected = fault != Fault::left ? outcome.is(Errc::timeout) && outcome.says("rank 0 did not start it")
                                              : r == 0             ? outcome.text == ""
                                                                   : outcome.is(Errc::peer_left) && outcome.says("rank 0");
                        if (!expected) surprises += "rank " + std::to_string(r) + ": '" + outcome.text + "'\n";
                    }
                    return surprises;
                },
                fault == Fault::left ? 1 : 3);
            CHECK(wrong == "");
        }
}

namespace {

/// Every rank hears `named` of a step of which `mark` leaves gradients unmarked on all ranks: the first one as its own error, the others,
/// which may look later, perhaps as that rank's failure.
void check_named(const char* named, void (*mark)(Reducer<ThreadBackend, Flat>&)) {
    for (const int ranks : rank_counts(1, 3)) {
        CAPTURE(ranks);
        const auto result = outcomes(ranks, [&](ThreadBackend comm) {
            auto model = tensors(model_sizes);
            Reducer<ThreadBackend, Flat> sync(comm, model);
            comm.set_timeout(std::chrono::milliseconds(300));
            mark(sync);
            std::this_thread::sleep_for(std::chrono::milliseconds(20 * comm.rank()));
            while (!sync.try_finish()) std::this_thread::sleep_for(std::chrono::microseconds(100));
        });
        int own = 0;
        for (const Outcome& outcome : result) {
            INFO(outcome.text);
            CHECK(outcome.says(named));
            own += outcome.is(Errc::gradient_not_ready);
        }
        CHECK(own > 0);
    }
}

}  // namespace

TEST_CASE("try_finish, called again and again, names what no rank has marked") {
    check_named("'p1'", [](auto& sync) {
        for (const std::size_t i : {3u, 2u, 0u}) sync.mark_ready(i);
    });
}

TEST_CASE("try_finish settles no gradient that was marked only under an earlier no_sync(); it names it") {
    check_named("4 of 4 gradients", [](auto& sync) {
        const auto guard = sync.no_sync();
        for (const std::size_t i : {3u, 2u, 1u, 0u}) sync.mark_ready(i);
    });
}

TEST_CASE("after a failure every call says so") {
    for (const int ranks : rank_counts(1, 3)) {
        std::vector<std::string> wrong(static_cast<std::size_t>(ranks));
        const auto result = outcomes(ranks, [&](ThreadBackend comm) {
            auto model = tensors({10, 20});
            const int rank = comm.rank();
            Reducer<ThreadBackend, PerParameter> sync(comm, model, {.averaging = Averaging::weighted_mean});
            sync.set_weight(1);
            const Outcome first = outcome_of([&] {
                sync.mark_ready(1);
                if (rank != 0) sync.mark_ready(0);
                sync.finish();
            });
            const auto refuses = [&](const char* what, auto call) {
                const Outcome outcome = outcome_of(call);
                if (!outcome.is(first.error ? first.error->errc() : Errc()) || !outcome.says("failed earlier and cannot go on") ||
                    !outcome.says("'p0'"))
                    wrong[static_cast<std::size_t>(rank)] += std::string(what) + ": " + outcome.text + "\n";
            };
            if (!first.error || !first.says("'p0'")) wrong[static_cast<std::size_t>(rank)] = first.text;
            refuses("mark_ready", [&] { sync.mark_ready(0); });
            refuses("finish", [&] { sync.finish(); });
            refuses("try_finish", [&] { (void)sync.try_finish(); });
            refuses("begin_step", [&] { (void)sync.begin_step(); });
            refuses("no_sync", [&] { (void)sync.no_sync(); });
            refuses("set_weight", [&] { sync.set_weight(2); });
            refuses("broadcast_parameters", [&] { sync.broadcast_parameters(); });
            refuses("broadcast_buffers", [&] { sync.broadcast_buffers({}); });
            refuses("gradient_view", [&] { sync.gradient_view(0); });
            refuses("record_order", [&] { sync.record_order(); });
            refuses("rebind_gradient", [&] { sync.rebind_gradient(0, sync.parameters()[0].gradient); });
            refuses("gradient_norm", [&] { sync.gradient_norm(); });
            refuses("clip_gradients_by_norm", [&] { sync.clip_gradients_by_norm(1); });
            refuses("clip_gradients_by_value", [&] { sync.clip_gradients_by_value(1); });
            refuses("rebuild_buckets", [&] { (void)sync.rebuild_buckets(); });
            if (sync.statistics().steps != 0) wrong[static_cast<std::size_t>(rank)] += "a failed step was counted";
        });
        for (const std::string& text : wrong) CHECK(text == "");
        (void)result;
    }
}

TEST_CASE("a failure within a broadcast ends the communicator; a root out of range does not") {
    std::vector<std::string> wrong(2, "did not come to its end");
    outcomes(2, [&](ThreadBackend comm) {
        auto model = tensors({10, 20});
        Reducer<ThreadBackend, PerParameter> sync(comm, model);
        std::vector<float> state(5);
        const std::vector<BufferView> buffers{gradsync::buffer(state)};
        std::string text;
        const Outcome none = outcome_of([&] { sync.broadcast_buffers(buffers, 2); });
        if (!none.is(Errc::invalid_argument) || !none.says("there is no rank 2 among 2")) text += "root: " + none.text;
        const std::vector<BufferView> nowhere{{nullptr, 5, gradsync::DType::f32}};
        const Outcome null = outcome_of([&] { sync.broadcast_buffers(nowhere); });
        if (!null.is(Errc::invalid_argument) || !null.says("buffer 0 of 1 has no memory")) text += "memory: " + null.text;
        const Outcome good = outcome_of([&] { sync.broadcast_buffers({gradsync::buffer(state)}); });  // it is as good as before
        if (good.error) text += "good: " + good.text;
        const Outcome first = outcome_of([&] {
            comm.barrier().wait();
            if (comm.rank() == 0) comm.fail("no more power");
            sync.broadcast_buffers(buffers);
        });
        const Outcome second = outcome_of([&] { sync.mark_ready(0); });
        if (!first.is(Errc::peer_failed) || !first.says("no more power")) text += "first: " + first.text;
        if (comm.rank() == 0 && (!second.is(Errc::peer_failed) || !second.says("failed earlier"))) text += "second: " + second.text;
        wrong[static_cast<std::size_t>(comm.rank())] = text;
    });
    for (const std::string& text : wrong) CHECK(text == "");
}

TEST_CASE("a failure within mark_ready ends the communicator") {
    // The last mark of rank 1 starts a bucket after rank 0 has failed.
    std::atomic<bool> failed{false};
    std::string text;
    outcomes(2, [&](ThreadBackend comm) {
        auto model = tensors({10, 20});
        Reducer<ThreadBackend, PerParameter, OverlapBackward> sync(comm, model);
        if (comm.rank() == 0) {
            comm.fail("no more power");
            failed = true;
            return;
        }
        while (!failed) std::this_thread::yield();
        const Outcome first = outcome_of([&] { sync.mark_ready(1); });
        const Outcome second = outcome_of([&] { sync.mark_ready(0); });
        if (!first.is(Errc::peer_failed) || !first.says("no more power")) text += "first: " + first.text;
        if (!second.is(Errc::peer_failed) || !second.says("failed earlier")) text += "second: " + second.text;
    });
    CHECK(text == "");
}

TEST_CASE("a rank that has no memory for its buckets or shards tells the others") {
    for (const bool sharded : {false, true}) {
        std::atomic<bool> told{false};
        const auto result = outcomes(2, [&](ThreadBackend comm) {
            Poor poor(std::move(comm));
            const int rank = poor.rank();
            auto model = tensors({10, 20});
            const auto step = [](auto& sync) {
                sync.mark_ready();
                sync.finish();
            };
            const Outcome outcome = outcome_of([&] {
                if (sharded) {
                    ShardedOptimizer sync(poor, model, Sgd{1.0f});
                    step(sync);
                } else {
                    Reducer sync(poor, model, {.gradients = GradientStorage::in_buckets});
                    step(sync);
                }
            });
            if (rank == 0) told = true;
            while (!told) std::this_thread::yield();  // the end of this rank does not tell
            if (!outcome.text.empty()) throw std::runtime_error(outcome.text);
        });
        for (const Outcome& outcome : result) CHECK_MESSAGE(outcome.says("no memory for"), outcome.text);
    }
}

TEST_CASE("a communicator that failed before: every collective call throws") {
    const auto result = outcomes(2, [](ThreadBackend comm) {
        auto model = tensors({10, 20});
        Reducer sync(comm, model);
        if (comm.rank() == 0) comm.fail("no more power");
        (void)sync.begin_step();
    });
    for (const Outcome& outcome : result) {
        INFO(outcome.text);
        CHECK(outcome.is(Errc::peer_failed));
    }
}
