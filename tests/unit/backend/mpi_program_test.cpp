// SPDX-License-Identifier: BSL-1.0
// ctest: MPI RANKS 2 4
// MpiBackend in a program that uses MPI itself, and lets in its main thread alone.
#include <gradsync/backend/mpi.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <gradsync/gradsync.hpp>

namespace {

using gradsync::MpiBackend;
using gradsync::MpiCommunicator;

/// Handles that are still there when MPI is finalised.
std::vector<MpiBackend>& kept() {
    static std::vector<MpiBackend> all;
    return all;
}

/// Until the program ends.
struct MpiOfProgram {
    int rank = 0, size = 1;
    MpiOfProgram() {
        kept();  // goes after this
        int provided = 0;
        MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &provided);
        MPI_Comm_rank(MPI_COMM_WORLD, &rank);
        MPI_Comm_size(MPI_COMM_WORLD, &size);
    }
    ~MpiOfProgram() { MPI_Finalize(); }
};
const MpiOfProgram& mpi() {
    static const MpiOfProgram only;
    return only;
}

/// Of `backend`'s ranks.
int sum_of_ranks(MpiBackend& backend) {
    std::int32_t sum = backend.rank();
    backend.all_reduce(gradsync::buffer(std::span(&sum, 1)), gradsync::ReduceOp::sum).wait();
    return sum;
}

int sum_up_to(int size) { return size * (size - 1) / 2; }

void ignore_error(MPI_Comm*, int*, ...) {}

MPI_Errhandler handler_of(MPI_Comm comm) {
    MPI_Errhandler handler = MPI_ERRHANDLER_NULL;
    MPI_Comm_get_errhandler(comm, &handler);
    return handler;
}

}  // namespace

TEST_CASE("MpiBackend leaves the error handler of the program's communicator as it is") {
    mpi();
    MPI_Errhandler own = MPI_ERRHANDLER_NULL;
    MPI_Comm_create_errhandler(ignore_error, &own);
    for (const MPI_Errhandler handler :
         {static_cast<MPI_Errhandler>(MPI_ERRORS_ARE_FATAL), static_cast<MPI_Errhandler>(MPI_ERRORS_RETURN), own})
        for (const bool shared_memory : {true, false}) {
            MPI_Comm comm = MPI_COMM_NULL;
            MPI_Comm_dup(MPI_COMM_WORLD, &comm);
            MPI_Comm_set_errhandler(comm, handler);
            {
                MpiBackend backend(comm, {.shared_memory = shared_memory});
                CHECK(handler_of(comm) == handler);
                CHECK(sum_of_ranks(backend) == sum_up_to(mpi().size));
            }
            CHECK(handler_of(comm) == handler);
            MPI_Comm_free(&comm);
        }
    MPI_Errhandler_free(&own);
}

TEST_CASE("MpiBackend refuses an intercommunicator") {
    const int half = mpi().rank * 2 / mpi().size;
    MPI_Comm local = MPI_COMM_NULL, both = MPI_COMM_NULL, merged = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, half, mpi().rank, &local);
    MPI_Intercomm_create(local, 0, MPI_COMM_WORLD, half == 0 ? mpi().size / 2 : 0, 1, &both);
    CHECK_THROWS_WITH_AS(MpiBackend{both}, doctest::Contains("make one of them first (MPI_Intercomm_merge)"), gradsync::Error);
    MPI_Intercomm_merge(both, half, &merged);
    MpiBackend backend(merged);
    CHECK(sum_of_ranks(backend) == sum_up_to(mpi().size));
    for (MPI_Comm* comm : {&local, &both, &merged}) MPI_Comm_free(comm);
}

TEST_CASE("MpiBackend works on MPI_COMM_SELF, which has one rank") {
    mpi();
    MpiBackend alone(MPI_COMM_SELF);
    CHECK(alone.size() == 1);
    CHECK(alone.describe() == "1 process");
    std::vector<float> gradient(100, 3.0f);
    std::vector gradients = {std::span(gradient)};
    gradsync::Reducer sync(alone, gradients);
    sync.mark_ready(0);
    sync.finish();
    CHECK(gradient == std::vector<float>(100, 3.0f));
}

