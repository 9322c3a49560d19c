// SPDX-License-Identifier: BSL-1.0
// ctest: COST 20
// Ranks that keep their state, and are started again by this test, which holds the memory.
#include <gradsync/elastic/kept_state.hpp>

#include <doctest/doctest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "support/restarted_processes.hpp"
#include "support/says.hpp"
#include "support/standard_error.hpp"
#include "support/temporary_directory.hpp"

using namespace std::chrono_literals;
using gradsync::BufferView;
using gradsync::Errc;
using gradsync::Error;
using gradsync::KeptState;
using gradsync::Membership;
using gradsync::StateKind;
using gradsync::TcpBackend;
using gradsync_test::content_of;
using gradsync_test::Processes;
using gradsync_test::says;

namespace {

/// What rank `rank` has after `step` steps, of which it has `own` for itself.
double value(std::uint64_t step, int rank, bool own, std::size_t i) {
    return static_cast<double>(step * 1000 + i) + (own ? 0.125 * rank : 0);
}

/// Steps that check the state each time. `at(step, comm)`: what happens in a step.
template <class At>
void train(Membership& job, StateKind kind, std::size_t count, std::uint64_t steps, At&& at) {
    const bool own = kind == StateKind::own;
    while (!job.is_over()) try {
            TcpBackend comm = job.connect({.timeout = 20s});
            std::vector<double> first(count / 3), second(count - count / 3);
            std::uint64_t step = 0;
            const auto set = [&] {
                for (std::size_t i = 0; i < count; ++i)
                    (i < first.size() ? first[i] : second[i - first.size()]) = value(step, comm.rank(), own, i);
            };
            set();
            KeptState kept(
                job, comm,
                {gradsync::buffer(first), BufferView(static_cast<double*>(nullptr), 0), gradsync::buffer(second), BufferView(&step, 1)},
                kind);
            if (kept.newest()) {
                const std::uint64_t restored = kept.restore();
                if (restored != step || restored != *kept.newest()) throw std::runtime_error("another step is restored");
                for (std::size_t i = 0; i < count; ++i)
                    if ((i < first.size() ? first[i] : second[i - first.size()]) != value(step, comm.rank(), own, i))
                        throw std::runtime_error("another state is restored");
            } else {
                kept.keep(0);
            }
            at(step, comm, true);
            while (step < steps) {
                comm.barrier().wait();
                at(step, comm, false);
                ++step;
                set();
                kept.keep(step);
            }
            job.end(comm);
        } catch (const Error& error) {
            if (!job.goes_on(error)) throw;
        }
}

}  // namespace

TEST_CASE("ranks go on from what all have kept, whoever is killed") {
    for (const StateKind kind : {StateKind::replicated, StateKind::own})
        for (const int size : {1, 2, 3, 4}) {
            CAPTURE(size);
            const gradsync_test::TemporaryDirectory folder;
            const auto reached = [&](std::uint64_t step) { return folder.path() / ("step-" + std::to_string(step)); };
            const auto killed = [&](std::uint64_t step) { return folder.path() / ("killed-" + std::to_string(step)); };
            Processes ranks(size, [&](Membership& job, int, const std::string&) {
                train(job, kind, 1000, 60, [&](std::uint64_t step, TcpBackend& comm, bool begins) {
                    if (begins && comm.rank() == 0) std::ofstream(folder.path() / "begins", std::ios::app) << step << " ";
                    if (!begins && comm.rank() == 0) std::ofstream(reached(step)) << "here";
                    if (!begins) std::this_thread::sleep_for(2ms);
                    for (const std::uint64_t loss : {10u, 25u, 40u})  // the test may be slow to come
                        while (!begins && step == loss + 3 && !std::filesystem::exists(killed(loss))) std::this_thread::sleep_for(1ms);
                });
            });
            for (const std::uint64_t step : {10u, 25u, 40u}) {
                ranks.until([&] { return std::filesystem::exists(reached(step)); });
                const bool all = step == 40;
                for (int rank = 0; rank < size; ++rank)
                    if (all || rank == static_cast<int>(step) % size) ranks.send(rank, SIGKILL);
                std::ofstream(killed(step)) << "here";
                for (int rank = 0; rank < size; ++rank)
                    if (all || rank == static_cast<int>(step) % size) ranks.replace(rank);
            }
            for (const std::string& end : ranks.ends()) CHECK(end == "done");
            // At most the step under way is done again.
            std::ifstream begins(folder.path() / "begins");
            std::vector<std::uint64_t> from;
            for (std::uint64_t step = 0; begins >> step;) from.push_back(step);
            REQUIRE(from.size() >= 4);
            CHECK(from[0] == 0);
            for (std::size_t i = 1; i < 4; ++i) CHECK(from[i] >= std::vector<std::uint64_t>{10, 25, 40}[i - 1]);
        }
}

