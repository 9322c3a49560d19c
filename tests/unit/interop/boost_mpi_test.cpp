// SPDX-License-Identifier: BSL-1.0
// ctest: MPI RANKS 1 2 3 LIBRARIES gradsync::mpi
// MpiBackend in a program that goes on using Boost.MPI.
#include <gradsync/interop/boost_mpi.hpp>

#include <doctest/doctest.h>

#include <functional>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include <boost/mpi/collectives.hpp>
#include <gradsync/gradsync.hpp>

#include "support/ranks.hpp"

using gradsync::Errc;
using gradsync::MpiBackend;
using gradsync::MpiCommunicator;
using gradsync_test::Outcome;
using gradsync_test::outcome_of;

namespace {

/// Until the program ends.
boost::mpi::environment& environment() {
    static boost::mpi::environment only(boost::mpi::threading::multiple, false);
    return only;
}

void check_sum(MpiBackend& comm) {
    std::vector<float> ones(1000, 1.0f);
    comm.all_reduce(gradsync::buffer(ones), gradsync::ReduceOp::sum).wait();
    CHECK(ones == std::vector<float>(1000, static_cast<float>(comm.size())));
}

/// How many of the communicators that `watch_frees` was called for, and their duplicates, were freed on this rank.
int freed = 0;

void watch_frees(const boost::mpi::communicator& comm) {
    int key = MPI_KEYVAL_INVALID;
    MPI_Comm_create_keyval(
        MPI_COMM_DUP_FN, [](MPI_Comm, int, void*, void*) { return ++freed, static_cast<int>(MPI_SUCCESS); }, &key, nullptr);
    MPI_Comm_set_attr(comm, key, nullptr);
    MPI_Comm_free_keyval(&key);  // when the last attribute goes
}

/// Until as many are freed on all ranks: a world whose handles are gone goes when its messages are over and another one is made.
void expect_freed(int expected) {
    const boost::mpi::communicator world;
    for (int more = 0, everywhere = -1; more < 1000 && (everywhere < expected || more < 5); ++more) {
        MpiBackend(world, {.shared_memory = false});
        everywhere = boost::mpi::all_reduce(world, freed, boost::mpi::minimum<int>());
    }
    CHECK(freed == expected);
}

template <class Kind>
void check_kind(Kind kind, bool duplicates) {
    for (const bool shared_memory : {true, false}) {
        CAPTURE(shared_memory);
        freed = 0;
        {
            std::optional<MpiBackend> comm;
            {
                const boost::mpi::communicator part = boost::mpi::communicator().split(0);
                watch_frees(part);
                comm.emplace(part, gradsync::MpiOptions{.shared_memory = shared_memory}, kind);
                check_sum(*comm);
                CHECK(freed == 0);
                CHECK(part.size() == comm->size());
            }  // the program's last copy
            CHECK(freed == (shared_memory || duplicates ? 1 : 0));
            check_sum(*comm);
        }
        expect_freed(duplicates && !shared_memory ? 2 : 1);
    }
}

}  // namespace

// The first test case: the others start MPI.
TEST_CASE("MpiBackend: a boost::mpi::communicator without an environment is told, instead of MPI's end of the process") {
    REQUIRE(!boost::mpi::environment::initialized());
    const boost::mpi::communicator world;
    for (const Outcome& outcome :
         {outcome_of([&] { MpiBackend{world}; }), outcome_of([&] { MpiBackend(world, {}, boost::mpi::comm_attach); }),
          outcome_of([&] { gradsync::MpiRendezvous{world}; })}) {
        INFO(outcome.text);
        CHECK(outcome.is(Errc::invalid_argument));
        CHECK(outcome.says("MPI is not initialised; make a boost::mpi::environment, or call MPI_Init, first"));
    }
}

TEST_CASE("MpiBackend adopts a boost::mpi::communicator, which stays the program's own") {
    environment();
    REQUIRE(boost::mpi::environment::initialized());
    for (const bool shared_memory : {true, false}) {
        std::optional<MpiBackend> comm;
        {
            const boost::mpi::communicator world;
            const boost::mpi::communicator reversed = world.split(0, -world.rank());
            comm.emplace(reversed, gradsync::MpiOptions{.shared_memory = shared_memory});
            CHECK(comm->rank() == reversed.rank());
            CHECK(comm->size() == reversed.size());
        }  // freed here: the backend does not need it

        const boost::mpi::communicator world;
        std::vector<float> gradient(1000, static_cast<float>(world.rank() + 1));
        std::vector gradients = {std::span(gradient)};
        gradsync::Reducer sync(*comm, gradients);
        sync.mark_ready(0);
        sync.finish();
        const float sum = boost::mpi::all_reduce(world, static_cast<float>(world.rank() + 1), std::plus<>());
        CHECK(gradient == std::vector<float>(1000, sum / static_cast<float>(world.size())));
    }
}