TEST_CASE("MpiBackend: parts of a communicator are made and used, also where they are freed in another order on other ranks") {
    MPI_Comm parts[3];
    for (int k = 0; k < 3; ++k) MPI_Comm_split(MPI_COMM_WORLD, k == 0 ? 0 : mpi().rank % 2, mpi().rank, &parts[k]);
    std::vector<MpiBackend> backends;
    for (const MPI_Comm part : parts)
        for (const bool shared_memory : {true, false}) backends.emplace_back(part, gradsync::MpiOptions{.shared_memory = shared_memory});
    for (int k = 0; k < 3; ++k) MPI_Comm_free(&parts[mpi().rank % 2 ? k : 2 - k]);
    for (MpiBackend& backend : backends) CHECK(sum_of_ranks(backend) == sum_up_to(backend.size()));
    while (!backends.empty()) backends.erase(mpi().rank % 2 ? backends.begin() : backends.end() - 1);
    MpiBackend world(MPI_COMM_WORLD, {.shared_memory = false});
    CHECK(sum_of_ranks(world) == sum_up_to(mpi().size));
}

TEST_CASE("MpiBackend: tags of a part of a communicator are those of the whole") {
    MPI_Comm part = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, 0, mpi().rank, &part);
    const gradsync::detail::MpiTransport transport(part, gradsync::detail::mpi_owner(part), true);
    CHECK(transport.last_stream() == gradsync::bootstrap::liveness_tag() - 1);
    CHECK(transport.last_stream() > 32767);  // no library of today has as few as the standard allows
}

TEST_CASE("MpiBackend: groups say how they reach one another, not how the whole does") {
    if (mpi().size != 4) return;
    MpiBackend whole(MPI_COMM_WORLD, {.domain = mpi().rank / 2});
    REQUIRE(whole.describe() == "4 processes on 2 machines that share memory on each machine, and send messages between them");
    const MpiBackend here = whole.split(mpi().rank / 2, 0), across = whole.split(mpi().rank % 2, 0), alone = whole.split(mpi().rank, 0);
    CHECK(here.describe() == "2 processes that share memory");
    CHECK(across.describe() == "2 processes on 2 machines that send messages (one on each machine)");
    CHECK(alone.describe() == "1 process");
    const MpiBackend three = whole.split(mpi().rank == 3, 0);
    CHECK(three.describe() ==
          (mpi().rank == 3 ? "1 process" : "3 processes on 2 machines that share memory on each machine, and send messages between them"));
}

TEST_CASE("MpiBackend: marks make progress if MPI does not let the progress thread in") {
    MpiBackend comm(MPI_COMM_WORLD, {.domain = mpi().rank});
    CHECK(!comm.wants_progress_thread());
    std::vector<std::vector<float>> gradients(8, std::vector<float>(50'000, static_cast<float>(mpi().rank)));
    gradsync::Reducer sync(comm, gradients, {}, gradsync::PerParameter(), gradsync::OverlapBackward(gradsync::Progress::thread));
    for (int step = 0; step < 3; ++step) {
        for (auto& gradient : gradients) gradient.assign(gradient.size(), static_cast<float>(mpi().rank));
        for (std::size_t i = gradients.size(); i-- > 0;) sync.mark_ready(i);
        sync.finish();
        for (const auto& gradient : gradients)
            CHECK(gradient.front() == static_cast<float>(sum_up_to(mpi().size)) / static_cast<float>(mpi().size));
    }
}

TEST_CASE("MpiBackend: handles may outlive MPI") {
    mpi();
    for (const bool shared_memory : {true, false})
        kept().emplace_back(MPI_COMM_WORLD, gradsync::MpiOptions{.shared_memory = shared_memory});
    kept().emplace_back(MPI_COMM_WORLD, gradsync::MpiOptions{.domain = mpi().rank * 2 / mpi().size});
    for (MpiBackend& backend : kept()) CHECK(sum_of_ranks(backend) == sum_up_to(mpi().size));
}
