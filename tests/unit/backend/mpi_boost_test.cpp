// SPDX-License-Identifier: BSL-1.0
// ctest: MPI RANKS 1 2 LIBRARIES Boost::mpi
// MpiBackend on a communicator of Boost.MPI, in a program that goes on using Boost.MPI.
#include <gradsync/backend/mpi.hpp>

#include <doctest/doctest.h>

#include <functional>
#include <optional>
#include <span>
#include <vector>

#include <boost/mpi/collectives.hpp>
#include <boost/mpi/communicator.hpp>
#include <boost/mpi/environment.hpp>
#include <gradsync/gradsync.hpp>

namespace {

/// Until the program ends.
boost::mpi::environment& environment() {
    static boost::mpi::environment only(boost::mpi::threading::multiple);
    return only;
}

}  // namespace

TEST_CASE("MpiBackend adopts a boost::mpi::communicator, which stays the program's own") {
    environment();
    REQUIRE(boost::mpi::environment::initialized());
    for (const bool shared_memory : {true, false}) {
        std::optional<gradsync::MpiBackend> comm;
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