TEST_CASE("a second keep that others have not made is refused, and names them") {
    const gradsync_test::TemporaryDirectory folder;
    Processes ranks(2, [&](Membership& job, int, const std::string&) {
        TcpBackend comm = job.connect({.timeout = 20s});
        std::vector<float> state(100);
        KeptState kept(job, comm, {gradsync::buffer(state)});
        if (comm.rank() == 0) {
            kept.keep(1);
            try {
                kept.keep(2);
                throw std::runtime_error("nothing was thrown");
            } catch (const Error& error) {
                if (error.errc() != Errc::invalid_argument || error.context().peer != 1 ||
                    !says(error.what(), "this rank has kept step 1, and rank 1 none"))
                    throw;
            }
        }
        comm.barrier().wait();
        if (comm.rank() == 1) kept.keep(1);
        comm.barrier().wait();
        kept.keep(2);
        comm.barrier().wait();
    });
    for (const std::string& end : ranks.ends()) CHECK(end == "done");
}

TEST_CASE("a rank that is killed before all have kept their first state: nothing is kept, and all begin anew") {
    const gradsync_test::TemporaryDirectory folder;
    Processes ranks(2, [&](Membership& job, int start, const std::string&) {
        while (!job.is_over()) try {
                TcpBackend comm = job.connect({.timeout = 20s});
                std::vector<double> state(1000, start);  // no two starts have the same
                KeptState kept(job, comm, {gradsync::buffer(state)}, StateKind::own);
                if (kept.newest()) throw std::runtime_error("something is kept");
                if (start == 2) std::this_thread::sleep_for(1h);
                kept.keep(0);
                if (!std::filesystem::exists(folder.file("kept"))) std::ofstream(folder.file("kept")) << "here";
                comm.barrier().wait();
                kept.keep(1);
                comm.barrier().wait();
                job.end(comm);
            } catch (const Error& error) {
                if (!job.goes_on(error)) throw;
            }
    });
    ranks.until([&] { return std::filesystem::exists(folder.file("kept")); });
    ranks.replace(1);
    for (const std::string& end : ranks.ends()) CHECK(end == "done");
}

TEST_CASE("what newer states have replaced cannot be restored, and a job keeps one state of all ranks") {
    Processes ranks(2, [&](Membership& job, int, const std::string&) {
        TcpBackend comm = job.connect({.timeout = 20s});
        std::vector<float> state(100);
        const auto refuses = [&](const std::string& words, auto&& f) {
            try {
                f();
            } catch (const Error& error) {
                if (error.errc() == Errc::invalid_argument && says(error.what(), words)) return;
                throw;
            }
            throw std::runtime_error("not refused: " + words);
        };
        TcpBackend alone = comm.split(comm.rank(), 0);
        refuses("takes the backend of all ranks", [&] { KeptState(job, alone, {gradsync::buffer(state)}); });
        {
            KeptState first(job, comm, {gradsync::buffer(state)});
            refuses("the job has one already", [&] { KeptState(job, comm, {gradsync::buffer(state)}); });
            first.keep(7);
            comm.barrier().wait();
        }
        {
            KeptState again(job, comm, {gradsync::buffer(state)});
            if (again.restore() != 7) throw std::runtime_error("the step is lost");
            again.keep(7);  // a loop may begin with it
            comm.barrier().wait();
            refuses("comes after step 7; numbers must grow", [&] { again.keep(7); });
            comm.barrier().wait();
        }
        KeptState kept(job, comm, {gradsync::buffer(state)});
        if (kept.newest() != 7u || kept.restore() != 7) throw std::runtime_error("the step is lost");
        refuses("comes after step 7; numbers must grow", [&] { kept.keep(6); });
        for (const std::uint64_t step : {8u, 9u}) {
            kept.keep(step);
            comm.barrier().wait();
        }
        refuses("keep() has replaced the state", [&] { (void)kept.restore(); });
        for (const std::uint64_t step : {9u, 3u}) refuses("comes after step 9; numbers must grow", [&] { kept.keep(step); });
        comm.barrier().wait();
    });
    for (const std::string& end : ranks.ends()) CHECK(end == "done");
}