TEST_CASE("MpiBackend: a boost::mpi::communicator that it duplicates, attaches to or takes is freed once, when nobody needs it") {
    environment();
    SUBCASE("comm_duplicate") { check_kind(boost::mpi::comm_duplicate, true); }
    SUBCASE("comm_attach") { check_kind(boost::mpi::comm_attach, false); }
    SUBCASE("comm_take_ownership") { check_kind(boost::mpi::comm_take_ownership, false); }
    SUBCASE("MpiCommunicator::duplicate") { check_kind(MpiCommunicator::duplicate, true); }
    SUBCASE("MpiCommunicator::attach") { check_kind(MpiCommunicator::attach, false); }
    SUBCASE("MpiCommunicator::take_ownership") { check_kind(MpiCommunicator::take_ownership, false); }
}

TEST_CASE("MpiBackend: a boost::mpi::communicator that cannot be used so is refused") {
    environment();
    const boost::mpi::communicator world, empty(MPI_COMM_NULL, boost::mpi::comm_attach);
    const auto refused = [](const char* text, auto&& make) {
        const Outcome outcome = outcome_of(make);
        INFO(outcome.text);
        CHECK(outcome.is(Errc::invalid_argument));
        CHECK(outcome.says(text));
    };
    refused("MPI_COMM_NULL has no ranks; make no backend", [&] { MpiBackend{empty}; });
    refused("MPI_COMM_NULL has no ranks; make no backend", [&] { MpiBackend(empty, {}, boost::mpi::comm_take_ownership); });
    refused("cannot be taken; let the backend attach or duplicate", [&] { MpiBackend(world, {}, boost::mpi::comm_take_ownership); });
    refused("unknown boost::mpi::comm_create_kind", [&] { MpiBackend(world, {}, static_cast<boost::mpi::comm_create_kind>(3)); });
    const boost::mpi::communicator part = world.split(0);
    MpiBackend first(part, {}, boost::mpi::comm_attach);
    refused("another backend had this communicator before", [&] { MpiBackend(part, {}, boost::mpi::comm_attach); });
    check_sum(first);
}

TEST_CASE("with_typed_errors: an exception of Boost.MPI is an Error that names function, rank and remedy") {
    environment();
    const boost::mpi::communicator world, empty(MPI_COMM_NULL, boost::mpi::comm_attach);
    const std::string rank = "rank " + std::to_string(world.rank()) + ": ";
    const auto failure = [&](auto&& f) {
        const Outcome outcome = outcome_of([&] { gradsync::with_typed_errors(f); });
        INFO(outcome.text);
        REQUIRE(outcome.error);
        CHECK(outcome.text.find(rank + outcome.error->context().operation + ": MPI_ERR_") == 0);
        CHECK(outcome.error->context().rank == world.rank());
        return outcome;
    };
    Outcome outcome = failure([&] { return empty.rank(); });
    CHECK(outcome.is(Errc::invalid_argument));
    CHECK(outcome.text == rank +
                              "MPI_Comm_rank: MPI_ERR_COMM: invalid communicator; this rank is in no such communicator (MPI_COMM_NULL), "
                              "or it was freed; pass one that the rank is in, and free it later");
    outcome = failure([&] { world.send(world.size(), 0); });
    CHECK(outcome.is(Errc::invalid_argument));
    CHECK(outcome.says("MPI_ERR_RANK: invalid rank; correct this argument of the call"));
    outcome = failure([] { throw boost::mpi::exception("MPI_Recv", MPI_ERR_TRUNCATE); });
    CHECK(outcome.is(Errc::collective_mismatch));
    outcome = failure([] { throw boost::mpi::exception("MPI_Allreduce", MPI_ERR_OTHER); });
    CHECK(outcome.is(Errc::peer_failed));
    CHECK(outcome.says("; look at MPI's own output"));
}

TEST_CASE("with_typed_errors: results and other exceptions pass") {
    environment();
    int value = 3;
    int& same = gradsync::with_typed_errors([&]() -> int& { return value; });
    CHECK(&same == &value);
    CHECK_THROWS_WITH_AS(gradsync::with_typed_errors([] { throw std::runtime_error("mine"); }), "mine", std::runtime_error);
}