TEST_CASE("replicated states that differ are refused at the second keep, and later ones soon") {
    for (const auto& found : {std::pair{0u, 1u}, {1u, 3u}, {4u, 7u}, {7u, 15u}}) {
        const unsigned differs_from = found.first, last = found.second;  // clang 14 captures no bindings
        Processes ranks(2, [&](Membership& job, int, const std::string&) {
            TcpBackend comm = job.connect({.timeout = 20s});
            std::vector<float> state(100);
            KeptState kept(job, comm, {gradsync::buffer(state)});
            for (std::uint64_t step = 0; step <= last; ++step) {
                if (step == differs_from) state[50] += static_cast<float>(comm.rank());
                if (step == last) std::this_thread::sleep_for(comm.rank() * 20ms);
                kept.keep(step);
                if (step == last) return;
                comm.barrier().wait();
            }
        });
        for (const std::string& end : ranks.ends()) CHECK(says(end, "if ranks differ, as in their random numbers, pass StateKind::own"));
    }
}

TEST_CASE("the state of another model is refused on all ranks, and what one rank lacks, too") {
    const gradsync_test::TemporaryDirectory folder;
    enum class Case { another_model, another_name, not_the_same, no_memory, nobody_holds };
    for (const Case wrong : {Case::another_model, Case::another_name, Case::not_the_same, Case::no_memory, Case::nobody_holds}) {
        Processes ranks(2, [&](Membership& job, int, const std::string&) {
            TcpBackend comm = job.connect({.timeout = wrong == Case::nobody_holds ? 1s : 20s});
            std::vector<float> state(100);
            if (wrong == Case::not_the_same && comm.rank() == 1) state.resize(101);
            if (wrong == Case::another_model || wrong == Case::another_name) {
                KeptState(job, comm, {gradsync::buffer(state)}, StateKind::own, "model A").keep(1);
                comm.barrier().wait();
                if (wrong == Case::another_model) state.resize(comm.rank() == 0 ? 100 : 101);
            }
            BufferView view = gradsync::buffer(state);
            if (wrong == Case::no_memory && comm.rank() == 1) view.count = std::numeric_limits<std::size_t>::max() / 64;
            const KeptState kept(job, comm, {view}, wrong == Case::not_the_same ? StateKind::replicated : StateKind::own,
                                 wrong == Case::another_name ? "model B" : "model A");
        });
        if (wrong == Case::nobody_holds) ranks.hold_nothing();
        const auto ends = ranks.ends();
        CAPTURE(ends[0]);
        CAPTURE(ends[1]);
        if (wrong == Case::another_model) CHECK(says(ends[1], "the kept state of rank 1 is of another model or another number of ranks"));
        if (wrong == Case::another_name) CHECK(says(ends[0], "the kept state of rank 0 is of another model"));
        if (wrong == Case::not_the_same) CHECK(says(ends[0], "rank 1 has 404 bytes of state, rank 0 400"));
        if (wrong == Case::no_memory) CHECK(says(ends[0], "rank 1 cannot keep its state; look at its error"));
        if (wrong == Case::no_memory) CHECK(says(ends[1], "needs more than the"));
        if (wrong == Case::nobody_holds)
            CHECK(says(ends[0], "nobody holds the memory of rank 0; start the ranks with gradsync_run --restarts K"));
    }
}

TEST_CASE("without a store nothing is kept, and a line says so") {
    Membership job(gradsync::Job{});
    TcpBackend comm = job.connect();
    std::vector<float> state(10);
    const auto make = [&] { (void)KeptState(job, comm, {gradsync::buffer(state)}); };
    CHECK(says(gradsync_test::written_by(make), "without a store KeptState keeps nothing; start the ranks with gradsync_run --restarts K"));
    KeptState kept(job, comm, {gradsync::buffer(state)});
    CHECK(!kept.newest());
    kept.keep(1);
    kept.keep(2);
    CHECK(!kept.newest());
    CHECK_THROWS_WITH_AS((void)kept.restore(), doctest::Contains("nothing is kept"), Error);
}
